"""`keep_inference_input_mutations`: a compiler gets a graph that writes to its inputs, with `copy_`, and returns no new
values for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .._torch.graph_tools import facts_at_hand
from .._torch.graphs import copied, make_graph_module
from ..graph.role import GraphRole, role_of
from ..identity import attributed
from ..passes.aliasing import memory_of, results_of
from ..passes.mutations import copied_inside
from .boxed import as_boxed

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def writing_inside(compiler: Compiler) -> Compiler:
    """`compiler` for graphs without gradients; these write their updates themselves where they may."""

    @functools.wraps(compiler)
    def compile_graph(gm: fx.GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        role = role_of(gm)
        updates = _possible(gm, role)
        if not updates:
            return compiler(gm, example_inputs)
        graph = copied(gm.graph)
        copied_inside(graph, updates)
        output, written = graph.output_node(), {place for _, place in updates}
        kept = [i for i in range(len(results_of(gm))) if i not in written]
        returned: Any = output.args[0]
        output.args = (tuple(returned[i] for i in kept),)
        _renumber(output.meta, kept)
        module = make_graph_module(gm, graph)
        visible = tuple(kept.index(i) for i in role.visible_outputs if i not in written)
        GraphRole(role.phase, role.static_inputs, visible).put_on(module)
        facts = facts_at_hand()
        if hasattr(facts, "write_inside"):
            facts.write_inside([number for number, _ in updates])
        run = as_boxed(compiler(module, example_inputs))

        def forward(args: list[object]) -> list[Any]:
            results: list[object] = [None] * (len(kept) + len(written))
            for place, value in zip(kept, run(args), strict=True):
                results[place] = value
            return results

        return attributed(forward, _boxed_call=True, returns_list=True, updated=updates)

    return compile_graph


def _possible(gm: fx.GraphModule, role: GraphRole) -> tuple[tuple[int, int], ...]:
    """The updates after which no result, and no later update, looks at the old elements."""
    results, inputs = results_of(gm), [node for node in gm.graph.nodes if node.op == "placeholder"]
    read = {memory_of(result)[0] for result in results if isinstance(result, fx.Node)}
    return tuple(
        (number, place)
        for number, place in role.updates
        if isinstance(results[place], fx.Node) and inputs[number] not in read
    )


def _renumber(meta: dict[str, Any], kept: Sequence[int]) -> None:
    """The output node's metadata of its results, for the results that are left."""
    if "user_visible_output_idxs" in meta:
        visible = meta["user_visible_output_idxs"]
        meta["user_visible_output_idxs"] = [new for new, old in enumerate(kept) if old in visible]
        meta["output_stack_traces"] = [meta["output_stack_traces"][old] for old in kept]
