"""The recorder's treatment of each operator, worked out at first sight."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.engine import current_autograd_node, sequence_nr_of
from ..._torch.ops import Args, Kwargs, OpOverload
from ..._torch.stand_ins import ABSENT, absent_number, is_stand_in
from ...errors import UnsupportedDataDependentError
from ...locks import bound
from ..heap.alias import Value
from ..heap.recording import Recording
from ..tape.opinfo import IN_GRAD_MODE, OpInfo
from .checks import check_formula
from .metadata import is_cacheable

aten = torch.ops.aten
prim = torch.ops.prim

# Questions about a tensor that its fake answers: nothing to record.
QUERIES = {
    prim.device.default, prim.layout.default, aten.size.default, aten.stride.default, aten.storage_offset.default,
    aten.sym_size.default, aten.sym_stride.default, aten.sym_numel.default, aten.sym_storage_offset.default,
    aten.numel.default, aten.dim.default, aten.is_contiguous.default, aten.is_contiguous.memory_format,
    aten.is_strides_like_format.default, aten.is_non_overlapping_and_dense.default, aten._fused_sdp_choice.default,
}  # fmt: skip


def _without_training(*args: object) -> object:
    """Compilers know batch norm as the operators that say of their statistics whether they are written."""
    if len(args) != 8 or args[5]:
        return NotImplemented
    return aten._native_batch_norm_legit_no_training.default(*args[:5], *args[6:])


# By name: they are known once their module is imported. A result that is still under way is no plain tensor, and
# kernels take plain tensors.
PLAINER_BY_NAME = {
    "_c10d_functional._wrap_tensor_autograd.default": lambda tensor: torch.ops._c10d_functional.wait_tensor(tensor),
    "aten.native_batch_norm.default": _without_training,
}


class Treatment:
    """The recorder's treatment of an operator; the plan keeps the operator alive, and so the id it is found by."""

    __slots__ = ("decomposition", "formula", "in_grad_mode", "info", "is_cacheable", "is_query", "op")

    def __init__(self, op: object, info: OpInfo | None, decomposition: Callable[..., object] | None) -> None:
        self.op = op
        self.info: Any = info
        self.is_query = info is None
        self.decomposition = decomposition
        self.in_grad_mode = IN_GRAD_MODE.get(op, op)
        self.is_cacheable = info is not None and is_cacheable(info)
        self.formula = FORMULAS.get(op) or check_formula(op, info)


def has_real(values: Any, is_known: Any) -> bool:
    """Whether there is a tensor among the values that is no fake."""
    for value in values:
        cls = type(value)
        if cls in PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            if not is_known(value):
                return True
        elif isinstance(value, (list, tuple)) and has_real(value, is_known):
            return True
    return False


NO_KEYWORDS: dict[str, object] = {}
PLAIN = {int, float, bool, type(None), str, torch.dtype, torch.device, torch.Size}


def draws_nothing(target: object, args: tuple[object, ...]) -> bool:
    """Whether a random operator is called in a way that draws no random numbers (dropout with probability 0)."""
    if not isinstance(target, OpOverload):
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout") and index < len(args):
            return isinstance(args[index], float) and args[index] == 0.0 and "dropout" in argument.name
        if argument.name == "dropout_p":
            return True  # left at its default, 0
    return False


# -------------------------------------------------------------------- formulas
# Operators that PyTorch computes in a different way while a mode is on: the way without a mode is recorded instead.
#
# Several of PyTorch's formulas ask whether they run on plain tensors, and otherwise leave out a check of values, a
# cheaper kernel or the layout of a gradient. Checked on torch 2.13.0.


Formula = Callable[[Recording, Any, Any, Any], Any]

# These need no vectors, and have none computed, where no gradient is asked for.
VALUES_ONLY = {
    torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cond, torch.linalg.norm, torch.linalg.matrix_norm,
    torch.linalg.matrix_rank, torch.functional.norm,
}  # fmt: skip

_active = threading.local()


def eigenvalues_only() -> contextlib.AbstractContextManager[None]:
    """Context: the function that runs is one of `VALUES_ONLY`."""
    return bound(_active, "values_only", True)


