"""Random generators of PyTorch that the function makes itself: each call makes them anew, in equal states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.generators import MadeGenerators, install, restore_methods
from ..errors import UnsupportedSideEffectError
from ..graph.call_effects import CallEffect, CallPlace, EffectWriter
from ..locks import Bind
from ..tracing.aspect import Aspect, Finished, Settled, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.values.prefix import generators_drawn_from


@dataclasses.dataclass(frozen=True, slots=True)
class RestartGenerator(CallEffect):
    """A random generator that the function makes begins in an equal state in each call."""

    generator: torch.Generator
    state: torch.Tensor
    place = CallPlace.FIRST

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.bind('generator', self.generator)}.set_state({writer.bind('state', self.state)})"]

    def __str__(self) -> str:
        return "a random generator that the function makes begins anew"


@aspect
class NewGenerators(Aspect):
    """The generators that one run makes."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder
        self.made = MadeGenerators(lambda: generators_drawn_from(recorder.tape.entries))

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> Callable[[], None]:
        def made() -> MadeGenerators | None:
            one = current()
            return None if one is None else one.made

        install(bind, made)
        return restore_methods

    def resumed(self) -> Aspect:
        later = NewGenerators(self.recorder.host, self.recorder)
        later.made = MadeGenerators(tuple)
        return later

    def returned(self, results: Sequence[Any], paths: Sequence[str]) -> None:
        for result, path in zip(results, paths, strict=True):
            if result in self.made:
                raise UnsupportedSideEffectError(
                    f"`{self.recorder.host.name}` returns a random generator that it makes, {path}: each compiled "
                    "call would return an equal generator. Make it outside."
                )

    def effects(self, run: Settled) -> list[RestartGenerator]:
        return [RestartGenerator(generator, state) for generator, state in self.made.used()]

    def finished(self, run: Finished) -> None:
        """It is known of each random generator whether the function makes it."""
        if "Generator" in run.names and self.made.unknown():
            raise UnsupportedSideEffectError(
                f"`{self.recorder.host.name}` draws from a new random generator that perhaps the function makes: "
                "make it by `torch.Generator(...)`, or make it outside and draw before the first call."
            )
