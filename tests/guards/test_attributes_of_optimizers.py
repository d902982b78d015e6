"""Of an optimizer a graph depends on the attributes that the code which ran reads: not on moments and histories."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foregrad
from foregrad.tracing import capture


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


X, Y = torch.randn(16, 3), torch.randn(16, 1)


def trained(compile, make, steps=12):
    model = model_of()
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        return loss

    closure = compile(closure)
    losses = [optimizer.step(closure).detach() for _ in range(steps)]
    return [*losses, *(p.detach() for p in model.parameters())], closure


MAKES = {
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=4),
    "LBFGS with a line search": lambda ps: torch.optim.LBFGS(ps, max_iter=4, line_search_fn="strong_wolfe"),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_closure_with_zero_grad_has_one_graph(name):
    expected, _ = trained(lambda f: f, MAKES[name])
    found, closure = trained(lambda f: foregrad.compile(f, backend="eager", on_unsupported="raise"), MAKES[name])
    assert all(map(torch.equal, found, expected))
    assert len(closure.foregrad.compilations) == 1, "with gradients from before, and without"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_behind_dynamo_lbfgs_is_eagers():
    torch._dynamo.reset()
    expected, _ = trained(lambda f: f, MAKES["LBFGS"], steps=4)
    found, _ = trained(
        lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}), MAKES["LBFGS"], steps=4
    )
    assert all(map(torch.equal, found, expected))


MODEL = model_of()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.5, momentum=0.9)
STATE_OF, NAMES = operator.attrgetter("state"), ["state"]


def by_its_name(x):
    return x * OPTIMIZER.state["scale"]


def by_a_getter_from_outside(x):
    return x * STATE_OF(OPTIMIZER)["scale"]


def by_its_table(x):
    return x * vars(OPTIMIZER)["state"]["scale"]


def by_a_name_made_up(x):
    return x * getattr(OPTIMIZER, NAMES[0])["scale"]


def by_a_method(x):
    return x * OPTIMIZER.state_dict()["state"]["scale"]


def after_zero_grad(x):
    OPTIMIZER.zero_grad()
    return x * OPTIMIZER.state["scale"] * OPTIMIZER.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "function", [by_its_name, by_a_getter_from_outside, by_its_table, by_a_name_made_up, by_a_method, after_zero_grad]
)
def test_state_that_is_read_is_guarded(function):
    OPTIMIZER.state.clear()
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    for scale in (2.0, 3.0, 3.0, 5.0):
        OPTIMIZER.state["scale"] = scale
        assert torch.equal(compiled(torch.ones(2)), function(torch.ones(2)))


def test_an_option_that_zero_grad_reads_is_guarded():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()

    compiled = foregrad.compile(step, backend="eager", on_unsupported="raise")
    for frozen in (False, False, True):
        if frozen:
            optimizer.param_groups[0]["params"] = list(model.parameters())[:2]  # gradients of the rest add up
        compiled()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.mse_loss(model(X), Y).backward()
    assert torch.equal(gradients[0], model[0].weight.grad)
    assert torch.equal(gradients[2], 2 * model[2].weight.grad)


def test_lbfgs_inside_a_function_is_not_captured_again_once_its_history_is_full(monkeypatch):
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=3)

    def step():
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(X), Y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    compiled = foregrad.compile(step, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"call the `step\(closure\)` of LBFGS outside"):
        for _ in range(4):
            compiled()
    monkeypatch.setattr(capture, "capture_call", None)  # is not called
    for _ in range(4):
        compiled()
    assert not compiled.foregrad.compilations
