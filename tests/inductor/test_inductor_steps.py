"""With Inductor a whole training step is one graph that writes to parameters and the optimizer's state by itself."""

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch.memory import _peak

pytest.importorskip("torch._inductor")

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
OF_LISTS = {  # what optimizers do by default on a GPU
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "NAdam, foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "Adadelta, foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def trained(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(256, 256, bias=False), nn.ReLU())])
    made = (OPTIMIZERS | OF_LISTS)[optimizer](model.parameters())
    x = torch.randn(2, 256)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        return loss.detach()

    return step, model, made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_written_by_the_graph(optimizer):
    step, model, made = trained(optimizer)
    compiled_step, ours, our_state = trained(optimizer)
    call = foregrad.compile(compiled_step, backend="inductor", on_unsupported="raise")
    for _ in range(5):
        torch.testing.assert_close(call(), step())
    torch.testing.assert_close([*ours.parameters()], [*model.parameters()])
    torch.testing.assert_close(our_state.state_dict()["state"], made.state_dict()["state"])
    assert _peak(call) < _peak(step) + 4096
    specialization = call.foregrad.specializations[-1]
    written = len(specialization.product.compiled.forward.updated)
    assert written == sum(value.ndim > 0 for state in made.state.values() for value in state.values()) + 3
    assert specialization.source().count(".copy_(") == (3 if optimizer == "AdamW" else 0)  # the steps


def test_gradients_go_one_after_the_other():
    """Where the activations of the backward and the gradients are as large as one another, neither are held together."""
    peaks = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())])
        made, x = OPTIMIZERS["SGD"](model.parameters()), torch.randn(32, 64)

        @foregrad.compile(backend=backend)
        def step(model=model, made=made, x=x):
            model(x).square().mean().backward()
            made.step()
            made.zero_grad()

        for _ in range(3):
            step()
        peaks.append(_peak(step))
    assert peaks[1] < peaks[0] + 3 * model[0].weight.nbytes


def crossed(read):
    """A step on two tensors with a loss that is not compiled; what the step reads after it, `read` gets."""

    def step(p, x):
        weight = nn.functional.binary_cross_entropy(x.sigmoid(), (x > 0).float())
        out = read(p, (x * weight).sigmoid())
        p.mul_(0.5)
        return out

    return step


def swapped(a, b):
    before = a.clone()
    a.copy_(b)
    b.copy_(before)
    return (a + b).sum()


def moved_on(a, b):
    before = a.clone()
    a.mul_(2)
    b.copy_(before)
    return b.sum()


READERS = {
    "not compiled": crossed(nn.functional.binary_cross_entropy),
    "compiled": crossed(torch.mul),
    "swapped": swapped,
    "moved on": moved_on,
}


@pytest.mark.parametrize("step", READERS.values(), ids=READERS)
def test_a_value_is_read_before_it_is_written(step):
    torch.manual_seed(0)
    inputs = torch.rand(4, 4), torch.rand(4, 4)
    copies = [value.clone() for value in inputs]
    call = foregrad.compile(step, backend="inductor", on_unsupported="raise")
    for _ in range(2):
        torch.testing.assert_close(call(*copies), step(*inputs))
        torch.testing.assert_close(copies, [*inputs])


def test_updates_behind_a_loss_that_is_not_compiled():
    """They may be all that a part of the graph does, which then has no results."""
    weights = []
    for wrap in (lambda step: step, foregrad.compile(backend="inductor", on_unsupported="raise")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Sigmoid())
        made, x, y = OPTIMIZERS["AdamW"](model.parameters()), torch.randn(8, 8), torch.rand(8, 1)

        def step(model=model, made=made, x=x, y=y):
            loss = nn.functional.binary_cross_entropy(model(x), y)
            loss.backward()
            made.step()
            made.zero_grad()
            return loss.detach()

        call = wrap(step)
        for _ in range(4):
            call()
        weights.append([*model.parameters()])
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("optimizer", ["AdamW", *OF_LISTS])
def test_numbers_of_the_optimizer_cut_the_graph_nowhere(optimizer, monkeypatch):
    from foregrad.inductor import backend

    compiled, compile_segment = [], backend._compile_segment

    def counting(gm, *rest):
        compiled.append(gm)
        return compile_segment(gm, *rest)

    monkeypatch.setattr(backend, "_compile_segment", counting)
    step, model, _ = trained(optimizer)
    compiled_step, ours, _ = trained(optimizer)
    call = foregrad.compile(compiled_step, backend="inductor", on_unsupported="raise")
    for _ in range(4):
        torch.testing.assert_close(call(), step())
    torch.testing.assert_close([*ours.parameters()], [*model.parameters()])
    assert len(compiled) <= 1  # none where the graph is whole
    assert len(call.foregrad.specializations) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_are_taken_as_eager_takes_them(dtype):
    count = torch.tensor(3.0)
    x = torch.linspace(1, 2, 8).to(dtype)

    def function(x):
        number = 0.9 ** count.item()
        once = x.detach().clone()
        once.addcdiv_(x, x + 1, value=-number)
        return x / number, x * number + once, x.sum() * number, once.add(x, alpha=number)

    call = foregrad.compile(function, backend="inductor", on_unsupported="raise")
    for value in (3.0, 5.0):
        count.fill_(value)
        torch.testing.assert_close(call(x), function(x))
        assert [a.dtype for a in call(x)] == [a.dtype for a in function(x)]


def test_versions_move_as_in_eager():
    """Inductor's kernels move none: autograd would not notice that a saved tensor was written."""
    weight = torch.ones(64)

    @foregrad.compile(backend="inductor", on_unsupported="raise")
    def step(x):
        weight.add_(x)
        return x * 2

    other = torch.ones(64, requires_grad=True)
    saved = (other * weight).sum()
    step(torch.ones(64))
    assert weight._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_an_error_in_the_middle_says_that_updates_may_have_been_made():
    first, second = torch.ones(4), torch.ones(4)

    @torch.library.custom_op("foregrad_tests::raising", mutates_args=())
    def raising(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 10:
            raise ValueError("too large")
        return x.clone()

    raising.register_fake(torch.empty_like)

    @foregrad.compile(backend="inductor", on_unsupported="raise")
    def step(x):
        first.add_(x)
        second.add_(raising(x))

    step(torch.ones(4))
    with pytest.raises(ValueError, match="too large") as caught:
        step(torch.full((4,), 5.0))
    (note,) = caught.value.__notes__
    assert "up to 2 writes to parameters" in note
    assert second.tolist() == [2.0] * 4


def test_versions_move_behind_dynamo():
    weight = torch.ones(64)

    @torch.compile(backend="foregrad", options={"backend": "inductor"})
    def step(x):
        weight.add_(x)
        return x * 2

    for _ in range(2):
        step(torch.ones(64))
    assert weight._version == 2
