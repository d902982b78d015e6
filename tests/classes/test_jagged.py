"""Jagged nested tensors: one graph serves every batch, and what it gives is what eager gives, metadata too."""

import pytest
import torch
import torch.nn.functional as F

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedTensorError


def jagged(seed, batch=3, *, grad=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (batch,), generator=generator).tolist()
    rows = [torch.randn(length, 8, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


def narrowed(seed):
    rows = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(seed))
    lengths = torch.tensor([2, 3, 2 + seed % 2])
    return torch.nested.narrow(rows, 1, torch.tensor([0, 1, 2]), lengths, layout=torch.jagged)


def described(value):
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    about = [type(value), value.requires_grad, value.is_leaf]
    if value.is_nested:
        names, context = value.__tensor_flatten__()
        return [*about, names, context, *(described(getattr(value, name).detach()) for name in names)]
    return [*about, value.shape, value.stride(), value.tolist()]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.out, self.norm = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.out(F.gelu(self.inside(x))))


class Attention(torch.nn.Module):
    """One block of a transformer. On a CPU PyTorch attends by making nested tensors of another kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside = torch.nn.ModuleList(torch.nn.Linear(8, 16) for _ in range(3))
        self.out, self.model = torch.nn.Linear(16, 8), Model()

    def forward(self, x):
        query, key, value = (inside(x).unflatten(-1, [2, 8]).transpose(1, 2) for inside in self.inside)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.model(x + self.out(attended.transpose(1, 2).flatten(-2)))


linear = torch.nn.Linear(8, 16)

PROGRAMS = {
    "pointwise": (lambda x: x * 2 + x.sin(), jagged),
    "with_gradients": (lambda x: linear(x).relu(), lambda seed: jagged(seed, grad=True)),
    "other_batches": (lambda x: linear(x).relu(), lambda seed: jagged(seed, 2 + seed, grad=True)),
    "values": (lambda x: linear(x).relu().values().sum(), lambda seed: jagged(seed, grad=True)),
    "heads": (lambda x: linear(x).unflatten(-1, [2, 8]).transpose(1, 2), lambda seed: jagged(seed, grad=True)),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), lambda seed: jagged(seed, grad=True)),
    "softmax": (lambda x: torch.softmax(x, -1), lambda seed: jagged(seed, grad=True)),
    "sum": (lambda x: (x.sum(dim=1), x.mean(dim=1)), jagged),
    "padded": (lambda x: x.to_padded_tensor(0.0), lambda seed: jagged(seed, grad=True)),
    "matmul": (lambda x: x @ torch.ones(8, 4), lambda seed: jagged(seed, grad=True)),
    "itself": (lambda x: (x, x * 2), lambda seed: jagged(seed, grad=True)),
    "detached": (lambda x: x.detach() * 2, lambda seed: jagged(seed, grad=True)),
    "written": (lambda x: x.mul_(2) + 1, jagged),
    "with_lengths": (lambda x: x * 2, narrowed),
    "one_of_its_values": (lambda x: x.values() * 2, lambda seed: jagged(seed, grad=True)),
    "largest": (lambda x: x.amax(1), lambda seed: jagged(seed, grad=True)),
    "made_of_its_values": (
        lambda x: torch.nested.nested_tensor_from_jagged(linear(x.values()), x.offsets()),
        lambda seed: jagged(seed, grad=True),
    ),
    "made_of_a_list": (
        lambda x: torch.nested.as_nested_tensor([row.sin() for row in x.unbind()], layout=torch.jagged),
        lambda seed: jagged(seed, grad=True),
    ),
    "batched_matmul": (lambda x: x @ torch.ones(3, 8, 8), lambda seed: jagged(seed, grad=True)),
    "made_inside": (
        lambda values, offsets: torch.nested.nested_tensor_from_jagged(values, offsets) * 2,
        lambda seed: torch.arange(3.0 * (5 + seed)).view(-1, 3).requires_grad_(),
        lambda seed: torch.tensor([0, 2, 5 + seed]),
    ),
}


def found(call, makers, seed):
    linear.zero_grad()
    args = [make(seed) for make in makers]
    result = call(*args)
    results = result if isinstance(result, tuple) else (result,)
    losses = [(r.values() if r.is_nested else r).sum() for r in results if r.requires_grad]
    if losses:
        sum(losses).backward()
    ragged = [r.shape == a.shape for r in results for a in args if r.is_nested and a.is_nested]
    offsets = [r._offsets is a._offsets for r in results for a in args if r.is_nested and a.is_nested]
    gradients = [described(t.grad) for t in (*args, *linear.parameters()) if t.is_leaf]
    return described(result), gradients, described(args), ragged, offsets


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_serves_every_batch(name):
    f, *makers = PROGRAMS[name]
    fast = foregrad.compile(f, backend="eager", on_unsupported="raise")
    for seed in range(5):
        assert found(fast, makers, seed) == found(f, makers, seed)
    # How many rows a batch has, and plain tensors, become symbolic when they are found to vary; a list of the rows has
    # all their lengths in it.
    several = {"other_batches": 2, "made_inside": 2, "made_of_a_list": 5}
    assert len(fast.foregrad.specializations) <= several.get(name, 1)


def test_two_of_the_same_offsets_are_told_from_two_of_others():
    def f(x, y):
        return x * y if x.shape == y.shape else y * 3

    fast = foregrad.compile(f, backend="eager", on_unsupported="raise")
    x, other = jagged(1), jagged(2)
    for y in (x * 2, other, x * 2):
        assert described(fast(x, y)) == described(f(x, y))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("make", "through_dynamo"), [(Model, False), (Model, True), (Attention, False)])
def test_training(make, through_dynamo):
    def trained(compiled):
        model = make()
        call = compiled(model)
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for seed in range(4):
            loss = call(jagged(seed)).values().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if call is not model and not through_dynamo:
            assert len(call.foregrad.specializations) == 1
        return losses, described(list(model.parameters()))

    def compiled(model):
        if through_dynamo:
            return torch.compile(model, backend="foregrad", options={"backend": "eager"})
        return foregrad.compile(model, backend="eager", on_unsupported="raise")

    assert trained(compiled) == trained(lambda model: model)


def test_one_that_the_function_closes_over():
    x = jagged(0, grad=True)
    fast = foregrad.compile(lambda v: x * v, backend="eager", on_unsupported="raise")
    fast(torch.ones(8) * 3).values().sum().backward()
    assert described(x.grad.values()) == described(torch.full_like(x.values().detach(), 3))


def test_errors_are_eagers():
    def f(x, y):
        return x * y

    def said(call):
        with pytest.raises(RuntimeError, match="cannot call binary pointwise function") as error:
            call(jagged(1), jagged(1))
        return type(error.value)

    assert said(foregrad.compile(f, backend="eager", on_unsupported="raise")) is said(f)


def test_a_ragged_size_is_not_returned():
    x = jagged(0)
    with pytest.raises(UnsupportedTensorError, match="the size of a ragged dimension"):
        foregrad.compile(lambda x: x.shape[1], backend="eager", on_unsupported="raise")(x)
    with pytest.warns(ForegradWarning, match="ragged dimension"):
        call = foregrad.compile(lambda x: x.shape[1], backend="eager", on_unsupported="eager")
        assert call(x) == x.shape[1]


def test_inductor():
    x = jagged(0, grad=True)
    fast = foregrad.compile(lambda x: F.layer_norm(x, (8,)).relu(), backend="inductor", on_unsupported="raise")
    for seed in range(2):
        x, y = jagged(seed, grad=True), jagged(seed, grad=True)
        fast(x).values().sum().backward()
        F.layer_norm(y, (8,)).relu().values().sum().backward()
        torch.testing.assert_close(x.grad.values(), y.grad.values())
    assert len(fast.foregrad.specializations) == 1
