"""The table in docs/write_a_compiler.md: what a graph is to a compiler, proven on every door."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

import foregrad
from foregrad.graph.role import role_of

PAGE = Path(__file__).parents[2] / "docs" / "write_a_compiler.md"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x, y):
        return (torch.nn.functional.gelu(self.norm(self.fc(x))) * y.detach(), x.sum())


class Seen:
    """A compiler that keeps what it is given, boxed."""

    def __init__(self):
        self.graphs, self.inputs, self.calls = [], [], []

    def compiler(self, gm, example_inputs):
        self.graphs.append(fx.GraphModule(gm, gm.graph))
        self.graphs[-1].role = role_of(gm)
        self.inputs.append(example_inputs)
        number = len(self.calls)
        self.calls.append([])

        def run(values):
            self.calls[number].append((type(values), [type(value) for value in values], len(values)))
            results = gm.forward(*values)
            values.clear()
            return results

        run._boxed_call = True
        return run

    @property
    def forward(self):
        return self.graphs[0]

    @property
    def backward(self):
        return self.graphs[1]


def by_compile(net, args, seen):
    return foregrad.compile(net, backend=seen.compiler)(*args)


def by_aot_function(net, args, seen):
    return foregrad.aot_function(net, seen.compiler)(*args)


def by_aot_module_simplified(net, args, seen):
    return foregrad.aot_module_simplified(net, args, seen.compiler)(*args)


def by_torch_compile(net, args, seen):
    return torch.compile(net, backend="foregrad", options={"backend": seen.compiler})(*args)


@pytest.fixture(
    scope="module",
    params=[by_compile, by_aot_function, by_aot_module_simplified, by_torch_compile],
    ids=lambda door: door.__name__,
)
def seen(request):
    found = Seen()
    torch.manual_seed(0)
    args = (torch.randn(3, 4, requires_grad=True), torch.randn(3, 5, requires_grad=True))
    out, total = request.param(Net(), args, found)
    found.before_the_backward = len(found.graphs)
    (out.sum() + total).backward()
    assert args[1].grad is None
    return found


def nodes(gm, op):
    return [node for node in gm.graph.nodes if node.op == op]


def outputs(gm):
    return nodes(gm, "output")[0].args[0]


def operators_are_aten(seen):
    for gm in seen.graphs:
        assert {node.op for node in gm.graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}
        for node in nodes(gm, "call_function"):
            assert node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)


def is_functional(seen):
    for gm in seen.graphs:
        targets = [node.target for node in nodes(gm, "call_function") if node.target is not operator.getitem]
        assert not any(target._schema.is_mutable for target in targets)


def has_values(seen):
    for gm in seen.graphs:
        for node in [*nodes(gm, "placeholder"), *nodes(gm, "call_function")]:
            value = node.meta["val"]
            assert isinstance(value, (FakeTensor, torch.SymInt, int, tuple, list))


def has_tensor_meta(seen):
    for gm in seen.graphs:
        for node in nodes(gm, "call_function"):
            if isinstance(node.meta["val"], torch.Tensor):
                assert node.meta["tensor_meta"].shape == node.meta["val"].shape


def has_stack_traces(seen):
    assert any("gelu" in node.meta.get("stack_trace", "") for node in nodes(seen.forward, "call_function"))


def says_which_half(seen):
    assert [gm.role.phase for gm in seen.graphs] == ["forward", "backward"]


def inputs_are_the_values(seen):
    for gm, inputs in zip(seen.graphs, seen.inputs, strict=True):
        placeholders = nodes(gm, "placeholder")
        assert len(inputs) == len(placeholders)
        assert all(given is node.meta["val"] for given, node in zip(inputs, placeholders, strict=True))


def names_of_inputs(seen):
    forward = [node.name for node in nodes(seen.forward, "placeholder")]
    assert forward == [f"primals_{i + 1}" for i in range(len(forward))]
    backward = [node.name for node in nodes(seen.backward, "placeholder")]
    tangents = [name for name in backward if name.startswith("tangents_")]
    assert backward[-len(tangents) :] == tangents == ["tangents_1", "tangents_2"]


def saved_values_keep_their_names(seen):
    saved = [node.name for node in nodes(seen.backward, "placeholder") if not node.name.startswith("tangents_")]
    assert [node.name for node in outputs(seen.forward)][-len(saved) :] == saved


def one_gradient_for_each_input(seen):
    gradients = outputs(seen.backward)
    assert len(gradients) == len(nodes(seen.forward, "placeholder"))
    assert None in gradients


def updates_are_results(seen):
    """The batch norm's three statistics, then the two results, then saved values."""
    shapes = [tuple(node.meta["val"].shape) for node in outputs(seen.forward)]
    assert sorted(shapes[:3]) == [(), (5,), (5,)]
    assert shapes[3:5] == [(3, 5), ()]


def called_with_a_list(seen):
    for gm, calls in zip(seen.graphs, seen.calls, strict=True):
        ((kind, types, count),) = calls
        assert kind is list
        assert count == len(nodes(gm, "placeholder"))
        assert all(issubclass(one, torch.Tensor) for one in types)


def backward_is_compiled_late(seen):
    assert seen.before_the_backward == 1
    assert len(seen.graphs) == 2


# By the first column of the table.
ROWS = {
    "operators": operators_are_aten,
    "writes": is_functional,
    '`meta["val"]`': has_values,
    '`meta["tensor_meta"]`': has_tensor_meta,
    '`meta["stack_trace"]`': has_stack_traces,
    "`role_of(gm)`": says_which_half,
    "example inputs": inputs_are_the_values,
    "names of inputs": names_of_inputs,
    "results of the forward": updates_are_results,
    "inputs of the backward": saved_values_keep_their_names,
    "results of the backward": one_gradient_for_each_input,
    "calls": called_with_a_list,
    "when": backward_is_compiled_late,
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table_holds_on_every_door(row, seen):
    ROWS[row](seen)


def test_the_table_has_these_rows():
    (table,) = re.findall(
        r"^\| part \| contract \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE.read_text("utf-8"), flags=re.MULTILINE
    )
    assert [line.split("|")[1].strip() for line in table.splitlines()] == list(ROWS)
