"""Text of numbers that the graph computes, as prints and logs have it: made by each call after its graph has run.

`print(f"loss {loss.item():.3f}")` asks a number for its text before any graph has run. The number gives a mark in place
of the text if the bytecode of the line proves that the text goes into one call, one attribute or item, or the result,
and nowhere else. `print` or a logger that is called there finds the mark; an unread place keeps the
text. Any mark left over went where the program may look: the capture starts over, and the line's text holds the number
of the present call, as a decision.
"""

from __future__ import annotations

import bisect
import dataclasses
import dis
import functools
import logging
import operator
import re
import secrets
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from ..frontend.source import table_of
from ..house import is_house_code, is_program_module
from .effects import NOTES, RESULT, Piece, Place, Text

if TYPE_CHECKING:
    from .holders import Holder

Site = tuple[CodeType, int]
"""A call in code, or an instruction that stores or returns, by its offset."""

_BEGIN = f"\ue000foregrad {secrets.token_hex(8)} "  # in no text of the program's
_MARKS = re.compile(f"({_BEGIN}\\d+\ue001)")
_LOGGING = vars(logging)
_CALLS = {"CALL": 2, "CALL_KW": 3, "CALL_METHOD": 2, "CALL_FUNCTION": 1, "CALL_FUNCTION_KW": 2}
_IDLE = {"NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "NOT_TAKEN"}
_OF_ONE = {"FORMAT_SIMPLE", "CONVERT_VALUE", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT", "LOAD_ATTR"}
_OF_ONE |= {"GET_ITER", "TO_BOOL"}
_OF_TWO = {"FORMAT_WITH_SPEC", "BINARY_SUBSCR", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "SET_FUNCTION_ATTRIBUTE"}
_TEXTS = {"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "BUILD_STRING"}
_TO_JOIN = {"<genexpr>": "YIELD_VALUE", "<listcomp>": "LIST_APPEND"}
_MOST_CONDITIONS = 8  # in one expression: each doubles the ways to its end
_BUILDS = {"BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_MAP", "BUILD_CONST_KEY_MAP"}
_STORES = {"STORE_ATTR": 1, "STORE_SUBSCR": 2, "RETURN_VALUE": 0}  # and how many values lie above the stored one
_HAS_NULLS = sys.version_info >= (3, 11)
_HAS_METHODS = sys.version_info >= (3, 12)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    frame: FrameType
    site: Site
    piece: Piece
    number: Any
    place: Place | None  # None: a call takes it


class Texts:
    """The marks of one run that nobody has taken. `refused`: calls that earlier runs found to take text elsewhere."""

    def __init__(self, refused: set[Site], outermost: CodeType) -> None:
        self.refused, self.outermost = refused, outermost
        self.left: dict[Place, set[Site]] = {}  # places that keep text
        self._open: dict[str, _Mark] = {}
        self._count = 0

    def mark(self, number: Any, conversion: str, spec: str) -> str | None:
        """A mark for a number's text; None where the program, or PyTorch, may look at the text."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not is_program_module(frame.f_globals.get("__name__")):
            frame = frame.f_back
        if frame is None or _BEGIN in spec or "str" in frame.f_globals:
            return None
        frame, offset = _call_of_text(frame, conversion)
        if offset is None or (frame.f_code, offset) in self.refused:
            return None
        place = _place_of(frame, offset, self.outermost)
        if place == _NOWHERE:
            return None
        self._count += 1
        mark = f"{_BEGIN}{self._count}\ue001"
        self._open[mark] = _Mark(frame, (frame.f_code, offset), (conversion, spec), number, place)
        return mark

    def take(self, at: FrameType | Place | None, value: Any) -> Any:
        """A text as a `Text`, if all marks inside are of the call at a frame, or of a place; else the value unchanged.
        `at`: the place, or the frame of the call or of a function of `logging` called there.
        """
        parts: list[Any] = _MARKS.split(value) if self._open and type(value) is str else []
        if len(parts) < 2 or not all(self._is_at(mark, at) for mark in parts[1::2]):
            return value
        marks = [self._open.pop(mark) for mark in parts[1::2]]
        if isinstance(at, tuple):
            self.left.setdefault(at, set()).update(mark.site for mark in marks)
        parts[1::2] = [(mark.piece, mark.number) for mark in marks]
        return Text.later(parts)

    def take_inside(self, at: FrameType | Place | None, value: Any) -> Any:
        """`take` through containers: they are the call's own where marks are inside."""
        if not self._open or type(value) not in (list, tuple, dict):
            return self.take(at, value)
        items = value.values() if type(value) is dict else value
        taken = [self.take_inside(at, item) for item in items]
        if all(map(operator.is_, items, taken)):
            return value
        return dict(zip(value, taken, strict=True)) if type(value) is dict else type(value)(taken)

    def drop(self, frame: FrameType) -> None:
        """A logger that is called there drops the text."""
        for mark in [mark for mark in self._open if self._is_at(mark, frame)]:
            del self._open[mark]

    def _is_at(self, mark: str, at: FrameType | Place | None) -> bool:
        found = self._open.get(mark)
        if found is None or isinstance(at, tuple):
            return found is not None and found.place == at
        frame = at
        while frame is not None and frame.f_globals is _LOGGING:
            frame = frame.f_back
        if frame is not found.frame:
            return False
        steps = _steps(frame.f_code)
        return steps[_index(steps, frame.f_lasti)].offset == found.site[1]

    def take_from(self, holders: Iterable[Holder]) -> None:
        """Let the places with a run's text keep a `Text`."""
        by_table = {id(holder.target): holder for holder in holders}
        for table, key in {mark.place for mark in self._open.values() if mark.place}:
            if (holder := by_table.get(table)) is not None:
                holder.put(key, self.take_inside((table, key), holder.now(key)))

    def refuse_read(self, host: Any) -> bool:
        """Whether places with text are read: in the next run such a place gets no mark."""
        for (table, key), sites in self.left.items():
            site = host.reads.places.get(table)
            if site is not None and (key in site.items or key in site.absent or site.copy is not None):
                self.refused |= sites
                return True
        return False

    def refuse_rest(self, *, but_result: bool = False) -> bool:
        """Whether marks are left: their calls take text elsewhere, and get none in the next run."""
        left = [mark.site for mark in self._open.values() if not (but_result and mark.place == RESULT)]
        self.refused.update(left)
        return bool(left)


_NOWHERE: Place = -1, None


def _place_of(frame: FrameType, offset: int, outermost: CodeType) -> Place | None:
    """The module's attribute set by an instruction, or the result; None for a call. `_NOWHERE`: some further place, or
    code of the program's may see the text on the way.
    """
    steps, back = _steps(frame.f_code), frame.f_back
    at = _index(steps, offset)
    name = steps[at].opname
    if name == "RETURN_VALUE":
        while back is not None and is_house_code(back.f_code) and back.f_code is not outermost:
            back = back.f_back
        return RESULT if back is not None and back.f_code is outermost else _NOWHERE
    if name not in _STORES:
        return None
    way = [step for step in steps[:at] if step.opname not in _IDLE]
    key = way.pop() if name == "STORE_SUBSCR" else steps[at]
    names = []
    while way[-1].opname == "LOAD_ATTR":
        names.append(way.pop().argval)
    known = frame.f_globals if way[-1].opname == "LOAD_GLOBAL" else frame.f_locals
    owner = known.get(way[-1].argval) if way[-1].opname.startswith("LOAD_") else None
    for step in reversed(names):
        owner = (table_of(owner) or {}).get(step)
    if name == "STORE_SUBSCR":
        return None if hasattr(type(owner), NOTES) else _NOWHERE
    if not isinstance(owner, torch.nn.Module) or hasattr(getattr(type(owner), key.argval, None), "__set__"):
        return _NOWHERE
    setter = next(base for base in type(owner).__mro__ if "__setattr__" in vars(base))
    return (id(table_of(owner)), key.argval) if setter is torch.nn.Module else _NOWHERE


@functools.lru_cache(maxsize=64)
def _steps(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _index(steps: list[dis.Instruction], offset: int) -> int:
    """The instruction that a frame is at, which may be at one of its caches."""
    index = bisect.bisect_right([step.offset for step in steps], offset) - 1
    while steps[index].opname == "PRECALL":  # calls functions in C by itself
        index += 1
    return index


def _call_of_text(frame: FrameType, conversion: str) -> tuple[FrameType, int | None]:
    """The offset of the one call, store or return that takes the text which a frame makes of a value, and its frame;
    None where there is no proof of that.
    """
    steps = _steps(frame.f_code)
    index = _index(steps, frame.f_lasti)
    step = steps[index]
    if step.opname.startswith("FORMAT_") or step.opname == "CONVERT_VALUE":
        has_spec = step.opname == "FORMAT_WITH_SPEC" or (step.opname == "FORMAT_VALUE" and bool((step.arg or 0) & 4))
        is_whole = not (has_spec and conversion)  # a specification would apply to the mark
    else:
        is_whole = _is_of_literal(steps, index, "format") if not conversion else _text_at(steps, index) is not None
    found = _taker(steps, index) if is_whole else None
    if found is not None and steps[found[0]].opname in _TO_JOIN.values():
        name, outer = frame.f_code.co_name, frame.f_back
        if outer is None or steps[found[0]].opname != _TO_JOIN.get(name):
            return frame, None
        frame, steps = outer, _steps(outer.f_code)
        found = _taker_of_joined(steps, _index(steps, outer.f_lasti))
    return frame, None if found is None else steps[found[0]].offset


def _taker_of_joined(steps: list[dis.Instruction], index: int) -> tuple[int, bool] | None:
    """What takes the text of `", ".join(f"..." for ...)`, whose parts are made in a call of this frame: `join` alone
    sees the parts. A list is made before `join` is called.
    """
    join, names = index, [step.opname for step in steps[: index + 1] if step.opname not in _IDLE]
    *_, before, call, last = "", "", "", *names
    if call == "GET_ITER" and last in _CALLS and (of_list := _taker(steps, index)) is not None:
        join = of_list[0]
    elif before != "GET_ITER" or call not in _CALLS:
        return None
    return _taker(steps, join) if _is_of_literal(steps, join, "join") else None


def _is_of_literal(steps: list[dis.Instruction], index: int, method: str) -> bool:
    """Whether a call is `"...".format(...)`, or a further method of a literal."""
    for at in reversed(range(1, index)):
        if steps[at].opname in ("LOAD_METHOD", "LOAD_ATTR") and steps[at].argval == method:
            before = steps[at - 1]
            if before.opname == "LOAD_CONST" and type(before.argval) is str:
                return _taker(steps, at, is_callee=True) == (index, True)
    return False


def _text_at(steps: list[dis.Instruction], at: int) -> int | None:
    """The beginning of a literal, a call `str(...)`, or a sum of such texts, up to an instruction; else None."""
    while at > 0 and steps[at].opname in _IDLE:
        at -= 1
    step = steps[at]
    if step.opname == "LOAD_CONST":
        return at if type(step.argval) is str else None
    if _is_sum(step):
        right = _text_at(steps, at - 1)
        return None if right is None else _text_at(steps, right - 1)
    if step.opname in _CALLS:
        for begin in reversed(range(at)):
            if steps[begin].opname == "LOAD_GLOBAL" and steps[begin].argval == "str":
                return begin if _taker(steps, begin, is_callee=True) == (at, True) else None
    return None


def _is_sum(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_ADD" or (step.opname == "BINARY_OP" and step.argrepr == "+")  # the first until 3.10


def _taker(
    steps: list[dis.Instruction], index: int, above: tuple[bool, ...] = (), depth: int = 0, *, is_callee: bool = False
) -> tuple[int, bool] | None:
    """(The instruction that takes the topmost value after an instruction, whether it calls that value): a call, a
    store, a return, or a part given to a `join`. None where a further instruction takes it, or may. In a longer text,
    and in a container made there, it is still whole. `above`: the values that lie above it, and whether each is a text.
    `depth`: the conditions on the way.
    """
    at = index + 1
    while at < len(steps):
        name, arg, at = steps[at].opname, steps[at].arg or 0, at + 1
        step, lie = steps[at - 1], len(above)
        if name == "JUMP_FORWARD":
            at = _index(steps, step.argval)
            continue
        if name.startswith("POP_JUMP_") and step.argval > step.offset and lie and depth < _MOST_CONDITIONS:
            ways = at - 1, _index(steps, step.argval) - 1
            here, there = (_taker(steps, way, above[:-1], depth + 1, is_callee=is_callee) for way in ways)
            return here if here == there else None
        if not is_callee:
            if name in _BUILDS and lie < _built_of(name, arg):
                above = ()
                continue
            if lie == 0 and (name == "FORMAT_SIMPLE" or (name == "FORMAT_VALUE" and arg == 0)):
                continue
            if lie < 2 and _is_sum(step) and (above == (True,) or _text_at(steps, at - 1) is not None):
                above = ()
                continue
            if lie == 0 and name == "STORE_FAST":
                load = _only_load(steps, at - 1)
                found = None if load is None else _taker(steps, load, depth=depth)
                return None if found is None or steps[found[0]].opname.startswith("STORE_") else found
            if lie == 0 and name in _TO_JOIN.values():
                return at - 1, False
        effect = _effect(name, arg)
        if effect is None:
            return None
        pops, pushes = effect
        if pops > lie:
            is_stored = lie == _STORES.get(name)
            return (at - 1, lie >= pops - 2 and not is_stored) if name in _CALLS or is_stored else None
        is_text = name in _TEXTS or (name == "LOAD_CONST" and type(step.argval) is str)
        above = above[: lie - pops] + (is_text,) * pushes
    return None


def _only_load(steps: list[dis.Instruction], store: int) -> int | None:
    """The one read of a variable set by an instruction, where each read follows a store of its own."""
    name, reads = steps[store].argval, []
    for at, step in enumerate(steps):
        if step.argval in ("locals", "vars", "eval", "exec"):
            return None
        if step.argval == name or (type(step.argval) is tuple and name in step.argval):
            reads += [at] * (step.opname != "STORE_FAST")
    is_read = len(reads) == 1 and steps[reads[0]].opname in ("LOAD_FAST", "LOAD_FAST_BORROW")
    is_led_to = is_read and not any(step.is_jump_target for step in steps[store + 1 : reads[0] + 1])
    return reads[0] if is_led_to and reads[0] > store else None


def _built_of(name: str, arg: int) -> int:
    return arg * (1 + (name == "BUILD_MAP")) + (name == "BUILD_CONST_KEY_MAP")


def _effect(name: str, arg: int) -> tuple[int, int] | None:
    """(How many values an instruction takes from the stack, how many it puts there); None: not known, or a jump."""
    if name in _IDLE:
        return 0, 0
    if name in _CALLS:
        return arg + _CALLS[name], 1
    if name in _BUILDS:
        return _built_of(name, arg), 1
    if name in _STORES:
        return _STORES[name] + 1, 0
    if name == "FORMAT_VALUE":
        return (2, 1) if arg & 4 else (1, 1)
    if name == "LOAD_METHOD":
        return 1, 2
    if name in _OF_ONE:
        return 1, 1 + (name == "LOAD_ATTR" and _HAS_METHODS and arg & 1)
    if name == "MAKE_FUNCTION":  # until 3.10, from its code and its name
        return arg.bit_count() + (1 if _HAS_NULLS else 2), 1
    if name in ("BUILD_SLICE", "BINARY_SLICE"):
        return arg or 3, 1
    if name in _OF_TWO or name.startswith("BINARY_"):
        return 2, 1
    if name == "LOAD_GLOBAL":
        return 0, 1 + (_HAS_NULLS and arg & 1)
    if name.startswith("LOAD_FAST"):
        return (0, name.count("LOAD_FAST")) if name != "LOAD_FAST_AND_CLEAR" else None
    loads = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE", "PUSH_NULL")
    return (0, 1) if name in loads else None
