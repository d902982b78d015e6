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

from .errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings and their defaults."""

    check: bool = False
    """Check every stage's result against its rules (slow; for tests and for tracking down a fault)."""

    recompile_limit: int = 32
    """How many graphs one compiled function may hold. Past it, calls that fit none of them run eagerly."""

    path_limit: int = 16
    """How many graphs one compiled function may hold for the outcomes of its branches on values. Past it, calls with
    further outcomes run eagerly. A derivative may hold as many for its own branches and for kinds of gradients; past
    it, the backward raises."""

    single_use_limit: int = 8
    """How many graphs in a row may serve a single call, because a value differs in each call, or no call, because a
    branch differs. Past it, such calls run eagerly, as do calls that fill a cache this many times in a row."""

    error_on_recompile_limit: bool = False
    """Raise at the limits above, instead of running eagerly."""

    vain_limit: int = 32
    """A graph runs in vain if a branch on values then goes the other way. If vain runs outnumber the calls served by
    more than this limit, the function tries no graph that branches on values."""

    refusal_limit: int = 8
    """How many kinds of calls that can't be compiled a compiled function distinguishes, by the arguments' types,
    dtypes, dimensions and flags. Past it, every call that fits no graph runs eagerly."""

    higher_order: bool = True
    """Keep the data for second derivatives (create_graph=True): the fake tensors of a capture, and the histories of
    inputs that are not leaves."""

    on_unsupported: str = "eager"
    """The treatment of calls that `compile` can't compile: "eager" runs them eagerly and warns once, "raise" raises
    an error with the reason."""

    progress: bool | None = None
    """Say on stderr that a call compiles, if it takes over two seconds. None: in a terminal and in a notebook."""

    background: bool = True
    """Let `backend="auto"` begin with eager's kernels while a second process compiles."""

    full_tracebacks: bool = False
    """Show foregrad's own frames in the tracebacks of errors that the function raises."""

    native: bool = True
    """Run calls through the C++ part, if it is built (`foregrad doctor` says so). Results are equal either way; a call
    costs some microseconds less."""

    cache: bool = True
    """Keep the results of `compile` on disk for the next process, if the backend's results can be stored."""

    cache_dir: str = ""
    """The folder of the cache; by default `foregrad/compiled` in the user's folder for caches."""

    cache_limit: int = 1024
    """The size limit of the cache in MiB. Entries not used for the longest time are removed first."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setting, kind = getattr(self, field.name), type(field.default)
            if field.name == "on_unsupported":
                is_right, said = setting in ("eager", "raise"), "'eager' or 'raise'"
            elif field.name == "progress":
                is_right, said = setting is None or isinstance(setting, bool), "True, False or None"
            elif kind is int:
                is_right, said = type(setting) is int and setting >= 0, "an integer from 0 on"
            else:
                is_right, said = isinstance(setting, kind), "True or False" if kind is bool else "text"
            if not is_right:
                raise ValueError(f"foregrad.config.{field.name} is {said}, not {setting!r}")


_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)


def _from_environment() -> Config:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        text = os.environ.get(f"FOREGRAD_{field.name.upper()}")
        if text is None:
            continue
        text = text.strip()
        if isinstance(field.default, bool) or field.name == "progress":
            values[field.name] = _TRUTHS.get(text.lower(), text)
        else:
            values[field.name] = int(text) if type(field.default) is int and text.isdigit() else text
    return Config(**values)


class _Holder:
    """The settings in force. A name that is no setting raises `AttributeError`, a wrong value `ValueError`."""

    def __init__(self, value: Config) -> None:
        object.__setattr__(self, "value", value)

    value: Config

    if TYPE_CHECKING:  # the settings once more: here they can be assigned
        check: bool
        recompile_limit: int
        path_limit: int
        single_use_limit: int
        error_on_recompile_limit: bool
        vain_limit: int
        refusal_limit: int
        higher_order: bool
        on_unsupported: str
        progress: bool | None
        background: bool
        full_tracebacks: bool
        native: bool
        cache: bool
        cache_dir: str
        cache_limit: int

    else:  # hidden from type checkers, so that they find misspelt settings

        def __getattr__(self, name: str) -> object:
            self._check_name(name)
            return getattr(self.value, name)

        def __setattr__(self, name: str, setting: object) -> None:
            self._check_name(name)
            object.__setattr__(self, "value", dataclasses.replace(self.value, **{name: setting}))

    def _check_name(self, name: str) -> None:
        if name not in Config.__dataclass_fields__:
            meant = did_you_mean(name, self.names(), " (did you mean `{}`?)")
            raise AttributeError(f"foregrad has no setting `{name}`{meant}; there are {', '.join(self.names())}")

    def names(self) -> list[str]:
        """The names of all settings."""
        return [f.name for f in dataclasses.fields(Config)]

    @contextlib.contextmanager
    def override(self, **settings: object) -> Iterator[None]:
        """Context: these settings in force, the former ones back afterwards."""
        before = self.value
        try:
            for name, setting in settings.items():
                setattr(self, name, setting)
            yield
        finally:
            object.__setattr__(self, "value", before)


config = _Holder(_from_environment())
