"""The tools' door to private PyTorch: all that `explain`, `verify` and the commands use.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from ..._torch.engine import ThreadDispatchMode
from ..._torch.fakes import is_absent, without_fake_mode
from ..._torch.graphs import is_random, make_graph_module
from ..._torch.histories import nodes_behind
from ..._torch.memory import peak_bytes
from ..._torch.nested import mapped, tensors_in
from ..._torch.ops import OpOverload
from ..._torch.tensors import storage_key, version_of
from ..._torch.versions import untested
from .requirements import missing

__all__ = [
    "OpOverload", "ThreadDispatchMode", "is_absent", "is_random", "make_graph_module", "mapped", "missing",
    "nodes_behind", "peak_bytes", "storage_key", "tensors_in", "untested", "version_of", "without_fake_mode",
]  # fmt: skip


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested containers, in order."""
    return pytree.tree_leaves(value)


def named_leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """The leaves, each with its path from `name`: `out[0]['x']`."""
    return [(name + pytree.keystr(path), leaf) for path, leaf in pytree.tree_leaves_with_path(value)]


# -------------------------------------------------------------------- graph breaks
# The places at which Dynamo breaks a function into several graphs. Checked on torch 2.13.0.
#
# `torch._dynamo.explain` finds the breaks too, but makes Dynamo drop all code compiled in the process.


@dataclasses.dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where Dynamo ends a graph: the user's line, and Dynamo's reason."""

    line: str
    reason: str


def compiled_by_dynamo(function: Any) -> Any:
    """The function or module behind a result of `torch.compile`; None for any other function."""
    inner = getattr(function, "_orig_mod", None)
    if isinstance(function, torch.nn.Module) and isinstance(inner, torch.nn.Module):
        return inner
    disabled = getattr(function, "_torchdynamo_disable", False)
    return None if disabled else getattr(function, "_torchdynamo_orig_callable", None)


def graph_breaks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, list[GraphBreak]]:
    """(the number of graphs that Dynamo makes of a call, its graph breaks). The function really runs."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own reads of tensors warn
        torch.compile(function, backend=keep)(*args, **kwargs)
    reasons = [getattr(gm, "compile_subgraph_reason", None) for gm in graphs]
    return len(graphs), [_break(reason) for reason in reasons if reason is not None and reason.graph_break]


def _break(reason: Any) -> GraphBreak:
    frames = [frame for frame in reason.user_stack if frame is not None]
    line = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""
    return GraphBreak(line, str(reason.reason))
