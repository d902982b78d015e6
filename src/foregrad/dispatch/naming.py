"""Names of the graph being compiled, for compilers that write files or logs; and the logs of a compilation."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator

from .._torch.graphs import trace_artifact
from ..graph.joint import JointGraph
from ..partitioners.report import Parts

_model_name = "model"
_nth_graph = 0
_functions = itertools.count()


class _OfThread(threading.local):
    graphs: tuple[str, ...] = ()


_now = _OfThread()


def set_model_name(name: str) -> None:
    """The name that graph names start with from now on.

    Examples:
        >>> import foregrad
        >>> foregrad.set_model_name("gpt")
        >>> foregrad.get_aot_compilation_context()[1]
        'gpt'
        >>> foregrad.set_model_name("model")
    """
    global _model_name
    _model_name = name


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """(labels of the graph being compiled, model name, how many graphs were compiled before).

    Examples:
        >>> import foregrad
        >>> labels, model, number = foregrad.get_aot_compilation_context()
        >>> labels, model  # no graph is being compiled now
        ([], 'model')
    """
    return list(_now.graphs), _model_name, _nth_graph


def get_aot_graph_name() -> str:
    """The name of the graph being compiled: `model__0_forward_1`.

    Examples:
        >>> import torch, foregrad
        >>> def compiler(gm, example_inputs):
        ...     print(foregrad.get_aot_graph_name().split("__")[0])
        ...     return gm
        >>> out = foregrad.compile(lambda x: x * 2, backend=compiler)(torch.ones(2))
        model
    """
    return f"{_model_name}__{'_'.join(_now.graphs)}_{_nth_graph}"


get_graph_being_compiled = get_aot_graph_name


@contextlib.contextmanager
def graph_being_compiled(phase: str) -> Iterator[None]:
    """Context: a graph of that phase (forward, backward, inference) is being compiled."""
    global _nth_graph
    outer = _now.graphs
    _now.graphs = (f"{next(_functions)}_{phase}",)
    try:
        yield
    finally:
        _nth_graph += 1
        _now.graphs = outer


# -------------------------------------------------------------------- logs
# Logs of a compilation, and its texts in PyTorch's structured trace, which `tlparse` shows.


_graphs, _partition, _guards = (logging.getLogger(f"foregrad.{name}") for name in ("graphs", "partition", "guards"))


def log_graph(joint: JointGraph) -> None:
    """Log the graph of a capture."""
    if _graphs.isEnabledFor(logging.INFO):
        _graphs.info("%s", joint)
    trace_artifact("foregrad_joint_graph", lambda: str(joint))


def log_partition(parts: Parts) -> None:
    """Log the split of a joint graph."""
    signature = parts.joint.signature
    if signature.is_inference or parts.joint.backward_error is not None:
        return
    if _partition.isEnabledFor(logging.INFO):
        _partition.info("%s: %s", parts.joint.name, parts.report())
        _partition.debug("%s", parts)
    trace_artifact("foregrad_partition", lambda: f"{parts.report()}\n\n{parts}")


def log_guards(name: str, source: str) -> None:
    """Log the code around a graph."""
    _guards.info("%s:\n%s", name, source)
    trace_artifact("foregrad_guards", lambda: source)
