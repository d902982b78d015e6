"""What operators make of metadata, remembered for the life of the process.

A model runs the same few operators on the same few shapes hundreds of times. `Metadata.run` asks FakeTensor's kernels
once for each operator and layout of its arguments, and keeps a recipe of the answer: which results are new tensors,
which are views of an argument, which are an argument itself, and their layouts. From then on the result is made from
the recipe in a few microseconds. On a miss the kernels run as they always did, errors and all; errors aren't kept.

A key holds all that a result's layout may depend on: the operator, each tensor's shape, strides, offset, dtype and
device (as one token, see `TensorSpec.token`), each plain argument with its type, the default dtype and device,
inference mode, and the switches that choose between kernels. What can't be described so goes past the cache:
symbolic sizes, conjugated and negated tensors, generators, operators that are not PyTorch's own, results that are
numbers, and writes through memory that another argument shares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .._torch.dispatch import kernel_switches
from .._torch.fakes import FakeFactory, FakeTensor, FakeTensorMode, fake_device, share_memory
from .._torch.ops import depends_on_values, is_builtin
from ..graph.meta import TensorSpec
from .opinfo import OpInfo

__all__ = ["Metadata", "forget_all", "is_cacheable"]

aten = torch.ops.aten

# Results by key. Recipes are small; a process that makes this many is sweeping over shapes, and starts over.
_LIMIT = 200_000
_recipes: dict[Any, Any] = {}
_lock = threading.Lock()

# A recipe is a `TensorSpec` for a new tensor, `_View`, `_Argument`, None, or a list or tuple of these.
_MISSING = object()


class _View:
    """A result over the memory of an argument."""

    __slots__ = ("of", "spec")

    def __init__(self, of: int, spec: TensorSpec) -> None:
        self.of = of
        self.spec = spec


class _Argument:
    """A result that is one of the arguments, a tensor."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class _Uncacheable(Exception):  # noqa: N818 - not an error: asks for the ordinary way
    """The call can't be described by a key, or its result by a recipe."""


def forget_all() -> None:
    """Empty the cache: for tests and benchmarks."""
    with _lock:
        _recipes.clear()


def is_cacheable(info: OpInfo) -> bool:
    """Whether an operator's results may be remembered at all."""
    op = info.op
    return (
        is_builtin(op)
        and not info.is_metadata_write
        and not info.is_out
        and not (depends_on_values(op) and op is not aten.index.Tensor)
        and op not in _NEVER
    )


# Lifting a real tensor is not about layouts.
_NEVER = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default}

_TOKENS = {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


class Metadata:
    """Runs operators on the fakes of one capture.

    `spec_of(id of a tensor)` gives what is known of a fake that the capture has seen, or None; `kernels` runs an
    operator in the ordinary way.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        known: Callable[[int], Any],
        kernels: Callable[[Any, Any, Any], Any],
    ) -> None:
        self.known = known
        self.kernels = kernels
        self.factory = FakeFactory.of(fake_mode)

    def run(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result on fakes, as its kernels would give it."""
        tensors: list[Any] = []
        key: list[Any] = [id(info.op), kernel_switches()]
        try:
            self._describe(args, key, tensors)
            if kwargs:
                for name, value in kwargs.items():
                    key.append(name)
                    self._describe((value,), key, tensors)
        except _Uncacheable:
            return self.kernels(info.op, args, kwargs)
        whole = tuple(key)
        recipe = _recipes.get(whole, _MISSING)
        if recipe is not _MISSING:
            if info.writes and len(tensors) > 1 and _shares(tensors):
                return self.kernels(info.op, args, kwargs)
            return self._made(recipe, tensors)
        out = self.kernels(info.op, args, kwargs)
        if info.writes and _shares(tensors):
            return out
        try:
            recipe = _recipe(out, tensors)
        except _Uncacheable:
            return out
        if len(_recipes) >= _LIMIT:
            forget_all()
        _recipes[whole] = recipe
        return self._made(recipe, tensors)

    def _describe(self, values: Any, key: list[Any], tensors: list[Any]) -> None:
        """Add tokens for the values to the key; tensors among them to `tensors`."""
        for value in values:
            cls = type(value)
            if cls is FakeTensor:
                known = self.known(id(value))
                token = None if known is None else known.spec.token
                if token is None:
                    raise _Uncacheable
                key.append(token)
                tensors.append(value)
            elif value is None:
                key.append(None)
            elif cls in _TOKENS:
                key.append(cls)
                key.append(value)
            elif cls is list or cls is tuple or cls is torch.Size:
                key.append(list)
                key.append(len(value))
                self._describe(value, key, tensors)
            else:
                raise _Uncacheable

    def _made(self, recipe: Any, tensors: list[Any]) -> Any:
        cls = type(recipe)
        if cls is TensorSpec:
            return self.factory.new(recipe.shape, recipe.stride, recipe.dtype, recipe.device, recipe.offset)
        if cls is _View:
            spec = recipe.spec
            return self.factory.view(tensors[recipe.of], spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        if cls is _Argument:
            return tensors[recipe.at]
        if recipe is None:
            return None
        return cls(self._made(item, tensors) for item in recipe)


def _recipe(out: Any, tensors: list[Any]) -> Any:
    if type(out) is FakeTensor:
        for at, tensor in enumerate(tensors):
            if out is tensor:
                return _Argument(at)
        if out.layout is not torch.strided:
            raise _Uncacheable
        spec = TensorSpec.of(out, fake_device(out))
        if spec.token is None:
            raise _Uncacheable
        for at, tensor in enumerate(tensors):
            if share_memory(out, tensor):
                return _View(at, spec)
        if spec.offset:
            raise _Uncacheable
        return spec
    if out is None:
        return None
    if type(out) in (list, tuple):
        return type(out)(_recipe(item, tensors) for item in out)
    raise _Uncacheable


def _shares(tensors: list[Any]) -> bool:
    """Whether two of the tensors have one memory: what a write does then depends on where they lie."""
    return any(share_memory(a, b) for i, a in enumerate(tensors) for b in tensors[i + 1 :])
