"""Arithmetic on symbolic sizes, done once: torch's `SymNode` and `ShapeEnv` with memories. Checked on torch 2.13.0.

A capture asks few questions about few sizes tens of thousands of times (are two sizes equal? what is their product?),
and torch goes through sympy for each. Here answers are kept by their expressions, until a guard replaces a symbol.
Guards are added when a question is first asked, as without the cache.

This module is imported only before the first capture with a symbolic size: torch's own modules take over a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_expression: Callable[[SymNode], object] = vars(SymNode)["expr"].fget
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_dispatch_mode = torch._C._get_dispatch_mode
_before_dispatch = torch._ops.mode_stack_state_for_pre_dispatch


def _is_traced() -> bool:
    """Whether `make_fx` writes arithmetic on sizes to a graph."""
    return _dispatch_mode(_PROXY) is not None or _before_dispatch().get(0) is not None


class _Results:
    """Results computed from the expressions of one `ShapeEnv`, valid for one `version` of its replacements."""

    __slots__ = ("by_operands", "numbers", "version")

    def __init__(self) -> None:
        self.by_operands: dict[object, object] = {}
        self.numbers: dict[int, SymNode] = {}
        self.version = 0


class Node(SymNode):
    """A number or truth of symbolic sizes that reuses results of earlier arithmetic, themselves nodes of the class."""

    results: _Results
    shape_env: ShapeEnv
    decided: Any = None  # the value, once a guard fixes it
    _plain: tuple[int, int | None] | None = None  # (version, the number that it can only be, or None)

    @property
    def expr(self) -> object:
        version = self.shape_env._replacements_version_counter
        if self._expr_ver == version:
            return self._expr_cache
        expression = _expression(self)
        self._expr_ver, self._expr_cache = version, expression
        return expression

    def maybe_as_int(self) -> int | None:
        version = self.shape_env._replacements_version_counter
        cached = self._plain
        if cached is not None and cached[0] == version:
            return cached[1]
        number = SymNode.maybe_as_int(self)
        self._plain = version, number
        return number

    def wrap_int(self, num: int) -> SymNode:
        numbers = self.results.numbers
        node = numbers.get(num)
        if node is None:
            node = numbers[num] = remember(SymNode.wrap_int(self, num), self.results)
        return node


def remember(node: object, results: _Results) -> Any:
    """A node of torch's turned into a `Node` with the `results`."""
    if type(node) is SymNode:
        own: Any = node
        own.__class__, own.results = Node, results
    return node


class Env(ShapeEnv):
    """A `ShapeEnv` with numbers that remember results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Without this counter replacements of symbols are not noticed, so each expression is computed anew.
        self.results = _Results() if hasattr(self, "_replacements_version_counter") else None

    def create_symintnode(self, *args: Any, **kwargs: Any) -> int | torch.SymInt:
        number = super().create_symintnode(*args, **kwargs)
        if isinstance(number, SymInt) and self.results is not None:
            remember(number.node, self.results)
        return number

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        if type(sym_node) is not Node:
            return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        if sym_node.decided is not None:
            return sym_node.decided
        value = super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        # A node without a value may get one later; a node without a guard is evaluated again.
        if sym_node.hint is not None and not size_oblivious and not self._suppress_guards_tls():
            sym_node.decided = value
        return value


def _remembered(name: str) -> Callable[[Node, object], object]:
    compute = getattr(SymNode, name)

    def method(self: Node, other: object) -> Any:
        # A number may have the same expression as a truth value and still differ; floats are rare.
        if type(other) is not Node or self.pytype is float or other.pytype is float or _is_traced():
            return compute(self, other)
        results = self.results
        version = self.shape_env._replacements_version_counter
        if results.version != version:
            results.by_operands.clear()
            results.version = version
        key = name, self._expr, other._expr
        node = results.by_operands.get(key)
        if node is None:
            node = results.by_operands[key] = remember(compute(self, other), results)
        return node

    method.__name__ = method.__qualname__ = name
    return method


def _once_decided(name: str) -> Callable[..., object]:
    ask = getattr(SymNode, name)

    def method(self: Node, file: str, line: int) -> bool:
        return ask(self, file, line) if self.decided is None else bool(self.decided)

    method.__name__ = method.__qualname__ = name
    return method


for _name in ("guard_bool", "expect_true", "guard_or_false", "guard_or_true"):
    setattr(Node, _name, _once_decided(_name))

# `mod` is not among them: its result depends on a symbol's range, and guards narrow the range.
for _name in (
    "add", "sub", "mul", "int_floordiv", "sym_min", "sym_max", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_",
):  # fmt: skip
    setattr(Node, _name, _remembered(_name))
