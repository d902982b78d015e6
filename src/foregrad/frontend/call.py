"""One call of a function, flattened: `FlatCall`, the start of capture and dispatch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._torch.fakes import FakeTensor
from .._torch.tensors import is_wrapper_subclass, storage_key
from ..errors import (
    EscapedTensorError,
    UnknownLeafError,
    UnsupportedAliasError,
    UnsupportedLayoutError,
    UnsupportedTensorError,
)
from ..graph.slots import Slot
from ..graph.source import key_texts
from .arrays import tensor_over
from .openings import Wrap, opener, wrap
from .tree import STEPPERS, Tree, check_leaves, flatten, open_arguments


def forward_of(module: torch.nn.Module) -> Callable[..., object]:
    """A bound method that leads to the module: a method of TorchScript's does not name its owner. A class with a
    `__call__` and no forward is called by its `__call__`.
    """
    if calls_itself(module):
        return types.MethodType(type(module).__call__, module)
    return types.MethodType(_forward, module) if isinstance(module, torch.jit.ScriptModule) else module.forward


def calls_itself(module: torch.nn.Module) -> bool:
    """Whether a module has no forward, but a `__call__` of its own."""
    cls = type(module)
    own = cls.__call__ is not torch.nn.Module.__call__
    return own and getattr(cls, "forward", None) is torch.nn.Module.forward and "forward" not in vars(module)


def _forward(module: torch.nn.Module, *args: object, **kwargs: object) -> Any:
    return module.forward(*args, **kwargs)


class LeadingPlace(Protocol):
    """Where a part of a `StatefulFunction`'s first argument comes from. `is_drawn`: a look there uses the value up.
    `dims`: the varying dimensions of a tensor there.
    """

    @property
    def path(self) -> str: ...
    @property
    def dims(self) -> frozenset[int]: ...
    @property
    def is_drawn(self) -> bool: ...
    def now(self, taken: object) -> Any:
        """The value there now, where that can be looked at; otherwise `taken`."""


class StatefulFunction(functools.partial[Any]):
    """A function with the tuple of the values at `places` as its first argument. It counts as its function's partial
    application. `arrays`: the places of arrays, by identity. `uses_up`: whether `places` use up random generators.
    `found`: places that the last capture found to be right for more calls, in place of `places`; or empty.
    """

    places: tuple[LeadingPlace, ...]
    found: tuple[LeadingPlace, ...]
    arrays: frozenset[tuple[int, Any]]
    uses_up: bool


def forms_of(function: object) -> Iterator[StatefulFunction]:
    """The forms round a function, outermost first: one for each time that state was found to vary."""
    while isinstance(function, StatefulFunction):
        yield function
        function = function.func


def may_have_a_form(function: object) -> bool:
    """Whether a function has few forms so far: one that finds new places each time never comes to an end."""
    return len([*forms_of(function)]) < _MOST_NESTED


def renewed(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the state as it is now: other threads have gone on while this one captured, or waited."""
    if not isinstance(function, StatefulFunction):
        return args
    now = tuple(place.now(value) for place, value in zip(function.places, args[0], strict=True))
    return now, *renewed(function.func, args[1:])


_MOST_NESTED = 5


def is_item(path: str) -> bool:
    """Whether the path of a leaf leads into a list, tuple or dict among the arguments."""
    return "[" in path[path.find("]") + 1 :] if path.startswith("args[") else "[" in path


@dataclasses.dataclass(frozen=True, slots=True)
class FlatCall:
    """A function and its arguments as leaves. `first_of[i]` is the first leaf that is leaf i's tensor.

    `slots` describes leaves that a front end knows better than by their paths (parameters, say). `dynamic[i]` has, for
    each dimension of leaf i that may vary from call to call, its least and greatest size. `padded[i]` has the
    dimensions with a stride that follows from a varying size and a padding. `varied` are the program's lines that read
    varying numbers from tensors (None: each number is a part of the program). `numbers` are plain numbers that differed
    in earlier captures: they may vary. `sizes`: by line, the numbers of elements found there by earlier captures: a
    further number may vary (None: none may); `every_size`: each may, from the first capture on. `fills_caches`: a place
    that was empty and holds a tensor afterwards counts as a cache, to be filled by an eager call. `only_written`: the
    places of containers that earlier captures found to be added to and not to be read; `unread`: for
    containers among the arguments, by path and class, whether they are read after all (None: all are). `objects`: plain
    objects among arguments and results are taken apart; `containers`: the arguments' containers with an identity that
    the tree keeps, by their numbers there, with each container's paths.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Tree
    paths: tuple[str, ...]
    first_of: tuple[int, ...]
    slots: Mapping[int, Slot] = dataclasses.field(default_factory=dict)
    dynamic: Mapping[int, Mapping[int, tuple[int | None, int | None]]] = dataclasses.field(default_factory=dict)
    padded: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    varied: frozenset[str] | None = None
    numbers: frozenset[int] = frozenset()
    sizes: Mapping[str, frozenset[int]] | None = None
    every_size: bool = False
    fills_caches: bool = False
    only_written: frozenset[tuple[int, object]] = frozenset()
    unread: Mapping[tuple[str, type], bool] | None = None
    objects: bool = False
    containers: tuple[tuple[object, str], ...] = ()

    @property
    def may_open_sizes(self) -> bool:
        """Whether some size that depends on values may become symbolic."""
        return self.sizes is not None and (self.every_size or bool(self.sizes))

    @property
    def may_have_symbolic_sizes(self) -> bool:
        """Whether a size may be symbolic: floats that vary are not sizes."""
        ints = any(type(self.leaves[i]) is int for i in self.numbers)
        return bool(self.dynamic or self.varied) or self.may_open_sizes or ints

    def arguments(
        self, leaves: Sequence[object], wrap: Wrap = wrap, made: dict[int, object] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with the `leaves`. `made` gets the containers by their numbers."""
        args, kwargs = self.tree.unflatten(list(leaves), wrap, made)
        return args, kwargs

    def arrays(self) -> dict[int, Any]:
        """The arrays by the number of the leaf, a tensor over the array."""
        return {leaf: self.containers[number][0] for leaf, number in arrays_in(self.tree)}

    def tensors_apart(self) -> list[int]:
        """The tensors among the leaves, but for tensors over arrays."""
        arrays = self.arrays()
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor) and i not in arrays]

    def inside_wrappers(self) -> set[int]:
        """The leaves that are tensors inside wrapper subclasses."""
        return {first + i for first, spec in self.tree.wrappers() for i in range(spec.count)}


