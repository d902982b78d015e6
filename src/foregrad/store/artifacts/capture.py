"""`export`: a function or module captured, with its derivatives, as an artifact."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._torch.wrappers import is_wrapper
from ...api import pipeline_for
from ...config import config
from ...dispatch.guard_list import sharing_of
from ...dispatch.pipeline import Pipeline
from ...errors import ArtifactError, AttributeAssignedError, UnsupportedError, UnsupportedSideEffectError
from ...frontend.call import FlatCall, flatten_call
from ...frontend.source import Source
from ...frontend.tree import flatten
from ...graph.effect_log import CheckFailed
from ...graph.joint import JointGraph, Partitioned
from ...graph.signature import BaseOf, InputInfo, MemoryOf, PartOf, Signature, WrapperOutput
from ...graph.slots import Buffer, Param
from ...graph.source import ATTRIBUTES, a_name
from ...graph.tangents import ABSENT, VARIABLE, BackwardCase
from ...identity import ById, IdSet
from ...interrupts import held
from ...passes.keep import also_saved, results_read
from ...python.holders import CLASS, SET, Holder
from ...python.program_state import ProgramState
from ...tracing.capture import Captured, capture_call
from ...tracing.derivatives.resumable_trace import GradientRef, ResumableTrace, WrappedRef
from ...tracing.parts import Options
from .container import StateEntry
from .program import QUESTIONS, CallSpec, DerivedProgram, Leaf, Program, StoredSpecialization, context_now
from .records import Named, Stored

Limits = tuple["int | None", "int | None"]
_MOST_SHOWN = 8  # paths in an error
_MOST_DERIVATIVES = 64  # graphs of a specialization's derivatives
_PLAIN = (int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)


class Exporter:
    """Captures one function or module, once for each specialization, and keeps its tensors under their names."""

    def __init__(self, function: Any, *, closed_over: str, decompositions: Any) -> None:
        if closed_over not in ("constants", "inputs"):
            raise ValueError(f'closed_over is "constants" or "inputs", not {closed_over!r}')
        if _is_exported_program(function):  # its graph is called as a module
            function = function.module()
        self.module = function if isinstance(function, torch.nn.Module) else None
        self.function = function.forward if self.module is not None else function
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self.closed_over = closed_over
        self.pipeline: Pipeline = pipeline_for(backend="nop", partition="default", decompositions=decompositions)
        self.entries: dict[str, StateEntry] = {}
        self.names: ById[torch.Tensor, str] = ById()
        if self.module is not None:
            self._note_module(self.module)

    def _note_module(self, module: torch.nn.Module) -> None:
        """Add all parameters and buffers, used or not: the `state_dict` must be whole."""
        aliases: ById[torch.Tensor, list[str]] = ById()
        temporary = {
            f"{prefix}.{name}" if prefix else name
            for prefix, part in module.named_modules()
            for name in part._non_persistent_buffers_set
        }
        tensors: list[tuple[str, str, torch.Tensor]] = [
            *((name, "parameter", p) for name, p in module.named_parameters(remove_duplicate=False)),
            *((name, "buffer", b) for name, b in module.named_buffers(remove_duplicate=False)),
        ]
        for name, kind, tensor in tensors:
            if is_wrapper(tensor):  # tensors of the graph are added when they are used
                continue
            aliases.setdefault(tensor, []).append(name)
            if len(aliases[tensor]) == 1:
                kind = "temporary buffer" if name in temporary else kind
                self._add(name, kind, tensor)
        for names in aliases.values():
            self.entries[names[0]] = dataclasses.replace(self.entries[names[0]], aliases=tuple(names[1:]))

    def _add(self, name: str, kind: str, tensor: torch.Tensor) -> str:
        if torch.nn.parameter.is_lazy(tensor):
            raise ArtifactError(f"{name} is not initialized: call the module once before exporting it")
        if tensor.requires_grad and not tensor.is_leaf:
            raise ArtifactError(
                f"an artifact can't hold {name}, computed from tensors that require grad: detach it, or pass "
                'closed_over="inputs"'
            )
        self.entries[name] = StateEntry(name, kind, tensor, tensor.requires_grad)
        self.names[tensor] = name
        return name

    # ---------------------------------------------------------------- one specialization

    def specialize(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any, derivatives: int, name: str
    ) -> StoredSpecialization:
        """The function captured for calls with arguments like these. Raises as `export` does."""
        if type(derivatives) is not int or derivatives < 0:
            raise ValueError(f"derivatives is how often the artifact can be differentiated, not {derivatives!r}")
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"args is a tuple of arguments, not {a_name(type(args).__name__)}: foregrad.export(model, (x,))"
            )
        call = flatten_call(self.function, tuple(args), dict(kwargs or {}))
        limits = dynamic_dims(self.function, call, dynamic_shapes)
        call = dataclasses.replace(call, dynamic=limits)
        grad = torch.is_grad_enabled() and derivatives > 0
        with held, torch.set_grad_enabled(grad):
            context = context_now()
            try:
                captured = self._capture(call, higher=derivatives > 1)
            except CheckFailed as failure:
                raise failure.error from None
            _check_effects(captured.joint, self.name)
            _check_dynamic(call, captured.joint, self.name)
            program, sources = self._program(captured, derivatives, call)
            # The table has all conditions on sizes now, the derivatives' conditions included.
        facts = self._facts(captured, sources)
        training = None if self.module is None else self.module.training
        specialization = StoredSpecialization(
            name or self._name(training, grad=grad), program, self._spec(call), context, training, facts
        )
        has_writes = bool(specialization.written())
        sharing = sharing_of(specialization.signature, captured.tensors) if has_writes else None
        return dataclasses.replace(specialization, sharing=sharing)

    def _name(self, training: bool | None, *, grad: bool) -> str:
        mode = [] if training is None else ["train" if training else "eval"]
        return ", ".join([*mode, "with gradients" if grad else "without gradients"])

    def _capture(self, call: FlatCall, *, higher: bool) -> Captured:
        table = self.pipeline.decompositions
        table = table() if callable(table) else table
        around: Callable[[], Any] = contextlib.nullcontext
        if self.module is not None:  # the capture handles all other writes
            around = functools.partial(assigned_attributes, self.module, puts_back=False)
        captured = capture_call(call, Options(self.name, table or {}, higher_order=higher, around=around))
        _check_wrappers(captured, self.name)
        for guard in captured.guards:
            raise UnsupportedError(f"`{self.name}` has a guard on {guard.name}, and an artifact can't check it")
        for region in captured.joint.signature.stops.eager_regions:
            raise UnsupportedError(
                f"`{self.name}` calls the eager region `{region.name}` at {region.where}, and an artifact holds no "
                "code of Python's. Export the parts around it."
            )
        return captured

    def _program(self, captured: Captured, derivatives: int, call: FlatCall) -> tuple[Program, list[Any]]:
        joint = captured.joint
        arguments = IdSet(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor))
        sources: list[Any] = []
        for number, info in enumerate(joint.signature.inputs):
            tensor = captured.tensors[number]
            if info.argument is None and tensor is not None and tensor in arguments:
                raise ArtifactError(f"the argument {info.slot} is also a tensor that the function reaches by itself")
            sources.append(None if info.argument is not None else self._source(info, tensor))
        infos = tuple(
            dataclasses.replace(info, source=source)
            for info, source in zip(joint.signature.inputs, sources, strict=True)
        )
        structure = dataclasses.replace(joint.signature.structure, wrapper_parts=())  # each an input by itself
        signature = dataclasses.replace(joint.signature, inputs=infos, structure=structure)
        return self._halves(dataclasses.replace(joint, signature=signature), captured.resumable, derivatives), sources

    def _halves(self, joint: JointGraph, resumable: ResumableTrace | None, derivatives: int) -> Program:
        partitioned: Partitioned = self.pipeline.split(joint)
        if resumable is None or derivatives < 2 or joint.error is not None:
            return Program(partitioned)
        partitioned = also_saved(partitioned, resumable.read_again | results_read(joint))
        self.left = _MOST_DERIVATIVES
        return Program(partitioned, self._derived(partitioned, resumable, derivatives - 1))

    def _derived(self, partitioned: Any, resumable: Any, orders: int) -> tuple[DerivedProgram, ...]:
        """The backward as a function, for all tangents together and for each alone."""
        count = len(partitioned.joint.signature.gradients.differentiable)
        if not count or partitioned.joint.error is not None:
            return ()
        patterns = [(VARIABLE,) * count]
        if count > 1:
            patterns += [tuple(VARIABLE if i == j else ABSENT for j in range(count)) for i in range(count)]
        programs = []
        for pattern in patterns:
            self.left -= 1
            if self.left < 0:
                break
            derived = self.pipeline.derive(partitioned, resumable, BackwardCase(pattern), config.value)
            inner, derivative = derived.compiled.partitioned, derived.derivative
            further = self._derived(inner, derivative.resumable, orders - 1) if orders > 1 else ()
            _check_gradients(inner.joint.signature, self.name, derivative.gradients)
            gradients = tuple(ref for ref in derivative.gradients if not isinstance(ref, WrappedRef))
            programs.append(DerivedProgram(pattern, derivative.feeds, gradients, Program(inner, further)))
        return tuple(programs)

    def _source(self, info: InputInfo, tensor: torch.Tensor | None) -> Any:
        """The source, in a loaded artifact, of a tensor that the function reached by itself."""
        if isinstance(info.source, (BaseOf, MemoryOf)):
            return info.source
        if isinstance(info.source, PartOf) and tensor is not None:
            return Stored(self._part(info, tensor))
        if not isinstance(info.source, Source) or tensor is None:
            raise ArtifactError(f"`{self.name}` reaches {info.slot} in a way that an artifact can't repeat")
        name = self.names.get(tensor)
        if name is not None:
            return Stored(name)
        base_name = str(info.slot).partition(" ")[2] or str(info.slot)
        if self.closed_over == "inputs" and not isinstance(info.slot, (Param, Buffer)):
            return Named(base_name)
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        if not isinstance(info.slot, (Param, Buffer)):
            kind = "tensor"
        name = next(
            candidate
            for candidate in itertools.chain([base_name], (f"{base_name}_{i}" for i in itertools.count(1)))
            if candidate not in self.entries
        )
        return Stored(self._add(name, kind, tensor))

    def _part(self, info: InputInfo, tensor: torch.Tensor) -> str:
        """The name of a plain tensor in a wrapper subclass: the artifact holds the tensor, not the wrapper."""
        name = str(info.slot).partition(" ")[2] or str(info.slot)
        if name not in self.entries:
            kind = "tensor" if not isinstance(info.slot, (Param, Buffer)) else "buffer"
            self._add(name, "parameter" if tensor.requires_grad else kind, tensor)
        return name

    def _facts(self, captured: Captured, sources: list[Any]) -> tuple[tuple[int, str, str | None, Any], ...]:
        """Facts that the function read of its arguments. Facts about its own tensors are part of the program."""
        facts = []
        for number, question, attribute, value in captured.facts:
            if number >= len(sources) or isinstance(sources[number], Stored):  # a wrapper's plain tensors are stored
                continue
            slot = captured.joint.signature.inputs[number].slot
            if attribute is not None:
                if type(value) is object or repr(value) == "ABSENT" or not isinstance(value, (*_PLAIN, torch.Tensor)):
                    continue
                raise ArtifactError(f"`{self.name}` reads the attribute {attribute} of {slot}: pass it as an argument")
            if question == ATTRIBUTES and not value:  # a tensor without attributes answers alike
                continue
            if question not in QUESTIONS or type(value) not in (bool, int):
                raise ArtifactError(f"`{self.name}` asks {question.format(slot)}, and an artifact can't ask again")
            facts.append((number, question, None, value))
        return tuple(facts)

    def _spec(self, call: FlatCall) -> CallSpec:
        leaves = []
        for number, (leaf, path) in enumerate(zip(call.leaves, call.paths, strict=True)):
            if isinstance(leaf, torch.Tensor):
                first = call.first_of[number]
                leaves.append(Leaf(path, is_tensor=True, same_as=None if first == number else first))
            elif isinstance(leaf, _PLAIN) or leaf is Ellipsis or isinstance(leaf, (slice, range)):
                leaves.append(Leaf(path, value=leaf))
            else:
                raise ArtifactError(
                    f"an artifact can't hold the argument {path}, a {type(leaf).__qualname__}: pass tensors and plain "
                    "values."
                )
        return CallSpec(call.tree, tuple(leaves))


def _check_effects(joint: JointGraph, name: str) -> None:
    """Raise for writes to Python's state or to PyTorch's settings: an artifact has no such objects."""
    signature = joint.signature
    written = [*dict.fromkeys(write.path for write in signature.effects.python_writes)]
    if written:
        shown = ", ".join(written[:_MOST_SHOWN]) + (", ..." if len(written) > _MOST_SHOWN else "")
        raise UnsupportedSideEffectError(
            f"`{name}` writes {shown}, but an artifact has none of the program's objects. Keep state in a buffer "
            "that is written in place, or return it; if only the first call writes, call the function once before "
            "the export."
        )
    for effect in signature.effects.around:
        if not effect.storable:
            what = signature.words_of(effect)
            raise UnsupportedSideEffectError(
                f"`{name}` has an effect that an artifact can't hold ({what}): {effect.instead}."
            )


def _check_wrappers(captured: Captured, name: str) -> None:
    """Raise `UnsupportedError` for wrapper subclasses that a call of an artifact would have to take apart or make."""
    signature, wrappers = captured.joint.signature, captured.wrappers
    is_returned = signature.returns_wrappers or any(isinstance(o, WrapperOutput) for o in signature.structure.outputs)
    is_changed = bool(signature.gradients.passed_wrappers)
    is_changed |= any(effect.input >= len(signature.inputs) for effect in signature.effects.log)
    if is_returned or is_changed or (wrappers is not None and wrappers.arguments):
        raise UnsupportedError(
            f"`{name}` takes, returns or writes wrapper subclasses of tensors, and an artifact can't hold classes, "
            "except as attributes of its modules. Export a function of the inner tensors."
        )
    _check_gradients(signature, name)
    for wrapper in wrappers.reached if wrappers is not None else ():
        if wrapper.spec.is_apart:
            raise UnsupportedError(
                f"`{name}` reads {wrapper.source.slot}, a {wrapper.spec.cls.__qualname__} that requires grad, and "
                "the gradient's inner tensors differ from its own: an artifact can't hold this. Call "
                "`requires_grad_(False)` on it before the export."
            )


def _check_gradients(signature: Signature, name: str, refs: Sequence[GradientRef | None] = ()) -> None:
    """Raise `UnsupportedError` for gradients that are wrapper subclasses: an artifact would have to make them."""
    specs = [one.spec for one in signature.backward.wrapped]
    for spec in (*specs, *(ref.spec for ref in refs if isinstance(ref, WrappedRef))):
        raise UnsupportedError(
            f"`{name}` gives a plain input a {spec.cls.__qualname__} as its gradient, and an artifact can't hold the "
            "class. Detach the input, or the wrappers in the computation."
        )


def _is_exported_program(value: Any) -> bool:
    """Whether the value is a program of torch.export's, without importing that: it is slow."""
    library = sys.modules.get("torch.export")
    return library is not None and isinstance(value, library.ExportedProgram)


