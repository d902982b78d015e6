"""Programs that take one of several ways, by values of their inputs: one graph a way, up to a limit.

A call tries the graphs whose guards it passes. Each runs as far as its forward, and is dropped without a trace when a
decision comes out otherwise. So every further graph makes a call that fits none of them dearer: past the limit such
calls run eagerly, and when nothing else comes, the graphs are given up.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..config import Config
from ..errors import ForegradWarning, UnsupportedDataDependentError
from .specialization import Specialization

__all__ = ["Paths"]

_GIVEN_UP_AFTER = 8


class Paths:
    """What a dispatcher knows of the ways its function takes."""

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self.config = config
        self.lost = 0  # calls past the limit that no graph was right for
        self.diverged = 0  # fresh graphs that came out otherwise than when they were captured
        self._warned = False

    def at_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Whether no graph is to be made for a further way."""
        if self.diverged >= _GIVEN_UP_AFTER:
            return True
        return len(_ways(specializations)) >= self.config.path_limit

    def past_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Warn, or raise where the settings say so; True when the graphs are to be given up."""
        if self.config.error_on_recompile_limit or not self._warned:
            message = self._message(specializations)
            if self.config.error_on_recompile_limit:
                raise UnsupportedDataDependentError(message)
            self._warned = True
            warnings.warn(message + " Such calls run eagerly from now on.", ForegradWarning, stacklevel=5)
        self.lost += 1
        return self.lost >= _GIVEN_UP_AFTER

    def _message(self, specializations: Sequence[Specialization]) -> str:
        values: dict[str, set[str]] = {}
        for specialization in specializations:
            for decision in specialization.product.captured.joint.signature.decisions:
                values.setdefault(decision.where, set()).add(repr(decision.value))
        where, different = max(values.items(), key=lambda item: len(item[1]), default=("an unknown line", set()))
        return (
            f"`{self.name}` was compiled {len(_ways(specializations))} times for values that it reads from its inputs, "
            f"which is the limit. Most of them, {len(different)}, were read at {where}. Keep the value a tensor "
            "(torch.where, masking), compute it outside and pass it, or raise foregrad.config.path_limit."
        )


def _ways(specializations: Sequence[Specialization]) -> set[tuple[str, ...]]:
    """What was decided, by each graph that decides anything: graphs for other shapes may have gone the same way."""
    signatures = [s.product.captured.joint.signature for s in specializations if s.decides]
    return {tuple(f"{d.where} {d.value!r}" for d in signature.decisions) for signature in signatures}
