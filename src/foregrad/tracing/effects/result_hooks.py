"""Hooks that a function puts on its own tensors and that are still there when it returns these.

In eager such a hook runs before whatever the caller does with the gradient of that result: `.grad`, a later hook,
`torch.autograd.grad` by it. Traced into the backward, it would run after. So where a hook needs nothing of the run,
each call puts it on the real result. Where it does, the hook is traced, and the gradient of that result can not be
watched.

A hook on a node (`y.grad_fn.register_hook`) is traced with the backward. One that the backward does not come to is on
the node of a view that is returned, which each call takes anew of what it is a view of, or on that of a leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.symbols import is_symbolic
from ..._torch.tensors import base_of, history_of, is_view
from ...errors import UnsupportedSideEffectError
from ...frontend.code import names_of
from ...graph.signature import Handle, OutputInfo
from ...identity import ById, IdSet
from ...subclasses.spec import is_wrapper
from ..heap.records import InputRecord, is_moved
from ..inputs.inputs import Inputs
from ..inputs.wrapper_inputs import WrapperInput
from ..tape.gradient_paths import passed_through
from .analysis import Analysis

_PLAIN = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.layout, types.ModuleType)
_DEEPEST = 6


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    """A hook of a tensor: its key in the tensor's table, the tensor's history by then, the user's line."""

    tensor: torch.Tensor
    hook: Any
    key: int
    history: Any
    line: str


@dataclasses.dataclass(slots=True, eq=False)
class _OnNode:
    """A hook of a node; `line`: where the user's code registered it."""

    hook: Any
    line: str
    handle: Any = None
    was_called: bool = False

    def __call__(self, *args: Any) -> Any:
        self.was_called = True
        return self.hook(*args)

    @property
    def is_there(self) -> bool:
        table = self.handle.hooks_dict_ref()
        return table is not None and self.handle.id in table


class OwnHooks:
    """The hooks that one run registered on its own tensors, in their order.

    `on_results`: (position among the results, hook) for each call to put there; `on_inputs`: the same of inputs, which
    hand it the gradients of all their uses. `inside`: results with traced hooks.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._registered: list[_Registered] = []
        self._on_nodes: list[_OnNode] = []
        self.on_results: list[tuple[int, Callable[..., Any]]] = []
        self.on_inputs: list[tuple[InputRecord | WrapperInput, Callable[..., Any]]] = []
        self.inside: list[int] = []

    def __bool__(self) -> bool:
        """Whether the backward runs hooks of the function's."""
        return bool(self._registered)

    def note(self, tensor: torch.Tensor, hook: Any, handle: Any) -> None:
        """`tensor.register_hook(hook)` gave `handle`."""
        self._registered.append(_Registered(tensor, hook, handle.id, history_of(tensor), self._line()))

    def on_node(self, hook: Any, register: Callable[[Any], Any]) -> Any:
        """Register a hook on a node."""
        noted = _OnNode(hook, self._line())
        table, noted.handle = register(noted)
        self._on_nodes.append(noted)
        return table, noted.handle

    def check_nodes(self, name: str) -> None:
        """After the backward: hooks of nodes that it did not come to, which eager's backward may call.

        Raises:
            UnsupportedSideEffectError: there is one.
        """
        for noted in self._on_nodes:
            if noted.is_there and not noted.was_called:
                raise UnsupportedSideEffectError(
                    f"`{name}` puts a hook on an autograd node that is none of its own backward: the node of a view "
                    f"that it returns, or of a leaf.\n  registered at {noted.line}\n  Put the hook on a tensor "
                    "(`register_hook`), or on the node of what the compiled function returns."
                )

    def settle(
        self,
        name: str,
        function: Any,
        results: Sequence[Any],
        analysis: Analysis,
        inputs: Inputs,
        *,
        live: bool,
    ) -> None:
        """Decide for each hook, before the backward is traced. `live`: calls can put hooks on tensors.

        Raises:
            UnsupportedSideEffectError: a hook is left on an input, or on a view, that can't take it.
        """
        for noted in self._on_nodes:
            noted.was_called = False  # by a gradient taken inside
        if not self._registered:
            return
        known: ById[Any, Any] = inputs.by_stand_in | inputs.wrappers.by_stand_in
        outside = outside_of(function)
        in_one_memory = {member for _, members in inputs.memory for member in members}
        for left in [noted for noted in self._registered if noted.tensor in known and _is_there(noted)]:
            record = known[left.tensor]
            is_plain = record.real.requires_grad and not is_moved(record) and record not in in_one_memory
            if not (live and is_plain and needs_nothing(left.hook, outside)) or _names_containers(left.hook):
                raise UnsupportedSideEffectError(
                    f"`{name}` puts a hook on a tensor from outside (an argument, a parameter), where it stays and is "
                    f"to see the gradients of other uses too.\n  registered at {left.line}\n  Put it there outside the "
                    "compiled function, or on `y = x.view_as(x)` and use that."
                )
            self.on_inputs.append((record, left.hook))
            self._take_back(left)
        hooked = IdSet(base_of(r.tensor) for r in self._registered if is_view(r.tensor) and _is_there(r))
        for leaf in inputs.wrappers.leaves if hooked else ():
            if is_wrapper(leaf) and is_view(leaf) and base_of(leaf) in hooked:  # each call takes it anew
                raise _hook_on_view(name, f"of a {type(leaf).__qualname__}")
        positions = ById((t, at) for at, t in reversed(list(enumerate(results))) if is_stand_in(t))
        fakes = [fake for fake in analysis.fakes if fake is not None]
        passed, passed_aliases = passed_through(fakes, analysis.aliases)
        interior = IdSet([*(fakes[at] for at, _ in passed), *(results[at] for at, _ in passed_aliases)])
        for tensor, at in positions.items():
            hooks = [r for r in self._registered if r.tensor is tensor and _is_there(r)]
            if not hooks or tensor in known:
                continue
            if live and tensor not in interior and all(needs_nothing(r.hook, outside) for r in hooks):
                self.on_results += ((at, r.hook) for r in hooks)
                for registered in hooks:
                    self._take_back(registered)
            else:
                _check_view(name, analysis.outputs[at])
                self.inside.append(at)

    def _take_back(self, registered: _Registered) -> None:
        del registered.tensor._backward_hooks[registered.key]  # type: ignore[union-attr]
        self._registered.remove(registered)


