"""The tensors of an artifact: parameters, buffers and constants, by name, and as safetensors.

safetensors keeps contiguous tensors over memory of their own. Other layouts are kept so that they can be restored: a
tensor whose strides leave no gaps is kept contiguous beside its strides, complex numbers are kept as pairs, and tensors
that share memory as that memory and the place of each in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._torch.tensors import storage_key
from ..errors import ArtifactError
from ..graph.meta import TensorSpec
from ..serialize.values import Reader, Writer, checked

KINDS = ("parameter", "buffer", "temporary buffer", "tensor", "constant")
_LONGEST_NAME = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor that an artifact holds.

    `kind`: "parameter", "buffer", "temporary buffer" (not in the `state_dict`), "tensor" (that the function closed
    over) or "constant" (of a graph). `aliases`: its other names in the module.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()


def _library() -> Any:
    try:
        import safetensors.torch as library
    except ImportError as error:
        raise ArtifactError("artifacts need the package safetensors: pip install safetensors") from error
    return library


def dump_tensors(entries: Sequence[StateEntry]) -> tuple[list[dict[str, Any]], list[Any], bytes]:
    """(the tensors' entries in the manifest, their layouts, the tensors as safetensors)."""
    writer, stored, data = Writer(), {}, []
    shared: dict[int, list[StateEntry]] = {}
    for entry in entries:
        _check_storable(entry)
        if entry.tensor.numel():
            shared.setdefault(storage_key(entry.tensor), []).append(entry)
    memories: dict[int, tuple[str, int]] = {}
    for key, group in shared.items():
        specs = [TensorSpec.of(entry.tensor) for entry in group]
        if len(group) > 1 or not specs[0].is_dense:
            name = f"memory.{len(memories)}"
            memories[key], stored[name] = _memory(group, specs, name)
    for entry in entries:
        tensor, key = entry.tensor.detach(), storage_key(entry.tensor) if entry.tensor.numel() else 0
        spec = TensorSpec.of(tensor)
        described: dict[str, Any] = {"name": entry.name, "kind": entry.kind}
        described |= {"requires_grad": True} if entry.requires_grad else {}
        described |= {"aliases": list(entry.aliases)} if entry.aliases else {}
        if key in memories:
            name, start = memories[key]
            spec = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset - start)
            data.append(described | {"layout": writer.layout(spec), "memory": name})
            continue
        spec = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device)
        content = tensor.cpu()
        content = torch.view_as_real(content.resolve_conj()) if content.is_complex() else content
        stored[entry.name] = content.contiguous()
        data.append(described | {"layout": writer.layout(spec), "stored": entry.name})
    library = _library()
    try:
        return data, writer.tables()["layouts"], library.save(stored)
    except Exception as error:
        raise ArtifactError(f"its tensors can't be stored: {error}") from error


def _check_storable(entry: StateEntry) -> None:
    tensor = entry.tensor
    if len(entry.name) > _LONGEST_NAME or not entry.name.isprintable():
        raise ArtifactError(f"a tensor has a name that can't be stored: {entry.name[:80]!r}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta" or tensor.is_neg():
        raise ArtifactError(f"the {entry.kind} {entry.name} is a {tensor.layout} tensor on {tensor.device}")


def _memory(group: list[StateEntry], specs: list[TensorSpec], name: str) -> tuple[tuple[str, int], torch.Tensor]:
    """The memory that a group of tensors lies in, with its place in the file."""
    first = group[0].tensor.detach()
    if any(spec.dtype is not first.dtype or spec.conj for spec in specs):
        names = ", ".join(entry.name for entry in group)
        raise ArtifactError(f"{names} share memory under several dtypes")
    start = min(spec.offset for spec in specs)
    end = max(spec.offset + spec.nbytes // spec.dtype.itemsize for spec in specs)
    content = first.as_strided((end - start,), (1,), start).cpu().clone()
    return (name, start), torch.view_as_real(content) if content.is_complex() else content


def read_tensors(data: Any, layouts: Any, content: bytes) -> list[StateEntry]:
    """The entries from the data of `dump_tensors`. Raises `ArtifactError` for any other data."""
    library = _library()
    try:
        stored: Mapping[str, torch.Tensor] = library.load(content)
    except Exception as error:  # of the library's own class
        raise ArtifactError(f"its tensors can't be read: {error}") from error
    reader = Reader({"operators": [], "lines": [], "layouts": layouts})
    entries: list[StateEntry] = []
    seen: set[str] = set()
    used: set[str] = set()
    for item in checked(data, list):
        name, kind = checked(item["name"], str), item["kind"]
        aliases = tuple(checked(alias, str) for alias in item.get("aliases", ()))
        if kind not in KINDS or not seen.isdisjoint((name, *aliases)) or len(name) > _LONGEST_NAME:
            raise ArtifactError(f"{name[:80]!r} is no name of a tensor of its own")
        seen.update((name, *aliases))
        spec = reader.layout(item["layout"])
        if not spec.is_static:
            raise ArtifactError(f"the size of {name[:80]!r} is symbolic")
        key = checked(item["memory" if "memory" in item else "stored"], str)
        if key not in stored:
            raise ArtifactError(f"there are no values for {name[:80]!r}")
        used.add(key)
        values = stored[key]
        tensor = _view_of(values, spec, name) if "memory" in item else _laid_out(values, spec, name)
        entries.append(StateEntry(name, kind, tensor, checked(item.get("requires_grad", False), bool), aliases))
    if used != set(stored):
        raise ArtifactError("it has values for tensors that it does not name")
    return entries


def _numbers(values: torch.Tensor, spec: TensorSpec, name: str) -> torch.Tensor:
    if spec.dtype.is_complex and not values.is_complex():
        if values.dim() == 0 or values.shape[-1] != 2 or values.dtype is not spec.dtype.to_real():
            raise ArtifactError(f"the values of {name[:80]!r} are no complex numbers")
        values = torch.view_as_complex(values.contiguous())
    if values.dtype is not spec.dtype:
        raise ArtifactError(f"the values of {name[:80]!r} are {values.dtype}, not {spec.dtype}")
    return values.to(spec.device)


def _laid_out(values: torch.Tensor, spec: TensorSpec, name: str) -> torch.Tensor:
    values = _numbers(values, spec, name)
    if tuple(values.shape) != spec.shape:
        raise ArtifactError(f"the values of {name[:80]!r} have the shape {tuple(values.shape)}, not {spec.shape}")
    if values.stride() == spec.stride and values.numel() and not spec.offset:
        return values
    if not spec.is_dense or spec.offset:
        raise ArtifactError(f"the strides of {name[:80]!r} leave gaps")
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(values)


def _view_of(values: torch.Tensor, spec: TensorSpec, name: str) -> torch.Tensor:
    values = _numbers(values, spec, name)
    if values.dim() != 1 or not values.is_contiguous():
        raise ArtifactError(f"the memory of {name[:80]!r} is no row of numbers")
    end = spec.offset + spec.nbytes // spec.dtype.itemsize
    if end > values.numel():
        raise ArtifactError(f"{name[:80]!r} lies outside of its memory")
    return values.as_strided(spec.shape, spec.stride, values.storage_offset() + spec.offset)
