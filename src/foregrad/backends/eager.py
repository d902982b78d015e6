"""The eager backend: a graph as straight-line Python that calls eager's kernels, and little else.

One line per node, values named as in the graph. Four things make it quick and small:

- operators are called through the fastest entry that reaches the dispatcher with an equal call (`calls`);
- a value is deleted by the line that uses it last, inputs too: the list of arguments is emptied on entry;
- several outputs are unpacked at once, so no tuple keeps the unused ones alive;
- a function that takes one list, as regions do, gets the only references to values that are not used later.

A graph of more than `_LONGEST` lines is cut in parts of `_PART` that run one after the other: CPython's compiler takes
ten times the memory for a line of one very long function. Values for later parts wait in a dict. A value there takes
the name of a value that its line uses last, which needs no deletion then: CPython compiles these lines in two thirds of
the time.

Constants (tensors, dtypes, callables) are the unit's globals; numbers and shapes are literals. `source()` of the
result is the text that runs.

Known weaknesses: attributes of the module are read once, when compiling. A value is not freed during the call that
uses it last, only right after it; eager is no better there.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol, cast

import torch

from .._torch.graphs import late_graph_of, operands_of
from .._torch.nested import leaves
from .._torch.ops import OpOverload, return_kinds
from ..graph.meta import as_captured
from ..graph.role import LAID_OUT, called_region, outlined, role_of
from ..graph.source import Names, compile_source, unpacked
from ..tracing.tape.opinfo import op_info
from .calls import CallWriter, has_many_outputs, resolve
from .in_place import InPlace, tell_of_writes, written_in_place

Node = torch.fx.Node


class BoxedFunction(Protocol):
    """A function that empties its one list. `returns_list`: whether it always returns a list."""

    _boxed_call: bool
    returns_list: bool

    def __call__(self, args: list[object], /) -> Any: ...

    def source(self) -> str:
        """The Python that runs."""


def eager_compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None = None) -> BoxedFunction:
    """Compile a graph to straight-line Python. The result takes a list of inputs, empties it, returns a list.

    `example_inputs` only tell tensors from numbers, for placeholders without `meta`.
    """
    role = role_of(gm)
    if role.regions is True:
        gm = outlined(gm, regions=True, several=2)
    return render_graph(gm, example_inputs, role.updates)


def render_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None = None, updates: Sequence[tuple[int, int]] = ()
) -> BoxedFunction:
    """`eager_compiler` of the graph as it is. `updates`: see `GraphRole`."""
    writer = _Writer(gm, example_inputs, True, updates)
    source, function = writer.compile()
    function.updated = writer.in_place.updated
    function._boxed_call = True
    function.returns_list = True
    function.source = lambda: source
    return cast("BoxedFunction", function)


def render_late(gm: torch.fx.GraphModule, *, as_list: bool = True) -> BoxedFunction:
    """`render_graph`, with the text written when the function is first called or its source is read. With
    `as_list=False` the result has the structure of the graph's output node.

    A graph that never runs costs nothing. The function takes over the code object made at the first call, so later
    calls are as quick as if it had been there from the beginning.
    """
    pending = [gm]
    written: list[tuple[str, object]] = []

    def write() -> tuple[str, Any]:
        if not written:
            written.append(_Writer(pending[0], None, as_list).compile())
            become(written[0][1], takes_code=True)
            pending.clear()
        return written[0]

    function, become = stand_in(lambda args: write()[1](args))
    function.returns_list = as_list
    function.source = lambda: write()[0]
    return cast("BoxedFunction", function)


def stand_in(begin: Callable[[list[Any]], object]) -> tuple[Any, Callable[..., None]]:
    """(a function of one list that calls `begin`; `become(later, takes_code=)`, by which it calls `later` from then on,
    or takes over the code of a rendered function).

    A second Python frame would cost more than the call itself. No cycle leads through the function, so that dropping it
    frees the constants at once.
    """
    function: Any = FunctionType(_call_run.__code__, {"__run__": begin}, "forward")
    function._boxed_call = True
    reference = weakref.ref(function)

    def become(later: Any, *, takes_code: bool) -> None:
        target: Any = reference()
        if target is None:
            return
        target.__globals__["__run__"] = later  # also for a thread that is at the beginning
        if takes_code:
            target.__globals__.update(later.__globals__)
            target.__code__ = later.__code__

    return function, become


def _call_run(args: list[object]) -> object:
    return __run__(args)  # type: ignore[name-defined]  # noqa: F821 - in the globals that the code is given


_LONGEST, _PART = 4000, 1000  # lines of a function
_NOTE = "\0"  # before a comment: in no text that Python's `repr` gives
_COPY = torch.Tensor.copy_


def _tell(writing: Sequence[int], error: BaseException) -> None:
    """Say with an error in a graph that some of its inputs have their new values already. `writing`: their lines."""
    at = error.__traceback__
    assert at is not None
    file = at.tb_frame.f_code.co_filename
    while at.tb_next is not None and at.tb_next.tb_frame.f_code.co_filename == file:  # in a part
        at = at.tb_next
    if count := bisect_right(writing, at.tb_lineno):
        made = f"up to {count} of {len(writing)} writes to parameters or other tensors of the caller were made"
        tell_of_writes(error, made)


class _Writer:
    """Writes one graph. Used once."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[object] | None,
        as_list: bool,
        updates: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.gm = gm
        self.as_list = as_list
        late = None if updates else late_graph_of(gm)
        results: Any
        if late is None:
            self.in_place = written_in_place(list(gm.graph.nodes), updates)
            *nodes, last = self.in_place.nodes
            self.placeholders = [node for node in nodes if node.op == "placeholder"]
            body, results = [node for node in nodes if node.op != "placeholder"], last.args[0]
        else:
            self.in_place = InPlace([])
            self.placeholders, body, results = [*late.inputs], late.body(), late.results
        self.operands = {node: [*operands_of(node)] for node in body}
        self.results = [*results] if self.in_place.updated else results
        for number, output in self.in_place.updated:  # the input itself
            self.results[output] = self.placeholders[number]
        self.lines: list[str] = []
        allocate = Names()
        self.calls = CallWriter(gm, allocate)
        self.names = self.calls.names
        for node in (*self.placeholders, *body):
            if node.op != "get_attr":
                self.names[node] = allocate.fresh(node.name)
        self.returned = _nodes_in(self.results)
        self.read = {*_nodes_in(results), *itertools.chain.from_iterable(self.operands.values())}
        self.unused, self.args, self.operand_list = map(allocate.fresh, ("_", "args", "given"))
        self.regions: dict[torch.fx.GraphModule, BoxedFunction] = {}
        if example_inputs is not None and len(example_inputs) == len(self.placeholders):
            self.calls.learn(self.placeholders, example_inputs)
        self.writing: list[int] = []  # the lines that write to inputs
        self.starts: dict[Node | None, int] = {}  # the first line of each node, and of the end
        # Outputs of several-output operators get their names when they are unpacked.
        self.picked: set[Node] = set()

    def compile(self) -> tuple[str, Any]:
        """The unit's text, and its function."""
        written = self.write()
        text = "".join(written).replace(_NOTE, "  # ")
        units = [re.sub(f"{_NOTE}.*", "", unit) for unit in written]  # CPython's compiler is slow to skip comments
        return text, compile_source(units, "forward", self.calls.globals, label="eager graph", text=text)

    def write(self) -> list[str]:
        """The text of the function, and the texts of its parts."""
        for node in self.operands:
            if node.op == "get_attr":
                path = str(node.target)
                self.names[node] = self.calls.bind(resolve(self.gm, path), path.rpartition(".")[2])
            elif node in self.read and (has_many_outputs(node) or self._boxed(node) is not None):
                self._find_picks(node)
        dying = self._find_last_uses()
        self._write_head()
        for node in self.operands:
            if node.op != "get_attr" and node not in self.picked:
                self.starts[node] = len(self.lines)
                self._write_node(node, dying.get(node, ()))
        self.starts[None] = len(self.lines)
        self._write_output()
        if len(self.lines) <= _LONGEST:
            return [self._function(self.lines, [line + 3 for line in self.writing])]
        return self._in_parts()

    def _function(self, lines: Sequence[str], writing: list[int]) -> str:
        """The text of `forward`. `writing`: the lines of the unit that write to inputs, counted from 1."""
        body = "\n    ".join(lines)
        if writing:
            told = self.calls.bind(functools.partial(_tell, writing), "tell")
            body = body.replace("\n", "\n    ")
            body = f"try:\n        {body}\n    except BaseException as error:\n        {told}(error)\n        raise"
        return f"def forward({self.args}):\n    {body}\n"

    def _in_parts(self) -> list[str]:
        """`forward`, and its parts. Each takes its values out of the dict, and returns the values it leaves."""
        bounds, taken = [0], [{self.args: True}]
        made: dict[Node, int] = dict.fromkeys(self.placeholders, 0)  # the part that makes each value
        for node, start in self.starts.items():
            if start - bounds[-1] >= _PART:
                bounds.append(start)
                taken.append({})
            part = len(bounds) - 1
            for used in self.returned if node is None else self._used_by(node, inputs=True):
                if made.get(used, part) < part:
                    taken[-1][self.names[used]] = True
            if node is not None:
                made[node] = part
                made.update(dict.fromkeys(self._picks_of(node), part))
        values, one, take = map(self.calls.allocate.fresh, ("values", "part", "take"))
        run = f"{self.calls.bind(FunctionType, 'function')}({one}, globals())({values}.pop)"
        lines = [f"{values} = {{{self.args!r}: {self.args}}}", f"for {one} in __parts__[:-1]:"]
        lines += [f"    {values} |= {run}", f"{one} = __parts__[-1]", f"return {run}"]
        # `forward` has ten lines with its `try`, each part two before its own and one after them.
        writing = [line + 10 + 3 * bisect_right(bounds, line) for line in self.writing]
        texts = [self._function(lines, writing)]
        for start, end, names in zip(bounds, [*bounds[1:], len(self.lines)], taken, strict=True):
            head = f"{unpacked([*names])}map({take}, ({''.join([f'{name!r}, ' for name in names])})); del {take}"
            body = [head, *self.lines[start:end]] + (["return locals()"] if end < len(self.lines) else [])
            texts.append(f"def part_{len(texts)}({take}):\n    " + "\n    ".join(body) + "\n")
        return texts

    # -- lifetimes

    def _find_picks(self, node: Node) -> None:
        by_index: dict[int, list[Node]] = {}
        users = [user for user in node.users if user in self.operands]
        if node in self.returned:
            return
        for user in users:
            if user.target is not operator.getitem or user.kwargs or user.args[0] is not node:
                return
            index = user.args[1]
            if type(index) is not int or index < 0:
                return
            if user in self.read:
                by_index.setdefault(index, []).append(user)
        self.calls.by_index[node] = by_index
        self.picked.update(users)

    def _picks_of(self, node: Node) -> list[Node]:
        """The nodes that the node's line names."""
        by_index = self.calls.by_index.get(node)
        return [user for users in by_index.values() for user in users] if by_index else []

    def _find_last_uses(self) -> dict[Node, list[Node]]:
        """The values that no node after this one uses, for each node."""
        seen = set(self.returned)
        dying: dict[Node, list[Node]] = {}
        for node in reversed(self.operands):
            if node not in self.picked:
                for used in self._used_by(node):
                    if used not in seen:
                        seen.add(used)
                        if used.op != "get_attr":
                            dying.setdefault(node, []).append(used)
        return dying

    def _used_by(self, node: Node, *, inputs: bool = False) -> list[Node]:
        """The nodes with values that a node's lines use; `inputs`: and the inputs that it is copied into."""
        if not self.in_place.copied:
            return self.operands[node]
        copied = self._copied_after(node)
        return [*self.operands[node], *(new for _, new in copied), *(whole for whole, _ in copied if inputs)]

    # -- lines

    def _write_head(self) -> None:
        names = [self.names[node] for node in self.placeholders]
        target = ", ".join(names) if len(names) > 1 else f"({names[0]},)" if names else "()"
        self.lines.append(f"{target} = {self.args}")
        self.lines.append(f"{self.args}.clear()")
        for name, node in zip(names, self.placeholders, strict=True):
            own = dict.get(node.meta, LAID_OUT)
            if own is not None and node in self.read:  # the graph may take views that different strides don't allow
                as_own = self.calls.bind(functools.partial(as_captured, spec=own), "as_captured")
                self.lines.append(f"{name} = {as_own}({name})")
        written = {self.placeholders[number] for number, _ in self.in_place.updated}
        idle = [self.names[node] for node in self.placeholders if node not in self.read and node not in written]
        if idle:
            self.lines.append(f"del {', '.join(idle)}")

    def _write_node(self, node: Node, dying: Sequence[Node]) -> None:
        form, boxed = self.in_place.writers.get(node), self._boxed(node)
        if boxed is not None:
            hint = "segment" if node.op == "call_function" else str(node.target)
            expression = f"{self.calls.bind(boxed, hint)}({self.operand_list})"
            freed = f"del {', '.join([self.names[used] for used in reversed(dying)])}; " if dying else ""
            self.lines.append(f"{self.operand_list} = [{', '.join([self.calls.render(value) for value in node.args])}]")
            dying = ()
        else:
            expression = self.calls.write(node, form)
        picks = self.calls.by_index.get(node)
        if form is not None and has_many_outputs(node):
            line = "; ".join([expression, *self._name_written(node, form)])
        elif picks is not None:
            line = self._pick(node, expression, picks)
        elif node in dying and not self._copied_after(node):  # only the result list takes it, and holds the input
            line, dying = expression, [used for used in dying if used is not node]
        else:
            if dying and len(self.operands) > _LONGEST and node in self.read and not self.in_place.updated:
                self.names[node], dying = self.names[dying[0]], dying[1:]
            line = f"{self.names[node]} = {expression}" if node in self.read else expression
        if boxed is not None:
            line = freed + line
        if node in self.in_place.into_inputs:
            self.writing.append(len(self.lines))
        spec = dict.get(node.meta, "spec")
        note = "" if spec is None else f"{_NOTE}{spec!r}"
        if copied := self._copied_after(node):  # a line of their own: where the node raises, none is made
            self.lines.append(line + note)
            self.writing.append(len(self.lines))
            note, copy = "", self.calls.bind(_COPY, "copy_")
            line = "; ".join([f"{copy}({self.names[whole]}, {self.names[new]})" for whole, new in copied])
        if dying:
            line += f"; del {', '.join([self.names[used] for used in reversed(dying)])}"
        self.lines.append(line + note)

    def _copied_after(self, node: Node) -> list[tuple[Node, Node]]:
        """The inputs that are written when a node has run, each with its new value."""
        if not self.in_place.copied:
            return []
        return [pair for value in (node, *self._picks_of(node)) for pair in self.in_place.copied.get(value, ())]

    def _name_written(self, node: Node, form: OpOverload) -> Iterator[str]:
        """Assignments to the names of results that were written into operands."""
        lists: Any = [node.args[position] for position in op_info(form).writes]
        items = list(map(self.calls.render, lists if len(lists) > 1 else lists[0]))
        for index, users in self.calls.by_index.get(node, {}).items():
            yield " = ".join([*(self.names[user] for user in users), items[index]])

    def _boxed(self, node: Node) -> BoxedFunction | None:
        """The boxed function that a node calls."""
        if node.op == "call_function" and getattr(node.target, "_boxed_call", False):
            return cast("BoxedFunction", node.target)
        region = called_region(self.gm, node)
        if region is not None and region not in self.regions:
            self.regions[region] = render_graph(region)
        return None if region is None else self.regions[region]

    def _pick(self, node: Node, expression: str, picks: dict[int, list[Node]]) -> str:
        """Name the outputs that are used; other outputs get no reference."""
        if not picks:
            return expression
        names = {index: self.names[users[0]] for index, users in picks.items()}
        copies = "".join(
            f"; {self.names[again]} = {self.names[users[0]]}" for users in picks.values() for again in users[1:]
        )
        if len(names) == 1:
            ((index, name),) = names.items()
            return f"{name} = {expression}[{index}]{copies}"
        count = _number_of_outputs(node)
        if count is not None and max(names) < count <= 2 * len(names) + 2:
            targets = [names.get(index, self.unused) for index in range(count)]
            drop = f"; del {self.unused}" if len(names) < count else ""
            return f"{', '.join(targets)} = {expression}{drop}{copies}"
        whole = self.names[node]
        parts = "".join(f"; {name} = {whole}[{index}]" for index, name in names.items())
        return f"{whole} = {expression}{parts}; del {whole}{copies}"

    def _write_output(self) -> None:
        result, render = self.results, self.calls.render
        if not self.as_list:
            self.lines.append(f"return {render(result)}")
            return
        values = list(result) if isinstance(result, (list, tuple)) else [result]
        self.lines.append(f"return [{', '.join([render(value) for value in values])}]")


def _nodes_in(results: object) -> dict[Node, None]:
    return {value: None for value in leaves(results) if isinstance(value, Node)}


def _number_of_outputs(node: Node) -> int | None:
    if isinstance(node.target, OpOverload) and len(kinds := return_kinds(node.target)) > 1:
        return len(kinds)
    spec = dict.get(node.meta, "spec", dict.get(node.meta, "val"))
    return len(spec) if isinstance(spec, (list, tuple)) else None
