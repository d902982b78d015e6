"""What a capture gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..frontend.reads import Reads
from ..frontend.wrappers import FoundWrappers
from ..graph.joint import JointGraph
from .derivatives.resumable_trace import ResumableTrace

__all__ = ["Captured"]


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """What a capture gives: the joint graph, the real tensors behind its inputs (None for whole memories), the modules
    whose code ran, what the function read besides tensors, what it asked of which input (an expression, its value),
    what it takes to differentiate it again, the wrapper subclasses that it was given, and, by class, the ids of objects
    that it reaches by itself, which its arguments must not be.
    """

    joint: JointGraph
    tensors: tuple[torch.Tensor | None, ...]
    modules: tuple[torch.nn.Module, ...]
    reads: Reads
    facts: tuple[tuple[int, str, str | None, Any], ...] = ()
    resumable: ResumableTrace | None = None
    wrappers: FoundWrappers | None = None
    reached: Mapping[type, frozenset[int]] = dataclasses.field(default_factory=dict)
