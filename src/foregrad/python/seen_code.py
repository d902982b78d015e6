"""The code and the modules that a call can reach: its reads besides tensors, and its questions about types."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

import torch

from .._torch.patches import REGION
from ..annexes import given
from ..errors import UnsupportedOpError, UnsupportedSideEffectError
from ..frontend.call import FlatCall
from ..graph.source import in_order
from ..house import is_house_code
from ..identity import IdSet
from ..tracing.tape.origin import Origins, user_line
from ._torch.asked import ReboundNames
from .code import codes_in, functions_of
from .libraries import is_of_library, is_outside
from .objects import values_of
from .program_state import ProgramState
from .reads import Reads, hooks_of
from .scan import Scan


class SeenCode:
    """`modules`: the modules with code that ran. `rebound`: the names with replacements in its code."""

    def __init__(
        self, call: FlatCall, name: str, reads: Reads, rebound: ReboundNames, origins: Origins, apart: Iterable[Any]
    ) -> None:
        """`apart`: functions called unchanged by every call; their reads need no guards."""
        self.call, self.name, self.reads, self.rebound, self.origins = call, name, reads, rebound, origins
        self.apart = tuple(apart)
        self.modules: IdSet[torch.nn.Module] = IdSet()
        self.names: dict[int, str] = {}  # of modules, by id

    def check(self, state: ProgramState) -> None:
        """The function is about to run."""
        self.names = state.module_names()
        self._check(getattr(self.call.function, "__self__", None), in_forward=True)

    def enter(self, module: torch.nn.Module) -> None:
        """The code of a module runs."""
        self._check(module)
        self.modules.add(module)
        name, kind = self.names.get(id(module)) or type(module).__name__, type(module).__qualname__
        self.origins.enter(name, kind, is_marked=REGION in vars(module))

    def _check(self, module: Any, *, in_forward: bool = False) -> None:
        """Raise for a call of a module that talks to other processes: it must do so in each call, and in none more."""
        found = (kind(module, in_forward=in_forward) for kind in given("modules that communicate"))
        for wrapper in filter(None, found):
            raise UnsupportedOpError(
                f"`{self.name}` calls a module of {wrapper} ({user_line(self.origins.here())}), and the module "
                "exchanges parameters and gradients with other processes around its forward. Compile the wrapped "
                "module, or each wrapped module inside: its forward is compiled, and the exchange runs outside the "
                "graph."
            )

    def scan(
        self,
        ran: Mapping[CodeType, dict[str, Any]],
        entered: Mapping[CodeType, dict[str, Any]],
        called: Iterable[Any],
        of_tensors: Iterable[Any],
    ) -> Scan:
        """Look at the arguments of the call, the code behind attributes that were read on modules, hooks (`of_tensors`
        and modules'), all other code that ran (`ran`, and a library's in `entered`, with their globals), and functions
        of libraries that were `called`. The program's objects are as before the run. Names the modules.
        """
        reads, scan = self.reads, Scan(self.reads, self.apart, entered)
        scan.visit(self.call.function, self.name)
        for leaf, path in zip(self.call.leaves, self.call.paths, strict=True):
            scan.visit(leaf, path)
        for kind in self.call.tree.types():
            scan.visit(kind, kind.__name__)
        of_modules = (hooks_of(self.modules, in_backward=in_backward) for in_backward in (False, True))
        for hook in itertools.chain(*of_modules, of_tensors):
            scan.visit(hook, getattr(hook, "__name__", "a hook"))
        for cls, name in list(reads.class_attributes):
            scan.attribute_of_class(cls, name)
        reads.name_modules(self.names)
        for value, name in reads.objects_of_modules():
            scan.visit(value, name)
        scan.finish()
        # Special methods, and functions that only a library calls, by their own variables.
        made = {inner for code in ran for inner in codes_in(code) if inner is not code}
        own = (code for code, namespace in ran.items() if not is_outside(namespace.get("__name__", "")))
        for function in functions_of([c for c in own if c.co_freevars and c not in made and not scan.has_opened(c)]):
            scan.visit(function, function.__name__)
        scan.finish()
        for code, namespace in ran.items():
            scan.ran(code, namespace)
        for code, namespace in entered.items():
            if code not in ran and not is_house_code(code):
                scan.libraries.ran(code, namespace)
        scan.libraries.told(called)
        scan.finish()
        self._scan_classes(scan)
        scan.of_code()
        scan.finish()
        _check_handled(self.name, scan, reads)
        return scan

    def _scan_classes(self, scan: Scan) -> None:
        """Reads of modules' classes through `type(module)`: no event reports these."""
        done = set[tuple[type, str]]()
        while asking := [code.others for _, code in scan.code if "type" in code.loaded or "__class__" in code.others]:
            named = frozenset().union(*asking)
            modules = [*self.modules, *(module for module, _ in scan.modules.values())]
            new = []
            for cls in dict.fromkeys(map(type, modules)):
                own = [base for base in cls.__mro__ if not is_of_library(base)]
                there = {name for base in own for name in named.intersection(base.__dict__)}
                options = {name for base in own for name in values_of(base)}
                names = there | (options & scan.names) | (named & scan.probed)
                new += [(cls, name) for name in in_order(names) if own and (cls, name) not in done]
            if not new:
                return
            for cls, name in new:
                scan.attribute_of_class(cls, name)
            done.update(new)
            scan.finish()


_OF_HANDLED = frozenset(
    "exc_info exception __context__ format_exc print_exc format_exception print_exception TracebackException".split()
)


def _check_handled(name: str, scan: Scan, reads: Reads) -> None:
    """The code asks for the exception being handled, or for the one before it: there is none from outside."""
    if any(not _OF_HANDLED.isdisjoint(named.loaded | named.others) for _, named in scan.code):
        if not _is_none_handled():
            raise UnsupportedSideEffectError(
                f"`{name}` is called while an exception is being handled, and its code may read the exception "
                "(`sys.exc_info()`, `__context__`, `traceback.format_exc()`). Call it outside of the `except` block, "
                "or pass the information as an argument."
            )
        reads.ask(_is_none_handled, "whether no exception is being handled", _is_none_handled)


def _is_none_handled(_: Any = None) -> bool:
    return sys.exc_info()[1] is None