def flatten_call(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    objects: bool = False,
    unread: Sequence[object] = (),
) -> FlatCall:
    """Flatten the arguments of a call; `UnknownLeafError` or `Unsupported...Error` for arguments that can't be
    captured.

    `objects`: plain objects are taken apart, and containers keep their identity. `unread`: containers without items.
    """
    containers: tuple[object, ...] = ()
    if inspect.iscoroutinefunction(function):  # not called: Python warns of a coroutine that nobody awaits
        raise UnknownLeafError(
            "output `out` is a coroutine: its code runs after the call. Compile the functions that it calls."
        )
    if objects:
        opened = open_arguments(args, dict(kwargs), tensor_over, unread)
        leaves, tree, containers = opened.leaves, opened.tree, opened.containers
    else:
        leaves, tree = flatten((args, dict(kwargs)))
    keywords = tree.children[1]
    positional = list(tree.children[0].children)
    named: list[tuple[str, Tree]] = []
    for form in forms_of(function):
        values, *positional = positional
        named += [(place.path, child) for child, place in zip(values.children, form.places, strict=True)]
    named += [(f"args[{i}]", child) for i, child in enumerate(positional)]
    keys = zip(keywords.context, key_texts(keywords.context), keywords.children, strict=True)
    named += [(name if name.isidentifier() else f"kwargs[{text}]", child) for name, text, child in keys]
    nodes = [pair for path, child in named for pair in child.walk(path)]
    paths = [path for path, node in nodes if node.kind == "leaf"]
    path_of = {node.number: path for path, node in nodes}
    named_containers = tuple((container, path_of[number]) for number, container in enumerate(containers))
    check_leaves(leaves, paths, "argument", STEPPERS if objects else ())
    first: dict[int, int] = {}
    first_of = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            check_tensor(leaf, paths[index])
            first_of.append(first.setdefault(id(leaf), index))
        else:
            first_of.append(index)
    call = FlatCall(
        function, tuple(leaves), tree, tuple(paths), tuple(first_of), objects=objects, containers=named_containers
    )
    _check_arrays(call)
    return call


def _check_arrays(call: FlatCall) -> None:
    arrays = call.arrays()
    if arrays and not are_apart([call.leaves[i] for i in arrays], [call.leaves[i] for i in call.tensors_apart()]):
        named = ", ".join(f"`{call.paths[i]}`" for i in arrays)
        raise UnsupportedAliasError(
            f"an array among the arguments ({named}) shares memory with a second argument, and a write to either "
            "would change both. Pass a copy (`array.copy()`)."
        )


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raise for a tensor that can't be an input: unknown subclasses, layouts other than strided."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise EscapedTensorError(
            f"`{path}` has no sizes yet: the function gives it some. Call it once before it is captured."
        )
    if type(tensor) is FakeTensor and tensor.device.type == "cuda" and not torch.backends.cuda.is_built():
        raise UnsupportedTensorError(
            f"`{path}` is a fake tensor on {tensor.device}: this PyTorch is built without it, and autograd ends the "
            "process. Make it on `meta`."
        )
    if type(tensor) not in _PLAIN and _is_another_kind(tensor):
        raise opener().refusal(tensor, path)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedLayoutError(
            f"`{path}` is a {kind} tensor; only strided tensors can be compiled. Call .to_dense() (or .dequantize()) "
            "first, or put the computation into a function that `foregrad.eager_region` marks."
        )


def _is_another_kind(tensor: torch.Tensor) -> bool:
    """Whether the program can tell the tensor from a plain tensor: its stand-in is plain."""
    if is_wrapper_subclass(tensor):
        return True
    own = type(tensor).__torch_function__
    parameter = isinstance(tensor, torch.nn.Parameter)
    return not parameter or own is not torch.nn.Parameter.__torch_function__


_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}


def memory_groups(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """For every storage of several distinct tensors, the tensors' positions."""
    by_storage: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_storage.setdefault(storage_key(tensor), []).append(position)
    return [tuple(group) for group in by_storage.values() if len(group) > 1]


# -------------------------------------------------------------------- arrays
# NumPy arrays among the arguments of a call: the graph takes tensors over the arrays' memory.


def arrays_in(tree: Tree, first: int = 0) -> Iterator[tuple[int, int]]:
    """The arrays in a structure: numbers of the leaf and of the container. `first`: the number of its first leaf."""
    if tree.kind == "array":
        yield first, tree.number
    for child in tree.children:
        yield from arrays_in(child, first)
        first += child.size


def are_apart(arrays: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether the `arrays`, tensors over NumPy's memory, overlap neither with each other nor with `others`.

    Tensors over one array, or over its views, do not know of each other.
    """
    ends = sorted((start, end) for start, end in map(_extent, arrays) if start < end)
    if any(before[1] > after[0] for before, after in itertools.pairwise(ends)):
        return False
    return not any(start < b and a < end for a, b in map(_extent, others) for start, end in ends)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()
