"""Settings of PyTorch that the function sets for what comes after it: noted, put back, and set by each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..._torch.asked import ViewReplay
from ..._torch.settings import REPLAYED, apply_settings, settings
from ...errors import ForegradError, UnsupportedSideEffectError
from ..recorder.arithmetic import ArithmeticSettings
from ..tape.again import CaptureAgain
from .side_effects import check_finished

__all__ = ["SettingsLeft"]

_REPLAY = "view_replay_enabled"  # a setting of which a capture has its own


class SettingsLeft:
    """`after`: those that the function leaves to what comes after it; `inside`: those that its graph runs under."""

    def __init__(self, name: str, function: Callable[..., Any], arithmetic: ArithmeticSettings) -> None:
        self.name, self.function, self.arithmetic = name, function, arithmetic
        self.view_replay = ViewReplay()
        self.after: dict[str, Any] = {}
        self.inside: dict[str, Any] = {}

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Context: what the function sets in it is noted, and put back."""
        before, was_inference = settings(), torch.is_inference_mode_enabled()
        self.arithmetic.begin(before, getattr(self.function, "settings_between", ()))
        try:
            yield
        except (CaptureAgain, ForegradError):  # the function runs again, or in eager
            apply_settings(before)
            raise
        finally:
            self.arithmetic.end()
        known = getattr(self.function, "settings", ())
        now, before = settings() | {_REPLAY: self.view_replay.now}, before | {_REPLAY: self.view_replay.before}
        self.after = {name: value for name, value in now.items() if value != before[name] or name in known}
        self.inside = self.arithmetic.inside(before, known)
        apply_settings({name: before[name] for name in self.after if name != _REPLAY})
        others = sorted({*self.after, *known} - REPLAYED)
        if others:
            raise UnsupportedSideEffectError(
                f"`{self.name}` changes {', '.join(others)} and does not put it back, which a compiled call would not "
                "repeat. Set it outside."
            )
        check_finished(self.name, was_inference)
        if "the default dtype" in self.after:
            self.arithmetic.refuse_dtype()  # of operators before it nothing is known
