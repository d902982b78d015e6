"""Values that are compared by value, not by identity: equal down to types, signs and NaN; and their text for people."""

from __future__ import annotations

import math
import operator
import types
import weakref
from typing import Any

import torch

from ..graph.source import a_name, key_text
from ..house import file_label
from .arrays import is_number_of_numpy
from .source import ABSENT

PLAIN = {int, float, str, bool, bytes, complex, type(None), type(...), range, slice}
PLAIN |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}

_NOT_PLAIN = {types.FunctionType, types.ModuleType, type, list, dict, set}  # the most frequent types, told at once


def is_plain(value: Any) -> bool:
    """Whether a value is immutable and compared by value, not by identity."""
    cls = type(value)
    if cls in PLAIN:
        return True
    if cls in _NOT_PLAIN:
        return False
    if cls is tuple or cls is frozenset:
        return all(isinstance(item, type) or is_plain(item) for item in value)
    return is_number_of_numpy(value)


def holds_classes(value: Any) -> bool:
    """Whether a value is a tuple of classes and the like: plain, but for the code in there."""
    return type(value) in (tuple, frozenset) and any(isinstance(x, type) or holds_classes(x) for x in value)


def same_value(a: Any, b: Any) -> bool:
    """Equal, of the same type, down to the items of tuples; NaN is NaN; -NaN is not NaN, -0.0 is not 0.0. Tensors, and
    weak references to tensors, are compared by identity.
    """
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (type, torch.Tensor, weakref.ref)):
        return False
    if type(a) is float:
        return math.copysign(1.0, a) == math.copysign(1.0, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(same_value, a, b)))
    if type(a) is complex:
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if type(a) is frozenset:
        if a != b:
            return False
        kinds = {*map(type, a)}
        of_one_type = len(kinds) < 2 and kinds == {*map(type, b)}
        return of_one_type or {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if is_number_of_numpy(a):
        return bool(a.tobytes() == b.tobytes())
    if type(a) is range:  # ranges are equal by their items, not by start, stop and step
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    if type(a) is slice:
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def describe(value: Any) -> str:
    """Short text for messages."""
    cls = type(value)  # not `isinstance`: it asks modules for their class, and modules answer slowly
    if issubclass(cls, torch.Tensor):
        return a_name(cls.__name__)
    if issubclass(cls, (types.FunctionType, types.CodeType)):
        code, name = (value, "code") if cls is types.CodeType else (value.__code__, value.__qualname__)
        return f"{name} of {file_label(code.co_filename)}:{code.co_firstlineno} (at {id(value):#x})"
    if issubclass(cls, type):
        return f"{value.__qualname__} (at {id(value):#x})"
    if not is_plain(value) and value is not ABSENT:
        return f"{a_name(cls.__name__)} (at {id(value):#x})"  # its repr may run code of the user's
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        text = key_text(value)
    return text if len(text) <= 80 else text[:77] + "..."