# ---------------------------------------------------------------------------------------------------- dynamic shapes


def dynamic_dims(function: Callable[..., Any], call: FlatCall, dynamic_shapes: Any) -> dict[int, dict[int, Limits]]:
    """For each leaf the dimensions that may vary, from `dynamic_shapes`: True, or a dict or list like the arguments.

    A tensor's entry is None, or a dict or list of its dimensions: None (static), True, a `torch.export.Dim` or (least,
    greatest).
    """
    if dynamic_shapes is None or dynamic_shapes is False:
        return {}
    tensors = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor) and call.first_of[i] == i]
    if dynamic_shapes is True:
        return {i: {d: (None, None) for d, size in enumerate(call.leaves[i].shape) if size > 1} for i in tensors}
    args, kwargs = call.arguments(list(range(len(call.leaves))))
    if isinstance(dynamic_shapes, Mapping):
        bound = inspect.signature(function).bind(*args, **kwargs)
        unknown = dynamic_shapes.keys() - bound.arguments.keys() - kwargs.keys()
        if unknown:
            raise ValueError(
                f"dynamic_shapes names {', '.join(sorted(map(str, unknown)))}: the call has no arguments of these names"
            )
        values = {**bound.arguments, **kwargs}
        pairs = [(values[name], entry) for name, entry in dynamic_shapes.items()]
    else:
        if len(dynamic_shapes) > len(args):
            raise ValueError(f"dynamic_shapes has {len(dynamic_shapes)} entries, the call {len(args)} arguments")
        pairs = list(zip(args, dynamic_shapes, strict=False))
    limits_by_leaf: dict[int, dict[int, Limits]] = {}
    for value, entry in pairs:
        _match(value, entry, call, limits_by_leaf)
    return limits_by_leaf


