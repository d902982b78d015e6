"""Tensors that code assigns to attributes of modules, which an exported graph could not repeat.

`check_attribute_assignment(module)` compares the attributes of modules under `module` and of their classes before and
after, through lists, tuples, dicts, sets and plain objects. Registered buffers and parameters may be assigned. Other
attributes are restored, and reported by path: `self.encoder.cache["keys"][0]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import AttributeAssignedError
from ..frontend.holders import CLASS, SET, Holder
from ..frontend.program_state import ProgramState

# Attributes that `torch.nn.Module` keeps for itself: tables of registered state, hooks, the mode.
_STANDARD = frozenset(vars(torch.nn.Module())) | {"_initialize_hook", "_load_hook"}


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
    before = ProgramState([(module, "self")])
    paths: list[str] = []
    is_over = False
    try:
        yield paths
        is_over = True
    finally:
        paths += _assigned(module, before)
        if puts_back or paths or not is_over:
            classes = _classes(module)
            for holder in before.changed():
                if _is_attribute(holder, module, classes):
                    _put_back(holder)
    if paths:
        several = len(paths) > 1
        raise AttributeAssignedError(
            f"the tensor attribute{'s' if several else ''} {', '.join(paths)} {'were' if several else 'was'} assigned "
            "while the module ran. A graph can't repeat that: register them as buffers (`register_buffer`) and write "
            "to these, or return the new values."
        )


def _assigned(module: torch.nn.Module, before: ProgramState) -> list[str]:
    """The paths of tensors that are not where they were, or were nowhere."""
    known = {(id(holder.target), key): tensor for holder, key, tensor in _tensors(before, module)}
    found = [
        holder.name() if holder.kind is SET else holder.path(key)
        for holder, key, tensor in _tensors(ProgramState([(module, "self")]), module)
        if known.get((id(holder.target), key)) is not tensor
    ]
    return list(dict.fromkeys(found))


def _tensors(state: ProgramState, module: torch.nn.Module) -> Iterator[tuple[Holder, Any, torch.Tensor]]:
    classes = _classes(module)
    for holder in state.ways:
        if _is_attribute(holder, module, classes):
            items = ((id(item), item) for item in holder.before) if holder.kind is SET else holder.items()
            yield from ((holder, key, item) for key, item in items if isinstance(item, torch.Tensor))


def _classes(module: torch.nn.Module) -> set[int]:
    return {id(base) for part in module.modules() for base in type(part).__mro__}


def _is_attribute(holder: Holder, module: torch.nn.Module, classes: set[int]) -> bool:
    """Whether it is part of an attribute of a module, or of the class of one, that is none of PyTorch's own."""
    while holder.parent is not None:
        is_standard = type(holder.step) is str and holder.step in _STANDARD and holder.step != "_modules"
        if is_standard and isinstance(holder.parent.owner, torch.nn.Module):
            return False
        holder = holder.parent
    return holder.owner is module or (holder.kind is CLASS and id(holder.target) in classes)


def _put_back(holder: Holder) -> None:
    if isinstance(holder.owner, torch.nn.Module):
        now = holder.kind.read(holder.target)
        others = {name: value for name, value in holder.before.items() if name not in _STANDARD}
        holder.kind.put_back(holder.target, {name: now[name] for name in _STANDARD & now.keys()} | others)
    elif not holder.is_table:
        holder.put_back()
