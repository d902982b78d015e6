"""Scripted and traced modules in a compiled function run eagerly by name, or in an eager region of its graph.

They are trained for some steps, with eager PyTorch as the oracle.
"""

import io
import warnings

import pytest
import torch
from torch import Tensor, nn

import foregrad
from foregrad.errors import UnsupportedOpError
from tests.covering import each

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Reads(nn.Module):
    """Attributes that are no tensors, some of them with tensors in them."""

    numbers: list[float]
    named: dict[str, float]
    perhaps: float | None

    def __init__(self):
        super().__init__()
        self.k, self.pair, self.numbers, self.named, self.perhaps = 2.5, (2, 0.5), [1.0, 2.0], {"a": 3.0}, None
        self.weight, self.held = nn.Parameter(torch.full((3,), 2.0)), torch.ones(3) * 2
        self.tensors = [torch.ones(3), torch.ones(3) * 3]

    def forward(self, x: Tensor):
        for number in self.numbers:
            x = x * number * self.weight + self.named["a"]
        for tensor in self.tensors:
            x = x + tensor
        perhaps = self.perhaps
        if perhaps is not None:
            x = x * perhaps
        return x * self.k + self.pair[1] * self.held + self.pair[0]


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor):
        with torch.no_grad():
            self.mean.add_(x.detach().sum(0)).mul_(0.5)
        return x * self.weight + self.mean


class Calls(nn.Module):
    """Methods that call methods, submodules, and two at a time."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.again = self.layers[0]

    def forward(self, x: Tensor):
        waited = torch.jit.fork(self.again, x)
        for layer in self.layers:
            x = self.helper(layer(x))
        return self.helper(x) + torch.jit.wait(waited)

    def helper(self, x: Tensor):
        return self.again(x).tanh()


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "reads": Reads,
    "writes": Writes,
    "calls": Calls,
}


def saved(module):
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def traced(module):
    return torch.jit.trace(module, torch.ones(2, 3), check_trace=False)


KINDS = {
    "scripted": torch.jit.script,
    "traced": traced,
    "frozen": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
    "frozen_trace": lambda module: torch.jit.freeze(traced(module.eval())),
    "loaded": lambda module: saved(torch.jit.script(module)),
    "loaded_trace": lambda module: saved(traced(module)),
}


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.inner(x * self.scale).cos()


def trained(kind, model, use, door):
    """All that three steps of training, in training mode and out of it, leave; and what was called."""
    torch.manual_seed(0)
    inner = KINDS[kind](MODELS[model]())
    if use == "argument":
        whole, compiled = inner, door(lambda x, module: module(x) + x)
        run = lambda x: compiled(x, inner)
    elif use == "region":
        region = foregrad.eager_region(lambda x: inner(x))
        whole = inner
        run = compiled = door(lambda x: region(x * 2).cos())
    else:
        whole = Holder(inner) if use == "part" else inner
        run = compiled = door((lambda x: inner(x) * 2) if use == "closure" else whole)
    torch.manual_seed(1)
    results = []
    parameters = [p for p in whole.parameters() if p.requires_grad]
    for step in range(4):
        if "frozen" not in kind:
            whole.train(step != 2)
        x = torch.randn(2, 3, requires_grad=True)
        y = run(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)
        results += [y.detach(), *gradients]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients[1:], strict=True):
                parameter.sub_(0.01 * gradient)
    return [*results, *whole.state_dict().values(), torch.get_rng_state()], compiled


def directly(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


def through_dynamo(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


USES = ["itself", "closure", "part", "argument"]


WAYS = [*((kind, "closure") for kind in KINDS), *(("scripted", use) for use in USES)]


@pytest.mark.parametrize(("way", "model"), each(WAYS, ["linear", "reads", "calls"], times=2))
def test_a_module_of_torchscript_is_trained_eagerly_by_name(way, model):
    kind, use = way
    expected, _ = trained(kind, model, use, lambda f: f)
    named = (
        r"(?s)TorchScript; a capture can't look inside.*test_torchscript_modules.py"
        if use != "itself"
        else "TorchScript"
    )
    with pytest.warns(foregrad.errors.ForegradWarning, match=named):
        found, call = trained(kind, model, use, directly)
    torch.testing.assert_close(found, expected)
    assert foregrad.explain_recompiles(call).eager_calls == 4


@pytest.mark.parametrize("model", ["linear", "writes", "calls"])
@pytest.mark.parametrize("kind", ["scripted", "traced", "loaded"])
def test_an_eager_region_round_it_is_a_part_of_a_graph(kind, model):
    expected, _ = trained(kind, model, "region", lambda f: f)
    with warnings.catch_warnings():
        warnings.simplefilter("error", foregrad.errors.ForegradWarning)
        found, call = trained(kind, model, "region", directly)
    torch.testing.assert_close(found, expected)
    assert foregrad.explain_recompiles(call).eager_calls == 0


@pytest.mark.parametrize("model", MODELS)
def test_trained_as_in_eager_under_torch_compile(model):
    expected, _ = trained("scripted", model, "closure", lambda f: f)
    torch.testing.assert_close(trained("scripted", model, "closure", through_dynamo)[0], expected)


SCRIPTED = torch.jit.script(Reads())
USED = {
    "called": lambda x: SCRIPTED(x),
    "its method": lambda x: SCRIPTED.forward(x),
    "an attribute": lambda x: x * SCRIPTED.k,
    "a weight": lambda x: x * SCRIPTED.weight,
    "all weights": lambda x: x * sum(p.sum() for p in SCRIPTED.parameters()),
    "its mode": lambda x: x * SCRIPTED.training,
}


@pytest.mark.parametrize("use", USED)
def test_what_a_function_uses_of_such_a_module_is_refused_by_name(use):
    with pytest.raises(UnsupportedOpError, match="a capture can't look inside"):
        foregrad.capture(USED[use], torch.ones(2, 3))


def test_that_a_module_is_of_torchscript_may_be_asked():
    compiled = foregrad.compile(lambda x: x * (2 if isinstance(SCRIPTED, nn.Linear) else 3), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert foregrad.explain_recompiles(compiled).eager_calls == 0
