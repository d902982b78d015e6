"""The interpreter backend: runs a graph node by node and compares each node's value with its `meta`.

It is slow on purpose: if compiled results are wrong, it names the first node with a shape, strides, dtype or device
that differs from its `meta`, or that wrote to an argument against its schema.

Known weaknesses: sizes that are symbolic in `meta` are not compared. A kernel that writes without moving the version
counter, and any kernel under `inference_mode`, is not caught.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._torch.ops import Args, Kwargs, OpOverload, argument_names, written_arguments
from .._torch.tensors import storage_key, version_of
from ..errors import GraphError, add_note
from ..graph.meta import TensorSpec, spec_of
from ..graph.printing import print_graph, user_line
from ..graph.source import a_name
from .results import differences, is_other

Node = torch.fx.Node


def interpreter_compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> CheckedInterpreter:
    """A boxed callable that runs the graph and checks every node. `example_inputs` are not used."""
    return CheckedInterpreter(gm)


class CheckedInterpreter:
    """Runs one graph. Takes a list of inputs, empties it, returns a list. Raises `GraphError` at the first bad node."""

    _boxed_call = True
    returns_list = True

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.gm = gm

    def source(self) -> str:
        """The graph as a program, for reading: the interpreter runs the graph itself."""
        return print_graph(self.gm)

    def __call__(self, args: list[Any]) -> list[Any]:
        inputs = self.gm.graph.find_nodes(op="placeholder")
        if len(args) != len(inputs):
            raise GraphError(f"the graph takes {len(inputs)} inputs ({', '.join(map(str, inputs))}), got {len(args)}")
        run = _Run(self.gm, args[::-1])
        args.clear()
        result = run.run(enable_io_processing=False)
        return list(result) if isinstance(result, (list, tuple)) else [result]


class _Run(torch.fx.Interpreter):
    """One run of a graph. `arriving` has the inputs, the last first."""

    def __init__(self, gm: torch.fx.GraphModule, arriving: list[Any]) -> None:
        super().__init__(gm)
        self.arriving, self.extra_traceback = arriving, False
        for node in gm.graph.nodes:
            if not node.users and node.op != "output":
                self.user_to_last_uses.setdefault(node, []).append(node)

    def placeholder(self, target: Any, args: Args, kwargs: Kwargs) -> Any:
        return self.arriving.pop()

    def run_node(self, n: Node) -> Any:
        before = list(_versions(n, *self.fetch_args_kwargs_from_env(n))) if n.op != "output" else []
        try:
            value = super().run_node(n)
        except Exception as error:
            add_note(error, f"while running {_describe(n)}")
            raise
        _check_untouched(n, before)
        _check(n, spec_of(n), value)
        return value


# -- checks


def _check(node: Node, spec: Any, value: Any, part: str = "") -> None:
    """Compare a value with the spec of its node."""
    if isinstance(spec, TensorSpec):
        if not isinstance(value, torch.Tensor):
            _fail(node, part, "value", spec, a_name(type(value).__name__))
        for what, expected, actual in _differences(spec, value):
            _fail(node, part, what, expected, actual)
    elif isinstance(spec, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(spec):
            count = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
            _fail(node, part, "number of outputs", len(spec), count)
        for index, (item_spec, item) in enumerate(zip(spec, value, strict=True)):
            _check(node, item_spec, item, f"{part}[{index}]")


def _differences(spec: TensorSpec, value: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    wrong = [*differences(spec, value)]
    yield from wrong
    if value.numel() == 0 or any(what == "shape" for what, _, _ in wrong):
        return
    # The stride of a dimension of one element addresses nothing, and kernels put different numbers there.
    for size, expected, actual in zip(value.shape, spec.stride, value.stride(), strict=True):
        if size > 1 and is_other(expected, actual):
            yield "strides", spec.stride, value.stride()
            return


def _versions(node: Node, args: Args, kwargs: Kwargs) -> Iterator[tuple[str, torch.Tensor, int, bool]]:
    """Each tensor argument of a call with its version, and whether the schema says that the operator writes to it."""
    op = node.target if isinstance(node.target, OpOverload) else None
    names = argument_names(op) if op is not None else tuple(f"argument {i}" for i in range(len(args)))
    written = written_arguments(op) if op is not None else frozenset()
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                yield name, tensor, version_of(tensor), name in written


def _check_untouched(node: Node, before: Sequence[tuple[str, torch.Tensor, int, bool]]) -> None:
    # Writing to a view counts as a write to every tensor in its memory.
    announced = {storage_key(tensor) for _, tensor, _, is_written in before if is_written}
    for name, tensor, version, is_written in before:
        if not is_written and version_of(tensor) != version and storage_key(tensor) not in announced:
            raise GraphError(
                f"{_describe(node)} wrote to its argument `{name}`; its schema declares the argument as read only "
                f"(version {version} became {version_of(tensor)}).\n  A compiled graph has no hidden writes: declare "
                "the argument as mutated, `Tensor(a!)`, or clone it."
            )


def _fail(node: Node, part: str, what: str, expected: Any, actual: Any) -> None:
    raise GraphError(
        f"{_describe(node)}: {what}{f' of output {part}' if part else ''} is not what `meta` says.\n"
        f"  expected: {expected}\n"
        f"  actual:   {actual}\n"
        "  The operator's fake kernel disagrees with the real one, or a pass changed the graph and kept old `meta`."
    )


def _describe(node: Node) -> str:
    where = user_line(node)
    return f"node `{node.name}` ({node.op} {node.target})" + (f", from {where}" if where else "")
