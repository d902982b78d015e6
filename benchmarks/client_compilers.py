"""Projects built on AOTAutograd, with foregrad's doors in place of PyTorch's: `python benchmarks/client_compilers.py`.

Prints a row for each project that is installed: the largest difference of the results and gradients from eager, by
PyTorch's doors and by foregrad's. The clients' own code runs unchanged; one name in their modules is another.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import nn

import foregrad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(12, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def difference(compiled: Callable[[nn.Module], Callable[..., torch.Tensor]], *, training: bool) -> float:
    """The largest difference from eager over three seeds: of results, and of gradients and buffers in training."""
    worst = 0.0
    for seed in range(3):
        torch._dynamo.reset()
        found = []
        for make in (lambda module: module, compiled):
            module = Model().train(training)
            torch.manual_seed(seed)
            x = torch.randn(6, 12)
            with torch.set_grad_enabled(training):
                out = make(module)(x)
            if training:
                out.square().mean().backward()
            found.append([out.detach(), *(p.grad for p in module.parameters() if training), *module.buffers()])
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*found, strict=True)))
    return worst


def openvino(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """OpenVINO's backend with `aot_autograd`, at full precision."""
    import openvino.frontend.pytorch.torchdynamo.backend as client
    import openvino.torch  # noqa: F401
    from torch._dynamo.backends.common import aot_autograd

    client.aot_autograd = foregrad.aot_autograd if door == "foregrad" else aot_autograd

    def fell_back(*_: object) -> None:
        raise AssertionError("OpenVINO failed, and would compile by Inductor")

    client.compile_fx = fell_back
    options = {"aot_autograd": True, "config": {"INFERENCE_PRECISION_HINT": "f32"}}
    return lambda module: torch.compile(module, backend="openvino", options=options)


def timm(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """`memory_efficient_fusion`, as timm calls it."""
    from functorch.compile import memory_efficient_fusion

    return foregrad.memory_efficient_fusion if door == "foregrad" else memory_efficient_fusion


PROJECTS = {"openvino": ("openvino", openvino), "timm, memory_efficient_fusion": ("torch", timm)}


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'project':32}{'what':12}{'PyTorch':>12}{'foregrad':>12}")
    for name, (package, make) in PROJECTS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name:32}not installed")
            continue
        for training in (False, True):
            cells = []
            for door in ("PyTorch", "foregrad"):
                try:
                    cells.append(f"{difference(make(door), training=training):.1e}")
                except Exception as error:  # a row says so
                    cells.append(type(error).__name__)
            print(f"{name:32}{'training' if training else 'forward':12}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
