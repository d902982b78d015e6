"""The text of one node's call: through a direct binding if the binding certainly calls the operator, else through the
operator.

A binding of torch chooses the overload by its arguments, so the kind of each value decides: literals by their type,
nodes by the schema of their operator, by `meta`, or by the example inputs. Values of unknown kind take the generic
entry, right for everything.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.graphs import is_higher_order
from .._torch.ops import Argument, FastCall, OpOverload, fast_call, raw_call, return_kinds
from ..annexes import given
from ..errors import BackendError
from ..graph.meta import TensorSpec
from ..graph.source import Names, Renderer, attribute, infix

Node = torch.fx.Node


class CallWriter:
    """Writes the calls of one graph. `globals` collects the objects that the text names; the owner fills `names`.

    `by_index` holds the nodes with users that each pick one output: for no other node may a binding return a named
    tuple.
    """

    def __init__(self, gm: torch.fx.GraphModule, allocate: Names) -> None:
        self.gm = gm
        self.allocate = allocate
        self.names: dict[Node, str] = {}
        self.by_index: dict[Node, dict[int, list[Node]]] = {}
        self.globals: dict[str, Any] = {}
        self.render = Renderer(self.names, self.bind)
        self._bound: dict[object, str] = {}
        self._kinds: dict[Node, str] = {}

    def learn(self, placeholders: Sequence[Node], values: Sequence[object]) -> None:
        """Take the kinds of placeholders from example inputs if `meta` has none."""
        for node, value in zip(placeholders, values, strict=True):
            self._kinds[node] = _kind_of_meta(node) or _kind_of_object(value)

    def bind(self, value: Any, hint: str | None = None) -> str:
        """The name of the global that holds `value`."""
        key = _binding_key(value)
        name = self._bound.get(key)
        if name is None:
            name = self._bound[key] = self.allocate.fresh(hint or _constant_name(value))
            self.globals[name] = value
        return name

    def write(self, node: Node, target: Any = None) -> str:
        """The expression that computes a node, by `target` in place of its own function."""
        target, args, kwargs, render = target or node.target, node.args, node.kwargs, self.render
        if node.op == "call_method":
            method = attribute(render(args[0]), str(target), lambda hint, name: self.bind(name, hint))
            return f"{method}({render.arguments(args[1:], kwargs)})"
        if node.op == "call_module":
            name = self.bind(resolve(self.gm, str(target)), str(target).rpartition(".")[2])
            return f"{name}({render.arguments(args, kwargs)})"
        if isinstance(target, OpOverload):
            text = self._direct_call(node, target)
            if text is not None:
                return text
            return f"{self.bind(raw_call(target), _operator_name(target))}({render.arguments(args, kwargs)})"
        text = infix(target, args, kwargs, render)
        if text is not None:
            return text
        name = _callable_name(target)
        if is_higher_order(target):
            target = next((found[target] for found in given("operators in graphs") if target in found), target)
        return f"{self.bind(target, name)}({render.arguments(args, kwargs)})"

    # -- direct bindings

    def _direct_call(self, node: Node, op: OpOverload) -> str | None:
        if op is torch.ops.aten.slice.Tensor:
            return self._slice(*node.args) if not node.kwargs and len(node.args) in (4, 5) else None
        plan = fast_call(op)
        if plan is None or (has_many_outputs(node) and node.users and node not in self.by_index):
            return None
        if any(node.kwargs.get(name) is None for name in plan.needs):
            return None
        if plan.only is not None and any(name not in plan.only for name in node.kwargs):
            return None
        parts = self._positional(plan, node.args)
        keywords = None if parts is None else self._keywords(plan, node.kwargs)
        if parts is None or keywords is None:
            return None
        parts += keywords
        if plan.appended:
            parts.append(plan.appended)
        return f"{self.bind(plan.function, plan.name)}({', '.join(parts)})"

    def _positional(self, plan: FastCall, args: Sequence[object]) -> list[str] | None:
        parts = []
        for argument, value in zip(plan.arguments, args, strict=False):
            text = None if argument.keyword_only else self._argument(argument, value)
            if text is None:
                return None
            parts.append(text)
        if plan.spread:
            sizes = args[-1]
            if len(args) != 2 or not isinstance(sizes, (list, tuple)) or not sizes:
                return None
            # Separate numbers are parsed in half of a tuple's time.
            parts[-1:] = [self.render(size) for size in sizes]
        return parts

    def _keywords(self, plan: FastCall, kwargs: Mapping[str, object]) -> list[str] | None:
        parts = []
        by_name = {argument.name: argument for argument in plan.arguments if argument.keyword_only} if kwargs else {}
        for name, value in kwargs.items():
            if name not in by_name or value is None:
                return None
            text = self._argument(by_name[name], value)
            if text is None:
                return None
            parts.append(text if name in plan.positional else f"{name}={text}")
        return parts

    def _argument(self, argument: Argument, value: object) -> str | None:
        """An argument as text; None if its kind isn't certainly the one that the overload takes."""
        if value is None:
            return "None" if argument.optional and argument.kind in _MAY_BE_NONE else None
        if argument.kind in ("ints", "tensors"):
            return self._list_argument(argument, value)
        kind = self.kind_of(value)
        takes_number = argument.takes_number or argument.kind == "number"
        if kind == argument.kind or (takes_number and kind in ("int", "float", "number")):
            return self.render(value)
        if kind == "int" and argument.kind == "float" and not isinstance(value, Node):
            return self.render(value)
        return None

    def _list_argument(self, argument: Argument, value: object) -> str | None:
        if not isinstance(value, (list, tuple)) or not (value or argument.name == "size"):
            return None
        item_kind = "int" if argument.kind == "ints" else "tensor"
        if any(self.kind_of(item) != item_kind for item in value):
            return None
        # A tuple of literals costs nothing to make; one alone is parsed quicker without it.
        return self.render(value[0]) if argument.one_int and len(value) == 1 else self.render(tuple(value))

    def _slice(self, tensor: Any, dim: Any, start: object, end: Any, step: Any = 1) -> str | None:
        """`x[1:3]`, the only direct binding of slicing: on the first and last dimension, and never of everything, since
        indexing makes no slice then.
        """
        if any(type(number) is not int for number in (dim, start, end, step)) or step < 1 or dim < 0:
            return None
        shape = _shape_of(tensor)
        size = shape[dim] if shape is not None and dim < len(shape) else None
        if start == 0 and step == 1 and not (type(size) is int and 0 < end < size):
            return None
        prefix = "" if dim == 0 else "..., " if shape is not None and dim == len(shape) - 1 else None
        if prefix is None or self.kind_of(tensor) != "tensor":
            return None
        stop = "" if end == _LARGEST else end
        return f"{self.render(tensor)}[{prefix}{start}:{stop}{f':{step}' if step > 1 else ''}]"

    # -- kinds of values

    def kind_of(self, value: object) -> str:
        """`tensor`, `int`, `constant`, ... as in a schema (`_torch.ops.Argument`); empty if unknown."""
        if not isinstance(value, Node):
            return _LITERAL_KINDS.get(type(value), "")
        kind = self._kinds.get(value)
        if kind is None:
            kind = self._kinds[value] = self._find_kind(value)
        return kind

    def _find_kind(self, node: Node) -> str:
        if node.op == "get_attr":
            return _kind_of_object(resolve(self.gm, str(node.target)))
        target = node.target
        if node.op == "call_function":
            if isinstance(target, OpOverload):
                kinds = return_kinds(target)
                return kinds[0] if len(kinds) == 1 else ""
            if target is operator.getitem and isinstance(node.args[0], Node):
                return _kind_of_output(node.args[0], node.args[1]) or _kind_of_meta(node)
            if target in _NUMBER_OPERATORS:
                taken = {self.kind_of(value) for value in node.args}
                if taken == {"int"} and target in _INTEGER_OPERATORS:
                    return "int"
                return "number" if taken <= {"int", "float", "number"} else ""
        return _kind_of_meta(node)


