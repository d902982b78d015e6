"""Where a module keeps its attributes: tables in its `__dict__`, or, of TorchScript's, an object in C++."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = frozenset(
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs "
    "_forward_hooks_always_called _forward_pre_hooks_with_kwargs _is_full_backward_hook".split()
)


_IN_FORWARDS = ("_forward_pre_hooks", "_forward_hooks")
_IN_BACKWARDS = ("_backward_pre_hooks", "_backward_hooks")


def hooks_of(modules: Iterable[torch.nn.Module], *, in_backward: bool = False) -> Iterator[Any]:
    """The hooks that calls of modules call, those of all modules first; or those that their backwards call."""
    names = _IN_BACKWARDS if in_backward else _IN_FORWARDS
    for name in names:
        yield from vars(torch.nn.modules.module)[f"_global{name}"].values()
    for module in modules:
        own = object.__getattribute__(module, "__dict__")
        for name in names:
            yield from own.get(name, {}).values()


def scripted_place(module: torch.nn.Module, name: str) -> tuple[Any, str, Any] | None:
    """(holder, kind of place, value) of an attribute of a scripted or traced module; None where it can't change."""
    own = object.__getattribute__(module, "__dict__")
    actual = own.get("_actual_script_module")  # what a traced module keeps its state in
    if actual is not None:
        return scripted_place(actual, name)
    if name in own.get("_modules", ()):
        return None
    if name in own:
        return own, "dict", own[name]
    state = own.get("_c")
    return (state, "object", getattr(state, name)) if state is not None and state.hasattr(name) else None


class ScriptedAttribute:
    """A container of a scripted module: each look at it gives a copy."""

    def __init__(self, state: Any, name: str) -> None:
        self.state = state
        self.name = name

    def contents(self) -> Any:
        return _contents(getattr(self.state, self.name))


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _contents(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_contents, value))
    return id(value) if isinstance(value, torch.Tensor) else value
