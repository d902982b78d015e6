"""Packed sequences: functions whose kernels read lengths of sequences straight out of memory.

The lengths become a part of the program, decided once for all of them. Packing and padding are written as one pick and
one placement by indices, whose derivatives read nothing; recurrent layers are handed the real lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch.dispatch import current_dispatch_mode, plain_execution
from ..._torch.ops import PACK_PADDED, PAD_PACKED
from ..._torch.stand_ins import is_stand_in
from ..heap.recording import Recording

__all__ = ["PACKERS"]


def _contents(tensor: torch.Tensor) -> torch.Tensor:
    """The real tensor behind a fake, whose contents are a part of the program from here on."""
    if not is_stand_in(tensor):
        return tensor
    recorder: Recording = current_dispatch_mode()
    return recorder.contents(tensor)


def _pack(func: Any, args: Any, kwargs: Any) -> Any:
    return _packed(func, *args, **kwargs)


def _packed(func: Any, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    known = _contents(lengths)
    with plain_execution():  # its checks, and the sizes of the batches
        zeros = torch.zeros(()).expand(*input.shape[:2], 1)
        sizes: torch.Tensor = func(zeros, known, batch_first)[1]
        index = _index(sizes)
    data = (input.transpose(0, 1) if batch_first else input)[tuple(map(torch.tensor, index))].contiguous()
    return data, torch.tensor(sizes.tolist(), dtype=sizes.dtype)


def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    return _padded(func, *args, **kwargs)


def _padded(
    func: Any,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Any:
    sizes = _contents(batch_sizes)
    with plain_execution():
        zeros = torch.zeros(()).expand(data.shape[0], 1)
        shape, lengths = func(zeros, sizes, False, 0.0, total_length)
        index = _index(sizes)
    padding = torch.full((*shape.shape[:2], *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device)
    output = padding.index_put(tuple(map(torch.tensor, index)), data)
    output = output.transpose(0, 1) if batch_first else output
    return output, torch.tensor(lengths.tolist(), dtype=lengths.dtype)


def _index(sizes: torch.Tensor) -> tuple[list[int], list[int]]:
    """For each element of a packed sequence: its step and its sequence."""
    steps = [step for step, size in enumerate(sizes.tolist()) for _ in range(size)]
    sequences = [sequence for size in sizes.tolist() for sequence in range(size)]
    return steps, sequences


def _recurrent(func: Any, args: Any, kwargs: Any) -> Any:
    """A recurrent layer over a packed sequence; over a padded one, its second argument is no tensor."""
    if len(args) > 2 and isinstance(args[1], torch.Tensor) and not isinstance(args[2], bool) and _is_packed(args):
        args = (args[0], _contents(args[1]), *args[2:])
    return func(*args, **kwargs)


def _is_packed(args: tuple[Any, ...]) -> bool:
    return isinstance(args[3], (list, tuple))  # data, sizes, states, weights; otherwise data, states, weights, ...


PACKERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    PACK_PADDED: _pack,
    PAD_PACKED: _pad,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
