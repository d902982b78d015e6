"""Plain values, and functions by name, as JSON and back: for the arguments of graphs and for signatures.

JSON's own values stand for themselves (a list is a list). Any other value is an object with its kind as the single key:
`{"tuple": [...]}`, `{"dtype": "float32"}`, `{"operator": 3}`. Operators, layouts of tensors and lines of source are
kept once each, in tables, and named by their position there.
"""

from __future__ import annotations

import base64
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..._torch.ops import INTERNAL_NAMESPACES, OpOverload, mkldnn_rnn_layer_for_training
from ..._torch.symbols import is_symbolic
from ...errors import ArtifactError
from ...graph.meta import TensorSpec
from ...tracing.heap.alias import RunOnStorageCopies, StorageExtent
from ...tracing.kernels.checks import VALUE_CHECKS
from ...tracing.kernels.plans import independent_of_phase
from ...tracing.tape.opinfo import CallOnCopies, item_or_empty, take_data
from ...tracing.values.numbers import NUMBER_FUNCTIONS
from .._torch import expression_from, expression_to, operator_called, raw_expression, restored_number

_DEEPEST = 48
_MOST_DIMENSIONS = 64
_MOST_ITEMS = 1 << 20
_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}


def described(value: Any) -> str:
    """An object that can't be stored, for people."""
    cls = type(value)
    return f"a {cls.__module__}.{cls.__qualname__}"


