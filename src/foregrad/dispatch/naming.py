"""Names of the graph being compiled, for compilers that write files or logs."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

__all__ = [
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "graph_being_compiled",
    "set_model_name",
]

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
