"""The Inductor backend: each half through PyTorch's own kernel compiler, C++ on a CPU, Triton on a GPU.

What Inductor wants first is done on the way: its decompositions while capturing, its joint-graph passes before the
graph is split (`prepare_joint`), then its inner compiler for each half. It is told which outputs the user sees, so it
may lay out everything else as it likes; the strides it chose for what is saved go on to the backward.

A graph with an operator that Inductor has no notion of, or one that it fails on, runs on eager's kernels instead
(`auto`), or raises `BackendError` (`inductor`). Random numbers are Inductor's, not eager's, unless
`torch._inductor.config.fallback_random` is set.

Known weakness: Inductor gives up bitwise equality with eager, as `torch.compile` does.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import inductor
from .._torch.codegen import OpOverload
from .._torch.dynamo import own_tracing_context
from .._torch.fakes import FakeTensor
from .._torch.graphs import GraphCopier
from .._torch.modules import make_graph_module
from ..errors import BackendError
from ..graph.meta import respecify
from ..graph.role import GraphRole, role_of
from ..passes.decompose import decompose
from .eager import eager_compiler

__all__ = ["InductorCompiler", "why_not"]

log = logging.getLogger("foregrad")

Boxed = Callable[[list[Any]], Any]


def why_not(devices: Sequence[torch.device] = ()) -> str | None:
    """Why Inductor can't compile for these devices (by default the CPU) here; None when it can."""
    types = {device.type for device in devices} or {"cpu"}
    for kind in sorted(types):
        if kind == "cpu" and not inductor.cpp_compiler_found():
            return "no C++ compiler was found (g++ or clang++ on the path, or the environment variable CXX)"
        if kind in ("cuda", "xpu") and not inductor.triton_found():
            return f"Triton, which it needs for {kind}, is not installed"
        if kind not in ("cpu", "cuda", "xpu", "mps"):
            return f"it is not known to compile for the device type `{kind}`"
    return None


class InductorCompiler:
    """A compiler for forward, backward and inference graphs alike: it asks their `role_of`.

    Args:
        settings: of `torch._inductor.config`, in force while it compiles.
        fallback: run a graph that can't be compiled on eager's kernels, saying why once, in place of an error.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, *, fallback: bool = False) -> None:
        self.settings = dict(settings or {})
        self.fallback = fallback
        self.__name__ = "inductor"

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """What Inductor wants decomposed, which depends on its settings."""
        with inductor.patched_config(self.settings):
            return inductor.decompositions()

    def prepare_joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A copy of a joint graph after Inductor's passes for such graphs."""
        with inductor.patched_config(self.settings):
            return _after_joint_passes(gm)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a graph. The result takes one list, which it empties; `output_strides` are its outputs'."""
        foreign = _foreign_target(gm)
        if foreign is not None:
            log.info("Inductor does not know %s: that graph runs on eager's kernels", foreign)
            return eager_compiler(gm, example_inputs)
        if not any(node.op == "call_function" for node in gm.graph.nodes):
            return eager_compiler(gm, example_inputs)
        reason = why_not([value.device for value in example_inputs if isinstance(value, torch.Tensor)])
        if reason is not None and self.fallback:
            log.warning("a graph runs on eager's kernels, because Inductor can't compile it: %s", reason)
            return eager_compiler(gm, example_inputs)
        try:
            with inductor.patched_config(self.settings):
                return _compile(gm, example_inputs, role_of(gm))
        except Exception as error:
            if self.fallback:
                log.warning("Inductor failed on a graph, which runs on eager's kernels instead: %s", _first_line(error))
                return eager_compiler(gm, example_inputs)
            raise BackendError(
                f"Inductor failed on the {role_of(gm).phase} graph: {type(error).__name__}: {_first_line(error)}\n"
                '  backend="auto" runs such graphs on eager\'s kernels; backend="eager" all of them.'
            ) from error


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], role: GraphRole) -> Boxed:
    """Compile a copy: the graph itself may be printed, or cut to fewer tangents, later."""
    if role.phase == "inference":
        copy = _after_joint_passes(gm)
    else:
        copy = _copy(gm)
    static = role.static_inputs if inductor.uses_cudagraphs() else ()
    compiled, strides = inductor.compile_graph(
        copy,
        example_inputs,
        is_backward=role.phase == "backward",
        is_inference=role.phase == "inference",
        static_inputs=static,
        visible_outputs=role.visible_outputs,
    )
    compiled.output_strides = strides  # type: ignore[attr-defined]
    return compiled


def _after_joint_passes(gm: fx.GraphModule) -> fx.GraphModule:
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    copy = _copy(gm)
    mode = _fake_mode(inputs)
    if mode is None:
        return copy
    with own_tracing_context(mode):  # Dynamo's, if we are inside of it, has another fake mode
        decompose(copy, inductor.decompositions(), mode)
        inductor.propagate(copy, inputs, mode)
        copy = inductor.joint_passes(copy)
        if any("val" not in node.meta for node in copy.graph.nodes if node.op == "call_function"):
            inductor.propagate(copy, inputs, mode)
    respecify(copy.graph)
    return copy


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    copier = GraphCopier()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            copier.placeholder(node)
        elif node.op == "output":
            copier.output(node.args[0])
        else:
            copier.copy(node)
    return make_graph_module(gm, copier.graph, "GraphModule")


def _fake_mode(inputs: Sequence[Any]) -> Any:
    return next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)


def _foreign_target(gm: fx.GraphModule) -> str | None:
    """Something called in the graph that is neither an operator nor arithmetic on sizes."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, OpOverload):
            if node.target is operator.getitem or getattr(node.target, "__module__", "") in _ARITHMETIC:
                continue
            return str(node.target)
    return None


_ARITHMETIC = {"_operator", "math", "builtins", "torch"}


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)