class Writer:
    """Makes data of values. `tables()` has the operators, layouts and lines that the data refers to by position."""

    def __init__(self, *, symbolic_floats: bool = False) -> None:
        self.symbolic_floats = symbolic_floats
        self.operators: dict[str, tuple[int, Any]] = {}  # by its text: position and data
        self.layouts: dict[str, tuple[int, Any]] = {}
        self.lines: dict[str, int] = {}
        self.nodes: Mapping[fx.Node, int] = {}
        self.calls: dict[int, int] = {}  # addresses of calls that signatures compare, by order
        self.first_sequence_nr: int | None = None  # autograd counts from the beginning of the process

    def tables(self) -> dict[str, Any]:
        operators, layouts = ([data for _, data in table.values()] for table in (self.operators, self.layouts))
        return {"operators": operators, "layouts": layouts, "lines": list(self.lines)}

    def operator(self, target: Any) -> int:
        data = self._operator(target)
        return self.operators.setdefault(repr(data), (len(self.operators), data))[0]

    def _operator(self, target: Any) -> Any:
        if isinstance(target, CallOnCopies):
            return {"on_copies": self._operator(target.op), "writes": list(target.writes)}
        if isinstance(target, RunOnStorageCopies):
            places = [[*at, place.memory, self.layout(place.spec), place.start] for at, place in target.places.items()]
            memories = [self.layout(spec) for spec in target.memories]
            return {"in_memory": self._operator(target.op), "memories": memories, "places": places}
        name = name_of_operator(target)
        if name is None:
            raise ArtifactError(
                f"an artifact can't hold the operator {target}: it holds operators of ATen and prims, custom "
                "operators and arithmetic on sizes. Keep this operator outside of the exported function."
            )
        return name

    def line(self, text: str) -> int:
        return self.lines.setdefault(text, len(self.lines))

    def number(self, number: Any) -> Any:
        """A size: an integer, or the expression of a symbolic one."""
        if type(number) is int:
            return number
        if is_symbolic(number):
            expression = self.expression(raw_expression(number))
            if self.symbolic_floats and not isinstance(number, torch.SymInt):
                return {"float" if isinstance(number, torch.SymFloat) else "bool": expression}
            return expression
        raise ArtifactError(f"an artifact can't hold {described(number)} as a size")

    def expression(self, expression: Any) -> Any:
        try:
            return expression_to(expression, floats=self.symbolic_floats)
        except ValueError as error:
            raise ArtifactError(f"an artifact can't hold the size {expression}: {error}") from None

    def layout(self, spec: TensorSpec) -> int:
        """The position of a tensor's shape, strides, dtype and device in its table."""
        shape, stride = [*map(self.number, spec.shape)], [*map(self.number, spec.stride)]
        data: dict[str, Any] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": shape, "stride": stride}
        if spec.device != torch.device("cpu"):
            data["device"] = str(spec.device)
        if type(spec.offset) is not int or spec.offset:
            data["offset"] = self.number(spec.offset)
        data |= {key: True for key in ("conj", "neg") if getattr(spec, key)}
        return self.layouts.setdefault(repr(data), (len(self.layouts), data))[0]

    def layouts_of(self, spec: Any) -> Any:
        """The layouts of an operator's results; one or several, and null for a result that is no tensor."""
        if isinstance(spec, TensorSpec):
            return self.layout(spec)
        if isinstance(spec, (tuple, list)):
            return [None if item is None else self.layouts_of(item) for item in spec]
        return None

    def value(self, value: Any) -> Any:
        cls = type(value)
        if value is None or cls in (bool, int, str):
            return value
        if isinstance(value, fx.Node):
            return {"node": self.nodes[value]}
        if is_symbolic(value):
            return {"number": self.number(value)}
        rule = _WRITE.get(cls)
        if rule is not None:
            return rule(self, value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": [self.value(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.value(key), self.value(item)] for key, item in value.items()]}
        if name_of_operator(value) is not None:
            return {"operator": self.operator(value)}
        raise ArtifactError(f"an artifact can't hold {described(value)}")


def _write_generator(writer: Writer, value: Any) -> Any:
    if value is not torch.default_generator:
        raise ArtifactError(
            "an artifact can't hold a random generator of the program's own: draw from the default generator"
        )
    return {"generator": "default"}


def _write_float(_: Writer, value: float) -> Any:
    sign = "-" if math.isnan(value) and math.copysign(1.0, value) < 0 else ""
    return value if math.isfinite(value) else {"float": sign + repr(value)}


_WRITE: dict[type, Callable[[Writer, Any], Any]] = {
    float: _write_float,
    complex: lambda w, v: {"complex": [w.value(v.real), w.value(v.imag)]},
    bytes: lambda w, v: {"bytes": base64.b64encode(v).decode()},
    torch.dtype: lambda w, v: {"dtype": _DTYPE_NAMES[v]},
    torch.device: lambda w, v: {"device": str(v)},
    torch.layout: lambda w, v: {"layout": str(v).removeprefix("torch.")},
    torch.memory_format: lambda w, v: {"memory_format": str(v).removeprefix("torch.")},
    torch.Size: lambda w, v: {"size": [w.number(n) for n in v]},
    slice: lambda w, v: {"slice": [w.value(v.start), w.value(v.stop), w.value(v.step)]},
    range: lambda w, v: {"range": [v.start, v.stop, v.step]},
    type(...): lambda w, v: {"ellipsis": True},
    torch.Generator: _write_generator,
    TensorSpec: lambda w, v: {"tensor": w.layout(v)},
}


class Reader:
    """Makes values of data. Raises `ArtifactError` for data that no `Writer` writes."""

    def __init__(
        self, tables: Any, table: Any = None, symbols: Mapping[str, Any] | None = None, *, symbolic_floats: bool = False
    ) -> None:
        self.table, self.symbols = table, symbols or {}
        self.symbolic_floats = symbolic_floats
        self.lines = [checked(line, str) for line in tables["lines"]]
        self.layouts = [self._layout(data) for data in tables["layouts"]]
        self.operators = [self._operator(data) for data in tables["operators"]]
        self.nodes: list[fx.Node] = []
        self._depth = 0

    def operator(self, position: Any) -> Any:
        return self.operators[index(position, self.operators)]

    def _operator(self, data: Any) -> Any:
        """A function by name, or an operator that writes to its arguments, run on copies."""
        if type(data) is not dict:
            return operator_named(data)
        inner = operator_named(data["on_copies" if "on_copies" in data else "in_memory"])
        if not isinstance(inner, OpOverload):
            raise ArtifactError("a function to run on copies that is no operator")
        count = len(inner._schema.arguments)
        if "on_copies" in data:
            return CallOnCopies(inner, tuple(index(i, range(count)) for i in checked(data["writes"], list)))
        memories = tuple(self.layout(position) for position in checked(data["memories"], list))
        places = {}
        for position, item, memory, layout, start in checked(data["places"], list):
            if item is not None and not 0 <= checked(item, int) < _MOST_ITEMS:
                raise ArtifactError("a tensor in no list")
            spec, whole = self.layout(layout), memories[index(memory, memories)]
            if not spec.is_static or not whole.is_static or not 0 <= checked(start, int) <= whole.nbytes - spec.nbytes:
                raise ArtifactError("a tensor outside of the memory that it lies in")
            places[index(position, range(count)), item] = StorageExtent(memory, spec, start)
        return RunOnStorageCopies(inner, memories, places)

    def layout(self, position: Any) -> TensorSpec:
        return self.layouts[index(position, self.layouts)]

    def layouts_of(self, data: Any) -> Any:
        if data is None:
            return None
        if type(data) is int:
            return self.layout(data)
        return tuple(None if item is None else self.layouts_of(item) for item in checked(data, list))

    def expression(self, data: Any) -> Any:
        return expression_from(data, self.symbols, floats=self.symbolic_floats)

    def number(self, data: Any) -> Any:
        if type(data) is int and -(2**62) < data < 2**62:
            return data
        kind: type = int
        if self.symbolic_floats and type(data) is dict:
            ((name, data),) = data.items()
            kind = {"float": float, "bool": bool}[name]
        expression = self.expression(data)
        if self.table is None:
            raise ArtifactError("a symbolic size in a graph without symbols")
        return restored_number(self.table, expression, kind)

    def _layout(self, data: Any) -> TensorSpec:
        shape, stride = checked(data["shape"], list), checked(data["stride"], list)
        if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
            raise ArtifactError("a layout with strides that don't go with its shape")
        sizes, steps = tuple(map(self.number, shape)), tuple(map(self.number, stride))
        offset = self.number(data.get("offset", 0))
        if any(type(n) is int and n < 0 for n in (*sizes, *steps, offset)):
            raise ArtifactError("a layout with negative numbers")
        dtype, flags = _DTYPES[data["dtype"]], {key: checked(data.get(key, False), bool) for key in ("conj", "neg")}
        return TensorSpec(sizes, steps, dtype, _device(data.get("device", "cpu")), offset, **flags)

    def value(self, data: Any) -> Any:
        cls = type(data)
        if data is None or cls in (bool, int, str, float):
            return data
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ArtifactError("values nested too deeply")
        try:
            if cls is list:
                return [self.value(item) for item in data]
            if cls is not dict or len(data) != 1:
                raise ArtifactError(f"no value that an artifact may hold: {str(data)[:80]}")
            ((kind, content),) = data.items()
            rule = _READ.get(kind)
            if rule is None:
                raise ArtifactError(f"a value of the unknown kind {kind[:80]!r}")
            return rule(self, content)
        finally:
            self._depth -= 1


def checked(value: Any, cls: Any) -> Any:
    """`value`, if it is of exactly this type; else raises `ArtifactError`."""
    if type(value) is not cls:
        raise ArtifactError(f"{cls.__name__} expected, there is {str(value)[:80]!r}")
    return value


def three(value: Any) -> list[Any]:
    """A list of three."""
    if len(checked(value, list)) != 3:
        raise ArtifactError("three values expected")
    return value  # type: ignore[no-any-return]


def index(position: Any, items: Any) -> int:
    """A position in a list."""
    if type(position) is not int or not 0 <= position < len(items):
        raise ArtifactError(f"{str(position)[:40]} is no position among {len(items)}")
    return position


def _device(text: Any) -> torch.device:
    return torch.device(checked(text, str))


def _named(module: Any, text: Any, cls: Any) -> Any:
    value = getattr(module, checked(text, str), None)
    if not isinstance(value, cls):
        raise ArtifactError(f"{text[:40]!r} is no {cls.__name__}")
    return value


def _read_dict(reader: Reader, content: Any) -> dict[Any, Any]:
    items = {}
    for pair in checked(content, list):
        key, item = checked(pair, list)
        items[reader.value(key)] = reader.value(item)
    return items


def _read_float(_: Reader, content: Any) -> float:
    if content not in ("nan", "-nan", "inf", "-inf"):
        raise ArtifactError("no float")
    return float(content)


def _read_generator(_: Reader, content: Any) -> Any:
    if content != "default":
        raise ArtifactError("no generator")
    return torch.default_generator


def _read_memory_format(_: Reader, content: Any) -> Any:
    if content not in _FORMATS:
        raise ArtifactError("no memory format")
    return getattr(torch, content)


def _read_complex(reader: Reader, content: Any) -> complex:
    real, imag = checked(content, list)
    return complex(checked(reader.value(real), float), checked(reader.value(imag), float))


_READ: dict[str, Callable[[Reader, Any], Any]] = {
    "node": lambda r, c: r.nodes[index(c, r.nodes)],
    "number": lambda r, c: r.number(c),
    "tuple": lambda r, c: tuple(r.value(item) for item in checked(c, list)),
    "dict": _read_dict,
    "operator": lambda r, c: r.operator(c),
    "float": _read_float,
    "complex": _read_complex,
    "bytes": lambda r, c: base64.b64decode(checked(c, str), validate=True),
    "dtype": lambda r, c: _DTYPES[c],
    "device": lambda r, c: _device(c),
    "layout": lambda r, c: _named(torch, c, torch.layout),
    "memory_format": _read_memory_format,
    "size": lambda r, c: torch.Size([checked(n, int) for n in c]),
    "slice": lambda r, c: slice(*map(r.value, three(c))),
    "range": lambda r, c: range(*(checked(n, int) for n in three(c))),
    "ellipsis": lambda r, c: ...,
    "generator": _read_generator,
    "tensor": lambda r, c: r.layout(c),
}


# -------------------------------------------------------------------- operators
# Functions that an artifact may name: operators of ATen and prims, custom operators, arithmetic on sizes.
#
# A name is looked up among the operators that are registered in this process and in a fixed table of functions. A name
# imports and runs nothing.

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}::[A-Za-z_][A-Za-z0-9_]{0,119}(\.[A-Za-z_][A-Za-z0-9_]{0,79})?")
# Operators that read files or print, for all arguments, and the operator that calls functions of this process.
_FORBIDDEN = {"aten::from_file", "aten::from_file.out", "aten::_print", "foregrad::call"}

