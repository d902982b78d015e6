"""The two doors of joint graphs with descriptors side by side with PyTorch's: descriptors, names, results."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd as theirs
from torch._functorch._aot_autograd import descriptors as their_descriptors
from torch._functorch._aot_autograd import fx_utils as their_utils

import foregrad
from tests.joints.programs import MODULES, arguments_of, held_by, made, observed

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
THERE = [name for name in MODULES if name != "Reached"]  # PyTorch captures no tensor that a module reaches by itself
# A tied parameter's gradient is at its first name here; PyTorch has a part of it at each.
SAME = [name for name in THERE if name != "Tied"]


def exported(door, name, grad=True):
    module = made(name)
    args, kwargs = arguments_of(name)
    with contextlib.ExitStack() as stack, torch.set_grad_enabled(grad):
        return door.aot_export_joint_with_descriptors(stack, module, args, kwargs)


exported_once = functools.cache(exported)  # for tests that only read the graph


def ends(jd):
    graph = jd.graph_module.graph
    inputs = graph.find_nodes(op="placeholder")
    output = next(iter(reversed(graph.nodes)))
    return (
        [(node.name, node.meta["desc"], node.meta.get("partitioner_tag")) for node in inputs],
        output.meta["desc"],
        [value is None for value in output.args[0]],
    )


@pytest.mark.parametrize("name", SAME)
def test_inputs_and_outputs_are_described_alike(name):
    """Names, descriptors, tags, and which gradients are None."""
    assert ends(exported(foregrad, name)) == ends(exported(theirs, name))


@pytest.mark.parametrize("name", SAME)
def test_graphs_without_gradients_are_described_alike(name):
    ours, other = exported(foregrad, name, grad=False), exported(theirs, name, grad=False)
    assert [pair[:2] for pair in ends(ours)[0]] == [pair[:2] for pair in ends(other)[0]]
    assert ends(ours)[1:] == ends(other)[1:]


@pytest.mark.parametrize("name", THERE)
def test_specs_are_equal(name):
    ours, other = exported(foregrad, name), exported(theirs, name)
    for field in ("params_spec", "buffers_spec", "in_spec", "out_spec"):
        assert getattr(ours, field) == getattr(other, field)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("function", foregrad.descriptors.__all__)
def test_functions_over_descriptors_find_the_same(name, function):
    graph = exported_once(theirs, name).graph_module.graph
    assert getattr(foregrad.descriptors, function)(graph) == getattr(their_utils, function)(graph)
    found = getattr(foregrad.descriptors, function)(exported_once(foregrad, name).graph_module.graph)
    expected = getattr(their_utils, function)(graph)
    assert [*found] == [*expected] if isinstance(found, dict) else len(found) == len(expected)


@pytest.mark.parametrize("name", THERE)
def test_steps_are_equal(name):
    results = []
    for door in (foregrad, theirs):
        args, kwargs = arguments_of(name)
        module = made(name)
        with contextlib.ExitStack() as stack:
            jd = door.aot_export_joint_with_descriptors(stack, module, args, kwargs)
            run = door.aot_compile_joint_with_descriptors(jd)

        def call(module, args, kwargs, run=run):
            return run(*held_by(module), *args, **kwargs)

        results.append(observed(module, name, call))
    torch.testing.assert_close(*results)


def test_numbers_that_clients_read_are_equal():
    ours, other = (exported(door, "Norm")._aot_state for door in (foregrad, theirs))
    for name in ("num_forward_returns", "num_intermediate_bases", "mutated_inp_runtime_indices"):
        assert getattr(ours.fw_metadata, name) == getattr(other.fw_metadata, name)
    for name in ("mutates_data", "requires_grad", "is_leaf"):
        assert [getattr(info, name) for info in ours.fw_metadata.input_info] == [
            getattr(info, name) for info in other.fw_metadata.input_info
        ]
    assert [type(value).__name__ for value in ours.flat_args] == [type(value).__name__ for value in other.flat_args]


def test_the_classes_are_those_of_pytorch():
    assert foregrad.descriptors.ParamAOTInput is their_descriptors.ParamAOTInput
    jd = exported(foregrad, "Plain")
    for node in jd.graph_module.graph.find_nodes(op="placeholder"):
        assert isinstance(node.meta["desc"], their_descriptors.AOTInput)


def test_parameters_are_those_of_pytorchs_doors():
    import inspect

    for name in ("aot_export_joint_with_descriptors", "aot_compile_joint_with_descriptors"):
        ours, other = (inspect.signature(getattr(door, name)).parameters for door in (foregrad, theirs))
        assert [*ours] == [*other]
        assert [p.kind for p in ours.values()] == [p.kind for p in other.values()]


@pytest.mark.parametrize("door", [foregrad, theirs], ids=["ours", "theirs"])
def test_partitioners_of_either_split_the_graph(door):
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    for partition in (default_partition, min_cut_rematerialization_partition, foregrad.default_partition):
        module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
        with contextlib.ExitStack() as stack:
            jd = door.aot_export_joint_with_descriptors(stack, module, (x,))
            run = door.aot_compile_joint_with_descriptors(jd, partition_fn=partition)
        run(*held_by(module), x).sum().backward()
        grads = [p.grad for p in module.parameters()]
        module.zero_grad()
        module(x).sum().backward()
        torch.testing.assert_close(grads, [p.grad for p in module.parameters()])
