"""`Explanation`: the findings of `foregrad.explain`, which print as a report and are saved as a page."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from .text import notebook, print_report, rich, text
from .tree import Findings

__all__ = ["Explanation"]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Explanation(Findings):
    """The findings of `foregrad.explain`: how a function was compiled, and the costs of a call.

    Printed, it is a report in plain text; `show()`, rich and notebooks make tables of it. `not_measured`: why nothing
    was run, or "". `modules`: the (path, class) of each module that ran, by the numbers in `operators`; `lines`: the
    user's lines.

    Example:
        >>> import torch, foregrad
        >>> found = foregrad.explain(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), backend="eager")
        >>> [(one.name, one.kind, one.nbytes) for one in found.memory.saved]
        [('primals_1', 'input', 12)]
    """

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the report as one HTML file, which needs nothing else; gives its path.

        Example:
            >>> import torch, foregrad
            >>> found = foregrad.explain(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), backend="eager")
            >>> found.save("report.html").name
            'report.html'
        """
        from .html import page  # late: jinja2 is needed for this alone

        target = pathlib.Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def to_json(self, *, indent: int | None = None) -> str:
        """All of it as JSON: an object with the fields of this class."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def show(self) -> None:
        """Print the report: as tables on a terminal where rich is installed, else as plain text."""
        print_report(self)

    def __repr__(self) -> str:
        return text(self)

    def __rich__(self) -> Any:
        return rich(self)

    def _repr_html_(self) -> str:
        return notebook(self)