def _decomposition(default: object) -> Formula:
    """For an operator with a third argument that asks for vectors; `default` is the second argument's."""

    def formula(rec: Recording, plan: Treatment, args: Args, kwargs: Kwargs) -> Any:
        differentiated = torch.is_grad_enabled() and args[0].requires_grad
        if getattr(_active, "values_only", False) and not differentiated and not rec.in_backward:
            args = (args[0], args[1] if len(args) > 1 else default, False)
        return rec.pure(plan, args, kwargs)

    return formula


# -------------------------------------------------------------------- free phases

_PHASE_NODES = {"LinalgEigBackward0", "LinalgEighBackward0", "LinalgSvdBackward0"}


def independent_of_phase(matrix: torch.Tensor, a: Any = None, b: Any = None) -> torch.Tensor:
    """`matrix`, the origin of the gradient of eigen- or singular vectors, if the gradient is defined.

    A complex vector stays one when multiplied by a number of size 1: a loss that notices has no gradient. `a`, `b`: the
    values that must agree; without both, the imaginary parts of the diagonal must be zero.
    """
    if a is None:
        a = matrix.diagonal(0, -2, -1).imag
        b = torch.zeros_like(a)
    if not torch.allclose(a, b, rtol=1e-2, atol=1e-2):
        raise RuntimeError(
            "the complex vectors of a decomposition are free up to a phase, and the loss depends on the phase: it "
            "has no gradient."
        )
    return matrix


def _diagonal(rec: Recording, plan: Treatment, args: Args, kwargs: Kwargs) -> object:
    if rec.in_backward and args[0].is_complex():
        node = current_autograd_node()
        if node is not None and node.name() in _PHASE_NODES and sequence_nr_of(node) not in rec.phases:
            rec.phases[sequence_nr_of(node)] = args[0]
            if node.name() != "LinalgSvdBackward0":
                _require(rec, args[0])
    return rec.pure(plan, args, kwargs)


def _allclose(rec: Recording, plan: Treatment, args: Args, kwargs: Kwargs) -> object:
    node = current_autograd_node() if rec.in_backward else None
    if node is not None and node.name() == "LinalgSvdBackward0" and sequence_nr_of(node) in rec.phases:
        _require(rec, rec.phases[sequence_nr_of(node)], *(rec.value_of(t).read(rec.emit) for t in args[:2]))
        return True
    return rec.pure(plan, args, kwargs)


def _require(rec: Recording, matrix: torch.Tensor, *agreeing: object) -> None:
    """From here on, `matrix` is the result of `independent_of_phase`."""
    value = rec.value_of(matrix)
    value.entry = rec.emit(independent_of_phase, value.read(rec.emit), *agreeing, spec=value.spec)
    value.generation = value.storage.generation


# -------------------------------------------------------------------- layouts

_HOUSEHOLDER = {"OrmqrBackward0": "_saved_self", "LinalgHouseholderProductBackward0": "_saved_input"}


def _cat(rec: Recording, plan: Treatment, args: Args, kwargs: Kwargs) -> object:
    out = rec.pure(plan, args, kwargs)
    node = current_autograd_node() if rec.in_backward else None
    if node is None or node.name() not in _HOUSEHOLDER:
        return out
    reflectors = getattr(node, _HOUSEHOLDER[node.name()])
    if reflectors.shape != out.shape:
        return out
    laid_out = rec.run_fake(aten.empty_like.default, (reflectors,), {})  # its columns are written one by one
    spec = rec.spec_of(laid_out)
    options = {"dtype": spec.dtype, "device": spec.device}
    empty = rec.emit(aten.empty_strided.default, list(spec.shape), list(spec.stride), kwargs=options, spec=spec)
    entry = rec.emit(aten.copy.default, empty, rec.value_of(out).read(rec.emit), spec=spec)
    rec.values[laid_out] = Value(laid_out, entry, spec)
    return laid_out


