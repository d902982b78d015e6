"""The tape: the recorder's output, one `Entry` per operator, before there is an fx graph.

An fx node costs about 20 us to make and most tapes hold entries nobody needs (replayed views, overwritten
values), so the graph is built once, at the end, from the entries that matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..._torch.nested import frozen
from ..._torch.symbols import SYMBOLIC, is_symbolic, symbol_made
from ...frontend.openings import Sampler, new_samples
from ...graph.meta import TensorSpec
from ...identity import IdSet

if TYPE_CHECKING:
    from .origin import Origin


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Entry:
    """One value on the tape: an operator and its arguments, or an input (`target` is None) or a constant.

    `spec` is as in `NodeMeta`. `origin` is the result of `Origins.here()`. `is_backward`: it was recorded in a
    backward; `sequence_nr` links a backward entry to the forward operator it differentiates. An entry that `has_effect`
    runs although no value needs it; an entry that runs `once` is also never merged with an equal entry, run ahead of
    the call, or computed again.
    """

    target: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    spec: TensorSpec | tuple[Any, ...] | None = None
    name: str | None = None
    origin: Origin | None = None
    original: Any = None  # the operator that the user's program called, when this is part of its decomposition
    sequence_nr: int | None = None
    is_backward: bool = False
    has_effect: bool = False
    once: bool = False
    recompute: Any = None
    constant: torch.Tensor | None = None  # the real tensor, when this is a constant
    value: Any = None  # its value, once evaluated ahead of time (see `evaluate_entry`)

    @property
    def tensor(self) -> TensorSpec:
        """The spec of an entry that is one tensor; `UNDESCRIBED` where no layout fits."""
        held: Any = self.spec
        spec: TensorSpec = held
        return spec

    def __repr__(self) -> str:
        return f"Entry({self.name or self.target})"


def map_entries(value: Any, fn: Callable[[Entry], object]) -> Any:
    """`value` with `fn` applied to its every entry, through lists, tuples, dicts and slices."""
    cls = type(value)
    if cls is Entry:
        return fn(value)
    if cls in _LEAVES:
        return value
    if isinstance(value, (list, tuple)):
        mapped = [fn(item) if type(item) is Entry else map_entries(item, fn) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    if isinstance(value, dict):
        return {key: map_entries(item, fn) for key, item in value.items()}
    return value


def entries_in(value: object) -> Iterator[Entry]:
    """Every entry in `value`, in order."""
    if isinstance(value, Entry):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from entries_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from entries_in(item)


class Tape:
    """An ordered list of entries."""

    def __init__(self, origins: dict[int, object] | None = None) -> None:
        self.entries: list[Entry] = []
        # Where each forward operator was called, by autograd sequence number.
        self.origins: dict[int, Any] = {} if origins is None else origins
        self.meta: dict[Entry, dict[str, Any]] = {}  # more metadata of the node that an entry becomes

    def append(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        return entry

    def forward(self) -> list[Entry]:
        """The entries that no backward recorded."""
        return [entry for entry in self.entries if not entry.is_backward]

    def with_operator(self, holds: Callable[[object], bool]) -> list[Entry]:
        """The entries with an operator that satisfies `holds`; it is asked once for each operator."""
        found = {key for key, target in {id(e.target): e.target for e in self.entries}.items() if holds(target)}
        return [entry for entry in self.entries if id(entry.target) in found] if found else []

    def live(self, outputs: Iterable[object]) -> list[Entry]:
        """The entries that `outputs` or an effect (a random number drawn, a collective) need, in order."""
        needed = self.needed([*outputs, *(entry for entry in self.entries if entry.has_effect)])
        return [entry for entry in self.entries if entry in needed]

    def needed(self, outputs: Iterable[object]) -> set[Entry]:
        """The entries that `outputs` need."""
        needed: set[Entry] = set()
        stack: list[Any] = list(outputs)
        pop, push = stack.pop, stack.extend
        while stack:
            value = pop()
            cls = type(value)
            if cls is Entry:
                if value in needed:
                    continue
                needed.add(value)
                push(value.args)
                if value.kwargs:
                    push(value.kwargs.values())
            elif cls is list or cls is tuple:
                push(value)
            elif cls not in _LEAVES:
                push(entries_in(value))
        return needed


_LEAVES = {int, float, bool, str, type(None)}


# -------------------------------------------------------------------- capturing again
# Why a capture starts over: it found a fact that it should have known from the beginning.


@dataclasses.dataclass(slots=True)
class Learned:
    """The facts that make the next run of a capture differ.

    `shared_bases`, `whole`, `viewed`, `as_they_are` and `together`: see `Inputs`; `late`: see `BackwardWrites`.
    `containers`: the places of containers that change their number of items, with the number of items that the
    function reads at least: see `Journals`. `regions`: custom Functions that use NumPy: they run as eager regions;
    `hooks`: see `EagerHooks`.
    `samples`: see `Wrappers`. `disturbed`: see `OwnWrites`. `facts`: by aspect. `walks_all`: the
    state of Python's is walked whole before the run, see `ProgramState`.
    """

    shared_bases: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    together: bool = False
    whole: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    viewed: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    as_they_are: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    late: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    containers: dict[tuple[int, object], int] = dataclasses.field(default_factory=dict)
    regions: set[type] = dataclasses.field(default_factory=set)
    hooks: dict[object, Any] = dataclasses.field(default_factory=dict)
    samples: Sampler = dataclasses.field(default_factory=new_samples)
    facts: dict[type, Any] = dataclasses.field(default_factory=dict)
    disturbed: list[str] = dataclasses.field(default_factory=list)
    walks_all: bool = False


# -------------------------------------------------------------------- value numbers
# Value numbers: equal for entries of a tape, or nodes of a graph made from it, that hold the same value.
#
# A tape has no mutation, so the same operator on the same values gives the same value (Cocke's value numbering, in one
# pass). Random operators are each a value of their own. A transpose of a transpose is the first value: compilers
# rewrite such pairs, and the values that their graphs save are to be found again.


class Numbering:
    """Numbers of the entries of `tape`; call `extend` after entries were added."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.first: list[Entry] = []  # by number: the entry it was first seen at
        self._positions: list[int] = []  # by number: where on the tape that is
        self._by_key: dict[object, int] = {}
        self._by_entry: dict[Entry, int] = {}
        self._orders: dict[int, tuple[int, tuple[int, ...]]] = {}  # by a transpose: the operand, the permutation
        self._done = 0

    def extend(self) -> None:
        entries = self.tape.entries
        for position in range(self._done, len(entries)):
            entry = entries[position]
            number = self._number(entry)
            if number == len(self.first):
                self.first.append(entry)
                self._positions.append(position)
            self._by_entry[entry] = number
        self._done = len(entries)

    def renumber(self, entry: Entry) -> None:
        """The number of an entry with an operator changed since its last numbering; nobody uses the entry yet."""
        number = self._number(entry)
        if number == len(self.first):
            self.first.append(entry)
            self._positions.append(next(i for i in reversed(range(self._done)) if self.tape.entries[i] is entry))
        self._by_entry[entry] = number

    def _number(self, entry: Entry) -> int:
        """The entry's number; that of the next new value, if it is one."""
        found = self._permuted(entry.target, entry.args, self._by_entry)
        if found is None:
            return self._by_key.setdefault(_entry_key(entry, self._by_entry), len(self.first))
        base, order = found
        if order == tuple(range(len(order))):
            return base
        number = self._by_key.setdefault(found, len(self.first))
        self._orders[number] = found
        return number

    def _permuted(self, target: object, args: Sequence[Any], numbers: Any) -> tuple[int, tuple[int, ...]] | None:
        """For a transpose: the number of the value, itself none, that it is one of, and the order of dimensions."""
        if target not in _PERMUTES:
            return None
        argument: Entry | fx.Node = args[0]
        spec = argument.spec if isinstance(argument, Entry) else dict.get(argument.meta, "spec")
        if not isinstance(spec, TensorSpec):
            return None
        order = _order(target, args, len(spec.shape))
        number = numbers[argument]
        base, before = self._orders.get(number, (number, None))
        return base, order if before is None else tuple(before[i] for i in order)

    def of(self, entry: Entry) -> int:
        return self._by_entry[entry]

    def key(self, args: object) -> Any:
        """A hashable key, equal for arguments of equal values."""
        return _key(args, self._by_entry)

    def position(self, number: int) -> int:
        """Where on the tape a value was first made."""
        return self._positions[number]

    def of_nodes(
        self, module: fx.GraphModule, primals: Sequence[Entry], random: Mapping[str, Entry]
    ) -> dict[fx.Node, int]:
        """The numbers of a module's nodes, as far as they have one. `primals`: its placeholders' entries, in order;
        `random`: entries by the names of their nodes.
        """
        numbers: dict[fx.Node, int] = {}
        placeholders = iter(primals)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                number = self._by_entry.get(next(placeholders))  # sizes are not on the tape
            elif node.op == "get_attr":
                number = self._by_key.get(("constant", id(getattr(module, node.target, None))))
            elif node.op == "call_function":
                number = self._of_call(node, numbers, random)
            else:
                continue
            if number is not None:
                numbers[node] = number
        return numbers

    def _of_call(self, node: fx.Node, numbers: Mapping[fx.Node, int], random: Mapping[str, Entry]) -> int | None:
        entry = random.get(node.name)
        if entry is not None and entry.has_effect and entry.target is node.target:
            return self.of(entry)
        try:
            found = self._permuted(node.target, node.args, numbers)
            if found is not None:
                return found[0] if found[1] == tuple(range(len(found[1]))) else self._by_key.get(found)
            return self._by_key.get((node.target, _key(node.args, numbers), _key(node.kwargs, numbers)))
        except KeyError:
            return None  # made from something that is not on the tape


