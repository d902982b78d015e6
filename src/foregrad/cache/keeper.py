"""`Keeper`: the results that a pipeline keeps on disk, and their keys.

* The halves of a joint graph, after a backend's passes and the partition. The key is the joint graph as data, its
  signature, its guards, the options of `compile` (functions and policies by their source), the backend's own key,
  settings, versions and devices. The stages are functions of these alone, so an entry is equal to their result.
* For a compiler that keeps compiled graphs itself: the conditions on symbolic sizes that it added while it compiled a
  graph. The tag in that entry is a part of the compiler's own key, so the compiler finds a graph only together with
  the conditions that the graph holds under.

Both depend on the sizes at capture only through conditions on them. So one graph may have several entries; the first
whose conditions hold for the sizes at hand is taken. (A policy or a budget depends on the sizes themselves, which are
in the key then.)

Nothing here fails a call: a result that can't be described, written or read is made as if there were no cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from .._torch.expressions import expression_from, expression_to, table_to
from .._torch.nested import leaves
from .._torch.settings import settings
from .._torch.symbols import ClosedSizesError
from ..config import Config
from ..frontend.call import FlatCall
from ..frontend.reads import Reads
from ..graph.joint import JointGraph
from ..graph.meta import TensorSpec, spec_of
from ..graph.role import GraphRole
from ..serialize.values import checked
from .describe import UndescribedError, describe, digest
from .halves import constants_of, data_of, flags_of, halves_from, halves_to, symbols_of
from .store import Store, default_folder

log = logging.getLogger("foregrad")

T = TypeVar("T")
Halves = tuple[fx.GraphModule, fx.GraphModule]  # of a function without gradients, the second is empty
_NAMES = ("Forward", "Backward")
_VARIANTS = 8  # entries of one graph, for different conditions on sizes; past it the last one is replaced


def store_of(config: Config) -> Store:
    """The cache on disk that the settings name."""
    return Store(config.cache_dir or default_folder(), config.cache_limit << 20)


@dataclasses.dataclass(frozen=True)
class Keeper:
    """The cache of one pipeline.

    `options`: gives the options of its stages as JSON; called for each graph, since a backend's settings may change.
    `reads_origins`: whether a stage reads the origins of nodes (lines, modules), as policies may.
    """

    store: Store
    options: Callable[[], Any]
    reads_origins: bool = False

    # ---------------------------------------------------------------- halves

    def halves(self, joint: JointGraph, about: Callable[[], Any], make: Callable[[], tuple[Halves, bool]]) -> Halves:
        """The halves from the cache, else from `make`, which also tells whether they are to be kept.

        `about`: gives the guards of the capture, as JSON.
        """
        try:
            key = self._key("halves", joint, joint.module, [_signature(joint), about()])
        except Exception as why:
            log.debug("the halves of %s are not kept: %s", joint.name, why)
            return make()[0]
        first = _num_known(joint)
        kept, place = self._read(key, joint, lambda content: halves_from(content["halves"], joint, _NAMES))
        if kept is not None:
            forward, backward = kept
            return forward, backward
        halves, is_to_keep = make()
        if is_to_keep:
            self._write(
                place, joint, first, _about(joint, "halves", halves), lambda: {"halves": halves_to(halves, joint)}
            )
        return halves

    # ---------------------------------------------------------------- compiled graphs of symbolic sizes

    def compiled(
        self, module: fx.GraphModule, joint: JointGraph, role: GraphRole, compile_as: Callable[[GraphRole], T]
    ) -> T:
        """The result of `compile_as` for a graph. By the `tag` in the role a compiler keeps its result, or finds it."""
        if joint.symbols is None:
            return compile_as(role)
        try:
            key = self._key("sizes", joint, module, [describe(role)])
        except Exception as why:
            log.debug("the %s graph of %s is not kept: %s", role.phase, joint.name, why)
            return compile_as(role)
        first = _num_known(joint)
        tag, place = self._read(key, joint, lambda content: checked(content["tag"], str))
        if tag is not None:
            try:
                with joint.symbols.closed():  # the tag's graph holds under the entry's conditions and adds none
                    return compile_as(dataclasses.replace(role, tag=tag))
            except Exception as error:
                if not ClosedSizesError.is_behind(error):
                    raise
                log.debug("the compiler has lost the %s graph of %s: %s", role.phase, joint.name, error)
        tag = os.urandom(16).hex()
        graph = compile_as(dataclasses.replace(role, tag=tag))
        self._write(place, joint, first, _about(joint, f"sizes of the {role.phase}", (module,)), lambda: {"tag": tag})
        return graph

    # ---------------------------------------------------------------- both

    def _key(self, kind: str, joint: JointGraph, module: fx.GraphModule, more: Any) -> str:
        graph = data_of(module, _origins if self.reads_origins else flags_of)
        specs = (spec for node in module.graph.nodes for spec in leaves(spec_of(node)))
        used = {spec.device for spec in specs if isinstance(spec, TensorSpec)}
        constants = {name: _digest_of(value) for name, value in constants_of(module).items()}
        circumstances = [process(), describe(settings_that_matter(), lenient=True), devices(used)]
        sizes = described_sizes(joint, at_capture=self.reads_origins)  # budgets and policies depend on them
        return digest(kind, circumstances, self.options(), graph, constants, sizes, more)

    def _read(self, key: str, joint: JointGraph, restore: Callable[[Any], T]) -> tuple[T | None, str]:
        """(the restored entry whose conditions on sizes hold, or None; the place for a new entry)."""
        places = [key] if joint.symbols is None else [key, *(digest(key, number) for number in range(1, _VARIANTS))]
        free = None
        for place in places:
            content = self.store.read(place)
            if content is not None:
                try:
                    conditions = _conditions_from(content["conditions"], joint)
                    if not all(joint.symbols.at_capture(condition) for condition in conditions):
                        continue
                    restored = restore(content)
                    for condition in conditions:
                        joint.symbols.assume(condition)
                except Exception as error:  # whatever the fault, the entry can be made again
                    log.warning("an entry of the cache can't be used, and is made again: %s", error)
                else:
                    log.debug("from the cache: %s", place)
                    return restored, place
            free = free or place
        return None, free or places[-1]

    def _write(
        self, place: str, joint: JointGraph, first: int, about: dict[str, Any], content: Callable[[], dict[str, Any]]
    ) -> None:
        """Keep `content` with the conditions on sizes from number `first` on."""
        try:
            complete = content() | {"conditions": _conditions(joint, first)}
        except Exception as why:
            log.debug("the %s of %s are not kept: %s", about["what"], joint.name, why)
        else:
            self.store.write(place, about, complete)


def _num_known(joint: JointGraph) -> int:
    return 0 if joint.symbols is None else joint.symbols.num_found()


def _conditions(joint: JointGraph, first: int) -> list[Any]:
    """The conditions on sizes from number `first` on."""
    return [] if joint.symbols is None else [expression_to(guard, floats=True) for guard in joint.symbols.guards(first)]


def _conditions_from(data: Any, joint: JointGraph) -> list[Any]:
    symbols = symbols_of(joint)
    return [expression_from(item, symbols, floats=True) for item in checked(data, list)]


def _signature(joint: JointGraph) -> Any:
    errors = [joint.backward_error, *joint.failing.items(), *joint.raising.items()]
    return [joint.name, describe(joint.signature, lenient=True), list(map(str, errors))]


def _origins(node: fx.Node) -> dict[str, Any]:
    """The origin of a node, as a policy may read it."""
    origins = flags_of(node)
    for key in ("stack_trace", "nn_module_stack", "custom"):
        value = node.meta.get(key)
        if value:
            origins[key] = describe(dict(value) if isinstance(value, Mapping) else value, lenient=True)
    return origins


def _digest_of(tensor: torch.Tensor) -> str:
    """A digest of a constant's numbers; its layout is in the graph's data."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if type(plain) is not torch.Tensor or not plain.is_contiguous():
        raise UndescribedError("a constant that is no plain tensor")
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    return hashlib.sha256(content).hexdigest()


