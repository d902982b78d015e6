"""Operators' answers on metadata, remembered for the life of the process.

A model runs few operators on few shapes hundreds of times. `Metadata.run` asks FakeTensor's kernels once for each
operator and layout of its arguments, and keeps a recipe of the answer: for each result, whether it is new, a view of an
argument or an argument itself, and its layout. From then on the result is made from the recipe in a few microseconds.
On a miss the kernels run as they always did, errors and all; errors aren't kept.

A key holds all that a result's layout may depend on: the operator, each tensor's shape, strides, offset, dtype and
device (as one token, see `TensorSpec.token`), each plain argument with its type, the default dtype and device,
inference mode, and the switches that choose between kernels. Calls without such a description go past the cache:
conjugated and negated tensors, generators, operators that are not PyTorch's own, results that are numbers, and writes
through memory that two arguments share.

Symbolic sizes are described by their expressions. Expressions mean something within one capture only, so their answers
are forgotten with the capture; the guards that a kernel adds are there already when its answer is used again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.engine import kernel_switches
from ..._torch.nested import tensors_in
from ..._torch.ops import Args, Kwargs, depends_on_values, is_builtin
from ..._torch.stand_ins import is_stand_in, like, new_stand_in, new_stand_in_over, on_meta, twin
from ..._torch.symbols import is_symbolic, symbol_made
from ..._torch.tensors import share_memory, storage_key
from ...errors import without_frames
from ...graph.meta import TensorSpec, contiguous_strides
from ...locks import make_lock
from ..heap.overlaps import ask_kernel, is_symbolic_tensor
from ..tape.opinfo import OpInfo
from .layouts import layout_of, result_layout, view_layout

aten = torch.ops.aten

# Results by key. Recipes are small; a process that makes this many is sweeping over shapes, and starts over.
_LIMIT = 200_000
_recipes: dict[Any, Any] = {}
_UNKNOWN = object()
_lock = make_lock()

# A recipe: a `TensorSpec` for a new tensor, `_View`, `_Symbolic`, `_Argument`, None, or a list or tuple of these.


class _View:
    """A result over the memory of an argument."""

    __slots__ = ("of", "spec")

    def __init__(self, of: int, spec: TensorSpec) -> None:
        self.of = of
        self.spec = spec


class _Symbolic:
    """A result with symbolic sizes, new or over the memory of an argument: `model` is a fake of its layout."""

    __slots__ = ("model", "nbytes", "of", "spec")

    def __init__(self, spec: TensorSpec, model: torch.Tensor, of: int | None) -> None:
        self.spec = spec
        self.model = model
        self.of = of
        self.nbytes = model.untyped_storage().nbytes()


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

# Views whose kernel is one for all devices. FakeTensor's takes a millisecond for some of them.
_STRIDED = {
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.as_strided.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int, aten.diagonal.default, aten.unfold.default, aten.detach.default,
    aten.alias.default,
}  # fmt: skip

_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_TOKENS = {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


class Metadata:
    """Runs operators on the fakes of one capture.

    `known(tensor)` gives the facts about a fake that the capture has seen, or None; `kernels` runs an operator plainly.
    """

    def __init__(self, known: Callable[[torch.Tensor], Any], kernels: Callable[[object, Args, Kwargs], object]) -> None:
        self.known = known
        self.kernels = kernels
        self._symbolic: dict[Any, Any] = {}  # the recipes with symbolic sizes

    def run(self, info: OpInfo, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """(The operator's result on fakes, as its kernels would give it; the result's specs, when known.)

        Specs are one `TensorSpec`, or a tuple with one for each result (None for a result that is no tensor).
        """
        tensors: list[Any] = []
        key: list[Any] = [id(info.op), kernel_switches()]
        writes = bool(info.writes)
        try:
            is_static = self._describe(args, key, tensors, writes=writes)
            for name, value in kwargs.items():
                key.append(name)
                is_static = self._describe((value,), key, tensors, writes=writes) and is_static
        except _Uncacheable:
            return self.kernels(info.op, args, kwargs), None
        if info.writes and len(tensors) > 1 and _shares(info, args, tensors):
            return self.kernels(info.op, args, kwargs), None
        whole = tuple(key)
        recipes = _recipes if is_static else self._symbolic
        recipe = recipes.get(whole, _UNKNOWN)
        if recipe is _UNKNOWN:
            recipe = None
            if not is_static:
                recipe = self._symbolic_recipe(info, tensors, args, kwargs)
            elif info.op in _STRIDED and len(tensors) == 1:
                recipe = self._strided(info.op, tensors[0], args, kwargs)
            else:
                recipe = layout_of(info.op, [self.known(t).spec for t in tensors], args, kwargs)
            if recipe is None:
                out = self.kernels(info.op, args, kwargs)
                try:
                    recipe = self._recipe(out, tensors)
                except _Uncacheable:
                    return out, None
                if not info.writes:
                    specs = [self.known(t).spec for t in tensors]
                    recipe = as_kernels_have_it(recipe, info.op, specs, args, kwargs)
            if len(_recipes) >= _LIMIT:
                forget_all()
            recipes[whole] = recipe
        cls = type(recipe)
        if cls is TensorSpec:
            return new_stand_in(recipe.shape, recipe.stride, recipe.dtype, recipe.device), recipe
        if cls is _View:
            return self._view(recipe, tensors), recipe.spec
        return self._made(recipe, tensors), _specs(recipe)

    def _describe(self, values: Any, key: list[Any], tensors: list[Any], *, writes: bool) -> bool:
        """Add tokens for the values to the key; tensors among them to `tensors`. Whether no size is symbolic. `writes`:
        of an operator that writes to its operands.
        """
        is_static = True
        for value in values:
            cls = type(value)
            if cls is _TENSOR or cls is _PARAMETER:
                known = self.known(value)
                token = None if known is None else known.spec.token
                if token is None:
                    token, is_static = None if known is None else _symbolic_token(known.spec), False
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
                is_static = self._describe(value, key, tensors, writes=writes) and is_static
            elif cls is torch.SymFloat and writes:  # it only changes elements
                key.append(cls)
                is_static = False
            elif is_symbolic(value):
                key.append(cls)
                key.append(symbol_made(value))
                is_static = False
            else:
                raise _Uncacheable
        return is_static

    def _strided(self, op: Any, tensor: torch.Tensor, args: Args, kwargs: Kwargs) -> Any:
        """The recipe of a view, from the kernel that all devices have in common: it only computes strides. Or None."""
        spec, nbytes = self.known(tensor).spec, tensor.untyped_storage().nbytes()
        if not isinstance(nbytes, int):  # its sizes came to be known after it had been made
            return None
        out = on_meta(op, spec, nbytes, args[1:], kwargs)
        if isinstance(out, torch.Tensor):
            return _View(0, TensorSpec.of(out, spec.device))
        return type(out)(_View(0, TensorSpec.of(item, spec.device)) for item in out)

    def _symbolic_recipe(self, info: OpInfo, tensors: list[Any], args: Args, kwargs: Kwargs) -> Any:
        """The rules' answer for a call with symbolic sizes, or None."""
        specs = [self.known(t).spec for t in tensors]
        is_view = info.is_view and len(tensors) == 1 and tensors[0] is args[0]
        found = view_layout(info.op, specs[0], args, kwargs) if is_view else None
        if found is None and not info.is_view and not info.writes and tensors:
            found = result_layout(info.op, specs, args, kwargs)
        if found is None:
            return None
        return self._recipe_of_spec(found, 0 if is_view else None)

    def _recipe_of_spec(self, spec: Any, of: int | None) -> Any:
        if type(spec) is tuple:
            return tuple(None if item is None else self._recipe_of_spec(item, of) for item in spec)
        if spec.token is not None:
            return spec if of is None else _View(of, spec)
        return _Symbolic(spec, new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset), of)

    def _view(self, recipe: _View, tensors: list[Any]) -> torch.Tensor:
        spec = recipe.spec
        return new_stand_in_over(tensors[recipe.of], spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)

    def _made(self, recipe: Any, tensors: list[object]) -> Any:
        cls = type(recipe)
        if cls is TensorSpec:
            return new_stand_in(recipe.shape, recipe.stride, recipe.dtype, recipe.device)
        if cls is _View:
            return self._view(recipe, tensors)
        if cls is _Symbolic:
            return like(recipe.model, None if recipe.of is None else tensors[recipe.of], recipe.nbytes)
        if cls is _Argument:
            return tensors[recipe.at]
        if recipe is None:
            return None
        return cls(self._made(item, tensors) for item in recipe)

    def _recipe(self, out: object, tensors: list[object]) -> Any:
        if is_stand_in(out) and type(out) in (_TENSOR, _PARAMETER):
            return self._recipe_of_one(out, tensors)
        if out is None:
            return None
        if isinstance(out, (list, tuple)):  # some kernels in Python give named tuples, operators never do
            return (list if isinstance(out, list) else tuple)(self._recipe(item, tensors) for item in out)
        raise _Uncacheable

    def _recipe_of_one(self, out: torch.Tensor, tensors: list[object]) -> Any:
        for at, tensor in enumerate(tensors):
            if out is tensor:
                return _Argument(at)
        if out.layout is not torch.strided:
            raise _Uncacheable
        spec = TensorSpec.of(out)
        of = next((at for at, tensor in enumerate(tensors) if share_memory(out, tensor)), None)
        if of is None and (type(spec.offset) is not int or spec.offset):
            raise _Uncacheable
        if spec.token is not None:
            return spec if of is None else _View(of, spec)
        if spec.conj or spec.neg:
            raise _Uncacheable
        return _Symbolic(spec, twin(out), of)


