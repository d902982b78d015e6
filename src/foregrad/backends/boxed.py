"""The calling convention of compiled graphs: one list, emptied by the callee, and a list back.

A caller that passes arguments one by one keeps them alive until the call returns. With a list to empty, the callee
decides when each one is freed, so saved activations are freed during the backward, not after it.

Compilers return all sorts of callables; `as_boxed` adapts each to the convention.

Known weaknesses: before Python 3.11 the interpreter itself holds the arguments of a call, so a function that isn't
boxed frees nothing early there. A hook put on a graph module after it was boxed is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from .._torch.graphs import is_plain_graph_module, late_graph_of
from ..errors import BackendError
from ..graph.source import compile_source
from ..identity import attributed
from .eager import render_late, stand_in

Boxed = Callable[[list[Any]], Any]


def nop(fx_g: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
    """The compiler that compiles nothing: returns the graph module.

    Examples:
        >>> import torch, foregrad
        >>> foregrad.aot_function(lambda x: x * 2, fw_compiler=foregrad.nop)(torch.ones(2))
        tensor([2., 2.])
    """
    return fx_g


def make_boxed_func(f: Callable[..., object]) -> Boxed:
    """`f(*args)` as a function that takes a list and empties it. Returns the result of `f`.

    No frame between the caller and `f` holds an argument, so `f` may free it. A graph module, or its `forward`,
    is compiled by the eager backend, from the graph as it is now.

    Examples:
        >>> import foregrad
        >>> add = foregrad.make_boxed_func(lambda a, b: [a + b])
        >>> numbers = [1, 2]
        >>> add(numbers), numbers
        ([3], [])
    """
    module = _plain_module(f)
    if module is not None:
        return render_late(module, as_list=False)

    def g(args: list[object]) -> object:
        return _caller(len(args))(f, args)

    return attributed(g, _boxed_call=True)


def make_boxed_compiler(compiler: Callable[..., Any]) -> Callable[..., Boxed]:
    """Wrap a compiler of functions `f(*args)`, so that its compiled functions take one list, and empty it.

    Examples:
        >>> import torch, foregrad
        >>> compiler = foregrad.make_boxed_compiler(lambda gm, inputs: gm.forward)
        >>> double = foregrad.aot_function(lambda x: x * 2, fw_compiler=compiler)
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    @functools.wraps(compiler)
    def f(fx_g: torch.fx.GraphModule, inps: Sequence[Any]) -> Boxed:
        return make_boxed_func(compiler(fx_g, inps))

    return f


def is_boxed(fn: object) -> bool:
    """Whether `fn` takes its arguments as one list."""
    return bool(getattr(fn, "_boxed_call", False))


def call_boxed(fn: Callable[..., object], args: list[object]) -> list[object]:
    """Call a compiled graph of any convention. `args` is emptied; the outputs come as a list."""
    out = fn(args) if is_boxed(fn) else _caller(len(args))(fn, args)
    return out if type(out) is list else _as_list(out, "the compiler", "graph")


def as_boxed(
    fn: object, *, backend: str = "the compiler", graph: str = "graph", first_call: FirstCall | None = None
) -> Callable[[list[Any]], list[object]]:
    """A compiler's result as a function that empties a list and returns a list.

    A tuple becomes a list, and one tensor a list of one. An untouched graph module runs as the eager backend's code:
    equal calls, without the frames that keep arguments alive. `backend` and `graph` name the culprit in messages.
    `first_call` replaces the first call, and gives its results and the function for later calls (None: the next call is
    a first one too).
    """
    if not callable(fn):
        raise BackendError(
            f"{_named(backend)} returned {_article(fn)} for the {graph}: it can't be called.\n  A compiler takes "
            "(graph module, example inputs) and returns a function of the graph's inputs."
        )
    if getattr(fn, "returns_list", False) is True and is_boxed(fn):
        return fn if first_call is None else after_first_call(fn, first_call)
    module = _plain_module(fn)
    if module is not None:
        function = render_late(module)
        return function if first_call is None else after_first_call(function, first_call)
    call: Boxed = fn if is_boxed(fn) else make_boxed_func(fn)
    if first_call is not None:
        plain, whole = call, as_boxed(fn, backend=backend, graph=graph)

        def settle(later: Any) -> None:
            nonlocal call
            call = plain if later is whole else later

        call = beginning(whole, first_call, settle)

    def boxed(args: list[object]) -> list[object]:
        out = call(args)
        return out if type(out) is list else _as_list(out, backend, graph)

    attributed(boxed, _boxed_call=True, returns_list=True, __wrapped__=fn)
    return boxed


