"""Tensors that code assigns to attributes of modules, which an exported graph could not repeat.

`check_attribute_assignment(module)` compares the attributes of modules under `module` and of their classes before and
after, through lists, tuples, dicts, sets and plain objects. Registered buffers and parameters may be assigned. Other
attributes are restored, and reported by path: `self.encoder.cache["keys"][0]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import AttributeAssignedError
from ..graph.spelling import attribute, is_name, key_text

__all__ = ["assigned_attributes", "check_attribute_assignment"]

# Attributes that `torch.nn.Module` keeps for itself: tables of registered state, hooks, the mode.
_STANDARD = frozenset(vars(torch.nn.Module())) | {"_initialize_hook", "_load_hook"}
_DEEPEST = 16
_ABSENT = object()
_LEAVES = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


@dataclasses.dataclass(slots=True)
class _Kept:
    """A container and its earlier contents."""

    container: Any
    items: Any  # a dict or list of results of `_kept`; the elements, for a set


@contextlib.contextmanager
def check_attribute_assignment(module: torch.nn.Module) -> Iterator[list[str]]:
    """Context: raise `AttributeAssignedError` at its end if tensors were assigned to attributes of `module`, or of
    modules in it, that are no registered buffers. Gives a list, which then holds their paths.

    The attributes are restored in any case. An error of the code inside is passed on.

    Examples:
        >>> import torch, foregrad
        >>> class Cached(torch.nn.Module):
        ...     def forward(self, x):
        ...         self.last = x
        ...         return x * 2
        >>> module = Cached()
        >>> try:
        ...     with foregrad.check_attribute_assignment(module):
        ...         out = module(torch.ones(2))
        ... except foregrad.errors.AttributeAssignedError as error:
        ...     print("refused")
        refused
    """
    with assigned_attributes(module, puts_back=True) as paths:
        yield paths


@contextlib.contextmanager
def assigned_attributes(module: torch.nn.Module, *, puts_back: bool) -> Iterator[list[str]]:
    """`check_attribute_assignment`. Without `puts_back` attributes are restored only after a tensor or an error."""
    owners = _owners(module)
    before = [(owner, _kept(_table(owner), set(), 0)) for _, owner in owners]
    paths: list[str] = []
    is_over = False
    try:
        yield paths
        is_over = True
    finally:
        kept_by_id = {id(owner): kept for owner, kept in before}
        for path, owner in _owners(module):
            kept = kept_by_id.get(id(owner))
            for name, value in _table(owner).items():
                old = kept.items.get(name, _ABSENT) if kept is not None else _ABSENT
                _compare(_attribute(path, name), old, value, paths, set(), 0)
        if puts_back or paths or not is_over:
            for owner, kept in before:
                _put_back(owner, kept)
    if paths:
        several = len(paths) > 1
        raise AttributeAssignedError(
            f"the tensor attribute{'s' if several else ''} {', '.join(paths)} {'were' if several else 'was'} assigned "
            "while the module ran. A graph can't repeat that: register them as buffers (`register_buffer`) and write "
            "to these, or return the new values."
        )


def _owners(root: torch.nn.Module) -> list[tuple[str, Any]]:
    """The modules, and their classes that are not PyTorch's, each with its path."""
    owners: dict[int, tuple[str, Any]] = {}
    for name, module in root.named_modules():
        path = f"self.{name}" if name else "self"
        owners[id(module)] = (path, module)
        for cls in type(module).__mro__[:-1]:
            if cls.__module__.partition(".")[0] != "torch":
                owners.setdefault(id(cls), (f"type({path})", cls))
    return list(owners.values())


def _table(owner: Any) -> dict[str, Any]:
    if isinstance(owner, type):
        names = [name for name in vars(owner) if not (name.startswith("__") and name.endswith("__"))]
        return {name: vars(owner)[name] for name in names}
    return {name: value for name, value in vars(owner).items() if name not in _STANDARD}


def _attribute(owner: str, name: Any) -> str:
    return attribute(owner, name, lambda _, key: key_text(key)) if is_name(name) else f"{owner}[{key_text(name)}]"


def _contents(value: Any) -> Any:
    """The contents of a container, as a dict, list or set; None for a value that is none."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, _LEAVES) or type(value).__module__ in ("builtins", "torch"):
        return None
    table = getattr(value, "__dict__", None)
    return dict(table) if isinstance(table, dict) else None


def _kept(value: Any, seen: set[int], depth: int) -> Any:
    contents = _contents(value)
    if contents is None or id(value) in seen or depth > _DEEPEST:
        return value
    seen.add(id(value))
    if isinstance(contents, dict):
        return _Kept(value, {key: _kept(item, seen, depth + 1) for key, item in contents.items()})
    if isinstance(contents, list):
        return _Kept(value, [_kept(item, seen, depth + 1) for item in contents])
    return _Kept(value, contents)


def _compare(path: str, old: Any, new: Any, paths: list[str], seen: set[int], depth: int) -> None:
    if isinstance(new, torch.Tensor):
        if new is not old:
            paths.append(path)
        return
    contents = _contents(new)
    if contents is None or id(new) in seen or depth > _DEEPEST:
        return
    seen.add(id(new))
    before = old.items if isinstance(old, _Kept) else None
    if isinstance(contents, dict):
        earlier_items = before if isinstance(before, dict) else {}
        is_object = not isinstance(new, dict)
        for key, item in contents.items():
            text = _attribute(path, key) if is_object else f"{path}[{key_text(key)}]"
            _compare(text, earlier_items.get(key, _ABSENT), item, paths, seen, depth + 1)
    elif isinstance(contents, list):
        items = before if isinstance(before, list) else []
        for position, item in enumerate(contents):
            earlier = items[position] if position < len(items) else _ABSENT
            _compare(f"{path}[{position}]", earlier, item, paths, seen, depth + 1)
    else:
        earlier_ids = {id(item) for item in before} if isinstance(before, set) else set()
        if any(isinstance(item, torch.Tensor) and id(item) not in earlier_ids for item in contents):
            paths.append(path)


# ---------------------------------------------------------------------------------------------------- putting back


def _put_back(owner: Any, kept: _Kept) -> None:
    now = _table(owner)
    for name in now.keys() - kept.items.keys():
        delattr(owner, name) if isinstance(owner, type) else vars(owner).pop(name)
    for name, item in kept.items.items():
        value = _restored(item)
        if now.get(name, _ABSENT) is not value:
            setattr(owner, name, value) if isinstance(owner, type) else vars(owner).__setitem__(name, value)


def _restored(kept: Any) -> Any:
    """The value that was kept, with the earlier contents in its containers."""
    if not isinstance(kept, _Kept):
        return kept
    container, items = kept.container, kept.items
    if isinstance(items, dict):
        table = container if isinstance(container, dict) else vars(container)
        values = {key: _restored(item) for key, item in items.items()}
        if len(table) != len(values) or any(table.get(key, _ABSENT) is not value for key, value in values.items()):
            table.clear()
            table.update(values)
    elif isinstance(items, list):
        values_now = [_restored(item) for item in items]
        same = len(container) == len(values_now) and all(a is b for a, b in zip(container, values_now, strict=True))
        if isinstance(container, list) and not same:
            container[:] = values_now
    elif isinstance(container, set) and container != items:
        container.clear()
        container.update(items)
    return container
