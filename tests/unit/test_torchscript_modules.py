"""Scripted and traced modules in a compiled function: trained for some steps, with eager PyTorch as the oracle.

Their state and attributes are C++'s. A plan of TorchScript's differentiates by formulas of its own, whose last bits
differ: bit for bit, compiled results are those of the module before it was scripted.
"""

import io

import pytest
import torch
from torch import Tensor, nn

import foregrad
from foregrad.errors import UnsupportedOpError, UnsupportedSideEffectError

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


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell(3, 3, 2, batch_first=True)

    def forward(self, x: Tensor):
        return self.cell(x.unsqueeze(0))[0].squeeze(0)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(3, 1, 5, 0.1, batch_first=True)

    def forward(self, x: Tensor):
        return self.layer(x.unsqueeze(0)).squeeze(0)


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor):
        return self.dropout(self.linear(x)) + torch.randn(3)


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "normalized": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 3)),
    "convolved": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(6, 3)
    ),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attends": Attends,
    "draws": Draws,
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


def trained(kind, model, use, door, has_plan):
    """All that three steps of training, in training mode and out of it, leave."""
    torch.manual_seed(0)
    inner = MODELS[model]() if kind is None else KINDS[kind](MODELS[model]())
    if has_plan:
        state = {name: value.clone() for name, value in inner.state_dict().items()}
        for _ in range(4):
            inner(torch.randn(2, 3))
        inner.load_state_dict(state)
    if use == "argument":
        whole, compiled = inner, door(lambda x, module: module(x) + x)
        run = lambda x: compiled(x, inner)
    else:
        whole = Holder(inner) if use == "part" else inner
        run = door((lambda x: inner(x) * 2) if use == "closure" else whole)
    torch.manual_seed(1)
    results = []
    parameters = [p for p in whole.parameters() if p.requires_grad]
    for step in range(4):
        if kind is None or "frozen" not in kind:
            whole.train(step != 2)
        x = torch.randn(2, 3, requires_grad=True)
        y = run(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)
        results += [y.detach(), *gradients]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients[1:], strict=True):
                parameter.sub_(0.01 * gradient)
    return [*results, *whole.state_dict().values(), torch.get_rng_state()]


def directly(function):
    return foregrad.compile(function, backend="eager")


def through_dynamo(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


FAILING_IN_EAGER = [("frozen", "attends"), ("frozen_trace", "writes")]


USES = [("itself", False), ("closure", True), ("part", False), ("argument", True)]
# Each kind of each model in one use, each scripted model in all of them.
TRAINED = [
    (kind, model, *use)
    for number, kind in enumerate(KINDS)
    for at, model in enumerate(MODELS, number)
    for use in (USES if kind == "scripted" else [USES[at % len(USES)]])
]


@pytest.mark.parametrize(("kind", "model", "use", "has_plan"), TRAINED)
def test_trained_as_in_eager(kind, model, use, has_plan):
    if (kind, model) in FAILING_IN_EAGER:
        pytest.skip("TorchScript fails on it")
    with torch.jit.optimized_execution("frozen" in kind):  # a plan draws other numbers; frozen modules need one
        eager = trained(kind, model, use, lambda f: f, has_plan)
    torch.testing.assert_close(trained(kind, model, use, directly, has_plan), eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_plan", [False, True], ids=["fresh", "profiled"])
@pytest.mark.parametrize("model", MODELS)
def test_bit_for_bit_as_before_scripting(model, has_plan):
    eager = trained(None, model, "closure", lambda f: f, False)
    ours = trained("scripted", model, "closure", directly, has_plan)
    torch.testing.assert_close(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize("model", ["linear", "reads", "writes", "calls"])
def test_trained_as_in_eager_under_torch_compile(model):
    eager = trained("scripted", model, "closure", lambda f: f, False)
    torch.testing.assert_close(trained("scripted", model, "closure", through_dynamo, False), eager)


def test_attributes_that_change_are_noticed():
    scripted = torch.jit.script(Reads())
    compiled = foregrad.compile(lambda x: scripted(x) * scripted.k, backend="eager")
    plain = foregrad.compile(lambda x: x * scripted.k + scripted.training, backend="eager")
    x = torch.ones(2, 3)

    def change(name, value):
        setattr(scripted, name, value)

    changes = [("k", 4.0), ("numbers", [2.0, 3.0]), ("named", {"a": 1.0}), ("perhaps", 2.0), ("pair", (1, 1.5))]
    changes += [("held", torch.ones(3)), ("tensors", [torch.ones(3)]), ("training", False)]
    for name, value in [("k", 2.5), *changes]:
        change(name, value)
        assert torch.equal(compiled(x), scripted(x) * scripted.k)
        assert torch.equal(plain(x), x * scripted.k + scripted.training)


@torch.jit.interface
class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class HasInterface(nn.Module):
    layer: Layer

    def __init__(self):
        super().__init__()
        self.layer = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.forward(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor):
        self.count += 1
        return x * self.count


class Grows(nn.Module):
    numbers: list[float]

    def __init__(self):
        super().__init__()
        self.numbers = [1.0]

    def forward(self, x: Tensor):
        self.numbers.append(2.0)
        return x * len(self.numbers)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (HasInterface, UnsupportedOpError, "whose code is unknown"),
        (Counts, UnsupportedSideEffectError, "sets its attribute `count`"),
        (Grows, UnsupportedOpError, "reads its attribute `numbers`"),
    ],
)
def test_refused_by_name(model, error, says):
    scripted = torch.jit.script(model())
    with pytest.raises(error, match=says):
        foregrad.capture(lambda x: scripted(x), torch.ones(3))