def _symbolic_token(spec: TensorSpec) -> Any:
    """Like `TensorSpec.token`, of a layout with symbolic numbers, within one capture."""
    if spec.conj or spec.neg:
        return None
    numbers = [n if type(n) is int else symbol_made(n) for n in (*spec.shape, *spec.stride, spec.offset)]
    return (*numbers, spec.dtype, spec.device)


def _specs(recipe: Any) -> object:
    cls = type(recipe)
    if cls is TensorSpec:
        return recipe
    if cls is _View or cls is _Symbolic:
        return recipe.spec
    if cls is _Argument or recipe is None:
        return None
    return tuple(map(_specs, recipe))


def _shares(info: OpInfo, args: tuple[object, ...], tensors: list[Any]) -> bool:
    """Whether a written tensor shares memory with an argument: the result then depends on their places."""
    written: list[object] = []
    for at in info.writes:
        value = args[at] if at < len(args) else None
        written += value if isinstance(value, (list, tuple)) else [value]
    count = Counter(map(storage_key, tensors))
    return len(written) == 0 or any(not isinstance(t, torch.Tensor) or count[storage_key(t)] > 1 for t in written)


# -------------------------------------------------------------------- kernel answers
# Answers of kernels themselves, asked on zeros laid out like the fakes: strides, and errors.
#
# Strides of dimensions of size 1, and of tensors without elements, mean nothing. Programs can see them, and kernels
# choose them as it comes; FakeTensor's Python decompositions often choose others. Where an argument is not contiguous
# and a result has such dimensions, the kernel is asked.


