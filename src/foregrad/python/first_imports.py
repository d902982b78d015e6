"""Modules that a function is the first to import: they are imported ahead of the run, as they would be in eager.

The code of a module runs once for the process. Its objects (tensors, counters, entries in a registry) stay, so it can
be no part of a capture.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ..tracing.aspect import Aspect, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.tape.again import CaptureAgain
from .libraries import is_outside


@aspect
class FirstImports(Aspect):
    """A finder of modules that finds none: where the capturing thread is about to import one, the capture starts over.

    `modules`: by name, whether the module was imported ahead of a run, or could not be. More become known.
    """

    def __init__(self, host: Host, recorder: Recording) -> None:
        assert host.learned is not None
        self.modules: dict[str, bool] = host.learned.facts.setdefault(FirstImports, {})
        self._thread = threading.get_ident()

    def prepare(self) -> None:
        """Import the modules that earlier runs were about to import. A failing module fails again where asked for."""
        for name in [name for name, is_tried in self.modules.items() if not is_tried]:
            self.modules[name] = True
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    @contextlib.contextmanager
    def around_function(self) -> Iterator[None]:
        sys.meta_path.insert(0, self)
        try:
            yield
        except Exception:
            self._check()
            raise
        finally:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
        self._check()

    def _check(self) -> None:
        """The function may have caught that it was to start over."""
        if not all(self.modules.values()):
            raise CaptureAgain

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """The import system asks each finder for a module that is not loaded. Later finders know whether it exists."""
        if threading.get_ident() != self._thread or name in self.modules or is_outside(name):
            return
        others = [finder for finder in sys.meta_path if not isinstance(finder, FirstImports)]
        if any(finder.find_spec(name, path, target) is not None for finder in others):
            self.modules[name] = False
            raise CaptureAgain
