"""What eager PyTorch allocates in a training step, in its order: recorded on `meta`, where nothing has memory.

A model runs forward and backward with PyTorch's own checkpointing, DTensor and Python; each storage is an event when an
operator makes it, and another when its last reference goes. What `fully_shard` allocates beside is added where its hooks
run, by the rules of `foregrad.planning.sharded`: a model on `meta` can't be sharded by itself. The allocator's rules then
say what is reserved, as for a plan.
"""

from __future__ import annotations

import contextlib
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from foregrad.planning.replay import Script
from foregrad.planning.sharded import COMPUTE, GATHER, REDUCE

_ALIASES = ("wait_tensor", "_wrap_tensor_autograd", "aten.split.")  # new storages on `meta` alone


class Recording(TorchDispatchMode):
    """Records the storages that operators make, but for those in `standing`."""

    def __init__(self, standing: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.numbers = array("q")
        self.staying: set[int] = set()
        self._alive: dict[int, int] = {_storage(tensor): 0 for tensor in standing}
        self._count = self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self._paused and not any(name in str(func) for name in _ALIASES):
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        place, storage = _storage(tensor), tensor.untyped_storage()
        if place not in self._alive and storage.nbytes():
            self._alive[place] = key = self.take(storage.nbytes())
            weakref.finalize(storage, self._gone, place, key)

    def _gone(self, place: int, key: int) -> None:
        if self._alive.get(place) == key:
            del self._alive[place]
            self.give(key)

    def take(self, size: int, stream: int = COMPUTE, *, stays: bool = False) -> int:
        """A memory of the trainer's own; gives its number."""
        self._count += 1
        self.numbers.extend((self._count, size, stream))
        if stays:
            self.staying.add(self._count)
        return self._count

    def give(self, *keys: int) -> None:
        for key in keys:
            self.numbers.extend((key, 0, 0))

    @contextlib.contextmanager
    def without_fakes(self) -> Iterator[None]:
        """Context: the operators that DTensor runs on fakes, to know shapes, are not recorded."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        names = [name for name in dir(ShardingPropagator) if "propagate" in name]
        before = {name: getattr(ShardingPropagator, name) for name in names}
        for name, method in before.items():
            setattr(ShardingPropagator, name, self._pausing(method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(ShardingPropagator, name, method)

    def _pausing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            self._paused += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._paused -= 1

        return paused


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Shards:
    """What `fully_shard` allocates for a module: `whole` bytes gathered, `parts` of each parameter, gradients reduced in
    single precision by so many ranks.
    """

    def __init__(self, record: Recording, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        self.record, self.parameters, self.ranks = record, parameters, ranks
        local = [getattr(one, "_local_tensor", one) for one in parameters]
        self.parts = [one.numel() * one.element_size() for one in local]
        self.elements = sum(one.numel() for one in local)
        self.buffer = 0
        self.held: list[int] = []

    def gather(self) -> None:
        """Into a buffer, on the stream of gathers."""
        self.buffer = self.record.take(sum(self.parts), GATHER)

    def copy_out(self) -> None:
        self.held = [self.record.take(size) for size in self.parts]

    def let_go(self) -> None:
        self.record.give(*self.held)
        self.held = []

    def reduce(self) -> int:
        """Gradients into shards; gives the memory that is there until the next reduction."""
        buffer = self.record.take(4 * self.elements)
        for one in self.parameters:
            one.grad = None
        self.record.take(-(-4 * self.elements // self.ranks), REDUCE, stays=True)
        return buffer


class ShardedRun:
    """One step of a model of layers, sharded by its layers and the rest."""

    def __init__(self, record: Recording, model: Any, ranks: int) -> None:
        self.record = record
        inside = {id(one) for one in model.layers.parameters()}
        outside = [one for one in model.parameters() if id(one) not in inside]
        self.root = _Shards(record, outside, ranks)
        self.units = [_Shards(record, [*layer.parameters()], ranks) for layer in model.layers]
        self.reducing: int | None = None

    def start(self) -> None:
        self.root.gather()
        self.root.copy_out()

    def before(self, at: int, x: torch.Tensor) -> torch.Tensor:
        """Before a layer's forward. Its backward ends when the gradient of its input is there."""
        self.units[at].gather()
        self.units[at].copy_out()
        self.record.give((self.units[at - 1] if at else self.root).buffer)
        x.register_hook(lambda _: self._backward_ended(at))
        return x

    def after(self, at: int, x: torch.Tensor) -> torch.Tensor:
        """After a layer's forward; parameters of the last stay."""
        if at < len(self.units) - 1:
            self.units[at].let_go()
        else:
            self.record.give(self.units[at].buffer)
        x.register_hook(lambda _: self._backward_starts(at))
        return x

    def _backward_starts(self, at: int) -> None:
        unit = self.units[at]
        if not unit.held:
            unit.copy_out()
            self.record.give(unit.buffer)
        if at:
            self.units[at - 1].gather()

    def _backward_ended(self, at: int) -> None:
        self.units[at].let_go()
        self._reduce(self.units[at])

    def _reduce(self, unit: _Shards) -> None:
        buffer = unit.reduce()
        if self.reducing is not None:
            self.record.give(self.reducing)
        self.reducing = buffer

    def end(self) -> Script:
        self.root.let_go()
        self._reduce(self.root)
        if self.reducing is not None:
            self.record.give(self.reducing)
        return Script(self.record.numbers, tuple(sorted(self.record.staying)))


def recorded(model: Any, inputs: tuple[torch.Tensor, ...], ranks: int, layer: Callable[..., torch.Tensor]) -> Script:
    """The allocations of a step of `benchmarks.plan.Language`, each layer called by `layer(module, x, turns)`."""
    tokens, labels, turns = inputs
    local = [getattr(one, "_local_tensor", one) for one in model.parameters()]
    record = Recording([*local, *inputs])
    run = ShardedRun(record, model, ranks)
    with record.without_fakes(), record:
        run.start()
        x = model.embedding(tokens)
        for at, module in enumerate(model.layers):
            x = run.after(at, layer(module, run.before(at, x), turns))
        logits = model.head(model.norm(x))
        loss = model.loss(logits, labels)
        del x, logits
        loss.backward()
        del loss
    return run.end()
