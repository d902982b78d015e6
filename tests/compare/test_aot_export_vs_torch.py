"""`aot_export_module` and `aot_export_joint_simple` against PyTorch's: same inputs and outputs, same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_simple as their_joint
from torch._functorch.aot_autograd import aot_export_module as their_module

import foregrad


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        y = self.norm(self.linear(x)) * self.scale
        return y.square().mean(), y.detach()


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * self.weight.detach()
        return (x @ self.weight).sum(), y.t(), y, y.view(-1)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, y):
        x.mul_(2)
        return (y * self.weight).sum(), x.sum()


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return (nn.functional.dropout(self.linear(x), 0.5).sum(),)


MODULES = {
    "trained": (Trained, lambda: (torch.randn(6, 3),)),
    "views": (Views, lambda: (torch.randn(5, 3),)),
    "writes": (Writes, lambda: (torch.randn(3), torch.randn(3))),
    "gradients of arguments": (Writes, lambda: (torch.randn(3), torch.randn(3, requires_grad=True))),
    "random": (Random, lambda: (torch.randn(2, 3),)),
}


def run(graph, module, args):
    state = [*module.parameters(), *module.buffers()]
    torch.manual_seed(0)
    with torch.no_grad():
        return graph(*[t.detach().clone() for t in state], *[a.detach().clone() for a in args])


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, joint):
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module, args = make(), inputs()
    results = []
    for export in (foregrad.aot_export_module, their_module):
        mine, given = copy.deepcopy(module), [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        loss = {"output_loss_index": 0} if joint else {}
        graph, signature = export(mine, given, trace_joint=joint, **loss)
        results.append((graph, signature, run(graph, module, args)))
        if joint:
            for (_, a), (_, b) in zip(mine.state_dict().items(), module.state_dict().items(), strict=True):
                assert torch.equal(a, b)  # nothing happens at export
    (graph, ours, mine), (_, theirs, other) = results
    assert len(mine) == len(other)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)
    for field in ("parameters", "buffers", "user_inputs", "inputs_to_parameters", "inputs_to_buffers"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert list(ours.buffers_to_mutate.values()) == list(theirs.buffers_to_mutate.values())
    assert list(ours.user_inputs_to_mutate.values()) == list(theirs.user_inputs_to_mutate.values())
    assert (ours.in_spec, ours.out_spec) == (theirs.in_spec, theirs.out_spec)
    assert len(ours.user_outputs) == len(theirs.user_outputs)
    if joint:
        backward, expected = ours.backward_signature, theirs.backward_signature
        assert list(backward.gradients_to_parameters.values()) == list(expected.gradients_to_parameters.values())
        assert list(backward.gradients_to_user_inputs.values()) == list(expected.gradients_to_user_inputs.values())
        assert backward.loss_output == ours.user_outputs[0]
    names = {node.name for node in graph.graph.nodes}
    assert {*ours.buffers_to_mutate, *(n for n in ours.user_outputs if isinstance(n, str))} <= names
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in graph.graph.nodes)


def two(x, y):
    return x * y, x.sin()


def half(x, y):
    return (x * 2).exp(), y.cos().sum(0)


def one(x, y):
    return ((x @ y.t()).relu(),)


@pytest.mark.parametrize("f", [two, half, one], ids=lambda f: f.__name__)
@pytest.mark.parametrize("requires", [(True, True), (True, False)])
def test_functions(f, requires):
    args = [torch.randn(3, 3, requires_grad=r) for r in requires]
    plain = [a.detach() for a in args]
    graphs = [export(f, args, trace_joint=False) for export in (foregrad.aot_export_joint_simple, their_joint)]
    for a, b in zip(graphs[0](*plain), graphs[1](*plain), strict=True):
        torch.testing.assert_close(a, b)
    if not requires[1] and f is half:
        return  # PyTorch's wants tangents for results without gradients
    joint = foregrad.aot_export_joint_simple(f, args, trace_joint=True)
    expected = f(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    tangents = [torch.randn_like(t) for t in expected if t.requires_grad]
    found = joint(plain, tangents)
    grads = torch.autograd.grad(
        [t for t in expected if t.requires_grad], [a for a in args if a.requires_grad], tangents
    )
    for a, b in zip(found, [*expected, *grads], strict=True):
        torch.testing.assert_close(a, b)


def writes(x):
    return (x.add_(1),)


def view(x):
    return (x.view(-1),)


@pytest.mark.parametrize("f", [writes, view], ids=lambda f: f.__name__)
def test_functions_that_are_not_simple(f):
    for export in (foregrad.aot_export_joint_simple, their_joint):
        with pytest.raises((RuntimeError, AssertionError)):
            export(f, [torch.ones(2, 2)], trace_joint=False)


class Other(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.ones(3)), act

    def forward(self, x):
        return self.act(self.weight, x)


REFUSED = {
    "two results with gradients": (lambda w, x: ((w * x).sum(), w * x), "detach all results but the loss"),
    "no scalar": (lambda w, x: (w * x,), "no scalar"),
    "no gradients": (lambda w, x: (x.sum(),), "requires no gradients"),
    "a branch": (lambda w, x: ((w * x).sum() if x.sum() > 0 else w.sum(),), "branches on values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_are_refused(name):
    act, said = REFUSED[name]
    with pytest.raises(RuntimeError, match=said):
        foregrad.aot_export_module(Other(act), [torch.ones(3)], trace_joint=True, output_loss_index=0)


def test_symbolic_sizes():
    module = Other(lambda w, x: ((x * w[0]).sum(),))
    settings = {"trace_joint": True, "output_loss_index": 0, "dynamic_shapes": True}
    graph, _ = foregrad.aot_export_module(module, [torch.ones(4)], **settings)
    loss, gradient = graph(torch.ones(3), torch.arange(7.0))
    assert loss.item() == 21.0
    assert gradient.tolist() == [21.0, 0.0, 0.0]


class Checking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        torch._assert_async(x.sum() > 0, "the sum is positive")
        torch.ops.aten._print("a line")
        return ((x * self.weight).sum(),)


@pytest.mark.parametrize("joint", [True, False])
def test_checks_and_prints_of_a_module_are_in_its_graph(joint, capfd):
    module, x = Checking(), torch.ones(3)
    loss = 0 if joint else None
    graph, signature = foregrad.aot_export_module(module, [x], trace_joint=joint, output_loss_index=loss)
    assert len(signature.user_outputs) == 1
    capfd.readouterr()
    with torch.no_grad():
        out = graph(module.weight.detach(), x)
    assert "a line" in "".join(capfd.readouterr())
    torch.testing.assert_close(out[0], module(x)[0].detach())
    if joint:
        torch.testing.assert_close(out[1], x)
    with pytest.raises(RuntimeError, match="the sum is positive"), torch.no_grad():
        graph(module.weight.detach(), -x)


class Branching(nn.Module):
    def forward(self, x):
        return (x.sin() if x.sum() > 0 else x.cos(),)


def test_what_an_export_has_not_is_refused_by_name():
    with pytest.raises(foregrad.errors.UnsupportedError, match="branches on values"):
        foregrad.aot_export_module(Branching(), [torch.ones(3)], trace_joint=False)
    with pytest.raises(foregrad.errors.UnsupportedError, match="branches on values"):
        foregrad.aot_export_module(Branching(), [torch.ones(3)], trace_joint=False, pre_dispatch=True)


class Printing(nn.Module):
    def forward(self, x):
        torch.ops.higher_order.print("a line of {}", x.shape[0])
        return (x * 2,)


@pytest.mark.skipif(not hasattr(torch.ops.higher_order, "print"), reason="this PyTorch has no such operator")
def test_the_operator_that_prints_is_in_the_graph(capfd):
    graph, _ = foregrad.aot_export_module(Printing(), [torch.ones(3)], trace_joint=False)
    capfd.readouterr()
    torch.testing.assert_close(graph(torch.ones(3))[0], torch.full((3,), 2.0))
    assert "a line of 3" in "".join(capfd.readouterr())


def test_a_script_object_is_an_attribute_of_the_graph():
    from torch.testing._internal.torchbind_impls import init_torchbind_implementations

    try:
        init_torchbind_implementations()
    except Exception as error:  # the classes are in a library for PyTorch's own tests
        pytest.skip(f"no class of script objects: {error}")

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = torch.classes._TorchScriptTesting._Foo(10, 20)

        def forward(self, x):
            return (x + torch.ops._TorchScriptTesting.takes_foo(self.held, x),)

    module, x = Held(), torch.ones(3)
    graph, _ = foregrad.aot_export_module(module, [x], trace_joint=False)
    (read,) = graph.graph.find_nodes(op="get_attr", target="_torchbind_obj0")
    assert isinstance(read.meta["val"], torch.ScriptObject)
    assert torch.equal(graph(x)[0], module(x)[0])


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_the_operator_that_compilers_know(training):
    """Compilers of core ATen have no rule for `native_batch_norm`, whose schema does not say what it writes to."""

    class Normed(nn.BatchNorm1d):
        def forward(self, x):
            return (super().forward(x),)

    module, x = Normed(3).train(training), torch.randn(4, 3)
    graphs = [export(module, [x], trace_joint=False)[0] for export in (foregrad.aot_export_module, their_module)]
    names = [{str(node.target) for node in graph.graph.nodes if "norm" in str(node.target)} for graph in graphs]
    assert names[0] == names[1]
