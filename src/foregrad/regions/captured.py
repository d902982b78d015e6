"""Eager regions of a capture: each call of a marked function runs once on real tensors and is one operator of the tape.

The recorded prefix computes the function's arguments, like a value that the program branches on. The leaves of its
autograd graph are the parameters that it reached by itself: these become inputs of the operator, so they get gradients
like any input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from .._torch.engine import (
    ThreadDispatchMode,
    force_view_tracking,
    plain_execution,
    without_modes,
    without_torch_functions,
)
from .._torch.histories import nodes_behind
from .._torch.ops import Args, Kwargs
from .._torch.patches import hooks_off
from .._torch.stand_ins import is_stand_in
from .._torch.symbols import concrete, is_symbolic
from .._torch.tensors import is_inside_transform, storage_key
from .._torch.wrappers import is_wrapper
from ..annexes import the_one
from ..errors import UnsupportedAliasError, UnsupportedOpError, UnsupportedSideEffectError, UnsupportedTensorError
from ..frontend.tree import LEAF, Tree, check_leaves, flatten, is_as_opened, open_container
from ..frontend.values import is_plain
from ..graph.calls import CALL, PythonCall
from ..graph.meta import TensorSpec, contiguous_strides, strides_in_order
from ..identity import ById
from ..interrupts import runs_user_code
from ..python._torch.settings import settings
from ..tracing.aspect import Aspect, Finished
from ..tracing.heap.recording import Host
from ..tracing.heap.records import InputRecord, is_moved
from ..tracing.recorder.recorder import Recorder
from ..tracing.tape.tape import Entry
from ..tracing.values.decisions import Decided
from ._torch import CAST_INSIDE, casting_as_entered, is_inside_operator
from .calls import Ran, Region, RegionBackward, differentiated_twice, layout_of, open_journal, reached_from, run_region
from .read_in_backwards import looks_inside, reads_state

_SETTINGS = ("grad mode", "autocast", "the autocast cache")  # that a region runs under as it did when captured
_HEAD = 2  # results of the operator before the values: key, status


class _Watch(ThreadDispatchMode):
    """The tensors that a region uses and did not make, by the memory that they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.used: dict[int, torch.Tensor] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.uses_stand_in = False
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []  # the tensors written to, and their values before

    def undo(self) -> None:
        """Undo the writes."""
        with plain_execution():
            for tensor, before in reversed(self.before):
                tensor.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        for argument, schema in zip(args, func._schema.arguments, strict=False):
            self._note(argument, schema.alias_info is not None and schema.alias_info.is_write)
        for argument in kwargs.values():
            self._note(argument, False)
        with casting_as_entered() if func in CAST_INSIDE else contextlib.nullcontext():
            result = func(*args, **kwargs)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and item.layout is torch.strided and storage_key(item) not in self.used:
                self.made.add(storage_key(item))
        return result

    def _note(self, value: Any, is_written: bool) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self._note(item, is_written)
        elif is_stand_in(value):
            self.uses_stand_in = True
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            key = storage_key(value)
            if key not in self.made:
                self.used[key] = value
                if is_written:
                    self.written[key] = value
                    self.before.append((value, value.detach().clone()))


