"""A rank of many: how data parallelism and fully sharded data parallelism (FSDP2) change a step.

* `dp` ranks hold the whole model; gradients are averaged in buckets, which are a copy.
* `fsdp` ranks hold a shard each of every parameter, gradient and state. A layer, and what is outside of layers, is
  gathered as a unit: before it runs, and in the backward again where it was let go (`reshard`). `sharded` has the
  memories.

A collective takes its bytes over the slowest link between the ranks, by the ring's `(n - 1) / n`; with `overlap` it
takes only the time by which it is longer than the computation beside it, unit by unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import PlanError
from ._torch import replicated, sharding_of
from .devices import Device
from .reached import modules_in

_BUCKET = 25 << 20  # bytes of gradients that `DistributedDataParallel` averages together
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """A mesh of ranks. `dp`: copies of the model; `fsdp`: ranks that share a copy. `master_dtype`: the dtype of shards,
    their gradients and the optimizer's state, by default the parameters' dtype; `reduce_dtype`: the dtype in which
    gradients are summed. `host`: ranks of a host. `tp`: ranks that DTensor splits the operators among; the model's
    parameters are then local parts. `units`: paths of the modules that FSDP gathers as one; by default the layers.

    Examples:
        >>> from foregrad.planning import Ranks
        >>> Ranks(dp=2, fsdp=8).size
        16
    """

    dp: int = 1
    fsdp: int = 1
    reshard: bool = True
    overlap: bool = True
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    host: int = 8
    tp: int = 1
    units: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.dp * self.fsdp

    def master(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the shard of a parameter that computes in `dtype`."""
        return self.master_dtype if self.master_dtype is not None and dtype.is_floating_point else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or self.master(dtype)

    def shard(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The largest shard of a parameter: it is cut along its first dimension."""
        if self.fsdp == 1 or not shape:
            return shape
        return (-(-shape[0] // self.fsdp), *shape[1:])

    def buckets(self, total: int) -> list[int]:
        """The sizes of the buckets of `DistributedDataParallel` for so many bytes of gradients."""
        return [min(_BUCKET, total - at) for at in range(0, total, _BUCKET)]

    def __str__(self) -> str:
        parts = [
            f"{name} {count}" for name, count in (("dp", self.dp), ("fsdp", self.fsdp), ("tp", self.tp)) if count != 1
        ]
        return " by ".join(parts) or "one rank"


ALONE = Ranks()


def ranks_of(mesh: Any) -> Ranks:
    """The ranks that a caller asks for: `Ranks`, a dict of its fields, a number of `fsdp` ranks, or a `DeviceMesh`.

    Raises `PlanError` for dimensions that are not planned.
    """
    if mesh is None:
        return ALONE
    if isinstance(mesh, Ranks):
        ranks = mesh
    elif isinstance(mesh, int) and not isinstance(mesh, bool):
        ranks = Ranks(fsdp=mesh)
    elif isinstance(mesh, Mapping):
        ranks = _of_fields(dict(mesh))
    elif getattr(mesh, "mesh_dim_names", None):
        ranks = _of_fields(dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)))
    else:
        raise PlanError(f'a mesh is a dict as {{"fsdp": 8}}, Ranks, a number, or a DeviceMesh with names, not {mesh!r}')
    if any(not isinstance(count, int) for count in (ranks.dp, ranks.fsdp, ranks.tp, ranks.host)):
        raise PlanError(f"ranks of a mesh are counted in integers, not {ranks}")
    if min(ranks.dp, ranks.fsdp, ranks.tp, ranks.host) < 1:
        raise PlanError(f"a mesh has at least one rank in each dimension, not {ranks}")
    return ranks


def ranks_in_module(module: Any, mesh: Any) -> Ranks:
    """The ranks that a module, or a module that a function reaches, says itself, by `fully_shard` or
    `DistributedDataParallel`; else the ranks of `mesh`.

    Raises `PlanError` where both say some, and where several modules do.
    """
    ranks, modules = ranks_of(mesh), modules_in(module)
    shardings = [one for one in map(sharding_of, modules) if one is not None]
    copies = [one[1] for one in map(replicated, modules) if one is not None]
    if not shardings and not copies:
        return ranks
    if len(shardings) + len(copies) > 1:
        raise PlanError("several models have their ranks already: make a plan of each model's step by itself")
    if mesh is not None and not (isinstance(mesh, Ranks) and (ranks.dp, ranks.fsdp) == (1, 1)):
        raise PlanError(
            "the model has its ranks already, by `fully_shard` or `DistributedDataParallel`: leave mesh= out, or pass "
            "Ranks(host=..., overlap=...) alone"
        )
    if not shardings:
        return dataclasses.replace(ranks, dp=copies[0])
    (sharding,) = shardings
    return dataclasses.replace(
        ranks,
        dp=sharding.copies,
        fsdp=sharding.shards,
        reshard=sharding.reshard,
        master_dtype=sharding.sharded_dtype,
        reduce_dtype=sharding.reduce_dtype,
        units=sharding.paths,
    )


_OTHER_NAMES = {
    "ddp": "dp",
    "dp_replicate": "dp",
    "replicate": "dp",
    "dp_shard": "fsdp",
    "shard": "fsdp",
    "tensor": "tp",
}


def _of_fields(fields: dict[str, Any]) -> Ranks:
    fields = {_OTHER_NAMES.get(name, name): value for name, value in fields.items()}
    known = {field.name for field in dataclasses.fields(Ranks)}
    if unknown := [name for name in fields if name not in known]:
        raise PlanError(
            f"the dimension {unknown[0]!r} of a mesh is not planned: dp (copies of the model), fsdp (shards of it) and "
            "tp (DTensor's, by `parallelize_module`) are. Pipeline, context and expert parallelism change the "
            "computation of a rank: plan its part of the model as a module of its own (`plan.in_flight`: a stage)."
        )
    for name in ("master_dtype", "reduce_dtype"):
        if isinstance(fields.get(name), str):
            fields[name] = _DTYPES.get(fields[name]) or fields[name]
        if fields.get(name) is not None and not isinstance(fields[name], torch.dtype):
            raise PlanError(f"{name} is a dtype, not {fields[name]!r}")
    return Ranks(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Collectives of one kind in a step: what they gather or reduce, how many there are, bytes that a rank sends, and
    their seconds if nothing ran beside them.
    """

    name: str
    count: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A layer as FSDP has it: its parameters' elements in the dtype that they compute in. `whole`: bytes gathered;
    `gradients`: bytes of its gradients; `reduced`: the same in the reduction's dtype; `parts`: bytes of each parameter.
    """

    path: str
    whole: int
    gradients: int
    reduced: int
    parts: tuple[int, ...] = ()


def seconds_of(nbytes: float, ranks: int, device: Device, host: int) -> float:
    """A gather, or a reduction into shards, of `nbytes` by `ranks`."""
    if ranks == 1:
        return 0.0
    inside = ranks <= host and device.link
    speed = (device.link if inside else device.network) * device.shares.link
    return nbytes * (ranks - 1) / ranks / speed


def collectives_of(units: list[Unit], ranks: Ranks, device: Device) -> list[CollectiveCost]:
    """The communication of a step of these units."""
    found: list[CollectiveCost] = []

    def add(name: str, count: int, nbytes: int, among: int, host: int, times: int = 1) -> None:
        took = times * seconds_of(nbytes, among, device, host)
        found.append(CollectiveCost(name, count, times * nbytes * (among - 1) // among, took))

    fsdp_host = max(1, ranks.host // ranks.tp)  # neighbours split operators
    again = [unit for unit in units if unit.path] if ranks.reshard else []
    reduced = sum(unit.reduced for unit in units)
    if ranks.fsdp > 1:
        gathered = sum(unit.whole for unit in [*units, *again])
        add("gather parameters", len(units) + len(again), gathered, ranks.fsdp, fsdp_host)
        add("reduce gradients into shards", len(units), reduced, ranks.fsdp, fsdp_host)
    if ranks.dp > 1:
        # A reduction for all is a reduction into shards and a gather of the shards. Copies are on further hosts where
        # shards fill a host.
        host = max(1, fsdp_host // ranks.fsdp)
        add("average gradients", len(units), reduced // ranks.fsdp, ranks.dp, host, times=2)
    return found
