"""Symbolic sizes as data: sympy expressions to nested lists and back, and a `ShapeEnv` made again from the data.

An expression is an integer, a symbol's name, `true`, `false`, or `[function, argument, ...]` with a function from a
fixed table. Nothing is parsed or evaluated as text, no power of two numbers is computed, and the length of an
expression's value is bounded before anything is computed. Checked on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._torch.ops import OpOverload
from .._torch.symbols import SymbolTable

_DEEPEST = 64
_LARGEST = 2**63
_MOST_ARGUMENTS = 256
_MOST_PARTS = 512  # of an expression
_MOST_BITS = 2048  # of any number on the way to a size
_BITS_OF_SIZE = 62


@functools.cache
def _functions() -> dict[str, Any]:
    import sympy
    from torch.utils._sympy import functions

    table = {name: getattr(sympy, name) for name in ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge")}
    table |= {name: getattr(sympy, name) for name in ("And", "Or", "Not")}
    names = (
        "FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt",
        "TruncToInt", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "Max", "Min", "PowByNatural", "Identity",
    )  # fmt: skip
    return table | {name: getattr(functions, name) for name in names if hasattr(functions, name)}


@functools.cache
def _names() -> dict[Any, str]:
    import sympy

    named = {cls: name for name, cls in _functions().items()}
    # `Lt(a, b)` makes a `StrictLessThan`, and so on.
    classes = {"Eq": sympy.Equality, "Ne": sympy.Unequality, "Lt": sympy.StrictLessThan, "Le": sympy.LessThan}
    return named | {cls: name for name, cls in classes.items()} | {
        sympy.StrictGreaterThan: "Gt", sympy.GreaterThan: "Ge"
    }  # fmt: skip


def raw_expression(number: Any) -> Any:
    """The expression of a symbolic number as it was made, without later replacements of symbols."""
    return number.node._expr


def expression_to(expression: Any, *, floats: bool = False) -> Any:
    """A sympy expression as data. Raises `ValueError` for unknown functions, and for floats unless `floats`."""
    import sympy

    if expression is sympy.true or expression is sympy.false:
        return bool(expression)
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return ["Rational", int(expression.p), int(expression.q)]
    if floats and expression.is_Float:
        return ["Float", float(expression).hex()]
    name = _names().get(type(expression))
    if name is None:
        raise ValueError(f"a size is computed by the unknown function {type(expression).__name__}")
    arguments = expression.args
    if name in ("Add", "Mul", "And", "Or", "Max", "Min"):  # sympy orders these by hashes in part
        arguments = sorted(arguments, key=sympy.default_sort_key)
    return [name, *(expression_to(argument, floats=floats) for argument in arguments)]


def expression_from(data: Any, symbols: Mapping[str, Any], depth: int = 0, *, floats: bool = False) -> Any:
    """The expression from the data of `expression_to`. Raises `ValueError` for any other data."""
    import sympy

    if not depth:
        _check_bits(data)
    if type(data) is bool:
        return sympy.true if data else sympy.false
    if type(data) is int and -_LARGEST < data < _LARGEST:
        return sympy.Integer(data)
    if type(data) is str and data in symbols:
        return symbols[data]
    if not (isinstance(data, list) and data and type(data[0]) is str) or depth > _DEEPEST:
        raise ValueError("no expression of sizes")
    name, *rest = data
    if len(rest) > _MOST_ARGUMENTS:
        raise ValueError("an expression of sizes with too many arguments")
    if name == "Rational":
        if len(rest) != 2 or not all(type(n) is int and abs(n) < _LARGEST for n in rest) or rest[1] <= 0:
            raise ValueError("no fraction")
        return sympy.Rational(*rest)
    if floats and name == "Float":
        return sympy.Float(float.fromhex(rest[0]))
    function = _functions().get(name)
    if function is None:
        raise ValueError(f"a size is computed by the unknown function {name!r}")
    arguments = [expression_from(item, symbols, depth + 1, floats=floats) for item in rest]
    if name in ("Pow", "PowByNatural") and not (
        len(arguments) == 2 and arguments[1].is_Integer and abs(arguments[1]) <= 16 and not arguments[0].is_number
    ):
        raise ValueError("a power that is not one of a symbol by a small number")
    return function(*arguments)


def _check_bits(data: Any) -> None:
    """Raise `ValueError` if an expression has too many parts, or its value may be too long a number."""
    left = _MOST_PARTS

    def bits(data: Any, depth: int) -> int:
        nonlocal left
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise ValueError("an expression of sizes with too many parts")
        if not isinstance(data, list):
            return data.bit_length() if isinstance(data, int) else _BITS_OF_SIZE
        name, lengths = data[:1], [bits(item, depth + 1) for item in data[1:]]
        if name in (["Pow"], ["PowByNatural"]) and isinstance(data[-1], int):
            length = sum(lengths) * abs(data[-1])
        else:
            length = sum(lengths) if name in (["Add"], ["Mul"], ["Rational"]) else max(lengths, default=1)
        if length > _MOST_BITS:
            raise ValueError("an expression of sizes with a value of perhaps thousands of digits")
        return length

    bits(data, 0)


# ------------------------------------------------------------------------------------------------ tables of symbols


def table_to(table: SymbolTable, *, floats: bool = False) -> dict[str, Any]:
    """The symbols of a capture and their guards. Raises `ValueError` for symbolic floats."""
    if table.floats:
        raise ValueError("it computes with symbolic floats")
    symbols = []
    for kind, table_part in (("size", table.bound), ("computed", table.computed)):
        for symbol in table_part:
            low, high = table.limits(symbol)
            name, source = str(symbol), _source(table, symbol)
            hint = table.size_at_capture(symbol)
            symbols.append({"name": name, "source": source, "kind": kind, "hint": hint, "least": low, "most": high})
    return {"symbols": symbols, "guards": [expression_to(guard, floats=floats) for guard in table.guards()]}


def _source(table: SymbolTable, symbol: Any) -> str:
    """The source of a symbol: the symbol's name follows from its source."""
    env = table.env
    sources = (getattr(env, "var_to_sources", None) or {}).get(symbol)
    if not sources:
        return str(symbol)
    name = sources[0].name
    return str(name() if callable(name) else name)


