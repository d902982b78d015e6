"""`Keeper`: the results that a pipeline keeps on disk, and their keys.

* The halves of a joint graph, after a backend's passes and the partition. The key is the joint graph as data, its
  signature, its guards, the options of `compile` (functions and policies by their source), the backend's own key,
  settings, versions and devices. The stages are functions of these alone, so an entry is equal to their result.
* For a compiler that keeps compiled graphs itself: the conditions on symbolic sizes that it added while it compiled a
  graph. The entry's tag is a part of the compiler's own key, so the compiler finds a graph only together with the
  conditions that the graph holds under.

Both depend on the sizes at capture only through conditions. So one graph may have several entries; the first with
conditions that hold for the sizes at hand is taken. (A policy or a budget depends on the sizes themselves: then the key
has them.)

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

from ..._torch.nested import leaves
from ..._torch.symbols import ClosedSizesError, SymbolTable, is_symbolic
from ...annexes import the_one
from ...backends.registry import Backend
from ...config import Config, config
from ...frontend.call import FlatCall
from ...graph.joint import JointGraph
from ...graph.meta import NodeMeta, TensorSpec, spec_of
from ...graph.role import PREPARED, GraphRole
from ...house import extensions, is_house_module
from ...identity import ById
from ...python._torch.settings import partitioner_settings, settings
from ...python.reads import Reads
from .._torch import expression_from, expression_to, raw_expression, table_to
from ..serialize.graphs import first_sequence_nr, graph_from, graph_to
from ..serialize.values import Reader, Writer, checked
from .describe import UndescribedError, describe, digest
from .store import Store, default_folder

log = logging.getLogger("foregrad")

T = TypeVar("T")
Halves = tuple[fx.GraphModule, fx.GraphModule]  # of a function without gradients, the second is empty
_NAMES = ("Forward", "Backward")
_VARIANTS = 8  # entries of a graph, for different conditions on sizes; a further entry replaces the last


def store_of(config: Config) -> Store:
    """The cache on disk that the settings name."""
    return Store(config.cache_dir or default_folder(), config.cache_limit << 20)


def keeper_for(chosen: Backend, split: Callable[..., Halves], decompositions: Any, *, is_quick: bool) -> Keeper | None:
    """The cache on disk; None if the backend's results may not be kept."""
    key = chosen.cache_key
    if key is None:
        return None
    settings = config.value
    aside = "cache", "progress", "background"
    in_force = {name: value for name, value in vars(settings).items() if not name.startswith(aside)}

    def options() -> Any:
        backend_key = key()
        if backend_key is None:
            raise UndescribedError(f"the backend {chosen.name} asks for it")
        table = decompositions() if callable(decompositions) else decompositions
        table = {str(op): describe(function) for op, function in (table or {}).items()}
        return [chosen.name, backend_key, describe(split), _settings_of(split), table, in_force]

    return Keeper(store_of(settings), options, reads_origins=not is_quick)


def _settings_of(split: Callable[..., Halves]) -> str | None:
    """The settings that a partitioner of PyTorch's reads; None for any other partitioner."""
    function = split.func if isinstance(split, functools.partial) else split
    return None if is_house_module(getattr(function, "__module__", "")) else partitioner_settings()


@dataclasses.dataclass(frozen=True)
class Keeper:
    """The cache of one pipeline.

    `options`: gives the options of its stages as JSON; called for each graph, since a backend's settings may change.
    `reads_origins`: whether a stage reads the origins of nodes (lines, modules), as policies may. `told`: a text
    that stands for all that results depend on besides a graph itself, worked out elsewhere.
    """

    store: Store
    options: Callable[[], Any]
    reads_origins: bool = False
    told: str = ""

    # ---------------------------------------------------------------- halves

    def halves(self, joint: JointGraph, about: Sequence[Any], make: Callable[[], tuple[Halves, bool]]) -> Halves:
        """The halves from the cache, else from `make`; it also tells whether they are to be kept.

        `about`: the call, and its capture's reads.
        """
        try:
            key = self._key(
                "halves", joint, joint.module, [_signature(joint), described_guards(*about) if about else {}]
            )
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
        if self.told:
            return digest(self.told, kind, data_of(module, flags_of), more if kind == "sizes" else None)
        graph = data_of(module, _origins if self.reads_origins else flags_of)
        specs = (spec for node in module.graph.nodes for spec in leaves(spec_of(node)))
        used = {spec.device for spec in specs if isinstance(spec, TensorSpec)}
        constants = {name: _digest_of(value) for name, value in constants_of(module).items()}
        circumstances = [process(), extensions(), describe(settings_that_matter(), lenient=True), devices(used)]
        sizes = described_sizes(joint, at_capture=self.reads_origins)  # budgets and policies depend on them
        return digest(kind, circumstances, self.options(), graph, constants, sizes, more)

    def _read(self, key: str, joint: JointGraph, restore: Callable[[Any], T]) -> tuple[T | None, str]:
        """(the restored entry with conditions that hold, or None; the place for a new entry)."""
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
                except Exception as error:  # the entry can be made again after any fault
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


