"""What a call leaves behind in Python is left behind by every compiled call: a table of programs against eager."""

import collections
import warnings

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import ALL
from tests.python import writes

CHOSEN = writes.programs()[:: 23 if ALL else 43]


@pytest.mark.parametrize("program", CHOSEN, ids=", ".join)
def test_as_in_eager(program):
    said, eager, _ = writes.check(*program)
    assert said is None
    assert eager <= 1  # a third call that finds a place empty; the first two are taken for caches, and not counted


@pytest.mark.parametrize("program", writes.programs()[::331], ids=", ".join)
def test_through_torch_compile(program):
    said, _, _ = writes.check(*program, wrap=writes.through_dynamo)
    assert said is None


def test_a_counter_takes_two_graphs():
    """One for the first number, and one for all others."""
    _, call = writes.run("module", "counter used after", "nothing", writes.compiled, calls=9)
    assert len(foregrad.explain_recompiles(call)) == 2
    _, call = writes.run("nonlocal", "average of items", "nothing", writes.compiled, calls=9)
    assert len(foregrad.explain_recompiles(call)) <= 3


def test_what_is_written_where_it_is_already_is_written_again():
    """A number that stands where a call writes it, and that somebody sets to another one between two calls."""

    class Model(nn.Module):
        scale = 2.0

        def forward(self, x):
            kind = self.__class__
            kind.scale = 3.0
            return x * 2

    compiled = foregrad.compile(Model(), backend="eager")
    for outside in (2.0, 3.0, 3.0, 7.0, 8.0, 3.0, 9.0):
        Model.scale = outside
        compiled(torch.ones(2))
        assert Model.scale == 3.0


def test_a_function_without_effects_has_no_line_for_them():
    compiled = foregrad.compile(lambda x: x.sin(), backend="eager")
    compiled(torch.ones(2))
    assert "state" not in compiled.foregrad.source().replace("global_state", "")


def test_an_abandoned_capture_leaves_nothing_and_the_effect_happens_once():
    log = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            log.append(self.count)
            self.size = sum(log)
            return x * 2

    model = Model()
    compiled = foregrad.compile(model, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="the number of items in log"):
        for n in range(1, 6):
            compiled(torch.ones(2))
            assert (model.count, log) == (n, list(range(1, n + 1)))


def test_a_hook_that_keeps_what_it_saw():
    seen = {}
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[0].register_forward_hook(lambda module, given, out: seen.__setitem__("out", out.detach()))
    compiled = foregrad.compile(model, backend="eager")
    for i in range(4):
        x = torch.full((2, 3), float(i))
        compiled(x)
        assert torch.equal(seen["out"], model[0](x))
    assert len(compiled.foregrad.specializations) == 1


def test_a_state_with_a_history_goes_on_from_call_to_call():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.state = torch.zeros(2, 3)

        def forward(self, x):
            self.state = torch.tanh(self.linear(x) + self.state)
            return self.state.sum()

    def run(wrap):
        torch.manual_seed(0)
        cell = Cell()
        call = wrap(cell)
        total = sum(call(torch.full((2, 3), float(i))) for i in range(4))
        total.backward()
        return total.item(), cell.linear.weight.grad, cell.state

    ours, theirs = run(lambda m: foregrad.compile(m, backend="eager")), run(lambda m: m)
    assert ours[0] == theirs[0]
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


def test_what_the_backward_of_a_function_writes_is_written_by_each():
    kept = {"g": None}

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            kept["g"] = g.detach()
            return g * 2

    compiled = foregrad.compile(lambda x: Double.apply(x).sum(), backend="eager")
    for scale in (1.0, 2.0, 3.0):
        loss = compiled(torch.ones(2, requires_grad=True))
        before = kept["g"]
        (loss * scale).backward()
        assert kept["g"] is not before
        assert torch.equal(kept["g"], torch.full((2,), scale))
        assert not isinstance(kept["g"], torch._subclasses.FakeTensor)


@pytest.mark.parametrize("kind", [dict, list, set, collections.OrderedDict])
def test_an_empty_container_in_two_places_gets_its_item_once(kind):
    both = kind()
    model = nn.Identity()
    model.first, model.second = both, [both]

    def fill(x):
        if isinstance(both, dict):
            model.first["seen"] = 1
        else:
            (both.append if isinstance(both, list) else both.add)("seen")
        return x * 2

    compiled = foregrad.compile(lambda x: fill(model(x)), backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(1, 4):
            compiled(torch.ones(2))
            assert len(both) == (n if kind is list else 1)
            assert model.first is both
            assert model.second == [both]


def test_an_empty_container_that_is_emptied_again_was_not_written():
    pending, model = [], nn.Linear(2, 2)

    def step(x):
        pending.append(x)
        try:
            return model(pending[-1])
        finally:
            pending.clear()

    compiled = foregrad.compile(step, backend="eager", on_unsupported="raise")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert len(compiled.foregrad.specializations) == 1
    assert pending == []


KEYS = {
    "a float": lambda state, x: state.update({x.sum().item(): 1}),
    "an integer": lambda state, x: state.__setitem__(int(x.sum()), 1),
    "in a tuple": lambda state, x: state.__setitem__(("a", int(x.sum())), state.get(("a", int(x.sum())), 0) + 1),
    "a choice": lambda state, x: state.__setitem__(x.sum().item() > 0, x.sum().item()),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_number_of_the_graph_as_a_key(name):
    found = []
    for wrap in (lambda f: f, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager")):
        state = {}
        call = wrap(lambda x, state=state: (KEYS[name](state, x), x * 2)[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", foregrad.errors.ForegradWarning)  # as often as keys are new, in the end
            for i in range(8):
                call(torch.tensor([2.0, i % 4 - 2]))
        found.append((state, [*map(type, state)]))
    assert found[0] == found[1]
