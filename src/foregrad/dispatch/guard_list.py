"""Guards as data: the conditions that make a graph right for a call, in the order of testing.

A `GuardList` is made once for each graph: by `guards.CallGuards` from a call and its capture, or by
`artifacts.module.StoredGuards` from a specialization of an artifact. Its steps are guards, and lines that bind
variables:

    Guard(test, name, expected, now)

`test` is Python over the variables that the lines before it bind. For people, `name` is the user's name for the value,
`expected` its value at capture, `now` is Python for its value in the present call. Two functions of the list:

* `code()`: lines that return `MISS` at the first test that fails, to stand in front of the graph;
* `first_difference(args, kwargs)`: the same tests in a function of its own, made on first use; it returns the
  `Difference(name, before, now)` of the first guard that fails.

For speed a test may be about many values at once: all tensors in one call into C++, all places that were read. The
guard then has `parts`, guards that test the values one by one, or a `look`, Python for a `Difference` or None.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch.symbols import expression_text, is_symbolic
from .._torch.tensors import share_counters, storage_key, whole_memory
from ..frontend.tree import Tree
from ..frontend.values import describe
from ..graph.joint import JointGraph
from ..graph.signature import BaseOf, MemoryOf, Signature
from ..graph.source import Names, a_name, attribute, compile_source, item, key_text, unpacked
from ..runtime.decisions import range_text
from ..tracing.tape.opinfo import BY_STRIDES
from .conditions import has_keys
from .explain import Difference

Facts = tuple[tuple[str, Mapping[str, Any]], ...]


class _Miss:
    def __repr__(self) -> str:
        return "MISS"


MISS = _Miss()
STATE = "the state of PyTorch"
_ERRORS = "except (KeyError, AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):"
_LONGEST = 300  # characters of a text about a value
_OWN_KINDS = {tuple: "tuple", list: "list", dict: "dict"}


class Words(str):
    """Text that describes a value for people, if the value's own text says too little."""

    __slots__ = ()


_OTHERWISE = Words("otherwise")


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """One condition on a call; see above. A guard without a name is about the state of PyTorch.

    `facts`: the facts that its `look` compares, by the user's names, for each tensor or for the state.
    """

    test: str
    name: str = ""
    expected: str = ""
    now: str = ""
    look: str = ""
    parts: tuple[Guard, ...] = ()
    facts: Facts = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Lines of `code()`, and their counterparts in `first_difference`."""

    code: tuple[str, ...]
    words: tuple[str, ...]


class GuardList:
    """The guards of one graph. `globals` are the objects named in its lines."""

    def __init__(self) -> None:
        self.globals: dict[str, Any] = {"MISS": MISS}
        self.steps: list[Lines | Guard] = []
        self.fixed: frozenset[str] = frozenset()  # the tensors that share written memory: their sizes are no symbols
        self._first_difference: Callable[..., Difference | None] | None = None

    def add(self, guard: Guard) -> None:
        """One more guard, the last."""
        self.steps.append(guard)
        self._first_difference = None

    def code(self) -> list[str]:
        """Lines of a function of (args, kwargs). A lookup that fails on the way is a difference too."""
        lines = ["try:"]
        for step in self.steps:
            if isinstance(step, Guard):
                lines += [f"    if not ({step.test}): return MISS"] if step.test else []
            else:
                lines += ["    " + line for line in step.code]
        return [*lines, _ERRORS, "    return MISS"]

    def first_difference(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Difference | None:
        """The first guard that a call with the arguments, made now, would fail, as a `Difference`."""
        if self._first_difference is None:
            source = "def first_difference(args, kwargs):\n" + "".join(f"    {line}\n" for line in self._words())
            globals_ = {**self.globals, "differs": functools.partial(_differs, self.steps), "Words": Words}
            self._first_difference = compile_source(source, "first_difference", globals_, label="guards in words")
        return self._first_difference(args, kwargs)

    def descriptions(self) -> Iterator[tuple[str, str, str]]:
        """For people, for each guard with a name: the name of a value, the fact about it or "", the expected value."""
        for step in self.steps:
            for guard in (step.parts or (step,)) if isinstance(step, Guard) else ():
                for name, facts in guard.facts:
                    yield from ((name, fact, _text(value)) for fact, value in facts.items())
                if guard.name and guard.expected and not guard.facts:
                    yield guard.name, "", guard.expected

    def _words(self) -> list[str]:
        """Lines of `first_difference`: guards that can name the difference come first."""
        lines, last = ["try:"], []
        for number, step in enumerate(self.steps):
            if isinstance(step, Lines):
                lines += ["    " + line for line in step.words]
                continue
            for part, guard in enumerate(step.parts or (step,)):
                if guard.look:
                    lines += [f"    difference = {guard.look}", "    if difference is not None: return difference"]
                call = f"differs({number}, {part}{', ' + guard.now if guard.now else ''})"
                tests = [f"    if not ({guard.test}): return {call}"] if guard.test else []
                if guard.name and not guard.look:
                    lines += tests
                else:
                    last += tests
        lines += [*last, _ERRORS, "    return differs(-1, 0)", "return None"]
        return lines


def _differs(steps: Sequence[Lines | Guard], number: int, part: int, now: object = _OTHERWISE) -> Difference:
    """The difference for a step's guard `part`, a failing one."""
    step = steps[number] if number >= 0 else Guard("", "the structure of the arguments")
    assert isinstance(step, Guard)
    guard = step.parts[part] if step.parts else step
    return Difference(guard.name or STATE, guard.expected or "as captured", in_words(now))


