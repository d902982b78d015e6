"""Saved tensors that a node frees after a backward of some of its outputs, or for some of its inputs.

To eager a function is many nodes, and each gives its tensors up when it has run: a later backward through nodes that
have not run is fine, a backward through a node that has is an error. A compiled function is one node. It keeps the
tensors that later parts may read, and records the parts that ran, as bits: one for each kind of eager's nodes that keep
tensors (`Signature.saving`), one for each of the backward graph's paths to a saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import ends_of
from .._torch.histories import was_freed
from .._torch.instead import rewinding
from .._torch.tensors import version_of
from ..graph.joint import Partitioned
from ..graph.meta import TensorSpec, spec_of
from ..locks import cached_property
from .compiled import NeedsInputGrad

TRAILS = "foregrad: histories of inputs"  # in a node's metadata: by position among its inputs

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


def parts_run(ctx: object) -> int | None:
    """The parts of the node's backward that ran and must not run again; None: no part, -1: all parts."""
    parts: int | None = getattr(ctx, "parts", None)
    return -1 if parts is None and was_freed(ctx) else parts


class Release:
    """The parts of one compiled function's backward."""

    def __init__(self, partitioned: Partitioned, histories: Sequence[int]) -> None:
        """`histories`: the inputs with histories that a derivative may need, in the node's order."""
        self.partitioned, self.saving = partitioned, partitioned.joint.signature.gradients.saving
        self.histories = histories
        self._known: dict[object, int] = {}

    def check(self, ctx: object, mask: tuple[bool, ...], needs_input_grad: NeedsInputGrad) -> None:
        """Raise `RuntimeError` if one of eager's nodes would run a second time."""
        if self.bits(mask, needs_input_grad) & (parts_run(ctx) or 0) & self.of_eager:
            raise RuntimeError(_TWICE)

    def after(self, ctx: Any, mask: tuple[bool, ...], needs_input_grad: NeedsInputGrad, saved: Sequence[Any]) -> None:
        """Free the saved tensors that no later part needs; `saved`: the tensors at hand, None for absent tensors."""
        ran = parts_run(ctx) or 0
        if ran == -1:
            return
        parts = self.bits(mask, needs_input_grad)
        parts = ran | parts if parts & self.of_eager else ran
        gone = self.gone(parts)
        for position, at in self._inputs_saved:
            if at in gone and saved[at] is not None and not saved[at].is_leaf:
                ctx.metadata.setdefault(TRAILS, {})[position] = trail_of(saved[at])
        if hasattr(ctx, "release"):  # foregrad's own node in C++
            ctx.release(parts, parts != 0, gone)
        else:
            _hold(ctx, saved, gone)
            ctx.parts = parts

    def gone(self, parts: int) -> list[int]:
        """The saved tensors, by position, that nothing needs after these parts have run."""
        return [i for i, readers in enumerate(self.readers) if readers and readers & ~parts == 0]

    def bits(self, mask: tuple[bool, ...], needs_input_grad: NeedsInputGrad) -> int:
        """The parts that run for these tangents and gradients."""
        bits = self._known.get((mask, needs_input_grad))
        if bits is None:
            bits = self._known[mask, needs_input_grad] = self._bits(mask, needs_input_grad)
        return bits

    def _bits(self, mask: tuple[bool, ...], needs_input_grad: NeedsInputGrad) -> int:
        outputs = _mask(i for i, is_present in enumerate(mask) if is_present)
        inputs = 0 if needs_input_grad is None else _mask(needs_input_grad)
        ways = enumerate((*self.saving, *self._tensors_by_way))
        # A backward for all inputs also runs paths that lead to no input.
        return _mask(n for n, (a, b) in ways if a & outputs and (needs_input_grad is None or b & inputs))

    @cached_property
    def _inputs_saved(self) -> list[tuple[int, int]]:
        """(position among the node's inputs, position among the saved tensors)."""
        nodes = self.partitioned.saved_nodes
        tensors = [i for i, node in enumerate(nodes) if isinstance(spec_of(node), TensorSpec)]
        saved = saved_inputs(self.partitioned)
        return [(p, tensors.index(saved[i])) for p, i in enumerate(self.histories) if i in saved]

    @cached_property
    def of_eager(self) -> int:
        """The bits of eager's nodes."""
        return (1 << len(self.saving)) - 1

    @cached_property
    def all(self) -> int:
        return (1 << len(self.saving) + len(self._tensors_by_way)) - 1

    @cached_property
    def readers(self) -> list[int]:
        """For each saved tensor the bits of its readers."""
        ways = [*enumerate(self._tensors_by_way.values(), len(self.saving))]
        count = len(self.partitioned.saved_tensors)
        return [_mask(n for n, tensors in ways if tensors >> i & 1) for i in range(count)]

    @cached_property
    def _tensors_by_way(self) -> dict[tuple[int, int], int]:
        """(tangents, gradients) -> the saved tensors read on the way from the tangents to the gradients."""
        return _tensors_by_way(self.partitioned)


