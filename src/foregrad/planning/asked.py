"""Values asked of tensors without values: numbers, and how many elements a mask chooses.

The caller says each by the line of the program that asks: `sizes={"model.py:41": 128}`, or a list of numbers for a line
that asks several times (`tolist`). A number is returned as it is. An operator's result with a size that depends on
values gets this size: elements are then picked by so many indices, with the memory and the derivative of picking by a
mask. A number that is known (of real tensors, of constants) is not asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch.nested import leaves
from ..errors import PlanError, UnsupportedDataDependentError
from ..extend import Aspect, CallEffect, CallPlace, EffectWriter, Settled, aspect
from ..house import file_label

_LINE = re.compile(r"read at (?:the backward of )?(\S+:\d+)")
_LOCAL = threading.local()
_FRAMES = 12  # of helpers between an operator and the line that the caller named


def with_sizes(fn_or_module: Any, sizes: Mapping[str, Any]) -> Any:
    """A function or module with missing values given by line, as `sizes` of `foregrad.plan`: for `capture` (so
    `partition`), `pareto`, `explain` and `export`. The graph shows memory and work only: a call raises `PlanError`,
    also after a load from a file.

    Raises `PlanError` unless the sizes are numbers by line.

    Examples:
        >>> import torch, foregrad
        >>> x = torch.empty(64, 8, device="meta", requires_grad=True)
        >>> sized = foregrad.planning.with_sizes(lambda x: x * x.sum().item(), {"<stdin>:1": 0.5})
        >>> sized.__name__
        '<lambda>'
    """
    values = check_sizes(sizes)

    def said(*args: Any, **kwargs: Any) -> Any:
        with SaidValues(values):
            return fn_or_module(*args, **kwargs)

    name = getattr(fn_or_module, "__name__", type(fn_or_module).__name__)
    wrapped = functools.wraps(getattr(fn_or_module, "forward", fn_or_module))(said)
    wrapped.__name__ = name
    return wrapped


@aspect
class _Said(Aspect):
    """A capture with said values."""

    def __init__(self, host: Any, recorder: Any) -> None:
        self.lines: set[str] = set()

    @contextlib.contextmanager
    def around_function(self) -> Iterator[None]:
        before, _LOCAL.capture = getattr(_LOCAL, "capture", None), self
        try:
            yield
        finally:
            _LOCAL.capture = before

    def effects(self, run: Settled) -> Iterable[CallEffect]:
        return [NotToRun(tuple(sorted(self.lines)))] if self.lines else []


@dataclasses.dataclass(frozen=True, slots=True)
class NotToRun(CallEffect):
    """The graph has said values: the graph foresees, and must not run."""

    said: tuple[str, ...]

    place = CallPlace.FIRST
    storable = True

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.bind('refuse', _refuse)}({self.said!r})"]

    def __str__(self) -> str:
        return f"values said by sizes= at {', '.join(self.said)}"


def _refuse(lines: tuple[str, ...]) -> NoReturn:
    raise PlanError(
        f"this graph has values that were said, at {', '.join(lines)}: it foresees, and does not run. Call the "
        "function itself, with values that are there."
    )


class SaidValues(TorchFunctionMode):
    """The user's function asks for values that are not there: `sizes` has them, by line. `known`: the numbers that were
    there, by line, for a later run on tensors without any.
    """

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.sizes = sizes
        self.known: dict[str, list[Any]] = {}
        self._asked: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and args[0].is_meta:
            with self:
                return [one.tolist() for one in args[0]] if args[0].dim() else args[0].item()
        give = _ANSWERS.get(func)
        if (
            give is None
            or (give is _where and len(args) > 1)
            or (give is _picked and not any(map(_is_mask, leaves(args[1:2]))))
        ):
            return func(*args, **kwargs)
        if func not in _NUMBERS:  # an attempt would leave its checks in the graph; of a write, only the backward asks
            said = self._said(*self._lines())
            return func(*args, **kwargs) if said is None else give(func, said, *args, **kwargs)
        try:
            found = func(*args, **kwargs)
            if isinstance(found, (bool, int, float)):
                self.known.setdefault(next(self._lines()), []).append(found)
            return found
        except (UnsupportedDataDependentError, RuntimeError) as error:
            in_capture = isinstance(error, UnsupportedDataDependentError)
            said = self._said(line_asked(error)) if in_capture else self._said(*self._lines(), more=self.known)
            if said is None:
                raise
            return give(func, said, *args, **kwargs)

    def _said(self, *lines: str, more: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
        """The value said of a line; of a list the next, for each time that the line asks."""
        for line in lines:
            file, _, number = line.rpartition(":")
            for name, value in [*self.sizes.items(), *more.items()]:
                if name in (line, f"{file_label(file)}:{number}") or line.endswith(f"/{name}"):
                    self._asked[name] += 1
                    if name in self.sizes and (capture := getattr(_LOCAL, "capture", None)) is not None:
                        capture.lines.add(name)
                    many = isinstance(value, (list, tuple))
                    return value[(self._asked[name] - 1) % len(value)] if many else value
        return None

    def _lines(self) -> Iterator[str]:
        frame: Any = sys._getframe(2)
        for _ in range(_FRAMES):
            if frame is not None and frame.f_code.co_filename != __file__:
                yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame and frame.f_back


def line_asked(error: Exception) -> str:
    """The line that asked for a value, of an error about it."""
    found = _LINE.search(str(error))
    return found[1] if found else ""


def check_sizes(asked: Any) -> dict[str, Any]:
    """The sizes that a caller says. Raises `PlanError` unless they are numbers, or lists of numbers, by line."""
    if asked is None:
        return {}
    numbers = (bool, int, float)
    for line, value in asked.items() if isinstance(asked, Mapping) else ():
        many = value if isinstance(value, (list, tuple)) else [value]
        if not re.search(r":\d+$", str(line)) or not many or not all(isinstance(one, numbers) for one in many):
            break
    else:
        if isinstance(asked, Mapping):
            return dict(asked)
    raise PlanError(f'sizes are numbers by the line that asks for them: {{"model.py:41": 128}}, not {asked!r}')


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _number(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda _func, said, *_: kind(said)


def _item(_func: Any, said: Any, tensor: Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return bool(said)
    return float(said) if tensor.is_floating_point() else int(said)


def _indices(count: int, like: Tensor) -> Tensor:
    return torch.zeros(int(count), dtype=torch.long, device=like.device)


def _nonzero(_func: Any, said: Any, tensor: Tensor, *, as_tuple: bool = False) -> Any:
    found = [_indices(said, tensor) for _ in range(tensor.dim())]
    return tuple(found) if as_tuple else torch.stack(found, 1)


def _where(_func: Any, said: Any, condition: Tensor) -> Any:
    return _nonzero(_func, said, condition, as_tuple=True)


def _masked_select(_func: Any, said: Any, tensor: Tensor, mask: Tensor) -> Any:
    tensor, _ = torch.broadcast_tensors(tensor, mask)
    return tensor.reshape(-1)[_indices(said, tensor)]


def _without_masks(said: Any, index: Any) -> Any:
    found: list[Any] = []
    for one in index if isinstance(index, tuple) else (index,):
        found += [_indices(said, one) for _ in range(one.dim())] if _is_mask(one) else [one]
    return tuple(found)


def _picked(func: Any, said: Any, tensor: Tensor, index: Any, *value: Any) -> Any:
    return func(tensor, _without_masks(said, index), *value)


def _unique(
    _func: Any, said: Any, tensor: Tensor, sorted: bool = True, return_inverse: bool = False,
    return_counts: bool = False, dim: int | None = None,
) -> Any:  # fmt: skip
    if dim is None:
        values, inverse = tensor.new_empty(int(said)), torch.zeros_like(tensor, dtype=torch.long)
    else:
        values = tensor.index_select(dim, _indices(said, tensor))
        inverse = torch.zeros(tensor.shape[dim], dtype=torch.long, device=tensor.device)
    found = [values, *([inverse] if return_inverse else []), *([_indices(said, tensor)] if return_counts else [])]
    return found[0] if len(found) == 1 else tuple(found)


def _consecutive(
    func: Any, said: Any, tensor: Tensor, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Any:  # fmt: skip
    return _unique(func, said, tensor, True, return_inverse, return_counts, dim)


def _bincount(_func: Any, said: Any, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    dtype = torch.long if weights is None else torch.float64 if weights.dtype is not torch.float32 else weights.dtype
    return torch.zeros(max(int(said), minlength), dtype=dtype, device=tensor.device)


def _repeated(_func: Any, said: Any, tensor: Tensor, repeats: Any = None, dim: int | None = None, **_: Any) -> Any:
    if not isinstance(repeats, Tensor):  # of repeats alone: the indices themselves
        return _indices(said, tensor)
    return (tensor if dim is not None else tensor.reshape(-1)).index_select(dim or 0, _indices(said, tensor))


def _both(name: str) -> Sequence[Any]:
    """The function and the method of a name, where there are both."""
    return [one for one in (getattr(torch, name, None), getattr(Tensor, name, None)) if one is not None]


_NUMBERS: dict[Any, Callable[..., Any]] = {
    Tensor.item: _item,
    Tensor.__bool__: _number(bool),
    Tensor.__int__: _number(int),
    Tensor.__index__: _number(int),
    Tensor.__float__: _number(float),
    **dict.fromkeys(_both("equal"), _number(bool)),
    **dict.fromkeys(_both("is_nonzero"), _number(bool)),
    **dict.fromkeys(_both("allclose"), _number(bool)),
}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    **_NUMBERS,
    Tensor.__getitem__: _picked,
    Tensor.__setitem__: _picked,
    Tensor.index_put_: _picked,
    torch.where: _where,
    **dict.fromkeys(_both("index_put"), _picked),
    **dict.fromkeys(_both("nonzero"), _nonzero),
    **dict.fromkeys(_both("argwhere"), _nonzero),
    **dict.fromkeys(_both("masked_select"), _masked_select),
    **dict.fromkeys(_both("unique"), _unique),
    **dict.fromkeys(_both("unique_consecutive"), _consecutive),
    **dict.fromkeys(_both("bincount"), _bincount),
    **dict.fromkeys(_both("repeat_interleave"), _repeated),
}
