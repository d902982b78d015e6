"""The backends that come with foregrad, put into the registry."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import dynamo
from ..errors import BackendError
from ..graph.role import role_of
from . import debug, inductor
from .boxed import nop
from .eager import eager_compiler
from .interpreter import interpreter_compiler
from .registry import Backend, get_backend, register_backend, register_family

__all__ = ["auto", "inductor_backend", "torch_backend"]

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
register_backend("print", debug.print_compiler, description="prints each graph, then as eager")
register_backend("count", debug.count_compiler, description="counts each graph's operators, then as eager")
register_family(
    "inductor",
    inductor_backend,
    argument=None,
    description="PyTorch's kernel compiler: C++ on a CPU, Triton on a GPU",
)
register_family("auto", auto, argument=None, description="inductor where it can compile, else eager")
register_family("torch", torch_backend, argument="name", description="a backend of torch.compile's, for both halves")
register_family(
    "crash-on", debug.crash_on, argument="op", description="fails to compile graphs with that operator, to test with"
)
