"""torch.func inside a compiled function, over a module's parameters and other tensors that the function reaches."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn import functional as F

import foregrad
from tests.parity.oracle import check


def data():
    return torch.randn(5, 3), torch.randn(5, 2), torch.randn(5, 3), torch.randn(5, 2)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def with_dropout():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Linear(4, 2))


class Using(nn.Module):
    """A module whose forward is `function(net, *args)`: the oracle copies its parameters for each side."""

    def __init__(self, net, function):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, *args):
        return self.function(self.net, *args)


def loss(net):
    return lambda params, x, y: F.mse_loss(functional_call(net, params, (x,)), y)


def maml(net, x, y, later_x, later_y, *, steps=2, first_order=False):
    params = dict(net.named_parameters())
    for _ in range(steps):
        gradients = grad(loss(net))(params, x, y)
        if first_order:
            gradients = {key: value.detach() for key, value in gradients.items()}
        params = {key: value - 0.1 * gradients[key] for key, value in params.items()}
    return loss(net)(params, later_x, later_y)


def maml_over_tasks(net, x, y, later_x, later_y):
    tasks = [torch.stack([t, t * 2]) for t in (x, y, later_x, later_y)]
    return vmap(lambda *task: maml(net, *task, steps=1))(*tasks).mean()


def by_example(net, x, y, *_, randomness="error"):
    def one(params, x, y):
        return loss(net)(params, x[None], y[None])

    return vmap(grad(one), in_dims=(None, 0, 0), randomness=randomness)(dict(net.named_parameters()), x, y)


def of_params(net):
    return dict(net.named_parameters())


PROGRAMS = {
    "maml": maml,
    "maml of the first order": lambda net, *args: maml(net, *args, first_order=True),
    "maml over tasks": maml_over_tasks,
    "gradients by example": by_example,
    "a gradient": lambda net, x, y, *_: grad(loss(net))(of_params(net), x, y),
    "a gradient and a value": lambda net, x, y, *_: grad_and_value(loss(net))(of_params(net), x, y),
    "by an argument": lambda net, x, *_: grad(lambda x: net(x).sum())(x),
    "twice": lambda net, x, *_: grad(lambda x: grad(lambda x: net(x).sin().sum())(x).pow(2).sum())(x),
    "closed over": lambda net, x, *_: grad(lambda x: (x @ net[0].weight.t()).sum() * net[2].bias.sum())(x),
    "vmap of a module": lambda net, x, *_: vmap(net)(x),
    "a Jacobian": lambda net, x, *_: jacrev(lambda p: functional_call(net, p, (x,)))(of_params(net)),
    "forward mode": lambda net, x, *_: jacfwd(net)(x),
    "a Hessian": lambda net, x, *_: hessian(lambda x: net(x).pow(2).sum())(x),
    "vjp": lambda net, x, y, *_: vjp(lambda p: functional_call(net, p, (x,)), of_params(net))[1](y),
    "jvp": lambda net, x, *_: jvp(
        lambda p: functional_call(net, p, (x,)),
        (of_params(net),),
        ({key: torch.ones_like(value) for key, value in net.named_parameters()},),
    ),
    "norms": lambda net, *_: grad(lambda p: sum(value.norm() for value in p.values()))(of_params(net)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_transform_of_parameters(name):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", foregrad.errors.ForegradWarning)
        check(Using(network(), PROGRAMS[name]), data)


@pytest.mark.parametrize("name", ["maml", "by example"])
def test_random_numbers_in_a_transform(name):
    torch.manual_seed(0)
    function = maml if name == "maml" else lambda *args: by_example(*args, randomness="different")
    check(Using(with_dropout(), function), data)


class Ensemble(nn.Module):
    def __init__(self, *, stacked_before):
        super().__init__()
        self.nets = nn.ModuleList(network() for _ in range(3))
        self.state = stack_module_state(list(self.nets)) if stacked_before else None

    def forward(self, x, *_):
        params, buffers = self.state or stack_module_state(list(self.nets))
        return vmap(lambda p, b, x: functional_call(self.nets[0], (p, b), (x,)), in_dims=(0, 0, None))(
            params, buffers, x
        )


@pytest.mark.parametrize("stacked_before", [True, False])
def test_an_ensemble(stacked_before):
    torch.manual_seed(0)
    module = Ensemble(stacked_before=stacked_before)
    compiled = foregrad.compile(module, backend="eager")
    leaves = list(module.state[0].values() if stacked_before else module.parameters())
    for _ in range(2):
        x, *_ = data()
        found = []
        for side in (module, compiled):
            out = side(x)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
        for eager, ours in zip(*found, strict=True):
            assert (eager is ours is None) or torch.equal(eager, ours)
