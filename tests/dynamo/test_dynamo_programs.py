"""What Dynamo hands over is compiled right: open sizes, breaks, autocast, writes, shared memory, options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.graph.role import role_of

# Dynamo's own doing: it looks at `.grad` of tensors between two graphs, and makes a custom Function's object.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def compiled(function, *, inner="eager", **kwargs):
    return torch.compile(function, backend="foregrad", options={"backend": inner}, **kwargs)


def parameter(*shape):
    return torch.randn(*shape, requires_grad=True)


def assert_same(function, make, *, calls=2, slack=None, **kwargs):
    """Values, arguments after the call and gradients of `function` are eager's, through several calls."""
    call = compiled(function, **kwargs)

    def close(a, b):
        return torch.equal(a, b) if slack is None else torch.allclose(a, b, atol=slack, rtol=slack)

    for number in range(calls):
        sides = []
        for run in (function, call):
            torch.manual_seed(number)
            args = make(number)
            torch.manual_seed(100 + number)
            out = run(*args)
            outs = list(out) if isinstance(out, (tuple, list)) else [out]
            roots = [o for o in outs if isinstance(o, torch.Tensor) and o.requires_grad]
            if roots:
                sum(root.float().sum() for root in roots).backward()
            grads = [a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
            sides.append((outs, list(args), grads, torch.get_rng_state()))
        for expected, actual in zip(sides[0][:3], sides[1][:3], strict=True):
            for a, b in zip(expected, actual, strict=True):
                assert type(a) is type(b)
                assert close(a, b) if isinstance(a, torch.Tensor) else a == b
        assert torch.equal(sides[0][3], sides[1][3])


@pytest.mark.parametrize("dynamic", [None, True])
def test_another_size_is_another_specialization(dynamic):
    assert_same(lambda x: (x.sin() * x.shape[0]).view(-1), lambda n: (parameter(3 + n, 4),), calls=4, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_float_argument_is_part_of_the_guards(dynamic):
    assert_same(lambda x, y: x * y, lambda n: (parameter(3), 2.0 + n), calls=3, dynamic=dynamic)


def test_a_graph_break_makes_two_graphs():
    graphs = []

    def count(gm, inputs):
        graphs.append(role_of(gm).phase)
        return gm

    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * x

    x = parameter(3)
    call = compiled(broken, inner=count)
    (expected,) = torch.autograd.grad(broken(x).sum(), x)
    (actual,) = torch.autograd.grad(call(x).sum(), x)
    assert torch.equal(actual, expected)
    assert sorted(graphs) == ["backward", "backward", "forward", "forward"]


def test_autocast_inside():
    linear = nn.Linear(4, 4)

    def mixed(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x)
        return y.float() + y

    assert_same(mixed, lambda n: (parameter(3, 4),), fullgraph=True)


def test_autocast_around():
    linear = nn.Linear(4, 4)
    call = compiled(linear)
    x = parameter(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(x).dtype is torch.bfloat16
        assert torch.equal(call(x), linear(x))
    assert torch.equal(call(x), linear(x))


def test_a_checkpointed_region_saves_nothing_of_itself():
    linear = nn.Linear(4, 4)
    saved = []

    def keep(gm, inputs):
        outputs = next(iter(reversed(gm.graph.nodes))).args[0]
        saved.append({str(node.target) for node in outputs})
        return gm

    def region(x):
        return checkpoint(lambda z: linear(z).sin().cos(), x, use_reentrant=False)

    assert_same(region, lambda n: (parameter(3, 4),), inner=(keep, foregrad.nop), fullgraph=True)
    assert not any("sin" in name for names in saved for name in names)


def test_a_custom_function_keeps_its_own_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 * ctx.saved_tensors[0]

    assert_same(lambda x: Twice.apply(x).sin(), lambda n: (parameter(3),), fullgraph=True)


def test_writes_to_inputs_and_buffers():
    norm = nn.BatchNorm1d(4)

    def step(x, y):
        x.add_(y)
        return norm(x) * 2

    twin = copy.deepcopy(norm)
    assert_same(step, lambda n: (torch.randn(3, 4), parameter(3, 4)), calls=2)
    assert not torch.equal(norm.running_mean, twin.running_mean)


def test_memory_shared_only_later_is_noticed():
    """Dynamo guards which arguments are one object, not which share memory."""

    def write(x, y):
        x.add_(1)
        return x * y

    call = compiled(write)
    for shared in (False, True, False, True):
        sides = []
        for run in (write, call):
            whole = torch.arange(10.0)
            other = whole[2:] if shared else torch.ones(8)
            sides.append((run(whole[:8], other), whole))
        assert torch.equal(sides[0][0], sides[1][0]), shared
        assert torch.equal(sides[0][1], sides[1][1]), shared


def once(function):
    """`function` compiled at once for four elements that begin at the second, without guards."""

    class Module(nn.Module):
        def forward(self, x):
            return (function(x),)

    example = torch.arange(12.0)[1:5].requires_grad_()
    call = foregrad.aot_module_simplified(Module(), (example,), foregrad.nop)
    return lambda x: call(x)[0]


@pytest.mark.parametrize("door", [compiled, once])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.detach().as_strided((2,), (1,)).mul_(2),
        lambda x: x[1:3] * 2,
    ],
)
def test_an_input_that_begins_elsewhere_in_its_memory(function, door):
    """Dynamo guards sizes and strides, not where a tensor begins."""
    call = door(function)
    for offset in (2, 3, 0, 3):
        sides = []
        for run in (function, call):
            x = torch.arange(12.0)[offset : offset + 4].requires_grad_()
            out = run(x)
            if out.requires_grad:
                out.sum().backward()
            sides.append((out.tolist(), out.storage_offset(), x.tolist(), x.grad is not None and x.grad.tolist()))
        assert sides[0] == sides[1], offset


def test_without_gradients():
    linear = nn.Linear(4, 4)
    call = compiled(linear)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(call(x), linear(x))
    with torch.inference_mode():
        assert torch.equal(call(x), linear(x))
    assert call(x).requires_grad


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_optimizer(optimizer):
    model = nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    ours = optimizer(twin.parameters(), lr=0.1)
    theirs = optimizer(model.parameters(), lr=0.1)
    step = compiled(ours.step)
    for _ in range(3):
        x = torch.randn(2, 4)
        for side, update in ((model, theirs.step), (twin, step)):
            side.zero_grad()
            side(x).sin().sum().backward()
            update()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_a_backward_inside_the_compiled_function():
    model = nn.Linear(4, 4)
    twin = copy.deepcopy(model)

    def train(module, x):
        loss = module(x).sin().sum()
        loss.backward()
        return loss

    call = compiled(train)
    for _ in range(2):
        x = torch.randn(3, 4)
        assert torch.equal(train(model, x), call(twin, x))
        assert torch.equal(model.weight.grad, twin.weight.grad)


def test_nested_compiles():
    """foregrad inside torch.compile, torch.compile inside foregrad, inside another backend's."""

    def body(x):
        return x.sin() * 2

    x = parameter(3)
    expected = body(x.cos()) + 1
    for inner in (foregrad.compile(body, backend="eager"), compiled(body)):
        for outer in (
            compiled,
            lambda f: foregrad.compile(f, backend="eager"),
            lambda f: torch.compile(f, backend="aot_eager"),
        ):
            torch._dynamo.reset()
            out = outer(lambda x, inner=inner: inner(x.cos()) + 1)(x)
            assert torch.equal(out, expected)
            out.sum().backward()


def test_a_disabled_part_runs_as_it_is():
    @torch.compiler.disable
    def outside(x):
        return x * 2

    assert_same(lambda x: outside(x.sin()).cos(), lambda n: (parameter(3),))


def test_dropout_draws_eagers_numbers():
    assert_same(lambda x: nn.functional.dropout(x, 0.5), lambda n: (parameter(5, 5),), fullgraph=True)


def test_outputs_that_are_inputs_and_views():
    assert_same(lambda x: (x, x.view(-1), x.sin(), 3), lambda n: (parameter(3, 4),), slack=1e-6)


def test_an_lstm():
    module = nn.LSTM(4, 4, 2)
    assert_same(lambda x: module(x)[0], lambda n: (parameter(3, 2, 4),))


def test_parameters_are_known_as_such():
    roles = []

    def keep(gm, inputs):
        roles.append(role_of(gm))
        return gm

    linear = nn.Linear(4, 4)
    compiled(lambda x: linear(x), inner=keep)(parameter(2, 4)).sum().backward()
    assert roles[0].phase == "forward"
    assert len(roles[0].static_inputs) == 2
    assert roles[0].visible_outputs[0] == 0  # the others are inputs that are saved
    assert roles[1].phase == "backward"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"options": {"bakend": "eager"}}, r"no option `bakend`. Did you mean `backend`"),
        ({"options": {"backend": "inducter"}}, r"no backend called `inducter`. Did you mean `inductor`"),
        ({"mode": "max-speed"}, r"no mode `max-speed`"),
        ({"options": {"backend": "eager", "inductor": {"max_autotune": True}}}, r"settings of Inductor"),
        ({"options": {"partition": "least"}}, r"no partition policy `least`"),
    ],
)
def test_wrong_options_are_named(kwargs, message):
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend="foregrad", **kwargs)(torch.ones(2))
