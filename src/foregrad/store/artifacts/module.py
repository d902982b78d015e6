"""`LoadedModule`: an artifact as a module, with the parameters and buffers, and without the model's Python.

Each specialization is compiled when it is first called: its guards and its graphs become one function, as for
`foregrad.compile`. Copies share the graphs, not the tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..._torch import engine
from ..._torch.symbols import is_symbolic
from ..._torch.tensors import storage_key
from ...api import pipeline_for
from ...config import config
from ...dispatch.conditions import is_constant
from ...dispatch.graphs import rendered
from ...dispatch.guard_list import MISS, STATE, Facts, Guard, GuardMaker, Words, state_difference
from ...dispatch.pipeline import Pipeline
from ...errors import ArtifactCallError
from ...frontend.tree import Tree
from ...graph.joint import JointGraph, Partitioned
from ...graph.signature import BaseOf, InputInfo, MemoryOf
from ...graph.source import Names, item, source_of
from ...graph.tangents import ABSENT, STOP, BackwardCase
from ...interrupts import held
from ...locks import make_lock, taken
from ...partitioners import default_partition
from ...passes.decompose import decompose
from ...runtime.compiled import Compiled, Derived
from ...tracing.derivatives.resumable_trace import Derivative
from .container import StateEntry
from .program import QUESTIONS, Program, StoredSpecialization, context_now
from .records import Named, Stored, fields_of

if TYPE_CHECKING:
    from .artifact import Artifact


class LoadedModule(torch.nn.Module):
    """An artifact that can be called, trained, saved by `state_dict` and differentiated.

    `artifact` has its graphs. `with_backend(...)` gives the module compiled by a new backend.
    """

    artifact: Artifact
    backend: Any
    _settings: dict[str, Any]
    _runtime: _Runtime

    def __init__(
        self, artifact: Artifact, entries: list[StateEntry], backend: Any, settings: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.__dict__["artifact"] = artifact
        self.__dict__["backend"] = backend
        self.__dict__["_settings"] = dict(settings)
        self.__dict__["_runtime"] = _Runtime()
        for entry in entries:
            if entry.kind != "constant":
                self._hold(entry)
        training = next((s.training for s in artifact.specializations if s.training is not None), True)
        self.train(training)

    def _hold(self, entry: StateEntry) -> None:
        tensor = entry.tensor
        if entry.kind == "parameter" or entry.requires_grad:
            tensor = torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        for name in (entry.name, *entry.aliases):
            owner, key = self._owner(name)
            if isinstance(tensor, torch.nn.Parameter):
                owner._parameters[key] = tensor
            else:
                owner._buffers[key] = tensor
                if entry.kind == "temporary buffer":
                    owner._non_persistent_buffers_set.add(key)

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        """(the module that holds the tensor called `name`, made if missing; the tensor's own name there)."""
        *path, key = name.split(".")
        owner: torch.nn.Module = self
        for part in path:
            inner = owner._modules.get(part)
            if inner is None:
                inner = owner._modules[part] = torch.nn.Module()
            owner = inner
        return owner, key

    def _places(self) -> dict[str, tuple[dict[str, Any], str]]:
        """For each name, the table that the tensor is in and its key there."""
        place_by_name = {}
        for entry in self.artifact.entries:
            if entry.kind != "constant":
                owner, key = self._owner(entry.name)
                place_by_name[entry.name] = (owner._parameters if key in owner._parameters else owner._buffers, key)
        return place_by_name

    # ---------------------------------------------------------------- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the specialization with guards that the arguments pass. Raises `ArtifactCallError` if there is none."""
        runtime = self._runtime
        for call in runtime.calls:
            result = call(args, kwargs)
            if result is not MISS:
                return result
        return runtime.find(self, args, kwargs)

    def source(self) -> str:
        """The Python that runs for each specialization that has been called."""
        return "\n\n".join(source_of(call) for call in self._runtime.calls)

    def with_backend(self, backend: Any, **settings: Any) -> LoadedModule:
        """Compile the module by a new backend, over its own parameters and buffers.

        `settings`: `partition` and `memory_budget` of `foregrad.compile`.
        """
        module = LoadedModule.__new__(LoadedModule)
        module.__dict__.update(self.__dict__)
        module.__dict__ |= {"backend": backend, "_settings": settings, "_runtime": _Runtime()}
        return module

    def _foregrad_compile(self, backend: Any, settings: Mapping[str, Any]) -> LoadedModule:
        return self.with_backend(backend, **settings)

    def extra_repr(self) -> str:
        names = "; ".join(specialization.name for specialization in self.artifact.specializations)
        return f"{self.artifact.name}: {names}"

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModule:
        module = memo[id(self)] = LoadedModule.__new__(LoadedModule)
        shared = ("artifact", "backend", "_settings")
        for name, value in self.__dict__.items():
            if name == "_runtime":
                module.__dict__[name] = _Runtime()
            else:
                module.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a loaded artifact is not pickled: save it by `artifact.save(path)`, its tensors by state_dict()"
        )

    def __copy__(self) -> LoadedModule:
        return self.with_backend(self.backend, **self._settings)


