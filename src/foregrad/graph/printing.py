"""A graph as a Python program that a person can read and Python can run.

Every operator is spelled in full, every value has its type behind it, the user's source line stands above its
operators, and each input and output has its slot's description beside it::

    # joint graph after capture
    import torch


    def joint(
        primals_1,  # f32[8, 16]  parameter fc.weight
        primals_2,  # f32[4, 16]  args[0]
        tangents_1,  # f32[4, 8]  tangent of output 0
    ):
        # model.py:41 in forward: x = self.fc(x)
        t = torch.ops.aten.t.default(primals_1)  # f32[16, 8]
        mm = torch.ops.aten.mm.default(primals_2, t)  # f32[4, 8]  saved, 128 bytes
        return [
            mm,  # output 0
        ]

A graph module that the graph calls, with no constants but the graph's own, is a function inside the printed function.
With regions, see `graph.role.outlined`, the layers of a model are printed once.

Attributes of the module (constants, subgraphs) are read from a first parameter `self`: pass the graph module. An object
without a spelling (a local function, an opaque object) becomes a keyword-only parameter.

Known weakness: subgraphs of higher-order operators are not printed, only called.
"""

from __future__ import annotations

import builtins
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._torch.ops import HigherOrderOperator, OpOverload
from .._torch.symbols import TracedSymbol
from ..house import file_label
from .meta import TensorSpec, spec_of
from .source import Names, Renderer, a_name, attribute, infix, is_name, shown

Node = torch.fx.Node


def print_graph(
    graph: torch.fx.Graph | torch.fx.GraphModule,
    *,
    header: str = "",
    slots: Mapping[str, str] | None = None,
    name: str | None = None,
) -> str:
    """The graph as a runnable program.

    `header` becomes a comment on top. `slots` describes inputs by placeholder name, and outputs by the name of the
    node or, if one node is several outputs, by position: `"output[2]"`. `name` is the function's name; without it,
    `joint`, `backward` or `forward`, by the names of the placeholders.
    """
    modules: dict[str, torch.fx.GraphModule] = {}
    if isinstance(graph, torch.fx.GraphModule):
        modules = {path: one for path, one in graph.named_modules() if _can_be_inside(one, graph)}
        graph = graph.graph
    return _Printer(graph, slots or {}, modules).text(header, name)


def user_line(node: Node) -> str | None:
    """The user's line of a node, `model.py:41 in forward: x = self.fc(x)`; None if unknown."""
    trace = node.meta.get("stack_trace")
    frame = last_frame(trace) if isinstance(trace, str) else None
    if frame is None:
        return None
    file, line, function, code = frame
    place = f"{file}:{line} in {function}"
    return f"{place}: {code}" if code else place


def last_frame(trace: str) -> tuple[str, str, str, str] | None:
    """(file by its `file_label`, line, function, code) of the last frame in a traceback's text; None without one."""
    frames = _FRAME.findall(trace)
    if not frames:
        return None
    path, line, function, code = frames[-1]
    return file_label(path), line, function.strip(), code.strip()


