"""A watcher that remembers the inputs and results of each compiled graph; functions compiled for it."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import foregrad
from foregrad.extend import CompiledFunction, CompileStage, Watcher, as_compiled

from .lockstep import evaluate


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalGenerators:
    """The states of the global random generators: PyTorch's, Python's, NumPy's where it is imported."""

    cpu: torch.Tensor
    gpus: list[torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> GlobalGenerators:
        """As they are."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), gpus, random.getstate(), None if numpy is None else numpy.random.get_state())

    def put_back(self) -> None:
        """Have them as they were."""
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(self.gpus)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclasses.dataclass(slots=True)
class Execution:
    """One call of a compiled graph. `stage` compiled the graph."""

    stage: CompileStage
    inputs: list[Any]
    generators: GlobalGenerators
    results: list[Any] = dataclasses.field(default_factory=list)
    _expected: list[Any] = dataclasses.field(default_factory=list)

    @property
    def module(self) -> fx.GraphModule:
        module: fx.GraphModule = self.stage.before
        return module

    def expected(self) -> list[Any]:
        """The results of the graph on eager's kernels, for equal inputs."""
        if not self._expected:
            self.generators.put_back()
            self._expected = evaluate(self.module, self.inputs)
        return self._expected


@dataclasses.dataclass(eq=False)
class Log(Watcher):
    """A log of captured functions, the backend's own passes, partitions, executions, in order.

    `tensors` are copies of the tensors that the function reaches, made when the capture had found them.
    """

    captured: list[CompileStage] = dataclasses.field(default_factory=list)
    prepared: list[CompileStage] = dataclasses.field(default_factory=list)
    partitioned: list[CompileStage] = dataclasses.field(default_factory=list)
    executions: list[Execution] = dataclasses.field(default_factory=list)
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    def stage(self, stage: CompileStage) -> None:
        if stage.name == "prepare":
            self.prepared.append(stage)
        elif stage.name == "partition":
            self.partitioned.append(stage)
        elif stage.name == "halves":
            self.captured.append(stage)
            self.tensors += [(tensor, copied(tensor)) for tensor in stage.tensors if tensor is not None]

    def compiled(self, stage: CompileStage) -> Callable[..., Any]:
        def run(values: list[Any]) -> Any:
            inputs = list(map(copied, values))
            done = Execution(stage, inputs, GlobalGenerators.now())
            results = stage.after(values)
            done.results = list(map(copied, results))
            self.executions.append(done)
            return results

        return run


def compiled_with(**settings: Any) -> CompiledFunction:
    """The `foregrad.compile` of the settings."""
    compiled = as_compiled(foregrad.compile(lambda: None, **settings))
    assert compiled is not None
    return compiled


def copied(value: Any) -> Any:
    """A detached tensor of equal content, strides and gaps, in memory of its own; any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    source = value.detach()
    if type(source) not in (torch.Tensor, torch.nn.Parameter) or source.layout is not torch.strided:
        return source.clone()
    if source.is_contiguous():
        return source.clone()
    return _with_gaps(source)


def _with_gaps(source: torch.Tensor) -> torch.Tensor:
    if source.numel() == 0:
        return source.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    flat = source.resolve_conj().resolve_neg().as_strided((span,), (1,), source.storage_offset())
    return flat.clone().as_strided(source.shape, source.stride(), 0)
