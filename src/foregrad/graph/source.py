"""Generated Python: names that don't clash, values as expressions, and compiling text that debuggers can enter.

All code on foregrad's hot path is straight-line Python made here. `compile_source` registers the text with `linecache`,
so tracebacks, pdb and `inspect.getsource` show it, and takes it out again with the code.

Known weakness: `linecache.clearcache()`, called by some tools, forgets the text; the code still runs.
"""

from __future__ import annotations

import builtins
import enum
import itertools
import keyword
import linecache
import math
import operator
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from .._torch.nested import leaves
from ..errors import InternalError

# ------------------------------------------------------------------------------------------------------ names and keys
# The user's names and keys in generated Python: they stand as objects, never as text that could run.
#
# A name is written out only if it is certain to mean itself: an ASCII identifier (Python's parser normalizes any
# further letter to NFKC, so two names become one) that is no keyword and that no class body would mangle. A key is
# written out if it is a number or a short printable ASCII text. Anything else is bound: `bind(hint, value)` gives the
# global of the generated function that holds it, `getattr(x, name)` and `x[key]` read it.
#
# Text for people goes through `shown` (one line without control characters: these could end a comment or turn the text
# around) or `key_text` (it runs no `__repr__` of the user's).

Bind = Callable[[str, object], str]

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


def item(owner: str, key: object, bind: Bind, *, makes: bool = False) -> str:
    """The expression that reads an item; of a table that `makes` missing items, the item there, or None."""
    spelled = literal(key) or bind("key", key)
    return f"{bind('item_there', dict.get)}({owner}, {spelled})" if makes else f"{owner}[{spelled}]"


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


def a_name(name: str) -> str:
    """A name with its article."""
    return f"an {name}" if name[:1] in "aeioAEIO" else f"a {name}"


