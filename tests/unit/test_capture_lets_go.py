"""What a capture was given is freed when the caller lets go of it, with no help from the garbage collector."""

import gc
import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch.stand_ins import is_stand_in


@pytest.fixture(autouse=True, scope="module")
def imports_are_done():
    """Imports that PyTorch makes in the first capture of a process may raise, and their tracebacks hold its frames."""
    x = torch.ones(2, requires_grad=True)
    foregrad.compile(lambda x: x.sin())(x).sum().backward()


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_argument_of_the_first_call(no_collector):
    model = nn.Linear(3, 3)
    compiled = foregrad.compile(lambda x: model(x).sin())
    x = torch.ones(2, 3, requires_grad=True)
    freed = weakref.ref(x)
    compiled(x).sum().backward()
    del x
    assert freed() is None


def test_what_the_function_made(no_collector):
    class Made:
        pass

    made = []

    def f(x):
        thing = Made()
        made.append(weakref.ref(thing))
        return x * 2

    foregrad.compile(f)(torch.ones(3))
    assert made and all(reference() is None for reference in made)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))).sum()


class Raising(Net):
    def forward(self, x):
        raise ValueError(self.first(x).shape)


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def not_at_all(module, x):
    pass


def without_gradients(module, x):
    with torch.no_grad():
        module(x)


def for_training(module, x):
    for _ in range(3):
        module(x).backward()


def for_one_gradient(module, x):
    torch.autograd.grad(module(x), module.first.weight)


def for_a_gradient_of_a_gradient(module, x):
    (gradient,) = torch.autograd.grad(module(x), x, create_graph=True)
    gradient.sum().backward()


def for_a_gradient_with_a_graph(module, x):
    torch.autograd.grad(module(x), x, create_graph=True)


def in_a_compiled_function(module, x):
    foregrad.compile(lambda x: module(x) * 2, backend="eager")(x).backward()


def under_vmap(module, x):
    torch.vmap(module.eval())(x[None])


def by_what_raises(module, x):
    with pytest.raises(ValueError, match=r"torch\.Size"):
        module(x)


USES = [
    (Net, not_at_all),
    (Net, without_gradients),
    (Net, for_training),
    (Net, for_one_gradient),
    (Net, for_a_gradient_of_a_gradient),
    (Net, for_a_gradient_with_a_graph),
    (Net, in_a_compiled_function),
    (Net, under_vmap),
    (Raising, by_what_raises),
    (Counting, for_training),
]


@pytest.mark.parametrize(("cls", "use"), USES, ids=[f"{cls.__name__} {use.__name__}" for cls, use in USES])
@pytest.mark.parametrize("door", [foregrad.compile, foregrad.aot_module], ids=["compile", "aot_module"])
def test_a_compiled_module_and_its_parameters(no_collector, door, cls, use):
    if door is foregrad.aot_module and cls is not Net:
        pytest.skip("aot_module writes no Python state")
    plain = cls()
    module = door(plain, backend="eager") if door is foregrad.compile else door(plain, foregrad.nop)
    x = torch.randn(3, 4, requires_grad=True)
    freed = [weakref.ref(value) for value in (plain, plain.first.weight, module, x)]
    use(module, x)
    del plain, module, x
    assert [reference() for reference in freed] == [None] * 4


def test_a_module_with_state_where_the_program_froze_nothing(no_collector):
    """As in most programs: captures then leave what they made to the collector, young or old."""
    gc.unfreeze()
    try:
        module = foregrad.compile(Counting(), backend="eager")
        freed = [weakref.ref(module), weakref.ref(module.first.weight)]
        for_training(module, torch.randn(3, 4, requires_grad=True))
        del module
        assert [reference() for reference in freed] == [None] * 2
    finally:
        gc.freeze()


def over(model):
    return foregrad.compile(lambda x: model(x) * 2, backend="eager")


def test_a_compiled_function_and_what_it_closes_over(no_collector):
    model = Net()
    compiled = over(model)
    freed = [weakref.ref(value) for value in (model, model.first.weight, compiled, compiled.foregrad)]
    compiled(torch.randn(3, 4)).backward()
    del model, compiled
    assert [reference() for reference in freed] == [None] * 4


def long(x):
    for _ in range(200):
        x = torch.sin(x) * x
    return x.sum()


def parts_in_circles():
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return {type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("foregrad.tracing.")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_run_that_is_over_leaves_no_part_of_itself_in_circles(no_collector, requires_grad):
    module, x = Net(), torch.randn(3, 4)
    parts_in_circles()
    compiled = foregrad.compile(lambda x: module(x) + next(iter([x])).sum(), backend="eager")
    with torch.set_grad_enabled(requires_grad):
        compiled(x)
    assert parts_in_circles() == set()


def stand_ins_alive():
    return sum(type(each) is torch.Tensor and is_stand_in(each) for each in gc.get_objects())


def test_stand_ins_that_no_second_derivative_reads_are_dropped():
    x = torch.randn(3, requires_grad=True)
    gc.collect()
    before = stand_ins_alive()
    compiled = foregrad.compile(long, backend="eager")
    compiled(x).backward()
    assert 200 < stand_ins_alive() - before < 600  # 400 operators forward, more than 800 backward
    (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    (expected,) = torch.autograd.grad(torch.autograd.grad(long(x), x, create_graph=True)[0].sum(), x)
    assert torch.equal(second, expected)


def test_an_error_of_the_backward_holds_no_argument():
    def f(x):
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z

    compiled = foregrad.compile(f, backend="eager")
    x = torch.ones(3, requires_grad=True)
    held = weakref.ref(x)
    out = compiled(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    del x, out
    gc.collect()
    assert held() is None