def _as_list(out: object, backend: str, graph: str) -> list[object]:
    if isinstance(out, (list, tuple)):
        return list(out)
    if out is None or isinstance(out, (torch.Tensor, int, float, complex, torch.SymInt, torch.SymFloat)):
        return [out]
    raise BackendError(
        f"{_named(backend)} compiled the {graph} to a function that returned {_article(out)}; "
        "expected a list or tuple of the graph's outputs."
    )


def _plain_module(fn: object) -> torch.fx.GraphModule | None:
    """The graph module that is `fn`, or that has `fn` as its `forward`, if a call only runs its graph; else None."""
    owner = getattr(fn, "__self__", None)
    module = owner if getattr(fn, "__func__", None) is getattr(type(owner), "forward", fn) else fn
    if not isinstance(module, torch.fx.GraphModule) or not is_plain_graph_module(module):
        return None
    if vars(module).get("_boxed_call"):  # PyTorch's property asks the graph, and would have it made
        return None
    inputs = [] if late_graph_of(module) is not None else module.graph.find_nodes(op="placeholder")
    # Defaults and *args are resolved by the module's own signature.
    return None if any(node.args or str(node.target).startswith("*") for node in inputs) else module


@functools.lru_cache(maxsize=256)
def _caller(count: int) -> Callable[[Callable[..., Any], list[Any]], object]:
    """A function that calls a given function with the `count` items of a list, and holds no item meanwhile.

    `f(*args)` would build a tuple that lives as long as the call. Popped one by one, the arguments only ever stand on
    the interpreter's stack, until a Python function takes them over into its frame.
    """
    source = (
        "def call(function, args):\n"
        "    args.reverse()\n"
        "    pop = args.pop\n"
        f"    return function({', '.join(['pop()'] * count)})\n"
    )
    return compile_source(source, "call", {}, label=f"call with {count}")


def _named(backend: str) -> str:
    return backend if " " in backend else f"backend `{backend}`"


def _article(value: object) -> str:
    return "None" if value is None else f"an object of type `{type(value).__name__}`"


# -------------------------------------------------------------------- the first call
# A compiled graph with a separate function for the first call, at no cost for later calls.


Run = Callable[[list[Any]], list[Any]]
FirstCall = Callable[[Run, list[Any]], tuple[list[Any], Run | None]]


def beginning(run: Run, first_call: FirstCall, settle: Callable[[Run], None]) -> Run:
    """`first_call` of `run`; it passes the function for later calls to `settle`."""

    def begin(args: list[object]) -> list[object]:
        out, later = first_call(run, args)
        if later is not None:
            settle(later)
        return out

    return begin


def after_first_call(function: Any, first_call: FirstCall) -> Run:
    """A stand-in for a function of the eager backend's: its first call goes to `first_call`."""

    def settle(later: Any) -> None:
        is_rendered = type(function) is FunctionType and getattr(function, "source", None) is not None
        # A wrapper's code needs its cells.
        become(later, takes_code=later is function and is_rendered and not function.__code__.co_freevars)

    standing, become = stand_in(beginning(function, first_call, settle))
    standing.returns_list = True
    if hasattr(function, "source"):
        standing.source = function.source
    return standing  # type: ignore[no-any-return]
