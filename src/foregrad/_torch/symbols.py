"""Symbolic sizes: torch's `ShapeEnv`, its symbols, guards and expressions. Checked on torch 2.13.0.

Importing torch's own modules for these costs more than a second, so nothing here is imported before the first capture
with a symbolic size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

from ..identity import class_property
from .nested import mapped

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_silent = logging.getLogger("foregrad.closed_sizes")
_silent.setLevel(logging.CRITICAL)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(value: object) -> bool:
    """Whether a number is symbolic."""
    return isinstance(value, SYMBOLIC)


_LARGEST = 2**31 - 1  # arithmetic on symbols must stay within 64 bits


def may_vary(value: int, *, is_size: bool = True) -> bool:
    """Whether an integer may become symbolic: sizes of 0 and 1 never do."""
    return (1 if is_size else -_LARGEST - 1) < value <= _LARGEST


def has_symbolic(value: object) -> bool:
    """Whether there is a symbolic number in `value`, through lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return any(map(has_symbolic, value))
    if isinstance(value, dict):
        return any(map(has_symbolic, value.values()))
    return isinstance(value, SYMBOLIC)


Size: TypeAlias = int | torch.SymInt
"""A size, stride or offset, of which some are symbolic."""


def map_symbolic(value: object, fn: Callable[[object], object]) -> Any:
    """`value` with `fn` applied to its every symbolic number, through lists, tuples and dicts."""
    return mapped(value, SYMBOLIC, fn)


def concrete(value: object) -> Any:
    """The plain value of a symbolic number at capture, with no guard added; any other value unchanged."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def same_numbers(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two rows of numbers are equal, symbolic ones as expressions; adds no guard."""
    return len(a) == len(b) and all(_expression(x) == _expression(y) for x, y in zip(a, b, strict=True))


def _expression(number: object) -> Any:
    return number.node.expr if isinstance(number, SYMBOLIC) else number


def is_product_of_sizes(number: Any) -> bool:
    """Whether a symbolic integer is a product of symbols that are at least 2, and perhaps of a positive number."""
    node = number.node
    expression, env = node.expr, node.shape_env
    if node.pytype is not int or env is None:
        return False
    for factor in expression.args if expression.is_Mul else (expression,):
        symbol = factor.base if factor.is_Pow else factor
        if factor.is_Pow and not (factor.exp.is_Integer and factor.exp > 0):
            return False
        if symbol.is_Integer:
            if symbol <= 0 or symbol is expression:
                return False
        elif not symbol.is_Symbol or symbol not in env.var_to_range or not env.var_to_range[symbol].lower >= 2:
            return False
    return True


def symbol_made(number: Any) -> Any:
    """The symbol, or expression, of a symbolic number as it was made, without later replacements."""
    return number.node._expr


