"""Convolutions whose kernel is one element run as products of matrices where PyTorch would compute image by image."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch.graphs import copied
from foregrad.inductor._torch import inductor as door

aten = torch.ops.aten

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="convolutions have no layout of their own"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch computes image by image then
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiled(monkeypatch):
    """Graphs as Inductor gets them, each with whether convolutions are products there."""
    from torch._inductor import config

    seen = []
    original = door.compile_graph

    def recording(gm, *args, **kwargs):
        seen.append((copied(gm.graph), config.conv_1x1_as_mm))  # where its cache has no kernels, Inductor changes it
        return original(gm, *args, **kwargs)

    monkeypatch.setattr(door, "compile_graph", recording)
    return seen


def count(graph, target):
    return sum(node.target is target for node in graph.nodes)


def trained(model, call, x):
    out = call(x)
    (out.sin() * torch.arange(out.shape[1], dtype=out.dtype).view(1, -1, 1, 1)).mean().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(g is None or g.is_contiguous() for g in gradients)
    return [out, *gradients]


def check(model, shape, *, dtype=torch.float32, needs_image=True, check_stride=True):
    """A forward and a backward agree with eager's."""
    model, ends = model.to(dtype), []
    for is_compiled in (False, True):
        twin = copy.deepcopy(model)
        x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_(needs_image)
        ends.append(trained(twin, foregrad.compile(twin, backend="inductor") if is_compiled else twin, x))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=1e-4, check_stride=check_stride)


def bottleneck(*settings, **keywords):
    torch.manual_seed(0)
    tail = nn.Conv2d(8, 6, 1, bias=False)
    return nn.Sequential(nn.Conv2d(5, 8, *settings, **keywords), nn.BatchNorm2d(8), nn.ReLU(), tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("needs_image", [True, False])
def test_a_backward_is_two_products(compiled, dtype, needs_image):
    check(bottleneck(1), (3, 5, 4, 7), dtype=dtype, needs_image=needs_image)
    (forward, *more), (backward, products) = compiled
    assert more == [True]
    assert products
    assert count(forward, aten.convolution.default) == 2
    assert count(backward, aten.convolution.default) == 1 + needs_image  # for the gradients of images
    assert count(backward, aten.mm.default) == 2  # for those of weights
    assert count(backward, aten.convolution_backward.default) == 0


@pytest.mark.parametrize("stride", [2, (1, 2), (3, 1)])
def test_with_a_stride_it_is_one_of_a_part_of_the_image_if_that_is_smaller_than_the_weight(compiled, stride):
    torch.manual_seed(0)
    check(nn.Sequential(nn.Conv2d(40, 50, 1, stride=stride), nn.Tanh()), (2, 40, 5, 4))
    (forward, _), (backward, _) = compiled
    assert [node.args[3] for node in forward.nodes if node.target is aten.convolution.default] == [[1, 1]]
    assert count(backward, aten.mm.default) == 1


def test_with_a_stride_in_a_larger_image_it_stays(compiled):
    check(bottleneck(1, stride=2), (2, 5, 9, 8))
    (_, products), (backward, _) = compiled
    assert products  # the other one
    assert count(backward, aten.convolution_backward.default) == 1


@pytest.mark.parametrize("settings", [{"kernel_size": 3}, {"kernel_size": 1, "padding": 1}])
def test_other_convolutions_of_the_graph_stay(compiled, settings):
    check(bottleneck(**settings), (2, 5, 6, 6))
    (_, products), (backward, _) = compiled
    assert products
    assert count(backward, aten.convolution_backward.default) == 1


def test_a_weight_or_a_bias_alone(compiled):
    for frozen in ("weight", "bias"):
        model = nn.Sequential(nn.Conv2d(5, 8, 1), nn.Tanh())
        getattr(model[0], frozen).requires_grad_(False)
        check(model, (2, 5, 6, 6))
    assert [products for _, products in compiled] == [True, True, True, True]


def line():
    """A convolution in one dimension before those of two."""
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(5, 5, 1), nn.Unflatten(2, (6, 6)), bottleneck(1))


@pytest.mark.parametrize("why", ["many images", "two threads", "one in one dimension"])
def test_where_one_of_a_graph_may_be_slower_nothing_changes(compiled, why):
    torch.set_num_threads(2 if why == "two threads" else 1)
    shape = (16 if why == "many images" else 2, 5, 6, 6)
    check(line() if why == "one in one dimension" else bottleneck(1), shape, check_stride=False)
    assert [products for _, products in compiled] == [False, False]


def test_with_open_sizes_nothing_changes(compiled):
    model = bottleneck(1)
    call = foregrad.compile(model, backend="inductor", dynamic=True)
    for size in (2, 3):
        x = torch.randn(size, 5, 6, 6)
        torch.testing.assert_close(call(x), model(x), atol=1e-5, rtol=1e-4)
    assert {products for _, products in compiled} == {False}


def test_a_graph_without_gradients(compiled):
    model, x = bottleneck(1).eval(), torch.randn(2, 5, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(foregrad.compile(model, backend="inductor")(x), model(x), check_stride=True)
    assert [products for _, products in compiled] == [True]


def test_a_training_step(compiled):
    ends = []
    for is_compiled in (False, True):
        model = bottleneck(3, padding=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = foregrad.compile(step, backend="inductor") if is_compiled else step
        losses = [call(torch.randn(2, 5, 6, 6, generator=torch.Generator().manual_seed(i))) for i in range(3)]
        ends.append([*losses, *model.state_dict().values()])
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=1e-4, check_stride=True)
    graph, products = compiled[-1]
    assert products
    assert count(graph, aten.convolution_backward.default) == 1


def test_second_derivatives_and_a_kept_graph():
    found = []
    for is_compiled in (False, True):
        model = bottleneck(1)[::3]
        call = foregrad.compile(model, backend="inductor") if is_compiled else model
        x = torch.randn(2, 5, 6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = call(x).sin().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        found.append([gradient, *torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()][:2])])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
