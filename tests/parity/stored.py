"""Programs kept as text: those that are to be the same as eager, and those that are refused."""

from __future__ import annotations

__all__ = ["SET_IN_PLACE", "Stored"]

SET_IN_PLACE = "`set_` at .* gives a tensor other memory"


class Stored:
    """`same`: by name. `refused`: by name, a pattern that is found in what the refusal says, and the program."""

    def __init__(self) -> None:
        self.same: dict[str, str] = {}
        self.refused: dict[str, tuple[str, str]] = {}

    def regression(self, name: str, source: str) -> None:
        self.same[name] = source.strip() + "\n"

    def refusal(self, name: str, message: str, source: str) -> None:
        self.refused[name] = message, source.strip() + "\n"