# For an operator that takes a view with any strides, one that first checks that the view is inside the memory.
_CHECKED = {
    "aten::_reshape_alias": torch.ops.aten.as_strided.default,
    "aten::_reshape_alias_copy": torch.ops.aten.as_strided_copy.default,
}

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in "getitem add sub mul truediv floordiv mod neg pos pow eq ne lt le gt ge and_ or_ not_ abs".split()
    },
    **{f"{function.__module__}.{function.__name__}": function for function in NUMBER_FUNCTIONS},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in "sym_max sym_min sym_float sym_int sym_not sym_ite sym_sum".split()
        if hasattr(torch, name)
    },
}
# Functions that captures put into graphs in place of operators, and after them.
_OWN: dict[str, Callable[..., Any]] = {
    "foregrad.mkldnn_rnn_layer": mkldnn_rnn_layer_for_training,
    **{f"foregrad.{check.__name__}": check for check in VALUE_CHECKS.values()},
    **{f"foregrad.{f.__name__}": f for f in (take_data, item_or_empty, independent_of_phase)},
}
_FUNCTIONS = _ARITHMETIC | _OWN
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}


def name_of_operator(target: Any) -> str | None:
    """The name of a function that an artifact may hold; None for any other function."""
    if isinstance(target, OpOverload):
        name = target.name()
        return name if _may_be_named(name) and operator_called(name) is target else None
    return _NAMES.get(id(target))


