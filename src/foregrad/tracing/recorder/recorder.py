"""The recorder: a dispatch mode below autograd that runs every operator on fakes and writes it to a tape.

It sits where autograd has already done its work, so eager's own rules (version counters, views, in-place checks,
custom Functions) apply unchanged, and the backward is recorded by simply running it. Mutation and views are made
functional on the fly (see alias.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from ..._torch.engine import ThreadDispatchMode, count_function_modes, without_torch_functions
from ..._torch.fakes import CORRECTED, DATA_DEPENDENT_ERRORS, FakeTensorMode, symbolic_fake
from ..._torch.nested import tensors_in
from ..._torch.ops import Args, Kwargs, OpOverload
from ..._torch.stand_ins import FakeRuns, is_stand_in, like_source
from ..._torch.symbols import map_symbolic
from ..._torch.tensors import base_of, is_symbolic_zero, is_view
from ..._torch.wrappers import holds_tensors, is_wrapper
from ...errors import UnsupportedDataDependentError, UnsupportedOpError
from ...identity import IdSet
from ...locks import bound
from ..heap.alias import Value
from ..heap.metadata_changes import MetadataChanges
from ..heap.overlaps import check_view
from ..heap.recording import Host, Watch
from ..heap.refusals import changed_wrapper
from ..heap.views import View
from ..heap.writes import Writes
from ..kernels.checks import Checks
from ..kernels.metadata import Metadata, as_kernels_say
from ..kernels.plans import NO_KEYWORDS, PLAINER_BY_NAME, QUERIES, Treatment, has_real
from ..tape.opinfo import OpInfo, op_info, returns_tensors, take_data
from ..tape.origin import Origins, user_line
from ..values.decisions import Decisions
from ..values.prefix import evaluate
from .backward_writes import BackwardWrites
from .trace import Trace

_UNSAFE = {"aten.is_set_to.default"}  # no guard is on its answer
ABOUT_MEMORY = (
    "`{}` at {} is about the memory of tensors and can't be captured. Keep this part outside the compiled function."
)

aten = torch.ops.aten

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Recorder(Trace, ThreadDispatchMode):
    """Runs every operator on fakes and records it.

    `decisions` makes the record of the values that the program reads.
    """

    supports_higher_order_operators = True  # to refuse them with a reason

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        origins: Origins,
        host: Host,
        decompositions: Mapping[Any, Callable[..., Any]],
        decisions: Callable[[Recorder], Decisions],
    ) -> None:
        super().__init__(fake_mode, origins)
        self.host = host
        self.decompositions = decompositions
        self.watchers: list[Watch] = []
        self.is_symbolic = fake_mode.shape_env is not None
        self.has_absent = False
        self.phases: dict[int, torch.Tensor] = {}  # see `_require` in plans.py, by autograd sequence number
        self.wrapper_inputs: IdSet[object] = IdSet()  # the stand-ins of wrappers
        self.plans: dict[int, Treatment] = {}
        self.fakes = FakeRuns(fake_mode, self.is_symbolic)
        self.metadata = Metadata(self.values.get, self.kernels)
        self.changes = MetadataChanges(self)
        self.writes = Writes(self, self.changes)
        self.checks = Checks(self)
        self.late = BackwardWrites(self)
        self.borrowed: list[tuple[torch.Tensor, Value]] = []  # constants in memory that PyTorch has not allocated
        self.decisions = decisions(self)

    def resume(self, host: Host, decisions: Decisions, root: CodeType) -> None:
        """Go on for a derivative. `root`: the function whose frame ends the user's part of a stack."""
        self.host, self.decisions = host, decisions
        self.origins.resume(root)

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        """The fake that stands for a real tensor."""
        return self.host.adopt(real)

    @contextlib.contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Context: `watch(operator, entries)` is called before each operator is recorded, behind these entries."""
        self.watchers.append(watch)
        try:
            yield
        finally:
            self.watchers.remove(watch)

    # ---------------------------------------------------------------- dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves two frames an operator; torch.compile is never on while capturing

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> object:
        if not _PLAIN.issuperset(types) and holds_tensors(types):
            if self.wrapper_inputs and not self.in_backward:
                self._check_writes(func, args, kwargs or {})
            return NotImplemented  # operators on the tensors inside come here
        self.host.pause()  # below this no code is the program's
        try:
            if count_function_modes():  # autograd itself calls it, not a torch function (that would take the mode away)
                with without_torch_functions():
                    return self._dispatch(func, args, kwargs or {})
            return self._dispatch(func, args, kwargs or {})
        finally:
            self.host.go_on()

    def _check_writes(self, func: object, args: Args, kwargs: Kwargs) -> None:
        """Raise where an operator writes to a wrapper among the inputs, or to its view, with gradients, or changes more
        than its elements.
        """
        if not (isinstance(func, OpOverload) and func._schema.is_mutable):
            return
        with_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
        if not (with_gradients or torch.Tag.inplace_view in func.tags):
            return
        info = op_info(func)
        for position in info.writes:
            value = args[position] if position < len(args) else kwargs.get(info.argument_names[position])
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if is_wrapper(tensor) and (base_of(tensor) if is_view(tensor) else tensor) in self.wrapper_inputs:
                    kind, where = type(tensor).__qualname__, user_line(self.origins.here())
                    raise changed_wrapper(f"a {kind} from outside is written to with gradients, or resized, at {where}")

    def _dispatch(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        plan = self.plans.get(id(func)) or self._plan(func)
        for watch in self.watchers:
            watch(func, self.tape.entries)
        if plan.is_query:
            return self.kernels(func, args, kwargs)
        if self.opaque_owner is not None:
            result = self.opaque_owner.run(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if plan.decomposition is not None:
            with bound(self, "original", self.original or func), self:
                result = plan.decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        info = plan.info
        if info.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if has_real(args, self.is_known) or (kwargs and has_real(kwargs.values(), self.is_known)):
            args, kwargs = self._adopt_real(func, args, kwargs)
        if self.in_backward and (info.writes or info.hidden_writes):
            self.late.note(info, args, kwargs)
        if info.is_metadata_write:
            return self.changes.run(info, args, kwargs)
        if info.writes:
            return self.writes.elements(info, args, kwargs)
        if info.hidden_writes and self.writes.happen_in_hiding(info, args):
            return self.writes.hidden(info, args, kwargs)
        if plan.formula is not None:
            return plan.formula(self, plan, args, kwargs)
        return self.pure(plan, args, kwargs)

    def _plan(self, func: object) -> Treatment:
        if func in QUERIES:
            plan = self.plans[id(func)] = Treatment(func, None, None)
            return plan
        if not isinstance(func, OpOverload):
            raise UnsupportedOpError(
                f"the higher-order operator `{func}` at {user_line(self.origins.here())} can't be captured yet. "
                "Write the branch or loop in Python, or keep that part outside the compiled function."
            )
        if str(func) in _UNSAFE:
            raise UnsupportedOpError(ABOUT_MEMORY.format(func, user_line(self.origins.here())))
        # The tensor behind it keeps a history; a detached result has none.
        plainer = PLAINER_BY_NAME.get(str(func))
        wanted = None if func is aten.detach.default else self.decompositions.get(func, plainer)
        plan = self.plans[id(func)] = Treatment(func, op_info(func), wanted)
        rows = self.host.aspects.operators
        row = rows.get(func) or rows.get(func.namespace)
        if row is not None:
            plan.formula = lambda _, plan, args, kwargs: row(plan, args, kwargs)
        return plan

    def run_fake(self, func: object, args: Args, kwargs: Kwargs) -> Any:
        """The operator on fakes, recording nothing."""
        plan = self.plans.get(id(func)) or self._plan(func)
        if plan.is_cacheable:
            return self.metadata.run(plan.info, args, kwargs)[0]
        return self.kernels(func, args, kwargs)

    def kernels(self, func: object, args: Args, kwargs: Kwargs) -> Any:
        """The operator on fakes, by FakeTensor's own kernels."""
        numbers = self.decisions.numbers
        if self.is_symbolic:
            args, kwargs = map_symbolic(args, numbers.plain), map_symbolic(kwargs, numbers.plain)
        if func is aten.view.default:
            check_view(*args)
        if func in CORRECTED:
            return self.fakes.run(lambda func, *given: CORRECTED[func](self.fake_mode, *given), func, args, kwargs)
        try:
            return self.fakes.run(self._fake, func, args, kwargs)
        except Exception as error:
            said = as_kernels_say(func, args, kwargs, error)
            if said is error:
                raise
            raise said from None

    def _fake(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self.is_symbolic:
            return symbolic_fake(self.fake_mode, func, args, kwargs)
        return self.fake_mode.dispatch(func, (), args, kwargs)

    def pure(self, plan: Treatment, args: Args, kwargs: Kwargs) -> Any:
        """An operator that writes to nothing."""
        info, constant, specs = plan.info, None, None
        if info.is_view and type(args[0]) is complex:  # the conjugate of a number, in the derivative of a product
            args = (self.constant(torch.tensor(args[0], dtype=torch.complex128, device="cpu")), *args[1:])
        try:
            if plan.is_cacheable:
                out, specs = self.metadata.run(info, args, kwargs)
            else:
                out = self.kernels(info.op, args, kwargs)
        except DATA_DEPENDENT_ERRORS as error:
            found, constant = evaluate(self, info.op, args, kwargs)
            if not found:
                return decided(self, info.op, args, kwargs, error)
            if not isinstance(constant, (torch.Tensor, tuple, list)):
                return constant  # a number: the program is specialized to it
            out = self.fakes_like(constant)
        except (RuntimeError, NotImplementedError) as error:
            if self.in_backward or info.is_view or info.is_random or not info.op._schema.returns:
                raise
            return run_for_real(self, info.op, args, kwargs, error)
        if info.is_view:
            if torch.is_inference_mode_enabled() is not args[0].is_inference():
                out = like_source(args[0], out)
            return self._view(info, args, kwargs, out, specs)
        target = plan.in_grad_mode if torch.is_grad_enabled() else info.op
        entry = self.entry(
            target, self.to_entries(args), self.to_entries(kwargs) if kwargs else NO_KEYWORDS, info.is_random
        )
        entry.value = constant
        return self.bind_results(entry, out, specs)

    def _view(self, info: OpInfo, args: Args, kwargs: Kwargs, out: Any, specs: Any = None) -> Any:
        source = self.value_of(args[0])
        rest = tuple(args[1:])
        if any(isinstance(value, torch.Tensor) for value in rest):
            raise UnsupportedOpError(
                f"`{info.op}` at {self.where()} gives a view that depends on a second tensor, and a compiled call "
                "can't repeat it. Keep this part outside, or mark it with `foregrad.eager_region`."
            )
        grad_enabled = torch.is_grad_enabled()
        if isinstance(out, torch.Tensor):
            if out in self.values:
                return out
            view = View(info.op, rest, kwargs, None, object(), grad_enabled, made=self.made())
            value = Value(out, None, specs or self.spec_of(out), source, view)
            value.generation = -1
            if info.is_identity:
                value.entry, value.generation = source.read(self.emit), value.storage.generation
            self.values[out] = value
            if info.op is aten.as_strided.default and not self.in_backward and not self.is_symbolic:
                self.writes.check_edges(value)
            return out
        call, made = object(), self.made()
        for index, item in enumerate(out):
            view = View(info.op, rest, kwargs, index, call, grad_enabled, made=made)
            value = Value(item, None, specs[index] if specs else self.spec_of(item), source, view)
            value.generation = -1
            self.values[item] = value
        return out

    def taken_as_data(self, tensor: torch.Tensor) -> None:
        """`tensor` came from `.data`: unlike a detached tensor, it has a version counter of its own."""
        view = None if is_wrapper(tensor) else self.value_of(tensor).view
        if view is not None:
            view.op = take_data

    def replaced_by(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """`tensor.data = source` was run."""
        if is_wrapper(tensor):  # its value stays; an input's outer sizes are looked at when all has run
            return
        if self.in_backward:
            self.late.note_targets([tensor], (), is_metadata=True)
        self.changes.replaced_by(tensor, source)

    def _adopt_real(self, func: object, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        if func is aten.lift_fresh.default or func is aten.lift_fresh_copy.default:
            constant = self.constant(args[0])
            if args[0].layout is torch.strided and not args[0].untyped_storage().resizable():
                self.borrowed.append((args[0], self.value_of(constant)))
            return (constant, *args[1:]), kwargs
        zeros = [a for a in args if isinstance(a, torch.Tensor) and is_symbolic_zero(a)]
        if zeros:
            device = next(
                (a.device for a in args if isinstance(a, torch.Tensor) and self.is_known(a)), torch.device("cpu")
            )
            args = tuple(self.zeros(a, device) if any(a is z for z in zeros) else a for a in args)
        return tuple(self._adopted(a) for a in args), {k: self._adopted(a) for k, a in kwargs.items()}

    def _adopted(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return value if self.is_known(value) else self.adopt(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._adopted(item) for item in value)
        return value


class Unrecorded(ThreadDispatchMode):
    """Context: operators on stand-ins run, and nothing is recorded: autograd needs that for a view's history."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> object:
        if not _PLAIN.issuperset(types) and holds_tensors(types):
            return NotImplemented  # operators on the tensors inside come here
        if any(map(is_stand_in, tensors_in(args))):
            return self.recorder.kernels(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


# -------------------------------------------------------------------- operators that depend on values
# Operators with results that fakes can't tell: the values depend on the inputs, or no fake kernel computes them.


def decided(trace: Trace, func: OpOverload, args: Args, kwargs: Kwargs, error: Exception) -> Any:
    """An operator with a result whose size or number depends on the inputs' values: its result in the present call."""
    where = trace.where()
    entry_args, entry_kwargs = trace.to_entries(args), trace.to_entries(kwargs)
    try:
        if func is aten._local_scalar_dense.default:
            storage = trace.values[args[0]].storage
            if storage.is_input and storage.generation and args[0].dtype is not torch.bool:
                trace.decisions.differs(where)
            return trace.decisions.item(entry_args[0], where, trace.emit_number)
        entry = trace.entry(func, entry_args, entry_kwargs, is_random=False)
        if not returns_tensors(func):
            return trace.decisions.number(entry, where)
        out = trace.fakes_like(trace.decisions.sized(entry, where, trace.emit))
    except UnsupportedDataDependentError as unsupported:
        raise unsupported from error
    return trace.bind_results(entry, out)


def run_for_real(trace: Trace, func: OpOverload, args: Args, kwargs: Kwargs, error: Exception) -> Any:
    """An operator that fakes can't run: its result for the real arguments, unless they raise too."""
    entry = trace.entry(func, trace.to_entries(args), trace.to_entries(kwargs), is_random=False)
    try:
        if not returns_tensors(func):
            return trace.decisions.number(entry, trace.where())
        specs = trace.decisions.sized(entry, trace.where(), trace.emit)
    except UnsupportedDataDependentError as unsupported:
        raise (unsupported if isinstance(error, NotImplementedError) else error) from None
    return trace.bind_results(entry, trace.fakes_like(specs))