def _check_view(name: str, info: OutputInfo) -> None:
    if isinstance(info, Handle) and info.steps:
        raise _hook_on_view(name, info.path)


def _hook_on_view(name: str, path: str) -> UnsupportedSideEffectError:
    return UnsupportedSideEffectError(
        f"`{name}` puts a hook on the view {path} that it returns, which computes with tensors of the function, or "
        "other results are computed from that view. Return a copy of the view, or put the hook on what the function "
        "returns."
    )


def _is_there(registered: _Registered) -> bool:
    """Whether the hook was not removed, and is still one of the tensor's: a write in place leaves it with what was."""
    hooks = registered.tensor._backward_hooks
    return hooks is not None and registered.key in hooks and history_of(registered.tensor) is registered.history


def _names_containers(hook: Any) -> bool:
    """Whether the code of a hook names lists and the like. What is in these is guarded: one that the hook adds to would
    make a graph for each call.
    """
    while isinstance(hook, (types.MethodType, functools.partial)):
        hook = hook.__func__ if isinstance(hook, types.MethodType) else hook.func
    if not isinstance(hook, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in hook.__closure__ or () if cell != types.CellType()]
    named = [hook.__globals__.get(name) for name in names_of(hook.__code__).loaded]
    return any(isinstance(value, (list, dict, set, collections.deque)) for value in (*cells, *named))


def outside_of(function: Any) -> IdSet[Any]:
    """What a function closes over, with the functions among that: cells, contents, objects of methods."""
    found: IdSet[Any] = IdSet()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        if isinstance(value, types.CellType):
            waiting += [value.cell_contents] if value != types.CellType() else []
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            waiting += [*(value.__closure__ or ()), getattr(value, "__self__", None)]
    return found


def needs_nothing(
    value: Any, outside: IdSet[Any], knows: Callable[[Any], bool] = lambda _: False, depth: int = 0
) -> bool:
    """Whether a hook, or what it holds, holds nothing that the run made: tensors, symbolic numbers, lists.

    `knows`: what else is certain not to be of the run.
    """
    if is_stand_in(value) or is_symbolic(value) or depth > _DEEPEST:
        return False
    if value in outside or isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module)):
        return True
    held: Iterable[Any]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell not in outside]
        cells = [cell.cell_contents for cell in cells if cell != types.CellType()]
        held = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, functools.partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        held = (value.__self__, value.__func__)
    elif isinstance(value, types.BuiltinFunctionType):
        held = (value.__self__,)
    elif isinstance(value, tuple):
        held = value
    else:
        return type(value).__module__ == "torch._ops" or knows(value)  # an operator
    return all(needs_nothing(item, outside, knows, depth + 1) for item in held)
