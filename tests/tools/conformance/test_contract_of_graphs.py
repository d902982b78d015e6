"""The table in docs/write_a_compiler.md: what a graph is to a compiler, proven on every door."""

from __future__ import annotations

import copy
import operator
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

import foregrad
from foregrad.graph.role import role_of

PAGE = Path(__file__).parents[3] / "docs" / "write_a_compiler.md"


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
    found.is_of_dynamo = request.param is by_torch_compile
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


def nodes_are_of_four_kinds(seen):
    for gm in seen.graphs:
        assert {node.op for node in gm.graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}


def operators_are_aten(seen):
    for gm in seen.graphs:
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


def has_further_metadata(seen):
    for gm, half in zip(seen.graphs, ("", "fwd_"), strict=True):
        calls = nodes(gm, "call_function")
        assert all(key in node.meta for node in calls for key in ("original_aten", "seq_nr", "partitioner_tag"))
        assert any(f"{half}nn_module_stack" in node.meta for node in calls)
        assert any(f"{half}source_fn_stack" in node.meta for node in calls) == seen.is_of_dynamo


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
    "nodes": nodes_are_of_four_kinds,
    "operators": operators_are_aten,
    "writes": is_functional,
    '`meta["val"]`': has_values,
    '`meta["tensor_meta"]`': has_tensor_meta,
    '`meta["stack_trace"]`': has_stack_traces,
    "further `meta`": has_further_metadata,
    "`role_of(gm)`": says_which_half,
    "example inputs": inputs_are_the_values,
    "names of inputs": names_of_inputs,
    "results of the forward": updates_are_results,
    "inputs of the backward": saved_values_keep_their_names,
    "results of the backward": one_gradient_for_each_input,
    "calls": called_with_a_list,
    "time of compilation": backward_is_compiled_late,
}


# ------------------------------------------------------------------------------------- the rows that the suite's graphs keep


def is_of_sizes(target, value):
    return isinstance(value, (torch.SymInt, int)) and target.__module__ in {"_operator", "math", "torch"}


def broken_rows(gm, example_inputs):
    """What a graph of the suite has against the table."""
    for node in gm.graph.nodes:
        target, value = node.target, node.meta.get("val")
        if node.op == "output":
            continue
        if node.op != "get_attr" and "val" not in node.meta:
            yield f"{target} has no value"
        if isinstance(value, FakeTensor) and value.layout is torch.strided and node.op != "get_attr":
            numbers = (*value.shape, *value.stride())
            said = node.meta.get("tensor_meta")
            if all(type(n) is int for n in numbers) and (*said.shape, *said.stride) != numbers:
                yield f"tensor_meta of {target} is {said}"
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
            if target._schema.is_mutable and target is not torch.ops.aten.copy_.default:
                yield f"{target} writes"
        elif node.op == "call_function" and target is not operator.getitem and not is_of_sizes(target, value):
            yield f"{target} is no operator"
    examples = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    if any(one is not other for one, other in zip(examples, example_inputs, strict=True)):
        yield "an example is no value of a placeholder"


def test_each_graph_of_the_suite_keeps_the_contract():
    """Gradients of parts, writes, views, symbolic sizes: more kinds of graphs than the rows above see."""
    broken, graphs = [], 0

    def compiler(gm, example_inputs):
        nonlocal graphs
        graphs += 1
        broken.extend(broken_rows(gm, example_inputs))
        return foregrad.make_boxed_func(gm.forward)

    report = foregrad.testing.check_compiler(compiler, only="[!mo]*")  # models and operators take long
    assert report.ok, report
    assert graphs > 150
    assert broken == []


def half_asked(x, y):
    x[1] = y
    return x.sum() * y


def test_zeros_in_the_place_of_a_missing_gradient_have_values():
    """The written tensor gets no gradient here: the backward begins with zeros that no node of the capture made."""
    broken = []

    def compiler(gm, example_inputs):
        broken.extend(broken_rows(gm, example_inputs))
        return foregrad.make_boxed_func(gm.forward)

    for x in (torch.ones(2, 3), torch.ones(3, 2).t()):
        y = torch.ones(3, requires_grad=True)
        foregrad.aot_function(half_asked, compiler)(x * 1, y).sum().backward()
        assert broken == []


def test_a_visible_result_in_other_strides_is_a_fault_that_says_so():
    def compiler(gm, example_inputs):
        def run(*args):
            results = gm(*args)
            return [r.mT.contiguous().mT if isinstance(r, torch.Tensor) and r.dim() > 1 else r for r in results]

        return run

    report = foregrad.testing.check_compiler(compiler, only="fusions/a sum and a ReLU")
    (fault,) = report.faults
    assert "expected: strides (4, 1); got: (1, 3)" in fault.detail


# --------------------------------------------------------------------------------------------- the contract of a partition