_OF_NO_MATTER = ("PrinterOptions.", "warnAlways")


@functools.cache
def process() -> dict[str, Any]:
    """Versions, and a digest of foregrad's sources: these may change under one version."""
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
    """The devices of a graph, accelerators with their names: kernels and plans differ between them."""
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
    """The guards of a captured call that mean something in a new process.

    Guards also cover all globals that some code names, an identifier of the session in some library among them. These
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
        "padded": describe(dict(call.padded), lenient=True),
        "state": sorted(filter(None, map(_state, reads.places.values())), key=json.dumps),
        "facts": describe(tuple(facts), lenient=True),
    }


def _leaf(leaf: Any, *, is_open: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return None
    if is_open and type(leaf) is int:
        return ["any", "int"]  # a symbol: its conditions are in the key
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


# -------------------------------------------------------------------- halves
# Forward and backward of a joint graph as data, to be read beside an equal joint graph in another process.
#
# Nothing of the joint graph is kept twice: constants are named, symbols of sizes are the joint graph's own, and a node
# takes its origin (line, module, operator) from the node it is `like`.

_BUDGET = "memory_budget"  # of a forward's `meta`, see `partitioners.budget`
_KNOWN = {_BUDGET, PREPARED}
_MORE = {"has_backward_hook": bool, "saved_tensor_with_no_vc_check": bool, "updated": bool, "marked_call": int}
_OWN = ("val", "spec", "tensor_meta")  # entries of a node that are never taken from the node it is like


def constants_of(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The constant tensors of a graph, by attribute name. Raises `UndescribedError` for constants of any other type."""
    constants = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            value = getattr(module, name) if "." not in name else None
            if type(value) is not torch.Tensor:
                raise UndescribedError(f"the attribute {name} of a graph")
            constants[name] = value
    return constants


def symbols_of(joint: JointGraph) -> dict[str, Any]:
    """The symbols of a joint graph's sizes and numbers, by their names."""
    table = joint.symbols
    symbols = set() if table is None else {*table.bound, *table.computed}
    numbers = (node.meta.get("val") for node in joint.graph.nodes if spec_of(node) is None)
    symbols |= {symbol for n in numbers if is_symbolic(n) for symbol in raw_expression(n).free_symbols}
    return {str(symbol): symbol for symbol in symbols}


def _table_of(joint: JointGraph) -> SymbolTable | None:
    """The table of the graph's symbols, made here for a graph without symbols besides floats that it reads."""
    numbers = (node.meta.get("val") for node in joint.graph.nodes if spec_of(node) is None)
    own = (SymbolTable(n.node.shape_env) for n in numbers if is_symbolic(n))
    return joint.symbols or next(own, None)


def _namer(constants: Mapping[str, torch.Tensor]) -> Callable[[Any], str]:
    names = ById((tensor, name) for name, tensor in constants.items())

    def name_of(tensor: Any) -> str:
        if tensor not in names:
            raise UndescribedError("a constant that a pass made")
        return names[tensor]

    return name_of


def data_of(module: fx.GraphModule, details: Callable[[fx.Node], dict[str, Any]]) -> dict[str, Any]:
    """One graph as data, with its tables, for a key."""
    writer = Writer(symbolic_floats=True)
    flags_of(_output(module))  # raises for descriptors: the data would leave them out
    graph = graph_to(module, writer, _namer(constants_of(module)), details)
    return graph | {"tables": writer.tables()}


def halves_to(halves: Sequence[fx.GraphModule], joint: JointGraph) -> dict[str, Any]:
    """The halves as data. Raises `UndescribedError` or `ArtifactError` for halves that can't be data."""
    writer, constants = Writer(symbolic_floats=True), constants_of(joint.module)
    writer.first_sequence_nr = first_sequence_nr(joint.module)
    like = _Likes(joint)
    graphs = []
    for half in halves:
        if set(half.meta) - _KNOWN:
            raise UndescribedError(f"a half with {sorted(set(half.meta) - _KNOWN)}")
        _check(half)
        for name, value in constants_of(half).items():
            if constants.get(name) is not value:
                raise UndescribedError("a constant that a pass made or renamed")
        graph = graph_to(half, writer, _namer(constants), like.details)
        graphs.append(graph | {"returns": "tuple" if isinstance(_results(half), tuple) else "list"})
    outcome = halves[0].meta.get(_BUDGET)
    content = {"graphs": graphs, "tables": writer.tables(), "prepared": PREPARED in halves[0].meta}
    return content if outcome is None else content | {"budget": outcome.data()}


