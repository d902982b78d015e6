"""From an edited graph to the joint graph that the pipeline takes, with a signature of the shapes that it has now."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import GraphCopier, make_graph_module, symbol_of
from .._torch.symbols import same_numbers
from ..descriptors import flat_outputs
from ..errors import UnsupportedError
from ..graph.effect_log import Handle, OutputInfo, ViewStep
from ..graph.joint import JointGraph
from ..graph.meta import NodeMeta, TensorSpec, respecify, spec_of
from ..graph.signature import Signature, SizeSymbol
from ..passes.aliasing import memory_of
from .graph import CONSTANT
from .held import JointWithDescriptors
from .layout import inputs_of, is_view, placeholder_names

aten = torch.ops.aten


def joint_of(jd: JointWithDescriptors) -> JointGraph:
    """The joint graph of an edited one. Raises `ValueError` for a graph with other inputs and outputs, and
    `UnsupportedError` for a result that is no view of what it was a view of, where shapes have changed.
    """
    jd.check(jd.graph_module)
    return _Reader(jd).joint()


class _Reader:
    def __init__(self, jd: JointWithDescriptors) -> None:
        self.module, self.layout = jd.graph_module, jd.captured.layout
        self.before: JointGraph = jd.captured.joint
        self.signature: Signature = self.before.signature
        self.inference = self.signature.is_inference
        self.given = inputs_of(self.module.graph)
        self.results = flat_outputs(next(iter(reversed(self.module.graph.nodes))))
        self.copier = GraphCopier(_metadata)
        self.updates_inside: dict[int, fx.Node] = {}

    def joint(self) -> JointGraph:
        copies = self.copier.copies
        self._inputs()
        for node in self.module.graph.nodes:
            if node in copies or node.op in ("placeholder", "output"):
                continue
            if self._is_update(node):
                self.updates_inside[self._input_at(node.args[0])] = node.args[1]
            else:
                self.copier.copy(node)
        outputs = self._separated([self._graph_output(i) for i in range(self.signature.num_forward_outputs)])
        gradients = [self._gradient(i) for i in range(len(self.signature.inputs))]
        self.copier.graph.output([*outputs, *gradients])
        respecify(self.copier.graph)
        module = make_graph_module(self.module, self.copier.graph, "JointGraph")
        placeholders = inputs_of(self.copier.graph)
        signature = self._signature(placeholders, outputs, gradients)
        mode = self._fake_mode(placeholders)
        return JointGraph(self.before.name, module, signature, mode)

    def _fake_mode(self, placeholders: Sequence[fx.Node]) -> Any:
        values: Iterable[Any] = (node.meta.get("val") for node in placeholders)
        return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), self.before.fake_mode)

    # ---------------------------------------------------------------- the graph

    def _inputs(self) -> None:
        layout, copies = self.layout, self.copier.copies
        number = layout.number
        constants = {
            str(node.target).rpartition(".")[2]: node for node in self.module.graph.nodes if node.op == "get_attr"
        }
        names = placeholder_names(len(self.signature.inputs), len(layout.tangents), inference=self.inference)
        for i in range(len(self.signature.inputs)):
            old = self.given[number[i]] if i in number else constants.get(CONSTANT.format(i))
            if old is None:  # a constant that the graph does not read any more
                meta: Any = NodeMeta({"spec": self.signature.inputs[i].spec})
                self.copier.writer.add(names[i], "placeholder", names[i], (), {}, meta)
            else:
                self._placeholder(old, names[i])
        first = len(layout.primals)
        order = {position: k for k, (position, _) in enumerate(layout.tangents)}
        for position in range(len(order)):
            self._placeholder(self.given[first + order[position]], names[len(self.signature.inputs) + position])
        for node, primal in zip(self.given, layout.primals, strict=False):
            if primal.input is None:  # a value of the program's, or a tied parameter's further name
                twin = None if primal.twin is None else self.given[number[primal.twin]]
                copies[node] = primal.value if twin is None else copies[twin]

    def _placeholder(self, old: fx.Node, name: str) -> None:
        meta = self.copier.metadata(old)
        self.copier.copies[old] = self.copier.writer.add(name, "placeholder", name, (), {}, meta)

    def _is_update(self, node: fx.Node) -> bool:
        return node.target is aten.copy_.default and node.args[0] in self.given and self.inference

    def _input_at(self, node: Any) -> int:
        found = self.layout.primals[self.given.index(node)].input
        assert found is not None
        return found

    def _new(self, value: Any) -> Any:
        return self.copier.copies[value] if isinstance(value, fx.Node) else value

    def _graph_output(self, output: int) -> Any:
        for update in self.signature.updates:
            if update.output == output and update.input in self.updates_inside:
                return self._new(self.updates_inside[update.input])
        return self._new(self.results[self.layout.position(output)])

    def _gradient(self, number: int) -> Any:
        at = self.layout.number.get(number)
        return None if self.inference or at is None else self._new(self.results[len(self.layout.forward) + at])

    def _separated(self, outputs: list[Any]) -> list[Any]:
        """Graph outputs, each with memory of its own: copies of those that the edited graph gives twice, or takes."""
        views = self.signature.graph_outputs.runtime_views
        taken: set[Any] = set()
        for i, node in enumerate(outputs):
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            root = memory_of(node)
            if (root[0].op in ("placeholder", "get_attr") or root in taken) and i not in views:
                copy = self.copier.graph.call_function(aten.clone.default, (node,))
                copy.meta = node.meta.copy()
                copy.meta.pop("desc", None)
                outputs[i] = copy
            taken.add(root)
        return outputs

    # ---------------------------------------------------------------- the signature

    def _signature(self, placeholders: Sequence[fx.Node], outputs: list[Any], gradients: list[Any]) -> Signature:
        before = self.signature
        specs = [spec_of(node) for node in placeholders]
        count = len(before.inputs)
        inputs = tuple(
            dataclasses.replace(info, spec=spec) if isinstance(spec, TensorSpec) else info
            for info, spec in zip(before.inputs, specs[:count], strict=True)
        )
        graph_outputs = dataclasses.replace(
            before.graph_outputs,
            specs=tuple(
                spec_of(node) if isinstance(node, fx.Node) else spec
                for node, spec in zip(outputs, before.graph_outputs.specs, strict=True)
            ),
            runtime_views=frozenset(i for i, n in enumerate(outputs) if isinstance(n, fx.Node) and is_view(n)),
        )
        flow = dataclasses.replace(
            before.gradients, tangent_specs=tuple(specs[count:]), returned=tuple(g is not None for g in gradients)
        )
        structure = dataclasses.replace(
            before.structure,
            outputs=tuple(
                self._result(i, info, graph_outputs.specs) for i, info in enumerate(before.structure.outputs)
            ),
        )
        return dataclasses.replace(
            before,
            inputs=inputs,
            graph_outputs=graph_outputs,
            gradients=flow,
            structure=structure,
            symbols=_symbols(placeholders[:count]),
        )

    def _result(self, leaf: int, info: OutputInfo, specs: Sequence[TensorSpec]) -> OutputInfo:
        """A leaf of the result, whose steps are those of the edited graph where the shapes have changed."""
        if not isinstance(info, Handle) or not info.steps:
            return info
        at = next(i for i, entry in enumerate(self.layout.forward) if entry.leaf == leaf)
        if info.output is not None:
            base = self.results[self.layout.position(info.output)]
            now, then = specs[info.output], self.signature.graph_outputs.specs[info.output]
        else:
            number = info.input or 0
            base = self.given[self.layout.number[number]]
            now, then = spec_of(self.copier.copies[base]), self.signature.inputs[number].spec
        if same_numbers((*now.shape, *now.stride), (*then.shape, *then.stride)):
            return info
        steps = _steps(self.results[at], base, info.steps[0].grad_enabled, leaf)
        if steps is None:
            raise UnsupportedError(
                f"{info.path} is a view of a tensor with a changed shape, and the edited graph lacks the view's new "
                "shape: write the view as view operators on the tensor"
            )
        return dataclasses.replace(info, steps=steps)


def _metadata(node: fx.Node) -> Any:
    meta = node.meta if isinstance(node.meta, NodeMeta) else NodeMeta(node.meta)
    return meta.copy()


def _steps(node: Any, base: fx.Node, grad_enabled: bool, leaf: int) -> tuple[ViewStep, ...] | None:
    """The way from `base` to `node` by view operators; None if there is none."""
    steps: list[ViewStep] = []
    while node is not base:
        index = None
        if isinstance(node, fx.Node) and node.target is operator.getitem:
            node, index = node.args[0], node.args[1]
        if not isinstance(node, fx.Node) or not is_view(node) or len(node.all_input_nodes) != 1:
            return None
        call = -1 - 1000 * leaf - len(steps)  # like no other's
        kwargs: Mapping[str, Any] = node.kwargs
        steps.append(ViewStep(node.target, tuple(node.args[1:]), tuple(kwargs.items()), index, call, grad_enabled))
        node = node.args[0]
    return tuple(reversed(steps))


def _symbols(placeholders: Sequence[fx.Node]) -> tuple[SizeSymbol, ...]:
    """Where each symbolic size is read."""
    found: dict[Any, SizeSymbol] = {}
    for number, node in enumerate(placeholders):
        spec = spec_of(node)
        sizes: list[tuple[int | None, Any]] = [(None, node.meta.get("val"))]
        if isinstance(spec, TensorSpec):
            sizes = list(enumerate(spec.shape))
        for dim, size in sizes:
            symbol = symbol_of(size)
            if symbol is not None:
                found.setdefault(symbol, SizeSymbol(symbol, number, dim))
    return tuple(found.values())