def _about(joint: JointGraph, what: str, modules: Sequence[fx.GraphModule]) -> dict[str, Any]:
    """For `foregrad cache ls`."""
    environment = process()
    nodes = [len(module.graph.nodes) for module in modules]
    versions = {"foregrad": environment["foregrad"], "torch": environment["torch"][0]}
    return {"name": joint.name, "what": what, "nodes": nodes, **versions}


# -------------------------------------------------------------------- environment
# The environment that results depend on: versions, sources, the processor, the settings in force.


_OF_NO_MATTER = ("PrinterOptions.", "warnAlways", "recursion limit", "numpy.seterr")


@functools.cache
def process() -> dict[str, Any]:
    """Versions, and a digest of foregrad's sources, which may change under one version."""
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "foregrad": str(getattr(package, "__version__", "")),
        "sources": _digest_of_sources(os.path.dirname(os.path.abspath(str(package.__file__)))),
        "torch": [str(torch.__version__), str(torch.version.git_version)],
        "python": [platform.python_implementation(), platform.python_version()],
        "machine": [sys.platform, platform.machine(), torch.backends.cpu.get_cpu_capability()],
    }


def _digest_of_sources(folder: str) -> str:
    """A digest of the names and contents of the Python files under a folder."""
    sha256 = hashlib.sha256()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(place, name)
                with open(path, "rb") as file:
                    content = file.read()
                sha256.update(f"{os.path.relpath(path, folder)}\0{len(content)}\0".encode() + content)
    return sha256.hexdigest()