def _copied(rec: Recording, plan: Treatment, args: Args, kwargs: Kwargs) -> object:
    """Memory where autograd copies a gradient into `.grad`: eager keeps the gradient itself, with its strides. They may
    differ from the leaf's at sizes of 1. Here Python holds the gradient too, so autograd copies.
    """
    given, shape, stride = args
    kept = given.stride() if type(current_autograd_node()).__name__ == "AccumulateGrad" else stride
    is_alike = all(a == b or (a and type(n) is int and n == 1) for n, a, b in zip(shape, kept, stride, strict=True))
    return rec.pure(plan, (given, shape, kept if is_alike else stride), kwargs)


# -------------------------------------------------------------------- absent tangents
# Forward mode has zeros without memory in place of tangents that are not there, and PyTorch skips some operators on
# them: nothing times infinity is nothing. In a graph they have memory, and the recorder skips the operators: the C++
# that does so else would make every size a plain number.


def _zeros(rec: Recording, plan: object, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
    with rec:
        zeros = aten.zeros.default(*args, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
    rec.has_absent = rec.values[zeros].is_absent = True
    return absent_number(zeros)


def _is_absent(rec: Recording, operand: object) -> bool:
    if not isinstance(operand, torch.Tensor):
        return isinstance(operand, ABSENT)
    root = rec.value_of(operand).root
    return root.is_absent and not root.storage.is_written


def _skipping(count: int) -> Formula:
    """For an operator that gives nothing where one of its first `count` operands is nothing."""

    def formula(rec: Recording, plan: Treatment, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if rec.has_absent and any(_is_absent(rec, operand) for operand in args[:count]):
            out = rec.run_fake(plan.op, args, kwargs)
            with rec:
                return aten._efficientzerotensor.default(list(out.shape), dtype=out.dtype, device=out.device)
        return rec.pure(plan, args, kwargs)

    return formula


def _sum(rec: Recording, plan: Treatment, args: Args, kwargs: Kwargs) -> Any:
    absent = [_is_absent(rec, operand) for operand in args[:2]] if rec.has_absent else [False]
    if all(absent):
        return _skipping(2)(rec, plan, args, kwargs)
    if not any(absent) or not isinstance(args[absent.index(False)], torch.Tensor):
        return rec.pure(plan, args, kwargs)
    out = rec.run_fake(plan.op, args, kwargs)
    with rec:
        rest = args[absent.index(False)].expand(out.shape)
        rest = aten._to_copy.default(rest, dtype=out.dtype, device=out.device)
        factor = 1 if absent[1] else kwargs.get("alpha", 1) * (-1 if plan.op is aten.sub.Tensor else 1)
        return rest if factor == 1 else rest * factor


FORMULAS: dict[Any, Formula] = {
    aten.new_empty_strided.default: _copied,
    aten._linalg_eigh.default: _decomposition("L"),
    aten._linalg_svd.default: _decomposition(False),
    aten.diagonal.default: _diagonal,
    aten.allclose.default: _allclose,
    aten.cat.default: _cat,
    aten._efficientzerotensor.default: _zeros,
    aten.mul.Tensor: _skipping(2),
    aten.mul.Scalar: _skipping(1),
    aten.div.Tensor: _skipping(1),
    **dict.fromkeys((aten.dot.default, aten.vdot.default, aten.linalg_cross.default), _skipping(2)),
    aten._to_copy.default: _skipping(1),
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
}


# -------------------------------------------------------------------- determinants
# The gradient of a determinant, where it is to be differentiated again.
#
# PyTorch takes it from the equation A^H X = conj(det) grad I where a matrix can be inverted, and from the singular
# values where it can't. On anything but plain tensors it takes all from the singular values, which is slow and ends in
# 0/0 at the third order. So the singular matrices of a batch are found here, as eager finds them. Checked on torch
# 2.13.0.


DETERMINANTS: Any = (torch.linalg.det, torch.det, torch.Tensor.det)


def watch_determinant(result: Any, matrix: Any) -> None:
    """Have the node of `result`, the determinant of `matrix`, give the gradient that eager's gives."""
    node = result.grad_fn if is_stand_in(result) else None
    if node is not None and node.name() == "LinalgDetBackward0":
        node.register_hook(functools.partial(_instead, matrix))


def _instead(matrix: torch.Tensor, gradients: tuple[object, ...], incoming: tuple[Any, ...]) -> object:
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


prim = torch.ops.prim
