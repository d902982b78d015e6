"""What convolutions read is laid out once: in the forward for its backward, and in the graph of a training step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch.graphs import copied
from foregrad.graph.meta import spec_of
from foregrad.inductor._torch import inductor as door
from foregrad.inductor.backend import InductorCompiler

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="convolutions have no layout of their own"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def network():
    torch.manual_seed(0)
    first, second, third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 4, 1)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third, nn.Tanh())


def compared(use):
    """What `use(model, call)` gives, eager and compiled; and the compiled call."""
    model = network()
    twin = copy.deepcopy(model)
    call = foregrad.compile(twin, backend="inductor")
    expected, actual = use(model, model), use(twin, call)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    return call


def image():
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def test_the_backward_takes_the_forwards_copy_of_a_weight():
    def train(model, call):
        for _ in range(3):
            out = call(image())
            assert out.is_contiguous()
            out.sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad.stride() == parameter.stride()
                    parameter.sub_(parameter.grad, alpha=0.1)
        return [*model.parameters(), *(parameter.grad for parameter in model.parameters())]

    call = compared(train)
    backward = call.foregrad.specializations[0].product.compiled.partitioned.backward
    read = [n.args[2] for n in backward.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
    copies = [node for node in read if "alias" in node.name]
    assert [spec_of(node).stride for node in copies] == [
        (72, 1, 24, 8)
    ]  # not of 1x1, nor where the image is the user's


def test_a_weight_written_to_between_forward_and_backward_is_noticed():
    def use(model, call):
        out = call(image()).sum()
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
        return ()

    compared(use)


def test_its_second_derivative():
    def use(model, call):
        x = image().requires_grad_()
        (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient, x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    compared(use)


def test_a_graph_that_is_kept_and_some_of_the_gradients():
    def use(model, call):
        out = call(image()).sum()
        weights = [model[0].weight, model[2].weight]
        found = [torch.autograd.grad(out, weights[:count], retain_graph=True) for count in (1, 2, 1)]
        out.backward()
        return [*(g for gradients in found for g in gradients), *(p.grad for p in model.parameters())]

    compared(use)


@pytest.mark.parametrize("why", ["gradients come in batches", "the backward can't be compiled"])
def test_a_backward_on_eagers_kernels_takes_views_of_a_residual_that_inductor_laid_out(why, monkeypatch):
    compiler = InductorCompiler({"force_layout_optimization": True}, fallback=True)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    is_batched = why.startswith("gradients")
    if not is_batched:
        compile_graph = door.compile_graph

        def failing(*args, is_backward=False, **kwargs):
            if is_backward:
                raise RuntimeError("not this one")
            return compile_graph(*args, is_backward=is_backward, **kwargs)

        monkeypatch.setattr(door, "compile_graph", failing)

    def function(x):
        y = first(x)
        flat = y.view(2, -1)
        return (flat * flat.sin()).sum(1) + second(y.sin()).exp().sum((1, 2, 3)) + (y * y.cos()).sum((1, 2, 3))

    call, x = foregrad.compile(function, backend=(compiler, compiler)), image().requires_grad_()
    given = torch.randn(4, 2) if is_batched else torch.randn(2)
    found = [torch.autograd.grad(f(x), [x, first.weight], given, is_grads_batched=is_batched) for f in (function, call)]
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


def step_graph(monkeypatch, step_of, **settings):
    """The graph that Inductor gets of a training step, and whether eager's results came of it."""
    graphs = []  # copies: where its cache has no kernels of a graph, Inductor changes it
    compile_graph = door.compile_graph

    def copying(gm, *args, **kwargs):
        graphs.append(copied(gm.graph))
        return compile_graph(gm, *args, **kwargs)

    monkeypatch.setattr(door, "compile_graph", copying)
    ends = []
    for backend in (None, InductorCompiler(settings)):
        torch.manual_seed(1)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = step_of(model, optimizer)
        call = step if backend is None else foregrad.compile(step, backend=backend)
        results = [call(image()) for _ in range(3)]
        ends.append([*results, *model.state_dict().values(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(ends[1], ends[0], atol=1e-4, rtol=1e-4, check_stride=True)
    return graphs[-1]


def operands(graph):
    """The weight and the image of each convolution, forward and backward, but for those that may become products."""
    aten = torch.ops.aten
    forward = [(n.args[1], n.args[0]) for n in graph.nodes if n.target is aten.convolution.default]
    backward = [(n.args[2], n.args[1]) for n in graph.nodes if n.target is aten.convolution_backward.default]
    kept = [[pair for pair in pairs if spec_of(pair[0]).shape[2:] != (1, 1)] for pairs in (forward, backward[::-1])]
    return kept[0], kept[1]


def is_channels_last(node):
    return spec_of(node).stride[1] == 1


def trained(of):
    def step_of(model, optimizer):
        def step(x):
            result = of(model, x)
            result.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return result.detach()

        return step

    return step_of


def test_a_training_step_lays_out_each_weight_and_image_once(monkeypatch):
    """Also behind an operator that looks at an image as at rows (the gradient of pooling)."""
    step_of = trained(lambda model, x: model[2:](nn.functional.max_pool2d(model[:2](x), 2)))
    graph = step_graph(monkeypatch, step_of)
    forward, backward = operands(graph)
    assert forward == backward
    assert all(is_channels_last(node) for node in (forward[1][0], *(image for _, image in forward)))
    writes = [node.args for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    assert len(writes) > 6  # what is written over the weights and their momenta is laid out as these are
    assert all(spec_of(old).stride == spec_of(new).stride for old, new in writes)


def test_gradients_and_results_that_a_step_leaves_have_eagers_strides(monkeypatch):
    def step_of(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            hidden = model[:4](x)
            model[4:](hidden).square().mean().backward()
            optimizer.step()
            return hidden.detach()

        return step

    forward, backward = operands(step_graph(monkeypatch, step_of))
    assert forward == backward
    assert is_channels_last(forward[1][0])


def test_a_step_that_reads_an_image_by_strides_is_left_as_it_is(monkeypatch):
    def of(model, x):
        hidden = model[:2](x)
        return hidden.as_strided((2, 8, 64), (512, 64, 1)).sin().mean() + model[2:](hidden)

    forward, _ = operands(step_graph(monkeypatch, trained(of)))
    assert not any(is_channels_last(weight) for weight, _ in forward[:2])


def test_a_step_draws_eagers_numbers_where_they_are_asked_for(monkeypatch):
    step_of = trained(lambda model, x: model[2:](nn.functional.dropout(model[:2](x))))
    step_graph(monkeypatch, step_of, fallback_random=True)
