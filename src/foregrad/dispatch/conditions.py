"""Conditions that a value equals its value at capture: plain values, the keys of containers, the parts of objects."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.ops import is_opaque_value
from ..frontend.arrays import is_number_of_numpy
from ..frontend.call import FlatCall, are_apart
from ..frontend.source import ABSENT
from ..frontend.state import of_python
from ..frontend.tree import Tree, is_kept_whole
from ..frontend.values import is_plain, same_value
from ..graph.call_effects import ObjectWrite
from ..graph.joint import JointGraph
from ..graph.signature import DecisionInfo
from ..graph.source import Names, literal

Bind = Callable[[str, object], str]
_BY_VALUE = (torch.device, torch.Size, bytes)
_BY_PARTS = (slice, range, complex)  # equal objects may differ in their parts, or not be equal to themselves


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
        return f"{bind('holds', _holds(value))}({name})"
    if isinstance(value, types.MethodType):  # made anew each time it is asked for
        return f"{name} == {bind('method', weakref.WeakMethod(value))}()"
    if is_kept_whole(value):
        return f"{name} is {bind('constant', weakref.ref(value))}()"
    constant = bind("constant", value)
    if isinstance(value, _BY_VALUE) or is_opaque_value(value):
        return f"type({name}) is type({constant}) and {name} == {constant}"
    return f"{name} is {constant}"


def answers(template: str, owner: str, attribute: str | None, value: object, bind: Bind) -> tuple[str, str]:
    """(the condition that a question about an input, the variable `owner`, has an unchanged answer; the answer).

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
    return f"{bind('holds', _holds(value))}({expression})", expression


def _holds(value: Any) -> Callable[[object], bool]:
    """A test whether a later value is as `value`: plain values are compared here, objects by Python's state."""
    if is_plain(value):
        return functools.partial(same_value, value)
    test: Callable[[object], bool] = of_python().Expected(value).holds
    return test


# ------------------------------------------------------------------------------------------ keys


def has_keys(name: str, keys: tuple[object, ...], bind: Bind) -> str:
    """The condition that a dict has the keys, in their order.

    Texts are equal to no other plain object; of other keys the type counts too, since `True == 1 == 1.0`.
    """
    if all(type(key) is str for key in keys):
        return f"tuple({name}) == {bind('keys', keys)}"
    return f"{bind('same_keys', functools.partial(same_value, keys))}(tuple({name}))"


def has_context(name: str, context: Any, bind: Bind) -> str:
    """The condition that a registered container has an equal context: a dict-like container's keys, for one."""
    if _is_of_texts(context):
        return f"{name} == {bind('context', context)}"
    return f"{bind('same_context', functools.partial(same_value, context))}({name})"


def _is_of_texts(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_of_texts, value))
    return value is None or type(value) is str or isinstance(value, type)


def order_of_keywords_matters(function: object) -> bool:
    """Whether a function can tell the order of its keyword arguments."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return not isinstance(code, types.CodeType) or bool(code.co_flags & inspect.CO_VARKEYWORDS)


# -------------------------------------------------------------------- objects
# Guards for a plain object among the arguments: its attributes and items are exactly the capture's.


def apart_guards(
    call: FlatCall,
    names: Mapping[int, str],
    writes: Sequence[ObjectWrite],
    reached: Mapping[type, frozenset[int]],
    bind: Bind,
) -> Iterator[str]:
    """Guards that distinct containers are distinct still, and that none is a container reached by the function itself
    (`reached`: their ids, by class). `names`: the variables of the containers, by number.
    """
    is_written = any(write.is_to_argument for write in writes)
    of_class: dict[type, list[str]] = {}
    for number, (container, _) in enumerate(call.containers):
        of_class.setdefault(type(container), []).append(names[number])
    for cls, variables in of_class.items():
        if len(variables) > 1 and (cls not in (list, dict) or is_written):
            yield f"len({{{', '.join(f'id({name})' for name in variables)}}}) == {len(variables)}"
        if reached.get(cls):
            ids = bind("reached", reached[cls])
            yield from (f"id({name}) not in {ids}" for name in variables)


def arrays_apart_guards(call: FlatCall, leaves: Sequence[str], reached: Sequence[str], bind: Bind) -> Iterator[str]:
    """Guards that arrays among the arguments share memory with no other input. `leaves`: the variables of the
    arguments; `reached`: the variables of other inputs.
    """
    arrays = call.arrays()
    if arrays:
        others = [*(leaves[i] for i in call.tensors_apart()), *reached]
        over = f"({', '.join(leaves[i] for i in arrays)},)"
        yield f"{bind('are_apart', are_apart)}({over}, ({''.join(f'{name}, ' for name in others)}))"


def object_lines(name: str, tree: Tree, children: list[str], names: Names, bind: Bind) -> Iterator[tuple[str, str]]:
    """(a line, "") or ("", a condition) in order: the variable `name` holds an object with the layout of `tree`, and
    its values are in the variables `children`. The class was tested before.
    """
    if tree.kind == "array":
        yield "", f"{name}.flags.writeable"
        yield f"{children[0]} = {bind('from_numpy', torch.from_numpy)}({name})", ""
        return
    if tree.kind == "object":
        yield from of_python().object_lines(name, tree, children, names, bind)
        return
    if tree.kind == "partial":
        yield "", f"not {name}.__dict__"
    parts = {"partial": ("func", "args", "keywords"), "method": ("__func__", "__self__")}.get(tree.kind)
    values = [f"{name}()"] if parts is None else [f"{name}.{part}" for part in parts]
    yield f"{', '.join(children)} = {', '.join(values)}", ""


# -------------------------------------------------------------------- decisions on numbers
# A decision that follows from numbers among the arguments alone is a guard: no graph runs in vain for it.

_ARITHMETIC = {
    getattr(operator, name) for name in "add sub mul truediv floordiv mod neg pos abs lt le gt ge eq ne".split()
} | {bool, abs, round, math.floor, math.ceil}
_LONGEST = 2000  # characters of an expression


def number_tests(joint: JointGraph, variables: Mapping[int, str], bind: Bind) -> Iterator[tuple[DecisionInfo, str]]:
    """The decisions that follow from numbers of the call, each with its expression. `variables`: of the numbers
    by input.
    """
    texts = {node: variables.get(i) for i, node in enumerate(joint.placeholders())}
    outputs = joint.outputs()
    for decision in joint.signature.stops.decisions if variables else ():
        if decision.symbol is None and not decision.is_tensor:
            text = _number_text(outputs[decision.output], texts, bind)
            if text is not None and len(text) < _LONGEST:
                yield decision, text


def _number_text(value: object, texts: dict[fx.Node, str | None], bind: Bind) -> str | None:
    """A number of a graph as an expression; None for a number that a tensor determines."""
    if not isinstance(value, fx.Node):
        return repr(value) if type(value) in (int, bool) or (type(value) is float and math.isfinite(value)) else None
    if value not in texts:
        text, is_read = None, value.target is torch.ops.aten._local_scalar_dense.default
        if value.op == "call_function" and not value.kwargs and (is_read or value.target in _ARITHMETIC):
            operands = [_number_text(argument, texts, bind) for argument in value.args]
            if None not in operands:
                text = ", ".join(map(str, operands))
                text = text if is_read else f"{bind('number', value.target)}({text})"
        texts[value] = text
    return texts[value]
