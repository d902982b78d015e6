"""Tensors of classes with `__torch_function__` alone, among a function's arguments and results.

`OfClasses(function)` gets these tensors as `Taken`: the class, a plain tensor with the data and the history, and the
attributes; it gives the result's tensors likewise. To all other code they are containers of a plain tensor and of
Python's state.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedSideEffectError, UnsupportedTensorError
from ..frontend.openings import OtherFormError
from ..frontend.tree import LEAF, Tree, open_container
from ..identity import ById
from ..locks import bound
from ._torch.function_classes import FunctionClasses, as_class, is_function_class, plain_alias

_serving: list[Callable[[], FunctionClasses | None]] = []


def serve_captures(handles: Callable[[], FunctionClasses | None]) -> None:
    """Captures are patched in: `handles()` gives the handles of the thread's capture, None without a capture."""
    _serving[:] = [handles]


def check_classes(name: str, leaves: Sequence[Any], paths: Sequence[str], classes: FunctionClasses) -> None:
    """Raise where a tensor of one of the classes is returned, or left behind, unchanged."""
    for leaf, path in zip(leaves, paths, strict=True) if classes else ():
        if isinstance(leaf, torch.Tensor) and classes.stand_in(leaf) is not None:
            error = FunctionClassError(
                f"`{name}` returns {path}, a {type(leaf).__qualname__}: the class has `__torch_function__` alone. "
                "Return a plain tensor (`.as_subclass(torch.Tensor)`), or put it in a list, tuple, dict or dataclass."
            )
            error.takes = lambda *_: True  # any arguments can lead to this result
            raise error


def refusal(tensor: torch.Tensor, path: str) -> UnsupportedTensorError:
    """The error for a tensor subclass that can't be an input as it is."""
    cls = type(tensor)
    if is_function_class(cls):
        return FunctionClassError(
            f"`{path}` is a {cls.__qualname__}, a class with `__torch_function__` alone: these are compiled as "
            "arguments, as results, and if the function makes them. Elsewhere keep a plain tensor "
            "(`.as_subclass(torch.Tensor)`)."
        )
    return UnsupportedTensorError(
        f"`{path}` is a {cls.__qualname__}: tensor subclasses can be compiled if they list their inner tensors "
        "(`__tensor_flatten__`). Pass the inner tensors instead (or, without inner tensors, "
        "`.as_subclass(torch.Tensor)`)."
    )


class Taken(NamedTuple):
    """A tensor of a class."""

    cls: type
    tensor: torch.Tensor
    attributes: dict[str, Any]


def has_classes(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a tensor of one of the classes is among the arguments."""
    return any(map(_has, args)) or any(map(_has, kwargs.values()))


def _has(value: Any) -> bool:
    cls = type(value)
    if cls in _PLAIN:
        return False
    if isinstance(value, torch.Tensor):
        return is_function_class(cls)
    opened = open_container(value)
    return opened is not None and any(map(_has, opened[3]))


_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)}
_calls = threading.local()
"""`originals`: by what this call was given instead, tensors of classes, and containers with such in them."""


class _Copies:
    """Containers with tensors to be replaced, and their copies with the replacements."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace  # of a tensor, or `Taken`
        self.made: list[tuple[Any, Any, list[Any]]] = []  # a container, its copy, and the copy's items
        self._known: ById[Any, Any] = ById()

    def of(self, value: Any) -> Any:
        """A value with its tensors replaced; the value itself where none is to be replaced."""
        cls = type(value)
        if cls in _PLAIN or cls is Taken or isinstance(value, torch.Tensor):
            return self.replace(value)
        if value in self._known:
            return self._known[value]
        opened = open_container(value)
        if opened is None:
            return value
        kind, cls, context, items = opened
        new = [self.of(item) for item in items]
        if all(a is b for a, b in zip(new, items, strict=True)):
            return value
        copy = Tree(kind, cls, context, (LEAF,) * len(new), len(new)).unflatten(list(new))
        if kind not in _BY_VALUE:
            self.made.append((value, copy, new))
            self._known[value] = copy
        return copy

    def back(self, replace: Callable[[Any], Any]) -> _Copies:
        """Put the containers back in place of their copies, in values made of the copies."""
        back = _Copies(replace)
        back._known = ById((copy, value) for value, copy, _ in self.made)
        return back

    def check(self, name: str) -> None:
        """Raise where something else is in a copy by now."""
        for _, copy, items in self.made:
            opened = open_container(copy)
            now = () if opened is None else opened[3]
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=False)):
                raise UnsupportedSideEffectError(
                    f"`{name}` writes to a {type(copy).__name__} argument that holds a tensor of a class with "
                    "`__torch_function__` alone. Return the new values instead."
                )


_BY_VALUE = ("tuple", "namedtuple", "structseq")


class OfClasses(functools.partial):  # type: ignore[type-arg]
    """`function` of tensors of classes, passed as `Taken`. It counts as the function's partial application."""

    takes_classes: bool

    def __new__(cls, function: Callable[..., Any]) -> OfClasses:
        made = super().__new__(cls, function)
        made.takes_classes = True  # a partial application with attributes stays itself inside another, from 3.13 on too
        return made

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        classes = _serving[0]() if _serving else None
        if classes is None:  # it runs eagerly, on the caller's objects
            originals = _calls.originals
            tensors, containers = originals
            copies = _Copies(lambda value: tensors[value.tensor] if type(value) is Taken else value)
            copies._known = containers
            args, kwargs = copies.of((args, kwargs))
            return self.func(*args, **kwargs)
        copies = _Copies(lambda value: classes.given(*value) if type(value) is Taken else value)
        args, kwargs = copies.of((args, kwargs))
        result = self.func(*args, **kwargs)
        copies.check(str(getattr(self.func, "__name__", type(self.func).__name__)))
        return copies.back(lambda value: _of_handle(value, classes)).of(result)

    def called(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call of the function by its compiled form."""
        aliases: ById[Any, torch.Tensor] = ById()
        originals: ById[torch.Tensor, Any] = ById()

        def take(value: Any) -> Any:
            if type(value) in _PLAIN or not isinstance(value, torch.Tensor) or not is_function_class(type(value)):
                return value
            alias = aliases.get(value)
            if alias is None:
                alias = plain_alias(value)
                if alias is None:
                    raise UnsupportedTensorError(f"a {type(value).__qualname__} has gradients in inference mode.")
                aliases[value] = alias
                originals[alias] = value
            return Taken(type(value), alias, value.__dict__)

        def give(value: Any) -> Any:
            if type(value) is not Taken:
                return value
            original = originals.get(value.tensor)
            return as_class(value.tensor, value.cls, value.attributes) if original is None else original

        copies = _Copies(take)
        args, kwargs = tuple(map(copies.of, args)), {key: copies.of(value) for key, value in kwargs.items()}
        back = copies.back(give)
        with bound(_calls, "originals", (originals, back._known)):
            result = inner(*args, **kwargs)
        return back.of(result)


class FunctionClassError(OtherFormError):
    """An argument, or a result, is a tensor of such a class; the function gets none as `Taken`."""

    form, takes = OfClasses, staticmethod(has_classes)


def _of_handle(value: Any, classes: FunctionClasses) -> Any:
    """The substitute for a tensor of a class among the results."""
    stand_in = classes.stand_in(value)
    if stand_in is None:
        return value
    attributes = value.__dict__
    if not classes.is_given(value):
        attributes = _Copies(lambda value: _of_handle(value, classes)).of(dict(attributes))
    return Taken(type(value), stand_in, attributes)
