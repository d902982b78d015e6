"""foregrad's logs, and `FOREGRAD_LOGS`: it turns them on as `TORCH_LOGS` does for PyTorch.

Each name is a Python logger, `foregrad.NAME`, and can be set up as any. `FOREGRAD_LOGS="graphs,+guards,-recompiles"`: a
name alone is level INFO, with `+` DEBUG, with `-` ERROR. Logs go to stderr.
"""

from __future__ import annotations

import difflib
import logging

LOGS = {
    "graphs": "each joint graph after its capture",
    "partition": "the values saved for the backward; with + the two halves",
    "guards": "the code that decides whether a graph is right for a call, and runs it",
    "recompiles": "why a function is compiled again; with + for each existing graph",
    "eager": "calls that run eagerly, and why",
    "backends": "messages of backends",
}
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def set_logs(names: str) -> None:
    """Log the topics in `names` to stderr, as the environment variable `FOREGRAD_LOGS` does at the start.

    Args:
        names: names separated by commas: `graphs`, `partition`, `guards`, `recompiles`, `eager`, `backends`, or `all`;
            `+name` logs more, `-name` errors alone. An empty text turns all logs off.

    Raises:
        ValueError: for an unknown name; the message lists the known names.

    Example:
        >>> import logging, foregrad
        >>> foregrad.set_logs("graphs,+recompiles")
        >>> logging.getLogger("foregrad.recompiles").level == logging.DEBUG
        True
        >>> foregrad.set_logs("")
        >>> try:
        ...     foregrad.set_logs("graph")
        ... except ValueError as error:
        ...     print(str(error).partition(" Known")[0])
        foregrad logs no `graph`. Did you mean `graphs`?
    """
    levels: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in names.split(","))):
        name, level = word.lstrip("+-"), _LEVELS.get(word[0], logging.INFO)
        if name != "all" and name not in LOGS:
            raise ValueError(_unknown(name))
        levels |= dict.fromkeys(LOGS if name == "all" else [name], level)
    for name in LOGS:
        logging.getLogger(f"foregrad.{name}").setLevel(levels.get(name, logging.NOTSET))
    root = logging.getLogger("foregrad")
    for handler in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(handler)
    root.propagate = not levels
    if levels:
        root.addHandler(_Handler())


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Our handler, among a program's handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(name)s] %(message)s"))


def _unknown(name: str) -> str:
    known = sorted((*LOGS, "all"))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return f"foregrad logs no `{name}`.{hint} Known: {', '.join(known)}."
