"""Sizes that vary from call to call: the choice of those that become symbolic, and the check of marked dimensions."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from .._torch.symbols import is_symbolic, may_vary
from ..errors import UnsupportedError
from ..frontend.call import FlatCall
from ..graph.joint import JointGraph
from .graphs import Specialization

Limits = tuple["int | None", "int | None"]
_MARK = "_foregrad_dynamic"


def mark_dynamic(tensor: torch.Tensor, dim: int, min: int | None = None, max: int | None = None) -> None:
    """Say that dimension `dim` of an argument varies from call to call, between `min` and `max` when given.

    The first graph then already serves every size, instead of the second. Sizes 0 and 1 always get graphs of their
    own. Raises `IndexError` for a dimension that the tensor does not have, `ValueError` when its size is out of
    the range given. A program that only works for one size raises `UnsupportedError` when it is compiled.

    Examples:
        >>> import torch, foregrad
        >>> double = foregrad.compile(lambda x: x * 2, backend="eager")
        >>> x = torch.ones(2)
        >>> foregrad.mark_dynamic(x, 0)
        >>> double(x).shape, double(torch.ones(5)).shape
        (torch.Size([2]), torch.Size([5]))
        >>> len(double.foregrad.specializations)
        1
    """
    rank = tensor.dim()
    if not -rank <= dim < rank:
        raise IndexError(f"mark_dynamic: dimension {dim} of a tensor with {rank} dimensions")
    dim %= rank
    size = tensor.shape[dim]
    if (min is not None and size < min) or (max is not None and size > max):
        raise ValueError(f"dimension {dim} has size {size}, which is not between {min} and {max}")
    marks: dict[int, Limits] = dict(getattr(tensor, _MARK, {}))
    marks[dim] = (min, max)
    setattr(tensor, _MARK, marks)


def marked_dims(tensor: torch.Tensor) -> Mapping[int, Limits]:
    """The dimensions of a tensor that were passed to `mark_dynamic`, with their limits."""
    marks: Mapping[int, Limits] = getattr(tensor, _MARK, {})
    return marks


class SizesSeen:
    """Sizes and numbers among the arguments of one function's captures: one that differed between two is symbolic.

    `dynamic` is None (as above), True (every size from the beginning) or False (only marked sizes). `open_sizes` are
    symbolic from the beginning: dimensions by the path of their tensor; an integer's path has none.
    """

    def __init__(self, dynamic: bool | None, open_sizes: Mapping[str, frozenset[int]] | None = None) -> None:
        self.dynamic = dynamic
        self.open = open_sizes or {}
        self.varied: frozenset[str] = frozenset()  # lines that read numbers whose values have varied
        self._hopeless = False
        self._closed = False
        self._seen: dict[tuple[str, int], list[set[int]]] = {}
        self._numbers_seen: dict[tuple[str, type], set[str]] = {}
        self.constants: Counter[str] = Counter()  # by path, the captures that needed the value

    def make_constant(self, paths: Iterable[str]) -> None:
        """Note that a capture needed the values of these numbers. After a second one, every value gets a graph of its
        own; after the first, the other branches of a program that prints the number now and then may still be one.
        """
        self.constants.update(paths)

    def close(self) -> None:
        """Note that the function can't be captured with sizes of its own left open: each gets a graph of its own."""
        self._closed = True

    def give_up(self) -> None:
        """Note that the function can't be captured with symbols: from now on every size gets a graph of its own."""
        self._hopeless = True

    def observe(self, call: FlatCall, specializations: Sequence[Specialization] = ()) -> FlatCall:
        """The call with the symbolic dimensions, and the lines that read symbolic numbers, noted on it."""
        if self._hopeless:
            return call
        if self.dynamic is not False:
            call = dataclasses.replace(call, varied=self.varied | numbers_read(specializations))
        if self.dynamic is not False and not self._closed:
            call = dataclasses.replace(call, sizes=sizes_found(specializations), every_size=bool(self.dynamic))
        numbers = self._numbers(call)
        if numbers:
            call = dataclasses.replace(call, numbers=numbers)
        limits_by_leaf: dict[int, dict[int, Limits]] = {}
        wrapper_of = {first + i: (spec, i) for first, spec in call.tree.wrappers() for i in range(spec.count)}
        for index, leaf in enumerate(call.leaves):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
                continue
            wrapper, part = wrapper_of.get(index, (None, 0))
            seen = self._seen.setdefault((call.paths[index], leaf.dim()), [set() for _ in leaf.shape])
            dims: dict[int, Limits] = {}
            for dim, size in enumerate(leaf.shape):
                if is_symbolic(size) or not (wrapper is None or wrapper.may_vary(part, dim)):
                    continue
                seen[dim].add(size)
                is_open = size > 1 and dim in self.open.get(call.paths[index], ())
                varies = len(seen[dim] - {0, 1}) > 1 or (wrapper is not None and wrapper.varies(part))
                if self.dynamic or is_open or (self.dynamic is None and varies):
                    dims[dim] = (None, None)
            dims |= marked_dims(leaf)
            if dims and call.first_of[index] == index:
                limits_by_leaf[index] = dims
        return dataclasses.replace(call, dynamic=limits_by_leaf) if limits_by_leaf else call

    def _numbers(self, call: FlatCall) -> frozenset[int]:
        """The leaves that are integers or floats whose values have varied; the integers 0 and 1 are never symbolic."""
        leaves, inside = set(), tuple(f"{path}[" for path in self.open)  # a list of numbers may be replaced as a whole
        for index, (path, leaf) in enumerate(zip(call.paths, call.leaves, strict=True)):
            if type(leaf) not in (int, float) or self.constants[path] > 1:
                continue
            is_open = path in self.open or path.startswith(inside)
            if self.dynamic is False and not is_open:
                continue
            seen = self._numbers_seen.setdefault((path, type(leaf)), set())
            if math.isfinite(leaf) if type(leaf) is float else may_vary(leaf):
                seen.add(repr(leaf))
                if len(seen) > 1 or is_open:
                    leaves.add(index)
        return frozenset(leaves)


def numbers_read(specializations: Sequence[Specialization]) -> frozenset[str]:
    """The lines at which the graphs so far read a number from a tensor. Another graph is needed since it varies."""
    return frozenset(
        decision.where
        for s in specializations
        for decision in s.product.captured.joint.signature.decisions
        if type(decision.value) is float or (type(decision.value) is int and decision.is_tensor)
    )


def sizes_found(specializations: Sequence[Specialization]) -> dict[str, frozenset[int]]:
    """The sizes that depend on values, as the graphs so far computed them: by line."""
    sizes_by_line: dict[str, set[int]] = {}
    for s in specializations:
        for decision in s.product.captured.joint.signature.decisions:
            if not decision.is_tensor and type(decision.value) is int:
                sizes_by_line.setdefault(decision.where, set()).add(decision.value)
    return {where: frozenset(values) for where, values in sizes_by_line.items()}


def check_marked(call: FlatCall, joint: JointGraph, name: str) -> None:
    """Raise `UnsupportedError` for a marked dimension if the program works only for one size of it."""
    for info in joint.signature.symbols:
        argument = joint.signature.inputs[info.input].argument
        if argument is None or info.dim is None or info.dim not in marked_dims(call.leaves[argument]):
            continue
        value = joint.symbols.value_of(info.symbol)
        if value is not None:
            raise UnsupportedError(
                f"dimension {info.dim} of {call.paths[argument]} was marked as dynamic, but `{name}` only works for "
                f"size {value}: it uses the size as a plain number (in range, an index, int()) or compares it. "
                "Leave the mark out, or compute with the size instead of reading it."
            )
