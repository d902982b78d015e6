"""The joint graph of a GPT-2 and its gradients: our capture against JAX's `make_jaxpr(value_and_grad(loss))`.

python -m benchmarks.jax_capture     # needs jax: pip install "foregrad[jax]"

Both trace from nothing to one graph of the loss and all gradients, with no partition, no guards checked, no compiler.
JAX's program has no dropout, which ours has; its caches of traced functions are emptied first, as ours of operators'
results are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import foregrad
from benchmarks.capture import forget
from benchmarks.common import Section, interleaved_once, ratio
from benchmarks.models import build, first_tensor

__all__ = ["collect"]

_WIDTH, _HEADS, _LENGTH, _VOCABULARY, _BATCH = 128, 4, 64, 512, 2


def _jax_gpt2(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(loss, its arguments): the architecture of `benchmarks.models.gpt2`."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, p: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * p["scale"] + p["shift"]

    def linear(x: Any, p: Any) -> Any:
        return x @ p["w"] + p["b"]

    def attention(x: Any, p: Any, mask: Any) -> Any:
        q, k, v = (
            part.reshape(_BATCH, _LENGTH, _HEADS, -1).transpose(0, 2, 1, 3)
            for part in jnp.split(linear(x, p["qkv"]), 3, axis=-1)
        )
        scores = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(q.shape[-1]) + mask
        mixed = jax.nn.softmax(scores, axis=-1) @ v
        return linear(mixed.transpose(0, 2, 1, 3).reshape(_BATCH, _LENGTH, _WIDTH), p["out"])

    def loss(p: Any, ids: Any, mask: Any) -> Any:
        x = p["tokens"][ids] + p["positions"]
        for block in p["blocks"]:
            x = x + attention(norm(x, block["norm1"]), block["attention"], mask)
            x = x + linear(jax.nn.gelu(linear(norm(x, block["norm2"]), block["up"])), block["down"])
        scores = jax.nn.log_softmax(norm(x, p["norm"]) @ p["tokens"].T, axis=-1)
        return -jnp.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1).mean()

    def affine(width: int) -> Any:
        return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}

    def dense(fan_in: int, fan_out: int) -> Any:
        return {"w": jnp.ones((fan_in, fan_out)), "b": jnp.zeros(fan_out)}

    def block() -> Any:
        return {
            "norm1": affine(_WIDTH),
            "attention": {"qkv": dense(_WIDTH, 3 * _WIDTH), "out": dense(_WIDTH, _WIDTH)},
            "norm2": affine(_WIDTH),
            "up": dense(_WIDTH, 4 * _WIDTH),
            "down": dense(4 * _WIDTH, _WIDTH),
        }

    parameters = {
        "tokens": jnp.ones((_VOCABULARY, _WIDTH)),
        "positions": jnp.ones((_LENGTH, _WIDTH)),
        "blocks": [block() for _ in range(layers)],
        "norm": affine(_WIDTH),
    }
    ids = jnp.zeros((_BATCH, _LENGTH), dtype=int)
    mask = jnp.where(jnp.tril(jnp.ones((_LENGTH, _LENGTH), dtype=bool)), 0.0, -jnp.inf)
    return loss, (parameters, ids, mask)


def _theirs(layers: int) -> tuple[Callable[[], float], Callable[[], None], int]:
    import jax

    loss, args = _jax_gpt2(layers)

    def run() -> float:
        start = time.process_time()
        jax.make_jaxpr(jax.value_and_grad(loss))(*args)
        return time.process_time() - start

    return run, jax.clear_caches, len(jax.make_jaxpr(jax.value_and_grad(loss))(*args).jaxpr.eqns)


def _ours(name: str) -> tuple[Callable[[], float], int]:
    module, args, kwargs = build(name)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return first_tensor(module(*args, **kwargs))

    def run() -> float:
        start = time.process_time()
        foregrad.capture(loss, *args, **kwargs)
        return time.process_time() - start

    return run, sum(node.op == "call_function" for node in foregrad.capture(loss, *args, **kwargs).graph.nodes)


def collect(layers: int, rounds: int) -> Section:
    """The table; without JAX, a line that says so."""
    warnings.simplefilter("ignore")
    section = Section(
        "The joint graph, against JAX",
        "Seconds to one graph of the loss and all gradients; caches emptied first, but for the columns `warm`. "
        "JAX's program is without dropout.",
        ["model", "nodes", "equations of JAX", "ours", "ours, warm", "JAX", "JAX, warm", "ratio", "ratio, warm"],
    )
    try:
        import jax  # noqa: F401
    except ImportError:
        section.notes += " JAX is not installed."
        return section
    name = f"gpt2-{layers}"
    (ours, nodes), (theirs, clear, equations) = _ours(name), _theirs(layers)
    times = interleaved_once(
        {"ours": ours, "warm": ours, "jax": theirs, "jax warm": theirs}, rounds, {"ours": forget, "jax": clear}
    )
    section.add(
        [
            name,
            str(nodes),
            str(equations),
            *(times[key].text(1, 3) for key in ("ours", "warm", "jax", "jax warm")),
            ratio(times["ours"].median, times["jax"].median),
            ratio(times["warm"].median, times["jax warm"].median),
        ],
        model=name,
        ours_s=times["ours"].median,
        warm_s=times["warm"].median,
        jax_s=times["jax"].median,
        jax_warm_s=times["jax warm"].median,
    )
    return section


if __name__ == "__main__":
    torch.set_num_threads(1)
    collect(12, 5)
