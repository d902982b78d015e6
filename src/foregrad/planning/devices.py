"""Devices to plan for: memory, bandwidth and operations a second, as their makers publish them.

Operations are those of dense products. `memory` is what the driver reports as the device's total, which is a little
less than the name says. Nobody reaches a published peak, so times are divided by `Shares`, which are assumptions: no
number here is fitted to a measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..annexes import the_one
from ..errors import PlanError

_GIB, _MIB = 1 << 30, 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """The shares of the published peaks that a step is assumed to reach: of the operations of products, of the memory's
    bandwidth, of the links between devices and to the host.
    """

    flops: float = 0.7
    bandwidth: float = 0.8
    link: float = 0.75

    def __post_init__(self) -> None:
        for name, share in dataclasses.asdict(self).items():
            if not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise PlanError(f"a share is above 0.0 and at most 1.0; {name} is {share!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A device. `memory` in bytes, `bandwidth` and links in bytes a second, `flops` in operations a second by the
    name of a dtype. `link`: between devices of one host, in one direction; `network`: from a device to other hosts;
    `host`: to the host's memory. `source`: the datasheet of the figures.

    Examples:
        >>> import foregrad.planning as planning
        >>> planning.DEVICES["l4"].flops["bfloat16"]
        121000000000000.0
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    link: float = 0.0
    network: float = 50e9
    host: float = 25e9
    shares: Shares = Shares()
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise PlanError(f'flops of a device are numbers by dtype, {{"bfloat16": 180e12}}, not {self.flops!r}')
        if unknown := [one for one in self.flops if not isinstance(getattr(torch, str(one), None), torch.dtype)]:
            raise PlanError(f"flops of a device are by dtype, as bfloat16 or float32, not by {unknown[0]!r}")
        counts = {"bandwidth": self.bandwidth, "network": self.network, "host": self.host, **self.flops}
        for name, count in counts.items():
            if not isinstance(count, (int, float)) or count <= 0:
                raise PlanError(f"{name} of a device is a number above 0, not {count!r}")
        if not isinstance(self.memory, int) or self.memory < 0:
            raise PlanError(f'memory of a device is in bytes, or text with a unit, "80 GiB", not {self.memory!r}')

    @property
    def is_accelerator(self) -> bool:
        return self.name != "cpu"

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second that are assumed for products of a dtype."""
        name = str(dtype).removeprefix("torch.")
        found = self.flops.get(name) or self.flops.get("float32") or max(self.flops.values(), default=0.0)
        return found * self.shares.flops


def _gpu(name: str, mib: int, bandwidth: float, half: float, single: float, link: float, source: str) -> Device:
    flops = {"bfloat16": half, "float16": half, "float32": single}
    return Device(name, mib * _MIB, bandwidth, flops, link, source=source)


# The totals of memory are those of `nvidia-smi` and `rocm-smi`. `float32` is TF32 where the device has a unit for it.
# Each row but the L4's was compared with its page, a copy of the sheet's figures.
_PAGES = "https://glennklockwood.com/garden/processors"
_OF_TWO = "https://github.com/alpharomercoma/MI300X-vs-H200/blob/main/METHODOLOGY.md"
DEVICES: dict[str, Device] = {
    "a100": _gpu("a100", 81_920, 2.039e12, 312e12, 156e12, 300e9, f"NVIDIA A100 80GB SXM datasheet: {_PAGES}/A100"),
    "h100": _gpu("h100", 81_559, 3.35e12, 989e12, 494e12, 450e9, f"NVIDIA H100 SXM datasheet: {_PAGES}/h100"),
    "h200": _gpu("h200", 143_771, 4.8e12, 989e12, 494e12, 450e9, f"NVIDIA H200 SXM datasheet: {_OF_TWO}"),
    "b200": _gpu("b200", 183_359, 7.7e12, 2250e12, 1100e12, 900e9, f"NVIDIA HGX B200 datasheet: {_PAGES}/B200"),
    "mi300x": _gpu("mi300x", 196_592, 5.3e12, 1307e12, 653e12, 448e9, f"AMD Instinct MI300X datasheet: {_OF_TWO}"),
    "l4": _gpu(
        "l4", 23_034, 0.3e12, 121e12, 60e12, 0.0, "NVIDIA L4 datasheet: https://www.nvidia.com/en-us/data-center/l4"
    ),
}
CPU = Device("cpu", 0, 50e9, {"float32": 100e9}, 0.0, 1e9, 10e9, source="a laptop's core, by order of magnitude")


def device_of(asked: Any, shares: Mapping[str, float] | Shares | None = None) -> Device:
    """The device that a caller asks for: a name, a `Device`, or a dict of its fields (`like` names one to start from).

    Raises `PlanError` for an unknown name, and for fields that are missing or unknown.
    """
    if isinstance(asked, torch.device):
        asked = asked.type
    if isinstance(asked, Mapping):
        device = _of_fields(dict(asked))
    elif isinstance(asked, Device):
        device = asked
    elif isinstance(asked, str) and (asked.lower() in DEVICES or asked.lower() == "cpu"):
        device = CPU if asked.lower() == "cpu" else DEVICES[asked.lower()]
    else:
        raise PlanError(
            f"there is no device {asked!r} in the table: it has {', '.join(sorted(DEVICES))} and cpu. Describe your "
            'own with device={"name": "mine", "memory": "48 GiB", "bandwidth": 0.9e12, "flops": {"bfloat16": 180e12}}'
        )
    return device if shares is None else dataclasses.replace(device, shares=_shares_of(shares))


def _shares_of(asked: Mapping[str, float] | Shares) -> Shares:
    if isinstance(asked, Shares):
        return asked
    if not isinstance(asked, Mapping):
        raise PlanError(f'shares are a dict as {{"flops": 0.7}}, not {asked!r}')
    try:
        return Shares(**asked)
    except TypeError:
        raise PlanError(f"shares are flops, bandwidth and link, not {', '.join(map(str, asked))}") from None


def bytes_of(asked: Any, device: Device) -> int:
    """A budget in bytes: an integer, text, or a share of a device's memory."""
    limit: Any = the_one("memory budgets").read_budget(asked)
    if isinstance(limit, float) and not device.memory:
        raise PlanError(
            f"a budget of {limit} is a share of a device's memory, and that of `{device.name}` is not known"
        )
    if not isinstance(limit, (int, float)):
        raise PlanError("a budget of a plan is bytes, text or a share of the device's memory")
    return int(limit * device.memory) if isinstance(limit, float) else limit


def _of_fields(fields: dict[str, Any]) -> Device:
    base = fields.pop("like", None)
    known = {field.name for field in dataclasses.fields(Device)}
    if unknown := [name for name in fields if name not in known]:
        raise PlanError(f"a device has no {', '.join(unknown)}: it has {', '.join(sorted(known))}, and like=")
    if isinstance(fields.get("memory"), str):
        fields["memory"] = the_one("memory budgets").read_budget(fields["memory"])
    if isinstance(fields.get("shares"), Mapping):
        fields["shares"] = _shares_of(fields["shares"])
    if base is not None:
        return dataclasses.replace(device_of(base), **fields)
    needed = [name for name in ("memory", "bandwidth", "flops") if name not in fields]
    if needed:
        raise PlanError(
            f"a description of a device needs {', '.join(needed)}, or like= with the name of a known device"
        )
    return Device(**{"name": "mine", **fields})
