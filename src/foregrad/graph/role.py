"""What a graph given to a compiler is for: `role_of(gm)`.

A compiler is called as `(graph module, example inputs)`, as PyTorch's are. One that wants to know more (which outputs
the user sees, which inputs are parameters) reads it from `gm.meta["foregrad"]`, through `role_of`.
"""

from __future__ import annotations

import dataclasses

from torch import fx

__all__ = ["LAID_OUT", "PREPARED", "GraphRole", "role_of"]

_KEY = "foregrad"
PREPARED = "foregrad prepared"  # in the `meta` of a graph that a backend's `prepare_joint` gave, or made of one

LAID_OUT = (
    "foregrad laid out"  # of a backward some of whose saved inputs have strides that the forward's compiler chose
)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphRole:
    """One half of a function.

    * `phase`: "forward", "backward" or "inference" (no gradients).
    * `static_inputs`: positions of inputs that are parameters, buffers or, in a backward, such that were saved.
    * `visible_outputs`: positions of outputs whose strides must be those of the graph. Others are saved for the
      backward or copied into an input, and may have any; what they have is to be said by the compiled function's
      attribute `output_strides` (a list with a tuple or None for each output), if it isn't what the graph says.
    * `donated`: positions of a backward's inputs that nobody reads afterwards. A compiled function that writes there
      says so by its attribute `writes_into` (their positions), and is only called while nobody else has those.
    * `updates`: pairs of an input and the output that it takes its elements from once the graph has run. A compiled
      function that writes there itself says so by its attribute `updated` (those pairs).
    * `regions`: whether repeated regions are to be compiled once each, see `passes.regions`: True, False, or "auto",
      where that pays. A compiler with a true attribute `takes_regions` is given the graph with calls of them.
    * `tag`: for a graph with symbolic sizes, what a compiler that keeps compiled graphs from process to process must
      make a part of its key; "" where it may keep none.
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
    """The role of a graph; for one that did not come from foregrad, inference with every output visible."""
    role = gm.meta.get(_KEY)
    if isinstance(role, GraphRole):
        return role
    output = next(iter(reversed(gm.graph.nodes)))
    count = len(output.args[0]) if isinstance(output.args[0], (list, tuple)) else 1
    return GraphRole("inference", (), tuple(range(count)))