def _match(value: Any, entry: Any, call: FlatCall, limits_by_leaf: dict[int, dict[int, Limits]]) -> None:
    if entry is None:
        return
    if type(value) is not int:  # a container: one entry for each part
        leaves, _ = flatten(value)
        if isinstance(value, Mapping) and isinstance(entry, Mapping):
            for key, part in entry.items():
                _match(value[key], part, call, limits_by_leaf)
        elif isinstance(value, (list, tuple)) and isinstance(entry, (list, tuple)):
            for item, part in zip(value, entry, strict=True):
                _match(item, part, call, limits_by_leaf)
        else:
            raise ValueError(f"dynamic_shapes has {entry!r} for a container of {len(leaves)} values")
        return
    leaf, path = call.leaves[value], call.paths[value]
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(f"dynamic_shapes has {entry!r} for {path}, not a tensor")
    dims = entry.items() if isinstance(entry, Mapping) else enumerate(entry)
    for dim, wish in dims:
        limits = _limits(wish, path)
        if limits is None:
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise IndexError(f"dynamic_shapes has dimension {dim} of {path}, a tensor with {leaf.dim()}")
        size = leaf.shape[dim]
        if size < 2:
            raise ValueError(
                f"dimension {dim} of {path} is {size}: sizes 0 and 1 are not dynamic. Export with a larger one"
            )
        least, most = limits
        if (least is not None and size < least) or (most is not None and size > most):
            raise ValueError(f"dimension {dim} of {path} is {size}, not between {least} and {most}")
        limits_by_leaf.setdefault(value, {})[dim % leaf.dim()] = limits


