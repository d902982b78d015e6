"""A subject of captures in a file outside the package: it owns a function, adds an effect, and notes when it is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import torch

from foregrad.extend import register
from foregrad.graph.call_effects import CallEffect, CallPlace
from foregrad.tracing.aspect import Aspect

register(sys.modules[__name__])

COUNTED: list[str] = []
MOMENTS: list[str] = []


def count_call():
    COUNTED.append("called")


@dataclasses.dataclass(frozen=True, slots=True)
class CountCall(CallEffect):
    place = CallPlace.LEFT

    def lines(self, writer):
        return [f"{writer.bind('count_call', count_call)}()"]

    def __str__(self):
        return "the call is counted"


def counted(x):
    """What a program calls to have its compiled calls counted; eager calls are not."""
    return torch.positive(x)


class Counting(Aspect):
    def __init__(self, host, recorder):
        self.is_asked = False

    def positive(self, function, args, kwargs):
        self.is_asked = True
        return function(*args, **kwargs)

    functions = {torch.positive: positive}

    @contextlib.contextmanager
    def around_function(self):
        MOMENTS.append("begins")
        yield
        MOMENTS.append("ends")

    def ran(self):
        MOMENTS.append("ran")

    def effects(self, run):
        MOMENTS.append("effects")
        return [CountCall()] if self.is_asked else []

    def finished(self, run):
        MOMENTS.append("finished")
