"""A joint graph on its way to the process that compiles: as data, without code, and back.

The signature goes along as far as compilers read a signature: without sources of inputs, results, effects in Python.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..._torch.fakes import FakeTensorMode
from ..._torch.symbols import SymbolTable
from ...errors import ArtifactError
from ...graph.joint import JointGraph
from ...graph.signature import BaseOf, EffectInfo, MemoryOf, Signature, StopInfo, StructureInfo
from ...house import extensions
from ...partitioners import default_partition, fused_partition, min_cut_rematerialization_partition
from ...python._torch.settings import apply_settings, settings
from .._torch import floats_to, restored_float, restored_table, table_to
from ..artifacts.container import StateEntry, dump_tensors, read_tensors
from ..artifacts.records import record_from, record_to
from ..cache.describe import describe, digest
from ..cache.keeper import Keeper, constants_of, halves_from, halves_to, process, settings_that_matter, symbols_of
from ..serialize.values import Reader, Writer

PARTITIONS = {
    function.__name__: function
    for function in (default_partition, fused_partition, min_cut_rematerialization_partition)
}
_MOST_CONSTANTS = 16 << 20  # bytes; past it a graph stays in its process


class StaysError(Exception):
    """A graph that only the program's own process can compile."""


def graph_as_data(joint: JointGraph) -> dict[str, Any]:
    """The joint graph as JSON. Raises `StaysError` if it has values that belong to the program alone."""
    if joint.signature.gradients.stages:
        raise StaysError("its backward has several stages")
    writer = Writer()
    try:
        table = None if joint.symbols is None else table_to(joint.symbols)
        floats = floats_to(n for node in joint.graph.nodes if isinstance(n := node.meta.get("val"), torch.SymFloat))
        constants = [StateEntry(name, "constant", value) for name, value in constants_of(joint.module).items()]
        data, layouts, content = dump_tensors(constants) if constants else ([], [], b"")
        described = {
            "name": joint.name,
            "has_backward": joint.backward_error is None,
            "symbols": table,
            "signature": record_to(_pared(joint.signature), writer),
            "tables": writer.tables(),
            "graph": halves_to([joint.module], joint),
            "constants": [data, layouts, base64.b64encode(content).decode()],
            "floats": floats,
        }
    except Exception as error:  # an object without a description
        raise StaysError(str(error)) from error
    known = [*(entry["name"] for entry in (table or {"symbols": ()})["symbols"]), *(entry[0] for entry in floats)]
    if symbols_of(joint).keys() - set(known):
        raise StaysError("it computes with numbers that it reads from tensors")
    if len(content) > _MOST_CONSTANTS:
        raise StaysError("it holds large constants")
    return described


def graph_from_data(data: Any) -> JointGraph:
    """The joint graph from the data of `graph_as_data`. Raises `StaysError` if this process lacks an operator."""
    try:
        table, symbols = (None, {}) if data["symbols"] is None else restored_table(data["symbols"])
        if any(str(symbol) != name for name, symbol in symbols.items()):
            raise StaysError("its symbols have other names here")
        env = table or (SymbolTable() if data["floats"] else None)
        numbers = [restored_float(env, entry) for entry in data["floats"]] if env is not None else []
        mode = FakeTensorMode(shape_env=None if env is None else env.env)
        mode.cache_enabled = False
        signature = record_from(data["signature"], Signature, Reader(data["tables"], table, symbols))
        described, layouts, content = data["constants"]
        entries = read_tensors(described, layouts, base64.b64decode(content)) if described else []
        held = _holding({entry.name: entry.tensor for entry in entries}, numbers)
        error = None if data["has_backward"] else RuntimeError("of the graph's backward")
        empty = JointGraph(data["name"], held, signature, mode, error, table)
        (module,) = halves_from(data["graph"], empty, ["JointGraph"])
    except (ArtifactError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise StaysError(str(error)) from error
    return dataclasses.replace(empty, module=module)


def _holding(constants: dict[str, torch.Tensor], numbers: list[Any]) -> fx.GraphModule:
    root, graph = torch.nn.Module(), fx.Graph()
    for place, number in enumerate(numbers):
        graph.placeholder(f"number_{place}").meta = {"val": number, "spec": None}
    for name, value in constants.items():
        root.register_buffer(name, value, persistent=False)
        graph.get_attr(name)
    graph.output([])
    return fx.GraphModule(root, graph)


def _pared(signature: Signature) -> Signature:
    inputs = tuple(
        dataclasses.replace(
            info, source=info.source if isinstance(info.source, (BaseOf, MemoryOf)) else None, number=None
        )
        for info in signature.inputs
    )
    return dataclasses.replace(
        signature,
        inputs=inputs,
        structure=StructureInfo(shared_memory=signature.structure.shared_memory),
        effects=EffectInfo(log=signature.effects.log),
        stops=StopInfo(decisions=signature.stops.decisions, checks=signature.stops.checks),
    )


# -------------------------------------------------------------------- circumstances


def circumstances(keeper: Keeper) -> str:
    """A digest of all facts besides the graph that decide on a compiled graph."""
    matter = describe(settings_that_matter(), lenient=True)
    return digest(process(), extensions(), matter, keeper.options())


def settings_as_data() -> dict[str, Any]:
    """The settings in force with values that JSON has."""
    found = {name: _plain(value) for name, value in settings().items()}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple) and all(type(item) in (bool, int, str) for item in value):
        return {"tuple": list(value)}
    return value if type(value) in (bool, int, str, float) else None


def take_settings(data: dict[str, Any]) -> None:
    """Give this process the settings of `settings_as_data`."""
    for name, now in settings().items():
        if name in data and _plain(now) != data[name]:
            value = data[name]
            if isinstance(value, dict):
                value = tuple(value["tuple"]) if "tuple" in value else getattr(torch, value["dtype"])
            apply_settings({name: value})


def key_of(data: Any, kept: Collection[str], partition: str, regions: Any, about: str) -> str:
    """The key of the compiled graph in the cache on disk."""
    return digest("elsewhere", data, sorted(kept), partition, regions, about)
