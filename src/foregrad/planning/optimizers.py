"""The memory and traffic of an optimizer, told from steps of its own on tensors without values.

The optimizer is made over twins of the parameters on `meta`, with gradients, and steps twice: what its state holds
after the first step is its state, and what is alive beyond that during the second is its workspace. So any optimizer
is known, not a table of names. A number that it reads from a tensor is 1.0; one that branches on values, or that runs
the model itself, can't be planned.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .._torch.engine import ThreadDispatchMode
from .._torch.nested import leaves
from ..errors import PlanError, headline
from ..graph.source import a_name

aten = torch.ops.aten


Trace = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer's costs in bytes. `workspace`: the most that is alive during a step beyond parameters, gradients and
    state; `moved`: what a step reads and writes. `by_parameter`: of the state, in the parameters' order. `first` and
    `later`: the memories that the first step and each later one take and let go (0 bytes), by number.
    """

    name: str
    state: int
    workspace: int
    moved: int
    by_parameter: tuple[int, ...]
    first: Trace = ()
    later: Trace = ()


NONE = Optimizer("none", 0, 0, 0, ())


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    """The layout of a parameter for an optimizer: `original` is in the groups of an optimizer that was made already."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    original: Any
    is_sparse: bool = False

    def make(self, *, is_sparse: bool = False) -> nn.Parameter:
        make = functools.partial(torch.empty, self.shape, dtype=self.dtype, device="meta")
        twin = nn.Parameter(make())
        twin.grad = make(layout=torch.sparse_coo if is_sparse else torch.strided)
        return twin


def optimizer_of(asked: Any, twins: Sequence[Twin], *, is_accelerator: bool) -> Optimizer:
    """The costs of an optimizer over these parameters, those without gradients apart.

    `asked`: a class, a name of one in `torch.optim`, a function of a list of parameters, or an optimizer; None for
    none.
    Raises `PlanError` for what is none, and for an optimizer that can't step on tensors without values.
    """
    if asked is None or not twins:
        return NONE
    name = asked if isinstance(asked, str) else getattr(asked, "__name__", None) or type(asked).__name__
    parameters = [twin.make() for twin in twins]
    optimizer = _made(asked, name, twins, parameters)
    name = type(optimizer).__name__
    needs_closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if needs_closure is not None and needs_closure.default is inspect.Parameter.empty:
        raise PlanError(f"{name} runs the model itself in its step, as often as values say: its step can't be planned")
    if is_accelerator:
        _take_lists(optimizer)
    if any(twin.is_sparse for twin in twins):
        _check_sparse(asked, name, twins)
    watch = _Meter()
    try:
        with watch:
            optimizer.step()
            first = tuple(watch.trace)
            watch.begin()
            optimizer.step()
    except Exception as error:
        said = headline(error)
        raise PlanError(f"{name} can't step on tensors without values, so its state is not known: {said}") from error
    state = tuple(_bytes(optimizer.state.get(parameter, {})) for parameter in parameters)
    return Optimizer(name, sum(state), watch.most, watch.moved, state, first, tuple(watch.trace))


def _check_sparse(asked: Any, name: str, twins: Sequence[Twin]) -> None:
    """Raise what the optimizer says to sparse gradients. One that takes them is planned with dense ones."""
    try:
        _made(asked, name, twins, [twin.make(is_sparse=twin.is_sparse) for twin in twins]).step()
    except Exception as error:
        if "sparse gradients" in str(error):
            raise PlanError(f"{name} can't step over these parameters: {headline(error)}") from error


def _made(asked: Any, name: str, twins: Sequence[Twin], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(asked, torch.optim.Optimizer):
        return _renewed(asked, twins, parameters)
    if isinstance(asked, str):
        kinds = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
        asked = kinds.get(asked.lower())
        if asked is None or not issubclass(asked, torch.optim.Optimizer) or asked is torch.optim.Optimizer:
            raise PlanError(f"torch.optim has no {name}: pass a class, or a function of a list of parameters")
    if not callable(asked):
        raise PlanError(f"an optimizer is a class, a name in torch.optim, a function or an optimizer, not {asked!r}")
    make: Callable[[Any], Any] = asked
    try:
        made = make(parameters)
    except Exception as error:
        raise PlanError(f"{name} can't be made over these parameters: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(f"{name} gives {a_name(type(made).__name__)}; it is no optimizer")
    return made


def _renewed(
    optimizer: torch.optim.Optimizer, twins: Sequence[Twin], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy over twins, without state."""
    by_original: dict[int, list[nn.Parameter]] = {}
    for twin, parameter in zip(twins, parameters, strict=True):  # several of a wrapper's
        by_original.setdefault(id(twin.original), []).append(parameter)
    if not any(id(parameter) in by_original for group in optimizer.param_groups for parameter in group["params"]):
        raise PlanError(
            f"none of the parameters of this {type(optimizer).__name__} gets a gradient in the step: make it over "
            "parameters of the model that is planned"
        )
    other = copy.copy(optimizer)
    other.state = collections.defaultdict(dict)
    other.param_groups = [
        {**group, "params": [twin for p in group["params"] for twin in by_original.get(id(p), ())]}
        for group in optimizer.param_groups
    ]
    return other


def _take_lists(optimizer: torch.optim.Optimizer) -> None:
    """On accelerators an optimizer works on lists of tensors unless it is told otherwise."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def _bytes(state: Any) -> int:
    tensors = {leaf.untyped_storage()._cdata: leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values() if tensor.is_meta)


class _Meter(ThreadDispatchMode):
    """Counts the bytes that operators move, and those of the memories that they make and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.moved = self.alive = self.most = 0
        self.trace: list[tuple[int, int]] = []
        self._sizes: dict[weakref.ref[Any], tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        if func is aten._local_scalar_dense.default and reads:
            if args[0].dtype is torch.bool:
                raise ValueError("its step branches on a value")
            return 1.0
        result = func(*args, **kwargs)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        known = {tensor.untyped_storage()._cdata for tensor in reads}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        if new or func._schema.is_mutable:
            self.moved += sum(_size(tensor) for tensor in (*reads, *made))
        for tensor in new:
            storage = tensor.untyped_storage()
            reference = weakref.ref(storage, self._gone)
            if storage.nbytes():
                self._sizes[reference] = len(self.trace), storage.nbytes()
                self.trace.append((len(self.trace), storage.nbytes()))
            self.alive += storage.nbytes()
        self.most = max(self.most, self.alive)
        return result

    def _gone(self, reference: weakref.ref[Any]) -> None:
        number, size = self._sizes.pop(reference, (0, 0))
        self.alive -= size
        if size:
            self.trace.append((number, 0))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
