"""`local_map` as one operator of a joint graph, and one of its backward, for tools that shard the graph around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from .._torch.fakes import new_fake
from .._torch.local_map import LOCAL_MAP, fake_results, halves, operator_of, plain_python, stays_one_operator
from .._torch.patches import hooks_off
from .._torch.stand_ins import is_stand_in
from ..graph.meta import TensorSpec
from ..tracing.aspect import Aspect, Row, aspect


@aspect
class LocalMaps(Aspect):
    """Records calls of the operator."""

    def __init__(self, host: Any, recorder: Any) -> None:
        self.recorder = recorder

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not stays_one_operator():
            return function(*args, **kwargs)
        gm, *given = args
        given = [self._stand_in(value) for value in given]
        with self.quiet(), self.recorder.fake_mode:
            parts = halves(gm, [self._fake(value) for value in given])
        return _LocalMap.apply(self, parts, *given)

    functions: ClassVar[Mapping[Any, Row]] = {LOCAL_MAP: call}

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Context: what runs is no part of the program."""
        host = self.recorder.host
        host.pause()
        try:
            with plain_python(), hooks_off():
                yield
        finally:
            host.go_on()

    def recorded(self, gm: fx.GraphModule, values: Sequence[Any]) -> Sequence[Any]:
        """The results of the operator on a graph, as an entry of the tape."""
        recorder = self.recorder
        entry = recorder.entry(operator_of(gm), recorder.to_entries(tuple(values)), {}, is_random=False)
        recorder.tape.meta[entry] = {"local_map_kwargs": gm.meta["local_map_kwargs"]}
        with self.quiet(), torch.no_grad():
            fakes = fake_results(gm, [self._fake(value) for value in values], recorder.fake_mode)
        entry.spec = tuple(TensorSpec.of(fake) if isinstance(fake, torch.Tensor) else None for fake in fakes)
        found: Sequence[Any] = recorder.bind_results(entry, recorder.fakes_like(entry.spec))
        return found

    def _stand_in(self, value: Any) -> Any:
        return self.recorder.adopt(value) if isinstance(value, torch.Tensor) and not is_stand_in(value) else value

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        spec = TensorSpec.of(value)
        fake = new_fake(self.recorder.fake_mode, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        return fake.requires_grad_(value.requires_grad)


class _LocalMap(torch.autograd.Function):
    """Links the results to the arguments."""

    @staticmethod
    def forward(ctx: Any, maps: LocalMaps, parts: Any, *given: Any) -> Any:
        forward, ctx.backward_graph, count, ctx.differentiable = parts
        ctx.maps = maps
        results = maps.recorded(forward, given)
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results[:count]) if i not in ctx.differentiable))
        ctx.save_for_backward(*results[count:])
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [gradients[i].contiguous() for i in ctx.differentiable]
        return None, None, *ctx.maps.recorded(ctx.backward_graph, (*ctx.saved_tensors, *given))
