"""The gradient of a determinant, where it is to be differentiated again.

PyTorch takes it from the equation A^H X = conj(det) grad I where a matrix can be inverted, and from the singular values
where it can't. On anything but plain tensors it takes all from the singular values, which is slow and ends in 0/0 at
the third order. So which matrices of a batch are singular is looked at here, as eager looks. Checked on torch 2.13.0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ...errors import UnsupportedDataDependentError

__all__ = ["DETERMINANTS", "watch_determinant"]

DETERMINANTS: Any = (torch.linalg.det, torch.det, torch.Tensor.det)


def watch_determinant(result: Any, matrix: Any) -> None:
    """Have the node of `result`, the determinant of `matrix`, give the gradient that eager's gives."""
    node = result.grad_fn if is_stand_in(result) else None
    if node is not None and node.name() == "LinalgDetBackward0":
        node.register_hook(functools.partial(_instead, matrix))


def _instead(matrix: torch.Tensor, gradients: tuple[Any, ...], incoming: tuple[Any, ...]) -> Any:
    """After the node has run: (the gradient,), or None to leave it as it is."""
    if not torch.is_grad_enabled() or gradients[0] is None or incoming[0] is None:
        return None
    if matrix.shape[-1] == 1 or matrix.numel() == 0:
        return None
    det = _determinant(matrix)
    singular = det.detach().abs() < 100.0 * torch.finfo(matrix.dtype).eps
    try:
        count = int(singular.sum().item())
    except UnsupportedDataDependentError:
        return None
    if count == singular.numel():
        return None
    scaled = incoming[0] * det.conj()
    if not count:
        return (_of_regular(matrix, scaled),)
    regular, part = singular.logical_not(), matrix[singular]
    (of_part,) = torch.autograd.grad(_determinant(part), part, incoming[0][singular], create_graph=True)
    whole = torch.empty_like(matrix).index_put((singular,), of_part)
    return (whole.index_put((regular,), _of_regular(matrix[regular], scaled[regular])),)


def _determinant(matrix: torch.Tensor) -> torch.Tensor:
    det: torch.Tensor = torch.linalg.det(matrix)
    watch_determinant(det, matrix)
    return det


def _of_regular(matrix: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    right = torch.diag_embed(scaled.unsqueeze(-1).expand(matrix.shape[:-1])).mT
    found: torch.Tensor = torch.linalg.solve(matrix.mH, right)
    return found