def restored_table(data: Any) -> tuple[SymbolTable, dict[str, Any]]:
    """The table from the data of `table_to`, and its symbols by their names in the data."""
    table, symbols = SymbolTable(), {}
    for entry in data["symbols"]:
        name, source, kind, hint, least, most = (
            entry[key] for key in ("name", "source", "kind", "hint", "least", "most")
        )
        if type(name) is not str or type(source) is not str or name in symbols or kind not in ("size", "computed"):
            raise ValueError("no symbol of a size")
        for number in (hint, least, *(() if most is None else (most,))):
            if type(number) is not int or not -(2**62) < number < 2**62:
                raise ValueError(f"no size of the symbol {name!r}")
        if (hint < 2 and kind != "size") or not least <= hint or (most is not None and most < hint):
            raise ValueError(f"the size of the symbol {name!r} is out of its range")
        if kind == "size":
            number = table.symbol(hint, source, None, (least, most)) if least >= 2 else table.number(hint, source, None)
        else:
            number = table.computed_symbol(hint, source)
        symbols[name] = number.node._expr
    for guard in data["guards"]:
        expression = expression_from(guard, symbols)
        if not bool(table.env.evaluate_expr(expression)):
            raise ValueError("a condition on sizes that is false for the sizes at capture")
    return table, symbols


def floats_to(numbers: Iterable[Any]) -> list[list[Any]]:
    """The symbols of floats that a graph reads from tensors: name, source, value at capture."""
    found = {}
    for number in numbers:
        symbol, table = raw_expression(number), SymbolTable(number.node.shape_env)
        if symbol.is_Symbol:
            found[str(symbol)] = [str(symbol), _source(table, symbol), float(number.node.hint)]
    return [found[name] for name in sorted(found)]


def restored_float(table: SymbolTable, entry: Any) -> Any:
    """A symbolic float from an entry of `floats_to`, with a symbol of an equal name."""
    name, source, value = entry
    number = torch.SymFloat(table.float_node(float(value), str(source)))
    if str(raw_expression(number)) != name:
        raise ValueError(f"the symbol {name!r} has a new name")
    return number


def restored_number(table: SymbolTable, expression: Any, kind: type = int) -> Any:
    """A symbolic integer (float, bool) with the expression; a plain integer if the expression is a number."""
    if expression.is_Integer and kind is int:
        return int(expression)
    env = table.env
    hint = table.at_capture(expression)
    if kind is bool:
        return env.create_symboolnode(expression)
    if kind is float:
        return env.create_symfloatnode(expression, hint=float(hint))
    if not hint.is_Integer:
        raise ValueError("a size that is no integer")
    number: Any = env.create_symintnode(expression, hint=int(hint))
    return number


def operator_called(name: str) -> OpOverload | None:
    """The operator of the dispatcher with the full name, as `aten::add.Tensor`; None if there is none.

    TorchScript's own functions, named alike, do not count.
    """
    try:
        if not torch._C._dispatch_has_kernel(name):
            return None
    except RuntimeError:  # no legal name
        return None
    space, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), short, None)
    operator = getattr(packet, overload or "default", None)
    return operator if isinstance(operator, OpOverload) and operator.name() == name else None
