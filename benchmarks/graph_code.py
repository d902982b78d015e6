"""The code that the eager backend writes for a graph, against the function it came from, without gradients.

python -m benchmarks.graph_code
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from functorch.compile import aot_function, nop

import foregrad
from benchmarks.common import Section, interleaved_calls, ratio
from benchmarks.models import build

__all__ = ["collect"]


def _inference_graph(function: Any, args: list[Any]) -> Any:
    """PyTorch's own code for the same graph, as a function of its inputs."""
    found: list[Any] = []

    def keep(gm: Any, _: Any) -> Any:
        found.append(gm)
        return gm

    aot_function(function, keep, nop)(*args)
    return found[0]


def _runs(function: Any, inputs: list[Any]) -> dict[str, Any]:
    graph = _inference_graph(function, inputs)
    ours = foregrad.make_boxed_func(graph)
    return {"eager": lambda: function(*inputs), "ours": lambda: ours(list(inputs)), "fx": lambda: graph(*inputs)}


def collect(rounds: int) -> Section:
    """The table."""
    warnings.simplefilter("ignore")
    section = Section(
        "Graph code alone",
        "Microseconds of one run of the forward graph, medians, without gradients: the eager function, our eager "
        "backend's code, and the code of an `fx.GraphModule`.",
        ["function", "eager", "ours", "fx", "ours/eager", "fx/eager"],
    )

    def layers(x: Any, *weights: Any) -> Any:
        for weight in weights:
            x = torch.relu(x @ weight)
        return x

    module, (x, *_), _ = build("mlp-100")
    tensors = dict(module.named_parameters())

    def mlp(x: Any, *values: Any) -> Any:
        for weight, bias in zip(values[::2], values[1::2], strict=True):
            x = torch.relu(torch.nn.functional.linear(x, weight, bias))
        return x

    cases = {
        "100 layers": (layers, [torch.randn(4, 4) for _ in range(101)]),
        "mlp-100": (mlp, [x, *tensors.values()]),
    }
    for name, (function, inputs) in cases.items():
        with torch.no_grad():
            runs = _runs(function, inputs)
            t = {key: value.median * 1e6 for key, value in interleaved_calls(runs, rounds).items()}
        section.add(
            [name, *(f"{t[k]:.0f}" for k in runs), ratio(t["ours"], t["eager"]), ratio(t["fx"], t["eager"])],
            case=name,
            **{f"{k}_us": v for k, v in t.items()},
        )
    return section


if __name__ == "__main__":
    torch.set_num_threads(1)
    collect(40)
