"""The errors foregrad raises: one class per failure, each a subclass of `ForegradError` and of the built-in error that
it resembles.

A message names the event, the user's line, the reason, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

__all__ = [
    "AnomalyError",
    "ArtifactCallError",
    "ArtifactError",
    "AttributeAssignedError",
    "BackendError",
    "BudgetError",
    "EscapedTensorError",
    "ForegradError",
    "ForegradWarning",
    "GraphError",
    "InternalError",
    "PartitionError",
    "PlanError",
    "ProgramOutputError",
    "TensorTextError",
    "UnknownLeafError",
    "UnsupportedAliasError",
    "UnsupportedDataDependentError",
    "UnsupportedError",
    "UnsupportedLayoutError",
    "UnsupportedMutationError",
    "UnsupportedOpError",
    "UnsupportedSideEffectError",
    "UnsupportedTensorError",
]


_Error = TypeVar("_Error", bound=BaseException)


class ForegradError(Exception):
    """Base of every error that foregrad itself raises."""


class ForegradWarning(UserWarning):
    """Base of every warning that foregrad itself gives."""


class UnsupportedError(ForegradError, RuntimeError):
    """The function does something that foregrad can't compile. Subclasses name the kind."""


class UnsupportedOpError(UnsupportedError):
    """An operator that can't be recorded."""


class UnsupportedDataDependentError(UnsupportedError):
    """A size or a Python branch depends on a value that the capture can't know, or that takes too many paths."""


class UnsupportedLayoutError(UnsupportedError):
    """A tensor with a layout that is not strided (sparse, mkldnn, nested, quantized)."""


class UnsupportedTensorError(UnsupportedError, TypeError):
    """A tensor subclass that foregrad can't look into, or a use that it can't compile."""


class UnsupportedMutationError(UnsupportedError):
    """A mutation of an input that can't be replayed after the graph has run."""


class UnsupportedAliasError(UnsupportedError):
    """A relation between tensors that share memory, if a call can't rebuild it."""


class UnsupportedSideEffectError(UnsupportedError):
    """An effect, other than a write to a tensor, that a compiled call could not repeat."""


class ProgramOutputError(UnsupportedSideEffectError):
    """A function prints, logs or warns in a way that a compiled call could not repeat."""


class EscapedTensorError(UnsupportedSideEffectError):
    """A function filled a cache, or changed a state, that it had read before."""


class AttributeAssignedError(UnsupportedSideEffectError):
    """A function assigned tensors to attributes of modules while it was exported. The message has their paths."""


class ArtifactError(ForegradError, ValueError):
    """A file that is no artifact, is damaged, comes from a different version, or names a missing operator; or a
    function with a value that no artifact can hold.
    """


class ArtifactCallError(ForegradError, RuntimeError):
    """A call that no graph of a loaded artifact fits. The message names the first failing guard of each graph."""


class TensorTextError(UnsupportedDataDependentError):
    """A function asks for the text of a tensor, or for its pickle: both contain values."""


class UnknownLeafError(ForegradError, TypeError):
    """An argument or output that is no tensor, no plain value and no registered container."""


class GraphError(ForegradError, ValueError):
    """A graph that breaks a rule of its stage (see `JointGraph.check`)."""


class PartitionError(ForegradError, ValueError):
    """A joint graph that can't be split, or a partitioner that returned an invalid split."""


class PlanError(ForegradError, ValueError):
    """A training that can't be planned: an unknown device, no loss, an optimizer that needs values."""


class BudgetError(PartitionError):
    """A memory budget below every partition's peak. The message has the least feasible budget."""


class BackendError(ForegradError, RuntimeError):
    """A compiler failed, or its code returned wrong results (their number, shape or dtype) or wrote to its inputs."""


class AnomalyError(ForegradError, RuntimeError):
    """A gradient that is nan, in autograd's anomaly mode."""


class InternalError(ForegradError, AssertionError):
    """A fault in foregrad itself. Please report it where you got foregrad, with the printed graph."""


def headline(error: BaseException) -> str:
    """An error in one line: its class, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, empty if the message is."""
    return next(iter(str(error).strip().splitlines()), "").strip()


def add_note(error: BaseException, text: str) -> None:
    """Add a line to an error, as PEP 678 says. Python 3.10 keeps the lines, and prints none."""
    vars(error).setdefault("__notes__", []).append(text)


def without_frames(error: _Error) -> _Error:
    """The error, and the errors that it came from, without their frames, which hold a call's arguments."""
    error.__traceback__ = None
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None and earlier.__traceback__ is not None:
            without_frames(earlier)
    return error


def did_you_mean(name: str, known: Iterable[str], hint: str = " Did you mean `{}`?") -> str:
    """For messages about an unknown name: a hint at the nearest known name, empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return hint.format(close[0]) if close else ""