_LIMIT_BYTES = 1 << 16
_OPAQUE = {"workspace", "reserve", "reserve_space", "reserveSpace", "packed_weights"}


def as_kernels_have_it(recipe: Any, op: object, given: list[TensorSpec], args: Args, kwargs: Kwargs) -> Any:
    """`recipe`, FakeTensor's answer for `op`, with the kernel's strides."""
    results = recipe if isinstance(recipe, (list, tuple)) else [recipe]
    if not any(type(r) is TensorSpec and (1 in r.shape or 0 in r.shape) for r in results):
        return recipe
    if takes_opaque(op) or kwargs.get("generator") is not None:
        return recipe
    if all(s.stride == contiguous_strides(s.shape) for s in given) or any(s.device.type != "cpu" for s in given):
        return recipe
    if sum(s.nbytes for s in (*given, *(r for r in results if type(r) is TensorSpec))) > _LIMIT_BYTES:
        return recipe
    try:
        out = ask_kernel(op, args, kwargs)
    except Exception:
        return recipe  # zeros don't suit it
    if out is NotImplemented:
        return recipe
    if type(recipe) is TensorSpec:
        return _like(recipe, out)
    return type(recipe)(map(_like, recipe, out))


@functools.cache
def takes_opaque(op: Any) -> bool:
    """Whether an argument is a kernel library's own memory: the library trusts it, and zeros make it crash."""
    return any(argument.name in _OPAQUE for argument in op._schema.arguments)


def _like(spec: Any, tensor: object) -> Any:
    if type(spec) is not TensorSpec or not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
        return spec
    return TensorSpec(spec.shape, tensor.stride(), spec.dtype, spec.device, spec.offset, spec.conj, spec.neg)


# -------------------------------------------------------------------- errors
# Kernels' errors for arguments that they don't take: FakeTensor raises different errors, with different words.


_PLAIN = {RuntimeError, IndexError, ValueError, TypeError, OverflowError, AssertionError}


def as_kernels_say(op: object, args: Args, kwargs: Kwargs, error: Exception) -> Exception:
    """The error of the kernel where it has one, else FakeTensor's `error`."""
    tensors = tensors_in((args, kwargs))
    foreign = any(is_symbolic_tensor(t) or t.device.type != "cpu" or t.layout is not torch.strided for t in tensors)
    if type(error) not in _PLAIN or foreign or takes_opaque(op):
        return error
    try:
        ask_kernel(op, args, kwargs)
    except Exception as said:
        return without_frames(said)
    return error
