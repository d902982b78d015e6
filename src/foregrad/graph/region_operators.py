"""The operators that stand for eager regions in graphs.

`foregrad::eager_region` calls the user's function with gradients on and keeps the autograd graph that this makes;
`foregrad::eager_region_backward` differentiates that. The first result of the former is the key under which the latter
finds it: a tensor over memory that owns the autograd graph, so that the graph lives as long as the saved tensor does.
The second result is a status, which a decision looks at and the next region is given, so that no region is dropped and
all keep their order. A region runs only once the values that the program branched on before it are those of its graph.

Known weaknesses: what an inner autograd graph keeps in memory is counted by no budget, and goes with the whole of it,
not node by node.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .._torch.dispatch import no_saved_tensors_hooks
from .._torch.hooks import without_tensor_hooks
from .._torch.settings import under_settings
from .._torch.tensors import storage_key
from ..errors import ForegradError, UnsupportedLayoutError, UnsupportedSideEffectError
from .eager_regions import Layout, Ran, Region, differentiated_twice, layout_of, regions, run_region, strides_of

__all__ = ["BACKWARD", "FORWARD", "RegionChangedError", "RegionRaisedError", "inputs_of", "results_of"]


class RegionChangedError(RuntimeError):
    """Raised inside of a graph: what a region gives, or what came before it, is not what the graph is for."""


class RegionRaisedError(Exception):
    """Raised inside of a graph: the user's function raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Kept(bytearray):
    """The memory of a key: it owns the autograd graph of one run, by the edges where it begins and ends."""

    region: Region
    outputs: list[Any]
    inputs: list[torch.Tensor | None]


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


_library = torch.library.Library("foregrad", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
_library.define("eager_region(int region, Tensor[] decided, Tensor[] inputs, SymInt[] sizes) -> Tensor[]", tags=_TAGS)
_library.define(
    "eager_region_backward(int region, Tensor key, Tensor[] gradients, bool[] present, SymInt[] sizes) -> Tensor[]",
    tags=_TAGS,
)
_operators: Any = torch.ops.foregrad
FORWARD = _operators.eager_region.default
BACKWARD = _operators.eager_region_backward.default


def _forward(
    region: int, decided: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    called = regions[region]
    if getattr(called.function, "owner", None) in differentiated_twice:
        raise RegionChangedError(f"whether `{called.name}` is an eager region")
    if any(_differs(value.item(), expected) for value, expected in zip(decided, called.decided, strict=True)):
        raise RegionChangedError("values that the program branched on before an eager region")
    count = len(called.differentiable)
    with under_settings(called.settings), no_saved_tensors_hooks():
        try:
            ran = run_region(called, inputs[:count])
        except ForegradError:
            raise
        except Exception as error:
            raise RegionRaisedError(error) from error
    _check_same(called, ran, sizes)
    return results_of(called, ran)


def results_of(region: Region, ran: Ran) -> list[torch.Tensor]:
    """The results of the operator: key, status, values."""
    kept = _Kept(next(_keys).to_bytes(8, "little"))
    reached = {position for positions in region.reached for position in positions}
    kept.region = region
    kept.outputs = [get_gradient_edge(output) if output.requires_grad else None for output in ran.outputs]
    kept.inputs = [
        tensor if i in reached else None for i, tensor in enumerate([*ran.given, *(leaf() for leaf in region.leaves)])
    ]
    key = torch.frombuffer(kept, dtype=torch.int64)
    _kept[int.from_bytes(kept, "little")] = kept
    return [key, torch.zeros((), dtype=torch.int64), *ran.values()]


def _differs(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return not math.isnan(value)
    return bool(value != expected)


def _check_same(region: Region, ran: Ran, sizes: Sequence[int]) -> None:
    """Raise where a run gave something else than the graph is for."""
    known = [leaf() for leaf in region.leaves]
    same = (
        [layout_of(output) for output in ran.outputs] == list(region.layouts)
        and [size for output in ran.outputs for size in output.shape] == list(sizes)
        and [output.requires_grad for output in ran.outputs] == list(region.requires_grad)
        and _same_rest(ran.rest, region.rest)
        and all(any(leaf is one for one in known) for leaf in ran.leaves)
    )
    if not same:
        raise RegionChangedError(f"what the eager region `{region.name}` returns")


def _same_rest(one: Any, other: Any) -> bool:
    (tree, leaves), (other_tree, other_leaves) = one, other
    if tree != other_tree or len(leaves) != len(other_leaves):
        return False
    return all(a is b or (type(a) is type(b) and a == b) for a, b in zip(leaves, other_leaves, strict=True))


def _backward(
    region: int, key: torch.Tensor, gradients: Sequence[torch.Tensor], present: Sequence[bool], sizes: Sequence[int]
) -> list[torch.Tensor]:
    kept = _kept.get(int(key))
    if kept is None:
        raise UnsupportedSideEffectError(
            "the autograd graph of an eager region is gone: a hook for saved tensors has copied the tensor that holds "
            "it. Call the compiled function outside of `saved_tensors_hooks` and the like."
        )
    called = kept.region
    outputs = [output for output, is_present in zip(kept.outputs, present, strict=True) if is_present]
    wanted: list[Any] = [kept.inputs[i] for i in inputs_of(called, present)]
    with without_tensor_hooks(wanted):
        found = torch.autograd.grad(outputs, wanted, list(gradients), retain_graph=True, allow_unused=True)
    taken = {storage_key(gradient) for gradient in gradients}
    results = []
    for given, leaf in zip(found, wanted, strict=True):
        gradient: torch.Tensor | None = given  # None where nothing leads there in this very run
        result = torch.zeros_like(leaf, memory_format=torch.contiguous_format) if gradient is None else gradient
        if result.layout is not torch.strided:
            raise UnsupportedLayoutError(
                f"the eager region `{called.name}` called at {called.where} gives a gradient of layout {result.layout}."
                " Only strided gradients leave a region: make it dense inside."
            )
        result = result.contiguous()
        results.append(result.clone() if storage_key(result) in taken else result)
        taken.add(storage_key(results[-1]))
    return results


def inputs_of(region: Region, present: Sequence[bool]) -> list[int]:
    """The inputs that get a gradient when those of these results are there."""
    reached = [positions for positions, is_present in zip(region.reached, present, strict=True) if is_present]
    return sorted({position for positions in reached for position in positions})


def _empty(layouts: Sequence[Layout], sizes: Sequence[Any]) -> list[torch.Tensor]:
    rest = list(sizes)
    made = []
    for dtype, device, order in layouts:
        shape, rest = rest[: len(order)], rest[len(order) :]
        made.append(torch.empty_strided(shape, strides_of(shape, order), dtype=dtype, device=device))
    return made


def _forward_fake(region: int, decided: Any, inputs: Any, sizes: Any) -> list[torch.Tensor]:
    head = [torch.empty((1,), dtype=torch.int64), torch.empty((), dtype=torch.int64)]
    return [*head, *_empty(regions[region].layouts, sizes)]


def _backward_fake(region: int, key: Any, gradients: Any, present: Any, sizes: Any) -> list[torch.Tensor]:
    called = regions[region]
    return _empty([called.input_layouts[i] for i in inputs_of(called, present)], sizes)


for _name, _kernel, _fake in (
    ("eager_region", _forward, _forward_fake),
    ("eager_region_backward", _backward, _backward_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foregrad::{_name}", _fake, lib=_library)
for _operator in (FORWARD, BACKWARD):
    torch.fx.node.has_side_effect(_operator)