def _limits(wish: Any, path: str) -> Limits | None:
    if wish is None or wish is False or (type(wish) is int and wish > 1):
        return None
    if wish is True or isinstance(wish, str):
        return None, None
    if isinstance(wish, tuple) and len(wish) == 2:
        return wish
    name = getattr(wish, "name", None)
    if name in ("AUTO", "DYNAMIC", "STATIC"):  # torch.export.Dim.AUTO
        return None if name == "STATIC" else (None, None)
    least, most = getattr(wish, "min", None), getattr(wish, "max", None)
    if hasattr(wish, "min") and hasattr(wish, "max"):
        return (int(least) if least else None), (int(most) if isinstance(most, int) and most < 2**60 else None)
    raise ValueError(f"dynamic_shapes has {wish!r} for a dimension of {path}: None, True, a Dim or (least, greatest)")


def _check_dynamic(call: FlatCall, joint: JointGraph, name: str) -> None:
    for info in joint.signature.symbols:
        argument = joint.signature.inputs[info.input].argument
        value = joint.symbols.value_of(info.symbol)
        if value is not None and argument is not None:
            raise UnsupportedError(
                f"dimension {info.dim} of {call.paths[argument]} is marked as dynamic, but `{name}` only works for "
                f"size {value}: it uses the size as a plain number (in range, an index, int()) or compares it. Compute "
                "with the size, or leave the dimension static."
            )


