"""Collectives that work in place (`dist.all_reduce` and the like), as the graph has them.

Each becomes its functional form, a wait, and a write of the result: at the call or, where it is asynchronous, at the
program's wait. None is dropped, merged with an equal collective or run a second time: other processes wait for each.

A graph runs before it is known whether it is right for the call, where the program branches on values. A collective may
not run then: in a branching function collectives are eager regions, which know how to run once. So are collectives with
an unused result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from .._torch.engine import dispatching_again, without_modes, without_torch_functions
from .._torch.nested import tensors_in
from .._torch.patches import region_runner
from ..errors import UnsupportedOpError
from ..graph.calls import CALL
from ..identity import ById
from ..locks import Bind
from ..tracing.aspect import Aspect, Row, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.tape.again import CaptureAgain
from ..tracing.tape.tape import Entry
from ._torch.distributed import finished_work, functional_collective, group_of, install, reduction_of, work_of
from .collective import Collective, arguments_of, returned, written_to

aten = torch.ops.aten

_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")

Placed = list[tuple[torch.Tensor, Callable[[Entry], Entry]]]
"""Tensors that are written to, with what gives the value of each from the result of a collective."""


@aspect
class Collectives(Aspect):
    """The collectives of one tape. `learned.facts` says whether the forward's run as eager regions."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder
        self.made: list[Entry] = []  # as nodes
        self._pending: list[Any] = []

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        install(bind, lambda: current() is not None)

    def resumed(self) -> Aspect:
        return self

    @property
    def by_regions(self) -> bool:
        """Whether the forward's collectives run as eager regions."""
        learned = self.recorder.host.learned
        return learned is not None and Collectives in learned.facts

    def run(self, plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator of `c10d`: it exchanges tensors with other processes."""
        op: Any = plan.op
        recorder, schema = self.recorder, op._schema
        name = schema.name.partition("::")[2]
        if name in _BETWEEN_TWO or not any(argument.name == "process_group" for argument in schema.arguments):
            raise UnsupportedOpError(
                f"`{op}` at {recorder.where()} exchanges tensors with a second process in a way that no graph can "
                "hold. Keep this part outside the compiled function."
            )
        given = arguments_of(op, args, kwargs)
        written = written_to(op, given)
        if recorder.in_backward:
            recorder.late.note_targets(written, list(given.values()))
        finish = self._begun(op, name, given, written)
        if given.get("async_op", True):
            self._pending.append(work_of(lambda: self._later(finish), written))
            work = self._pending[-1].boxed()
        else:
            finish()
            work = finished_work()
        return returned(op, given, work)

    def _later(self, finish: Callable[[], None]) -> None:
        mode: Any = self.recorder
        with without_torch_functions(), without_modes(None, mode):  # as where an operator is recorded
            finish()

    operators: ClassVar[Mapping[Any, Row]] = {"c10d": run}

    def ran(self) -> None:  # a result without a wait is there by then
        for work in self._pending:
            work.wait()

    def mark(self) -> int:
        return len(self.made)

    def drop(self, mark: int) -> None:
        for entry in self.made[mark:]:
            entry.has_effect = entry.once = False
        del self.made[mark:]

    def before_graph(self, outputs: Sequence[Entry | None]) -> None:
        """Capture again where a graph may not have these collectives; functional ones of the program's own stay, though
        it does not use them.
        """
        functional = self.recorder.tape.with_operator(lambda op: getattr(op, "namespace", "") == "_c10d_functional")
        if not functional and not self.made:
            return
        needed = self.recorder.tape.needed(outputs)
        for entry in functional:
            if not entry.is_backward and entry not in needed:
                entry.has_effect = entry.once = True
        made = [entry for entry in self.made if not entry.is_backward]
        if made and (self.recorder.decisions.made or not needed.issuperset(made)):
            self.run_as_regions()

    def ahead(self, entry: Entry) -> None:
        if entry.once:
            self.run_as_regions()

    def run_as_regions(self) -> NoReturn:
        """Capture again, with each as an eager region."""
        learned = self.recorder.host.learned
        if learned is None:
            raise UnsupportedOpError(
                f"a derivative of `{self.recorder.host.name}` calls collectives and reads values: this can't be "
                "compiled."
            )
        learned.facts[Collectives] = True
        raise CaptureAgain

    def _begun(self, op: Any, name: str, given: dict[str, Any], written: list[torch.Tensor]) -> Callable[[], None]:
        """Start a collective, and give its wait."""
        recorder = self.recorder
        group, size = group_of(given["process_group"])
        reduction = reduction_of(given["reduce_op"]) if "reduce_op" in given else ""
        is_early = not recorder.in_backward  # a graph of a backward runs when it is known to be right
        if is_early and recorder.decisions.made and not self.by_regions:
            self.run_as_regions()
        last = self.made[-1] if self.made and self.made[-1].is_backward is recorder.in_backward else None
        is_functional = last is None or last.target is not CALL  # nothing orders the former after the latter
        if is_functional and not (is_early and self.by_regions):
            form = _FORMS.get(name) if given.get("sparse_indices") is None else None
            calls = form(recorder, given, size, reduction) if form is not None and reduction is not None else None
            if calls is not None:
                return self._functional(name, [(self._call(*call, group), placed) for call, placed in calls])
        tensors = [t for name, value in given.items() if name != "tensor" for t in tensors_in(value)]
        at = ById((tensor, i) for i, tensor in enumerate(tensors))
        mode: Any = recorder
        with mode:  # memory that was never written differs from run to run
            outputs = ById((t, torch.zeros_like(t)) for t in written_to(op, given, only_outputs=True))
        tensors = [outputs.get(tensor, tensor) for tensor in tensors]
        rest = given | {"process_group": None}  # found by its name: a group that is destroyed is to go
        called = Collective(op, [*rest.values()], group, str(reduction), [at[t] for t in written])
        if not (is_early and self.by_regions):
            if last is not None and last.target is CALL:
                last = recorder.emit(operator.getitem, last, 0)
            after = [] if last is None else [last]
            entry = self._keep(recorder.emit(CALL, called.interned().key, recorder.to_entries(tensors), after, []))
            results = [recorder.emit(operator.getitem, entry, i) for i in range(1, 1 + len(written))]
        else:
            call: Any = region_runner()
            with mode, dispatching_again(), torch.no_grad():
                values = call(called, tuple(tensors), {})
            results = [recorder.value_of(value).read(recorder.emit) for value in values]
        for tensor, result in zip(written, results, strict=True):
            recorder.writes.assign(tensor, result)
        return lambda: None

    def _call(self, name: str, *args: Any) -> Entry:
        """A functional collective, under way. `args`: tensors and plain values."""
        recorder = self.recorder
        return self._keep(recorder.emit(functional_collective(name), *recorder.to_entries(list(args))))

    def _keep(self, entry: Entry) -> Entry:
        entry.has_effect = entry.once = True
        self.made.append(entry)
        return entry

    def _functional(self, name: str, begun: list[tuple[Entry, Placed]]) -> Callable[[], None]:
        recorder = self.recorder
        is_counted = "gather" in name or "scatter" in name

        def finish() -> None:
            for result, placed in begun:
                waited = recorder.emit(functional_collective("wait_tensor"), result, spec=result.spec)
                for tensor, value in placed:
                    recorder.writes.assign(tensor, value(waited))
                    if is_counted and not tensor.is_inference():
                        torch.autograd.graph.increment_version(tensor)

        return finish


# ---------------------------------------------------------------------------------------------- functional forms


def _same(entry: Entry) -> Entry:
    return entry


def _reduced(rec: Recording, given: dict[str, Any], size: int, reduction: str) -> Any:
    return [(("all_reduce", tensor, reduction), [(tensor, _same)]) for tensor in given["tensors"]]


def _broadcast(rec: Recording, given: dict[str, Any], size: int, reduction: str) -> Any:
    return [(("broadcast", tensor, given["root_rank"]), [(tensor, _same)]) for tensor in given["tensors"]]


def _gathered(rec: Recording, given: dict[str, Any], size: int, reduction: str) -> Any:
    (tensor,), (outputs,) = given["input_tensors"], given["output_tensors"]
    if any(output.shape != tensor.shape or output.dtype is not tensor.dtype for output in outputs):
        return None

    def part(index: int) -> Callable[[Entry], Entry]:
        shape = [size, *tensor.shape]
        return lambda waited: rec.emit(aten.select.int, rec.emit(aten.view.default, waited, shape), 0, index)

    entry = rec.value_of(tensor).read(rec.emit)
    entry = entry if tensor.dim() else rec.emit(aten.unsqueeze.default, entry, 0)
    return [(("all_gather_into_tensor", entry, size), [(output, part(i)) for i, output in enumerate(outputs)])]


def _gathered_whole(rec: Recording, given: dict[str, Any], size: int, reduction: str) -> Any:
    outputs, inputs = _lists(given)
    if not all(_is_row_of(output, tensor, size) for output, tensor in zip(outputs, inputs, strict=True)):
        return None
    return [
        (("all_gather_into_tensor", tensor, size), [(output, _same)])
        for output, tensor in zip(outputs, inputs, strict=True)
    ]


def _scattered(rec: Recording, given: dict[str, Any], size: int, reduction: str) -> Any:
    outputs, inputs = _lists(given)
    if not all(_is_row_of(tensor, output, size) for output, tensor in zip(outputs, inputs, strict=True)):
        return None
    return [
        (("reduce_scatter_tensor", tensor, reduction, size), [(output, _same)])
        for output, tensor in zip(outputs, inputs, strict=True)
    ]


def _exchanged(rec: Recording, given: dict[str, Any], size: int, reduction: str) -> Any:
    output, tensor = given["output"], given["input"]
    if output.dtype is not tensor.dtype or 0 in (output.dim(), tensor.dim()):
        return None
    counts = [
        list(given[f"{what}_split_sizes"]) or [t.shape[0] // size] * size
        for what, t in (("output", output), ("input", tensor))
    ]
    fits = all(sum(count) == t.shape[0] for count, t in zip(counts, (output, tensor), strict=True))
    if not fits or output.shape[1:] != tensor.shape[1:]:
        return None
    return [(("all_to_all_single", tensor, *counts), [(output, _same)])]


def _lists(given: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return (
        tensors_in(given.get("outputs", given.get("output_tensor"))),
        tensors_in(given.get("inputs", given.get("input_tensor"))),
    )


def _is_row_of(whole: torch.Tensor, part: torch.Tensor, size: int) -> bool:
    """Whether a tensor is one part for each rank, in a row: all backends take that form."""
    is_row = part.dim() > 0 and tuple(whole.shape) == (size * part.shape[0], *part.shape[1:])
    return is_row and whole.dtype is part.dtype


_FORMS: dict[str, Any] = {
    "allreduce_": _reduced,
    "allreduce_coalesced_": _reduced,
    "broadcast_": _broadcast,
    "allgather_": _gathered,
    "_allgather_base_": _gathered_whole,
    "allgather_into_tensor_coalesced_": _gathered_whole,
    "_reduce_scatter_base_": _scattered,
    "reduce_scatter_tensor_coalesced_": _scattered,
    "alltoall_base_": _exchanged,
}