def devices(used: Iterable[torch.device]) -> list[Any]:
    """The devices of a graph, accelerators with their names: kernels and plans differ from one to another."""
    described = []
    for device in sorted(set(used), key=str):
        name = ""
        if device.type == "cuda":
            name = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        described.append([str(device), name])
    return described


def settings_that_matter() -> dict[str, Any]:
    """The settings of the thread and of PyTorch that captures, partitions and compilations depend on."""
    return {name: value for name, value in settings().items() if not name.startswith(_OF_NO_MATTER)}


# -------------------------------------------------------------------- guards
# The guards of a capture as JSON: on arguments, on state that was read, on sizes, on settings.


def described_guards(call: FlatCall, reads: Reads, facts: Any) -> dict[str, Any]:
    """The guards of a captured call that mean something in another process.

    Guards also cover all globals that some code names, an identifier of this session in some library among them. These
    are left out: their influence on the graph is in the graph.
    """
    leaves = [
        [path, first, _leaf(leaf, is_open=index in call.numbers)]
        for index, (path, first, leaf) in enumerate(zip(call.paths, call.first_of, call.leaves, strict=True))
    ]
    return {
        "call": leaves,
        "tree": describe(call.tree, lenient=True),
        "dynamic": describe(dict(call.dynamic), lenient=True),
        "state": sorted(filter(None, map(_state, reads.places.values())), key=json.dumps),
        "facts": describe(tuple(facts), lenient=True),
    }


def _leaf(leaf: Any, *, is_open: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return None
    if is_open and type(leaf) is int:
        return ["any", "int"]  # a symbol, whose conditions are in the key
    return describe(leaf, lenient=True)


def _state(place: Any) -> Any:
    """Plain values in a closure, in defaults and in attributes of objects and modules."""
    if place.kind != "object" and place.owner is None:
        return None
    items = [
        [place.path(key), describe(expected.value, lenient=True)]
        for key, expected in place.items.items()
        if expected.kind == "equal"
    ]
    return sorted(items, key=json.dumps)


def described_sizes(joint: JointGraph, *, at_capture: bool) -> Any:
    """The symbols of a graph's sizes with their conditions; None without symbols.

    `at_capture`: also their values at capture.
    """
    if joint.symbols is None:
        return None
    try:
        table = table_to(joint.symbols, floats=True)
    except ValueError as error:
        raise UndescribedError(str(error)) from None
    if not at_capture:
        for symbol in table["symbols"]:
            del symbol["hint"]
    return table