class _Runtime:
    """The functions of one module's specializations, made when first called."""

    def __init__(self) -> None:
        self.calls: tuple[Callable[..., Any], ...] = ()
        self.functions: dict[int, Callable[..., Any]] = {}
        self.guards: dict[int, StoredGuards] = {}
        self.lock = make_lock()

    def find(self, module: LoadedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compile and run the first specialization that fits. Raises `ArtifactCallError` with all differences."""
        reasons = []
        for number, specialization in enumerate(module.artifact.specializations):
            with held, taken(self.lock):
                if number not in self.guards:
                    names = Names(["args", "kwargs", "MISS", "difference", "differs"])
                    self.guards[number] = StoredGuards(specialization, module, names, module._places())
            reason = self.guards[number].list.first_difference(args, kwargs)
            if reason is not None:
                reasons.append(f"{specialization.name}: {reason.name} must be {reason.before}; there is {reason.now}")
                continue
            with held, taken(self.lock):
                if number not in self.functions:
                    self.functions[number] = _compiled(module, number)
                    self.calls = (*self.calls, self.functions[number])
            result = self.functions[number](args, kwargs)
            if result is not MISS:
                return result
            places = "; ".join(dict.fromkeys(d.where for d in specialization.signature.stops.decisions))
            reasons.append(
                f"{specialization.name}: a value that is read at {places} must be equal to the value at export (a "
                "program that keeps the value a tensor, without .item() or `if`, takes any value)"
            )
        name = module.artifact.name
        raise ArtifactCallError(
            f"the artifact `{name}` can't be called like this. " + " | ".join(reasons)
            if reasons
            else f"the artifact `{name}` has no specialization"
        )


def _compiled(module: LoadedModule, number: int) -> Callable[..., Any]:
    """One specialization as a function of (args, kwargs)."""
    pipeline = pipeline_for(backend=module.backend, **module._settings)
    specialization = module.artifact.specialization_for(number, fresh=_changes_graphs(pipeline))
    joint, places = specialization.joint, module._places()
    where = "; ".join(dict.fromkeys(check.where for check in joint.signature.stops.checks))
    with torch.set_grad_enabled(bool(specialization.context["grad mode"])):
        compiled = _Builder(pipeline, specialization).build(specialization.program)
        return rendered(
            joint.name,
            compiled,
            lambda names: StoredGuards(specialization, module, names, places),
            functools.partial(_fail, where),
        )[0]


def _fail(where: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"a check of the exported function failed, at {where}")


def _changes_graphs(pipeline: Pipeline) -> bool:
    return pipeline.decompositions is not None or pipeline.prepare_joint is not None


class _Builder:
    """Compiles a program and, on demand, its derivatives."""

    def __init__(self, pipeline: Pipeline, specialization: StoredSpecialization) -> None:
        self.pipeline = pipeline
        context = specialization.context
        self.autocast = any(value is not False for name, value in context.items() if name.startswith("autocast"))
        self.grad_mode = bool(context["grad mode"])

    def build(self, program: Program) -> Compiled:
        partitioned = self._halves(program)
        compiled = self.pipeline.compile(partitioned, None, config.value)
        inference = partitioned.joint.signature.is_inference
        changes: dict[str, Any] = {
            "disable_autocast": self.autocast,
            "needs_grad_mode": not inference and not self.grad_mode,
        }
        if program.derived:
            changes["make_derived"] = functools.partial(self._derived, program)
        return dataclasses.replace(compiled, **changes)

    def _derived(self, program: Program, case: BackwardCase, at_hand: Any) -> Derived:
        """The derivative with equal tangents present, requiring grad or not."""
        if STOP in case.pattern:
            raise ArtifactCallError(
                f"a gradient by a result of the artifact `{program.joint.name}` is requested, or a hook or "
                "`retain_grad()` is on the result, and further results were computed from it: artifacts can't hold "
                "this derivative"
            )
        if case.gone:
            raise ArtifactCallError(
                f"a part of the backward of the artifact `{program.joint.name}` ran before and freed its residuals: "
                "pass retain_graph=True there to differentiate the rest twice"
            )
        if case.kinds:
            raise ArtifactCallError(
                f"a gradient for a result of the artifact `{program.joint.name}` is a wrapper subclass, or its "
                "metadata differs from the export: artifacts hold no backward for this gradient"
            )
        present = [kind != ABSENT for kind in case.pattern]
        for derived in program.derived:
            if [kind != ABSENT for kind in derived.pattern] == present:
                compiled = dataclasses.replace(self.build(derived.program), disable_autocast=True)
                derivative = Derivative(derived.program.joint, None, derived.feeds, derived.gradients)  # type: ignore[arg-type]
                return Derived(derivative, compiled)
        outputs = program.joint.signature.graph_outputs.slots
        names = [
            str(outputs[i]) for i, p in zip(program.joint.signature.gradients.differentiable, present, strict=True) if p
        ]
        raise ArtifactCallError(
            f"the artifact `{program.joint.name}` holds no second derivative for gradients of {' and '.join(names)} "
            "alone, only for one result and for all results. Return the results to differentiate twice as one result."
        )

    def _halves(self, program: Program) -> Partitioned:
        """Forward and backward: the stored halves, unless the backend partitions anew and derivatives allow that."""
        pipeline, partitioned = self.pipeline, program.partitioned
        table = pipeline.decompositions() if callable(pipeline.decompositions) else pipeline.decompositions
        if program.derived or not _changes_graphs(pipeline):
            own = pipeline.partition is default_partition or program.derived
            return partitioned if own else pipeline.split(partitioned.joint)
        joint: JointGraph = partitioned.joint
        if table:
            decompose(joint.module, table, joint.fake_mode)
        halves: Partitioned = pipeline.split(joint)
        if pipeline.prepare_halves is not None and not joint.signature.is_inference:
            halves = pipeline.prepare_halves(halves)
        return halves


# -------------------------------------------------------------------- guards
# The guards of a specialization, as the list of `dispatch.guard_list`.
#
# No text of a file becomes part of the source: names are made fresh, texts and numbers are literals, anything else is
# bound.


class StoredGuards(GuardMaker):
    """The guards for calls of `module`; `find` has, for the name of each tensor of the module, its table and key."""

    def __init__(
        self, specialization: StoredSpecialization, module: torch.nn.Module, names: Names, find: Mapping[str, Any]
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
            self.require(test, f"the tensors that share memory with {slots}, written by the call,", Words("none"))


def _apart(written: tuple[torch.Tensor, ...], all_: tuple[torch.Tensor, ...]) -> bool:
    """Whether written tensors share memory with no other tensor. Tensors without elements have no memory."""
    keys = [storage_key(tensor) for tensor in all_ if tensor.numel()]
    targets = {storage_key(tensor) for tensor in written if tensor.numel()}
    return sum(k in targets for k in keys) == len(targets)


def state_to_refuse() -> str | None:
    """The mode in force that forbids calls of artifacts, in words; None if there is none."""
    if engine.transforms_active():
        return "a transform of torch.func (vmap, grad, jvp) is active"
    if engine.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if engine.count_function_modes() and not (
        engine.count_function_modes() == 1 and engine.default_device_is_the_mode()
    ):
        return "a torch function mode is active"
    return None
