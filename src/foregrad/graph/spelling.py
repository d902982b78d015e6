"""The user's names and keys in generated Python: they stand as objects, never as text that could run.

A name is written out only if it is certain to mean itself: an ASCII identifier (others are normalized to NFKC by
Python's parser, so two names become one) that is no keyword and that no class body would mangle. A key is written out
if it is a number or a short printable ASCII text. Anything else is bound: `bind(hint, value)` gives the global of the
generated function that holds it, `getattr(x, name)` and `x[key]` read it.

Text for people goes through `shown` (one line without control characters, which could end a comment or turn the text
around it) or `key_text` (which runs no `__repr__` of the user's).
"""

from __future__ import annotations

import enum
import keyword
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

Bind = Callable[[str, Any], str]

ATTRIBUTES = "tuple({}.__dict__)"
"""The names of all attributes of a tensor."""

_LONGEST_TEXT = 200  # of a literal; longer texts are bound
_LARGEST = 2**64


def is_name(text: Any) -> bool:
    """Whether Python reads `x.text`, `text=` and `text` as exactly this name."""
    if type(text) is not str or not text.isascii() or not text.isidentifier() or keyword.iskeyword(text):
        return False
    return not text.startswith("__") or (text.endswith("__") and text != "__debug__")  # reserved by Python


def attribute(owner: str, name: str, bind: Bind) -> str:
    """The expression that reads an attribute."""
    return f"{owner}.{name}" if is_name(name) else f"getattr({owner}, {literal(name) or bind('name', name)})"


def item(owner: str, key: Any, bind: Bind) -> str:
    """The expression that reads an item."""
    return f"{owner}[{literal(key) or bind('key', key)}]"


def call_keywords(arguments: Iterable[tuple[str, str]], bind: Bind) -> list[str]:
    """The keyword arguments of a call, from pairs of name and expression."""
    return [
        f"{name}={value}" if is_name(name) else f"**{{{literal(name) or bind('name', name)}: {value}}}"
        for name, value in arguments
    ]


def literal(value: Any) -> str | None:
    """A literal of exactly this value and type; None if it has none, or its literal would be too long."""
    cls = type(value)
    if value is None or cls is bool:
        return repr(value)
    if cls is int:
        return repr(value) if -_LARGEST < value < _LARGEST else None
    if cls is str:
        return repr(value) if len(value) <= _LONGEST_TEXT and value.isascii() and value.isprintable() else None
    if cls is bytes:
        return repr(value) if len(value) <= _LONGEST_TEXT else None
    return None


def shown(text: str, longest: int = 160) -> str:
    """Text as one line for people, safe in a comment: unprintable characters are escaped."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def key_text(key: Any) -> str:
    """A key for people. Texts and numbers as literals; other objects by their class, not by their `__repr__`."""
    cls = type(key)
    if cls is int and literal(key) is None:
        return hex(key) if key.bit_length() < 4 * _LONGEST_TEXT else f"<int of {key.bit_length()} bits>"
    if key is None or cls in (bool, int, float, complex, str, bytes, type(...)):
        return shown(repr(key))
    if isinstance(key, enum.Enum):
        return shown(f"{cls.__name__}.{key._name_}")
    if cls is tuple:
        return f"({', '.join(map(key_text, key))}{',' if len(key) == 1 else ''})"
    if isinstance(key, (type, types.FunctionType)):
        return shown(str(key.__qualname__))
    if cls in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        return str(key)
    return shown(f"<{cls.__name__}>")


def in_order(keys: Collection[Any]) -> list[Any]:
    """Keys in an order that does not change from run to run: plain strings by themselves, others by their texts."""
    if all(type(key) is str for key in keys):
        return sorted(keys)
    return sorted(keys, key=key_text)


def key_texts(keys: Sequence[Any]) -> list[str]:
    """A text for each key, all of them different."""
    texts = list(map(key_text, keys))
    if len(set(texts)) == len(texts):
        return texts
    return [text if texts.count(text) == 1 else f"{text} #{number}" for number, text in enumerate(texts)]