class Split:
    """A partition that keeps what it is given and what it gives."""

    def __init__(self):
        self.joint = self.halves = None

    def partition(self, joint, inputs, *, num_fwd_outputs, static_lifetime_input_indices=None):
        self.joint, self.count, self.static = copy_of(joint), num_fwd_outputs, static_lifetime_input_indices
        self.halves = foregrad.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)
        return self.halves


def copy_of(gm):
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def names(gm, op="placeholder"):
    return [node.name for node in nodes(gm, op)]


class Mean(nn.Module):
    """Its backward needs a size, and no tensor of that size."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        return (x.mean() * self.weight, y)


@pytest.mark.parametrize(("kind", "dynamic"), [(Net, False), (Mean, True)])
def test_a_partition_gets_and_gives_what_the_page_says(kind, dynamic):
    split, net = Split(), kind()
    args = (torch.randn(3, 4, requires_grad=True), torch.randn(3, 5))
    foregrad.aot_module(net, foregrad.nop, partition_fn=split.partition, dynamic=dynamic)(*args)
    forward, backward = split.halves
    primals = [f"primals_{i + 1}" for i in range(len(names(forward)))]
    assert names(split.joint) == [*primals, *[n for n in names(split.joint) if n.startswith("tangents_")]]
    assert len(outputs(split.joint)) == split.count + len(primals)
    assert names(forward) == primals
    saved = outputs(forward)[split.count :]
    sizes = [n.name for n in saved if not isinstance(n.meta["val"], torch.Tensor)]
    tensors = [n.name for n in saved if isinstance(n.meta["val"], torch.Tensor)]
    tangents = names(split.joint)[len(primals) :]
    assert names(backward) == [*sizes, *tensors, *tangents]
    assert len(outputs(backward)) == len(primals)
    assert bool(sizes) == dynamic
    held = len([*net.parameters(), *net.buffers()])
    assert split.static == list(range(held))


def test_the_suite_calls_a_partition_without_parameters_that_it_does_not_have():
    def partition(joint, inputs, *, num_fwd_outputs):
        return foregrad.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    report = foregrad.testing.check_partitioner(partition, only="gradients/None*")
    assert report.counts["passed"] == len(report.findings)


# ------------------------------------------------------------------------------------ the consequences of a fault, by door


def of_wrong_shape(gm, example_inputs):
    return lambda *args: [r.reshape(-1) if isinstance(r, torch.Tensor) else r for r in gm.forward(*args)]


def that_raises(gm, example_inputs):
    raise LookupError("no kernel")


def of_a_crash(gm, example_inputs):
    def run(*args):
        raise LookupError("no kernel")

    return run


def that_writes(gm, example_inputs):
    def run(*args):
        results = gm.forward(*args)
        args[0].detach().add_(1)
        return results

    return run


BROKEN = "BackendError"
FAULTS = {
    "a result breaks the contract": (of_wrong_shape, "warning", BROKEN, BROKEN),
    "the compiler raises": (that_raises, "warning", BROKEN, "LookupError"),
    "the compiled function raises in its first call": (of_a_crash, "warning", "LookupError", "LookupError"),
    "the compiled function writes to an input": (that_writes, BROKEN, BROKEN, BROKEN),
}


def consequence(compiled):
    x = torch.ones(2, 3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", foregrad.errors.ForegradWarning)
        try:
            result = compiled(x)
        except Exception as error:
            return type(getattr(error, "inner_exception", error)).__name__  # Dynamo wraps errors of compiling
    (warning,) = [one for one in caught if issubclass(one.category, foregrad.errors.ForegradWarning)]
    assert "failed on the forward graph" in str(warning.message)
    assert torch.equal(result, x.sin() * 2)
    return "warning"


@pytest.mark.parametrize("fault", FAULTS)
def test_the_consequence_of_a_fault_at_each_door(fault):
    compiler, by_default, where_raising, at_aot = FAULTS[fault]

    def f(x):
        return x.sin() * 2

    for on_unsupported, expected in (("eager", by_default), ("raise", where_raising)):
        assert consequence(foregrad.compile(f, backend=compiler, on_unsupported=on_unsupported)) == expected
        options = {"backend": compiler, "on_unsupported": on_unsupported}
        assert consequence(torch.compile(f, backend="foregrad", options=options)) == expected
    assert consequence(foregrad.aot_function(f, compiler)) == at_aot


# --------------------------------------------------------------------------------------------- the table and the doors


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table_holds_on_every_door(row, seen):
    ROWS[row](seen)


def test_the_table_has_these_rows():
    (table,) = re.findall(
        r"^\| part \| contract \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE.read_text("utf-8"), flags=re.MULTILINE
    )
    assert [line.split("|")[1].strip() for line in table.splitlines()] == list(ROWS)


def test_the_table_of_faults_has_these_rows():
    (table,) = re.findall(r"^\| fault \| .*\n\| ---.*\n((?:\|.*\n)+)", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert [line.split("|")[1].strip() for line in table.splitlines()] == list(FAULTS)
