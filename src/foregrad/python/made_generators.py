"""Random generators of PyTorch made by the function are refused: a graph would go on with the capture's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedSideEffectError
from ..locks import Bind
from ..tracing.aspect import Aspect, Finished, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.values.prefix import generators_drawn_from
from ._torch.generators import are_new, install, restore_methods


@aspect
class NewGenerators(Aspect):
    """The refusal of new generators, whatever made them."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> Callable[[], None]:
        install(bind, lambda: current() is not None)
        return restore_methods

    def resumed(self) -> Aspect:
        return self

    def finished(self, run: Finished) -> None:
        """Refuse new generators made under further names."""
        if "Generator" in run.names and are_new(generators_drawn_from(self.recorder.tape.entries)):
            raise UnsupportedSideEffectError(
                f"`{self.recorder.host.name}` draws from a new random generator that perhaps the function makes: "
                "make it outside, and draw before the first call."
            )