_PERMUTES = {torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default}


def _order(target: Any, args: Sequence[Any], rank: int) -> tuple[int, ...]:
    """The argument's dimension for each dimension of a transpose."""
    dims = list(range(rank))
    if target is torch.ops.aten.permute.default:
        return tuple(dims[i] for i in args[1])
    first, second = args[1:3] if target is torch.ops.aten.transpose.int else (0, -1)
    if rank:
        dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


def _entry_key(entry: Entry, numbers: Mapping[Entry, int]) -> Any:
    if entry.constant is not None:
        return "constant", id(entry.constant)
    if entry.target is None or entry.has_effect:
        return "own", entry
    return entry.target, _key(entry.args, numbers), _key(entry.kwargs, numbers)


def _key(arguments: object, numbers: Any) -> Any:
    """Something hashable, equal for equal arguments; entries and nodes become their numbers."""
    return frozen(arguments, (Entry, fx.Node, *SYMBOLIC), functools.partial(_named, numbers))


def _named(numbers: Any, value: object) -> Any:
    if isinstance(value, fx.Node):
        # A size that an operator found is on the tape too; operators on the size name it.
        size = dict.get(value.meta, "val") if dict.get(value.meta, "spec") is None else None
        if size is None and value not in numbers:
            size = value.meta.get("val")
        if isinstance(size, torch.SymInt) or (is_symbolic(size) and value not in numbers):
            return _size(size)
    return _size(value) if is_symbolic(value) else ("#", numbers[value])


def _size(number: object) -> Any:
    expression = number.node.expr if isinstance(number, torch.SymInt) else symbol_made(number)
    # A size that was found to be one number: the graph has that.
    return (int, int(expression)) if expression.is_Integer else ("size", expression)
