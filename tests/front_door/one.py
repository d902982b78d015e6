"""One network in a process of its own: `python -m tests.front_door.one NETWORK DOOR`, with the default backend.

A fresh process, because a module of PyTorch's that nobody has imported yet is missing only there. `DOOR` is `compile`
(`foregrad.compile`) or `torch.compile` (`torch.compile(backend="foregrad")`). Prints a line and exits with 0 when values
and gradients are eager's, both halves were compiled by Inductor, and nothing was said about doing without it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import sys
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .networks import NETWORKS, Network

DOORS = ("compile", "torch.compile")


class Heard(logging.Handler):
    """What foregrad's log said."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")

    def of_doing_without(self) -> list[str]:
        return [m for m in self.messages if not m.startswith("INFO") or "eager's kernels" in m]


def main(name: str, door: str) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
    # Eager's own warning about an LSTM with projections; and PyTorch's compiler uses its deprecated TorchScript.
    warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
    warnings.filterwarnings("ignore", r"`?torch\.jit\.[a-z_]+`? is (deprecated|not supported)", DeprecationWarning)
    # Dynamo's own, about `CrossMapLRN2d`.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    torch.manual_seed(0)
    network = NETWORKS[name]()
    eager = copy.deepcopy(network)
    heard = Heard()
    logging.getLogger("foregrad").addHandler(heard)
    logging.getLogger("foregrad").setLevel(logging.INFO)
    phases: list[str] = []
    compiled = compiled_by(door, network, phases)
    expected = results(eager.module, eager)
    actual = results(compiled, network)
    close(actual, expected)
    for where, before in eager.module.state_dict().items():
        torch.testing.assert_close(network.module.state_dict()[where], before, rtol=1e-4, atol=1e-5, msg=where)
    if door == "compile":
        assert len(compiled.foregrad.specializations) == 1, compiled.foregrad.specializations
    if not (network.breaks and door == "torch.compile"):
        assert {"forward", "backward"} <= set(phases), f"compiled by Inductor: {phases}; {heard.messages}"
    assert not heard.of_doing_without(), heard.messages
    around = [m for m in heard.messages if "compiled around" in m]
    print(f"{name}, {door}: {len(expected)} values and gradients are eager's;", ", ".join(phases), *around)
    return 0


def compiled_by(door: str, network: Network, phases: list[str]) -> Any:
    """The network compiled, with the default backend. `phases` grows by one for each graph that Inductor compiled."""
    import foregrad
    from foregrad.inductor import backend as inductor

    compile_graph = inductor.inductor.compile_graph

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = compile_graph(*args, **kwargs)
        known = [phase for phase in ("backward", "inference") if kwargs.get(f"is_{phase}")]
        phases.append(known[0] if known else "forward")
        return made

    inductor.inductor.compile_graph = noted
    settings = {"fallback_random": True} if network.draws else {}
    if door == "torch.compile":
        if "foregrad" not in [entry.name for entry in importlib.metadata.entry_points(group="torch_dynamo_backends")]:
            from tests.dynamo.installed import make_known

            make_known()
        options = {"options": {"inductor": settings}} if settings else {}
        return torch.compile(network.module, backend="foregrad", **options)
    if not settings:
        return foregrad.compile(network.module)
    from foregrad.inductor.backend import inductor_backend

    return foregrad.compile(network.module, backend=inductor_backend(settings, name="auto"))


def results(module: Any, network: Network) -> list[torch.Tensor | None]:
    """Tensors that a call returns, and the gradients of inputs and parameters by a sum of them."""
    inputs = [as_leaf(value) for value in network.inputs]
    torch.manual_seed(1)
    out = [value for value in pytree.tree_leaves(module(*inputs)) if isinstance(value, torch.Tensor)]
    torch.manual_seed(2)
    loss = sum((value * torch.randn_like(value)).sum() for value in out if value.requires_grad)
    loss.backward()
    leaves = [value for value in inputs if isinstance(value, torch.Tensor)]
    return [*(value.detach() for value in out), *(x.grad for x in (*leaves, *network.module.parameters()))]


def as_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point() and not value.requires_grad)
    return value


def close(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for position, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None), f"result {position}: {a} for {b}"
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, p=position: f"result {p}: {m}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
