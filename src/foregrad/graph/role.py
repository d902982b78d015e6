"""The role of a graph that is passed to a compiler: `role_of(gm)`.

A compiler is called as `(graph module, example inputs)`, as PyTorch's are. Further facts (outputs that the user sees,
inputs that are parameters) are in `gm.meta["foregrad"]`, read by `role_of`.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from ..annexes import given

_KEY = "foregrad"
PREPARED = "foregrad prepared"  # in the `meta` of a graph of a backend's `prepare_joint`, or derived from such a graph

STAYS = "foregrad stays"  # in the `meta` of a graph that nobody changes: it may be compiled later

REGION = "foregrad region"  # in the `meta` of a graph called at several places by a larger graph: whether it is random

STAGE = "foregrad stage"  # of a backward: the inputs that the first results are gradients of

LAID_OUT = "foregrad laid out"  # of a residual with strides that the forward's compiler chose: its own spec


@dataclasses.dataclass(frozen=True, slots=True)
class GraphRole:
    """One half of a function.

    * `phase`: "forward", "backward" or "inference" (no gradients).
    * `static_inputs`: positions of inputs that are parameters or buffers, also saved for a backward.
    * `visible_outputs`: positions of outputs that must have the graph's strides. Further outputs are residuals or
      copied into an input, and may have any strides. If their strides differ from the graph's, the compiled function
      must have an attribute `output_strides` (a list with a tuple or None for each output).
    * `donated`: positions of a backward's inputs that are not read afterwards. A compiled function that writes there
      must have an attribute `writes_into` (their positions); it is called only while nothing else refers to these
      inputs.
    * `updates`: pairs of an input and an output: the input takes the output's elements after the graph has run. A
      compiled function that writes there itself must have an attribute `updated` (the pairs); its results for these
      outputs are not read.
    * `regions`: whether repeated regions are compiled once each, see `passes.regions`: True, False, or "auto" (if it
      pays). A compiler with a true attribute `takes_regions` gets the graph with calls of regions.
    * `tag`: for a graph with symbolic sizes, a required part of the key of a compiler that keeps compiled graphs from
      process to process; "" if it may keep none.
    """

    phase: str
    static_inputs: tuple[int, ...] = ()
    visible_outputs: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    updates: tuple[tuple[int, int], ...] = ()
    regions: bool | str = False
    tag: str = dataclasses.field(default="", repr=False)

    def put_on(self, gm: fx.GraphModule) -> None:
        gm.meta[_KEY] = self


def role_of(gm: fx.GraphModule) -> GraphRole:
    """The role of a graph; for a graph that is not foregrad's, inference with every output visible."""
    role = gm.meta.get(_KEY)
    if isinstance(role, GraphRole):
        return role
    output = next(iter(reversed(gm.graph.nodes)))
    count = len(output.args[0]) if isinstance(output.args[0], (list, tuple)) else 1
    return GraphRole("inference", (), tuple(range(count)))


def outlined(gm: fx.GraphModule, **how: object) -> fx.GraphModule:
    """The graph with calls of the parts that come again; itself where there are none, or nobody finds them."""
    for outline in given("repeated regions"):
        gm = outline(gm, **how)
    return gm


def called_region(module: torch.nn.Module, node: fx.Node) -> fx.GraphModule | None:
    """The region that a node of an outlined graph calls."""
    if node.op != "call_module":
        return None
    region = operator.attrgetter(str(node.target))(module)
    return region if isinstance(region, fx.GraphModule) and REGION in region.meta else None