class NumPyNumber:
    """A symbolic number with the text, hash and pickle of its Python number; NumPy is given the Python number."""

    _fixed: Callable[[], object]  # the number; the graph then holds for this number

    def __str__(self) -> str:
        return text_later(numbers_told(self), self, "s") or str(self._fixed())

    def __repr__(self) -> str:
        return text_later(numbers_told(self), self, "r") or repr(self._fixed())

    def __format__(self, spec: str) -> str:
        return text_later(numbers_told(self), self, "", spec) or format(self._fixed(), spec)

    def __hash__(self) -> int:
        return hash(self._fixed())

    def __reduce__(self) -> Any:
        return self.__class__, (self._fixed(),)

    def __array__(self, dtype: object = None, copy: object = None) -> object:
        return sys.modules["numpy"].asarray(fixed(self), dtype)

    def __array_ufunc__(self, ufunc: object, method: str, *args: object, **kwargs: object) -> object:
        return self.__array_function__(ufunc if method == "__call__" else getattr(ufunc, method), (), args, kwargs)

    def __array_function__(
        self, function: Any, types: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A function of numbers that gives a float is recorded, as Python's are."""
        numbers = numbers_told(self) if not kwargs and all(isinstance(arg, (int, float)) for arg in args) else None
        if numbers is not None and numbers.gives_a_float(function, args):
            return numbers.apply(function, *args)
        return function(*map(fixed, args), **{name: fixed(value) for name, value in kwargs.items()})


def fixed(value: object) -> Any:
    """The Python number of a number of a capture, whose graph then holds for this number; any other value as given."""
    return value._fixed() if isinstance(value, NumPyNumber) else value


class TracedSymbol(NumPyNumber, torch.SymFloat):
    """A symbolic float of foregrad's own class: torch's operators take it as a number."""


class TracedInt(NumPyNumber, torch.SymInt):
    """A symbolic integer in place of the program's plain one: `isinstance` and its text are an `int`'s.

    Results of its arithmetic are traced integers too. torch's own code must get the `plain` number. Arithmetic that
    gives floats is Python's, operator by operator, done by the numbers of the capture (see `SymbolTable.tell`).
    """

    def plain(self) -> torch.SymInt:
        return torch.SymInt(self.node)

    @class_property
    def __class__(self) -> type:
        return int

    def _fixed(self) -> int:
        return int(self)

    def __getattr__(self, name: str) -> object:
        if name in _OWN_OF_INTS:
            return getattr(int(self), name)
        raise AttributeError(f"'int' object has no attribute {name!r}")


def _on_plain(name: str) -> Callable[..., object]:
    is_swapped = name in _SWAPPED
    op = getattr(operator, name.strip("_")[is_swapped:]) if is_swapped or name in _ARITHMETIC else None

    def method(self: TracedInt, *others: object) -> object:
        if any(type(other).__module__ == "numpy" for other in others):
            return NotImplemented  # NumPy's numbers do the arithmetic: the result is one of theirs
        if op is not None and (numbers := numbers_told(self)) is not None:
            operands = (*others, self) if is_swapped else (self, *others)
            if _gives_a_float(op, operands):
                return numbers.apply(op, *operands)
        others = tuple(o.plain() if type(o) is TracedInt else o for o in others)
        result = getattr(torch.SymInt, name)(self.plain(), *others)
        if type(result) is torch.SymBool:  # no object could answer `is True` for a condition that is left open
            return bool(result)
        return TracedInt(result.node) if type(result) is torch.SymInt else result

    return method


def _gives_a_float(op: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether an operator on traced integers and other numbers gives a float, or compares a traced float."""
    if op in _COMPARISONS:
        return any(isinstance(o, TracedSymbol) for o in operands)
    if op is operator.truediv or any(type(o) is float or isinstance(o, TracedSymbol) for o in operands):
        return all(isinstance(o, (int, float)) for o in operands)
    return op is operator.pow and type(operands[1]) in (int, TracedInt) and bool(operands[1] < 0)


def numbers_told(number: Any) -> Any:
    """The capture's numbers, which do an integer's arithmetic (see `SymbolTable.tell`); or None."""
    reference = getattr(number.node.shape_env, _TOLD, None)
    return None if reference is None else reference()


def text_later(numbers: Any, number: Any, conversion: str, spec: str = "") -> str | None:
    """A mark for the text of a number, where each call makes that by itself; None where its value is needed."""
    if numbers is None or numbers.texts is None or spec.endswith("c"):  # a character: not for all numbers
        return None
    format(concrete(number) if isinstance(number, torch.SymInt) else number.value, spec)  # raises as the program's does
    mark: str | None = numbers.texts.mark(number, conversion, spec)
    return mark


_TOLD = "_foregrad_numbers"
_RELATIONS = {"!=": operator.ne, "==": operator.eq, "<": operator.lt, "<=": operator.le} | {
    ">": operator.gt,
    ">=": operator.ge,
}
_COMPARISONS = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
_ARITHMETIC = {f"__{name}__" for name in "add sub mul truediv floordiv mod pow lt le gt ge eq ne".split()}
_SWAPPED = {f"__r{name}__" for name in "add sub mul truediv floordiv mod pow".split()}
_WRITTEN_OUT = {"__init__", *vars(TracedInt), *vars(NumPyNumber)}
for _name, _method in vars(torch.SymInt).items():
    if callable(_method) and _name.startswith("__") and _name not in _WRITTEN_OUT:
        setattr(TracedInt, _name, _on_plain(_name))

_OWN_OF_INTS = frozenset(name for name in dir(int) if not name.startswith("_"))


class ClosedSizesError(Exception):
    """A further condition on sizes was needed inside of `SymbolTable.closed`."""

    @classmethod
    def is_behind(cls, error: BaseException | None) -> bool:
        """Whether an error was caused by a `ClosedSizesError`."""
        while error is not None and not isinstance(error, cls):
            error = error.__cause__ or error.__context__
        return error is not None


class SymbolTable:
    """The symbols of one capture, each bound to a value that exists when a call begins.

    `env` is the `ShapeEnv` of the user's fake tensors; by default a new one.
    """

    def __init__(self, env: ShapeEnv | None = None) -> None:
        import torch._refs  # noqa: F401 - registers what fakes of symbolic sizes run in place of kernels

        from .size_arithmetic import Env

        # Sizes that happen to be equal stay two symbols until an operator needs them equal.
        self.env = env or Env(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.floats: dict[object, object] = {}  # symbols of floats, with their values
        self.bound: dict[object, Any] = {}  # symbol -> the object it was bound to
        self.computed: dict[object, None] = {}  # symbols with values that the graph itself computes

    def tell(self, numbers: object) -> None:
        """Have arithmetic on the table's integers that gives floats done by `numbers.apply(operator, *operands)`."""
        setattr(self.env, _TOLD, weakref.ref(numbers))

    def symbol(self, value: Size, name: str, to: Any, limits: tuple[int | None, int | None] = (None, None)) -> Any:
        """A symbolic integer that is `value` now. Sizes are 2 or more: a size of 0 or 1 is plain."""
        return self._bound(value, name, to, limits)

    def number(self, value: int, name: str, to: object, *, is_item: bool = False) -> Any:
        """A symbol for an argument: 2 or more for a number from 2 on, 0 or more for 0 and 1 and in containers, negative
        for a negative number.
        """
        if value > 1 and not is_item:
            return self._bound(value, name, to, (None, None))
        return self._bound(value, name, to, (0, _LARGEST) if value >= 0 else (-_LARGEST, -1), is_size=False)

    def _bound(
        self, value: Size, name: str, to: object, limits: tuple[int | None, int | None], *, is_size: bool = True
    ) -> Any:
        symbol, number = self._integer(value, name, is_size=is_size)
        if isinstance(number, torch.SymInt):
            self.bound[symbol] = to
            low, high = limits
            if not is_size:
                self.env.constrain_symbol_range(symbol, low, high)
            elif low is not None or high is not None:
                self.env.constrain_symbol_range(symbol, max(low or 2, 2), int(high) if high else _unlimited())
        return number

    def computed_symbol(self, value: int, name: str, *, is_size: bool = True) -> Any:
        """A symbol for an integer that the graph computes: it has no value until the graph runs. Sizes are over 1."""
        symbol, number = self._integer(value, name, is_size=is_size)
        if isinstance(number, torch.SymInt):
            self.computed[symbol] = None
            if not is_size:
                self.env.constrain_symbol_range(symbol, -_LARGEST, _LARGEST)
        return number

    def _integer(self, value: Size, name: str, *, is_size: bool = True) -> tuple[object, object]:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.env.create_symbol(
            value,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=True if is_size else None,
            do_not_specialize_zero_one=not is_size,
        )
        return symbol, self.env.create_symintnode(symbol, hint=value, source=source)

    def float_node(self, value: float, name: str) -> Any:
        """The node of a symbolic float that is `value` now."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.env.create_symbol(
            value, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self.floats[symbol] = value
        number: Any = self.env.create_symfloatnode(symbol, hint=value, source=source)
        return number.node

    def found_of(self, symbol: Any) -> list[tuple[Callable[..., object], float]] | None:
        """The conditions on the symbol of a float, as comparisons with numbers; None if its value was needed."""
        if self.env.replace(symbol) != symbol:
            return None
        conditions = []
        for expression in {guard.expr for guard in self.env.guards if symbol in guard.expr.free_symbols}:
            op = _RELATIONS.get(getattr(expression, "rel_op", ""))
            if op is None or expression.lhs is not symbol or not expression.rhs.is_number:
                return None
            conditions.append((op, float(expression.rhs)))
        return conditions

    def guards(self, first: int = 0) -> list[Any]:
        """The conditions on sizes from the capture, as sympy expressions that must be true.

        `first`: the number of conditions, of `num_found`, to leave out.
        """
        expressions = [guard.expr.subs(self.floats) for guard in self.env.guards[first:]]
        return [expression for expression in expressions if expression.free_symbols]

    def assume(self, expression: Any) -> bool:
        """Add a condition as an operator's query would; returns whether it holds at capture."""
        return bool(self.env.evaluate_expr(expression))

    def num_found(self) -> int:
        return len(self.env.guards)

    def size_at_capture(self, symbol: object) -> int:
        return int(self.at_capture(symbol))

    def at_capture(self, expression: Any) -> Any:
        """The value of an expression at capture; adds no guard."""
        values = getattr(self.env, "backed_var_to_val", None) or self.env.var_to_val
        return expression.xreplace({symbol: values[symbol] for symbol in expression.free_symbols})

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Context: a query that needs a further condition on sizes raises `ClosedSizesError`."""

        def refuse(expression: object, value: object) -> None:
            raise ClosedSizesError(f"{expression} is {value} at capture, but not for every size")

        attributes: dict[str, object] = vars(self.env)
        log = attributes["log"]
        attributes["log"] = _silent  # torch would warn of the refusal
        attributes["_check_frozen"] = refuse  # called before each guard
        try:
            yield
        finally:
            attributes["log"] = log
            del attributes["_check_frozen"]

    def limits(self, symbol: Any) -> tuple[int, int | None]:
        """The least and the greatest value of a symbol, as assumed when it was made."""
        limits = self.env.var_to_range[symbol]
        high = None if limits.upper == _unlimited() or limits.upper > 2**62 else int(limits.upper)
        return int(limits.lower), high

    def value_of(self, symbol: Any) -> int | None:
        """The single value of a symbol that a guard has fixed; else None."""
        replaced = self.env.replace(symbol)
        return int(replaced) if replaced.is_number else None


def _unlimited() -> Any:
    from torch.utils._sympy.numbers import int_oo

    return int_oo


def expression_in(number: Any, symbols: Mapping[Any, Any]) -> Any:
    """The expression of a symbolic number in `symbols`, if it has one.

    The expression as it was made is the second choice: a symbol is replaced by an equal symbol, perhaps a later one.
    """
    expression = number.node.expr
    return expression if all(symbol in symbols for symbol in expression.free_symbols) else number.node._expr


def with_part_named(expression: Any, part: torch.SymInt, name: str) -> tuple[Any, Any]:
    """An expression with a new symbol in the place of a part, and the symbol."""
    inner = next(iter(part.node.expr.free_symbols))
    symbol = type(inner)(name, integer=True)
    return expression.xreplace({part.node.expr: symbol}), symbol


def expression_text(expression: Any, names: Mapping[object, str], bind: Callable[[str, object], str]) -> str:
    """A sympy expression, or a symbolic number, as Python; `names` has the variable of each symbol.

    `bind` gives a global name for a module the text uses (`math`, `torch`).
    """
    from torch.utils._sympy.printers import PythonPrinter

    expression = expression_in(expression, names) if isinstance(expression, SYMBOLIC) else expression
    renamed = expression.xreplace({s: type(s)(names[s], integer=True) for s in expression.free_symbols})
    text: str = PythonPrinter().doprint(renamed)
    if type(renamed).__name__ == "Or":
        text = f"({text})"  # conditions are joined by "and"
    for module in ("math", "torch"):
        if f"{module}." in text:
            import importlib

            text = text.replace(f"{module}.", f"{bind(module, importlib.import_module(module))}.")
    return text


def write_expression(graph: fx.Graph, number: Any, env: Mapping[object, fx.Node], expression: Any = None) -> Any:
    """A symbolic number as nodes at the end of `graph`; `env` has the node of each symbol.

    `expression`: the expression to write, if the number has several.
    """
    from torch.utils._sympy.interp import sympy_interp

    if expression is None:
        expression = number.node.expr
    if expression.is_number:
        return concrete(number)
    before = next(iter(reversed(graph.nodes)), None)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(env[symbol], tracer) for symbol in expression.free_symbols}
    result = sympy_interp(_arithmetic(), proxies, expression)
    for node in _after(graph, before):
        node.meta["val"] = _value(node)
    return result.node if isinstance(result, fx.Proxy) else result


@functools.cache
def _arithmetic() -> type:
    """The Python of each operator in an expression; torch's own class lacks the quotient of integers."""
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Arithmetic(PythonReferenceAnalysis):
        int_truediv = staticmethod(operator.truediv)

    return Arithmetic


def _after(graph: fx.Graph, node: fx.Node | None) -> Iterator[fx.Node]:
    later_nodes = []
    for later in reversed(graph.nodes):
        if later is node:
            break
        later_nodes.append(later)
    return iter(reversed(later_nodes))


def _value(node: fx.Node) -> Any:
    def value_of(argument: object) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    function: Any = node.target
    return function(*map(value_of, node.args), **{k: value_of(v) for k, v in node.kwargs.items()})


def shape_env() -> ShapeEnv:
    """A new `ShapeEnv`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def symbolic_context_of(tensor: torch.Tensor) -> Any:
    """The active trace's symbolic context of a tensor: its symbolic sizes, and its source."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.tensor_to_context.get(tensor)


def new_symbolic_integer(env: Any, value: int, name: str) -> Any:
    """A symbolic integer of `env` that is `value` now; a plain one if `env` specializes (0 and 1)."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = env.create_symbol(value, source, positive=value >= 0)
    return env.create_symintnode(symbol, hint=value, source=source)


SYM_MATH: dict[object, Callable[[object], object]] = {
    getattr(torch, f"_sym_{name}"): getattr(math, name)
    for name in "sqrt cos cosh sin sinh tan tanh asin acos atan log2".split()
}
"""Functions of numbers in Dynamo's graphs, by Python's own. PyTorch's never end for a number that counts as a float."""


# -------------------------------------------------------------------- ragged sizes


def is_ragged(size: object) -> bool:
    """Whether a size has no value, or is a multiple of a size without a value."""
    return isinstance(size, torch.SymInt) and bool(size.node.is_nested_int())


def coefficient(size: Any) -> int:
    """The factor of a ragged size that is a multiple of a ragged size."""
    return int(size.node.nested_int_coeff())


def new_ragged_size() -> torch.SymInt:
    """A ragged size that no other tensor has."""
    from torch.nested._internal.nested_int import NestedIntNode

    return torch.SymInt(NestedIntNode(next(_ragged), 1))


_ragged = itertools.count(1 << 40)  # far from PyTorch's own