class GuardMaker:
    """Builds the guard list of a graph with arguments of the structure `tree`.

    After the guards `inputs[i]` names the variable of input i; `slots[i]` is its name for users. `symbols`, `wrappers`
    and `containers` have the variables of symbolic sizes, of wrapper subclasses that were taken apart, and of
    containers among the arguments.
    """

    inputs: list[str]
    slots: list[str]
    symbols: dict[Any, str]

    def __init__(self, joint: JointGraph, tree: Tree, names: Names) -> None:
        self.list = GuardList()
        self.joint, self.signature, self.tree, self.names = joint, joint.signature, tree, names
        self.leaves: list[str] = []  # their variables
        self.wrappers: list[str] = []
        self.containers: dict[int, str] = {}

    def lines(self) -> list[str]:
        """Lines of a function of (args, kwargs) that bind the inputs' variables or return `MISS`."""
        lines = self.list.code()
        for name, info in zip(self.inputs, self.signature.inputs, strict=True):
            if isinstance(info.source, MemoryOf):
                of, dtype = self.inputs[info.source.input], self.bind("dtype", info.spec.dtype)
                lines.append(f"{name} = {self.bind('whole_memory', whole_memory)}({of}, {dtype})")
        return lines

    def kept(self) -> KeptGuards:
        """The guards to be rendered again, around other halves of the graph; they hold on to no tensor of the call."""
        return KeptGuards(self)

    def bind(self, hint: str, value: object) -> str:
        """A global name for a value."""
        name = self.names.fresh(hint)
        self.list.globals[name] = value
        return name

    def let(self, *lines: str) -> None:
        """Lines that bind variables."""
        self.list.steps.append(Lines(lines, lines))

    def require(self, test: str, name: str = "", expected: object = "", now: str = "") -> None:
        """One more guard; `expected` is a value, or `Words`."""
        self.list.steps.append(Guard(test, name, in_words(expected), now))

    def compare(self, test: str, facts: Facts, tensors: str) -> None:
        """One more guard, on the tensors in a tuple: `facts` has the user's name and the facts of each."""
        look = f"{self.bind('tensor_difference', tensor_difference)}({self.bind('facts', facts)}, {tensors})"
        self.list.steps.append(Guard(test, "the set of dispatch keys of its tensors", look=look, facts=facts))

    # ---------------------------------------------------------------- arguments

    def take_apart(self, name_of: Callable[[str], str], more: tuple[str, ...] = ()) -> None:
        """Take the arguments apart into variables. `name_of`: the user's name of `args[i]`; `more`: keyword arguments
        that are not in the tree.
        """
        positional, keyword = self.tree.children
        names = [self.names.fresh(f"args_{i}") for i in range(len(positional.children))]
        is_right = f"len(args) == {len(names)}" if names else "not args"
        self.require(is_right, "the number of positional arguments", len(names), "len(args)")
        if names:
            self.let(f"{unpacked(names)}args")
        for number, (name, child) in enumerate(zip(names, positional.children, strict=True)):
            self.open(name, child, name_of(f"args[{number}]"))
        keys = tuple(keyword.context or ())
        keywords = (*keys, *more)
        self.require(self.has_keywords(keywords), "the list of keyword arguments", keywords, "tuple(kwargs)")
        for key, child in zip(keys, keyword.children, strict=True):
            name = self.names.fresh(str(key))
            self.let(f"{name} = {item('kwargs', key, self.bind)}")
            self.open(name, child, str(key))

    def open(self, name: str, tree: Tree, path: str) -> None:
        """Guards for the argument, or an argument's part, in the variable `name`."""
        if tree.kind == "leaf":
            self.leaf(name)
            return
        for (child, way), subtree in zip(self.container(name, tree, path), tree.children, strict=True):
            self.open(child, subtree, way)

    def has_keywords(self, keys: tuple[str, ...]) -> str:
        """The test that the keyword arguments are these, in any order."""
        return f"kwargs.keys() == {self.bind('keys', frozenset(keys))}" if keys else "not kwargs"

    def leaf(self, name: str) -> None:
        """Guards for the next leaf, in the variable `name`."""
        raise NotImplementedError

    def kind_test(self, name: str, tree: Tree) -> str:
        """The test that a variable holds a container of the kind of `tree`."""
        cls = _OWN_KINDS.get(tree.type) or self.bind("cls", tree.type)
        return f"type({name}) is {cls}"

    def container(self, name: str, tree: Tree, path: str) -> list[tuple[str, str]]:
        """Take the container in a variable apart, a container of Python or PyTorch: for each child its variable and
        its user's name.
        """
        children = [self.names.fresh(f"{name}_{i}") for i in range(len(tree.children))]
        self.require(self.kind_test(name, tree), path, Words(a_name(tree.type.__name__)), f"type({name})")
        steps = [f"[{i}]" for i in range(len(children))]
        if tree.kind == "dict":
            keys = Words(key_text(tuple(tree.context)))
            self.require(has_keys(name, tree.context, self.bind), f"the list of keys of {path}", keys, f"tuple({name})")
            steps = [f"[{key_text(key)}]" for key in tree.context]
        elif tree.kind == "dataclass":
            steps = [f".{field}" for field in tree.context]
            self.let(*(f"{c} = {attribute(name, f, self.bind)}" for c, f in zip(children, tree.context, strict=True)))
        elif tree.kind in ("tuple", "list", "namedtuple", "structseq"):
            self.require(f"len({name}) == {len(children)}", f"len({path})", len(children), f"len({name})")
        if children and tree.kind != "dataclass":
            self.let(f"{unpacked(children)}{name}{'.values()' if tree.kind == 'dict' else ''}")
        return [(child, path + step) for child, step in zip(children, steps, strict=True)]

    def sizes(self) -> dict[Any, str]:
        """Add guards on the symbolic sizes; the variable of each symbol."""
        if not self.signature.symbols:
            return {}
        reads, symbols = size_reads(self.signature, self.inputs, self.names)
        self.let(*reads)
        parts = self.size_tests(symbols)
        self.list.steps.append(Guard(" and ".join(parts), parts=tuple(parts.values())))
        return symbols

    def size_tests(self, symbols: dict[object, str]) -> dict[str, Guard]:
        """The conditions on symbolic sizes so far, by their tests over the variables of the symbols."""
        infos, table, inputs, slots = self.signature.symbols, self.joint.symbols, self.inputs, self.slots
        parts: dict[str, Guard] = {}
        said: dict[str, str] = {}  # the user's name of each variable
        if not infos:
            return parts
        for info in infos:
            name = said[symbols[info.symbol]] = (
                slots[info.input] if info.dim is None else f"{slots[info.input]}.shape[{info.dim}]"
            )
            low, high = table.limits(info.symbol)
            test = range_text(table, info.symbol, symbols[info.symbol])
            parts[test] = Guard(test, name, f"from {low} to {high or 'any'}", symbols[info.symbol])
        relations = [guard for guard in table.guards() if not any(s in table.computed for s in guard.free_symbols)]
        others = [
            f"{inputs[index]}.stride({dim}) == {expression_text(stride, symbols, self.bind)}"
            for index, tensor in enumerate(self.signature.inputs)
            for dim, stride in enumerate(tensor.spec.stride)
            if is_symbolic(stride)
        ]
        for test in (*others, *(expression_text(guard, symbols, self.bind) for guard in relations)):
            told = re.sub(r"\w+", lambda word: said.get(word[0], word[0]), test)
            words = {word: said[word] for word in re.findall(r"\w+", test) if word in said}
            now = " + ', ' + ".join(f"{name + ' = '!r} + str({symbol})" for symbol, name in words.items())
            parts.setdefault(test, Guard(test, "the relation between sizes", f"such that {told}", f"Words({now})"))
        return parts

    def history(self, sharing: Sharing | None, changed: Iterable[int]) -> None:
        """Add guards on offsets that the graph depends on, on inputs that must be no views, and on the `changed` inputs
        being leaves or not.
        """
        infos = self.signature.inputs
        for index in offset_dependent(self.joint):
            self._ask(index, "storage_offset()", "==", infos[index].spec.offset)
        for index in sharing.roots if sharing is not None else ():
            self._ask(index, "_base", "is", None)
        for index in sorted(changed):
            if infos[index].requires_grad:
                self._ask(index, "is_leaf", "is", infos[index].is_leaf)

    def _ask(self, index: int, fact: str, relation: str, value: object) -> None:
        now = f"{self.inputs[index]}.{fact}"
        self.require(f"{now} {relation} {value}", f"{self.slots[index]}.{fact}", value, now)

    def memories(self, sharing: Sharing) -> None:
        """Add guards that inputs share memory, and version counters, as at the capture."""
        inputs, slots = self.inputs, self.slots
        numbers = {i: number for i, number in enumerate(sharing.memories) if number is not None}
        key, memory = self.bind("storage_key", storage_key), self.names.fresh("memories")
        self.let(f"{memory} = (*map({key}, ({', '.join(inputs[i] for i in numbers)},)),)")
        groups: dict[int, list[str]] = {}
        for i, number in numbers.items():
            groups.setdefault(number, []).append(slots[i])
        shared = "; ".join(" and ".join(group) for group in groups.values() if len(group) > 1) or "none"
        what = "the tensors that share memory with a written tensor", Words(shared[:2000])
        self.require(f"len(set({memory})) == {len(groups)}", *what)
        first_at: dict[int, int] = {}
        for position, number in enumerate(numbers.values()):
            first = first_at.setdefault(number, position)
            if first != position:
                self.require(f"{memory}[{position}] == {memory}[{first}]", *what)
        counters = self.bind("share_counters", share_counters) if sharing.counters else ""
        for i, j, same in sharing.counters:
            now = f"{counters}({inputs[i]}, {inputs[j]})"
            self.require(f"{now} is {same}", f"whether {slots[i]} and {slots[j]} count writes together", same, now)