_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in ([^\n]*)(?:\n(?!\s*File ")[ \t]*([^\n]*))?')


def _can_be_inside(module: torch.nn.Module, root: torch.fx.GraphModule) -> bool:
    """Whether a module is a graph that has the root's constants alone and calls no module."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    paths = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    found = [[_attribute(one, path) for path in paths] for one in (module, root)]
    return all(map(operator.is_, *found)) and not any(node.op == "call_module" for node in module.graph.nodes)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    try:
        return operator.attrgetter(path)(module)
    except AttributeError:
        return None


class _Printer:
    """Prints one graph. Used once.

    `modules`: the graph modules that it may call. `outer`: the printer of the graph that calls it, if there is one.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        slots: Mapping[str, str],
        modules: Mapping[str, torch.fx.GraphModule],
        outer: _Printer | None = None,
    ) -> None:
        self.graph = graph
        self.slots = slots
        self.is_inside = outer is not None
        self.nodes = list(graph.nodes)
        self.allocate = Names(("torch", "operator", "self"))
        self.names = {node: self.allocate.fresh(node.name) for node in self.nodes}
        self.locals = frozenset(self.names.values())
        self.imports = {"torch"}
        # Values without a spelling, passed by the caller: id -> (name, value).
        self.passed: dict[int, tuple[str, Any]] = {}
        if outer is not None:  # a function in a function
            self.locals |= outer.locals
            self.imports, self.passed, self.allocate = outer.imports, outer.passed, outer.allocate
        called = dict.fromkeys(str(node.target) for node in self.nodes if node.op == "call_module")
        self.functions = {
            path: (self.allocate.fresh(path), _Printer(modules[path].graph, {}, {}, self))
            for path in called
            if path in modules
        }
        for _, inner in self.functions.values():
            self.allocate.take(inner.locals)
        self.unused = self.allocate.fresh("_")
        self.unpacked = {node: items for node in self.nodes if (items := self._items(node)) is not None}
        self.render = Renderer(self.names, self.spell)

    def _items(self, node: Node) -> list[str] | None:
        """The names of the results of a call of a function, if only `getitem` takes them."""
        if node.op != "call_module" or str(node.target) not in self.functions:
            return None
        results = self.functions[str(node.target)][1].nodes[-1].args[0]
        if not isinstance(results, (list, tuple)) or any(user.target is not operator.getitem for user in node.users):
            return None
        names = [self.unused] * len(results)
        for user in node.users:
            position: Any = user.args[1]
            names[position] = self.names[user]
        return names if len(node.users) + names.count(self.unused) == len(names) else None

    def text(self, header: str, name: str | None) -> str:
        body = self._body()
        uses_self = self._uses_self()
        head = [f"# {shown(line, 1_000)}" for line in header.splitlines()]
        imports = [f"import {module}" for module in sorted(self.imports)]
        lines = [*head, *imports, "", "", *self._signature(name or self._guess_name(), uses_self), *body]
        return "\n".join(lines) + "\n"

    def _uses_self(self) -> bool:
        inner = (printer for _, printer in self.functions.values())
        of_module = (node.op == "get_attr" or self._reads_module(node) for node in self.nodes)
        return any(of_module) or any(printer._uses_self() for printer in inner)

    def _reads_module(self, node: Node) -> bool:
        return node.op == "call_module" and str(node.target) not in self.functions

    def _guess_name(self) -> str:
        inputs = [node.name for node in self.nodes if node.op == "placeholder"]
        has_tangents = any(name.startswith("tangents") for name in inputs)
        if has_tangents and any(name.startswith("primals") for name in inputs):
            return "joint"
        return "backward" if has_tangents else "forward"

    # -- lines

    def _signature(self, name: str, uses_self: bool) -> list[str]:
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        passed = [] if self.is_inside else list(self.passed.values())
        if not inputs and not uses_self and not passed:
            return [f"def {name}():"]
        lines = [f"def {name}("]
        if uses_self:
            lines.append("    self,  # the graph module")
        lines += [
            f"    {self.names[node]},{_comment(_type_of(node), self.slots.get(node.name), _saved(node))}"
            for node in inputs
        ]
        if passed:
            lines.append("    *,")
            lines += [f"    {key},{_comment(_described(value))}" for key, value in passed]
        return [*lines, "):"]

    def _body(self) -> list[str]:
        lines: list[str] = []
        for name, inner in self.functions.values():
            body = inner._body()
            lines += [f"    {line}" for line in (*inner._signature(name, uses_self=False), *body)] + [""]
        above: str | None = None
        for node in self.nodes:
            if node.op == "placeholder" or (node.op == "call_function" and node.args and node.args[0] in self.unpacked):
                continue
            if node in self.unpacked:
                names = self.unpacked[node]
                lines.append(f"    {', '.join(names)}{',' * (len(names) == 1)} = {self._expression(node)}")
                continue
            if node.op == "output":
                lines += self._output(node)
                continue
            where = user_line(node)
            if where is not None and where != above:
                lines.append(f"    # {_one_line(where)}")
                above = where
            comment = _comment(_type_of(node), _named(node), _saved(node))
            lines.append(f"    {self.names[node]} = {self._expression(node)}{comment}")
        return lines or ["    pass"]

    def _output(self, node: Node) -> list[str]:
        result = node.args[0]
        if not isinstance(result, (list, tuple)) or not result:
            return [f"    return {self.render(result)}"]
        brackets = "[]" if isinstance(result, list) else "()"
        lines = [f"    return {brackets[0]}"]
        for position, value in enumerate(result):
            slot = self.slots.get(f"output[{position}]")
            if isinstance(value, Node):
                # A slot of an input describes the input; an output that is that input is described by its position.
                by_name = self.slots.get(value.name) if value.op != "placeholder" else None
                comment = _comment(_type_of(value), slot if slot is not None else by_name, _saved(value))
            else:
                comment = _comment(slot)
            lines.append(f"        {self.render(value)},{comment}")
        return [*lines, f"    {brackets[1]}"]

    # -- expressions

    def _expression(self, node: Node) -> str:
        target, render = node.target, self.render
        if node.op == "get_attr":
            return self._attribute_path(str(target))
        if node.op == "call_module" and not self._reads_module(node):
            return f"{self.functions[str(target)][0]}({render.arguments(node.args, node.kwargs)})"
        if node.op == "call_module":
            return f"{self._attribute_path(str(target))}({render.arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            method = attribute(render(node.args[0]), str(target), lambda _, part: self.spell(part))
            return f"{method}({render.arguments(node.args[1:], node.kwargs)})"
        text = infix(target, node.args, node.kwargs, render)
        return text or f"{self.spell(target)}({render.arguments(node.args, node.kwargs)})"

    def spell(self, value: object) -> str:
        """An expression for a value that has no literal."""
        if isinstance(value, OpOverload):
            space, _, rest = value.name().partition("::")
            name, _, overload = rest.partition(".")
            return self._path("torch.ops", (space, name, overload or "default"))
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if type(value) in (str, bytes):
            return repr(value)
        if type(value) is int:
            return hex(value)  # Python may refuse to parse the digits of a large one
        if isinstance(value, float):
            return f'float("{value}")'
        if isinstance(value, complex):
            return f"complex({self.render(value.real)}, {self.render(value.imag)})"
        path = self._import_path(value)
        return path if path is not None else self._pass_in(value)

    def _path(self, start: str, names: Sequence[str]) -> str:
        for name in names:
            start = attribute(start, name, lambda _, part: self.spell(part))
        return start

    def _attribute_path(self, target: str) -> str:
        """The expression of an attribute: in `self.block.0.weight` parts that aren't identifiers are read by name."""
        return self._path("self", target.split("."))

    def _import_path(self, value: object) -> str | None:
        """`module.name`, if the value is found there."""
        short = getattr(value, "__name__", None)
        module = getattr(value, "__module__", None)
        if not isinstance(short, str) or module == "__main__":
            return None
        if module == "builtins" and getattr(builtins, short, None) is value:
            return short
        if isinstance(value, HigherOrderOperator):
            places = [(f"torch.ops.{getattr(value, 'namespace', None) or 'higher_order'}", short)]
        else:
            # Functions in C name no module, or a private one: `operator.add` names `_operator`.
            places = [("torch", short), ("torch.nn.functional", short), ("torch", f"Tensor.{short}")]
            if isinstance(module, str):
                name = getattr(value, "__qualname__", short)
                places = [(module.removeprefix("_"), name), *places, (module, name)]
        for home, name in places:
            if not all(map(is_name, (*home.split("."), *name.split(".")))):
                continue
            if home.partition(".")[0] not in self.locals and _find(home, name) is value:
                self.imports.add("torch" if home.startswith("torch.ops.") else home)
                return f"{home}.{name}"
        return None

    def _pass_in(self, value: object) -> str:
        if id(value) not in self.passed:
            hint = getattr(value, "__name__", None)
            name = self.allocate.fresh(hint if isinstance(hint, str) else type(value).__name__.lower())
            self.passed[id(value)] = (name, value)
        return self.passed[id(value)][0]


def _find(module: str, name: str) -> Any:
    """The object `module.name`; None if there is none."""
    try:
        value = torch.ops if module.startswith("torch.ops.") else sys.modules[module]
        for part in (*module.split(".")[2:], name) if value is torch.ops else name.split("."):
            value = getattr(value, part)
    except (KeyError, AttributeError):
        return None
    return value


def _type_of(node: Node) -> str | None:
    spec = spec_of(node)
    if isinstance(spec, TensorSpec):
        return repr(spec)
    if isinstance(spec, (list, tuple)):
        return f"({', '.join(map(repr, spec))})"
    value = dict.get(node.meta, "val")
    value = getattr(value, "value", value) if isinstance(value, TracedSymbol) else value
    return _one_line(str(value)) if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) else None


def _saved(node: Node) -> str | None:
    if "saved" not in node.meta or not node.meta["saved"]:
        return None
    spec = spec_of(node)
    specs = [spec] if isinstance(spec, TensorSpec) else [item for item in spec or () if item is not None]
    total = sum(item.nbytes for item in specs) if specs else None
    # A symbolic size is shown, never asked for its value: that would specialize the graph.
    return "saved" if total is None else f"saved, {total} bytes"


def _named(node: Node) -> str | None:
    names = dict.get(node.meta, "checkpoint_names")
    return f"named {', '.join(names)}" if names else None


def _comment(*parts: str | None) -> str:
    text = "  ".join(_one_line(part) for part in parts if part)
    return f"  # {text}" if text else ""


def _described(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # the user's
        return a_name(type(value).__name__)


def _one_line(text: str) -> str:
    return shown(" ".join(text.split()))
