"""What may happen to a compiled module between two calls: each keeps working, with the graph it has or another."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad.python.reads import ReadSite


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)).relu()))


def halved(module, args, out):
    return out / 2


def scaled_gradient(module, given, got):
    return (given[0] * 3,)


def freeze(model):
    model.first.requires_grad_(False)


def thaw(model):
    model.first.requires_grad_(False)
    model.first.requires_grad_(True)


def add_a_parameter(model):
    model.second.register_parameter("scale", nn.Parameter(torch.ones(2)))


def remove_a_parameter(model):
    model.second.bias = None


def tie(model):
    model.second.bias = model.extra = nn.Parameter(torch.full((2,), 3.0))


def load(model):
    model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()})


def load_by_assignment(model):
    model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()}, assign=True)


def set_data(model):
    model.first.weight.data = torch.full((4, 3), 0.25)


def write(model):
    with torch.no_grad():
        model.first.weight.mul_(2)
        model.norm.running_mean.fill_(1)


def step(model):
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


CHANGES = {  # how many graphs there are afterwards
    "nothing": (1, lambda m: None),
    "train": (1, lambda m: m.train()),
    "eval": (2, lambda m: m.eval()),
    "eval and train": (1, lambda m: m.eval().train()),
    "to another dtype": (2, lambda m: m.to(torch.float64)),
    "half precision": (2, lambda m: m.bfloat16()),
    "to where it is": (1, lambda m: m.to("cpu")),
    "float": (1, lambda m: m.float()),
    "frozen": (2, freeze),
    "frozen and thawed": (1, thaw),
    "a parameter more": (1, add_a_parameter),
    "a parameter fewer": (2, remove_a_parameter),
    "a parameter replaced": (1, tie),
    "a submodule replaced": (2, lambda m: setattr(m, "second", nn.Linear(4, 2))),
    "load_state_dict": (1, load),
    "load_state_dict by assignment": (1, load_by_assignment),
    "data": (1, set_data),
    "written in place": (1, write),
    "a step of an optimizer": (1, step),
    "a hook on a submodule": (2, lambda m: m.first.register_forward_hook(halved)),
    "a hook before a submodule": (2, lambda m: m.first.register_forward_pre_hook(lambda m, args: (args[0] * 2,))),
    "a backward hook": (2, lambda m: m.second.register_full_backward_hook(scaled_gradient)),
    "a hook on the module": (1, lambda m: m.register_forward_hook(halved)),
    "a hook on a parameter": (1, lambda m: m.first.weight.register_hook(lambda g: g * 2)),
    "a hook that went again": (1, lambda m: m.first.register_forward_hook(halved).remove()),
    "gradients set to none": (1, lambda m: m.zero_grad(set_to_none=True)),
    "apply": (1, lambda m: m.apply(lambda part: None)),
}


def run(model, seed):
    """One call and its backward: output, gradients, state."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(5, 3, dtype=next(model.parameters()).dtype)
    out = model(x)
    out.float().sum().backward()
    return [out, *(p.grad for p in model.parameters()), *model.state_dict().values()]


