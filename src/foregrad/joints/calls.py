"""The call of a compiled joint graph: a function of one list of flat arguments, rendered as lines of Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.nested import flattened
from ..backends.boxed import as_boxed
from ..dispatch.guard_list import size_reads
from ..frontend.openings import opener
from ..frontend.source import Source
from ..graph.joint import JointGraph, Partitioned
from ..graph.signature import PartOf
from ..graph.source import Names, compile_source, unpacked
from ..runtime.compiled import Compiled
from ..runtime.decisions import Stop
from ..runtime.lines import LineWriter
from ..runtime.render import RunLines
from .back import joint_of
from .held import JointWithDescriptors
from .layout import Layout

_RAISES = Stop("raise fault", "raise fault", "raise fault")


def rendered_call(joint: JointGraph, compiled: Compiled, layout: Layout) -> Callable[[list[Any]], Any]:
    """A function of the list of flat arguments, which it empties, that gives the module's result."""
    names = Names(["args", "error", "fault", "forward"])
    inputs = _FlatInputs(joint, layout, names)
    reads, symbols = size_reads(joint.signature, inputs.variables, names)
    run = RunLines(compiled, inputs.variables, names, _RAISES, symbols, inputs.wrappers)
    body = "\n".join("    " + line for line in (*inputs.lines, *reads, *run.lines))
    source = f"def forward(args):\n{body}\n"
    call: Callable[[list[Any]], Any] = compile_source(source, "forward", inputs.globals | run.globals, label=joint.name)
    return call


class _FlatInputs(LineWriter):
    """`variables` of the signature's inputs, `lines` that set them, and the variables of `wrappers`."""

    def __init__(self, joint: JointGraph, layout: Layout, names: Names) -> None:
        super().__init__(names)
        self.wrappers: list[str] = []
        used = {p.place for p in layout.primals if p.input is not None}
        places = [names.fresh(f"args_{i}") if i in used else "_" for i in range(layout.num_places)]
        if places:
            self.lines.append(f"{unpacked(places)}args")
        self.lines.append("args.clear()")
        parts: dict[int, list[str]] = {}
        for wrapper in layout.wrappers:
            name = places[wrapper.place]
            self.wrappers.append(name)
            made = parts[wrapper.place] = [names.fresh(f"{name}_{i}") for i in range(wrapper.spec.count)]
            unwrap = self.bind("unwrap", opener().unwrapping(wrapper.spec, wrapper.gradient))
            self.lines.append(f"{unpacked(made)}{unwrap}({name})")
        by_input = {p.input: p for p in layout.primals if p.input is not None}
        self.variables = []
        for number, info in enumerate(joint.signature.inputs):
            primal = by_input.get(number)
            if primal is None:
                self.variables.append(self._read(info.source))
            elif primal.part is None:
                self.variables.append(places[primal.place])
            else:
                self.variables.append(parts[primal.place][primal.part])

    def _read(self, source: Source) -> str:
        assert not isinstance(source, PartOf)
        name, root = self.names.fresh("reached"), self.bind("root", source.root)
        self.lines.append(f"{name} = {source.expression(root, self.bind)}")
        return name


def forward_call(jd: JointWithDescriptors, forward: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
    """`forward`, which runs the forward part of the graph alone, with what a call does around that: a function of the
    flat arguments that gives the flat results. No gradients flow through it.
    """
    joint, layout = joint_of(jd), jd.captured.layout
    signature = joint.signature
    positions = [layout.position(i) for i in range(signature.num_forward_outputs)]
    boxed = as_boxed(forward)
    by_input = {primal.input: at for at, primal in enumerate(layout.primals)}
    order = [by_input.get(i) for i in range(len(signature.inputs))]
    values = [primal.value for primal in layout.primals]

    def run(given: list[Any]) -> list[Any]:
        primals = list(values)
        for at, value in zip(order, given, strict=True):
            if at is not None:
                primals[at] = value
        given.clear()
        results = boxed(primals)
        return [results[i] for i in positions]

    old = signature.gradients
    none = dataclasses.replace(
        old, differentiable=(), tangent_specs=(), rootless=(), passed=(), passed_aliases=(), hooked_inside=()
    )
    alone = dataclasses.replace(signature, gradients=none)
    inference = dataclasses.replace(joint, signature=alone)
    halves = Partitioned(inference, joint.module, joint.module)
    compiled = Compiled(halves, run, _no_backward, _no_backward, disable_autocast=jd.captured.autocast)
    with torch.no_grad():
        call = rendered_call(inference, compiled, layout)

    def flat(args: Sequence[Any]) -> list[Any]:
        return flattened(call(list(args)))[0]

    return flat


def _no_backward(*_: Any) -> Any:
    raise RuntimeError("this is a forward alone: no gradients flow through it")
