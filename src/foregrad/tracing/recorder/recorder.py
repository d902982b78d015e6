"""The recorder: a dispatch mode below autograd that runs every operator on fakes and writes it to a tape.

It sits where autograd has already done its work, so eager's own rules (version counters, views, in-place checks,
custom Functions) apply unchanged, and the backward is recorded by simply running it. Mutation and views are made
functional on the fly (see alias.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._torch.dispatch import (
    ThreadDispatchMode,
    count_function_modes,
    current_autograd_node,
    next_sequence_nr,
    plain_execution,
    sequence_nr_of,
    without_torch_functions,
)
from ..._torch.fakes import (
    CORRECTED,
    DATA_DEPENDENT_ERRORS,
    FakeTensor,
    FakeTensorMode,
    fake_device,
    like_source,
    new_fake,
    symbolic_fake,
)
from ..._torch.ops import OpOverload
from ..._torch.symbols import map_symbolic
from ..._torch.tensors import is_symbolic_zero
from ...errors import (
    InternalError,
    UnsupportedDataDependentError,
    UnsupportedLayoutError,
    UnsupportedOpError,
    UnsupportedSideEffectError,
)
from ...graph.meta import TensorSpec
from ..heap.alias import Value, View
from ..heap.inplace_detach import Detached
from ..heap.overlaps import check_view
from ..heap.writes import Writes
from ..kernels.checks import Checks
from ..kernels.kernel_errors import as_kernels_say
from ..kernels.metadata import Metadata
from ..kernels.plans import NO_KEYWORDS, PLAIN, PLAINER, QUERIES, Plan, draws_nothing, has_real
from ..tape.opinfo import MAYBE_UNDEFINED, OpInfo, item_or_empty, op_info, returns_tensors, take_data
from ..tape.origin import Made, Origins, user_line
from ..tape.tape import Entry, Tape
from ..values.constants import evaluate, evaluate_entry, is_constant
from ..values.decisions import Decisions
from .backward_writes import BackwardWrites

__all__ = ["Recorder"]

_UNSAFE = {"inductor.resize_storage_bytes_.default"}  # known by name only once Inductor is imported

aten = torch.ops.aten
prim = torch.ops.prim

_DEVICE = prim.device.default


class Recorder(ThreadDispatchMode):
    """Records onto `tape`; `values` maps the id of each fake tensor seen to its `Value`.

    `adopt` is called with a real tensor the function brought in by itself and returns the fake standing for it.
    """

    supports_higher_order_operators = True  # to refuse them with a reason

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        origins: Origins,
        adopt: Callable[[torch.Tensor], torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.origins = origins
        self.adopt = adopt
        self.decompositions = decompositions
        self.default_dtype: torch.dtype | None = None  # as the call finds it, while the function runs
        self.original: Any = None  # the outermost operator that is being decomposed
        self.is_symbolic = fake_mode.shape_env is not None
        self.tape = Tape()
        self.values: dict[int, Value] = {}
        self.in_backward = False
        self.recompute: Any = None  # the tag of the checkpointed region being recorded
        self.phases: dict[int, torch.Tensor] = {}  # see formulas.py, by autograd sequence number
        self.kept: list[torch.Tensor] = []  # fakes that changed identity: kept so that ids stay theirs
        self.reshaped: list[tuple[torch.Tensor, int, str]] = []  # see `check_reshaped`
        self.plans: dict[int, Plan] = {}
        self.metadata = Metadata(fake_mode, self.values.get, self.kernels)
        self.writes = Writes(self)
        self.detached = Detached(self)
        self.checks = Checks(self)
        self.late = BackwardWrites(self)
        self.decisions: Decisions

    # ---------------------------------------------------------------- dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves two frames an operator; torch.compile is never on while capturing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # more often asked than all else is done
            return args[0].fake_device
        if count_function_modes():  # autograd itself calls it, not a torch function, which takes its mode away
            with without_torch_functions():
                return self._dispatch(func, args, kwargs or {})
        return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        plan = self.plans.get(id(func)) or self._plan(func)
        if self.default_dtype is not None and torch.get_default_dtype() is not self.default_dtype:
            self.refuse_dtype()
        if plan.is_query:
            return self.kernels(func, args, kwargs)
        if plan.decomposition is not None:
            outer, self.original = self.original, self.original or func
            try:
                with self:
                    result = plan.decomposition(*args, **kwargs)
            finally:
                self.original = outer
            if result is not NotImplemented:
                return result
        info = plan.info
        if info.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if has_real(args) or (kwargs and has_real(kwargs.values())):
            args, kwargs = self._adopt_real(func, args, kwargs)
        if self.in_backward and (info.writes or info.hidden_writes):
            self.late.note(info, args, kwargs)
        if info.is_metadata_write:
            return self.writes.metadata(info, args, kwargs)
        if info.writes:
            return self.writes.elements(info, args, kwargs)
        if info.hidden_writes and self.writes.happen_in_hiding(info, args):
            return self.writes.hidden(info, args, kwargs)
        if plan.formula is not None:
            return plan.formula(self, plan, args, kwargs)
        return self.pure(plan, args, kwargs)

    def refuse_dtype(self) -> None:
        raise UnsupportedSideEffectError(
            f"the default dtype is set to another one before {user_line(self.origins.here())}: which dtype a graph's "
            "numbers become is the default of its call. Set it outside, or name the dtype of each tensor."
        )

    def _plan(self, func: Any) -> Plan:
        if func in QUERIES:
            plan = self.plans[id(func)] = Plan(func, None, None)
            return plan
        if not isinstance(func, OpOverload):
            raise UnsupportedOpError(
                f"the higher-order operator `{func}` at {user_line(self.origins.here())} can't be captured yet. "
                "Write the branch or loop in Python, or keep that part outside the compiled function."
            )
        if str(func) in _UNSAFE:
            raise UnsupportedOpError(
                f"`{func}` at {user_line(self.origins.here())} takes memory from tensors, which can't be "
                "captured. Keep that part outside the compiled function."
            )
        # What it is made of keeps a history, where a detached result has none.
        wanted = None if func is aten.detach.default else self.decompositions.get(func, PLAINER.get(func))
        plan = self.plans[id(func)] = Plan(func, op_info(func), wanted)
        return plan

    def run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on fakes, recording nothing."""
        plan = self.plans.get(id(func)) or self._plan(func)
        if plan.is_cacheable:
            return self.metadata.run(plan.info, args, kwargs)[0]
        return self.kernels(func, args, kwargs)

    def kernels(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on fakes, by FakeTensor's own kernels."""
        numbers = self.decisions.numbers
        if self.is_symbolic:
            args, kwargs = map_symbolic(args, numbers.plain), map_symbolic(kwargs, numbers.plain)
        if func is aten.view.default:
            check_view(*args)
        if func in CORRECTED:
            return CORRECTED[func](self.fake_mode, args, kwargs)
        if self.is_symbolic:
            out = symbolic_fake(self.fake_mode, func, args, kwargs)
            if out is not NotImplemented:
                return out
        try:
            return self.fake_mode.dispatch(func, (), args, kwargs)
        except Exception as error:
            said = as_kernels_say(func, args, kwargs, error)
            if said is error:
                raise
            raise said from None

    def pure(self, plan: Plan, args: Any, kwargs: Any) -> Any:
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
                return self._decided(info.op, args, kwargs, error)
            if not isinstance(constant, (torch.Tensor, tuple, list)):
                return constant  # a number: the program is specialized to it
            out = self._fakes_like(constant)
        except (RuntimeError, NotImplementedError) as error:
            if self.in_backward or info.is_view or info.is_random or not info.op._schema.returns:
                raise
            return self._run_for_real(info.op, args, kwargs, error)
        if info.is_view:
            if torch.is_inference_mode_enabled() is not args[0].is_inference():
                out = like_source(self.fake_mode, args[0], out)
            return self._view(info, args, kwargs, out, specs)
        target = plan.in_grad_mode if torch.is_grad_enabled() else info.op
        entry = self.entry(
            target, self.to_entries(args), self.to_entries(kwargs) if kwargs else NO_KEYWORDS, info.is_random
        )
        entry.value = constant
        return self.bind_results(entry, out, specs)

    def bind_results(self, entry: Entry, out: Any, specs: Any = None) -> Any:
        """Make `entry` stand for `out`: a tensor, or several through getitem. `specs`: theirs, where known."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self.values:
                entry.spec = spec = specs or self.spec_of(out)
                self.values[id(out)] = Value(out, entry, spec)
        elif isinstance(out, (list, tuple)):
            entry.spec = tuple(
                spec or self.specs_of(t) for t, spec in zip(out, specs or [None] * len(out), strict=True)
            )
            for index, item in enumerate(out):
                if isinstance(item, (list, tuple)):
                    self.bind_results(self.entry(operator.getitem, (entry, index), {}, False), item)
                if isinstance(item, torch.Tensor) and id(item) not in self.values:
                    take = item_or_empty if index in MAYBE_UNDEFINED.get(entry.target, ()) else operator.getitem
                    part = self.entry(take, (entry, index), {}, False)
                    part.spec = entry.spec[index]
                    self.values[id(item)] = Value(item, part, entry.spec[index])
        return out

    def _view(self, info: OpInfo, args: Any, kwargs: Any, out: Any, specs: Any = None) -> Any:
        source = self.value_of(args[0])
        rest = tuple(args[1:])
        grad_enabled = torch.is_grad_enabled()
        if isinstance(out, torch.Tensor):
            if id(out) in self.values:
                return out
            view = View(info.op, rest, kwargs, None, object(), grad_enabled, made=self.made())
            value = Value(out, None, specs or self.spec_of(out), source, view)
            value.generation = -1
            value.of_differentiable = args[0].requires_grad
            if info.is_identity:
                value.entry, value.generation = source.read(self.emit), value.storage.generation
            self.values[id(out)] = value
            if info.op is aten.as_strided.default and not self.in_backward and not self.is_symbolic:
                self.writes.check_edges(value)
            return out
        call, made = object(), self.made()
        for index, item in enumerate(out):
            view = View(info.op, rest, kwargs, index, call, grad_enabled, made=made)
            value = Value(item, None, specs[index] if specs else self.spec_of(item), source, view)
            value.generation = -1
            value.of_differentiable = args[0].requires_grad
            self.values[id(item)] = value
        return out

    def taken_as_data(self, tensor: torch.Tensor) -> None:
        """`tensor` came from `.data`: unlike a detached tensor, it has a version counter of its own."""
        view = self.value_of(tensor).view
        if view is not None:
            view.op = take_data

    def replaced_by(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """`tensor.data = source` was run."""
        if self.in_backward:
            self.late.note_targets([tensor], (), is_metadata=True)
        self.writes.replaced_by(tensor, source)

    # ---------------------------------------------------------------- entries

    def entry(self, target: Any, args: Any, kwargs: Any, is_random: bool) -> Entry:
        """Append an operator to the tape, noting where it comes from."""
        numbers = self.decisions.numbers
        if numbers.made:
            args, kwargs = map_symbolic(args, numbers.entry_of), map_symbolic(kwargs, numbers.entry_of)
        entry = Entry(target, args if type(args) is tuple else tuple(args), kwargs)
        entry.has_effect = is_random and not draws_nothing(target, args)
        entry.is_backward = self.in_backward
        entry.recompute = self.recompute
        entry.origin, entry.sequence_nr, entry.original = self.made()
        return self.tape.append(entry)

    def made(self) -> Made:
        """Where the user's program is (the backward is nowhere in it), the autograd node: its sequence number, and the
        operator that is being decomposed.
        """
        if self.in_backward:
            node = current_autograd_node()
            number = None if node is None else sequence_nr_of(node)
            if number in self.tape.origins and torch.is_grad_enabled():  # a derivative of it is of its line
                self.tape.origins.setdefault(next_sequence_nr() - 1, self.tape.origins[number])
            return None, number, self.original
        origin, number = self.origins.here(), next_sequence_nr() - 1
        self.tape.origins.setdefault(number, origin)
        return origin, number, self.original

    def where(self) -> str:
        """The user's line that runs, or whose derivative does."""
        origin, number, _ = self.made()
        if not self.in_backward:
            return user_line(origin)
        forward = None if number is None else self.tape.origins.get(number)
        return f"the backward of {user_line(forward)}"

    def emit(self, target: Any, *args: Any, kwargs: Any = None, spec: Any = None) -> Entry:
        """An operator that functionalization adds; `args` are entries and plain values."""
        entry = self.entry(target, args, kwargs or {}, False)
        if spec is None:
            if target is operator.getitem:
                assert isinstance(args[0].spec, tuple)
                spec = args[0].spec[args[1]]
            else:
                out = self.run_fake(target, self._fakes_of(args), self._fakes_of(kwargs or {}))
                spec = self.specs_of(out)
        entry.spec = spec
        return entry

    def emit_number(self, target: Any, *args: Any, **_: Any) -> Entry:
        """An operator that gives a plain number."""
        return self.entry(target, args, {}, is_random=False)

    def to_entries(self, value: Any) -> Any:
        """Arguments as the tape writes them: each tensor replaced by the entry of its current value."""
        cls = type(value)
        if cls is FakeTensor or isinstance(value, torch.Tensor):
            return self.value_of(value).read(self.emit)
        if cls in PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            return [self.to_entries(item) for item in value] if cls is list else tuple(map(self.to_entries, value))
        if isinstance(value, dict):
            return {key: self.to_entries(item) for key, item in value.items()}
        return value

    def tensor_entry(self, value: Any) -> Entry:
        """An argument's entry; of a number, that of the tensor which PyTorch makes of it: `x.copy_(1)`."""
        if isinstance(value, Entry):
            return value
        kinds = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
        dtype = kinds.get(type(value)) or (torch.int64 if isinstance(value, torch.SymInt) else torch.float64)
        return self.emit(aten.scalar_tensor.default, value, kwargs={"dtype": dtype, "device": torch.device("cpu")})

    def value_of(self, tensor: torch.Tensor) -> Value:
        value = self.values.get(id(tensor))
        if value is None:
            raise InternalError(
                f"a tensor {TensorSpec.of(tensor)} that no recorded operator made was used at "
                f"{user_line(self.origins.here())}"
            )
        return value

    def constant(self, tensor: torch.Tensor) -> FakeTensor:
        """A tensor whose contents are part of the program, as `torch.tensor([1, 2])` makes."""
        spec = TensorSpec.of(tensor)
        entry = Entry(None, spec=spec)
        entry.constant = entry.value = tensor
        self.tape.append(entry)
        fake = new_fake(self.fake_mode, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        self.values[id(fake)] = Value(fake, entry, spec)
        return fake

    def contents(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor of what is in `tensor`, in every call that the graph is right for."""
        entry = self.value_of(tensor).read(self.emit)
        if is_constant(entry):
            with plain_execution():
                constant: torch.Tensor = evaluate_entry(entry)
                return constant
        return self.decisions.contents(entry, self.where(), self.emit_number)

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        if tensor.layout is not torch.strided:
            raise UnsupportedLayoutError(
                f"a tensor of layout {tensor.layout} was made at {user_line(self.origins.here())}. "
                "Only strided tensors can be compiled: call .to_dense() first, or keep that part outside."
            )
        return TensorSpec.of(tensor, fake_device(tensor))

    def fake_of(self, spec: TensorSpec) -> FakeTensor:
        return new_fake(self.fake_mode, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)

    # ---------------------------------------------------------------- helpers

    def _fakes_of(self, value: Any) -> Any:
        if isinstance(value, Entry):
            if isinstance(value.spec, tuple):
                return tuple(self.fake_of(s) if s is not None else None for s in value.spec)
            return self.fake_of(value.spec)  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)):
            return type(value)(self._fakes_of(item) for item in value)
        if isinstance(value, dict):
            return {key: self._fakes_of(item) for key, item in value.items()}
        return value

    def _fakes_like(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.fake_of(TensorSpec.of(value))
        if isinstance(value, TensorSpec):
            return self.fake_of(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._fakes_like(item) for item in value)
        return value

    def specs_of(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return self.spec_of(out)
        if isinstance(out, (list, tuple)):
            return tuple(self.specs_of(item) for item in out)
        return None

    def _adopt_real(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if func is aten.lift_fresh.default or func is aten.lift_fresh_copy.default:
            return (self.constant(args[0]), *args[1:]), kwargs
        zeros = [a for a in args if isinstance(a, torch.Tensor) and is_symbolic_zero(a)]
        if zeros:
            device = next((fake_device(a) for a in args if type(a) is FakeTensor), torch.device("cpu"))
            args = tuple(self._zeros(a, device) if any(a is z for z in zeros) else a for a in args)
        return tuple(self._adopted(a) for a in args), {k: self._adopted(a) for k, a in kwargs.items()}

    def _zeros(self, zero: torch.Tensor, device: torch.device) -> FakeTensor:
        """What stands for a tensor of zeros without memory, as derivatives of derivatives bring in."""
        spec = TensorSpec(tuple(zero.shape), zero.stride(), zero.dtype, device)
        entry = self.emit(aten.zeros.default, list(spec.shape), kwargs={"dtype": spec.dtype, "device": device})
        fake = self.fake_of(entry.spec)  # type: ignore[arg-type]
        self.values[id(fake)] = Value(fake, entry, entry.spec)  # type: ignore[arg-type]
        return fake

    def _adopted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if type(value) is FakeTensor else self.adopt(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._adopted(item) for item in value)
        return value

    def _decided(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """An operator whose result's size, or number, depends on values of the inputs: what it is in this call."""
        where = self.where()
        entry_args, entry_kwargs = self.to_entries(args), self.to_entries(kwargs)
        try:
            if func is aten._local_scalar_dense.default:
                return self.decisions.item(entry_args[0], where, self.emit_number)
            entry = self.entry(func, entry_args, entry_kwargs, is_random=False)
            if not returns_tensors(func):
                return self.decisions.number(entry, where)
            out = self._fakes_like(self.decisions.sized(entry, where, self.emit))
        except UnsupportedDataDependentError as unsupported:
            raise unsupported from error
        return self.bind_results(entry, out)

    def _run_for_real(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """An operator that fakes can't run: what it gives for the real arguments, unless that is an error too."""
        entry = self.entry(func, self.to_entries(args), self.to_entries(kwargs), is_random=False)
        try:
            if not returns_tensors(func):
                return self.decisions.number(entry, self.where())
            specs = self.decisions.sized(entry, self.where(), self.emit)
        except UnsupportedDataDependentError:
            raise error from None
        return self.bind_results(entry, self._fakes_like(specs))