def halves_from(data: Any, joint: JointGraph, names: Sequence[str]) -> list[fx.GraphModule]:
    """The halves from the data of `halves_to`, for an equal joint graph. Raises for any other data."""
    reader = Reader(data["tables"], _table_of(joint), symbols_of(joint), symbolic_floats=True)
    constants = constants_of(joint.module)
    origins, first = {node.name: node for node in joint.graph.nodes}, first_sequence_nr(joint.module)
    halves = []
    for entry, name in zip(data["graphs"], names, strict=True):
        half = graph_from(entry, reader, constants, joint.fake_mode, name, attributes=lambda key, _: key)
        for node, item in zip(half.graph.nodes, entry["nodes"], strict=True):
            _restore(node, item, origins, first)
        if entry["returns"] == "tuple":  # compilers' own keys contain the text of a graph
            _output(half).args = (tuple(_results(half)),)
        half.meta |= {PREPARED: True} if checked(data["prepared"], bool) else {}
        halves.append(half)
    if "budget" in data:
        halves[0].meta[_BUDGET] = the_one("memory budgets").Outcome.of(data["budget"])
    return halves


def _output(module: fx.GraphModule) -> fx.Node:
    output: fx.Node = next(iter(reversed(module.graph.nodes)))
    return output


def _results(module: fx.GraphModule) -> Any:
    return _output(module).args[0]


def _check(half: fx.GraphModule) -> None:
    """Raise `UndescribedError` for values that a graph's data leaves out."""
    for node in half.graph.nodes:
        if node.op not in ("placeholder", "call_function") or spec_of(node) is not None:
            continue
        value = node.meta.get("val")
        if value is not None and type(value) is not int and not is_symbolic(value):
            raise UndescribedError(f"a value that is a {type(value).__name__}")


class _Likes:
    """For each node of a half, a node of the joint graph with an equal origin."""

    def __init__(self, joint: JointGraph) -> None:
        self.by_name = {node.name: node for node in joint.graph.nodes}
        self.by_trace: dict[Any, str] = {}
        for node in joint.graph.nodes:
            self.by_trace.setdefault(node.meta.get("stack_trace"), node.name)

    def details(self, node: fx.Node) -> dict[str, Any]:
        details = flags_of(node)
        trace = node.meta.get("stack_trace")
        same = self.by_name.get(node.name)
        if same is not None and same.meta.get("stack_trace") == trace:
            details["like"] = node.name
        elif trace in self.by_trace:
            details["like"] = self.by_trace[trace]
        return details


def flags_of(node: fx.Node) -> dict[str, Any]:
    """Metadata that partitioners and reports read of a node, besides that in every graph's data."""
    if dict.get(node.meta, "desc") is not None:
        raise UndescribedError("descriptors on a node")
    flags: dict[str, Any] = {}
    for key, cls in _MORE.items():
        value = dict.get(node.meta, key)
        if type(value) is cls:
            flags[key] = value
    names = dict.get(node.meta, "checkpoint_names")
    if names:
        flags["checkpoint_names"] = [checked(name, str) for name in names]
    return flags


_OF_ENTRY = ("partitioner_tag", "autograd_backward", "seq_nr", "is_gradient_acc", "ac_graph_id", "recompute")


def _restore(node: fx.Node, item: Mapping[str, Any], origins: Mapping[str, fx.Node], first_sequence_nr: int) -> None:
    origin = origins.get(item.get("like", ""))
    if node.op == "output" or not isinstance(node.meta, NodeMeta):
        return
    for key, cls in _MORE.items():
        if key in item:
            node.meta[key] = checked(item[key], cls)
    if "seq_nr" in item:
        node.meta["seq_nr"] = first_sequence_nr + item["seq_nr"]
    if "checkpoint_names" in item:
        node.meta["checkpoint_names"] = tuple(checked(name, str) for name in item["checkpoint_names"])
    if origin is None or not isinstance(origin.meta, NodeMeta):
        return
    own = {*_OWN, *_OF_ENTRY, *_MORE, "checkpoint_names"}
    for key, value in dict.items(origin.meta):
        if key not in own:
            dict.setdefault(node.meta, key, value)
    more = {key: make for key, make in origin.meta._late.items() if key not in own and key not in node.meta}
    node.meta._late = {**node.meta._late, **more}