# -------------------------------------------------------------------- attributes
# Tensors that code assigns to attributes of modules: an exported graph could not repeat the assignment.
#
# `check_attribute_assignment(module)` compares the attributes of modules under `module` and of their classes before and
# after, through lists, tuples, dicts, sets and plain objects. Registered buffers and parameters may be assigned. Other
# attributes are restored, and reported by path: `self.encoder.cache["keys"][0]`.

# Attributes that `torch.nn.Module` keeps for itself: tables of registered state, hooks, the mode.
_STANDARD = frozenset(vars(torch.nn.Module())) | {"_initialize_hook", "_load_hook"}


@contextlib.contextmanager
def check_attribute_assignment(module: torch.nn.Module) -> Iterator[list[str]]:
    """Context: raise `AttributeAssignedError` at its end if tensors were assigned to attributes of `module`, or of
    modules in it, that are no registered buffers. Gives a list that then holds their paths.

    The attributes are restored in any case. An error of the code inside is passed on.

    Examples:
        >>> import torch, foregrad
        >>> class Cached(torch.nn.Module):
        ...     def forward(self, x):
        ...         self.last = x
        ...         return x * 2
        >>> module = Cached()
        >>> try:
        ...     with foregrad.check_attribute_assignment(module):
        ...         out = module(torch.ones(2))
        ... except foregrad.errors.AttributeAssignedError as error:
        ...     print("refused")
        refused
    """
    with assigned_attributes(module, puts_back=True) as paths:
        yield paths


