"""The needs of a program without foregrad: its step by PyTorch, recorded on tensors without memory.

A copy of the program runs forward and backward with PyTorch's autograd, checkpointing and DTensor. Each storage is an
event when an operator makes it, and another when its last reference goes, so values live as long as Python and
autograd hold them. `fully_shard`'s memories are added where its hooks run, by the rules of `sharded`. The
copy's tensors are twins on `meta`, or fakes for the CPU: the program's own are neither read nor written.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import types
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._torch.engine import ThreadDispatchMode, current_autograd_node, next_sequence_nr, sequence_nr_of
from .._torch.fakes import FakeTensor, NewFakeMode
from .._torch.nested import leaves, mapped
from .._torch.wrappers import is_wrapper, parts_of
from ..errors import PlanError
from ..partitioners.liveness import measured_kernel
from .asked import SaidValues
from .devices import Device
from .kernels import AcceleratorKernels
from .memory import Alive, Standing, StepMemory
from .optimizers import Optimizer
from .ranks import Ranks, Unit
from .reached import names_of
from .replay import Script
from .result import Recipe
from .sharded import COMPUTE, GATHER, REDUCE
from .step import TrainingStep, loss_in, planned
from .work import Layers, cost_of, pattern

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], Mapping[str, Any]]

# PyTorch's derivatives write into zeros in place, but under a mode.
_IN_PLACE = ("index_add", "scatter_add", "index_put", "_unsafe_index_put")
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # of collectives: the result is the operand, a copy on `meta` alone


class _Twins:
    """Tensors without memory in the place of a program's, and copies of its modules over these, each once.
    `keeps_values`: a tensor with values has a twin with values.
    """

    def __init__(self, fakes: NewFakeMode | None, *, keeps_values: bool = False) -> None:
        self.fakes, self.keeps_values = fakes, keeps_values
        self.storages: list[Any] = []
        self.modules: list[nn.Module] = []
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that ids stay theirs

    def of(self, value: Any) -> Any:
        """A tensor, module, function or container, with twins inside; other values as given."""
        if isinstance(value, (list, tuple, dict)):
            return mapped(value, (torch.Tensor, nn.Module), self.of)
        make = next((make for kind, make in self._MAKERS if isinstance(value, kind)), _Twins._object)
        if id(value) not in self._memo:
            self._kept.append(value)
            self._memo[id(value)] = make(self, value)
        return self._memo[id(value)]

    def owner(self, path: str, parameters: Sequence[Any]) -> nn.Module:
        """The module that has these parameters and no more, by the end of its path in the step."""
        wanted = {id(one) for one in parameters}
        known = ((name, part) for module in self.modules for name, part in module.named_modules())
        named = ((name, part) for name, part in known if not name or f".{path}".endswith(f".{name}"))
        found: list[tuple[int, nn.Module]] = [
            (len(name), part) for name, part in named if {id(one) for one in part.parameters()} == wanted
        ]
        if not found:
            raise PlanError(
                f"no module has the parameters of {path}, and no others: the time of its gather is not known"
            )
        return max(found, key=lambda one: one[0])[1]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_wrapper(tensor):
            if not all(part.is_meta for part in parts_of(tensor)):
                raise PlanError(f"a {type(tensor).__name__} has a twin on `meta` alone")
            twin = tensor.detach().clone()
        elif self.keeps_values and not tensor.is_meta:
            twin = tensor.detach().clone()
        else:
            device = tensor.device if not tensor.is_meta else torch.device("cpu")
            with self.fakes or contextlib.nullcontext():
                twin = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device if self.fakes else "meta"
                )
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            twin.requires_grad_()
        self.storages += [part.untyped_storage() for part in (parts_of(twin) if is_wrapper(twin) else [twin])]
        return twin

    def _module(self, module: nn.Module) -> nn.Module:
        """A copy of a module: tensors are twins; objects but modules and containers are shared."""
        for part in module.modules():
            for leaf in leaves(vars(part)):
                if isinstance(leaf, torch.Tensor):
                    self.of(leaf)
                elif not isinstance(leaf, (nn.Module, types.MethodType, functools.partial)):
                    self._memo[id(leaf)] = leaf
        self.modules.append(copy.deepcopy(module, self._memo))
        return self.modules[-1]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """The function over copies of the modules and tensors in its cells and globals."""
        names, known = names_of(function.__code__), function.__globals__
        own = {name: known[name] for name in names if isinstance(known.get(name), (nn.Module, torch.Tensor))}
        cells = function.__closure__ or ()
        made = types.FunctionType(
            function.__code__,
            known | {name: self.of(value) for name, value in own.items()},
            function.__name__,
            function.__defaults__,
            tuple(types.CellType() for _ in cells),
        )
        made.__kwdefaults__ = function.__kwdefaults__
        self._memo[id(function)] = made  # a cell may hold the function itself
        for cell, twin in zip(cells, made.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                twin.cell_contents = self.of(cell.cell_contents)
        return made

    def _object(self, value: Any) -> Any:
        """An object with modules or tensors among its attributes, over their twins; other objects as given."""
        held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        if not any(isinstance(leaf, (nn.Module, torch.Tensor)) for leaf in leaves(dict(held))):
            return value
        made = copy.copy(value)
        self._memo[id(value)] = made
        made.__dict__.update({name: self.of(one) for name, one in held.items()})
        return made

    def _method(self, method: types.MethodType) -> types.MethodType:
        return types.MethodType(method.__func__, self.of(method.__self__))

    def _partial(self, one: functools.partial[Any]) -> functools.partial[Any]:
        return functools.partial(self.of(one.func), *self.of(one.args), **self.of(one.keywords))

    _MAKERS: Sequence[tuple[Any, Callable[..., Any]]] = (
        (torch.Tensor, _tensor),
        (nn.Module, _module),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (functools.partial, _partial),
    )


class StorageLog(ThreadDispatchMode):
    """Records the storages of operators' results, without the twins'. `made`: (operator, module, whether in the
    backward) by number.
    """

    def __init__(self, twins: _Twins, device: Device) -> None:
        super().__init__()
        self.device, self.fakes = device, twins.fakes
        self.numbers = array("q")
        self.staying: set[int] = set()
        self.made = [("", "", False)]
        self.again_flops, self.again_s = 0, 0.0
        self.turned: int | None = None  # the events of the forward
        self._alive: dict[int, int] = {storage._cdata: 0 for storage in twins.storages}
        self._references: dict[weakref.ref[Any], tuple[int, int]] = {}
        self._holders = Counter[int]()  # the storages of a memory
        self._stack = [""]
        self._again: Any = None
        self._sum: tuple[int, int, int] | None = None  # of gradients: the numbers of an operand, the sum, and events
        self._running, self._first = -1, 0  # the number of a node that runs, and of the first memory of its own
        self._marks: list[tuple[int, str]] = [(-1, "")]  # the module from a sequence number of autograd on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        node = self._node()
        if node is not None and (running := sequence_nr_of(node)) != self._running:
            self._running, self._first = running, len(self.made)
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if returns and returns[0].alias_info is not None:
            return result
        found = [one for one in leaves(result) if isinstance(one, torch.Tensor) and self._counts(one)]
        if any(one.is_sparse for one in found):
            raise PlanError("the life of a sparse gradient is not followed")
        is_own = func.__name__.partition(".")[0] in (_IN_PLACE if self._in_derivative() else _WAITS)
        self._sum = None
        is_sum = func is aten.add.Tensor and found and self._sums(args[0])
        workspace, sizes = (0, ()) if self.fakes is None else measured_kernel(func, args, kwargs or {})
        for tensor, size in zip(found, sizes or [0] * len(found), strict=False):
            self._see(tensor, func, args[0] if is_own else None, size)
        if is_sum:
            self._sum = self.number(args[0]), self.number(found[0]), len(self.numbers)
        if workspace:
            self.give(self.take(workspace, f"the workspace of {func}"))
        if found and self.turned is not None and torch.is_grad_enabled():  # as checkpointing runs a forward again
            flops, seconds = cost_of(func, args, kwargs or {}, result, self.device)
            self.again_flops, self.again_s = self.again_flops + flops, self.again_s + seconds
        return result

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the program's: DTensor runs operators on fakes, to know shapes."""
        return not isinstance(tensor, FakeTensor) or tensor.fake_mode is self.fakes

    def _in_derivative(self) -> bool:
        """Whether a derivative of PyTorch runs, by the number in the name."""
        node = self._node()
        return node is not None and node.name().endswith("Backward0")

    def _sums(self, operand: torch.Tensor) -> bool:
        """Whether autograd adds a gradient to an operand, rather than a derivative: the operand is of an earlier node,
        or the node has two gradients for one tensor.
        """
        node = self._node()
        if node is None or not self.number(operand) or not aten.is_non_overlapping_and_dense(operand):
            return False
        following = [one for one in node.next_functions if one[0] is not None]
        return self.number(operand) < self._first or len({*following}) < len(following)

    def _node(self) -> Any:
        return current_autograd_node() if self.turned is not None and not torch.is_grad_enabled() else None

    def _see(self, tensor: torch.Tensor, func: Any, operand: torch.Tensor | None, least: int) -> None:
        """Note the storage of a result, whose memory is an operand's or its own. `least`: bytes of an opaque result."""
        storage = tensor.untyped_storage()
        place, size = storage._cdata, max(least, storage.nbytes())
        if place in self._alive or not size:
            return
        key = self.take(size, str(func).removeprefix("aten.")) if operand is None else self.number(operand)
        self._alive[place] = key
        self._holders[key] += 1
        self._references[weakref.ref(storage, self._gone)] = place, key

    def _gone(self, reference: weakref.ref[Any]) -> None:
        place, key = self._references.pop(reference)
        del self._alive[place]
        self._holders[key] -= 1
        if not key or self._holders[key]:
            return
        if self._sum is not None and self._sum[::2] == (key, len(self.numbers)):
            self._add_in_place(*self._sum[:2])
        else:
            self.give(key)

    def _add_in_place(self, operand: int, total: int) -> None:
        """A sum of gradients whose operand nobody else holds: it goes at once. Autograd adds in place, but under a
        mode: the sum's storage has the operand's memory.
        """
        del self.numbers[-3:]
        self.made.pop()
        self._sum = None
        reference, (place, _) = self._references.popitem()
        self._alive[place], self._references[reference] = operand, (place, operand)
        self._holders[operand] += self._holders.pop(total)

    def take(self, size: int, name: str = "", stream: int = COMPUTE, *, stays: bool = False) -> int:
        """A memory; gives its number."""
        key = len(self.made)
        self.made.append((name, self._module() if name else "", self.turned is not None))
        self.numbers.extend((key, size, stream))
        if stays:
            self.staying.add(key)
        return key

    def give(self, *keys: int) -> None:
        for key in keys:
            self.numbers.extend((key, 0, 0))

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory; 0 for a twin's, and for a wrapper's."""
        return 0 if is_wrapper(tensor) else self._alive.get(tensor.untyped_storage()._cdata, 0)

    def alive(self) -> set[int]:
        """The numbers of the operators' memories in use."""
        return {key for key, count in self._holders.items() if key and count}

    def _module(self) -> str:
        node = self._node()
        number = sequence_nr_of(node) if node is not None else None
        if number is None:
            return self._stack[-1]
        return self._marks[bisect.bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1][1]

    def watch(self, module: nn.Module, again: Callable[[], Any]) -> None:
        """Know the module of an operator. `again`: the mode of a forward run again, for checkpointing:
        PyTorch leaves function modes out.
        """
        self.mode_again = again
        for path, part in module.named_modules():
            part.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)
            part.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str, *_: Any) -> None:
        if self.turned is not None and len(self._stack) == 1:
            self._again = self.mode_again()
            self._again.__enter__()
        self._stack.append(path)
        self._marks.append((next_sequence_nr(), path))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
        if self.turned is not None and len(self._stack) == 1:
            self._again.__exit__(None, None, None)
        self._marks.append((next_sequence_nr(), self._stack[-1]))


