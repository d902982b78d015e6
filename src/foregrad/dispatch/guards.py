"""Guards: whether a compiled graph is right for a call, as straight-line Python in front of what runs it.

`render_guards` gives lines that take the arguments apart, read what the function reached by itself, and return
`MISS` at the first difference from the call that was captured. Tensors' metadata is checked by one C++ call.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .._torch.guards import TensorGuards
from .._torch.native import make_tensor_check
from .._torch.pytree import registered_functions
from .._torch.tensors import share_counters, share_memory, storage_key, whole_memory
from ..frontend.call import FlatCall
from ..frontend.expected import Expected
from ..frontend.reads import Reads
from ..frontend.sources import Source
from ..frontend.tree import Tree
from ..frontend.wrappers import FoundWrappers
from ..graph.signature import BaseOf, InputInfo, MemoryOf, PartOf
from ..graph.source import Names, unpacked
from ..graph.spelling import attribute, item
from ..subclasses.conversion import unwrapping
from ..subclasses.spec import WrapperSpec
from .constants import answers, has_context, has_keys, is_constant, order_of_keywords_matters
from .objects import apart_lines, arrays_apart_lines, object_lines
from .shapes import offset_dependent, size_lines, static_or_none
from .state import state_conditions
from .watch import Watch

if TYPE_CHECKING:
    from ..tracing.capture import Captured

__all__ = ["MISS", "GuardLines", "render_guards"]


class _Miss:
    def __repr__(self) -> str:
        return "MISS"


MISS = _Miss()
_TABLES = ("_parameters", "_buffers", "_modules")
_FEW_PAIRS = (
    12  # of inputs, one of them written to: up to here, asking about each pair takes less than sorting them out
)


@dataclasses.dataclass(slots=True)
class GuardLines:
    """Lines of a function of (args, kwargs); after them `inputs[i]` names the variable holding input i.

    `symbols` has the variable of each symbolic size, `wrappers` those of the wrapper subclasses that were taken apart,
    `containers` that of each container among the arguments.
    """

    lines: list[str]
    globals: dict[str, Any]
    inputs: list[str]
    watch: Watch
    symbols: dict[Any, str]
    wrappers: list[str]
    containers: dict[int, str]


def render_guards(
    call: FlatCall, captured: Captured, names: Names, *, native: bool = False, transformed: bool = False
) -> GuardLines:
    """Guards for what was captured from `call`; `native`: with the C++ part, where it was built.

    `transformed`: for calls under transforms.
    """
    return _Renderer(call, captured, names, native=native, transformed=transformed).render()


class _Renderer:
    def __init__(self, call: FlatCall, captured: Captured, names: Names, *, native: bool, transformed: bool) -> None:
        self.call = call
        self.native = native
        self.transformed = transformed
        self.captured = captured
        self.joint = captured.joint
        self.signature = captured.joint.signature
        self.modules = captured.modules
        self.reads = captured.reads
        self.tensors = captured.tensors
        self.facts = captured.facts
        self.names = names
        self.lines: list[str] = []
        self.globals: dict[str, Any] = {"MISS": MISS}
        self.leaves: list[str] = []
        self.found = captured.wrappers or FoundWrappers((), {})
        self.wrappers: list[str] = []
        self.with_gradients: dict[tuple[int, ...], str] = {}  # those that require grad, by their first equal leaves
        self.containers: dict[int, str] = {}
        self.symbols: dict[Any, str] = {}
        self.numbers = {i.argument: i.number for i in self.signature.inputs if i.number is not None}

    def render(self) -> GuardLines:
        self._take_apart()
        reached, writes = self.captured.reached, self.signature.python_writes
        self.lines += apart_lines(self.call, self.containers, writes, reached, self._bind)
        inputs = [
            self.names.fresh(_identifier(info)) if info.argument is None else "" for info in self.signature.inputs
        ]
        for index, info in enumerate(self.signature.inputs):
            if info.argument is not None:
                inputs[index] = self.leaves[info.argument]
        static = self._in_tables()
        self._read_closures(inputs, static)
        self._tensor_metadata(inputs, static)
        if self.signature.symbols:
            reads, conditions, self.symbols = size_lines(self.joint, inputs, self.names, self._bind)
            self.lines += [*reads, f"if not ({' and '.join(conditions)}): return MISS"]
        tensors = self.transformed or any(t is not None and not t.is_inference() for t in self.tensors)
        for condition in state_conditions(self.joint, self._bind, tensors=tensors):
            self._require(condition)
        watch = self._watched(inputs, static)
        self._bases(inputs)
        self._relations(inputs)
        asked = [*inputs, *self.wrappers]
        for index, question, attribute_asked, value in self.facts:
            self._require(answers(question, asked[index], attribute_asked, value, self._bind))
        # A lookup that fails on the way is a difference too.
        body = ["    " + line for line in self.lines]
        lines = [
            "try:",
            *body,
            "except (KeyError, AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):",
        ]
        lines.append("    return MISS")
        for index, info in enumerate(self.signature.inputs):
            name = inputs[index]
            if info.number is float:
                inputs[index] = self.names.fresh(f"{name}_tensor")
                lines.append(f"{inputs[index]} = {self._bind('tensor_of', _tensor_of)}({name})")
            if isinstance(info.source, MemoryOf):
                of = inputs[info.source.input]
                dtype = self._bind("dtype", info.spec.dtype)
                lines.append(f"{name} = {self._bind('whole_memory', whole_memory)}({of}, {dtype})")
        return GuardLines(lines, self.globals, inputs, watch, self.symbols, self.wrappers, self.containers)

    def _bind(self, wanted: str, value: Any) -> str:
        name = self.names.fresh(wanted)
        self.globals[name] = value
        return name

    def _require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return MISS")

    # ---------------------------------------------------------------- arguments

    def _take_apart(self) -> None:
        positional, keyword = self.call.tree.children
        if positional.children:
            names = self._children(positional, [f"args_{i}" for i in range(len(positional.children))])
            self._require(f"len(args) == {len(names)}")
            self.lines.append(f"{unpacked(names)}args")
        else:
            names = []
            self._require("not args")
        for name, child in zip(names, positional.children, strict=True):
            self._open(name, child)
        if not keyword.children:
            self._require("not kwargs")
            return
        if order_of_keywords_matters(self.call.function):
            self._require(has_keys("kwargs", keyword.context, self._bind))
        else:
            self._require(f"len(kwargs) == {len(keyword.children)}")
        for key, child in zip(keyword.context, keyword.children, strict=True):
            name = self.names.fresh(str(key))
            self.lines.append(f"{name} = {item('kwargs', key, self._bind)}")
            self._open(name, child)

    def _children(self, tree: Tree, wanted: list[str]) -> list[str]:
        return [self.names.fresh(w) for w in wanted]

    def _open(self, name: str, tree: Tree) -> None:
        if tree.kind == "leaf":
            self._leaf(name)
            return
        if tree.kind == "wrapper":
            self._wrapper(name, tree.context)
            return
        if tree.kind == "ref":
            self._require(f"{name} is {self.containers[tree.context]}")
            return
        if tree.number >= 0:
            self.containers[tree.number] = name
        children = [self.names.fresh(f"{name}_{i}") for i in range(len(tree.children))]
        unpack = unpacked(children)
        cls = tree.type.__name__ if tree.type in (tuple, list, dict) else self._bind("cls", tree.type)
        self._require(f"type({name}) is {cls}")
        if tree.kind in ("tuple", "list", "namedtuple", "structseq"):
            self._require(f"len({name}) == {len(children)}")
            if children:
                self.lines.append(f"{unpack}{name}")
        elif tree.kind == "dict":
            self._require(has_keys(name, tree.context, self._bind))
            if children:
                self.lines.append(f"{unpack}{name}.values()")
        elif tree.kind == "dataclass":
            for child, field in zip(children, tree.context, strict=True):
                self.lines.append(f"{child} = {attribute(name, field, self._bind)}")
        elif tree.kind in ("object", "partial", "weakref", "method", "array"):
            for line, condition in object_lines(name, tree, children, self.names, self._bind):
                self.lines.append(line or f"if not ({condition}): return MISS")
        else:
            functions = registered_functions(tree.type)
            assert functions is not None
            items, context = self.names.fresh("items"), self.names.fresh("context")
            self.lines.append(f"{items}, {context} = {self._bind('flatten', functions[0])}({name})")
            self._require(has_context(context, tree.context, self._bind))
            if children:
                self.lines.append(f"{unpack}{items}")
        for child, subtree in zip(children, tree.children, strict=True):
            self._open(child, subtree)

    def _wrapper(self, name: str, spec: WrapperSpec) -> None:
        """A wrapper subclass: what stands for it in the graphs are its plain tensors."""
        at = len(self.leaves)
        known = tuple(self.call.first_of[at : at + spec.count])
        self.wrappers.append(name)
        if known in self.with_gradients:
            self._require(f"{name} is {self.with_gradients[known]}")
            self.leaves += [self.leaves[i] for i in known]
            return
        parts = self._parts(name, *self.found.arguments.get(at, (spec, None)))
        if spec.requires_grad:
            self.with_gradients[known] = name
        for part in parts:
            self._leaf(part)

    def _parts(self, name: str, spec: WrapperSpec, gradient: WrapperSpec | None) -> list[str]:
        """The variables of the plain tensors of a wrapper, whose metadata are checked."""
        self._require(f"{self._bind('fits', spec.fits)}({name})")
        if spec.requires_grad:
            for other in self.with_gradients.values():
                self._require(f"{name} is not {other}")
        parts = [self.names.fresh(f"{name}{_as_name(path)}") for path in spec.paths()]
        self.lines.append(f"{unpacked(parts)}{self._bind('unwrap', unwrapping(spec, gradient))}({name})")
        return parts

    def _leaf(self, name: str) -> None:
        index = len(self.leaves)
        self.leaves.append(name)
        value = self.call.leaves[index]
        first = self.call.first_of[index]
        if first != index:
            self._require(f"{name} is {self.leaves[first]}")
        elif index in self.numbers:
            kind = self.numbers[index]
            self._require(f"type({name}) is {kind.__name__}")
            if kind is float:
                self._require(f"{self._bind('isfinite', math.isfinite)}({name})")
        elif not isinstance(value, torch.Tensor):
            self._require(is_constant(name, value, self._bind))

    # ---------------------------------------------------------------- inputs

    def _in_tables(self) -> dict[int, tuple[dict[str, Any], str, str]]:
        """The inputs that are parameters and buffers of modules: table, key, and their name."""
        found = {}
        known: dict[Any, Any] = {}
        for index, info in enumerate(self.signature.inputs):
            source = info.source
            if isinstance(source, Source) and len(source.steps) >= 2 and source.steps[-2][1] in _TABLES:
                table = _note_way(self.reads, source, source.steps[:-1], known)
                if type(table) is dict:
                    found[index] = (table, source.steps[-1][1], str(info.slot).partition(" ")[2])
        return found

    def _read_closures(self, inputs: list[str], static: dict[int, Any]) -> None:
        """Tensors that the function reached by itself elsewhere: each read along its way from what stays the same."""
        roots: dict[int, str] = {}
        for index, info in enumerate(self.signature.inputs):
            if index not in static and isinstance(info.source, Source):
                self._read(inputs[index], info.source, roots)
        for number, wrapper in enumerate(self.found.reached):
            name = self.names.fresh("wrapper")
            self._read(name, wrapper.source, roots)
            parts = self._parts(name, wrapper.spec, wrapper.gradient)
            self.wrappers.append(name)
            if wrapper.spec.requires_grad:
                self.with_gradients[-1 - number,] = name
            for index, info in enumerate(self.signature.inputs):
                if isinstance(info.source, PartOf) and info.source.wrapper == number:
                    inputs[index] = parts[info.source.part]

    def _read(self, name: str, source: Source, roots: dict[int, str]) -> None:
        start = source.root
        root = roots.get(id(start))
        if root is None and isinstance(start, torch.nn.Module):
            root = roots[id(start)] = self._bind("root", weakref.ref(start)) + "()"
        elif root is None:
            root = roots[id(start)] = self._bind("root", start)
        self.lines.append(f"{name} = {source.expression(root, self._bind)}")

    def _bases(self, inputs: list[str]) -> None:
        for name, info in zip(inputs, self.signature.inputs, strict=True):
            if isinstance(info.source, BaseOf):
                self.lines.append(f"{name} = {inputs[info.source.input]}._base")
        bases = [i for i, info in enumerate(self.signature.inputs) if isinstance(info.source, BaseOf)]
        self._check_tensors(bases, inputs)

    def _tensor_metadata(self, inputs: list[str], static: dict[int, Any]) -> None:
        here = [
            i
            for i, info in enumerate(self.signature.inputs)
            if not isinstance(info.source, (MemoryOf, BaseOf)) and i not in static and info.number is None
        ]
        self._check_tensors(here, inputs)

    def _check_tensors(self, checked: list[int], inputs: list[str]) -> None:
        """All metadata of these inputs, and that no two of them are one object."""
        tensors = [self.tensors[i] for i in checked]
        if not tensors:
            return
        sizes = [static_or_none(self.signature.inputs[i].spec.shape) for i in checked]
        strides = [static_or_none(self.signature.inputs[i].spec.stride) for i in checked]
        fits = make_tensor_check(tensors, sizes, strides, distinct=True) if self.native else None
        if fits is None:
            fits = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        check = self._bind("tensors", fits)
        self._require(f"{check}({', '.join(inputs[i] for i in checked)})")

    def _is_part(self, index: int) -> bool:
        """Whether an input is in a wrapper, of which it is known whether it is a leaf."""
        info = self.signature.inputs[index]
        return isinstance(info.source, PartOf) or info.argument in self.call.inside_wrappers()

    def _real(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        assert tensor is not None  # a whole memory, which is no tensor of the user's
        return tensor

    def _watched(self, inputs: list[str], static: dict[int, Any]) -> Watch:
        """What was read besides the arguments; sets the variables of parameters and buffers."""
        roots = [leaf for leaf in self.call.leaves if isinstance(leaf, torch.nn.Module)]
        watch = Watch(self.reads, self.modules, list(static.values()), roots, native=self.native)
        name, handles = self._bind("watch", watch), self._bind("handles", RemovableHandle)
        check, objects, values = (self.names.fresh(n) for n in ("check", "objects", "values"))
        self.lines += [
            f"{check}, {objects}, {values} = {name}.now",
            f"if not {check}({objects}):",
            f"    if not {name}.refresh(): return MISS",
            f"    {values} = {name}.now[2]",
        ]
        self._require(
            f"{handles}.next_id == {name}.hooks_seen or {name}.hooks_unchanged()",
        )
        if static:
            self._require(f"{self._bind('check_parameters', watch.check_tensors)}({values})")
            targets = [inputs[i] for i in static]
            self.lines.append(f"{unpacked(targets)}{values}")
        self._arguments_reached_too(inputs)
        if self.reads.compares_identity:
            self._other_objects(watch)
        return watch

    def _other_objects(self, watch: Watch) -> None:
        """Where the function asks whether two objects are one: which of the tensors it found each argument is."""
        found = self._bind("tensors_found", watch.found)
        for i, leaf in enumerate(self.call.leaves):
            if isinstance(leaf, torch.Tensor) and self.call.first_of[i] == i:
                which = watch.found.get(id(leaf))
                relation = "is" if which is None else "=="
                self._require(f"{found}.get(id({self.leaves[i]})) {relation} {which}")

    def _arguments_reached_too(self, inputs: list[str]) -> None:
        """Arguments that the function also reaches by itself."""
        arguments = {info.argument for info in self.signature.inputs}
        for i, leaf in enumerate(self.call.leaves):
            if isinstance(leaf, torch.Tensor) and self.call.first_of[i] == i and i not in arguments:
                same = next(j for j, tensor in enumerate(self.tensors) if tensor is leaf)
                self._require(f"{self.leaves[i]} is {inputs[same]}")

    def _relations(self, inputs: list[str]) -> None:
        """Which inputs share memory, when some of it is written; offsets where the graph depends on them."""
        signature = self.signature
        for index in sorted(offset_dependent(self.joint)):
            self._require(f"{inputs[index]}.storage_offset() == {signature.inputs[index].spec.offset}")
        members = {i for _, group in signature.shared_memory for i in group}
        for index in sorted(members):
            base = next(
                (
                    j
                    for j, info in enumerate(signature.inputs)
                    if isinstance(info.source, BaseOf) and info.source.input == index
                ),
                None,
            )
            if base is None and self._real(index)._base is None:
                self._require(f"{inputs[index]}._base is None")
        written = {u.input for u in signature.updates} | signature.reshaped
        detached = {index for index in signature.detached if index < len(inputs)}  # not of wrappers
        for index in sorted(written | detached):
            if signature.inputs[index].requires_grad and not self._is_part(index):
                self._require(f"{inputs[index]}.is_leaf is {signature.inputs[index].is_leaf}")
        if not written:
            return
        real = [
            i for i, info in enumerate(signature.inputs) if not isinstance(info.source, MemoryOf) and not info.number
        ]
        reached = [inputs[i] for i in real if signature.inputs[i].argument is None]
        self.lines += arrays_apart_lines(self.call, self.leaves, reached, self._bind)
        keys = [storage_key(self._real(i)) for i in real]
        apart = len(set(keys)) == len(keys)
        if apart and len(written) * len(real) <= 2 * _FEW_PAIRS:
            pairs = [(i, j) for i in real for j in real if i < j and (i in written or j in written)]
        else:
            pairs = None
        if pairs is not None and len(pairs) <= _FEW_PAIRS:
            shares = self._bind("shares_memory", share_memory)
            self._require(f"not ({' or '.join(f'{shares}({inputs[i]}, {inputs[j]})' for i, j in pairs)})")
            return
        key = self._bind("storage_key", storage_key)
        memory = self.names.fresh("memories")
        self.lines.append(f"{memory} = ({', '.join(f'{key}({inputs[i]})' for i in real)},)")
        self._require(f"len(set({memory})) == {len(set(keys))}")
        first_at: dict[int, int] = {}
        for position, value in enumerate(keys):
            first = first_at.setdefault(value, position)
            if first != position:
                self._require(f"{memory}[{position}] == {memory}[{first}]")
        self._counters(inputs, real, keys)

    def _counters(self, inputs: list[str], real: list[int], keys: list[int]) -> None:
        """Of inputs that share memory: which share a version counter, so that a write to one is one to the other."""
        shared = None
        in_memory: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            earlier = in_memory.setdefault(key, [])
            for before in earlier:
                a, b = self._real(real[before]), self._real(real[position])
                if a.is_inference() or b.is_inference() or _base(a) is _base(b):
                    continue  # a guard on bases says so already
                shared = shared or self._bind("share_counters", share_counters)
                pair = f"{shared}({inputs[real[before]]}, {inputs[real[position]]})"
                self._require(f"{pair} is {share_counters(a, b)}")
                break
            earlier.append(position)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _note_way(reads: Reads, source: Source, steps: tuple[tuple[str, Any], ...], known: dict[Any, Any]) -> Any:
    """What stands at the end of `steps` from the source's root.

    Each step on the way is noted: should another object come to stand on it, so does what follows. `known`: the ways
    that were gone before.
    """
    if not steps:
        return source.root
    way = (id(source.root), steps)
    if way in known:
        return known[way]
    value, (kind, key) = _note_way(reads, source, steps[:-1], known), steps[-1]
    name = str(source.slot)
    if kind == "attr" and key in getattr(value, "__dict__", ()):
        place, step = reads.place(vars(value), "dict", name, "attr"), vars(value)[key]
        if key in _TABLES:
            place.items.setdefault(key, Expected(step))
        else:
            reads.add(place, key, step)
    elif kind == "attr":
        step = getattr(value, key)
        reads.add(reads.place(value, "object", name, "attr"), key, step)
    else:
        step = value[key]
        if isinstance(value, (dict, list)):
            holder = reads.place(value, "dict" if isinstance(value, dict) else "list", name, "item")
            reads.add(holder, key, step)
    known[way] = step
    return step


def _identifier(info: InputInfo) -> str:
    return _as_name(str(getattr(info.slot, "name", "lifted")))


def _as_name(path: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in path)


def _tensor_of(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cpu")
