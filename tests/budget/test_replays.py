"""Random operators run again from the saved state of their generator, and draw the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from tests.parity.peak import peak_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
        self.first, self.second = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.second(self.narrow(self.first(nn.functional.gelu(self.wide(x)))))


def blocks():
    module = nn.Sequential(*(Block() for _ in range(4)))
    return module, lambda x: module(x).square().mean()


def noisy():
    """Several random operators, one of them read by nothing that the backward wants."""
    module = nn.Linear(32, 32)

    def f(x):
        for _ in range(4):
            noise = torch.randn_like(x)
            x = module(x) * noise + torch.rand(x.shape) * x.sin() + torch.randperm(8)[0]
        return x.square().mean()

    return module, f


def attention():
    module = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    return module, lambda x: module(x.unflatten(0, (16, 32))).square().mean()


PROGRAMS = {"blocks": blocks, "noisy": noisy, "attention": attention}


def built(name):
    torch.manual_seed(0)
    return *PROGRAMS[name](), torch.randn(512, 32)


def results(module, f, x):
    """The loss, the gradients, what the generator gives between forward and backward and after."""
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(5)
    loss = f(x)
    between = torch.rand(3)
    loss.backward()
    return [loss.detach(), between, torch.rand(3), *(parameter.grad for parameter in module.parameters())]


def random_again(parts):
    return [one for one in parts.report().recomputed if "bernoulli" in one.op or "rand" in one.op]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("fraction", [0.3, 0.0])
def test_results_are_eagers_bit_for_bit_and_the_peak_is_the_predicted_one(name, fraction):
    module, f, x = built(name)
    expected = results(module, f, x)
    parts = foregrad.partition(foregrad.capture(f, x), memory_budget=fraction)
    assert random_again(parts)
    peak = parts.report().peak
    compiled = foregrad.compile(f, backend="eager", memory_budget=peak)
    for _ in range(2):
        assert all(map(torch.equal, expected, results(module, compiled, x)))

    def step():
        for parameter in module.parameters():
            parameter.grad = None
        compiled(x).backward()
        for parameter in module.parameters():
            parameter.grad = None

    for parameter in module.parameters():
        parameter.grad = None
    assert peak_of(step) <= peak


def test_the_masks_of_dropout_need_not_be_kept():
    """Each is as large as what it is for; without them the least peak is that of the other values."""
    _, f, x = built("blocks")
    joint = foregrad.capture(f, x)
    least = foregrad.partition(joint, memory_budget=0.0).report().peak
    arguments = (joint.module, None)
    kept = foregrad.budget_partition(*arguments, num_fwd_outputs=joint.signature.num_forward_outputs, memory_budget=0.0)
    assert least < 0.7 * kept[0].meta["memory_budget"].least


def test_a_second_backward_draws_the_same_once_more():
    module, f, x = built("blocks")
    compiled = foregrad.compile(f, backend="eager", memory_budget=0.0)
    torch.manual_seed(5)
    loss = compiled(x)
    first = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    torch.rand(7)
    again = torch.autograd.grad(loss, list(module.parameters()))
    assert all(map(torch.equal, first, again))


class TwoResults(nn.Module):
    """A loss and what nobody differentiates, as the models of transformers return them; a row of layers with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).relu(), 0.3)
        return x.square().mean(), x


@pytest.mark.parametrize("wanted", ["all", "one"])
def test_backwards_of_some_outputs_or_inputs_draw_the_same(wanted):
    """They are graphs of their own, cut down to what is asked for; the way back to the generator's state is in them."""
    module, x = TwoResults(), torch.randn(256, 64)
    parameters = list(module.parameters())[: None if wanted == "all" else 2]

    def gradients(call):
        torch.manual_seed(3)
        loss, _ = call(x)
        found = torch.autograd.grad(loss, parameters)
        return [*found, torch.rand(3)]

    compiled = foregrad.compile(module, backend="eager", memory_budget=0.0)
    parts = foregrad.partition(foregrad.capture(module, x), memory_budget=0.0)
    assert random_again(parts)
    assert all(map(torch.equal, gradients(module), gradients(compiled)))
    if wanted == "all":  # states too are given up when what draws from them runs
        assert peak_of(lambda: gradients(compiled)) <= parts.report().peak


def test_a_second_derivative_wants_random_results_saved():
    """What it needs is not there otherwise, and the error says so."""
    x = torch.randn(512, 32, requires_grad=True)

    def f(x):
        for _ in range(3):
            x = nn.functional.dropout(x.sin(), 0.3) * 2
        return x.sum()

    def second(call):
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad(call(x), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    saving = foregrad.compile(f, backend="eager", memory_budget=foregrad.Budget(0.0, replay=False))
    torch.testing.assert_close(second(saving), second(f))
    with pytest.raises(foregrad.errors.UnsupportedError, match="random number"):
        second(foregrad.compile(f, backend="eager", memory_budget=0.0))


def test_an_operator_with_a_generator_of_its_own_runs_once():
    generator = torch.Generator()

    def f(x):
        for _ in range(3):
            x = x.sin() * torch.rand(x.shape, generator=generator)
        return x.sum()

    joint = foregrad.capture(f, torch.randn(512, 32, requires_grad=True))
    assert not random_again(foregrad.partition(joint, memory_budget=0.0))


def test_a_compiler_that_may_change_the_order_gets_no_replays():
    _, f, x = built("blocks")
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph

    foregrad.compile(f, backend=(keep, keep), memory_budget=0.0)(x).backward()
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("random" in target and target.startswith("foregrad") for target in targets)


def test_what_a_selective_policy_must_save_is_not_drawn_again():
    x = torch.randn(512, 32, requires_grad=True)
    joint = foregrad.capture(lambda x: nn.functional.dropout(x.sin(), 0.5).sin().sum(), x)
    parts = foregrad.partition(joint, foregrad.everything_saveable, memory_budget=1.0)
    assert not random_again(parts)
