"""The backends of torch.compile, as compilers of both halves: `torch:<name>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.tracing_context import own_tracing_context
from ..backends.registry import Backend, Family
from ..errors import BackendError
from ..graph.role import role_of
from ._torch import dynamo


def _owned(value: Any) -> Any:
    """An output in PyTorch's own memory. A foreign runtime may overwrite lent memory on its next call, while the value
    is still in use as a gradient.
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
            with own_tracing_context(mode):
                compiled = dynamo.lookup_backend(name)(gm, list(example_inputs))
        except Exception as error:
            raise BackendError(
                f"torch.compile's backend `{name}` failed on the {role_of(gm).phase} graph: "
                f"{type(error).__name__}: {error}"
            ) from error

        # Inputs are passed singly, as by Dynamo: the mark of the boxed convention is unreliable here, since wrappers
        # copy the mark.
        def call(*args: Any) -> Any:
            return [_owned(value) for value in compiled(*args)]

        return call

    compile_half.__name__ = f"torch:{name}"
    return Backend(f"torch:{name}", compile_half, compile_half, compile_half, description=f"torch.compile's {name}")


BACKENDS = {"torch": Family(torch_backend, "name", "a backend of torch.compile's, for both halves")}
