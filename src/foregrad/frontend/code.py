"""What a code object names, read off its bytecode: globals, attributes, modules that it imports, names it makes up."""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import re
import types
from collections.abc import Iterator

__all__ = ["CodeNames", "names_of"]

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_NAMED_LOADS = _LOADS | {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL"}  # what is written to is looked at: a write of what is there is no change
_ASKS = {"getattr", "hasattr"}
_NAMES_ANYTHING = {"vars", "__dict__", "__getattribute__", "attrgetter", "asdict", "fields", "to_dict", "dir"}
_NAMESPACE = {"globals", "eval", "exec"}
_FORMATS = {"format", "format_map", "Formatter", "vformat"}  # whose fields name attributes: "{0.name}"
_LOADERS = {"import_module", "__import__"}
_NOT_ARGUMENTS = {"PUSH_NULL", "PRECALL", "KW_NAMES", "CACHE", "NOP", "EXTENDED_ARG"}
_WORD = re.compile(r"[^\W\d]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class CodeNames:
    """Of a code object and all functions made in it.

    `loaded` are globals; `others` attribute names and strings that might be such; `probed` those of them that the
    code asks for without knowing whether they are there; `imports` modules as (name, level). `made_up_of`: what it gets
    at attributes of whose names stand nowhere, a global or "" for anything. `whole_namespace`: it asks for globals by
    other means than their name. `compares`: where it asks whether two objects are one, by `is` or `id`:
    the path of the global that one of them is, or none. `handed_on`: what it loads for more than an attribute of it.
    """

    loaded: frozenset[str]
    others: frozenset[str]
    probed: frozenset[str]
    imports: frozenset[tuple[str, int]]
    made_up_of: frozenset[str]
    whole_namespace: bool
    compares: frozenset[tuple[str, ...]]
    handed_on: frozenset[str]


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> CodeNames:
    """The names in a code object."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    loaded, imports, compares = _loaded(instructions)
    named = set(code.co_names)
    others, probed = set(named), set()
    strings = list(_strings(code))
    # An attribute may have any name where it is asked for by a text.
    words = set(strings) if named & _ASKS else {text for text in strings if text.isidentifier()}
    others |= words
    if named & _ASKS:
        probed |= words
    if "AttributeError" in named or "suppress" in named:
        probed |= named
    if named & _FORMATS:
        others |= {word for text in strings if "{" in text for word in _WORD.findall(text)}
    if named & _LOADERS or {"sys", "modules"} <= named:
        imports |= {(text, 0) for text in (*strings, "")}  # "": `sys.modules[__name__]`
    whole, handed_on = bool(named & _NAMESPACE), _handed_on(instructions)
    if whole:
        loaded |= {word for text in strings for word in _WORD.findall(text)}
    made_up = {""} if named & _NAMES_ANYTHING else _asked_for_made_up(instructions) if named & _ASKS else set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_of(constant)
            loaded |= inner.loaded
            others |= inner.others
            probed |= inner.probed
            imports |= inner.imports
            made_up |= inner.made_up_of
            whole = whole or inner.whole_namespace
            compares |= inner.compares
            handed_on |= inner.handed_on
    return CodeNames(
        frozenset(loaded),
        frozenset(others),
        frozenset(probed),
        frozenset(imports),
        frozenset(made_up),
        whole,
        frozenset(compares),
        frozenset(handed_on),
    )


def _strings(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from (item for item in constant if isinstance(item, str))


def _loaded(
    instructions: list[dis.Instruction],
) -> tuple[set[str], set[tuple[str, int]], set[tuple[str, ...]]]:
    """Globals; modules that are imported; comparisons of two objects by which they are."""
    loaded, imports = set(), set()
    compares: set[tuple[str, ...]] = set()
    before: list[dis.Instruction] = []
    for instruction in instructions:
        if instruction.opname in _LOADS:
            loaded.add(instruction.argval)
            if instruction.argval == "id":
                compares.add(())
        elif instruction.opname in _STORES:
            loaded.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":  # the level and what is taken from it were pushed before
            level = before[-2].argval if len(before) > 1 else 0
            imports.add((instruction.argval, level if isinstance(level, int) else 0))
        elif instruction.opname == "IS_OP" and not _is_of_no_tensor(before):
            compares.add(_global_path(before))
        if instruction.opname not in _NOT_ARGUMENTS:
            before = [*before[-4:], instruction]
    return loaded, imports, compares


def _handed_on(instructions: list[dis.Instruction]) -> set[str]:
    """Globals and cells that are loaded, and not for an attribute of them alone."""
    return {
        str(now.argval)
        for now, following in itertools.pairwise(instructions)
        if now.opname in _NAMED_LOADS and following.opname not in ("LOAD_ATTR", "LOAD_METHOD")
    }


def _is_of_no_tensor(before: list[dis.Instruction]) -> bool:
    """Whether one of two objects, which were just loaded, is a constant or a class, however it was come by."""
    if before[-1].opname == "LOAD_CONST":
        return True
    return any((i.opname in _LOADS and i.argval == "type") or i.argval == "__class__" for i in before)


def _global_path(before: list[dis.Instruction]) -> tuple[str, ...]:
    """The names by which a global, or an attribute of one, was just loaded; none for anything else."""
    *earlier, last = before
    if last.opname in _LOADS:
        return (last.argval,)
    if last.opname == "LOAD_ATTR" and earlier and earlier[-1].opname in _LOADS:
        return (earlier[-1].argval, last.argval)
    return ()


def _asked_for_made_up(instructions: list[dis.Instruction]) -> set[str]:
    """Of what a `getattr` or `hasattr` may ask for a name that is no constant: globals; "" is anything else."""
    found = set()
    for at, instruction in enumerate(instructions, 1):
        if instruction.argval in _ASKS and instruction.opname in _LOADS and not _name_is_constant(instructions, at):
            of = next((i for i in instructions[at:] if i.opname not in _NOT_ARGUMENTS), None)
            found.add(str(of.argval) if of is not None and of.opname in _LOADS else "")
    return found


def _name_is_constant(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether the second argument of the call is a constant, whose function was loaded just before `at`.

    What is on the stack above the function is followed to the call. The second argument starts where one argument is
    there, the third where two are: a constant is one instruction, after which nothing else may start there.
    """
    height, second, thirds = 0, None, 0
    for instruction in instructions[at:]:
        if instruction.opname in _NOT_ARGUMENTS:
            continue
        if instruction.opname.startswith("CALL") and height in (2, 3) and instruction.arg == height:
            return second is not None and thirds == height - 2
        if height == 1:
            second = instruction if second is None and instruction.opname == "LOAD_CONST" else None
            if second is None and instruction.opname in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
                return False
        elif height == 2:
            thirds += 1
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        height += dis.stack_effect(
            instruction.opcode, instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        )
        if height < 0:
            return False
    return False