class KeptGuards(GuardMaker):
    """The guards of `maker` once more, with conditions on sizes that were found since."""

    def __init__(self, maker: GuardMaker) -> None:
        super().__init__(maker.joint, maker.tree, maker.names)
        lines = maker.lines()
        self.list, self.leaves, self.wrappers, self.containers = (
            maker.list, maker.leaves, maker.wrappers, maker.containers
        )  # fmt: skip
        self.inputs, self.slots, self.symbols = maker.inputs, maker.slots, maker.symbols
        self._after, self._known = lines[len(maker.list.code()) :], {*self.size_tests(self.symbols)}

    def lines(self) -> list[str]:
        new = {test: guard for test, guard in self.size_tests(self.symbols).items() if test not in self._known}
        if new:
            self._known.update(new)
            self.list.add(Guard(" and ".join(new), parts=tuple(new.values())))
        return [*self.list.code(), *self._after]


# -------------------------------------------------------------------------------------------- sizes and offsets


def size_reads(signature: Signature, inputs: list[str], names: Names) -> tuple[list[str], dict[object, str]]:
    """(lines that read the sizes, the variable of each symbol)."""
    variables: dict[object, str] = {}
    reads = []
    for info in signature.symbols:
        variable = variables[info.symbol] = names.fresh(str(info.symbol))
        reads.append(f"{variable} = {inputs[info.input]}{'' if info.dim is None else f'.size({info.dim})'}")
    return reads, variables


