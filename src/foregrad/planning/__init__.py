"""Planning: the memory and the time of a training that is not there yet, without running it. See `plan`."""

from __future__ import annotations

from ._torch import without_processes as fake_ranks
from .asked import with_sizes
from .choices import Choice
from .devices import DEVICES, Device
from .planner import plan
from .ranks import Ranks
from .result import Largest, Plan

__all__ = ["DEVICES", "Choice", "Device", "Largest", "Plan", "Ranks", "fake_ranks", "plan", "with_sizes"]
