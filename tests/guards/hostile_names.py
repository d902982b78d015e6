"""Names that are no identifiers, or look like code, or are names of foregrad's own; keys of all kinds."""
# ruff: noqa: RUF001 - letters that look like others are what it is about

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import keyword
import types
from typing import Any

import torch

CANARY = "foregrad_canary"
_RUN = f"setattr(__import__('builtins'),'{CANARY}',1)"


def canary_is_alive() -> bool:
    """Whether no name was run as code."""
    return not hasattr(builtins, CANARY)


_CODE = [
    _RUN,
    f"x = {_RUN}",
    f"x\n    {_RUN}\n",
    f"x\r    {_RUN}\r",
    f"x\x0c{_RUN}",
    f"x\u2028    {_RUN}",
    f"x\x85    {_RUN}",
    f"x; {_RUN}",
    f"x'] or {_RUN} or {{}}['",
    f'x"] or {_RUN} or {{}}["',
    f"\\'] or {_RUN} #",
    f'\\"] or {_RUN} #',
    f"x'), {_RUN}, ('",
    f'x"), {_RUN}, ("',
    f"'''\n{_RUN}\n'''",
    f'"""\n{_RUN}\n"""',
    f"{{{_RUN}}}",
    f"{{0.__class__}}{_RUN}",
    f"#\n    {_RUN}",
    f"x): return {_RUN}\n    if (True",
    f"x, {_RUN}, y",
    f"x: {_RUN}",
    f"x={_RUN}",
    f"x[{_RUN}]",
    f"x.y({_RUN})",
    f"(lambda: {_RUN})()",
    f"x if {_RUN} else y",
    f"* {_RUN}",
    f"*[{_RUN}]",
    f"**{{'a': {_RUN}}}",
    f"@{_RUN}\ndef f(): pass",
    f"\\\n{_RUN}",
    f"x\n\n\n{_RUN}\ndef call(args, kwargs):\n    return {_RUN}",
    f"import os\n{_RUN}",
    f"global x; {_RUN}",
    f"%({_RUN})s",
    f"${{{_RUN}}}",
    f"`{_RUN}`",
    f"x # {_RUN}",
    f"{_RUN}\0",
]
_OURS = """
    torch MISS call forward backward args kwargs ctx others error primals_1 primals_2 tangents_1 tangents_2 out_0 out_1
    saved_0 apply node watch handles check objects values tensors root constant keys cls flatten items context key build
    forward_graph backward_graph global_state isfinite copysign method holds tensor_of whole_memory storage_key
    shares_memory memories check_parameters tensors_found ABSENT version place_0 places view with_history write_with_history
    mark join no_grad enable_grad is_grad_enabled no_autocast generator generator_state_0 unless_ended fault again differs decided
    args_0 args_0_0 kwargs_0 s0 s1 self state math Size name_1 key_1 name key_0 attribute x x_1 _ __ _0 lifted param
    differentiable_backward watched_backward partial_backward keeps_graph lines source check_1 hooks_seen
""".split()
_DUNDERS = """
    __name__ __builtins__ __debug__ __file__ __import__ __build_class__ __annotations__ __spec__ __loader__
    __package__ __mangled __call __x_ ___ __getattr__x __slots
""".split()
_BUILTINS = "len type tuple set print list dict getattr object int float str id KeyError Exception range max".split()
# fmt: off
_TWINS = [  # each pair is one identifier to Python
    "ﬁ", "fi", "ﬂow", "flow", "ª", "a", "\u212a", "K", "ſ", "s", "𝒙", "x", "\u212b", "\u00c5", "é", "e\u0301", "ⅷ",
    "viii", "Ⅳ", "IV", "ℌ", "H", "ｘｙ", "xy", "ｉｆ", "𝐝𝐞𝐟", "ℯ", "e", "²", "x²", "µ", "μ", "ʰ", "h", "ｃａｌｌ", "ﬁ_1",
    "fi_1", "ǆ", "dž", "𝔸", "A", "ａｒｇｓ", "Ω", "Ω", "ﬀ", "ff",
]
_CHARACTERS = [
    "\u202e", "\u2066x\u2069", "x\u200b", "\u200dx", "\ufeff", "\u00ad", "\ud800", "\udc80x", "x\udfff", "\0",
    "a\0b", "\n", "\r", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\xa0", "\u2028", "\u2029", "\u3000",
    " ", "  ", "x ", " x", "'", '"', "'\"", "'''", '"""', "\\", "\\\\", "\\n", "\\'", '\\"', "\\x41", "\\u0041",
    "\\N{DASH}", "\\0", "x\\", "{", "}", "{}", "{0}", "{{}}", "{x!r}", "%s", "%", "%(x)s", "$", "$x", "#", "#x",
    "@", "!", "?", "~", "^", "&", "|", "(", ")", "()", "[", "]", "[0]", "x[0]", "<", ">", "<x>", ",", ":", ";", "=",
    ":=", "==", "->", "*", "**", "*x", "+", "-", "-1", "0", "1", "01", "1x", "1e5", "0x10", "1_000", "½", "x-y",
    "x y", "x/y", "a\nb", "x'y", "中", "名前", "\U0001f600", "\U0010ffff", "\u0301", "שלום", "مرحبا", "x" * 300,
    "é" * 5_000, "long " * 20_000, "...", "None ", "nan",
]
# fmt: on
NAMES: list[str] = list(
    dict.fromkeys([*_CODE, *keyword.kwlist, *keyword.softkwlist, *_OURS, *_DUNDERS, *_BUILTINS, *_TWINS, *_CHARACTERS])
)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Text(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Name(str):
    """A text of a class of its own, whose repr is code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _RUN


class Key:
    """Equal only to itself, with a repr that is code, or none at all."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text

    def __repr__(self) -> str:
        if self.text is None:
            raise RuntimeError("no repr")
        return self.text


Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


KEYS: list[Any] = [
    *Color, Text.RED, Number.ONE, Name("name"), Name("torch"), Key(_RUN), Key("x'\n"), Key(), Point(1, 2), Frozen(3),
    None, False, 2, 3.5, -0.0, -7, 10**30, -(10**5000), float("nan"), float("inf"), float("-inf"), 2 + 3j, complex("nan"),
    b"bytes", b"'\n", (), (5,), (1, "a"), ((1, 2), (3, (4,))), (None, float("nan")), (Color.RED, torch.float32),
    frozenset(), frozenset({1, 2}), frozenset({"a'"}), torch.float32, torch.int8, torch.strided, torch.channels_last,
    torch.device("cpu"), torch.Size([2, 3]), int, torch.nn.Linear, type(None), len, torch.sin, types, torch, ...,
    range(3), NotImplemented, canary_is_alive, (lambda: 0), "red", "plain",
]  # fmt: skip
