"""Figures that `foregrad.explain` foresees against measured ones, on architectures.

    python -m benchmarks.explain

Bytes saved are those that autograd's graph holds after the forward of the compiled function. Operations are compared
with `torch.utils.flop_counter` over an eager step. Where the CPU has operators for attention and recurrent layers that
this counter does not know, both are compared once more with those turned off, so that nothing goes uncounted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import foregrad
from benchmarks.common import Section
from tests.models.zoo import WITHOUT_ATTENTION, ZOO

__all__ = ["ARCHITECTURES", "Compared", "collect_explain", "compared"]

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class UNet(nn.Module):
    """Two levels down and up, with what was on the way down put beside."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 8), self.block(8, 16)])
        self.middle = self.block(16, 16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)])
        self.join = nn.ModuleList([self.block(32, 16), self.block(16, 8)])

    @staticmethod
    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = []
        for down in self.down:
            x = down(x)
            beside.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), beside.pop()], 1))
        return x


class Mixer(nn.Module):
    """Layers that mix along tokens and along channels."""

    def __init__(self, tokens: int = 16, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels(self.norm(x))
        return x


class Recurrent(nn.Module):
    """An LSTM and what reads its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, num_layers=2, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _from_zoo(name: str) -> Callable[[], Made]:
    def make() -> Made:
        entry = ZOO[name]
        attention = "eager" if name in WITHOUT_ATTENTION else "sdpa"
        return entry.build(attention, dropout=0.0 if name == "vit" else 0.1), (), entry.inputs()

    return make


def _with(module: Callable[[], nn.Module], *shape: int) -> Callable[[], Made]:
    return lambda: (module(), (torch.randn(*shape),), {})


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    **{name: _from_zoo(name) for name in ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "convnext", "resnet")},
    "mlp": _with(_mlp, 128, 32),
    "lstm": _with(Recurrent, 4, 10, 16),
    "unet": _with(UNet, 2, 3, 16, 16),
    "mixer": _with(Mixer, 4, 16, 32),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """Figures of one architecture: foreseen and measured."""

    saved: int
    held: int | None
    eager_saved: int | None
    peak: int
    measured_peak: int | None
    flops: int  # of all operators
    known: int  # of those that PyTorch's counter knows
    counted: int  # by it, in an eager step
    plain: int | None  # of all operators, where the CPU's own are off
    counted_plain: int | None  # by PyTorch's counter there


def compared(name: str, partition: str = "default", *, plainly: bool = True) -> Compared:
    """Explain an architecture, and count. `plainly`: once more in plain operators, in which partitions don't differ."""
    torch.manual_seed(0)
    module, args, kwargs = ARCHITECTURES[name]()
    found = foregrad.explain(module, *args, backend="eager", partition=partition, **kwargs)
    assert found.memory is not None, found.eager
    assert found.work is not None
    counted = _counted(module, args, kwargs)
    memory, work = found.memory, found.work
    in_plain = _in_plain_operators(module, args, kwargs, partition) if plainly else (None, None)
    return Compared(
        memory.predicted_saved,
        memory.measured_saved,
        memory.eager_saved,
        memory.predicted_peak,
        memory.measured_peak,
        work.flops - work.again_flops,
        work.known_flops - work.again_flops,
        counted,
        *in_plain,
    )


def _in_plain_operators(module: nn.Module, args: Any, kwargs: Any, partition: str) -> tuple[int, int]:
    with _plain_operators():
        found = foregrad.explain(module, *args, backend="eager", partition=partition, measure=False, **kwargs)
        counted = _counted(module, args, kwargs)
    assert found.work is not None
    return found.work.flops - found.work.again_flops, counted


def _counted(module: nn.Module, args: Any, kwargs: Any) -> int:
    counter = FlopCounterMode(display=False)
    with torch.random.fork_rng(devices=[]), counter:
        results = torch.utils._pytree.tree_leaves(module(*args, **kwargs))
        results = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    module.zero_grad()
    return counter.get_total_flops()


@contextlib.contextmanager
def _plain_operators() -> Iterator[None]:
    """Context: attention and recurrent layers run as the products that they are made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TF32, where there is no GPU for it
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            yield


def collect_explain(names: list[str], partitions: tuple[str, ...] = ("default", "min_cut")) -> Section:
    """The table."""
    section = Section(
        "What explain foresees",
        "Bytes saved for the backward and the peak of memory, foreseen / measured; floating-point operations, of all operators / of those that PyTorch's counter knows / counted by it in eager mode; the same with the CPU's own attention and recurrent operators off, ours / counted.",
        ["architecture", "partition", "saved", "saved in eager", "peak", "operations", "in plain operators"],
    )
    for name in names:
        for partition in partitions:
            found = compared(name, partition)
            section.add(
                [name, partition, f"{found.saved} / {found.held}", str(found.eager_saved),
                 f"{found.peak} / {found.measured_peak}", f"{found.flops} / {found.known} / {found.counted}",
                 f"{found.plain} / {found.counted_plain}"],
                name=name, partition=partition, **dataclasses.asdict(found),
            )  # fmt: skip
    return section


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    collect_explain(list(ARCHITECTURES))
