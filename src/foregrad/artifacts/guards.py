"""The guards of a specialization as straight-line Python, and as a function that names the first that fails.

Nothing of a file's text becomes part of the source: names are made fresh, texts and numbers are literals, anything else
is bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.symbols import is_symbolic
from .._torch.tensors import share_counters, storage_key, whole_memory
from ..dispatch.constants import has_keys, is_constant
from ..dispatch.guards import MISS
from ..dispatch.shapes import offset_dependent, size_lines
from ..frontend.tree import Tree
from ..graph.meta import TensorSpec
from ..graph.signature import BaseOf, InputInfo, MemoryOf
from ..graph.source import Names, unpacked
from ..graph.spelling import attribute, item, key_text
from .containers import fields_of
from .context import context_now, state_to_refuse
from .facts import QUESTIONS
from .program import Specialization
from .records import Named, Stored
from .sharing import Sharing, same_memories

__all__ = ["MISS", "Guards", "described", "render"]


@dataclasses.dataclass(slots=True)
class Guards:
    """Lines in front of a run: `fast` returns `MISS` at the first difference, `naming` what differs.

    `naming` returns (what must be, what was found). After the lines `inputs[i]` names the variable of input i.
    """

    fast: list[str]
    naming: list[str]
    globals: dict[str, Any]
    inputs: list[str]
    symbols: dict[Any, str]


def render(specialization: Specialization, module: torch.nn.Module, names: Names, find: Mapping[str, Any]) -> Guards:
    """The guards for calls of `module`; `find` has, for the name of each tensor that is held, its table and key."""
    return _Renderer(specialization, module, names, find).render()


class _Renderer:
    def __init__(
        self, specialization: Specialization, module: torch.nn.Module, names: Names, find: Mapping[str, Any]
    ) -> None:
        self.specialization, self.module, self.names, self.find = specialization, module, names, find
        self.joint = specialization.joint
        self.signature = specialization.signature
        self.leaves = specialization.call.leaves
        self.bound: dict[int, str] = {}
        self.fast: list[str] = []
        self.naming: list[str] = []
        self.globals: dict[str, Any] = {"MISS": MISS}
        self.variables: list[str] = []
        self.named = [info.source.name for info in self.signature.inputs if isinstance(info.source, Named)]
        self.inputs: list[str] = []

    def bind(self, wanted: str, value: Any) -> str:
        """A global name for a value, one for each object."""
        known = self.bound.get(id(value))
        if known is not None:
            return known
        name = self.bound[id(value)] = self.names.fresh(wanted)
        self.globals[name] = value
        return name

    def require(self, condition: str, what: str, shown: str = "None") -> None:
        self.fast.append(f"if not ({condition}): return MISS")
        self._name(condition, what, shown)

    def _name(self, condition: str, what: str, shown: str) -> None:
        self.naming.append(f"if not ({condition}): return {self.bind('message', what)}, lambda: {shown}")

    def add(self, *lines: str) -> None:
        self.fast += lines
        self.naming += lines

    def render(self) -> Guards:
        self._state()
        self._arguments()
        self._inputs()
        symbols = self._sizes()
        self._relations()
        for number, question, _, value in self.specialization.facts:
            ask, name = self.bind("ask", QUESTIONS[question]), self.inputs[number]
            slot = self.signature.inputs[number].slot
            self.require(f"{ask}({name}) == {value!r}", f"{question.format(slot)} must be {value}", f"{ask}({name})")
        fast = ["try:", *("    " + line for line in self.fast)]
        naming = ["try:", *("    " + line for line in self.naming)]
        errors = "except (KeyError, AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):"
        fast += [errors, "    return MISS"]
        for number, info in enumerate(self.signature.inputs):
            if isinstance(info.source, MemoryOf):
                whole, dtype = self.bind("whole_memory", whole_memory), self.bind("dtype", info.spec.dtype)
                fast.append(f"{self.inputs[number]} = {whole}({self.inputs[info.source.input]}, {dtype})")
        other = self.bind("message", "the arguments must be nested as they were when it was exported")
        naming += [errors, f"    return {other}, lambda: None", "return None"]
        return Guards(fast, naming, self.globals, self.inputs, symbols)

    # ---------------------------------------------------------------- what the call is made under

    def _state(self) -> None:
        context = dict(self.specialization.context)
        refused, now = self.bind("state_to_refuse", state_to_refuse), self.bind("context_now", context_now)
        self.require(
            f"{refused}() is None", "no transform, function mode or forward-mode differentiation", f"{refused}()"
        )
        expected, state = self.bind("context", context), self.names.fresh("state")
        self.fast.append(f"if {now}() != {expected}: return MISS")
        self.naming.append(f"{state} = {now}()")
        for name in sorted(context):
            key = self.bind("key", name)
            found = f"{state}.get({key})"
            self._name(f"{found} == {expected}[{key}]", f"{name} must be {context[name]}, as when exported", found)
        self._name(f"{state} == {expected}", "the settings of PyTorch must be those it was exported under", "None")
        training = self.specialization.training
        if training is not None:
            root, mode = self.bind("module", self.module), "train" if training else "eval"
            self.require(f"{root}.training is {training}", f"the module must be in {mode} mode (.{mode}())")

    # ---------------------------------------------------------------- arguments

    def _arguments(self) -> None:
        positional, keyword = self.specialization.call.tree.children
        count = len(positional.children)
        names = [self.names.fresh(f"args_{i}") for i in range(count)]
        self.require(f"len(args) == {count}", f"there must be {count} positional arguments", "len(args)")
        if names:
            self.add(f"{unpacked(names)}args")
        for number, (name, child) in enumerate(zip(names, positional.children, strict=True)):
            self._open(name, child, f"args[{number}]")
        expected = [*keyword.context, *self.named]
        text = f"exactly the keyword arguments {', '.join(map(repr, expected))}" if expected else "no keyword arguments"
        condition = f"len(kwargs) == {len(expected)}" if expected else "not kwargs"
        self.require(condition, f"there must be {text}", "list(kwargs)")
        for key in expected:
            self.require(
                f"{self.bind('key', key)} in kwargs", f"there must be the keyword argument {key!r}", "list(kwargs)"
            )
        for key, child in zip(keyword.context, keyword.children, strict=True):
            name = self.names.fresh(str(key))
            self.add(f"{name} = {item('kwargs', key, self.bind)}")
            self._open(name, child, str(key))

    def _open(self, name: str, tree: Tree, path: str) -> None:
        if tree.kind == "leaf":
            self._leaf(name)
            return
        children = [self.names.fresh(f"{name}_{i}") for i in range(len(tree.children))]
        kind = {"namedtuple": tree.type.__name__, "dataclass": tree.type.__name__}.get(tree.kind, tree.kind)
        what = f"{path} must be a {kind}"
        steps = [f"[{i}]" for i in range(len(children))]
        if tree.kind in ("tuple", "list", "structseq"):
            cls = self.bind("cls", tree.type)
            self.require(f"type({name}) is {cls}", what, f"type({name})")
        elif tree.kind == "namedtuple":
            fields = self.bind("fields", tree.context)
            self.require(f"getattr({name}, '_fields', None) == {fields}", f"{what} {tree.context}", f"type({name})")
        elif tree.kind == "dict":
            # A mapping whose items are attributes stands for classes that are not known here.
            cls, keys = self.bind("cls", dict), key_text(tuple(tree.context))
            self.require(f"isinstance({name}, {cls})", what, f"type({name})")
            self.require(has_keys(name, tree.context, self.bind), f"{path} must have the keys {keys}", f"list({name})")
            steps = [f"[{key_text(key)}]" for key in tree.context]
        else:
            fields, found = self.bind("fields", tree.context), self.bind("fields_of", fields_of)
            self.require(f"{found}({name}) == {fields}", f"{what} with the fields {tree.context}", f"type({name})")
            steps = [f".{field}" for field in tree.context]
            self.add(*(f"{c} = {attribute(name, f, self.bind)}" for c, f in zip(children, tree.context, strict=True)))
        if tree.kind not in ("dict", "dataclass"):
            self.require(f"len({name}) == {len(children)}", f"{path} must have {len(children)} items", f"len({name})")
        if children and tree.kind != "dataclass":
            self.add(f"{unpacked(children)}{name}{'.values()' if tree.kind == 'dict' else ''}")
        for child, step, subtree in zip(children, steps, tree.children, strict=True):
            self._open(child, subtree, path + step)

    def _leaf(self, name: str) -> None:
        leaf = self.leaves[len(self.variables)]
        self.variables.append(name)
        if leaf.same_as is not None:
            same = self.leaves[leaf.same_as].path
            self.require(f"{name} is {self.variables[leaf.same_as]}", f"{leaf.path} must be the tensor {same}")
        elif not leaf.is_tensor:
            self.require(is_constant(name, leaf.value, self.bind), f"{leaf.path} must be {leaf.value!r}", name)

    # ---------------------------------------------------------------- inputs

    def _inputs(self) -> None:
        infos = self.signature.inputs
        given = {info.argument for info in infos if info.argument is not None}
        self.inputs += [self._input(info) for info in infos]
        for number, info in enumerate(infos):
            if not isinstance(info.source, (BaseOf, MemoryOf)):
                self._tensor(self.inputs[number], info)
        for number, info in enumerate(infos):
            if isinstance(info.source, BaseOf):
                view = infos[info.source.input].slot
                self.add(f"{self.inputs[number]} = {self.inputs[info.source.input]}._base")
                self.require(f"{self.inputs[number]} is not None", f"{view} must be a view")
                self._tensor(self.inputs[number], info)
        tensor = self.bind("Tensor", torch.Tensor)
        for number, leaf in enumerate(self.leaves):
            if leaf.is_tensor and leaf.same_as is None and number not in given:
                self.require(f"isinstance({self.variables[number]}, {tensor})", f"{leaf.path} must be a tensor")

    def _input(self, info: InputInfo) -> str:
        if info.argument is not None:
            return self.variables[info.argument]
        name = self.names.fresh(str(getattr(info.slot, "name", "tensor")))
        if isinstance(info.source, (BaseOf, MemoryOf)):
            return name
        if isinstance(info.source, Named):
            self.add(f"{name} = {item('kwargs', info.source.name, self.bind)}")
        else:
            assert isinstance(info.source, Stored)
            table, key = self.find[info.source.name]
            self.add(f"{name} = {item(self.bind('table', table), key, self.bind)}")
        return name

    def _tensor(self, name: str, info: InputInfo) -> None:
        """All metadata of a tensor: one line where only the answer counts."""
        spec, slot = info.spec, info.slot
        tensor, dtype, device = (self.bind(n, v) for n, v in self._kinds(spec))
        shape, stride = (self._numbers(f"{name}.{part}", numbers) for part, numbers in _parts(spec))
        needs = "" if info.requires_grad else "not "
        conditions = [
            (f"isinstance({name}, {tensor})", f"{slot} must be a tensor", f"type({name})"),
            (f"{name}.dtype is {dtype}", f"{slot} must be {spec.dtype}", f"{name}.dtype"),
            (f"{name}.device == {device}", f"{slot} must be on {spec.device}", f"{name}.device"),
            (shape, f"{slot} must have the shape {_texts(spec.shape)}", f"tuple({name}.shape)"),
            (stride, f"{slot} must have the strides {_texts(spec.stride)}", f"{name}.stride()"),
            (f"{name}.requires_grad is {info.requires_grad}", f"{slot} must {needs}require grad", "None"),
            (f"{name}.is_conj() is {spec.conj}", f"is_conj() of {slot} must be {spec.conj}", "None"),
            (f"{name}.is_neg() is {spec.neg}", f"is_neg() of {slot} must be {spec.neg}", "None"),
        ]
        self.fast.append(f"if not ({' and '.join(condition for condition, _, _ in conditions)}): return MISS")
        for condition, what, shown in conditions:
            self._name(condition, what, shown)

    def _kinds(self, spec: TensorSpec) -> list[tuple[str, Any]]:
        return [("Tensor", torch.Tensor), ("dtype", spec.dtype), ("device", spec.device)]

    def _numbers(self, name: str, numbers: tuple[Any, ...]) -> str:
        """The condition that sizes or strides are these, where they are not symbolic."""
        if not any(map(is_symbolic, numbers)):
            return f"{name} == {tuple(numbers)!r}"
        parts = [f"len({name}) == {len(numbers)}"]
        return " and ".join([*parts, *(f"{name}[{i}] == {n!r}" for i, n in enumerate(numbers) if not is_symbolic(n))])

    def _sizes(self) -> dict[Any, str]:
        if not self.signature.symbols:
            return {}
        reads, conditions, symbols = size_lines(self.joint, self.inputs, self.names, self.bind)
        self.add(*reads)
        infos = self.signature.symbols
        found = ", ".join(f"{info.symbol}: {self.signature.inputs[info.input].slot}.size({info.dim})" for info in infos)
        values = f"({', '.join(symbols.values())},)"
        for number, condition in enumerate(conditions):
            if number < len(infos):
                info = infos[number]
                low, high = self.joint.symbols.limits(info.symbol)
                what = (
                    f"size {info.dim} of {self.signature.inputs[info.input].slot} must be from {low} to {high or 'any'}"
                )
                self.require(condition, what, symbols[info.symbol])
            else:
                self.require(condition, f"the sizes must be such that {condition} ({found})", values)
        return symbols

    def _relations(self) -> None:
        """Offsets that the graph depends on, tensors that are one, memory that is shared and written."""
        infos = self.signature.inputs
        for number in sorted(n for n in offset_dependent(self.joint) if not isinstance(infos[n].source, MemoryOf)):
            offset = infos[number].spec.offset
            what = f"{infos[number].slot} must begin at element {offset} of its memory"
            self.require(f"{self.inputs[number]}.storage_offset() == {offset!r}", what)
        real = [name for name, i in zip(self.inputs, infos, strict=True) if not isinstance(i.source, MemoryOf)]
        if len(real) > 1:
            ids = ", ".join(f"id({name})" for name in real)
            self.require(f"len({{{ids}}}) == {len(real)}", "no two of its tensors may be one and the same")
        written = self.specialization.written()
        for number in sorted(self.signature.detached.union(written)):
            if infos[number].requires_grad:
                leaf = infos[number].is_leaf
                what = f"{infos[number].slot}, which is written to, must {'' if leaf else 'not '}be a leaf"
                self.require(f"{self.inputs[number]}.is_leaf is {leaf}", what)
        if self.specialization.sharing is not None:
            self._sharing(self.specialization.sharing)
        elif written and len(self.inputs) > 1:
            key, names = self.bind("storage_key", storage_key), ", ".join(self.inputs)
            check = self.bind("apart", _apart)
            targets = ", ".join(self.inputs[i] for i in sorted(written))
            slots = ", ".join(str(infos[i].slot) for i in sorted(written))
            what = f"no other tensor may share memory with {slots}, which it writes to"
            self.require(f"{check}({key}, ({targets},), ({names},))", what[:2000])

    def _sharing(self, sharing: Sharing) -> None:
        """Which of its tensors share memory, as at export, and which of those count writes together."""
        infos, inputs = self.signature.inputs, self.inputs
        check, memories = self.bind("same_memories", same_memories), self.bind("memories", sharing.memories)
        names = ", ".join("None" if n is None else name for name, n in zip(inputs, sharing.memories, strict=True))
        what = f"of its tensors those must share memory that did at export: {_names_of(infos, sharing.memories)}"
        self.require(f"{check}({memories}, ({names},))", what[:2000])
        counters = self.bind("share_counters", share_counters)
        for i, j, same in sharing.counters:
            what = f"{infos[i].slot} and {infos[j].slot} must {'' if same else 'not '}share a version counter"
            self.require(f"{counters}({inputs[i]}, {inputs[j]}) is {same}", what)
        for i in sharing.roots:
            self.require(f"{inputs[i]}._base is None", f"{infos[i].slot} must be no view")


def _names_of(infos: Sequence[InputInfo], memories: Sequence[int | None]) -> str:
    groups: dict[int, list[str]] = {}
    for info, number in zip(infos, memories, strict=True):
        if number is not None:
            groups.setdefault(number, []).append(str(info.slot))
    return "; ".join(" and ".join(group) for group in groups.values() if len(group) > 1)


def _apart(
    key: Callable[[torch.Tensor], int], written: tuple[torch.Tensor, ...], all_: tuple[torch.Tensor, ...]
) -> bool:
    """Whether what is written to shares memory with nothing else. Tensors without elements have no memory."""
    keys = [key(tensor) for tensor in all_ if tensor.numel()]
    targets = {key(tensor) for tensor in written if tensor.numel()}
    return sum(k in targets for k in keys) == len(targets)


def _parts(spec: TensorSpec) -> list[tuple[str, tuple[Any, ...]]]:
    return [("shape", spec.shape), ("stride()", spec.stride)]


def _texts(numbers: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, numbers))}{',' if len(numbers) == 1 else ''})"


def described(value: Any) -> str:
    """What a guard found, for people."""
    if isinstance(value, torch.Tensor):
        return f"a tensor, {value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"a {value.__name__}"
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."
