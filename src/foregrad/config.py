"""Settings: one frozen value, read once where a function is compiled, and handed down.

`config` is the current value's holder: read attributes from it, set them, or override them for a while::

    foregrad.config.recompile_limit = 16
    with foregrad.config.override(check=True):
        ...

Each has an environment variable, `FOREGRAD_` and its name in capitals, read at import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings and their defaults."""

    check: bool = False
    """Check every stage's result against its rules (slow; for tests and for tracking down a fault)."""

    recompile_limit: int = 32
    """How many graphs one compiled function may hold. Past it, calls that fit none of them run eagerly."""

    path_limit: int = 16
    """How many graphs one compiled function may hold for the ways that its program takes on values of its inputs.
    Past it, calls that take another way run eagerly."""

    error_on_recompile_limit: bool = False
    """Raise at these limits instead."""

    higher_order: bool = True
    """Keep what it takes to differentiate a compiled function again (create_graph=True): the fake tensors that it was
    captured with, and of inputs that are not leaves their histories."""

    on_unsupported: str = "eager"
    """What `compile` does with calls that it can't compile: "eager" runs them as they are and warns once, "raise"
    raises the error that says why."""

    progress: bool | None = None
    """Say on stderr that a call compiles, once that takes over two seconds. None: in a terminal and in a notebook."""

    background: bool = True
    """Let `backend="auto"` begin with eager's kernels while Inductor compiles in another process."""

    full_tracebacks: bool = False
    """Show foregrad's own frames in the tracebacks of errors that the function raises."""

    native: bool = True
    """Let calls go through the C++ part, where it was built (`foregrad doctor` says so). The same otherwise; a call
    costs some microseconds less."""

    cache: bool = True
    """Keep on disk what `compile` works out, where a backend's results can be kept, for the next process."""

    cache_dir: str = ""
    """The folder of the cache; by default `foregrad/compiled` in the user's folder for caches."""

    cache_limit: int = 1024
    """The most that the cache may take, in MiB. What was not used for longest goes first."""


def _from_environment() -> Config:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        text = os.environ.get(f"FOREGRAD_{field.name.upper()}")
        if text is None:
            continue
        if isinstance(field.default, bool) or field.name == "progress":
            values[field.name] = text.strip().lower() in ("1", "true", "yes", "on")
        elif isinstance(field.default, str):
            values[field.name] = text.strip()
        else:
            values[field.name] = int(text)
    return Config(**values)


class _Holder:
    """The settings in force. Assigning a name that is no setting raises `AttributeError`."""

    def __init__(self, value: Config) -> None:
        object.__setattr__(self, "value", value)

    value: Config

    if TYPE_CHECKING:  # the settings once more, which can be assigned here
        check: bool
        recompile_limit: int
        path_limit: int
        error_on_recompile_limit: bool
        higher_order: bool
        on_unsupported: str
        progress: bool | None
        background: bool
        full_tracebacks: bool
        native: bool
        cache: bool
        cache_dir: str
        cache_limit: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __setattr__(self, name: str, setting: Any) -> None:
        if name not in {f.name for f in dataclasses.fields(Config)}:
            raise AttributeError(f"foregrad has no setting `{name}`; there are {', '.join(self.names())}")
        object.__setattr__(self, "value", dataclasses.replace(self.value, **{name: setting}))

    def names(self) -> list[str]:
        """The names of all settings."""
        return [f.name for f in dataclasses.fields(Config)]

    @contextlib.contextmanager
    def override(self, **settings: Any) -> Iterator[None]:
        """Context: these settings in force, the former ones back afterwards."""
        before = self.value
        try:
            for name, setting in settings.items():
                setattr(self, name, setting)
            yield
        finally:
            object.__setattr__(self, "value", before)


config = _Holder(_from_environment())
