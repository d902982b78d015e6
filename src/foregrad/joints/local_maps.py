"""`local_map` as one operator of a joint graph, and one of its backward, for tools that shard the graph around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from .._torch.fakes import new_fake
from .._torch.patches import hooks_off
from .._torch.stand_ins import is_stand_in
from ..descriptors import flat_outputs
from ..errors import UnsupportedOpError
from ..graph.meta import TensorSpec
from ..partitioners.default import choose_default, divided
from ..partitioners.index import JointIndex
from ..tracing.aspect import Aspect, Row, aspect
from ._torch import LOCAL_MAP, fake_results, local_arguments, operator_of, plain_python, stays_one_operator
from .doors import aot_export_joint_with_descriptors
from .layout import is_tensor


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
        with self.quiet():
            parts = halves(gm, [self._fake(value) for value in given], self.recorder.fake_mode)
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
        ctx.mark_non_differentiable(
            *(r for i, r in enumerate(results[:count]) if is_tensor(r) and i not in ctx.differentiable)
        )
        ctx.save_for_backward(*results[count:])
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [gradients[i].contiguous() for i in ctx.differentiable]
        return None, None, *ctx.maps.recorded(ctx.backward_graph, (*ctx.saved_tensors, *given))


def halves(
    gm: fx.GraphModule, fakes: Sequence[Any], mode: Any
) -> tuple[fx.GraphModule, fx.GraphModule | None, int, Sequence[int]]:
    """(graph of the forward, graph of the backward, how many results of the first are not for the second, the results
    that carry gradients). Without gradients there is no backward.
    """
    kwargs = gm.meta["local_map_kwargs"]
    if kwargs.get("in_grad_placements") is not None:
        raise _unsupported("has in_grad_placements")
    with mode:
        local = local_arguments(gm, fakes)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, _Separate(gm), local)
    layout = joint.captured.layout
    count = len(layout.forward)
    if any(entry.leaf < 0 for entry in layout.forward):
        raise _unsupported("writes to its arguments")
    if joint.captured.joint.signature.is_inference:
        return _marked(joint.graph_module, kwargs, 0, "is_forward"), None, count, ()
    index = JointIndex(joint.graph_module, count)
    kept = [tensor for node in choose_default(index) for tensor in _tensors_behind(node)]
    forward, backward = divided(index, list(dict.fromkeys(kept)))
    saved = flat_outputs(next(iter(reversed(forward.graph.nodes))))[count:]
    signature = joint.captured.joint.signature
    carry = [layout.position(signature.gradients.differentiable[position]) for position, _ in layout.tangents]
    placed = {
        "in_placements": tuple(kwargs["out_placements"][i] for i in carry),
        "out_placements": kwargs["in_placements"],
    }
    backward = _marked(backward, {**kwargs, **placed}, len(saved), "is_backward")
    return _marked(forward, kwargs, len(saved), "is_forward"), backward, count, carry


def _tensors_behind(node: fx.Node) -> Iterator[fx.Node]:
    """A node, or the tensors that a symbolic size is read off: the operator returns tensors alone."""
    if is_tensor(node.meta["val"]):
        yield node
    else:
        for operand in node.all_input_nodes:
            yield from _tensors_behind(operand)


class _Separate(torch.nn.Module):
    """A graph whose results share no memory and are contiguous, as gradients of them are."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        seen = list(args)
        results: list[Any] = []
        for result in self.gm(*args):
            if result is None:
                results.append(None)
                continue
            if not is_tensor(result):
                raise _unsupported("gives numbers")
            fresh = result._base is None and result.is_contiguous() and all(result is not value for value in seen)
            seen.append(result)
            results.append(result if fresh else result.clone(memory_format=torch.contiguous_format))
        return tuple(results)


def _marked(graph: fx.GraphModule, kwargs: Mapping[str, Any], saved: int, tag: str) -> fx.GraphModule:
    """A graph with the attributes that the operator reads."""
    backward = tag == "is_backward"
    graph.meta.update(local_map_kwargs=dict(kwargs), num_activations=saved, is_backward=backward)
    for node in graph.graph.nodes:
        node.meta["partitioner_tag"] = tag
    return graph


def _unsupported(does: str) -> UnsupportedOpError:
    return UnsupportedOpError(f"a function of `local_map` {does}: capture outside `defer_inlining`")
