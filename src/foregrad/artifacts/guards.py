"""The guards of a specialization, as the list of `dispatch.guard_list`.

No text of a file becomes part of the source: names are made fresh, texts and numbers are literals, anything else is
bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._torch import engine
from .._torch.guards import count_function_modes, current_device, is_inference
from .._torch.symbols import is_symbolic
from .._torch.tensors import storage_key
from ..dispatch.constants import is_constant
from ..dispatch.guard_list import STATE, Facts, Guard, GuardMaker, Words, state_difference
from ..frontend.tree import Tree
from ..graph.signature import BaseOf, InputInfo, MemoryOf
from ..graph.source import Names
from ..graph.spelling import item
from .containers import fields_of
from .program import QUESTIONS, Specialization
from .records import Named, Stored


class StoredGuards(GuardMaker):
    """The guards for calls of `module`; `find` has, for the name of each tensor of the module, its table and key.

    After the guards `inputs[i]` names the variable of input i, `symbols` has that of each symbolic size.
    """

    def __init__(
        self, specialization: Specialization, module: torch.nn.Module, names: Names, find: Mapping[str, Any]
    ) -> None:
        super().__init__(specialization.joint, specialization.call.tree, names)
        self.specialization, self.module, self.find = specialization, module, find
        self.slots = [str(info.slot) for info in self.signature.inputs]
        self._state()
        self.take_apart(str, tuple(i.source.name for i in self.signature.inputs if isinstance(i.source, Named)))
        self.inputs = [self._input(info) for info in self.signature.inputs]
        self._tensors()
        self.symbols = self.sizes()
        self._relations()
        for number, question, _, value in self.specialization.facts:
            answer = f"{self.bind('ask', QUESTIONS[question])}({self.inputs[number]})"
            self.require(f"{answer} == {value!r}", question.format(self.slots[number]), value, answer)

    # ---------------------------------------------------------------- modes and settings

    def _state(self) -> None:
        context = dict(self.specialization.context)
        refused = f"{self.bind('state_to_refuse', state_to_refuse)}()"
        self.require(f"{refused} is None", "the call", Words("under no transform"), refused)
        expected, now = self.bind("context", context), f"{self.bind('context_now', context_now)}()"
        look = f"{self.bind('state_difference', state_difference)}({expected}, {now})"
        self.list.steps.append(Guard(f"{now} == {expected}", look=look, facts=((STATE, context),)))
        training = self.specialization.training
        if training is not None:
            mode = f"{self.bind('module', self.module)}.training"
            self.require(f"{mode} is {training}", "training, the mode of the module", training, mode)

    # ---------------------------------------------------------------- arguments

    def kind_test(self, name: str, tree: Tree) -> str:
        """The test of a container's kind. The user's class is unknown here: its fields count, a mapping is a dict."""
        if tree.kind == "namedtuple":
            return f"getattr({name}, '_fields', None) == {self.bind('fields', tree.context)}"
        if tree.kind == "dataclass":
            return f"{self.bind('fields_of', fields_of)}({name}) == {self.bind('fields', tree.context)}"
        return f"isinstance({name}, dict)" if tree.kind == "dict" else super().kind_test(name, tree)

    def leaf(self, name: str) -> None:
        leaf = self.specialization.call.leaves[len(self.leaves)]
        self.leaves.append(name)
        if leaf.same_as is not None:
            same = Words(f"the tensor {self.specialization.call.leaves[leaf.same_as].path}")
            self.require(f"{name} is {self.leaves[leaf.same_as]}", leaf.path, same, name)
        elif not leaf.is_tensor:
            self.require(is_constant(name, leaf.value, self.bind), leaf.path, leaf.value, name)

    # ---------------------------------------------------------------- inputs

    def _input(self, info: InputInfo) -> str:
        if info.argument is not None:
            return self.leaves[info.argument]
        name = self.names.fresh(str(getattr(info.slot, "name", "tensor")))
        if isinstance(info.source, Named):
            self.let(f"{name} = {item('kwargs', info.source.name, self.bind)}")
        elif isinstance(info.source, Stored):
            table, key = self.find[info.source.name]
            self.let(f"{name} = {item(self.bind('table', table), key, self.bind)}")
        return name

    def _tensors(self) -> None:
        infos = self.signature.inputs
        for number, info in enumerate(infos):
            if not isinstance(info.source, (BaseOf, MemoryOf)):
                self._tensor(number, info)
        for number, info in enumerate(infos):
            if isinstance(info.source, BaseOf):
                name, view = self.inputs[number], info.source.input
                self.let(f"{name} = {self.inputs[view]}._base")
                self.require(f"{name} is not None", f"{self.slots[view]}._base", Words("a tensor"), name)
                self._tensor(number, info)
        arguments, tensor = {info.argument for info in infos}, self.bind("Tensor", torch.Tensor)
        for number, leaf in enumerate(self.specialization.call.leaves):
            if leaf.is_tensor and leaf.same_as is None and number not in arguments:
                name = self.leaves[number]
                self.require(f"isinstance({name}, {tensor})", leaf.path, Words("a tensor"), name)

    def _tensor(self, number: int, info: InputInfo) -> None:
        """Add a guard on all metadata of a tensor, with a part for each."""
        name, spec = self.inputs[number], info.spec
        shape, stride = (tuple(None if is_symbolic(n) else n for n in ns) for ns in (spec.shape, spec.stride))
        facts = {
            "dtype": spec.dtype,
            "device": spec.device,
            "shape": shape,
            "stride()": stride,
            "requires_grad": info.requires_grad,
            "is_conj()": spec.conj,
            "is_neg()": spec.neg,
        }
        tests = [f"isinstance({name}, {self.bind('Tensor', torch.Tensor)})"]
        tests += [self._is(f"{name}.{fact}", value) for fact, value in facts.items()]
        self.compare(" and ".join(tests), ((self.slots[number], facts),), f"({name},)")

    def _is(self, read: str, value: Any) -> str:
        """The test that metadata `read` equals `value`; symbolic sizes, None, are left out."""
        if type(value) is bool:
            return f"{read} is {value}"
        if type(value) is not tuple:
            return f"{read} == {self.bind('value', value)}"
        if None not in value:
            return f"{read} == {value!r}"
        parts = [f"len({read}) == {len(value)}"]
        return " and ".join([*parts, *(f"{read}[{i}] == {n!r}" for i, n in enumerate(value) if n is not None)])

    def _relations(self) -> None:
        """Add guards on offsets that the graph depends on, on equal tensors, on memory that is shared and written."""
        infos, inputs, sharing = self.signature.inputs, self.inputs, self.specialization.sharing
        written = self.specialization.written()
        self.history(sharing, self.signature.detached.union(written))
        real = [i for i, info in enumerate(infos) if not isinstance(info.source, MemoryOf)]
        if len(real) > 1:
            ids = ", ".join(f"id({inputs[i]})" for i in real)
            names: Facts = tuple((self.slots[i], {}) for i in real)
            self.compare(f"len({{{ids}}}) == {len(real)}", names, f"({', '.join(inputs[i] for i in real)})")
        if sharing is not None:
            self.memories(sharing)
        elif written and len(inputs) > 1:
            targets = "".join(f"{inputs[i]}, " for i in written)
            test = f"{self.bind('apart', _apart)}(({targets}), ({', '.join(inputs)},))"
            slots = ", ".join(self.slots[i] for i in written)
            self.require(test, f"which of its tensors share memory with {slots}, which it writes to,", Words("none"))


def _apart(written: tuple[torch.Tensor, ...], all_: tuple[torch.Tensor, ...]) -> bool:
    """Whether written tensors share memory with no other tensor. Tensors without elements have no memory."""
    keys = [storage_key(tensor) for tensor in all_ if tensor.numel()]
    targets = {storage_key(tensor) for tensor in written if tensor.numel()}
    return sum(k in targets for k in keys) == len(targets)


# -------------------------------------------------------------------- context
# Settings of the thread and of the library that a captured graph depends on, and under which alone it holds.


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def context_now() -> dict[str, Any]:
    """The settings in force, by name."""
    settings: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": is_inference(),
        "default dtype": torch.get_default_dtype(),
        "default device": current_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    for device in _DEVICES:
        on = torch.is_autocast_enabled(device)
        settings[f"autocast of {device}"] = torch.get_autocast_dtype(device) if on else False
    return settings


def state_to_refuse() -> str | None:
    """The mode in force under which no artifact can be called, in words; None if there is none."""
    if engine.transforms_active():
        return "a transform of torch.func (vmap, grad, jvp) is active"
    if engine.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if count_function_modes() and not (count_function_modes() == 1 and engine.default_device_is_the_mode()):
        return "a torch function mode is active"
    return None
