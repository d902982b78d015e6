"""Conditions that a plain value, or the keys of a container, are unchanged since the capture."""

from __future__ import annotations

import functools
import inspect
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._torch.contexts import is_opaque_value
from ..frontend.expected import ABSENT, Expected, same_value
from ..frontend.opaque import is_number_of_numpy
from ..frontend.tree import KEPT_WHOLE
from ..graph.spelling import literal

Bind = Callable[[str, Any], str]
_BY_VALUE = (torch.device, torch.Size, bytes)
_BY_PARTS = (slice, range, complex)  # equal ones may differ in what makes them, or not be equal to themselves


def is_constant(name: str, value: Any, bind: Bind) -> str:
    """The condition that the variable `name` holds `value`."""
    if value is None or isinstance(value, bool) or value is Ellipsis:
        return f"{name} is {value if value is not Ellipsis else '...'}"
    cls = type(value)
    if cls in (int, str):
        return f"type({name}) is {cls.__name__} and {name} == {literal(value) or bind('constant', value)}"
    if cls is float:
        if math.isinf(value):
            return f"type({name}) is float and {name} == {bind('constant', value)}"
        sign = f" and {bind('copysign', math.copysign)}(1.0, {name}) == {math.copysign(1.0, value)}"
        if math.isnan(value):
            return f"type({name}) is float and {name} != {name}{sign}"
        return f"type({name}) is float and {name} == {value!r}{'' if value else sign}"
    if is_number_of_numpy(value) or cls in _BY_PARTS:
        return f"{bind('holds', Expected(value).holds)}({name})"
    if isinstance(value, types.MethodType):  # made anew each time it is asked for
        return f"{name} == {bind('method', weakref.WeakMethod(value))}()"
    if isinstance(value, KEPT_WHOLE):
        return f"{name} is {bind('constant', weakref.ref(value))}()"
    constant = bind("constant", value)
    if isinstance(value, _BY_VALUE) or is_opaque_value(value):
        return f"type({name}) is type({constant}) and {name} == {constant}"
    return f"{name} is {constant}"


def answers(template: str, owner: str, attribute: str | None, value: Any, bind: Bind) -> tuple[str, str]:
    """(the condition that a question about an input, the variable `owner`, has the same answer; the answer).

    `template` has `{}` for the input, and `{name}` for `attribute`.
    """
    names = {}
    if attribute is not None:
        names = {"name": literal(attribute) or bind("name", attribute), "absent": bind("ABSENT", ABSENT)}
    expression = template.format(owner, **names)
    if value is None or isinstance(value, bool):
        return f"({expression}) is {value}", expression
    if type(value) in (int, str) and (text := literal(value)) is not None:
        return f"({expression}) == {text}", expression
    return f"{bind('holds', Expected(value).holds)}({expression})", expression


# ------------------------------------------------------------------------------------------ keys


def has_keys(name: str, keys: tuple[Any, ...], bind: Bind) -> str:
    """The condition that a dict has these keys, in this order.

    Texts are equal to no other plain object; of other keys the type counts too, since `True == 1 == 1.0`.
    """
    if all(type(key) is str for key in keys):
        return f"tuple({name}) == {bind('keys', keys)}"
    return f"{bind('same_keys', functools.partial(same_keys, keys))}({name})"


def has_context(name: str, context: Any, bind: Bind) -> str:
    """The condition that a registered container has this context, which holds the keys of a kind of dict."""
    if _is_of_texts(context):
        return f"{name} == {bind('context', context)}"
    return f"{bind('same_context', functools.partial(_same_key, context))}({name})"


def _is_of_texts(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_of_texts, value))
    return value is None or type(value) is str or isinstance(value, type)


def same_keys(keys: tuple[Any, ...], container: Any) -> bool:
    """Whether a container has exactly `keys`, in this order."""
    return len(container) == len(keys) and all(map(_same_key, keys, container))


def _same_key(key: Any, now: Any) -> bool:
    if key is now:
        return True
    if type(key) is not type(now):
        return False
    if isinstance(key, (tuple, list)):  # a named tuple, too
        return len(key) == len(now) and all(map(_same_key, key, now))
    return same_value(key, now)


def order_of_keywords_matters(function: Any) -> bool:
    """Whether a function can tell in which order its keyword arguments came."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return not isinstance(code, types.CodeType) or bool(code.co_flags & inspect.CO_VARKEYWORDS)
