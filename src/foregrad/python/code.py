"""The names in a code object, read off its bytecode: globals, attributes, imports, and where names are made up."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_NAMED_LOADS = _LOADS | {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_DEREFERENCES = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "STORE_DEREF", "DELETE_DEREF"}
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL"}  # a place that is written counts as read, too
_ASKS, _SETS = {"getattr", "hasattr"}, {"setattr", "delattr"}
_NAMESPACES, _NAMES_BY_TEXT = {"__dict__", "vars", "globals"}, {"eval", "exec", "__setattr__", "__delattr__"}
_WRITERS = set("append appendleft extend extendleft insert remove sort reverse add discard subtract".split())
_WRITERS_OF_TABLES = set("update setdefault pop popitem clear __setitem__ __delitem__".split())
_NAMES_ANYTHING = set("vars dir getmembers __dict__ __getattribute__ attrgetter asdict fields to_dict".split())
_NAMESPACE = {"globals", "eval", "exec"}
_FORMATS = {"format", "format_map", "Formatter", "vformat"}  # format strings can name attributes: "{0.name}"
_LOADERS = {"import_module", "__import__"}
_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_TABLES, _ITEMS = {"environ": "os", "modules": "sys"}, {"get", "pop", "setdefault", "__getitem__", "__contains__"}
_OF_OPERATOR = {"is_", "is_not"}
_OF_IDENTITY = {"id", *_OF_OPERATOR}
_NOT_ARGUMENTS = {"PUSH_NULL", "PRECALL", "KW_NAMES", "NOP"}
# Attributes of functions and classes that code with these names asks for.
OF_CODE = {
    name: {name}
    for name in (
        *("__annotations__", "__code__", "__defaults__", "__doc__", "__kwdefaults__", "__subclasses__"),
        *("__module__", "__name__", "__qualname__"),
    )
}
OF_CODE["signature"] = OF_CODE["getfullargspec"] = {"__defaults__", "__kwdefaults__", "__annotations__"}
OF_CODE["get_type_hints"] = OF_CODE["get_annotations"] = {"__annotations__"}
_WORD = re.compile(r"[^\W\d]\w*")


class CodeNames(NamedTuple):
    """The names in a code object and in all its inner functions.

    `loaded` are globals; `others` attribute names and strings that might be names; `probed` the names that the code
    asks for without knowing whether they exist; `imports` modules as (name, level). `made_up_of`: the objects with
    attributes under names made at run time: a global, or "" for anything. `whole_namespace` is not empty where the code
    asks for globals not by name. `compares`: where the code compares identities, by `is` or `id`: the path of the
    global compared, or none. `handed_on`: values loaded for more than an attribute. `cells`: the free variables that
    the code reads or hands to inner functions.
    """

    loaded: frozenset[str]
    others: frozenset[str]
    probed: frozenset[str]
    imports: frozenset[tuple[str, int]]
    made_up_of: frozenset[str]
    whole_namespace: frozenset[str]
    compares: frozenset[tuple[str, ...]]
    handed_on: frozenset[str]
    gone_through: frozenset[str]
    cells: frozenset[str]


class NamesMet(NamedTuple):
    """The names in the code reached so far, the names that may be missing, and the number of objects looked at under
    the names.
    """

    names: frozenset[str] = frozenset()
    probed: frozenset[str] = frozenset()
    makes_up_names: bool = False
    objects: int = 0


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and its inner functions' code."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def functions_of(codes: Collection[types.CodeType]) -> list[types.FunctionType]:
    """The functions with the `codes`, but for new functions: a run makes new functions while the collector is off."""
    if not codes:  # the collector looks at all objects
        return []
    young = {id(value) for value in gc.get_objects(generation=0)}
    return [f for f in gc.get_referrers(*codes) if type(f) is types.FunctionType and id(f) not in young]


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType, apart: frozenset[types.CodeType] = frozenset()) -> CodeNames:
    """The names in a code object; inner functions with code in `apart` are left out."""
    instructions = instructions_of(code)
    loaded, imports, compares = _loaded(instructions)
    named = set(code.co_names)
    others, probed = set(named), set()
    if not any(i.value == "__name__" for i in instructions if i.name in _OF_ATTRIBUTES):
        others.discard("__name__")  # the global
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
    whole, handed_on = named & _NAMESPACE, _handed_on(instructions)
    if whole:
        loaded |= {word for text in strings for word in _WORD.findall(text)}
    matches = any(i.name == "MATCH_CLASS" and i.argument for i in instructions)  # attributes that the class names
    made_up = {""} if matches or named & _NAMES_ANYTHING else _asked_for_made_up(instructions) if named & _ASKS else ()
    cells = {instruction.value for instruction in instructions if instruction.name in _DEREFERENCES} if apart else set()
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType) and constant not in apart]
    cells.update(*(inner.co_freevars for inner in inside))
    own = loaded, others, probed, imports, made_up, whole, compares, handed_on, _gone_through(instructions), cells
    parts: Any = zip(own, *(names_of(inner, apart) for inner in inside), strict=True)
    united: Any = [frozenset().union(*part) for part in parts]
    united[-1] = united[-1].intersection(code.co_freevars) if apart else frozenset(code.co_freevars)
    return CodeNames(*united)


def imports_of(code: types.CodeType) -> frozenset[tuple[str, int]]:
    """The modules that code and its inner functions import, as (name, level); quick for code without imports."""
    named = code.co_names
    imports = _IMPORT in code.co_code[::2] or not _LOADERS.isdisjoint(named) or ("sys" in named and "modules" in named)
    inner = [imports_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (names_of(code).imports if imports else frozenset()).union(*inner)


class Seen(NamedTuple):
    """Lookups of a code object and its inner functions: names, modules to import as (name, level). `code` is kept so
    that no other code gets its id.
    """

    names: frozenset[str]
    imports: frozenset[tuple[str, int]]
    code: types.CodeType


_seen: dict[int, Seen] = {}


def look_at(code: types.CodeType) -> Seen:
    """Names and imports in code, told without its instructions."""
    if (known := _seen.get(id(code))) is not None:
        return known
    inner = (look_at(constant).names for constant in code.co_consts if isinstance(constant, types.CodeType))
    texts = (constant for constant in code.co_consts if type(constant) is str and constant.isidentifier())
    seen = _seen[id(code)] = Seen(frozenset(code.co_names).union(texts, *inner), imports_of(code), code)
    return seen


@functools.lru_cache(maxsize=8192)
def stored_in(code: types.CodeType) -> frozenset[str]:
    """The attributes that code sets or deletes, whatever the object, by themselves or as items of a table of attributes
    (or of `sys.modules`); inner functions are left out.
    """
    stored = {text for text in _strings(code) if text.isidentifier()} if "setattr" in code.co_names else set()
    by_table = not _OF_TABLES.isdisjoint(code.co_names)
    if not (_STORES_OF_ATTRIBUTES | (_STORES_OF_ITEMS if by_table else set())).isdisjoint(code.co_code[::2]):
        for before, now in itertools.pairwise(instructions_of(code)):
            if dis.opmap[now.name] in _STORES_OF_ATTRIBUTES:
                stored.add(now.value)
            elif by_table and dis.opmap[now.name] in _STORES_OF_ITEMS and type(before.value) is str:
                stored.add(before.value)
    return frozenset(stored)


@functools.lru_cache(maxsize=8192)
def entered_by(code: types.CodeType) -> tuple[frozenset[Any], frozenset[Any]]:
    """The globals, variables of outer functions and attributes that code enters by `with`; and, where there are some,
    the written objects, with a mark for writes to anything else.
    """
    if _ENTERS.isdisjoint(code.co_code[::2]):
        return frozenset(), frozenset()
    stores = _STORES_OF_ATTRIBUTES | _STORES_OF_GLOBALS | _STORES_OF_ITEMS
    pairs = [(of.value, dis.opmap[now.name]) for of, now in itertools.pairwise(instructions_of(code))]
    written = {of for of, now in pairs if now in stores}
    written |= (_WRITERS | _WRITERS_OF_TABLES).intersection(code.co_names)
    return frozenset(of for of, now in pairs if now in _ENTERS and type(of) is str), frozenset(written)


@functools.lru_cache(maxsize=8192)
def may_set(code: types.CodeType, *, is_trusted: bool) -> frozenset[str] | None:
    """The globals and attributes that code may set or delete, without inner functions; None: any. Trusted code hands no
    table of attributes on to code that would write there.
    """
    named = set(code.co_names)
    writes = named & _WRITERS_OF_TABLES or not _STORES_OF_ITEMS.isdisjoint(code.co_code[::2])
    by_table = named & _NAMESPACES and writes if is_trusted else named & (_NAMESPACES | _NAMES_BY_TEXT)
    if by_table or (named & _SETS and _asked_for_made_up(instructions_of(code), _SETS)):
        return None
    stored = stored_in(code)
    if not _STORES_OF_GLOBALS.isdisjoint(code.co_code[::2]):
        stored |= {i.value for i in instructions_of(code) if dis.opmap[i.name] in _STORES_OF_GLOBALS}
    return stored


def imported_modules(
    imports: Iterable[tuple[str, int]], namespace: dict[str, Any]
) -> Iterator[tuple[str, types.ModuleType]]:
    """Yields (name, module) for each loaded module that the code imports, parent packages included."""
    for name, level in sorted(imports):
        if level:
            package = str(namespace.get("__package__") or "").rsplit(".", level - 1)[0]
            name = f"{package}.{name}".strip(".")
        parts = (name or str(namespace.get("__name__"))).split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType):
                yield name, module


class Instruction(NamedTuple):
    """`value`: the name or constant that the argument stands for, if it stands for one."""

    name: str
    argument: int
    value: Any


_EXTENDED, _CACHE, _IMPORT = dis.opmap["EXTENDED_ARG"], dis.opmap.get("CACHE", -1), dis.opmap["IMPORT_NAME"]
_STORES_OF_ATTRIBUTES = {dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]}
_ENTERS = {dis.opmap[name] for name in ("BEFORE_WITH", "SETUP_WITH") if name in dis.opmap}
_STORES_OF_GLOBALS = {dis.opmap[name] for name in (*_STORES, "STORE_NAME", "DELETE_NAME")}
_STORES_OF_ITEMS, _OF_TABLES = {dis.opmap["STORE_SUBSCR"], dis.opmap["DELETE_SUBSCR"]}, {"vars", "__dict__", "modules"}
_CONSTANTS, _NAMES, _CELLS = set(dis.hasconst), set(dis.hasname), set(dis.hasfree)
# Some arguments are the number of a name and flags behind it.
_FLAGS = {
    dis.opmap.get(name, -1): flags
    for name, since, flags in (("LOAD_GLOBAL", (3, 11), 1), ("LOAD_ATTR", (3, 12), 1), ("LOAD_SUPER_ATTR", (3, 12), 2))
    if sys.version_info >= since
}


def instructions_of(code: types.CodeType) -> list[Instruction]:
    """The instructions of a code object, for the most part; `dis` knows more, and takes several times as long."""
    found: list[Instruction] = []
    constants, names, cells = code.co_consts, code.co_names, _cells_of(code)
    made, opname, raw = found.append, dis.opname, code.co_code
    extended = 0
    for operator, argument in zip(raw[::2], raw[1::2], strict=True):
        if operator == _CACHE:
            continue
        argument |= extended
        extended = argument << 8 if operator == _EXTENDED else 0
        if operator in _NAMES:
            made(Instruction(opname[operator], argument, names[argument >> _FLAGS.get(operator, 0)]))
        elif operator in _CONSTANTS:
            made(Instruction(opname[operator], argument, constants[argument]))
        elif operator in _CELLS:
            made(Instruction(opname[operator], argument, cells[argument]))
        elif operator != _EXTENDED:
            made(Instruction(opname[operator], argument, argument))
    return found


def _cells_of(code: types.CodeType) -> tuple[str, ...]:
    """The variables that instructions on cells count."""
    if sys.version_info < (3, 11):
        return code.co_cellvars + code.co_freevars
    local = code.co_varnames
    return (*local, *(name for name in code.co_cellvars if name not in local), *code.co_freevars)


def _strings(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from (item for item in constant if isinstance(item, str))


def _loaded(instructions: list[Instruction]) -> tuple[set[str], set[tuple[str, int]], set[tuple[str, ...]]]:
    """Loaded globals; imported modules; comparisons by identity."""
    loaded, imports = set(), set()
    compares: set[tuple[str, ...]] = set()
    before: list[Instruction] = []
    for instruction in instructions:
        if instruction.name in _LOADS:
            loaded.add(instruction.value)
            if instruction.value in _OF_IDENTITY:
                compares.add(())
        elif instruction.name in _STORES:
            loaded.add(instruction.value)
        elif instruction.name == "IMPORT_NAME":  # the level and the names to import were pushed before
            level = before[-2].value if len(before) > 1 else 0
            imports.add((instruction.value, level if isinstance(level, int) else 0))
        elif instruction.name in _OF_ATTRIBUTES and instruction.value in _OF_OPERATOR:
            compares.add(())
        elif instruction.name == "IS_OP" and not _is_of_no_tensor(before[-5:]):
            compares.add(_global_path(before[-5:]))
        if instruction.name not in _NOT_ARGUMENTS:
            before.append(instruction)
    return loaded, imports, compares


def _handed_on(instructions: list[Instruction]) -> set[str]:
    """Globals and cells that are loaded for more than an attribute."""
    return {
        str(now.value)
        for now, following in itertools.pairwise(instructions)
        if now.name in _NAMED_LOADS and following.name not in ("LOAD_ATTR", "LOAD_METHOD")
    }


def _gone_through(instructions: list[Instruction]) -> set[str]:
    """`os.environ`, `sys.modules` or both, where code does more than take items by a key (a constant key for
    `os.environ`).
    """
    steps = [i for i in instructions if i.name not in _NOT_ARGUMENTS]
    found = set()
    for at, step in enumerate(steps):
        if type(step.value) is str and _TABLES.get(step.value) == steps[at - 1].value:
            now, then = (*steps[at + 1 : at + 3], step, step)[:2]
            if now.name == "CONTAINS_OP":
                key: Instruction | None = steps[at - 2]
            elif now.name in _OF_ATTRIBUTES and now.value in _ITEMS:
                key = then
            else:
                key = now if then.name.endswith("_SUBSCR") else None
            if key is None or (step.value == "environ" and key.name != "LOAD_CONST"):
                found.add(step.value)
    return found


def _is_of_no_tensor(before: list[Instruction]) -> bool:
    """Whether one of the two objects loaded last is a constant or a class, from any source."""
    if before[-1].name == "LOAD_CONST":
        return True
    return any((i.name in _LOADS and i.value == "type") or i.value == "__class__" for i in before)


def _global_path(before: list[Instruction]) -> tuple[str, ...]:
    """The path of the global, or of its attribute, that was loaded last; empty for anything else."""
    *earlier, last = before
    if last.name in _LOADS:
        return (last.value,)
    if last.name == "LOAD_ATTR" and earlier and earlier[-1].name in _LOADS:
        return (earlier[-1].value, last.value)
    return ()


def _asked_for_made_up(instructions: list[Instruction], asks: Collection[str] = _ASKS) -> set[str]:
    """The globals that a `getattr` or `hasattr` may ask for a name that is no constant; "" is anything else."""
    found = set()
    for at, instruction in enumerate(instructions, 1):
        if instruction.name in _LOADS and instruction.value in asks and not _name_is_constant(instructions, at):
            of = next((i for i in instructions[at:] if i.name not in _NOT_ARGUMENTS), None)
            found.add(str(of.value) if of is not None and of.name in _LOADS else "")
    return found


def _name_is_constant(instructions: list[Instruction], at: int) -> bool:
    """Whether the second argument is a constant, in the call of the function loaded just before `at`.

    The stack above the function is followed to the call. The second argument starts with one value on the stack, the
    third with two: a constant is one instruction, with no further start in the same place.
    """
    height, second, thirds = 0, None, 0
    for instruction in instructions[at:]:
        if instruction.name in _NOT_ARGUMENTS:
            continue
        if instruction.name.startswith("CALL") and height in (2, 3) and instruction.argument == height:
            return second is not None and thirds == height - 2
        if height == 1:
            second = instruction if second is None and instruction.name == "LOAD_CONST" else None
            if second is None and instruction.name in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
                return False
        elif height == 2:
            thirds += 1
        operator = dis.opmap[instruction.name]
        if operator in dis.hasjrel or operator in dis.hasjabs:
            return False
        height += dis.stack_effect(operator, instruction.argument if operator >= dis.HAVE_ARGUMENT else None)
        if height < 0:
            return False
    return False
