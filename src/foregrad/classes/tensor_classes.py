"""Tensors of classes with `__torch_function__` alone in a capture: the order of asking, and refused leftovers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.patches import swapped
from ..locks import Bind
from ..tracing.aspect import Aspect, aspect
from ..tracing.heap.recording import Host, Recording
from ._torch import function_classes
from ._torch.function_classes import FunctionClasses
from ._torch.jagged import dispatch_argument_of_capture
from .function_classes import check_classes, serve_captures


@aspect
class TensorClasses(FunctionClasses, Aspect):
    """The handles of a capture."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.host = host
        FunctionClasses.__init__(self, host.where)

    def begin(self) -> None:
        self.host.lifting.overriding = self

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        """The two functions that make tensors of classes call no torch-function mode."""

        def handles() -> FunctionClasses | None:
            one: TensorClasses | None = current()
            return one

        function_classes.install(bind, handles, swapped)
        serve_captures(handles)

    def around_run(self) -> contextlib.AbstractContextManager[None]:
        return dispatch_argument_of_capture()

    def returned(self, results: Sequence[Any], paths: Sequence[str]) -> None:
        check_classes(self.host.name, results, paths, self)

    def torch_function(self, mode: Any, run: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of a torch function by the classes of its arguments, or by `run` on plain stand-ins."""
        result = self.by_class(mode, func, types, args, kwargs)
        return self.run(run, func, args, kwargs) if result is NotImplemented else result

    def handed(self, tensor: torch.Tensor) -> None:
        """Raise for a handle."""
        if self.stand_in(tensor) is not None:
            self.refuse(tensor, "a custom Function, transform or other part of PyTorch that is handed")