@contextlib.contextmanager
def assigned_attributes(module: torch.nn.Module, *, puts_back: bool) -> Iterator[list[str]]:
    """`check_attribute_assignment`. Without `puts_back` attributes are restored only after a tensor or an error."""
    before = ProgramState([(module, "self")])
    paths: list[str] = []
    is_over = False
    try:
        yield paths
        is_over = True
    finally:
        paths += _assigned(module, before)
        if puts_back or paths or not is_over:
            classes = _classes(module)
            for holder in before.changed():
                if _is_attribute(holder, module, classes):
                    _put_back(holder)
    if paths:
        several = len(paths) > 1
        raise AttributeAssignedError(
            f"the tensor attribute{('s' if several else '')} {', '.join(paths)} {('were' if several else 'was')} "
            "assigned while the module ran. A graph can't repeat this: use buffers (`register_buffer`) that are "
            "written in place, or return the new values."
        )


def _assigned(module: torch.nn.Module, before: ProgramState) -> list[str]:
    """The paths of tensors that are not where they were, or were nowhere."""
    known = {(id(holder.target), key): tensor for holder, key, tensor in _tensors(before, module)}
    found = [
        holder.name() if holder.kind is SET else holder.path(key)
        for holder, key, tensor in _tensors(ProgramState([(module, "self")]), module)
        if known.get((id(holder.target), key)) is not tensor
    ]
    return list(dict.fromkeys(found))


def _tensors(state: ProgramState, module: torch.nn.Module) -> Iterator[tuple[Holder, Any, torch.Tensor]]:
    classes = _classes(module)
    for holder in state.ways:
        if _is_attribute(holder, module, classes):
            items = ((id(item), item) for item in holder.before) if holder.kind is SET else holder.items()
            yield from ((holder, key, item) for key, item in items if isinstance(item, torch.Tensor))


def _classes(module: torch.nn.Module) -> set[int]:
    return {id(base) for part in module.modules() for base in type(part).__mro__}


def _is_attribute(holder: Holder, module: torch.nn.Module, classes: set[int]) -> bool:
    """Whether it is part of an attribute of a module, or of the class of one, that is none of PyTorch's own."""
    while holder.parent is not None:
        is_standard = type(holder.step) is str and holder.step in _STANDARD and holder.step != "_modules"
        if is_standard and isinstance(holder.parent.owner, torch.nn.Module):
            return False
        holder = holder.parent
    return holder.owner is module or (holder.kind is CLASS and id(holder.target) in classes)


def _put_back(holder: Holder) -> None:
    if isinstance(holder.owner, torch.nn.Module):
        now = holder.kind.read(holder.target)
        others = {name: value for name, value in holder.before.items() if name not in _STANDARD}
        holder.kind.put_back(holder.target, {name: now[name] for name in _STANDARD & now.keys()} | others, now)
    elif not holder.is_table:
        holder.put_back()
