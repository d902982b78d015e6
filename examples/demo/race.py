"""Two runs of one training, step by step in turn, and the proof that they agree to the last bit.

Both start from copies of one model and from one random state. Each keeps a random state of its own, handed to
PyTorch before its step and taken back after it, so a run that drew one number more or less than the other would
part from it at once. What is compared: the loss and the random state after each step; at the end every parameter,
buffer, gradient and piece of optimizer state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Race", "Runner", "same_bits"]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits: a NaN equals itself, and 0.0 does not equal -0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(*flat)


@dataclass
class Runner:
    """One of the two runs: a model, how it is called, and what its training has left behind so far."""

    name: str
    model: nn.Module
    call: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    random_state: Tensor
    losses: list[Tensor] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, model: nn.Module, call: Callable[..., Tensor], *, rate: float, seed: int) -> Runner:
        """A runner with AdamW over the model's parameters, at the beginning of the random numbers of `seed`."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return cls(name, model, call, optimizer, torch.Generator().manual_seed(seed).get_state())

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """One training step on one batch, timed from clearing the gradients to the updated parameters."""
        torch.set_rng_state(self.random_state)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.call(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - start)
        self.random_state = torch.get_rng_state()
        self.losses.append(loss.detach())

    @property
    def loss(self) -> float:
        """The newest loss."""
        return self.losses[-1].item()

    @property
    def median_step_s(self) -> float:
        """The median time of a step; the first is left out where there are others, for it may compile."""
        return statistics.median(self.step_s[1:] or self.step_s)

    @property
    def first_step_extra_s(self) -> float:
        """What the first step took beyond a usual one: for a compiled run, its capture and compilation."""
        return max(0.0, self.step_s[0] - self.median_step_s)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that training changes, by name."""
        yield "random state", self.random_state
        for name, parameter in self.model.named_parameters():
            yield f"parameter {name}", parameter
            if parameter.grad is not None:
                yield f"gradient of {name}", parameter.grad
            for key, value in _tensors(self.optimizer.state.get(parameter, {})):
                yield f"optimizer's {key} of {name}", value
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name}", buffer


def _tensors(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((key, value) for key, value in values.items() if isinstance(value, Tensor))


@dataclass
class Race:
    """The two runs and, once they disagree, where they first did (`difference`, a sentence; else None)."""

    eager: Runner
    compiled: Runner
    difference: str | None = None

    @property
    def steps(self) -> int:
        """How many steps both have done."""
        return len(self.compiled.losses)

    def run(self, draw: Callable[[], tuple[Tensor, Tensor]], *, steps: int, seconds: float) -> Iterator[int]:
        """Train until `steps` or `seconds`, whichever comes first; yields the number of steps done after each."""
        deadline = time.perf_counter() + seconds
        for index in range(steps):
            tokens, targets = draw()
            # Whoever goes second finds the batch in the processor's cache, so they take turns.
            order = (self.eager, self.compiled) if index % 2 == 0 else (self.compiled, self.eager)
            for runner in order:
                runner.step(tokens, targets)
            self._compare_step()
            yield self.steps
            if time.perf_counter() > deadline:
                break
        self._compare_state()

    def _compare_step(self) -> None:
        if self.difference is not None:
            return
        if not same_bits(self.eager.losses[-1], self.compiled.losses[-1]):
            self.difference = f"the loss of step {self.steps}: {self.eager.loss!r} and {self.compiled.loss!r}"
        elif not same_bits(self.eager.random_state, self.compiled.random_state):
            self.difference = f"the random state after step {self.steps}"

    def _compare_state(self) -> None:
        if self.difference is not None:
            return
        expected, actual = dict(self.eager.state()), dict(self.compiled.state())
        if missing := sorted(expected.keys() ^ actual.keys()):
            self.difference = f"only one of the two has the {missing[0]}"
            return
        differing = [name for name, tensor in expected.items() if not same_bits(tensor, actual[name])]
        if differing:
            self.difference = f"{len(differing)} tensors at the end, the first: {differing[0]}"