def saved_inputs(partitioned: Partitioned) -> dict[int, int]:
    """Inputs that are residuals themselves: their positions among the saved values."""
    written = {update.input for update in partitioned.joint.signature.updates}
    number = {node: i for i, node in enumerate(ends_of(partitioned.forward)[0])}
    saved = partitioned.saved_nodes
    return {number[n]: at for at, n in enumerate(saved) if n in number and number[n] not in written}


def trail_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of equal shape and history, without the memory."""
    with torch.enable_grad():
        trail: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)  # to autograd, no view
    trail.data = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return trail


def _mask(positions: Iterable[int]) -> int:
    mask = 0
    for position in positions:
        mask |= 1 << position
    return mask


def _tensors_by_way(partitioned: Partitioned) -> dict[tuple[int, int], int]:
    nodes = list(partitioned.backward.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    num_saved = len(partitioned.saved_nodes)
    tangents = {node: 1 << i for i, node in enumerate(placeholders[num_saved:])}
    tensors = [node for node in placeholders[:num_saved] if isinstance(spec_of(node), TensorSpec)]
    saved = {node: 1 << i for i, node in enumerate(tensors)}
    comes_from: dict[fx.Node, int] = {}  # the tangents that a value depends on
    needs: dict[fx.Node, int] = {}  # the saved tensors that a value is computed from without a tangent
    for node in nodes[:-1]:
        comes_from[node], needs[node] = tangents.get(node, 0), saved.get(node, 0)
        for operand in node.all_input_nodes:
            comes_from[node] |= comes_from[operand]
            if not comes_from[operand]:
                needs[node] |= needs[operand]
        if (before := rewinding(node)) is not None:
            needs[node] |= needs[before]
    leads_to: dict[fx.Node, int] = dict.fromkeys(nodes, 0)  # the gradients that are computed from a value
    tensors_by_way: dict[tuple[int, int], int] = {}
    signature = partitioned.joint.signature
    inside = {len(signature.inputs) + i: one.input for one in signature.backward.wrapped for i in one.outputs}
    for index, gradient in enumerate(nodes[-1].args[0]):
        if isinstance(gradient, fx.Node):
            bit = 1 << inside.get(index, index)
            leads_to[gradient] |= bit
            if not comes_from[gradient] and needs[gradient]:
                tensors_by_way[-1, bit] = needs[gradient]
    for node in reversed(nodes[:-1]):
        for operand in node.all_input_nodes:
            leads_to[operand] |= leads_to[node]
        if comes_from[node] and needs[node]:
            way = comes_from[node], leads_to[node]
            tensors_by_way[way] = tensors_by_way.get(way, 0) | needs[node]
    return tensors_by_way


def _hold(ctx: Any, saved: Sequence[Any], gone: list[int]) -> None:
    """Keep saved tensors of a node in Python, since autograd drops all after the node has run."""
    before = getattr(ctx, "kept", None)
    kept: list[Any] = []
    for position, tensor in enumerate(saved):
        if tensor is None or position in gone:
            kept.append(None)
        elif before is not None:
            kept.append(before[position])
        else:
            # Its history, if that is this node, would keep the node alive for ever.
            own = tensor.detach() if tensor.grad_fn is ctx else tensor
            kept.append((own, version_of(own)))
    ctx.kept = kept


def held(ctx: Any, read: Sequence[bool]) -> list[Any]:
    """The tensors that `_hold` kept, if they were not written to since."""
    tensors = []
    for item, is_read in zip(ctx.kept, read, strict=True):
        if item is not None and version_of(item[0]) == item[1]:
            tensors.append(item[0])
        elif is_read and item is not None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{item[0].type()} {list(item[0].shape)}] is at version {version_of(item[0])}; expected "
                f"version {item[1]} instead."
            )
        elif is_read:
            raise RuntimeError(_TWICE)
        else:
            tensors.append(None)
    return tensors


# -------------------------------------------------------------------- what is kept
# Saved tensors of a node, of which a backward needs only some; saved outputs of a node in Python.
#
# Autograd drops the saved tensors of a node in Python after any part of the node has run. A saved output that outlives
# the node's run has no history, since its history is the node itself. A derivative gets a history that runs the node's
# backward (`as_output`).


def let_go(node: Any) -> None:
    """Free all saved tensors of the node, after its whole backward has run."""
    node.maybe_clear_saved_tensors()
    if hasattr(node, "kept"):
        node.kept, node.parts = [None] * len(node.kept), -1


class _Output(torch.autograd.Function):
    """An output of a node, without an edge: by an edge the node would keep itself alive."""

    @staticmethod
    def forward(ctx: Any, node: object, position: int, held: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.node, ctx.position = node, position
        ctx.set_materialize_grads(False)
        return held.pop().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        node = ctx.node
        if gradient is None:
            return None, None, None, *[None] * len(node.next_functions)
        tangents = [None] * len(node._input_metadata)
        tangents[ctx.position] = gradient
        _, *gradients = node._forward_cls.backward(node, *tangents)
        return None, None, None, *gradients


def as_output(node: object, value: torch.Tensor, position: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value with the history of the node's output at `position`; `inputs` have the histories of the node's."""
    output: torch.Tensor = _Output.apply(node, position, [value], *inputs)
    for hook in getattr(node, "hooks_of", {}).get(position, {}).values():
        output.register_hook(hook)
    return output


