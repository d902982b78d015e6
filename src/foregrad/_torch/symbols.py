"""Symbolic sizes: torch's `ShapeEnv`, its symbols, guards and expressions. Checked on torch 2.13.0.

Importing torch's own modules for these costs more than a second, so that nothing here is imported before the first
capture with a symbolic size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

__all__ = [
    "SymbolTable",
    "TracedSymbol",
    "concrete",
    "expression_text",
    "has_symbolic",
    "is_symbolic",
    "map_symbolic",
    "symbol_made",
    "write_expression",
]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(value: Any) -> bool:
    """Whether a number is symbolic."""
    return isinstance(value, _SYMBOLIC)


def has_symbolic(value: Any) -> bool:
    """Whether there is a symbolic number in `value`, through lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return any(map(has_symbolic, value))
    if isinstance(value, dict):
        return any(map(has_symbolic, value.values()))
    return isinstance(value, _SYMBOLIC)


def map_symbolic(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to every symbolic number in it, through lists, tuples and dicts."""
    if isinstance(value, _SYMBOLIC):
        return fn(value)
    if isinstance(value, (list, tuple)):
        mapped = [map_symbolic(item, fn) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    if isinstance(value, dict):
        return {key: map_symbolic(item, fn) for key, item in value.items()}
    return value


def concrete(value: Any) -> Any:
    """A symbolic number as the plain one it was at capture, with no guard added; anything else as it is."""
    return value.node.hint if isinstance(value, _SYMBOLIC) else value


def symbol_made(number: Any) -> Any:
    """The symbol, or expression, that a symbolic number was made as, whatever has been found out of it since."""
    return number.node._expr


class TracedSymbol(torch.SymFloat):
    """A symbolic float of a class of our own: torch's operators take it as a number."""


class SymbolTable:
    """The symbols of one capture, each bound to something that is known when a call begins."""

    def __init__(self) -> None:
        import torch._refs  # noqa: F401 - registers what fakes of symbolic sizes run in place of kernels
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Sizes that happen to be equal stay two symbols until an operator needs them equal.
        self.env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.floats: dict[Any, Any] = {}  # symbols of floats, with their values
        self.bound: dict[Any, Any] = {}  # symbol -> whatever it was bound to

    def symbol(self, value: int, name: str, to: Any, limits: tuple[int | None, int | None] = (None, None)) -> Any:
        """A symbolic integer that is `value` now; a plain 0 or 1 for these, which are never symbolic."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        number = self.env.create_symintnode(symbol, hint=value, source=source)
        if isinstance(number, torch.SymInt):
            self.bound[symbol] = to
            low, high = limits
            if low is not None or high is not None:
                self.env.constrain_symbol_range(symbol, max(low or 2, 2), int(high or _unlimited()))
        return number

    def float_node(self, value: float, name: str) -> Any:
        """What a symbolic float that is `value` now is made of."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.env.create_symbol(
            value, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self.floats[symbol] = value
        number: Any = self.env.create_symfloatnode(symbol, hint=value, source=source)
        return number.node

    def is_guarded(self, symbol: Any) -> bool:
        """Whether somebody needed to know the value of a symbol."""
        return bool(self.env.replace(symbol) != symbol) or any(
            symbol in guard.expr.free_symbols for guard in self.env.guards
        )

    def guards(self, first: int = 0) -> list[Any]:
        """What was found out about the sizes while capturing, as sympy expressions that must be true.

        `first`: how many of `num_found` to leave out.
        """
        found = [guard.expr.subs(self.floats) for guard in self.env.guards[first:]]  # floats asked for are decided
        return [expression for expression in found if expression.free_symbols]

    def num_found(self) -> int:
        return len(self.env.guards)

    def limits(self, symbol: Any) -> tuple[int, int | None]:
        """The least and the greatest value that a symbol was taken to have."""
        limits = self.env.var_to_range[symbol]
        high = None if limits.upper == _unlimited() or limits.upper > 2**62 else int(limits.upper)
        return int(limits.lower), high

    def value_of(self, symbol: Any) -> int | None:
        """The one value that a symbol may have, when a guard fixed it."""
        found = self.env.replace(symbol)
        return int(found) if found.is_number else None


def _unlimited() -> Any:
    from torch.utils._sympy.numbers import int_oo

    return int_oo


def expression_text(expression: Any, names: Mapping[Any, str], bind: Callable[[str, Any], str]) -> str:
    """A sympy expression, or a symbolic number, as Python; `names` has the variable of each symbol.

    `bind` gives a global name for a module the text uses (`math`, `torch`).
    """
    from torch.utils._sympy.printers import PythonPrinter

    expression = expression.node.expr if isinstance(expression, _SYMBOLIC) else expression
    renamed = expression.xreplace({s: type(s)(names[s], integer=True) for s in expression.free_symbols})
    text: str = PythonPrinter().doprint(renamed)
    for module in ("math", "torch"):
        if f"{module}." in text:
            import importlib

            text = text.replace(f"{module}.", f"{bind(module, importlib.import_module(module))}.")
    return text


def write_expression(graph: fx.Graph, number: Any, env: Mapping[Any, fx.Node]) -> Any:
    """A symbolic number as nodes at the end of `graph`; `env` has the node of each symbol."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = number.node.expr
    if expression.is_number:
        return concrete(number)
    before = next(iter(reversed(graph.nodes)), None)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(env[symbol], tracer) for symbol in expression.free_symbols}
    result = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    for node in _after(graph, before):
        node.meta["val"] = _value(node)
    return result.node if isinstance(result, fx.Proxy) else result


def _after(graph: fx.Graph, node: fx.Node | None) -> Iterator[fx.Node]:
    found = []
    for later in reversed(graph.nodes):
        if later is node:
            break
        found.append(later)
    return iter(reversed(found))


def _value(node: fx.Node) -> Any:
    def known(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    return node.target(*map(known, node.args), **{k: known(v) for k, v in node.kwargs.items()})  # type: ignore[operator]
