"""What other compilers do with a dozen small programs: `python -m benchmarks.comparison`.

Each row is a program that eager PyTorch runs, each column a way to compile it. A cell says "as eager", "raises" with the
class of the error, or "wrong": the compiled program gave another result than eager's, without a word. Where PyTorch's
compiler would split a program into several graphs, it is asked for one (`fullgraph=True`), as foregrad makes one.

The column of JAX is for the program as one writes it in JAX, against the number that eager PyTorch gives. It needs
`pip install "foregrad[jax]"`; without it the column is left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, jvp, vmap

import foregrad
from benchmarks.common import Section

__all__ = ["collect"]

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def _ours(fn: Callable[..., Any]) -> Callable[..., Any]:
    return foregrad.compile(fn, backend="eager")  # type: ignore[no-any-return]


def _aot_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    from functorch.compile import aot_function, nop

    return aot_function(fn, nop)  # type: ignore[no-any-return]


def _torch_compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


SYSTEMS: dict[str, Compile] = {
    "foregrad": _ours,
    "AOTAutograd": _aot_function,
    "torch.compile": _torch_compile,
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.allclose(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _x(requires_grad: bool = True) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, 4).requires_grad_(requires_grad)


# ------------------------------------------------------------------------------------------------ the programs
# Each runs itself with a way to compile, and gives what is to be compared with what it gives without one.


def second_derivative(compile_: Compile) -> Any:
    """the gradient of a gradient (`create_graph=True`)"""
    f, x = compile_(lambda x: (x.sin() * x).sum()), _x()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)


def vmap_over(compile_: Compile) -> Any:
    """`torch.func.vmap` over the compiled function"""
    return vmap(compile_(lambda x: x.sin().sum()))(torch.linspace(0, 1, 6).view(3, 2))


def grad_over(compile_: Compile) -> Any:
    """`torch.func.grad` over the compiled function"""
    return grad(compile_(lambda x: (x * x).sum()))(_x(False))


def jvp_over(compile_: Compile) -> Any:
    """`torch.func.jvp` over the compiled function"""
    return jvp(compile_(lambda x: x.sin()), (_x(False),), (torch.ones(4),))


def other_shape(compile_: Compile) -> Any:
    """`if x.shape[0] > 2`, called with 4 elements and then with 2"""
    f = compile_(lambda x: x * 2 if x.shape[0] > 2 else x * 3)
    return f(torch.ones(4)), f(torch.ones(2))


def branch_on_value(compile_: Compile) -> Any:
    """`if x.sum() > 0`, called with both outcomes"""
    f = compile_(lambda x: x.sin() if x.sum() > 0 else x.cos())
    return f(torch.ones(3)), f(-torch.ones(3))


def grad_after_no_grad(compile_: Compile) -> Any:
    """called under `no_grad` first, then trained"""
    f, x = compile_(lambda x: x.sin().sum()), _x()
    with torch.no_grad():
        f(x)
    return torch.autograd.grad(f(x), x)


def closed_over(compile_: Compile) -> Any:
    """a closed-over weight, trained and then replaced"""
    weights = {"w": torch.ones(4, requires_grad=True)}
    f = compile_(lambda x: (weights["w"] * x).sum())
    found = torch.autograd.grad(f(_x(False)), weights["w"])
    weights["w"] = torch.full((4,), 2.0, requires_grad=True)
    return found, f(_x(False))


def written_argument(compile_: Compile) -> Any:
    """an argument written in place, with a gradient through the write"""
    w, x = _x(), torch.ones(4)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(w)
        return x.sum()

    out = compile_(f)(x, w)
    return torch.autograd.grad(out, w), x


def view_of_argument(compile_: Compile) -> Any:
    """a result that views an argument, written by the caller"""
    x = torch.zeros(4)
    compile_(lambda x: x[1:3])(x).add_(1)
    return x


def counter(compile_: Compile) -> Any:
    """a counter in a dict, raised by each call and read by the function"""
    state = {"calls": 0}

    def f(x: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        return x * state["calls"]

    compiled = compile_(f)
    return [compiled(torch.ones(2)) for _ in range(4)], state["calls"]


def prints(compile_: Compile) -> Any:
    """a function that prints, called three times"""

    def f(x: torch.Tensor) -> torch.Tensor:
        print("called")
        return x + 1

    compiled, said = compile_(f), io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(3):
            compiled(torch.ones(2))
    return said.getvalue().count("called")


def gradient_outside_shapes(compile_: Compile) -> Any:
    """an energy and its forces, taken inside (`autograd.grad` in the function), then trained"""
    w = torch.ones(4, requires_grad=True)

    def forces(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((w * x.sin()).sum(), x, create_graph=True)[0]

    return torch.autograd.grad(compile_(forces)(_x(False)).square().sum(), w)


def training_step(compile_: Compile) -> Any:
    """a training step with `backward()`, the optimizer and `zero_grad()` in it"""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = compile_(step)
    return [compiled(_x(False)).clone() for _ in range(4)], [p.detach().clone() for p in model.parameters()]


PROGRAMS: tuple[Callable[[Compile], Any], ...] = (
    second_derivative,
    vmap_over,
    grad_over,
    jvp_over,
    gradient_outside_shapes,
    training_step,
    other_shape,
    branch_on_value,
    grad_after_no_grad,
    closed_over,
    written_argument,
    view_of_argument,
    counter,
    prints,
)


# ------------------------------------------------------------------------------------------------ in JAX


def _in_jax() -> dict[str, Callable[[], bool]]:
    """The programs that there are in JAX: whether its result is the one expected."""
    import jax
    import jax.numpy as jnp

    x = jnp.linspace(0.5, 1.5, 4)
    close: Callable[..., Any] = jnp.allclose

    def second() -> bool:
        first = jax.grad(jax.jit(lambda x: (jnp.sin(x) * x).sum()))
        return bool(close(jax.grad(lambda x: first(x).sum())(x), 2 * jnp.cos(x) - x * jnp.sin(x)))

    def branch() -> bool:
        f = jax.jit(lambda x: jnp.sin(x) if x.sum() > 0 else jnp.cos(x))
        return bool(close(f(-jnp.ones(3)), jnp.cos(-jnp.ones(3))))

    def count() -> bool:
        state = {"calls": 0}

        @jax.jit
        def f(x: Any) -> Any:
            state["calls"] += 1
            return x * state["calls"]

        return [float(f(jnp.ones(1))[0]) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]

    def closure() -> bool:
        weights = {"w": jnp.ones(4)}
        f = jax.jit(lambda x: (weights["w"] * x).sum())
        f(x)
        weights["w"] = jnp.full(4, 2.0)
        return bool(close(f(x), (2 * x).sum()))

    def write() -> bool:
        def f(x: Any) -> Any:
            x[0] = 1.0
            return x

        return bool(jax.jit(f)(x)[0] == 1.0)

    def said() -> bool:
        @jax.jit
        def f(x: Any) -> Any:
            print("called")
            return x + 1

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for _ in range(3):
                f(x)
        return out.getvalue().count("called") == 3

    def shapes() -> bool:
        f = jax.jit(lambda x: x * 2 if x.shape[0] > 2 else x * 3)
        return bool(close(f(jnp.ones(4)), 2.0) and close(f(jnp.ones(2)), 3.0))

    return {
        "second_derivative": second,
        "vmap_over": lambda: jax.vmap(jax.jit(lambda x: jnp.sin(x).sum()))(jnp.ones((3, 2))).shape == (3,),
        "grad_over": lambda: bool(close(jax.grad(jax.jit(lambda x: (x * x).sum()))(x), 2 * x)),
        "jvp_over": lambda: bool(close(jax.jvp(jax.jit(jnp.sin), (x,), (jnp.ones(4),))[1], jnp.cos(x))),
        "other_shape": shapes,
        "branch_on_value": branch,
        "closed_over": closure,
        "written_argument": write,
        "counter": count,
        "prints": said,
    }


# ------------------------------------------------------------------------------------------------ the table


def _cell(run: Callable[[], bool]) -> str:
    try:
        with warnings.catch_warnings(), open(os.devnull, "w", encoding="utf-8") as nowhere:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(nowhere):
                return "as eager" if run() else "**wrong**"
    except Exception as error:
        return f"raises {type(error).__name__}"


def _is_as_eager(program: Callable[[Compile], Any], compile_: Compile) -> bool:
    return _same(program(compile_), program(lambda fn: fn))


def collect() -> Section:
    has_jax = importlib.util.find_spec("jax") is not None
    section = Section(
        "What compilers do with small programs",
        "`python -m benchmarks.comparison`. AOTAutograd: `aot_function` with `nop`. torch.compile: `aot_eager`, "
        "`fullgraph=True`. **wrong**: another result than eager's, without a word. "
        "JAX: the program as one writes it there; `-` where it has no such thing.",
        ["program", *SYSTEMS, *(["JAX"] if has_jax else [])],
    )
    in_jax = _in_jax() if has_jax else {}
    for program in PROGRAMS:
        cells = [_cell(functools.partial(_is_as_eager, program, compile_)) for compile_ in SYSTEMS.values()]
        if has_jax:
            cells.append(_cell(in_jax[program.__name__]) if program.__name__ in in_jax else "-")
        section.add([str(program.__doc__), *cells])
    return section


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        print(collect().markdown())


if __name__ == "__main__":
    main()