def offset_dependent(joint: JointGraph) -> list[int]:
    """Inputs whose storage offset is written into the graph or into a view taken after it."""
    inputs = set()
    placeholders = joint.placeholders()
    for index, info in enumerate(joint.signature.inputs):
        if isinstance(info.source, MemoryOf) or info.number is not None:
            continue
        for user in placeholders[index].users:
            if user.target in BY_STRIDES:
                inputs.add(index)
    for output in joint.signature.structure.outputs:
        number, steps = getattr(output, "input", None), getattr(output, "steps", ())
        if number is not None and any(step.op in BY_STRIDES for step in steps):
            inputs.add(number)
    for _, group in joint.signature.structure.shared_memory:
        inputs.update(group)
    return sorted(i for i in inputs if not isinstance(joint.signature.inputs[i].source, MemoryOf))


# -------------------------------------------------------------------------------------------- in words


def in_words(value: object) -> str:
    """Short text about a value in a call."""
    if type(value) is Words:
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor, {value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return a_name(value.__name__)
    if type(value) is tuple and all(type(key) in (str, int) for key in value):
        return key_text(value)[:_LONGEST]
    return describe(value)


_FACTS: dict[str, Callable[[torch.Tensor], object]] = {
    "type": lambda x: type(x).__name__,
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "shape": lambda x: tuple(x.shape),
    "requires_grad": lambda x: x.requires_grad,
    "stride()": lambda x: x.stride() if x.layout is torch.strided else None,
    "layout": lambda x: x.layout,
    "is_inference()": lambda x: x.is_inference(),
    "is_conj()": lambda x: x.is_conj(),
    "is_neg()": lambda x: x.is_neg(),
}


def state_difference(before: Mapping[str, object], now: Mapping[str, object]) -> Difference | None:
    """The first setting that has changed."""
    names = (name for name in before if before[name] != now.get(name))
    return next((Difference(name, str(before[name]), str(now.get(name))) for name in names), None)


def tensor_facts(tensor: torch.Tensor, shape: Sequence[object], stride: Sequence[object]) -> dict[str, object]:
    """Metadata of a tensor that guards compare. Sizes and strides are given apart: a symbolic one may be any."""
    facts = {name: read(tensor) for name, read in _FACTS.items()}
    facts["shape"] = tuple(shape)
    if facts["stride()"] is not None:
        facts["stride()"] = tuple(stride)
    return facts


def tensor_difference(expected: Facts, tensors: Sequence[object]) -> Difference | None:
    """The first fact that differs between `tensors` and `expected`; no two tensors may be one object."""
    seen: dict[int, str] = {}
    for (name, facts), tensor in zip(expected, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            return Difference(name, "a tensor", in_words(tensor))
        first = seen.setdefault(id(tensor), name)
        if first != name:
            return Difference(name, "a tensor of its own", f"the same tensor as {first}")
        for fact, before in facts.items():
            now = _FACTS[fact](tensor)
            if not _fits(before, now):
                return Difference(f"{name}.{fact}", _text(before), _text(now))
    return None


def _fits(before: Any, now: Any) -> bool:
    if type(before) is not tuple or type(now) is not tuple:
        return bool(before == now)
    return len(before) == len(now) and all(a is None or a == b for a, b in zip(before, now, strict=True))


def _text(fact: Any) -> str:
    if type(fact) is not tuple:
        return str(fact)
    return f"({', '.join('any' if n is None else str(n) for n in fact)}{',' if len(fact) == 1 else ''})"


# -------------------------------------------------------------------- shared memory
# Inputs of a graph that share memory, if some memory is written: a call must have these relations too.


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """`memories`: for each input the number of its storage, None for an input that is a whole storage.

    `counters`: pairs of inputs in one storage, and whether they share a version. `roots`: inputs that must be no views.
    """

    memories: tuple[int | None, ...]
    counters: tuple[tuple[int, int, bool], ...] = ()
    roots: tuple[int, ...] = ()


def sharing_of(signature: Signature, tensors: Sequence[torch.Tensor | None]) -> Sharing | None:
    """The relations of the tensors of a capture; None if no two share memory."""
    numbers: dict[int, int] = {}
    memories: list[int | None] = []
    members: dict[int, list[int]] = {}
    counters = []
    for i, (info, tensor) in enumerate(zip(signature.inputs, tensors, strict=True)):
        if isinstance(info.source, MemoryOf) or info.number is not None or tensor is None:
            memories.append(None)
            continue
        number = numbers.setdefault(storage_key(tensor), len(numbers))
        memories.append(number)
        for j in members.setdefault(number, []):
            other = tensors[j]
            assert other is not None
            if not (tensor.is_inference() or other.is_inference() or _base(tensor) is _base(other)):
                counters.append((j, i, share_counters(other, tensor)))
                break
        members[number].append(i)
    if all(len(group) == 1 for group in members.values()):
        return None
    based = {info.source.input for info in signature.inputs if isinstance(info.source, BaseOf)}
    grouped = {i for _, group in signature.structure.shared_memory for i in group} - based
    roots = tuple(i for i in sorted(grouped) if (t := tensors[i]) is not None and t._base is None)
    return Sharing(tuple(memories), tuple(counters), roots)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