def described(value: object) -> str:
    """A value's description in a few words: a tensor's elements and a module's parts are many lines."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"a module of class {type(getattr(value, '_orig_mod', value)).__name__}"
    text = str(getattr(value, "__name__", None) or repr(value))
    return text if len(text) <= 60 else a_name(type(value).__name__)


def check_function(fn: object, door: str) -> None:
    """Raise `TypeError` unless the first argument of a door is a function."""
    if not callable(fn):
        raise TypeError(f"foregrad.{door} takes a function or a module and its arguments, not {described(fn)}")


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


def in_order(keys: Collection[object]) -> list[Any]:
    """Keys in an order that does not change from run to run: strings by themselves, further keys by their texts."""
    if all(type(key) is str for key in keys):
        return sorted(keys)
    return sorted(keys, key=key_text)


def key_texts(keys: Sequence[object]) -> list[str]:
    """A text for each key; no two texts are equal."""
    texts = list(map(key_text, keys))
    if len(set(texts)) == len(texts):
        return texts
    return [text if texts.count(text) == 1 else f"{text} #{number}" for number, text in enumerate(texts)]


_units = itertools.count(1)


def compile_source(
    source: str | Sequence[str],
    name: str,
    globals: dict[str, Any],
    *,
    label: str | None = None,
    text: str | None = None,
) -> Callable[..., Any]:
    """Compile `source` and return the function called `name` that it defines.

    Several texts: each after the first has a function, compiled by itself; the global `__parts__` lists their code.
    `text`: all of it with comments at the ends of lines, for debuggers. `globals` becomes the function's globals; it
    may be added to later, and holds anything else that `source` defines. The function itself is taken out, so that no
    reference cycle keeps its constants alive. The unit's text lives exactly as long as the function's code: frames in a
    traceback count.
    """
    filename = f"<foregrad {shown(label or name)} {next(_units)}>"
    first, *parts = [source] if isinstance(source, str) else source
    whole = "".join([first, *parts]) if text is None else text
    try:
        code = compile(first, filename, "exec")
        if parts:
            line = first.count("\n") + 1
            globals["__parts__"] = codes = []
            for part in parts:
                constants = compile(part, filename, "exec").co_consts
                part_code = next(value for value in constants if isinstance(value, CodeType))
                codes.append(part_code.replace(co_firstlineno=line))
                line += part.count("\n")
    except (SyntaxError, ValueError) as error:
        raise InternalError(f"generated source for `{label or name}` is not Python ({error}):\n{whole}") from error
    globals.setdefault("__name__", "foregrad.generated")
    # No modification time: linecache then trusts the entry and never looks for a file.
    linecache.cache[filename] = (len(whole), None, whole.splitlines(keepends=True), filename)
    try:
        exec(code, globals)
        function: Callable[..., Any] = globals.pop(name)
    except BaseException:
        linecache.cache.pop(filename, None)
        raise
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
    return function


def source_of(function: Callable[..., object]) -> str:
    """The whole unit that a function made by `compile_source` was compiled from."""
    return "".join(linecache.getlines(function.__code__.co_filename))


class Names:
    """Hands out ASCII identifiers, each once, close to the hints."""

    __slots__ = ("_next", "_taken")

    _never = frozenset(keyword.kwlist) | frozenset(dir(builtins))

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(reserved)
        self._next: dict[str, int] = {}

    def take(self, names: Iterable[str]) -> None:
        """Reserve `names`."""
        self._taken.update(names)

    def fresh(self, hint: str) -> str:
        """`hint` made an identifier, with a number behind it if it is taken."""
        base = hint if is_name(hint) and len(hint) <= _LONGEST and hint[:2] != "__" else _identifier(hint)
        taken = self._taken
        name = base
        if name in taken or name in self._never:
            number = self._next.get(base, 1)
            while (name := f"{base}_{number}") in taken:
                number += 1
            self._next[base] = number + 1
        taken.add(name)
        return name


_LONGEST = 200


def _identifier(text: str) -> str:
    # Names between double underscores have a meaning in Python's globals.
    cleaned = re.sub(r"\W", "_", text[:_LONGEST], flags=re.ASCII)
    if cleaned.startswith("__"):
        cleaned = cleaned.strip("_")
    cleaned = cleaned or "value"
    return f"_{cleaned}" if cleaned[0].isdigit() else cleaned


class Renderer:
    """Values as Python expressions: literals inline, nodes by name, all else through `bind`.

    `bind(value)` returns an expression for a value that has no literal: a global's name, or `torch.float32`.
    """

    __slots__ = ("bind", "names")

    def __init__(self, names: Mapping[torch.fx.Node, str], bind: Callable[[object], str]) -> None:
        self.names = names
        self.bind = bind

    def __call__(self, value: object) -> str:
        rule = _RULES.get(type(value))
        if rule is not None:
            return rule(self, value)
        for kind, rule in _SUBCLASS_RULES:
            if isinstance(value, kind):
                return rule(self, value)
        return self.bind(value)

    def arguments(self, args: Iterable[object], kwargs: Mapping[str, object]) -> str:
        """The text between the parentheses of a call."""
        parts = [self(value) for value in args]
        if kwargs:
            named = [(key, self(value)) for key, value in kwargs.items()]
            parts += call_keywords(named, lambda _, name: self.bind(name))
        return ", ".join(parts)

    def _float(self, value: float) -> str:
        return repr(value) if math.isfinite(value) else self.bind(value)

    def _list(self, value: list[object]) -> str:
        return f"[{', '.join([self(item) for item in value])}]"

    def _tuple(self, value: tuple[object, ...]) -> str:
        items = [self(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"

    def _other_tuple(self, value: tuple[object, ...]) -> str:
        if hasattr(value, "_fields"):
            return f"{self.bind(type(value))}({', '.join([self(item) for item in value])})"
        is_spelled = isinstance(value, torch.Size) or any(isinstance(item, torch.fx.Node) for item in leaves(value))
        return self._tuple(tuple(value)) if is_spelled else self.bind(value)

    def _dict(self, value: dict[object, object]) -> str:
        return f"{{{', '.join([f'{self(key)}: {self(item)}' for key, item in value.items()])}}}"


def _node(renderer: Renderer, value: torch.fx.Node) -> str:
    return renderer.names[value]


_RULES: dict[type, Callable[[Renderer, Any], str]] = {
    torch.fx.Node: _node,
    **dict.fromkeys(
        (int, bool, type(None), str, bytes), lambda renderer, value: literal(value) or renderer.bind(value)
    ),
    type(...): lambda renderer, value: "...",
    float: Renderer._float,
    # The repr of a complex with a negative zero reads back as a different number.
    complex: lambda renderer, value: renderer.bind(value),
    list: Renderer._list,
    tuple: Renderer._tuple,
    dict: Renderer._dict,
    slice: lambda r, value: f"{r.bind(slice)}({r(value.start)}, {r(value.stop)}, {r(value.step)})",
}
# fx wraps argument containers in immutable subclasses of list and dict.
_SUBCLASS_RULES: tuple[tuple[type, Callable[[Renderer, Any], str]], ...] = (
    (torch.fx.Node, _node),
    (list, Renderer._list),
    (tuple, Renderer._other_tuple),
    (dict, Renderer._dict),
)

_INFIX: dict[object, str] = {
    operator.add: "{} + {}",
    operator.sub: "{} - {}",
    operator.mul: "{} * {}",
    operator.truediv: "{} / {}",
    operator.floordiv: "{} // {}",
    operator.mod: "{} % {}",
    operator.pow: "{} ** {}",
    operator.matmul: "{} @ {}",
    operator.lshift: "{} << {}",
    operator.rshift: "{} >> {}",
    operator.and_: "{} & {}",
    operator.or_: "{} | {}",
    operator.xor: "{} ^ {}",
    operator.eq: "{} == {}",
    operator.ne: "{} != {}",
    operator.lt: "{} < {}",
    operator.le: "{} <= {}",
    operator.gt: "{} > {}",
    operator.ge: "{} >= {}",
    operator.is_: "{} is {}",
    operator.is_not: "{} is not {}",
    operator.getitem: "{}[{}]",
    operator.neg: "-{}",
    operator.pos: "+{}",
    operator.invert: "~{}",
    operator.not_: "not {}",
}


def infix(target: object, args: tuple[object, ...], kwargs: Mapping[str, object], render: Renderer) -> str | None:
    """A call of a function of `operator` written with the operator itself; None when it has no operator."""
    template = _INFIX.get(target) if callable(target) and type(target).__hash__ is not None else None
    if template is None or kwargs or len(args) != template.count("{}"):
        return None
    operands = [_atom(render(value)) for value in args]
    if target is operator.getitem:
        operands[1] = render(args[1])
    return template.format(*operands)


def _atom(text: str) -> str:
    """`text`, protected from an operator beside it: `-1 ** x` is not `(-1) ** x`."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def unpacked(names: Sequence[str]) -> str:
    """The left side of an assignment that takes a sequence apart: `a, b = `, `a, = `; nothing for no names."""
    return f"{', '.join(names)}{',' if len(names) == 1 else ''} = " if names else ""
