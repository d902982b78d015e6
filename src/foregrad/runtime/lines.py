"""Tools to write the rendered runtime: names bound to values, indented blocks, views of a base, literals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._torch.ops import view_call
from .._torch.symbols import expression_text, is_symbolic
from ..graph.effect_log import ViewStep
from ..graph.source import Names, call_keywords, literal, shown


class LineWriter:
    """Lines of a function body and the globals that they use. `symbols`: the variable of each symbolic size;
    `containers`: the variable of each container among the arguments, by number.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.lines: list[str] = []
        self.globals: dict[str, Any] = {}
        self.symbols: dict[Any, str] = {}
        self.containers: Mapping[int, str] = {}
        self.views: dict[tuple[object, ...], str] = {}  # the variable of each view that was taken

    def bind(self, hint: str, value: object) -> str:
        """A global name for a value."""
        for name, bound in self.globals.items():
            if bound is value and name.startswith(hint):
                return name
        name = self.names.fresh(hint)
        self.globals[name] = value
        return name

    def under(self, guards: list[str], body: list[str]) -> None:
        if guards:
            self.lines.append(f"with {', '.join(guards)}:")
            body = ["    " + line for line in body]
        self.lines += body

    def indent(self, start: int) -> None:
        self.lines[start:] = ["    " + line for line in self.lines[start:]]

    def view(self, base: str, steps: tuple[ViewStep, ...], path: str) -> str:
        """Lines that take a view of `base`, sharing steps already taken for other outputs."""
        current = base
        key: tuple[Any, ...] = (base,)
        for step in steps:
            key = (*key, step.call)
            if key not in self.views:
                self.views[key] = self.step(current, step, path)
            current = self.views[key]
            if step.index is not None:
                key = (*key, step.index)
                current = self.views.setdefault(key, f"{current}[{step.index}]")
        if current.endswith("]"):
            name = self.names.fresh("view")
            self.lines.append(f"{name} = {current}")
            self.views[key] = current = name
        return current

    def step(self, source: str, step: ViewStep, path: str) -> str:
        name = self.names.fresh("view")
        op = self.bind(op_name(step.op), view_call(step.op, step.args, step.kwargs))
        line = f"{name} = {op}({', '.join([source, *self.arguments(step.args, step.kwargs)])})  # {shown(path)}"
        guards = []
        if step.grad_enabled is not torch.is_grad_enabled():
            mode = torch.enable_grad if step.grad_enabled else torch.no_grad
            guards = [f"{self.bind(mode.__name__, mode)}()"]
            if torch.is_inference_mode_enabled():
                guards.insert(0, f"{self.bind('inference_mode', torch.inference_mode)}(False)")
        self.under(guards, [line])
        return name

    def arguments(self, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]) -> list[str]:
        keywords = call_keywords([(key, self.literal(value)) for key, value in kwargs], self.bind)
        return [*map(self.literal, args), *keywords]

    def literal(self, value: object) -> str:
        text = literal(value) if type(value) is not bytes else None
        if text is not None:
            return text
        if isinstance(value, (list, tuple)):
            items = ", ".join(map(self.literal, value))
            if isinstance(value, torch.Size):
                return f"{self.bind('Size', torch.Size)}([{items}])"
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
        if is_symbolic(value):
            return f"({expression_text(value, self.symbols, self.bind)})"
        return self.bind("constant", value)


def op_name(op: object) -> str:
    packet = getattr(op, "overloadpacket", None)
    return f"aten_{packet.__name__}" if packet is not None else "op"
