"""`value_and_grad` of a tiny function: what a call costs over its graph; JAX's jitted one where JAX is installed.

python -m benchmarks.composite
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import foregrad
from benchmarks.common import Section, interleaved_calls

__all__ = ["collect"]


def _function(w: Any, b: Any, x: Any) -> Any:
    return torch.sin(x @ w + b).sum()


def _jax(arrays: list[Any]) -> Callable[[], Any] | None:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return None
    w, b, x = (jnp.asarray(a.detach().numpy()) for a in arrays)
    call = jax.jit(jax.value_and_grad(lambda w, b, x: jnp.sin(x @ w + b).sum(), argnums=(0, 1)))
    return lambda: jax.block_until_ready(call(w, b, x))


def collect(rounds: int) -> Section:
    """The table."""
    warnings.simplefilter("ignore")
    section = Section(
        "value_and_grad",
        "Microseconds of sin(x @ w + b).sum() and its gradients by w and b, medians. `call - graph` should be at most 8, "
        "guards included.",
        ["function", "eager", "graph", "value_and_grad", "call - graph", "compiled, then autograd.grad", "JAX"],
    )
    arrays = [torch.randn(4, 4), torch.randn(4), torch.randn(4, 4)]
    ours = foregrad.value_and_grad(_function, argnums=(0, 1), backend="nop")
    ours(*arrays)
    (specialization,) = ours.foregrad.specializations  # type: ignore[attr-defined]
    graph = specialization.product.compiled.forward
    leaves = [arrays[0].clone().requires_grad_(), arrays[1].clone().requires_grad_(), arrays[2]]
    compiled = foregrad.compile(_function, backend="nop")

    def through(function: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*leaves), leaves[:2])

    def alone() -> Any:
        with torch.no_grad():
            return graph(list(arrays))

    variants = {"eager": through(_function), "graph": alone, "ours": lambda: ours(*arrays), "engine": through(compiled)}
    jax = _jax(arrays)
    if jax is not None:
        variants["jax"] = jax
    empty = interleaved_calls({"no_grad": lambda: _enter()}, rounds)["no_grad"].median * 1e6
    t = {name: value.median * 1e6 for name, value in interleaved_calls(variants, rounds).items()}
    t["graph"] -= empty  # entering and leaving no_grad is not the graph's
    section.add(
        ["tiny, 2 parameters", *(f"{t[key]:.1f}" for key in ("eager", "graph", "ours")), f"{t['ours'] - t['graph']:.1f}",
         f"{t['engine']:.1f}", f"{t['jax']:.1f}" if "jax" in t else "not installed"],
        **{f"{key}_us": value for key, value in t.items()},
    )  # fmt: skip
    return section


def _enter() -> None:
    with torch.no_grad():
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    collect(60)