_MAY_BE_NONE = frozenset({"tensor", "number", "float", "int"})
_LARGEST = 2**63 - 1
_LITERAL_KINDS: dict[type, str] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "constant",
    torch.device: "constant",
    torch.layout: "constant",
    torch.memory_format: "constant",
}
_INTEGER_OPERATORS = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod})
_NUMBER_OPERATORS = _INTEGER_OPERATORS | {operator.truediv, operator.pow, operator.neg}


def _kind_of_object(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return "int"
    return ""


def _kind_of_meta(node: Node) -> str:
    """The kind of a node's value by `meta`, without making entries that it would make late."""
    meta = node.meta
    if isinstance(dict.get(meta, "spec"), TensorSpec):
        return "tensor"
    return _kind_of_object(meta["val"]) if dict.__contains__(meta, "val") else ""


def _kind_of_output(node: Node, index: Any) -> str:
    if isinstance(node.target, OpOverload) and type(index) is int:
        kinds = return_kinds(node.target)
        if kinds == ("tensors",):
            return "tensor"
        return kinds[index] if len(kinds) > 1 and 0 <= index < len(kinds) else ""
    return ""


def _shape_of(value: object) -> Sequence[object] | None:
    if not isinstance(value, Node):
        return None
    spec = dict.get(value.meta, "spec")
    if isinstance(spec, TensorSpec):
        return spec.shape
    fake = dict.get(value.meta, "val")
    return fake.shape if isinstance(fake, torch.Tensor) else None


def has_many_outputs(node: Node) -> bool:
    """Whether the node calls an operator that returns several tensors, or a list of tensors."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    kinds = return_kinds(node.target)
    return len(kinds) > 1 or kinds == ("tensors",)


def resolve(gm: torch.fx.GraphModule, path: str) -> Any:
    """The attribute of the module, or of its submodules, that a graph refers to."""
    value: Any = gm
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise BackendError(
                f"the graph refers to `self.{path}`, but the module has no attribute of this name"
            ) from error
    return value


def _operator_name(op: OpOverload) -> str:
    parts = str(op).split(".")
    return "_".join(parts[:-1] if parts[-1] == "default" else parts)


def _callable_name(target: Callable[..., object] | str) -> str:
    name = getattr(target, "__name__", None)
    return name if name and isinstance(name, str) else type(target).__name__


def _binding_key(value: object) -> Any:
    # Equal devices and floats are many objects, and a nan or zero must not stand for a different nan or zero.
    if isinstance(value, (float, complex)):
        return type(value), struct.pack("dd", value.real, value.imag)
    return value if isinstance(value, torch.device) else id(value)


def _constant_name(value: object) -> str:
    if isinstance(value, float):
        return repr(value).replace("-", "minus_")
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).rpartition(".")[2]
    if isinstance(value, torch.device):
        return str(value).replace(":", "_")
    return value.__name__ if isinstance(value, type) else "constant"
