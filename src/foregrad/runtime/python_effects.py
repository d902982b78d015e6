"""Lines for side effects in Python: one for each write, in program order, at the end of a call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from ..graph.python_effects import (
    AddToSet,
    CallMethod,
    DeleteAttribute,
    DeleteItem,
    OfArgument,
    PythonWrite,
    RemoveFromSet,
    SetAttribute,
    SetCell,
    SetItem,
    SetItems,
)
from ..graph.spelling import literal
from .lines import LineWriter


def write_lines(writer: LineWriter, writes: Sequence[PythonWrite], values: list[str]) -> list[str]:
    """Lines for `writes`, given the expressions of the written values."""
    return [_LINES[type(write)](writer, write, values) for write in writes]


def _key(writer: LineWriter, key: Any) -> str:
    return literal(key) or writer.bind("key", key)


def _table(writer: LineWriter, write: PythonWrite) -> str:
    target = write.target
    if type(target) is not OfArgument:
        return writer.bind("state", target)
    name = writer.containers[target.number]
    if not target.attributes:
        return name
    return f"{writer.bind('attribute_of', object.__getattribute__)}({name}, '__dict__')"


def _class(write: PythonWrite) -> type:
    """The class of the target."""
    target = write.target
    if type(target) is not OfArgument:
        return type(target)
    return dict if target.attributes else target.cls


def _unbound(writer: LineWriter, write: Any, method: str) -> str:
    """A method of the built-in class behind the target, even if its own class overrides it."""
    bases = (collections.OrderedDict, dict, list, collections.deque, set)
    base = next(base for base in bases if issubclass(_class(write), base))
    return writer.bind(f"{base.__name__}_{method.strip('_')}", getattr(base, method))


def _set_item(writer: LineWriter, write: SetItem, values: list[str]) -> str:
    table, key = _table(writer, write), _key(writer, write.key)
    if _class(write) is dict:
        return f"{table}[{key}] = {values[write.value]}"
    return f"{_unbound(writer, write, '__setitem__')}({table}, {key}, {values[write.value]})"


def _delete_item(writer: LineWriter, write: DeleteItem, values: list[str]) -> str:
    return f"{_unbound(writer, write, 'pop')}({_table(writer, write)}, {_key(writer, write.key)}, None)"


def _set_attribute(writer: LineWriter, write: SetAttribute, values: list[str]) -> str:
    setter = type.__setattr__ if isinstance(write.target, type) else object.__setattr__
    name = literal(write.name) or writer.bind("name", write.name)
    return f"{writer.bind('set_attribute', setter)}({_table(writer, write)}, {name}, {values[write.value]})"


def _delete_attribute(writer: LineWriter, write: DeleteAttribute, values: list[str]) -> str:
    deleter = type.__delattr__ if isinstance(write.target, type) else object.__delattr__
    name = literal(write.name) or writer.bind("name", write.name)
    return f"{writer.bind('delete_attribute', deleter)}({_table(writer, write)}, {name})"


def _call_method(writer: LineWriter, write: CallMethod, values: list[str]) -> str:
    container = _table(writer, write)
    if write.kind != "self":
        container = f"{container}[{_key(writer, write.key)}]" if write.kind == "item" else f"{container}.{write.key}"
    if write.name == "__setitem__":
        key, value = (values[at] for at in write.args)
        return f"{container}[{key}] = {value}"
    return f"{container}.{write.name}({', '.join(values[at] for at in write.args)})"


def _set_cell(writer: LineWriter, write: SetCell, values: list[str]) -> str:
    cell = writer.bind("cell", write.target)
    return f"del {cell}.cell_contents" if write.value is None else f"{cell}.cell_contents = {values[write.value]}"


def _set_items(writer: LineWriter, write: SetItems, values: list[str]) -> str:
    sequence = _table(writer, write)
    items = [values[item] if item >= 0 else f"{sequence}[{-1 - item}]" for item in write.items]
    if issubclass(_class(write), collections.deque):
        return f"{writer.bind('set_deque', set_deque)}({sequence}, [{', '.join(items)}])"
    if _class(write) is list:
        return f"{sequence}[{write.start}:] = [{', '.join(items)}]"
    return f"{_unbound(writer, write, '__setitem__')}({sequence}, slice({write.start}, None), [{', '.join(items)}])"


def set_deque(items: Any, values: list[Any]) -> None:
    collections.deque.clear(items)
    collections.deque.extend(items, values)


def _add(writer: LineWriter, write: AddToSet, values: list[str]) -> str:
    return f"{_unbound(writer, write, 'add')}({_table(writer, write)}, {values[write.value]})"


def _remove(writer: LineWriter, write: RemoveFromSet, values: list[str]) -> str:
    return f"{_unbound(writer, write, 'discard')}({_table(writer, write)}, {values[write.value]})"


_LINES: dict[type, Callable[[LineWriter, Any, list[str]], str]] = {
    SetItem: _set_item,
    DeleteItem: _delete_item,
    SetAttribute: _set_attribute,
    DeleteAttribute: _delete_attribute,
    SetCell: _set_cell,
    SetItems: _set_items,
    AddToSet: _add,
    CallMethod: _call_method,
    RemoveFromSet: _remove,
}
