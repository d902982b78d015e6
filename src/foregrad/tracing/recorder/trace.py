"""The trace: the tape that is being written, and the entry that each tensor of the program stands for."""

from __future__ import annotations

import abc
import contextlib
import operator
from sys import getrefcount
from typing import Any

import torch

from ..._torch.engine import current_autograd_node, next_sequence_nr, plain_execution, sequence_nr_of
from ..._torch.fakes import FakeTensorMode
from ..._torch.nested import mapped
from ..._torch.ops import Args, Kwargs, has_effects
from ..._torch.stand_ins import new_stand_in, use_count
from ..._torch.symbols import map_symbolic
from ...errors import UnsupportedLayoutError, UnsupportedSideEffectError
from ...graph.meta import TensorSpec
from ...identity import ById
from ...locks import bound
from ..heap.alias import Value
from ..kernels.plans import PLAIN, draws_nothing
from ..tape.opinfo import MAYBE_UNDEFINED, item_or_empty
from ..tape.origin import Made, Origins, user_line
from ..tape.tape import Entry, Tape
from ..values.decisions import Decisions
from ..values.prefix import evaluate_entry, is_constant

aten = torch.ops.aten
_NO_SPEC = TensorSpec((0,), (1,), torch.float32, torch.device("cpu"))


class Trace(abc.ABC):
    """Writes entries onto `tape`; `values` maps each fake tensor seen to its `Value`.

    `in_backward`: the backward is being recorded. `recompute`: the tag of the checkpointed region that is.
    """

    def __init__(self, fake_mode: FakeTensorMode, origins: Origins) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.origins = origins
        self.tape = Tape()
        self.values: ById[torch.Tensor, Value] = ById()
        self.in_backward = False
        self.recompute: Any = None
        self.original: Any = None  # the outermost operator that is being decomposed
        self.decisions: Decisions

    def backward_runs(self) -> contextlib.AbstractContextManager[None]:
        """Context: entries are recorded as part of the backward."""
        return bound(self, "in_backward", True)

    def in_region(self, tag: object) -> contextlib.AbstractContextManager[None]:
        """Context: entries are recorded in the checkpointed region with the tag; in none, with None."""
        return bound(self, "recompute", tag)

    @abc.abstractmethod
    def run_fake(self, func: object, args: Args, kwargs: Kwargs) -> Any:
        """The operator on fakes, recording nothing."""

    # ---------------------------------------------------------------- entries

    def entry(self, target: Any, args: Args, kwargs: Kwargs, is_random: bool) -> Entry:
        """Append an operator to the tape, noting where it comes from."""
        numbers = self.decisions.numbers
        if numbers.made:
            args, kwargs = map_symbolic(args, numbers.entry_of), map_symbolic(kwargs, numbers.entry_of)
        entry = Entry(target, tuple(args), kwargs)
        acts = (
            self.in_backward and getattr(target, "namespace", "aten") not in ("aten", "prims") and has_effects(target)
        )
        entry.has_effect = acts or (is_random and not draws_nothing(target, args))
        entry.is_backward = self.in_backward
        entry.recompute = self.recompute
        entry.origin, entry.sequence_nr, entry.original = self.made()
        return self.tape.append(entry)

    def emit(self, target: object, *args: Any, kwargs: Kwargs | None = None, spec: Any = None) -> Entry:
        """An operator that functionalization adds; `args` are entries and plain values."""
        entry = self.entry(target, args, kwargs or {}, False)
        if spec is None:
            if target is operator.getitem:
                assert isinstance(args[0].spec, tuple)
                spec = args[0].spec[args[1]]
            else:
                out = self.run_fake(target, *mapped((args, kwargs or {}), Entry, self._fakes_of))
                spec = self.specs_of(out)
        entry.spec = spec
        return entry

    def emit_number(self, target: object, *args: object, **_: object) -> Entry:
        """An operator that gives a plain number."""
        return self.entry(target, args, {}, is_random=False)

    def bind_results(self, entry: Entry, out: Any, specs: Any = None) -> Any:
        """Make `entry` stand for `out`: a tensor, or several through getitem. `specs`: theirs, where known."""
        if isinstance(out, torch.Tensor):
            if out not in self.values:
                entry.spec = spec = specs or self.spec_of(out)
                self.values[out] = Value(out, entry, spec)
        elif isinstance(out, (list, tuple)):
            entry.spec = tuple(
                spec or self.specs_of(t) for t, spec in zip(out, specs or [None] * len(out), strict=True)
            )
            for index, item in enumerate(out):
                if isinstance(item, (list, tuple)):
                    self.bind_results(self.entry(operator.getitem, (entry, index), {}, False), item)
                if isinstance(item, torch.Tensor) and item not in self.values:
                    take = item_or_empty if index in MAYBE_UNDEFINED.get(entry.target, ()) else operator.getitem
                    part = self.entry(take, (entry, index), {}, False)
                    part.spec = entry.spec[index]
                    self.values[item] = Value(item, part, entry.spec[index])
        return out

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with contents that are part of the program, as `torch.tensor([1, 2])` makes."""
        spec = TensorSpec.of(tensor)
        entry = Entry(None, spec=spec)
        entry.constant = entry.value = tensor
        self.tape.append(entry)
        fake = new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        self.values[fake] = Value(fake, entry, spec)
        return fake

    def zeros(self, zero: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The entry for a tensor of zeros without memory, as derivatives of derivatives bring in."""
        spec = TensorSpec(tuple(zero.shape), zero.stride(), zero.dtype, device)
        entry = self.emit(aten.zeros.default, list(spec.shape), kwargs={"dtype": spec.dtype, "device": device})
        fake = self.fake_of(entry.tensor)
        self.values[fake] = Value(fake, entry, entry.tensor)
        return fake

    def forget_dead(self) -> None:
        """Forget the stand-ins without views that the trace alone holds: none can come again."""
        sample = torch.Tensor()  # the last: nothing else holds it
        self.values[sample] = Value(sample, None, _NO_SPEC)
        del sample
        held = self.values.items()
        counts = [getrefcount(fake) for fake, _ in held]
        for (fake, value), count in zip(held, counts, strict=True):
            if count == counts[-1] and value.is_apart and value.fake is fake and use_count(fake) == 1:
                del self.values[fake]

    # ---------------------------------------------------------------- where the program is

    def made(self) -> Made:
        """The place in the user's program (none in a backward), the autograd node: its sequence number, and the
        operator that is being decomposed.
        """
        if self.in_backward:
            node = current_autograd_node()
            number = None if node is None else sequence_nr_of(node)
            if number in self.tape.origins and torch.is_grad_enabled():  # a derivative takes the node's line
                self.tape.origins.setdefault(next_sequence_nr() - 1, self.tape.origins[number])
            return None, number, self.original
        origin, number = self.origins.here(), next_sequence_nr() - 1
        self.tape.origins.setdefault(number, origin)
        return origin, number, self.original

    def where(self) -> str:
        """The user's line that runs, itself or by its derivative."""
        origin, number, _ = self.made()
        if not self.in_backward:
            return user_line(origin)
        forward = None if number is None else self.tape.origins.get(number)
        return f"the backward of {user_line(forward)}"

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the capture's own."""
        return tensor in self.values

    # ---------------------------------------------------------------- from tensors to entries

    def to_entries(self, value: object) -> Any:
        """Arguments as the tape writes them: each tensor replaced by the entry of its current value."""
        cls = type(value)
        if isinstance(value, torch.Tensor):
            return self.value_of(value).read(self.emit)
        if cls in PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            known = self.values
            entries = [
                seen.entry if (seen := known.get(item)) is not None and seen.is_apart else self.to_entries(item)
                for item in value
            ]
            return entries if cls is list else tuple(entries)
        if isinstance(value, dict):
            return {key: self.to_entries(item) for key, item in value.items()}
        return value

    def tensor_entry(self, value: object) -> Entry:
        """An argument's entry; for a number, the entry of PyTorch's tensor for it: `x.copy_(1)`."""
        if isinstance(value, Entry):
            return value
        return self.number_tensor(value, value)

    def number_tensor(self, number: object, value: object) -> Entry:
        """A tensor of `number` (a number or an entry), with the present value `value`."""
        kinds = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
        dtype = kinds.get(type(value)) or (torch.int64 if isinstance(value, torch.SymInt) else torch.float64)
        spec = TensorSpec((), (), dtype, torch.device("cpu"))
        return self.emit(aten.scalar_tensor.default, number, kwargs={"dtype": dtype, "device": spec.device}, spec=spec)

    def value_of(self, tensor: torch.Tensor) -> Value:
        value = self.values.get(tensor)
        if value is None:
            raise UnsupportedSideEffectError(
                f"a tensor {TensorSpec.of(tensor)} was made outside the capture (on a second thread, or with its "
                f"modes off), and is used at {user_line(self.origins.here())}. Make it before the call, or in a "
                "foregrad.eager_region."
            )
        return value

    def entry_of(self, tensor: torch.Tensor) -> Entry:
        """The entry that gives the tensor's present value."""
        return self.value_of(tensor).read(self.emit)

    def contents(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor of the contents of `tensor`, in every call that the graph is right for."""
        entry = self.value_of(tensor).read(self.emit)
        if is_constant(entry):
            with plain_execution():
                constant: torch.Tensor = evaluate_entry(entry)
                return constant
        return self.decisions.contents(entry, self.where(), self.emit_number)

    # ---------------------------------------------------------------- from entries to fakes

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        if tensor.layout is not torch.strided:
            raise UnsupportedLayoutError(
                f"a tensor of layout {tensor.layout} was made at {user_line(self.origins.here())}. Only strided "
                "tensors can be compiled: call .to_dense() first, make the embedding with sparse=False, or put the "
                "computation into a function that `foregrad.eager_region` marks."
            )
        return TensorSpec.of(tensor)

    def specs_of(self, out: object) -> Any:
        if isinstance(out, torch.Tensor):
            return self.spec_of(out)
        if isinstance(out, (list, tuple)):
            return tuple(self.specs_of(item) for item in out)
        return None

    def fake_of(self, spec: TensorSpec) -> torch.Tensor:
        return new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)

    def _fakes_of(self, entry: Entry) -> object:
        if isinstance(entry.spec, tuple):
            return tuple(self.fake_of(s) if s is not None else None for s in entry.spec)
        return self.fake_of(entry.tensor)

    def fakes_like(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return self.fake_of(TensorSpec.of(value))
        if isinstance(value, TensorSpec):
            return self.fake_of(value)
        if isinstance(value, (tuple, list)):
            return tuple(self.fakes_like(item) for item in value)
        return value
