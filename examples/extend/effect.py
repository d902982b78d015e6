"""An effect: what each compiled call does besides its graph. This one counts calls, and times the graph of each.

`place` says where the lines stand: FIRST, GRAPH (behind the graph), RESULTS, LEFT (at the end). `around` gives
contexts that the graph runs under. Lines name objects by `writer.bind`, never by text. An aspect contributes the
effect to the captures that it concerns.
"""

import contextlib
import dataclasses
import time

import torch

import foregrad
from foregrad.extend import Aspect, CallEffect, CallPlace, aspect, view

COUNTS = {}
SECONDS = []


@contextlib.contextmanager
def timed():
    begin = time.perf_counter()
    yield
    SECONDS.append(time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True, slots=True)
class CountCall(CallEffect):
    name: str
    place = CallPlace.LEFT

    def lines(self, writer):
        counts, name = writer.bind("counts", COUNTS), writer.bind("name", self.name)
        return [f"{counts}[{name}] = {counts}.get({name}, 0) + 1"]

    def around(self, writer):
        return [f"{writer.bind('timed', timed)}()"]

    def __str__(self):
        return f"a call of {self.name} is counted and timed"


@aspect
class Counting(Aspect):
    def effects(self, run):
        return [CountCall(run.name)]


def f(x):
    return x.sin()


if __name__ == "__main__":
    compiled = foregrad.compile(f, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    print(COUNTS, len(SECONDS))  # {'f': 3} 3
    print(view(compiled).graphs[0].effects[0].what)  # a call of f is counted and timed