@pytest.mark.parametrize("through", ["the compiled module", "the module itself"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls(name, through):
    graphs, change = CHANGES[name]
    torch.manual_seed(0)
    plain = Net()
    inner = copy.deepcopy(plain)
    compiled = foregrad.compile(inner, backend="eager")
    for model, changed in ((plain, plain), (compiled, compiled if through == "the compiled module" else inner)):
        run(model, 1)
        torch.manual_seed(2)
        change(changed)
    for seed in (3, 4):
        expected, actual = run(plain, seed), run(compiled, seed)
        assert len(expected) == len(actual)
        for a, b in zip(expected, actual, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype is b.dtype and torch.equal(a, b))
    assert len(compiled.foregrad.compilations) == graphs


@pytest.mark.parametrize("name", ["eval", "half precision", "frozen", "load_state_dict", "a hook on a submodule"])
@pytest.mark.parametrize("remake", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_change_then_a_copy(name, remake):
    torch.manual_seed(0)
    plain = Net()
    compiled = foregrad.compile(copy.deepcopy(plain), backend="eager")
    copies = []
    for model in (plain, compiled):
        run(model, 1)
        CHANGES[name][1](model)
        copies.append(remake(model))
    for a, b in zip(run(copies[0], 2), run(copies[1], 2), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert not copies[1].foregrad.specializations or copies[1].foregrad is not compiled.foregrad


class Tripled(torch.autograd.Function):
    """Returns a view of what it is given, as the backward hooks of modules do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


@pytest.mark.parametrize(
    "fn",
    [
        Tripled.apply,
        lambda x: Tripled.apply(x * 2),
        lambda x: Tripled.apply(x * 2)[1:],
        lambda x: Tripled.apply((x * 2)[1:]),
        lambda x: Tripled.apply(Tripled.apply(x.exp())),
    ],
)
def test_a_view_that_a_custom_function_returns_has_its_gradient(fn):
    found = []
    for function in (fn, foregrad.compile(fn, backend="eager")):
        x = torch.arange(3.0).requires_grad_()
        out = function(x)
        assert not out.is_leaf
        found.append((out, *torch.autograd.grad(out.sum(), x)))
    for ours, eagers in zip(*reversed(found), strict=True):
        assert torch.equal(ours, eagers)


def test_a_compiled_module_is_found_under_the_module_it_is_over():
    """As `fully_shard` and others keep their state by module; each is itself and no other."""
    inner = Net()
    once, twice, other = foregrad.compile(inner), foregrad.compile(inner), foregrad.compile(Net())
    kept = weakref.WeakKeyDictionary({inner: 1})
    assert kept[once] == kept[twice] == 1
    assert once == inner == twice == once
    assert other not in kept
    assert once != other != inner != 3
    assert list(torch.nn.Sequential(inner, once).modules())[1:] == list(inner.modules())
    assert copy.deepcopy(once) != once


@pytest.mark.parametrize("place", [0, 999, 1000, 2400])
def test_of_thousands_of_cells_each_is_looked_at(place):
    def made(number):
        def function(x):
            return x + number

        return function

    functions = [made(torch.tensor(float(i))) for i in range(2401)]

    def call(x):
        for at in (0, 999, 1000, 2400):
            x = functions[at](x)
        return x

    compiled, x = foregrad.compile(call, backend="eager"), torch.ones(2)
    assert torch.equal(compiled(x), call(x))
    functions[place].__closure__[0].cell_contents = torch.tensor(0.5)
    assert torch.equal(compiled(x), call(x))
    functions[place] = lambda x: x * 3
    assert torch.equal(compiled(x), call(x))


def _closure(value):
    def function():
        return value

    return function


@pytest.mark.parametrize("place", [0, 11, 23])
@pytest.mark.parametrize("other", [3.5, "other", None, operator.sub, True, "empty"])
def test_of_many_cells_of_values_and_functions_each_is_looked_at(place, other):
    closures = [_closure([operator.add, 1, "text"][i % 3]) for i in range(24)]

    def call(x):
        for closure in closures:
            value = closure()
            x = x * 2 if type(value) is bool else x + value if type(value) in (int, float) else x
            x = value(x, 3) if callable(value) else x - len(str(value))
        return x

    compiled, x = foregrad.compile(call, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x), call(x))
    assert len(compiled.foregrad.specializations) == 1
    cell = closures[place].__closure__[0]
    if other == "empty":
        del cell.cell_contents
        for run in (call, compiled):
            with pytest.raises(NameError):
                run(x)
        return
    cell.cell_contents = other
    assert torch.equal(compiled(x), call(x))
    assert len(compiled.foregrad.specializations) == 2


def test_a_cell_with_an_equal_value_is_as_it_was():
    closures = [_closure(f"{'text' * 3}{i}") for i in range(12)]
    compiled = foregrad.compile(lambda x: x + sum(len(c()) for c in closures), backend="eager")
    compiled(torch.ones(2))
    for i, closure in enumerate(closures):
        closure.__closure__[0].cell_contents = "".join(["text"] * 3 + [str(i)])
    compiled(torch.ones(2))
    assert len(compiled.foregrad.specializations) == 1


def test_an_attribute_that_a_thread_gets_is_seen():
    local = threading.local()
    others = [_closure(operator.add) for _ in range(8)]

    def call(x):
        for other in others:
            x = other()(x, 1)
        return x * getattr(local, "scale", 2)

    compiled, x = foregrad.compile(call, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x), call(x))
    local.scale = 5
    assert torch.equal(compiled(x), call(x))
    del local.scale
    assert torch.equal(compiled(x), call(x))


CHANGES_OF_A_THREAD = {
    "an attribute appears": "own.scale = 5.0",
    "an attribute changes": "own.level = 5.0",
    "an attribute goes": "vars(own).pop('level', None)",
    "the class gets it": "OfThread.scale = 5.0",
    "the class changes": "OfThread.depth = 5.0",
    "the class makes it up": "OfThread.__getattr__ = lambda self, name: 7.0",
    "the class looks it up": (
        "OfThread.__getattribute__ = lambda self, name: (\n"
        "    7.0 if name == 'scale' else threading.local.__getattribute__(self, name))"
    ),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_THREAD)
def test_what_a_thread_has_of_its_own_in_an_object_of_a_class_is_compared_soon_and_a_change_is_seen(
    change, monkeypatch
):
    class OfThread(threading.local):
        depth = 2.0

        def __init__(self):
            self.level = 3.0

    own = OfThread()

    def call(x):
        names = "scale", "rate", "level"
        return x * sum(getattr(own, name, 1.0) for name in names) * own.depth

    compiled, x = foregrad.compile(call, backend="eager"), torch.ones(2)
    for _ in range(3):
        assert torch.equal(compiled(x), call(x))
    looked = []
    with monkeypatch.context() as patched:
        patched.setattr(ReadSite, "look", lambda site, key, look=ReadSite.look: looked.append(key) or look(site, key))
        compiled(x)
    assert not {"scale", "rate"} & {*looked}
    for _ in range(2):
        exec(CHANGES_OF_A_THREAD[change], {"OfThread": OfThread, "own": own, "threading": threading})
        assert torch.equal(compiled(x), call(x))
        assert torch.equal(compiled(x), call(x))


@pytest.fixture
def fast_path():
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def asks_for_the_fast_path(x):
    return x * 2 if torch.backends.mha.get_fastpath_enabled() else x * 3


@pytest.mark.usefixtures("fast_path")
@pytest.mark.parametrize("kind", ["layer", "function"])
def test_the_fast_path_of_attention_is_guarded_where_it_is_read(kind):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    fn, x = (layer if kind == "layer" else asks_for_the_fast_path), torch.randn(2, 3, 8)
    compiled = foregrad.compile(fn, backend="eager")
    with torch.no_grad():
        for is_enabled in (True, False, True):
            torch.backends.mha.set_fastpath_enabled(is_enabled)
            torch.testing.assert_close(compiled(x), fn(x))
    assert len(compiled.foregrad.specializations) == 2
