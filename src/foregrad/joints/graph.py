"""The graph that is handed out: a captured joint graph with the inputs and outputs of a `Layout`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from .._torch.graphs import GraphCopier, function_of, make_graph_module, with_nested_arguments
from ..descriptors import gradient_of
from ..errors import UnsupportedError
from ..frontend.source import Source
from ..graph.effect_log import Handle, SetData, Write
from ..graph.joint import JointGraph
from ..graph.meta import NodeMeta
from ..graph.signature import ConstantOutput
from .layout import ForwardOutput, Layout, placeholder_names

CONSTANT = "_reached_{}"


def written_graph(joint: JointGraph, layout: Layout, *, writes_inside: bool) -> fx.GraphModule:
    """The graph of a layout. With `writes_inside`, a graph without gradients writes to its inputs by `copy_`."""
    return _GraphWriter(joint, layout).module(writes_inside=writes_inside)


class _GraphWriter:
    def __init__(self, joint: JointGraph, layout: Layout) -> None:
        self.joint, self.layout, self.signature = joint, layout, joint.signature
        self.copier = GraphCopier()
        self.old_outputs = joint.outputs()
        self.root = torch.nn.Module()

    def module(self, *, writes_inside: bool) -> fx.GraphModule:
        copier, layout, inference = self.copier, self.layout, self.signature.is_inference
        self._inputs(inference=inference)
        for node in self.joint.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copier.copy(node)
        outputs = [self._output(entry) for entry in layout.forward]
        descs = [entry.desc for entry in layout.forward]
        if not inference:
            first = self.signature.num_forward_outputs
            for primal in layout.primals:
                grad = None if primal.input is None else self._new(self.old_outputs[first + primal.input])
                outputs.append(grad)
                descs.append(gradient_of(primal.desc) if self._requires_grad(primal) else None)
        elif writes_inside:
            for update in self.signature.updates:
                target = copier.copies[self.joint.placeholders()[update.input]]
                new = self._new(self.old_outputs[update.output])
                operands, copy_ = (target, new), torch.ops.aten.copy_.default
                copy = copier.graph.create_node("call_function", copy_, operands, name="copy_")
                copy.meta = target.meta.copy()
                copy.meta.pop("desc")
        output = copier.graph.output(outputs)
        output.meta["desc"] = descs
        self._take_attributes()
        module = make_graph_module(self.root, copier.graph, "JointGraph")
        if inference:
            return module
        return with_nested_arguments(module, len(layout.primals), len(layout.tangents), len(layout.forward))

    def _requires_grad(self, primal: Any) -> bool:
        number = primal.twin if primal.input is None else primal.input
        return number is not None and self.signature.inputs[number].requires_grad

    def _inputs(self, *, inference: bool) -> None:
        copier, layout = self.copier, self.layout
        names = iter(placeholder_names(len(layout.primals), len(layout.tangents), inference=inference))
        old = self.joint.placeholders()
        first = len(self.signature.inputs)
        for primal in layout.primals:
            name = next(names)
            number = primal.twin if primal.input is None else primal.input
            meta = NodeMeta({"val": primal.value}) if number is None else copier.metadata(old[number])
            meta["desc"], meta["partitioner_tag"] = primal.desc, "is_forward"
            node = copier.writer.add(name, "placeholder", name, (), {}, meta)
            if primal.input is not None:
                copier.copies[old[primal.input]] = node
        for position, desc in layout.tangents:
            name, meta = next(names), copier.metadata(old[first + position])
            meta["desc"], meta["partitioner_tag"] = desc, "is_backward"
            copier.copies[old[first + position]] = copier.writer.add(name, "placeholder", name, (), {}, meta)
        for number in layout.constants:
            name = CONSTANT.format(number)
            source: Source = self.signature.inputs[number].source
            value = source.get()
            self.root.register_buffer(name, value, persistent=False)
            meta = copier.metadata(old[number])
            copier.copies[old[number]] = copier.writer.add(name, "get_attr", name, (), {}, meta)

    def _take_attributes(self) -> None:
        for node in self.copier.graph.nodes:
            if node.op == "get_attr" and not hasattr(self.root, str(node.target)):
                setattr(self.root, str(node.target), operator.attrgetter(str(node.target))(self.joint.module))

    def _new(self, node: Any) -> Any:
        return self.copier.copies[node] if isinstance(node, fx.Node) else node

    def _output(self, entry: ForwardOutput) -> Any:
        if entry.output is not None:
            return self._new(self.old_outputs[entry.output])
        if entry.input is not None:
            return self._input_given_back(entry.input)
        info = self.signature.structure.outputs[entry.leaf]
        if isinstance(info, ConstantOutput):
            return info.value
        assert isinstance(info, Handle)
        if any(isinstance(e, (SetData, Write)) and not e.is_whole for e in self.signature.effects.log):
            raise UnsupportedError(f"{info.path} is a view of memory that the module replaced: return a copy")
        base = self._input_given_back(info.input) if info.output is None else self._new(self.old_outputs[info.output])
        for step in info.steps:
            base = self._call(step.op, (base, *step.args), dict(step.kwargs), base)
            if step.index is not None:
                base = self._call(operator.getitem, (base, step.index), {}, base)
        return base

    def _input_given_back(self, number: int | None) -> fx.Node:
        """An input as it is after the call."""
        output = next((u.output for u in self.signature.updates if u.input == number), None)
        old = self.joint.placeholders()[number or 0] if output is None else self.old_outputs[output]
        new: fx.Node = self._new(old)
        return new

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], base: fx.Node) -> fx.Node:
        node = self.copier.graph.call_function(target, args, dict(kwargs))
        meta = NodeMeta({"partitioner_tag": "is_forward"}, late={"val": _value(node, self.joint.fake_mode)})
        if (trace := base.meta.get("stack_trace")) is not None:
            meta["stack_trace"] = trace
        node.meta = meta
        return node


def _value(node: fx.Node, mode: Any) -> Callable[[], Any]:
    def make() -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode, torch.no_grad():
            return function_of(node)(*args, **kwargs)

    return make
