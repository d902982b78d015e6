"""A backward cut into stages, each with the gradients of some inputs: see `runtime/stages.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from .._torch.graphs import piece

_KEY = "foregrad stage"


def stage_of(module: fx.GraphModule) -> tuple[int, ...] | None:
    """The inputs that a stage's first results are gradients of; None if the graph is no stage."""
    inputs: tuple[int, ...] | None = module.meta.get(_KEY)
    return inputs


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """`module`: (values handed over, tangents) -> (gradients of `inputs`, values that later stages read).

    `takes`: the names of its inputs; `hands`: the names of its results besides the gradients.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    takes: tuple[str, ...]
    hands: tuple[str, ...]


def cut_in_stages(backward: fx.GraphModule, stages: Sequence[tuple[int, ...]]) -> list[Stage]:
    """The stages of a backward graph, each cut after its last gradient."""
    nodes = [node for node in backward.graph.nodes if node.op not in ("output", "get_attr")]
    position = {node: at for at, node in enumerate(nodes)}
    gradients = next(iter(reversed(backward.graph.nodes))).args[0]
    ends = [0]
    for stage in stages[:-1]:
        ends.append(max(ends[-1], *(position[gradients[i]] + 1 for i in stage)))
    ends.append(len(nodes))
    later: list[set[fx.Node]] = [set()]  # the nodes read after each stage, the last first
    for stage, start, end in reversed(list(zip(stages, ends, ends[1:], strict=False))):
        needed = {n for node in nodes[start:end] for n in node.all_input_nodes} | {gradients[i] for i in stage}
        later.insert(0, later[0] | needed)
    cut = []
    for number, (stage, start, end) in enumerate(zip(stages, ends, ends[1:], strict=False)):
        own = [node for node in nodes[start:end] if node.op != "placeholder"]
        cut.append(_stage(backward, own, [gradients[i] for i in stage], later[number + 1], stage))
    return cut


def _stage(
    backward: fx.GraphModule, own: list[fx.Node], gradients: list[fx.Node], later: set[fx.Node], inputs: tuple[int, ...]
) -> Stage:
    inside = set(own)
    needed = dict.fromkeys(n for node in own for n in node.all_input_nodes if n.op != "get_attr")
    needed |= dict.fromkeys(gradients)
    operands = sorted((n for n in needed if n not in inside), key=lambda n: n.name.startswith("tangents_"))
    hands = [node for node in own if node in later]
    module = piece(backward, operands, own, [*gradients, *hands], "Stage")
    module.meta[_KEY] = inputs
    return Stage(module, inputs, tuple(n.name for n in operands), tuple(n.name for n in hands))
