"""Calls that can't be compiled: they run the user's function, with one warning, and are recognized at little cost.

A refusal is remembered by the kind of the call: the types of its arguments, the metadata of tensors among them, plain
values that may choose what the function does, and the modes in force. A call of that kind is not captured again. After
some kinds no other kind is tried either, so the time spent on failed captures is bounded.
"""

from __future__ import annotations

import dataclasses
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ForegradError, ForegradWarning
from ..identity import ById
from .explain import EagerCalls

_log = logging.getLogger("foregrad.eager")

_MOST_KINDS = 8
_MOST_TRIES = 3  # of calls that made a container grow, once it does not
_CHOOSING = (bool, str, type(None))
_FOREGRAD = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FOLDERS = {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")}
_LIBRARIES = (_FOREGRAD, _TORCH, *_FOLDERS, "<foregrad", "<frozen", "<eval_with_key")


class Once:
    """Gives the one warning of a function and its forms."""

    def __init__(self) -> None:
        self.has_warned = False

    def warn(self, message: str) -> None:
        """Warn at the line of the user's program that is being run, once."""
        if not self.has_warned:
            self.has_warned = True
            warn_user(message)


@dataclasses.dataclass
class _Growing:
    container: Any
    length: int  # at the last look


class Refusals:
    """The calls of one function that run eagerly. `mode` is "eager", or "raise" if no call may run eagerly."""

    def __init__(self, function: Callable[..., Any], name: str, mode: str, once: Once | None = None) -> None:
        self.function = function
        self.name = name
        self.mode = mode
        self.by_kind: dict[Any, EagerCalls] = {}
        self.always: EagerCalls | None = None  # counts every call that fits no graph, once no kind is tried
        self.entries: list[EagerCalls] = []
        self.once = once or Once()
        self._growing: ById[EagerCalls, _Growing] = ById()
        self._tries = 0
        self._module = getattr(function, "__self__", None)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def covers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> EagerCalls | None:
        """The count of calls of the same refused kind, with this one added; None if the kind was not refused."""
        entry = self.always
        if entry is None:
            entry = self.by_kind.get(self.kind(args, kwargs))
            if entry is None or self._has_grown(entry):
                return None
        entry.count += 1
        return entry

    def _has_grown(self, entry: EagerCalls) -> bool:
        """Whether a container that grew in such calls has stopped growing, so that they are tried again."""
        growing = self._growing.get(entry)
        if growing is None:
            return False
        now = len(growing.container)
        is_full, growing.length = now == growing.length, now
        if is_full:
            del self._growing[entry]
            self.by_kind = {kind: other for kind, other in self.by_kind.items() if other is not entry}
        return is_full

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException) -> EagerCalls:
        """Record that a call is refused for `error`: it runs eagerly, and so do others of its kind. `tell` warns."""
        entry = self.count_only(reason_of(self.function, self.name, error))
        container = getattr(error, "container", None)
        if container is not None and self._tries < _MOST_TRIES:
            self._tries += 1
            self._growing[entry] = _Growing(container, len(container))
        self.by_kind[self.kind(args, kwargs)] = entry
        if len(self.by_kind) > _MOST_KINDS:
            self.always = entry
        return entry

    def tell(self, entry: EagerCalls) -> None:
        """Warn once that calls run eagerly."""
        _log.info("%s", entry)
        self.once.warn(
            f"{entry.reason} Such calls run eagerly: the results are eager's, only not compiled. "
            '(foregrad.compile(..., on_unsupported="raise") makes this an error, '
            "explain_recompiles() counts and times the calls.)"
        )

    def count_only(self, reason: str) -> EagerCalls:
        """Count one more call that runs eagerly for a reason that was reported elsewhere."""
        entry = next((entry for entry in self.entries if entry.reason == reason), None)
        if entry is None:
            entry = EagerCalls(reason)
            self.entries.append(entry)
        entry.count += 1
        return entry

    def kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The kind of a call: refused calls of equal kinds are treated alike."""
        module = self._module
        modes = torch.is_grad_enabled(), getattr(module, "training", None), torch.is_inference_mode_enabled()
        return modes, tuple(map(_kind_of, args)), tuple((key, _kind_of(value)) for key, value in kwargs.items())


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.layout, value.dim()
    cls = type(value)
    if cls in _CHOOSING:
        return cls, value
    return (cls, tuple(map(_kind_of, value))) if cls in (tuple, list) and len(value) <= _MOST_KINDS else cls


def reason_of(function: Callable[..., Any], name: str, error: BaseException) -> str:
    """The reason for people: the error's message, with the user's line if the message has none."""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, ForegradError):
        summary = f"{type(error).__name__}: {text.splitlines()[0]}"
        text = f"`{name}` runs eagerly and can't be captured: {_cause_of(error)} (it raised {_shortened(summary)})."
        text += " Make that part a foregrad.eager_region, so that the rest is compiled."
    line = _line_of(error) or _definition(function)
    if line and line.partition(" in ")[0] not in text:
        text += f" ({line})"
    return text


def _cause_of(error: BaseException) -> str:
    """Why a call that eager runs can't be captured, told by the code that raised an error that is not ours."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    file = innermost.f_code.co_filename
    if file.startswith(_FOREGRAD) and isinstance(error, (LookupError, AttributeError, TypeError, AssertionError)):
        return "foregrad fails where eager does not; that is a fault, please report it"
    if file.startswith((_TORCH, _FOREGRAD)):
        return "PyTorch refuses this for the tensors of a capture, which have neither values nor memory"
    return "the code there does not take the tensors of a capture, which have neither values nor memory"


def _shortened(text: str) -> str:
    text = re.split(r"(?<!e\.g)\. (?=[A-Z])", text)[0].rstrip(".")
    return text if len(text) <= 100 else text[:97] + "..."


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's program, of no library, that an exception went through."""
    innermost, trace = None, error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            innermost = trace
        trace = trace.tb_next
    if innermost is None:
        return ""
    code = innermost.tb_frame.f_code
    source = linecache.getline(code.co_filename, innermost.tb_lineno).strip()
    return f"{code.co_filename}:{innermost.tb_lineno} in {code.co_name}" + (f": {source}" if source else "")


def _definition(function: Any) -> str:
    while not isinstance(function, (types.FunctionType, type(None))):
        function = getattr(function, "__func__", None) or getattr(function, "func", None)
    if function is None or function.__code__.co_filename.startswith(_LIBRARIES):
        return ""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno} in {function.__name__}"


def warn_user(message: str) -> None:
    """Give a `ForegradWarning` at the line of the user's program that is being run."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith((_FOREGRAD, "<foregrad", _TORCH)):
        frame = frame.f_back
        level += 1
    warnings.warn(message, ForegradWarning, stacklevel=level)
