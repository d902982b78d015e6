"""What a front end hands over: fakes with a ShapeEnv, Dynamo's sources, plain integers, opaque objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import foregrad
from foregrad import construct_fake_mode, process_inputs
from foregrad.aot import AOTConfig


def dynamic_fake(mode, tensor, *dims):
    kinds = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def symbolic_mode():
    return FakeTensorMode(shape_env=ShapeEnv())


def test_a_new_mode_has_a_shape_env_when_asked():
    mode, env = construct_fake_mode([torch.ones(2)], AOTConfig())
    assert isinstance(mode, FakeTensorMode)
    assert env is None
    mode, env = construct_fake_mode([torch.ones(2)], AOTConfig(dynamic_shapes=True))
    assert env is mode.shape_env
    assert isinstance(env, ShapeEnv)


def test_the_mode_of_fakes_that_are_given():
    given = symbolic_mode()
    fake = dynamic_fake(given, torch.ones(3, 4), 0)
    mode, env = construct_fake_mode([1, fake], AOTConfig())
    assert mode is given
    assert env is given.shape_env


def test_each_kind_of_input():
    mode, env = construct_fake_mode([], AOTConfig(dynamic_shapes=True))
    config = AOTConfig(num_params_buffers=1)
    weight, x = nn.Parameter(torch.ones(4, 5)), torch.ones(6, 7, requires_grad=True)
    fakes = process_inputs([weight, x, 8, 1, True, 2.5, "name", None], config, mode, env)
    assert fakes[0].shape == (4, 5)
    assert all(isinstance(size, int) for size in fakes[0].shape)
    assert all(isinstance(size, torch.SymInt) for size in fakes[1].shape)
    assert fakes[1].requires_grad
    assert isinstance(fakes[2], torch.SymInt)
    assert fakes[2].node.hint == 8
    assert fakes[3:] == [1, True, 2.5, "name", None]
    assert fakes[4] is True


def test_when_numbers_stay_as_they_are():
    mode, env = construct_fake_mode([], AOTConfig(dynamic_shapes=True))
    assert process_inputs([8], AOTConfig(is_export=True), mode, env) == [8]
    assert process_inputs([8], AOTConfig(), mode, None) == [8]
    fakes = process_inputs([8, torch.ones(3, 4)], AOTConfig(), mode, env, ignore_shape_env=True)
    assert fakes[0] == 8
    assert type(fakes[0]) is int
    assert all(type(size) is int for size in fakes[1].shape)
    loose = AOTConfig(num_params_buffers=1, static_weight_shapes=False)
    assert all(isinstance(n, torch.SymInt) for n in process_inputs([torch.ones(3, 4)], loose, mode, env)[0].shape)


def test_fakes_stay_and_those_of_another_mode_are_refused():
    mode = symbolic_mode()
    fake = dynamic_fake(mode, torch.ones(3, 4), 0)
    assert process_inputs([fake], AOTConfig(), mode, mode.shape_env)[0] is fake
    with pytest.raises(foregrad.errors.UnsupportedTensorError, match="input 0 is a fake tensor of a second"):
        process_inputs([fake], AOTConfig(), FakeTensorMode(), None)


def test_an_opaque_object_is_refused_by_its_name():
    script = torch.jit.script(Scripted())._c
    mode = FakeTensorMode()
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"input 1 is a .*Scripted"):
        process_inputs([2, script], AOTConfig(), mode, None)


class Scripted(nn.Module):
    def forward(self, x):
        return x + 1


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x, n):
        return x[:, :n].sum(1) * n + self.weight.sum() + x.shape[0], x.t(), x * self.weight[1]


@pytest.mark.parametrize("partition", [foregrad.default_partition, foregrad.min_cut_rematerialization_partition])
def test_a_module_compiled_for_fakes_serves_every_size(partition):
    module = Cut()
    example = [torch.randn(5, 7, requires_grad=True), 4]
    mode, env = construct_fake_mode(example, AOTConfig(dynamic_shapes=True))
    fakes = process_inputs(example, AOTConfig(), mode, env)
    compiled = foregrad.aot_module_simplified(module, fakes, foregrad.nop, partition_fn=partition)
    assert len(env.guards) == 1  # n is not more than the columns
    for rows, columns, n in ((5, 7, 4), (6, 9, 2), (8, 3, 2), (2, 12, 11)):
        x = torch.randn(rows, columns, requires_grad=True)
        expected, actual = module(x, n), compiled(x, n)
        for a, b in zip(expected, actual, strict=True):
            torch.testing.assert_close(a, b)
        gradients = [
            torch.autograd.grad(out[0].sum() + (out[2] * 2).sum(), (x, module.weight)) for out in (expected, actual)
        ]
        torch.testing.assert_close(*gradients)


def test_a_graph_of_dynamos_has_the_sizes_that_dynamo_has():
    found = []

    def backend(gm, example_inputs):
        mode, env = construct_fake_mode(example_inputs, AOTConfig(dynamic_shapes=True))
        found.extend(process_inputs(example_inputs, AOTConfig(), mode, env))
        return gm

    torch.compile(nn.Linear(4, 4), backend=backend, dynamic=True)(torch.randn(3, 4))
    assert isinstance(found[-1].shape[0], torch.SymInt)