def saved_in_part(ctx: Any, read: Sequence[bool]) -> Sequence[Any]:
    """The node's saved tensors; None for a tensor that is not read and was written to since.

    In eager a tensor of a foreign part belongs to a node that does not run.
    """
    if not read:
        return ()
    parts = parts_run(ctx)
    if parts is not None and hasattr(ctx, "kept"):
        return held(ctx, read)
    try:
        saved: tuple[object, ...] = ctx.saved_tensors
        return saved
    except RuntimeError:
        if all(read) and parts is None:
            raise
        unpack = _unpack(ctx)
        if unpack is None:
            raise
        tensors = []
        for position, is_read in enumerate(read):
            try:
                tensors.append(unpack(position))
            except RuntimeError:
                if is_read and parts is not None:
                    raise
                if is_read:
                    break
                tensors.append(None)
        else:
            return tensors
        raise


def _unpack(ctx: Any) -> Callable[[int], object] | None:
    """A function that gives one saved tensor of a node, by position; None for a Python node on torch 2.11."""
    if hasattr(ctx, "saved_tensor"):  # foregrad's own node in C++
        unpack: Callable[[int], object] = ctx.saved_tensor
        return unpack
    try:
        saved = ctx._raw_saved_tensors
    except RuntimeError:  # all saved tensors were freed
        return lambda position: ctx.saved_tensors[position]
    return (lambda position: saved[position].unpack()) if all(hasattr(s, "unpack") for s in saved) else None
