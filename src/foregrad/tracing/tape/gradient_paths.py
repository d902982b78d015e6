"""The paths of autograd nodes from outputs to inputs.

When only some outputs are differentiated, eager gives None for an input without a leading output, and a tensor (perhaps
of zeros) for every other input: the joint graph alone can't tell the two apart.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch.histories import CHOOSING, GIVING_ZEROS, keeps_tensors, nodes_behind
from ..._torch.hooks import gradients_cut
from ..._torch.tensors import history_of
from ...graph.signature import GradientPaths
from ...identity import ById, IdSet


@contextlib.contextmanager
def cut_at(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context: gradients that arrive at operators' results among the tensors go no further."""
    handles = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            without = functools.partial(lambda at, grads: (*grads[:at], None, *grads[at + 1 :]), tensor.output_nr)
            handles.append(tensor.grad_fn.register_prehook(without))
    try:
        with gradients_cut():
            yield
    finally:
        for handle in handles:
            handle.remove()


def reached_from(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor | None]) -> list[GradientPaths]:
    """How outputs lead to each leaf. One walk over the autograd graph; a leaf may be a result where it is cut."""
    roots: list[Any] = [output.grad_fn for output in outputs]
    order = _consumers_first(outputs)
    masks: dict[object, int] = dict.fromkeys(order, 0)
    through_custom: dict[object, int] = dict.fromkeys(order, 0)
    for position, root in enumerate(roots):
        masks[root] |= 1 << position
    of_leaf = ById((leaf, (0, 0)) for leaf in leaves if leaf is not None)
    histories = [(leaf, history_of(leaf)) for leaf in leaves if leaf is not None]
    cuts = {(history, leaf.output_nr): leaf for leaf, history in histories if history is not None}
    chooses = any(output.output_nr and root.name() in CHOOSING for output, root in zip(outputs, roots, strict=True))
    for node in order:
        mask, custom = masks[node], through_custom[node]
        name = node.name()
        if isinstance(node, torch.autograd.function.BackwardCFunction) or name in GIVING_ZEROS or _is_empty(node, name):
            custom = mask
        for following, number in node.next_functions:
            chooses |= bool(number) and following.name() in CHOOSING
            cut = cuts.get((following, number))
            if cut is not None:
                all_of_leaf, custom_of_leaf = of_leaf[cut]
                of_leaf[cut] = all_of_leaf | mask, custom_of_leaf | custom
            elif following is not None:
                masks[following] |= mask
                through_custom[following] |= custom
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf in of_leaf:
            all_of_leaf, custom_of_leaf = of_leaf[leaf]
            of_leaf[leaf] = all_of_leaf | mask, custom_of_leaf | custom
    both = [(0, 0) if leaf is None else of_leaf[leaf] for leaf in leaves]
    return [GradientPaths(_positions(a, len(roots)), _positions(b, len(roots)), chooses) for a, b in both]


def _is_empty(node: Any, name: str) -> bool:
    """Whether the node is of a view by strides without elements: its gradient is always zeros."""
    if name != "AsStridedBackward0":
        return False
    return any(type(size) is int and size == 0 for size in node._input_metadata[0].shape)


def saving_nodes(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor | None]) -> tuple[tuple[int, int], ...]:
    """Of the autograd nodes that keep tensors: the outputs that lead there, and the leaves that they lead to, as bits.

    Where all run whenever one does, there is one entry for them; where none keeps any, no entry.
    """
    sinks = ById((leaf, 1 << i) for i, leaf in enumerate(leaves) if leaf is not None)
    if len(outputs) < 2 and len(sinks) < 2:
        return ((1, -1),) if any(map(keeps_tensors, nodes_behind(outputs))) else ()
    histories = [(leaf, history_of(leaf)) for leaf in leaves if leaf is not None]
    cuts = {(history, leaf.output_nr): sinks[leaf] for leaf, history in histories if history is not None}
    order = _consumers_first(outputs)
    edges = [node.next_functions for node in order]
    is_simple = len(outputs) == 1 and not cuts  # one output leads to all nodes
    masks: dict[object, int] = dict.fromkeys(order, int(is_simple))
    if not is_simple:
        for position, output in enumerate(outputs):
            masks[history_of(output)] |= 1 << position
        for node, following in zip(order, edges, strict=True):
            mask = masks[node]
            for edge in following:
                if edge[0] is not None and edge not in cuts:
                    masks[edge[0]] |= mask
    reached: dict[object, int] = {}
    found: dict[tuple[int, int], None] = {}
    for node, following in zip(reversed(order), reversed(edges), strict=True):
        leads_to = 0 if following else sinks.get(getattr(node, "variable", None), 0)
        for edge in following:
            if edge[0] is not None:
                leads_to |= (cuts.get(edge) if cuts else None) or reached[edge[0]]
        reached[node] = leads_to
        key = masks[node], leads_to
        if key not in found and keeps_tensors(node):
            found[key] = None
    return tuple(found)


Passed = tuple[tuple[int, tuple[int, ...]], ...]


def passed_through(
    outputs: Sequence[torch.Tensor], aliases: Sequence[tuple[int, torch.Tensor]] = ()
) -> tuple[Passed, Passed]:
    """(position of an interior output, positions of the outputs computed from it), and likewise for `aliases`: tensors
    with a number in place of the position.
    """
    aliases = [(i, tensor) for i, tensor in aliases if tensor.requires_grad and history_of(tensor) is not None]
    if len(outputs) + len(aliases) < 2:
        return (), ()
    targets = [*outputs, *(tensor for _, tensor in aliases)]
    edges = [(history_of(tensor), tensor.output_nr) for tensor in targets]
    after = dict.fromkeys(edges, 0)  # outputs with gradients that arrive there
    roots: list[object] = [output.grad_fn for output in outputs]
    order = _consumers_first(outputs)
    masks: dict[object, int] = dict.fromkeys(order, 0)
    for position, root in enumerate(roots):
        masks[root] |= 1 << position
    for node in order:
        mask = masks[node]
        for edge in node.next_functions:
            if edge[0] is not None:
                masks[edge[0]] |= mask
                if edge in after:
                    after[edge] |= mask
    found = [tuple(sorted(_positions(after[edge], len(outputs)))) for edge in edges]
    numbers = [*range(len(outputs)), *(i for i, _ in aliases)]
    passed = list(zip(numbers, found, strict=True))
    of_outputs, of_aliases = passed[: len(outputs)], passed[len(outputs) :]
    return tuple(p for p in of_outputs if p[1]), tuple(p for p in of_aliases if p[1])


def other_leaves(outputs: Sequence[torch.Tensor], known: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The leaves that gradients of `outputs` reach, besides the known leaves."""
    leaves = [getattr(node, "variable", None) for node in _consumers_first(outputs)]
    apart = IdSet(known)
    return [leaf for leaf in leaves if leaf is not None and leaf not in apart]


def _positions(mask: int, count: int) -> frozenset[int]:
    return frozenset(i for i in range(count) if mask >> i & 1)


def _consumers_first(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """The autograd nodes behind outputs, each before the nodes that it passes gradients on to."""
    order: list[object] = []
    seen: set[object] = {None}
    stack: list[tuple[Any, bool]] = [(history_of(output), False) for output in outputs]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((following, False) for following, _ in node.next_functions)
    order.reverse()
    return order