class EagerRegions(Aspect):
    """The eager regions of a run of a capture. `records`: the inputs found so far."""

    def __init__(self, host: Host, recorder: Recorder, records: list[InputRecord]) -> None:
        self.host, self.recorder, self.records = host, recorder, records
        self.name, self.lifting = host.name, host.lifting
        self.made: list[Region] = []
        self._written: dict[int, tuple[torch.Tensor, Region]] = {}  # memory that regions write to by themselves

    def refuse(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of `call`, where regions must not run."""
        where = self.recorder.where()
        raise UnsupportedOpError(f"`{self.name}` calls an eager region at {where} under a transform of torch.func.")

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a marked function, made of stand-ins."""
        recorder = self.recorder
        if is_inside_operator(recorder) and not isinstance(function, PythonCall):  # of a class: a part of the capture
            return function(*args, **kwargs)
        name, where = _name_of(function), recorder.where()
        knows = self.host.knows
        arguments = Arguments(args, kwargs, knows)
        new = function if getattr(function, "__closure__", None) and not knows(function) else arguments.new
        if new is not None:
            raise UnsupportedSideEffectError(
                f"the eager region `{name}` called at {where} is given, or is, an object that the call makes: "
                f"{type(new).__name__}. Each call would use that of the first. Make it outside, or inside the region."
            )
        if recorder.in_backward or any(is_inside_transform(t) for t in arguments.tensors):
            there = where if recorder.in_backward else "a transform of torch.func"
            raise UnsupportedOpError(
                f"the eager region `{name}` is called in {there}, where it can't be compiled. Call it in the function "
                "itself."
            )
        tensors = [t if is_stand_in(t) else recorder.adopt(t) for t in arguments.tensors]
        entries = [recorder.value_of(tensor).read(recorder.emit) for tensor in tensors]
        reals = [recorder.decisions.value(entry, where) for entry in entries]
        region, decided = self._region(function, name, where, arguments, tensors), self._decided()
        ran = self._run(region, reals)
        if ran.left:
            raise UnsupportedSideEffectError(
                f"the eager region `{name}` called at {where} {ran.left} a container among its arguments, but a "
                "compiled call would pass a copy. Pass the items and use the result, or pass an object that holds "
                "the container."
            )
        with without_torch_functions():  # the lifting would see the region's own tensors
            leaves = [recorder.adopt(leaf) for leaf in ran.leaves]
            inputs = [*tensors, *leaves]
            _describe(region, ran, inputs)
            self._check_aliases(region, ran)
            sizes = [tuple(_symbolic(size, tensors) for size in output.shape) for output in ran.outputs]
        entries += [recorder.value_of(leaf).read(recorder.emit) for leaf in leaves]
        entry = self._entry(region, ran, (region.key, entries, decided, [d for size in sizes for d in size]), sizes)
        self.made.append(region)
        values = _Linked.apply(_RegionCall(self, region, entry, inputs, [tuple(t.shape) for t in inputs]), *inputs)
        count = len(values) - len(region.written or ())
        for index, value in zip(region.written or (), values[count:], strict=True):
            tensors[index].copy_(value)
        return rebuilt(ran.rest, tensors, values)

    def _region(
        self, function: Any, name: str, where: str, arguments: Arguments, tensors: Sequence[torch.Tensor]
    ) -> Region:
        grad = torch.is_grad_enabled()
        return Region(
            function,
            name,
            where,
            arguments.call,
            differentiable=tuple(grad and t.requires_grad for t in tensors),
            is_leaf=tuple(t.is_leaf for t in tensors),
            settings={key: value for key, value in settings().items() if key.startswith(_SETTINGS)},
            decided=tuple(decided.value for decided in self.recorder.decisions.made),
        )

    def _decided(self) -> list[Entry]:
        """The values that the program branched on before, as tensors."""
        made = self.recorder.decisions.made
        return [d.entry if d.is_tensor else self.recorder.number_tensor(d.entry, d.value) for d in made]

    # ---------------------------------------------------------------- running it

    def _run(self, region: Region, reals: list[torch.Tensor]) -> Ran:
        watch = _Watch()
        journal = open_journal()
        if journal is not None:
            journal.undo.append(watch.undo)
        as_it_is: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not isinstance(region.function, PythonCall):  # a `PythonCall` looks at no state of Python's
            as_it_is = self.host.state.as_it_is(region.name, region.said)
        with (
            as_it_is,
            hooks_off(),
            without_modes(self.lifting, self.recorder),
            the_one("Python's state").not_drawing(),
            force_view_tracking(False),
            self.recorder.decisions.drawing(reals),
            watch,
        ):
            ran = run_region(region, reals)
            self._check_used(region, watch)
        return ran

    def _check_used(self, region: Region, watch: _Watch) -> None:
        moved = {storage_key(record.real) for record in self.records if is_moved(record)}
        if watch.uses_stand_in or not moved.isdisjoint(watch.used):
            raise UnsupportedSideEffectError(
                f"{region.said} uses a tensor that the compiled function "
                "computed or wrote to, but did not pass. Pass it as an argument."
            )
        self._written.update((key, (tensor, region)) for key, tensor in watch.written.items())

    def _check_aliases(self, region: Region, ran: Ran) -> None:
        """Raise where a result shares memory with anything but the inner autograd graph."""
        known = {*ran.memory, *(storage_key(tensor) for tensor in self.host.state.before.places.tensors())}
        results = ran.outputs[: len(ran.outputs) - len(region.written or ())]
        for output, view in zip(results, region.views, strict=False):
            if view is None and storage_key(output) in known:
                raise UnsupportedAliasError(
                    f"{region.said} returns a tensor in memory that it "
                    "did not allocate, or two tensors that share memory. Return copies (`.clone()`)."
                )
            known.add(storage_key(output))

    def returned(self, results: Sequence[Any], paths: Sequence[str]) -> None:
        """The function has run: the regions' own written tensors are not used outside."""
        for record in self.records if self._written else ():
            found = self._written.get(storage_key(record.real))
            if found is not None:
                raise UnsupportedSideEffectError(
                    f"{found[1].said} writes to {record.slot}, and the "
                    "compiled function uses it too. Write to it in the region only, or in the function only."
                )

    def finished(self, run: Finished) -> None:
        """The reads are known: none sees a region's change."""
        self.host.state.check_taken_over(self.name)

    # ---------------------------------------------------------------- on the tape

    def _entry(self, region: Region, ran: Ran, args: tuple[Any, ...], sizes: list[tuple[Any, ...]]) -> Entry:
        recorder = self.recorder
        with recorder.in_region(None):
            entry = recorder.entry(CALL, args, {}, is_random=True)
        cpu = torch.device("cpu")
        specs = [TensorSpec((1,), (1,), torch.int64, cpu), TensorSpec((), (), torch.int64, cpu)]
        for shape, (dtype, on, order) in zip(sizes, region.layouts, strict=True):
            specs.append(TensorSpec(shape, strides_in_order(shape, order), dtype, on))
        entry.spec = tuple(specs)
        with plain_execution():
            recorder.decisions.supply(entry, region.results(ran))
        status = recorder.entry(operator.getitem, (entry, 1), {}, is_random=False)
        status.spec = specs[1]
        recorder.decisions.add(Decided(status, 0, region.where))
        return entry


@dataclasses.dataclass(eq=False, slots=True)
class _RegionCall:
    """One region on the tape; `shapes` are its inputs' at that time."""

    regions: EagerRegions
    region: Region
    entry: Entry
    inputs: list[torch.Tensor]
    shapes: list[tuple[Any, ...]]

    def values(self) -> tuple[Any, ...]:
        """The stand-ins of the results."""
        recorder = self.regions.recorder
        return tuple(recorder.bind_results(self.entry, recorder.fakes_like(self.entry.spec))[_HEAD:])

    def gradients(self, backward: RegionBackward, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        recorder, host = self.regions.recorder, self.regions.host
        custom = getattr(self.region.function, "owner", None)
        if not recorder.in_backward and reads_state(getattr(custom, "backward", None), host.met):
            raise looks_inside(self.region.name, "where only eager can run it")
        key = recorder.entry(operator.getitem, (self.entry, 0), {}, is_random=False)
        key.spec = self.entry.spec[0]  # type: ignore[index]
        shapes = [self.shapes[i] for i in backward.input_positions]
        inputs, sizes = [key, *map(recorder.to_entries, gradients)], [size for shape in shapes for size in shape]
        entry = recorder.entry(CALL, (backward.key, inputs, [], sizes), {}, is_random=False)
        entry.spec = tuple(
            TensorSpec(shape, contiguous_strides(shape), dtype, device)
            for shape, (dtype, device, _) in zip(shapes, backward.layouts, strict=True)
        )
        return tuple(recorder.bind_results(entry, recorder.fakes_like(entry.spec)))

    def refuse(self) -> NoReturn:
        """The gradients are differentiated."""
        region = self.region
        said = "Keep the region out of the differentiated part, or write it in PyTorch's operators without the mark."
        if isinstance(custom := getattr(region.function, "owner", None), type):  # nobody has marked it
            differentiated_twice.add(custom)
            said = "Call the function again: from now on calls like this run eagerly."
        raise UnsupportedOpError(f"{region.said} is differentiated twice, which is not supported. {said}")


class _Linked(torch.autograd.Function):
    """Links the results of a region to its inputs."""

    @staticmethod
    def forward(ctx: Any, call: _RegionCall, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        values = tuple(
            value if view is None else inputs[view].view_as(inputs[view])
            for value, view in zip(call.values(), call.region.views, strict=True)
        )
        ctx.mark_non_differentiable(
            *(value for value, grad in zip(values, call.region.requires_grad, strict=True) if not grad)
        )
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call: _RegionCall = ctx.call
        call.region.materializes = tuple(map(_leads_to_functions, call.inputs))
        backward = call.region.backward([gradient is not None for gradient in gradients])
        found: list[Any] = [None] * len(call.shapes)
        if backward.input_positions:
            given = [g for g in gradients if g is not None]
            results = Once.apply(lambda: call.gradients(backward, given), call.refuse, *gradients, *call.inputs)
            for index, result in zip(backward.input_positions, results, strict=True):
                found[index] = result
        return None, *found


def _leads_to_functions(tensor: torch.Tensor) -> bool:
    """Whether traced custom Functions are behind a tensor."""
    functions = (node for node in nodes_behind([tensor]) if isinstance(node, torch.autograd.function.BackwardCFunction))
    return any(not isinstance(getattr(node, "call", None), _RegionCall) for node in functions)


class Once(torch.autograd.Function):
    """The result of `make()`, dependent on `tensors`; `refuse()` where it is differentiated: Python is in no graph."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Any], refuse: Callable[[], NoReturn], *tensors: Any) -> Any:
        ctx.refuse = refuse
        return make()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.refuse()


def _name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return str(getattr(function, "__name__", type(function).__name__))


def _describe(region: Region, ran: Ran, inputs: Sequence[torch.Tensor]) -> None:
    """Note a run's findings."""
    starts = [*ran.starts, *ran.leaves]
    region.leaves = tuple(weakref.ref(leaf) for leaf in ran.leaves)
    region.input_layouts = tuple((t.dtype, t.device, tuple(range(t.dim()))) for t in inputs)
    region.layouts = tuple(map(layout_of, ran.outputs))
    region.requires_grad = tuple(output.requires_grad for output in ran.outputs)
    region.rest = ran.rest
    is_of_class = isinstance(getattr(region.function, "owner", None), type)  # a Function gives the view its own history
    whole = [next((at for at in found if at not in (region.written or ())), None) for found in ran.views]
    region.views = tuple([at if is_of_class else None for at in whole])
    region.reached = tuple(reached_from(output, starts) if output.requires_grad else () for output in ran.outputs)


def _symbolic(size: int, tensors: Sequence[torch.Tensor]) -> Any:
    """A size of a result: the symbolic size of an argument that it equals, if one does. Each call looks at it."""
    shapes: list[Any] = [tensor.shape for tensor in tensors]
    known = (dim for shape in shapes for dim in shape if isinstance(dim, torch.SymInt))
    return next((dim for dim in known if size > 1 and concrete(dim) == size), size)


# -------------------------------------------------------------------- arguments of regions
# The arguments and results of an eager region, apart from the tensors in them.


_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_LASTING = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.nn.Module, type)


_WRITABLE = ("list", "dict", "dataclass", "registered")  # kinds of containers
_Part = Callable[[Iterator[torch.Tensor], list[Any]], Any]


class Arguments:
    """Arguments with their tensors taken out: `tensors`, in order. `is_old(object)`: it is older than the call, and
    each call finds it again. An old container is handed over unchanged, any other is made anew.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_old: Callable[[Any], bool]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.is_old = is_old
        self.new: Any = None  # an object that is not
        self._build = self._opened((args, kwargs))

    def call(self, function: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any, str]:
        """Call a function with the tensors in its arguments. Gives the result's tensors, the rest of the result, and
        the function's deed to a container that was made for the call and is not the program's.
        """
        made: list[Any] = []
        given = self._build(iter(tensors), made)
        before = list(map(_opened, made))
        result = _called(function, *given)  # held until the end: a container in the result counts as kept
        values, rest = take_apart(result, tensors)
        if not all(map(is_as_opened, made, before)):
            return values, rest, "changes"
        del given, before
        return values, rest, "keeps or returns" if _is_kept(made) else ""

    def _opened(self, value: Any) -> _Part:
        if is_wrapper(value):
            raise UnsupportedTensorError(
                f"an eager region is given a {type(value).__qualname__}, a tensor with inner tensors. Pass the inner "
                "tensors."
            )
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return lambda tensors, _: next(tensors)
        if is_symbolic(value):
            number = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](value)
            return lambda *_: number
        opened = open_container(value)
        if opened is None:
            if not (is_plain(value) or isinstance(value, _LASTING) or self.is_old(value) or self._is_of_old(value)):
                self.new = value
            return lambda *_: value
        if self.is_old(value) and not any(is_stand_in(x) or is_symbolic(x) for x in flatten(value)[0]):
            return lambda *_: value
        kind, cls, context, items = opened
        if kind == "registered" and any(map(operator.is_not, items, open_container(value)[3])):  # type: ignore[index]
            raise UnsupportedSideEffectError(
                f"an eager region is given a {type(value).__qualname__}, flattened into new containers each "
                "time, so writes of the region would be lost. Pass the items."
            )
        tree = Tree(kind, cls, context, (LEAF,) * len(items), len(items))
        parts = list(map(self._opened, items))

        def build(tensors: Iterator[torch.Tensor], made: list[Any]) -> Any:
            container = tree.unflatten([part(tensors, made) for part in parts])
            if kind in _WRITABLE and not _is_frozen(cls):
                made.append(container)
            return container

        return build

    def _is_of_old(self, value: Any) -> bool:
        """Whether the value is a bound method of an old object: each attribute access makes a new method."""
        if not isinstance(value, types.MethodType) or not self.is_old(value.__self__):
            return False
        function, of = value.__func__, value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
        return any(getattr(item, "__func__", item) is function for cls in of.__mro__ for item in vars(cls).values())


def _is_frozen(cls: type | None) -> bool:
    """Whether it is a frozen dataclass: a copy is as good as the object."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


@runs_user_code
def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _opened(container: Any) -> Any:
    opened = open_container(container)
    return opened and (*opened[:3], [*opened[3]])


def _is_kept(made: list[Any]) -> bool:
    """Whether anything else refers to one of the containers. Outer containers come behind their contents."""
    while made:
        if sys.getrefcount(made[-1]) > _REFERENCES:
            return True
        made.pop()
    return False


_ALONE: list[Any] = [[]]
_REFERENCES = sys.getrefcount(_ALONE[-1])  # to an object that one list holds


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """In the place of a leaf: the argument or value that it is. `number`: it is that number."""

    argument: bool
    index: int
    number: type | None = None


def take_apart(result: Any, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Tree, list[Any]]]:
    """The tensors among the leaves of a result, and the rest. Numbers are tensors: they may differ next time."""
    leaves, tree = flatten(result)
    check_leaves(leaves, tree.paths("result"), "the eager region's")
    arguments = ById((tensor, index) for index, tensor in enumerate(given))
    known: ById[Any, int] = ById()
    values: list[torch.Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if type(leaf) in _NUMBERS:
            rest.append(_At(False, len(values), type(leaf)))
            values.append(torch.tensor(leaf, dtype=_NUMBERS[type(leaf)], device="cpu"))
        elif not isinstance(leaf, torch.Tensor):
            rest.append(leaf)
        elif leaf in arguments:
            rest.append(_At(True, arguments[leaf]))
        else:
            if leaf.layout is not torch.strided or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                raise UnsupportedSideEffectError(
                    f"an eager region returns a {type(leaf).__name__} of layout {leaf.layout}. Return dense tensors: "
                    "call .to_dense() in the region."
                )
            if leaf not in known:
                known[leaf] = len(values)
                values.append(leaf)
            rest.append(_At(False, known[leaf]))
    return values, (tree, rest)


def rebuilt(rest: tuple[Tree, list[Any]], arguments: Sequence[Any], values: Sequence[Any]) -> Any:
    """A result made of the arguments and values."""
    tree, leaves = rest
    return tree.unflatten([_leaf(leaf, arguments, values) for leaf in leaves])


def _leaf(leaf: Any, arguments: Sequence[Any], values: Sequence[Any]) -> Any:
    if not isinstance(leaf, _At):
        return leaf
    value = (arguments if leaf.argument else values)[leaf.index]
    return value if leaf.number is None else value.item()
