"""A compiler between foregrad and the compiler that is checked: it notes each graph, each call, and each failure."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from foregrad.graph.role import GraphRole, role_of
from foregrad.tools._torch.tools import make_graph_module, storage_key, tensors_in
from foregrad.tools.verification.lockstep import evaluate
from foregrad.tools.verification.watched import GlobalGenerators, copied

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# A compiled function's attributes that describe it, see `foregrad.graph.role`.
_SAYS = ("_boxed_call", "output_strides", "writes_into", "updated", "returns_list")


@dataclasses.dataclass(eq=False)
class GraphCall:
    """A call of a compiled graph: copies of its inputs and results. `error`: its exception.

    `changed`: the inputs that it wrote to without leave, by name. `reused`: the results of the graph's first call that
    this one changed, by number.
    """

    module: fx.GraphModule
    role: GraphRole
    generators: GlobalGenerators
    inputs: list[Any]
    results: list[Any] = dataclasses.field(default_factory=list)
    error: BaseException | None = None
    changed: tuple[str, ...] = ()
    reused: tuple[int, ...] = ()

    def expected(self) -> list[Any]:
        """The results of the graph on eager's kernels, for equal inputs."""
        self.generators.put_back()
        return evaluate(self.module, self.inputs)


@dataclasses.dataclass(eq=False)
class Probe:
    """`probe(gm, example_inputs)` compiles as `compiler` does, and notes the outcome.

    `refused`: the graph that the compiler raised an error for, with its role, and the error. `given`: the tensors that
    compiled graphs were called with, by name. `about_to(module, inputs)` hears of a graph ahead of the compiler and of
    a call: `inputs` are None for the former.
    """

    compiler: Compiler
    about_to: Callable[[fx.GraphModule, list[Any] | None], None] = lambda module, inputs: None
    calls: list[GraphCall] = dataclasses.field(default_factory=list)
    refused: tuple[fx.GraphModule, GraphRole, Exception] | None = None
    given: list[tuple[str, weakref.ref[torch.Tensor]]] = dataclasses.field(default_factory=list)
    held: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = dataclasses.field(default_factory=list)
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    @property
    def as_compiler(self) -> Compiler:
        """The probe as a function that counts as the compiler's own module's."""

        def probed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._compiled(gm, example_inputs)

        probed.__dict__.update(getattr(self.compiler, "__dict__", {}))
        probed.__module__ = getattr(self.compiler, "__module__", None) or "compiler"
        probed.__name__ = name_of(self.compiler)
        return probed

    def noting_refusals(self, partition: Callable[..., Any]) -> Callable[..., Any]:
        """The partition; its errors are kept as `refused`."""

        @functools.wraps(partition, updated=())  # it is called with the arguments that its signature has
        def split(joint: fx.GraphModule, *args: Any, **settings: Any) -> Any:
            try:
                return partition(joint, *args, **settings)
            except Exception as error:
                self.refused = joint, GraphRole("joint"), error
                raise

        return split

    def _compiled(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        module, role = copy_of_graph(gm), role_of(gm)
        self.about_to(module, None)
        try:
            made = self.compiler(gm, example_inputs)
        except Exception as error:
            self.refused = module, role, error
            raise
        if isinstance(made, fx.GraphModule):
            made.recompile()  # a compiler may have changed its graph alone
        if not callable(made):
            return made
        is_boxed = getattr(made, "_boxed_call", False)
        free = {*getattr(made, "writes_into", ()), *(number for number, _ in getattr(made, "updated", ()))}
        free |= _written(module)
        first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.held.append(first)  # results of the graph's first call, and copies

        def run(*args: Any) -> Any:
            values = args[0] if is_boxed else args
            call = self._begun(module, role, values)
            watched = [
                (i, value) for i, value in enumerate(values) if isinstance(value, torch.Tensor) and i not in free
            ]
            try:
                results = made(*args)
            except BaseException as error:
                call.error = error
                raise
            call.changed = tuple(
                self._names(module)[i] for i, value in watched if not _same_content(value, call.inputs[i])
            )
            listed = results if isinstance(results, (list, tuple)) else [results]
            call.reused = tuple(i for i, (result, copy) in first.items() if not _same_content(result, copy))
            call.results = list(map(copied, listed))
            with self.lock:
                if not first and not call.reused:
                    first.update(_fresh(listed, call.results, role, args))
            return results

        for name in _SAYS:
            if hasattr(made, name):
                setattr(run, name, getattr(made, name))
        return run

    def _begun(self, module: fx.GraphModule, role: GraphRole, values: Sequence[Any]) -> GraphCall:
        inputs = list(map(copied, values))
        call = GraphCall(module, role, GlobalGenerators.now(), inputs)
        names = self._names(module)
        with self.lock:
            self.calls.append(call)
            for name, value in zip(names, values, strict=False):
                if isinstance(value, torch.Tensor):
                    self.given.append((f"{name} of the {role.phase} graph", weakref.ref(value)))
        self.about_to(module, inputs)
        return call

    @staticmethod
    def _names(module: fx.GraphModule) -> list[str]:
        return [node.name for node in module.graph.nodes if node.op == "placeholder"]

    def kept(self) -> list[str]:
        """The names of tensors that went into compiled graphs and are still there.

        A tensor that went into a graph in several calls stays by itself: the function closes over it. Results are no
        longer watched from then on.
        """
        for first in self.held:
            first.clear()
        alive = collections.Counter((name, id(t)) for name, ref in self.given if (t := ref()) is not None)
        stays = {key for (_, key), count in alive.items() if count > 1}
        return list(dict.fromkeys(name for name, key in alive if key not in stays))


def _fresh(
    results: Sequence[Any], copies: Sequence[Any], role: GraphRole, args: Sequence[Any]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The visible results that share no memory with the caller's remaining values, by number, with their copies."""
    written = {output for _, output in role.updates}
    fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    given = {storage_key(v) for v in tensors_in(args) if v.layout is torch.strided}
    for i in role.visible_outputs:
        if i in written or i >= len(results):
            continue
        value = results[i]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and storage_key(value) not in given:
            fresh[i] = value, copies[i]
    return fresh


def name_of(function: Any) -> str:
    """A compiler's name for people."""
    while hasattr(function, "func"):
        function = function.func  # of a partial
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def copy_of_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, of its module."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return make_graph_module(gm, graph)


def _written(module: fx.GraphModule) -> set[int]:
    """The positions of inputs that the graph itself writes to."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    copies = [n.args[0] for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    return {i for i, node in enumerate(placeholders) if node in copies}


def _same_content(value: torch.Tensor, copy: torch.Tensor) -> bool:
    if value.layout is not torch.strided or value.shape != copy.shape:
        return value.shape == copy.shape
    return bool(((value == copy) | (value.isnan() & copy.isnan())).all())