def operator_named(name: Any) -> Any:
    """The function with the name, see `name_of_operator`. Raises `ArtifactError` for any other name."""
    if type(name) is not str:
        raise ArtifactError("the name of an operator is no text")
    function = _FUNCTIONS.get(name)
    if function is not None:
        return function
    if not _may_be_named(name):
        raise ArtifactError(f"it calls {name[:200]!r}, not an operator that an artifact may name")
    operator = _CHECKED.get(name) or operator_called(name)
    if operator is None:
        space = name.partition("::")[0]
        builtin = space in ("aten", "prims")
        remedy = (
            f"PyTorch {torch.__version__} has no operator of this name"
            if builtin
            else f"import the library that registers the operators of `{space}` before loading"
        )
        raise ArtifactError(f"it calls the operator {name}, not registered here: {remedy}")
    return operator


def is_check(function: Any) -> bool:
    """Whether the function may be called as a check, for the error that it raises."""
    return isinstance(function, OpOverload) or function in VALUE_CHECKS.values()


def is_view(function: Any) -> bool:
    """Whether the function takes a view of its first argument, and writes to none."""
    if not isinstance(function, OpOverload):
        return function is take_data
    return not function._schema.is_mutable and any(r.alias_info is not None for r in function._schema.returns)


def _may_be_named(name: str) -> bool:
    if _NAME.fullmatch(name) is None or name in _FORBIDDEN:
        return False
    return name.partition("::")[0] not in INTERNAL_NAMESPACES
