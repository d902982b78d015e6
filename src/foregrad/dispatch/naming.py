"""Which graph is being compiled: names for compilers that write files or logs."""

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
    """The name that graph names start with from now on."""
    global _model_name
    _model_name = name


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """(labels of the graph being compiled, model name, how many graphs were compiled before)."""
    return list(_now.graphs), _model_name, _nth_graph


def get_aot_graph_name() -> str:
    """The name of the graph being compiled: `model__0_forward_1`."""
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