class _Gathered:
    """The memories of `fully_shard` for a unit."""

    def __init__(self, record: StorageLog, unit: Unit, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        self.record, self.unit, self.parameters, self.ranks = record, unit, parameters, ranks
        self.buffer: int | None = None
        self.held: list[int] = []

    def gather(self) -> None:
        """Into a buffer, on the stream of gathers."""
        if self.buffer is None and not self.held and self.unit.whole:
            self.buffer = self.record.take(self.unit.whole, stream=GATHER)

    def copy_out(self) -> None:
        self.gather()
        self.held = self.held or [self.record.take(size) for size in self.unit.parts]

    def let_buffer_go(self) -> None:
        if self.buffer is not None:
            self.record.give(self.buffer)
        self.buffer = None

    def let_go(self) -> None:
        self.record.give(*self.held)
        self.held = []

    def reduce(self) -> int | None:
        """Gradients into shards; gives the memory in use until the next reduction."""
        if not self.unit.reduced:
            return None
        buffer = self.record.take(self.unit.reduced)
        for one in self.parameters:
            one.grad = None
        self.record.take(-(-self.unit.reduced // self.ranks), stream=REDUCE, stays=True)
        return buffer


class _ShardedRun:
    """The hooks of `fully_shard` on a model's units, in running order."""

    def __init__(
        self, record: StorageLog, twins: _Twins, parameters: Mapping[str, list[Any]], ranks: Ranks,
        units: Sequence[Unit],
    ) -> None:  # fmt: skip
        self.record, self.ranks = record, ranks
        found = {unit.path: _Gathered(record, unit, parameters.get(unit.path, []), ranks.fsdp) for unit in units}
        self.root = found.pop("", _Gathered(record, Unit("", 0, 0, 0), [], ranks.fsdp))
        self.order: list[_Gathered] = []
        self.count = len(found)
        self.reducing: int | None = None
        self.reduced: set[int] = set()
        self.ends: dict[tuple[int, int], _Gathered] = {}  # by the place of the input that ends a unit's backward
        for path, unit in found.items():
            part = twins.owner(path, parameters[path])
            part.register_forward_pre_hook(functools.partial(self._before, unit), prepend=True, with_kwargs=True)
            part.register_forward_hook(functools.partial(self._after, unit))

    def start(self) -> None:
        self.root.copy_out()

    def _before(self, unit: _Gathered, _module: Any, args: Any, kwargs: Any) -> None:
        """A unit's backward ends with the gradients of its inputs."""
        if self.record.turned is not None:
            return
        unit.copy_out()
        (self.order[-1] if self.order else self.root).let_buffer_go()
        self.order.append(unit)
        if not self.ranks.overlap:
            unit.let_buffer_go()
        for one in _differentiable((args, kwargs))[:1]:
            self.ends[_place(one)] = unit
            one.register_hook(lambda _: self._backward_ended(unit))

    def _after(self, unit: _Gathered, _module: Any, _args: Any, result: Any) -> None:
        if self.record.turned is None:
            if len(self.order) == self.count:  # parameters of the last stay
                unit.let_buffer_go()
            elif self.ranks.reshard:
                unit.let_go()
            for one in _differentiable(result):
                one.register_hook(functools.partial(self._backward_starts, unit, _place(one)))

    def _backward_starts(self, unit: _Gathered, place: tuple[int, int], _gradient: Any) -> None:
        if place in self.ends:  # the backward of the unit that takes this result ends first
            self._backward_ended(self.ends[place])
        if id(unit) not in self.reduced:
            unit.copy_out()
            unit.let_buffer_go()
            at = self.order.index(unit)
            if at and self.ranks.overlap:
                self.order[at - 1].gather()

    def _backward_ended(self, unit: _Gathered) -> None:
        if id(unit) not in self.reduced:
            self.reduced.add(id(unit))
            unit.let_go()
            self._reduce(unit)

    def _reduce(self, unit: _Gathered) -> None:
        if self.reducing is not None:
            self.record.give(self.reducing)
        self.reducing = unit.reduce()

    def end(self) -> None:
        for unit in self.order:  # whose inputs have no gradient
            self._backward_ended(unit)
            unit.let_buffer_go()
        self.root.let_buffer_go()
        self.root.let_go()
        self._reduce(self.root)
        if self.reducing is not None:
            self.record.give(self.reducing)


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [one for one in leaves(value) if isinstance(one, torch.Tensor) and one.requires_grad]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor stands in autograd's graph: its node and the number of the result."""
    node = tensor.grad_fn
    return (-1, id(tensor)) if node is None else (sequence_nr_of(node), tensor.output_nr)


def eager_of(
    step: TrainingStep, recipe: Recipe, call: Call, standing: Standing, optimizer: Optimizer, layers: Layers,
    units: Sequence[Unit],
) -> tuple[StepMemory, int, float]:  # fmt: skip
    """The memory of the step by PyTorch, and the operations and seconds of checkpointing's second runs.

    Raises the program's errors on tensors without memory.
    """
    args, kwargs = call
    is_real = not recipe.device.is_accelerator and any(not one.tensor.is_meta for one in step.held)
    is_absent = any(one.tensor.is_meta for one in step.held)  # then tensors with values are there for these
    twins = _Twins(NewFakeMode() if is_real else None, keeps_values=is_absent and not is_real)
    with planned(recipe.function) as plain:
        function, args, kwargs = twins.of(plain), twins.of(tuple(args)), twins.of(dict(kwargs))
    record = StorageLog(twins, recipe.device)
    run = None
    if recipe.ranks.fsdp > 1:
        held = ((one.name, twins.of(one.whole)) for one in step.of_kind("parameter"))
        parameters: dict[str, list[Any]] = {}
        for name, one in function.named_parameters() if isinstance(function, nn.Module) else held:
            parameters.setdefault(layers.of(name), []).append(one)
        run = _ShardedRun(record, twins, parameters, recipe.ranks, units)
    for module in twins.modules:
        record.watch(module, functools.partial(_kernels, recipe))
    said = SaidValues({**step.known, **recipe.sizes})
    modes = torch.enable_grad(), _kernels(recipe), said, twins.fakes or contextlib.nullcontext()
    with contextlib.ExitStack() as inside:
        for mode in (_untouched(step), *modes, record):
            inside.enter_context(mode)
        if run is not None:
            run.start()
        loss = loss_in(function(*args, **kwargs), step.name)
        saved = record.alive() - {record.number(loss)}
        record.turned = len(record.numbers)
        given = torch.ones_like(loss) if loss.numel() > 1 else None
        torch.autograd.backward(loss, given)
        del loss, given
        if run is not None:
            run.end()
    record.staying |= record.alive()
    script = Script(record.numbers, tuple(sorted(record.staying)))
    return _memory(record, saved, script, standing, optimizer), record.again_flops, record.again_s


@contextlib.contextmanager
def _untouched(step: TrainingStep) -> Iterator[None]:
    """Context: the program's own tensors get no gradients; raises where the copy reached a tensor after all."""
    before = [(one.tensor, one.tensor.grad) for one in step.held if one.tensor.is_leaf]
    try:
        yield
    finally:
        reached = [tensor for tensor, gradient in before if tensor.grad is not gradient]
        for tensor, gradient in before:
            tensor.grad = gradient
    if reached:
        raise PlanError("the function reaches its model in a way that a copy of it does not follow: pass the module")


def _kernels(recipe: Recipe) -> Any:
    return AcceleratorKernels() if recipe.device.is_accelerator else contextlib.nullcontext()


def _memory(
    record: StorageLog, saved: set[int], script: Script, standing: Standing, optimizer: Optimizer
) -> StepMemory:
    """The bytes over the events, and the memories at the peak."""
    sizes: dict[int, int] = {}
    alive, peak, at, now, forward = [standing.total], 0, 0, 0, 1
    for number, (key, size, _) in enumerate(script.events()):
        now += size or -sizes[key]
        if size:
            sizes[key] = size
            alive.append(standing.total + now)
            forward += 3 * number < (record.turned or 0)
        if now > peak:
            peak, at = now, number
    gradients = sum(sizes[key] for key in script.left)
    alive.append(standing.total + gradients + optimizer.workspace)
    found, where = _at_peak(record, saved, script, at)
    if alive[-1] > standing.total + peak:
        found = [Alive("gradient", "", gradients, 1), Alive("optimizer's workspace", "", optimizer.workspace, 1)]
        where = f"the step of {optimizer.name}"
    kept = sum(sizes[key] for key in saved)
    return StepMemory(max(alive), where, tuple(alive), forward, gradients, kept, 0, tuple(found), script)


def _at_peak(record: StorageLog, saved: set[int], script: Script, at: int) -> tuple[list[Alive], str]:
    there: dict[int, int] = {}
    last = 0
    for _, (key, size, _) in zip(range(at + 1), script.events(), strict=False):
        if size:
            there[key] = size
            last = key
        else:
            del there[key]
    sums: dict[tuple[str, str], list[int]] = {}
    for key, size in there.items():
        name, module, _ = record.made[key]
        kind = "saved" if key in saved else "gradient" if key in record.staying and name else "temporary"
        kind = kind if name else "gathered, gradients and buffers of collectives"
        entry = sums.setdefault((kind, pattern(module)), [0, 0])
        entry[0] += size
        entry[1] += 1
    rows = [Alive(kind, module, *entry) for (kind, module), entry in sums.items()]
    name, module, is_backward = record.made[last]
    inside = f", in {module}" if module else ""
    where = f"{name or 'a collective'}{inside}, in the {'backward' if is_backward else 'forward'}"
    return sorted(rows, key=lambda one: -one.nbytes), where
