"""PyTorch's context of a compilation, for compilers written for AOTAutograd. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .fakes import FakeTensorMode, real_constants


@contextlib.contextmanager
def own_tracing_context(mode: FakeTensorMode | None) -> Iterator[None]:
    """Context: a tracing context that holds this fake mode and nothing else, for compilers that ask for one."""
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(mode)):
        yield


@contextlib.contextmanager
def _graphs_uncached(mode: FakeTensorMode | None) -> Iterator[None]:
    """Context: Inductor's cache of graphs is off if sizes are symbolic: their names mean something here only."""
    if mode is None or mode.shape_env is None:
        yield
        return
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        yield


@contextlib.contextmanager
def compiler_context(
    mode: FakeTensorMode | None, labels: Sequence[str], facts: object
) -> Iterator[Callable[[], list[Any] | None]]:
    """Context: the environment of compilers written for AOTAutograd; gives a function for their reported strides.

    The tracing context is Dynamo's, if there is one, with entries for this graph: its fake mode, its name, and `facts`
    as `fw_metadata`.
    """
    from torch._guards import TracingContext, tracing

    outer = TracingContext.try_get()
    context: Any = TracingContext(mode) if outer is None else copy.copy(outer)
    fresh = TracingContext(mode)
    context.fake_mode = mode
    context.tensor_to_context = fresh.tensor_to_context
    context.hop_dispatch_set_cache = fresh.hop_dispatch_set_cache
    context.aot_graph_name = list(labels)
    context.params_flat, context.params_flat_unwrap_subclasses, context.params_unwrapped_to_flat_index = [], [], []
    context.fakify_first_call = True  # symbolic strides are reported as symbols, not as this call's numbers
    context.fw_metadata = facts
    with (
        tracing(context),
        real_constants(mode),
        _graphs_uncached(mode),
        TracingContext.report_output_strides() as strides,
    ):
        yield lambda: list(strides) if strides else None
