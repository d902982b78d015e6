"""Capture: one run of a function on fakes gives its joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch.jagged import dispatch_argument_of_capture
from .._torch.requirements import warn_if_untested
from ..errors import InternalError
from ..frontend.call import FlatCall
from ..frontend.reads import Source
from ..graph.eager_regions import begin, in_one_call
from ..interrupts import held
from .options import Learned, Options
from .run import Captured, CaptureRun
from .tape.collection import paused_collection
from .tape.tape import CaptureAgain, NumberVaries, SharedClosureFound

__all__ = ["Captured", "capture_call"]

_MOST_RUNS = 1000  # each learns of one more tensor, or of none


def capture_call(
    call: FlatCall,
    options: Options | None = None,
    *,
    lifted: Sequence[tuple[torch.Tensor, Source]] = (),
) -> Captured:
    """Run `call` once on fakes. `lifted` tensors become inputs ahead of the arguments, whether used or not.

    Where it raises, everything is as it was before.

    Raises `Unsupported...Error` for what can't be captured, and whatever the function raises on such arguments.
    """
    warn_if_untested()
    options, lifted, learned = options or Options(), list(lifted), Learned()
    with in_one_call(), dispatch_argument_of_capture():
        for _ in range(_MOST_RUNS):
            run = CaptureRun(call, options, learned)
            begin()
            try:
                with held, paused_collection():
                    captured = run.run(lifted)
            except NumberVaries:
                raise  # whether numbers may be symbolic is not up to one capture
            except CaptureAgain as found:
                lifted += found.found if isinstance(found, SharedClosureFound) else ()
                captured = None
            finally:
                _take_apart(run)
            if captured is not None:
                return captured
    raise InternalError(
        f"capturing `{options.name}` came to no end: each run found tensors in memory that inputs share"
    )


def _take_apart(run: CaptureRun) -> None:
    """The parts of a run refer to one another: they go now, and the arguments with them."""
    state, recorder = getattr(run, "state", None), run.recorder
    parts: list[Any] = [run, run.inputs, run.facts, run.observed, *(() if state is None else (state.before, state))]
    if recorder.host is run:  # nothing goes on with it
        for value in recorder.values.values():
            value.forget_memory()
        parts.append(recorder)
    for part in parts:
        vars(part).clear()
