"""The backends that come with foregrad, put into the registry."""

from __future__ import annotations

import collections
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import dynamo
from ..errors import BackendError
from ..graph.printing import print_graph, user_line
from ..graph.role import role_of
from . import inductor
from .boxed import nop
from .eager import BoxedFunction, eager_compiler
from .interpreter import interpreter_compiler
from .registry import Backend, get_backend, register_backend, register_family

log = logging.getLogger("foregrad.backends")


def inductor_backend(settings: Mapping[str, Any] | None = None, *, name: str = "inductor") -> Backend:
    """Inductor with its own settings; called `auto`, it leaves graphs that it can't compile to eager's kernels."""
    compiler = inductor.InductorCompiler(settings, fallback=name == "auto")
    return Backend(
        name,
        compiler,
        compiler,
        compiler,
        compiler.decompositions,
        "PyTorch's kernel compiler: C++ on a CPU, Triton on a GPU",
        "fused",
        compiler.prepare_joint,
        functools.partial(inductor_backend, name=name),
        compiler.prepare_halves,
        compiler.cache_key,
        budget_settings=inductor.BUDGET_SETTINGS,
    )


def auto() -> Backend:
    """Inductor if it can compile here, else eager's kernels; logs which, once."""
    reason = inductor.why_not()
    if reason is None:
        _say_once(logging.INFO, 'backend "auto" is Inductor')
        return inductor_backend(name="auto")
    _say_once(logging.WARNING, f'backend "auto" is "eager": Inductor can\'t compile here, {reason}')
    return get_backend("eager")


@functools.cache
def _say_once(level: int, message: str) -> None:
    log.log(level, message)


def _owned(value: Any) -> Any:
    """An output in PyTorch's own memory. Another runtime may overwrite memory that it lends on its next call, while the
    value is still in use as a gradient.
    """
    if isinstance(value, torch.Tensor) and not value.untyped_storage().resizable():
        return value.clone()
    return value


def torch_backend(name: str) -> Backend:
    """Any backend of torch.compile's, for both halves."""
    names = dynamo.known_backends()
    if name not in names:
        raise BackendError(f"torch.compile has no backend called `{name}`. It has: {', '.join(names)}.")

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mode = next((value.fake_mode for value in example_inputs if hasattr(value, "fake_mode")), None)
        try:
            with dynamo.own_tracing_context(mode):
                compiled = dynamo.lookup_backend(name)(gm, list(example_inputs))
        except Exception as error:
            raise BackendError(
                f"torch.compile's backend `{name}` failed on the {role_of(gm).phase} graph: "
                f"{type(error).__name__}: {error}"
            ) from error

        # Inputs are passed one by one, as Dynamo does: the mark of the boxed convention is unreliable here, since
        # wrappers copy it.
        def call(*args: Any) -> Any:
            return [_owned(value) for value in compiled(*args)]

        return call

    compile_half.__name__ = f"torch:{name}"
    return Backend(f"torch:{name}", compile_half, compile_half, compile_half, description=f"torch.compile's {name}")


# -------------------------------------------------------------------- for debugging
# Backends for debugging: `print`, `count` and `crash-on:<op>`. Each graph then runs as with the eager backend.


def print_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedFunction:
    """Print the graph, as Python."""
    print(print_graph(gm, header=f"{role_of(gm).phase} graph"))
    return eager_compiler(gm, example_inputs)


def count_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedFunction:
    """Print how often each operator is called; the result carries it as `op_counts`."""
    counts = op_counts(gm)
    total = sum(counts.values())
    print(f"{role_of(gm).phase} graph: {total} operators")
    for name, count in counts.most_common():
        print(f"  {count:5d}  {name}")
    compiled = eager_compiler(gm, example_inputs)
    compiled.op_counts = counts  # type: ignore[attr-defined]
    return compiled


def op_counts(gm: fx.GraphModule) -> collections.Counter[str]:
    """The number of calls of each operator in a graph, by its name (`aten.mm.default`)."""
    return collections.Counter(
        str(node.target)
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method", "call_module") and node.target is not operator.getitem
    )


def crash_on(name: str) -> Backend:
    """A backend that fails with `BackendError` on graphs that call `name`: `aten.mm.default`, `aten.mm` or `mm`."""

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedFunction:
        for node in gm.graph.nodes:
            if node.op == "call_function" and name in _names(node.target):
                where = user_line(node)
                raise BackendError(
                    f"crash-on:{name}: the {role_of(gm).phase} graph has {node.name} = {node.target}"
                    + (f", from {where}" if where else "")
                )
        return eager_compiler(gm, example_inputs)

    compile_half.__name__ = f"crash-on:{name}"
    return Backend(f"crash-on:{name}", compile_half, compile_half, compile_half)


def _names(target: Any) -> tuple[str, ...]:
    full = str(target)
    parts = full.split(".")
    return (full, ".".join(parts[:2]), parts[1] if len(parts) > 1 else full)


# -------------------------------------------------------------------- all of them

register_backend(
    "eager",
    eager_compiler,
    description="straight-line Python over eager's kernels; bitwise as eager",
    cache_key=dict,  # nothing but the graph
    keeps_order=True,
)
register_backend(
    "interpreter",
    interpreter_compiler,
    description="node by node, each checked against its meta; slow",
    keeps_order=True,
)
register_backend("nop", nop, description="the graph module as it is", keeps_order=True)
register_backend("print", print_compiler, description="prints each graph, then as eager")
register_backend("count", count_compiler, description="counts each graph's operators, then as eager")
register_family(
    "inductor",
    inductor_backend,
    argument=None,
    description="PyTorch's kernel compiler: C++ on a CPU, Triton on a GPU",
)
register_family("auto", auto, argument=None, description="inductor where it can compile, else eager")
register_family("torch", torch_backend, argument="name", description="a backend of torch.compile's, for both halves")
register_family(
    "crash-on", crash_on, argument="op", description="fails to compile graphs with that operator, to test with"
)
