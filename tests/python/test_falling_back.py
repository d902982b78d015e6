"""A call that can't be compiled runs eagerly: with eager's effects, once each, one warning, and no capture again."""

# ruff: noqa: NPY002 - programs of users draw from the module itself

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


class Refused(nn.Module):
    """Seeds a generator, which no graph can repeat, after it changed everything that a program can."""

    shared = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count = 0
        self.history = []
        self.table = {"a": 1}
        self.names = {"x"}
        self.noise = random.Random(3)
        self.numbers = np.random.default_rng(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        type(self).shared += 1
        self.last = self.linear(x)
        self.history.append(self.last.detach())
        self.table["b"] = self.table.pop("a", 0) + 1
        self.table["a"] = len(self.history)
        self.names.add(f"n{self.count}")
        self.mean.add_(1)
        self.drawn = (random.random(), np.random.rand(), self.noise.random(), self.numbers.random())
        self.register_buffer("fresh", x.detach() * 2)
        torch.manual_seed(self.count)
        return self.last + torch.rand(3)


def state(module):
    values = dict(vars(module))
    values["history"] = [item.tolist() for item in module.history]
    values["table"] = list(module.table.items())
    values["last"] = module.last.tolist()
    del values["noise"], values["numbers"]
    return repr({k: v for k, v in values.items() if not k.startswith("_")}), module.fresh.tolist(), module.mean.tolist()


def run(compiled, calls=4):
    Refused.shared = 0
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = Refused()
    call = foregrad.compile(module, backend="eager", on_unsupported="eager") if compiled else module
    found = []
    for i in range(calls):
        out = call(torch.full((2, 3), float(i)))
        found.append((out.tolist(), state(module), Refused.shared, random.random(), np.random.rand()))
    return found, call


def test_effects_are_eagers_and_there_is_one_warning_at_the_users_line():
    expected, _ = run(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, call = run(True)
    assert found == expected
    (only,) = [w for w in caught if issubclass(w.category, ForegradWarning)]
    assert only.filename == __file__
    assert "test_falling_back.py" in str(only.message)
    report = foregrad.explain_recompiles(call)
    assert len(report) == 0
    assert report.eager_calls == 4
    assert "ran eagerly: 4 calls, " in str(report)
    (entry,) = report.eager
    assert entry.timed == 4
    assert 0 < entry.seconds_per_call < 60
    assert f" ms each: {entry.reason}" in str(report)
    assert " run eagerly: the results are eager's" in str(only.message)
    assert "manual_seed" in entry.why
    assert entry.change
    assert "test_falling_back.py" in entry.line


def test_a_warning_that_is_an_error_comes_in_place_of_the_call():
    calls = []

    def refused(x):
        calls.append(1)
        torch.manual_seed(0)
        return x * 2

    compiled = foregrad.compile(refused, backend="eager", on_unsupported="eager")
    with pytest.raises(ForegradWarning, match="manual_seed"):  # as the tests run with warnings as errors
        compiled(torch.ones(2))
    assert not calls
    compiled(torch.ones(2))
    assert len(calls) == 1


def test_a_kind_of_call_that_was_refused_is_not_captured_again():
    captures = []

    def refused(x, flag=True):
        if flag:
            captures.append(1)
            torch.manual_seed(1)
        return x * 2

    call = foregrad.compile(refused, backend="eager", on_unsupported="eager")
    x = torch.ones(2)
    with pytest.warns(ForegradWarning):
        call(x)
    assert len(captures) == 1  # what the capture appended was taken back
    for _ in range(5):
        call(x)
    assert len(captures) == 6
    assert foregrad.explain_recompiles(call).eager_calls == 6
    assert torch.equal(call(x, flag=False), x * 2)  # another kind


def test_raise_says_it_as_an_error_and_leaves_nothing_behind():
    module = Refused()
    before = repr(vars(module)), Refused.shared, random.getstate()
    call = foregrad.compile(module, backend="eager", on_unsupported="raise")
    with pytest.raises(UnsupportedSideEffectError):
        call(torch.ones(2, 3))
    assert (repr(vars(module)), Refused.shared, random.getstate()) == before
    with pytest.raises(UnsupportedSideEffectError):
        foregrad.aot_function(module.forward, foregrad.nop)(torch.ones(2, 3))
    with pytest.raises(UnsupportedSideEffectError):
        foregrad.capture(module, torch.ones(2, 3))
    assert (repr(vars(module)), Refused.shared, random.getstate()) == before


def test_an_error_of_the_program_is_the_programs():
    seen = []

    def wrong(x):
        seen.append(1)
        raise KeyError("mine")

    call = foregrad.compile(wrong, backend="eager", on_unsupported="eager")
    with pytest.raises(KeyError, match="mine") as caught:
        call(torch.ones(2))
    assert seen == [1]
    assert caught.value.__context__ is None
    assert foregrad.explain_recompiles(call).eager_calls == 0


def test_what_only_the_capture_stumbles_over_is_named_with_the_users_line():
    def stumbles(x):
        if torch._C._len_torch_dispatch_stack():
            raise LookupError("no modes here")
        return x + 1

    call = foregrad.compile(stumbles, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=r"LookupError: no modes here.*test_falling_back\.py"):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0))
    assert foregrad.explain_recompiles(call).eager_calls == 1


def _scales_by_hand(x):
    return x.detach().clone().map_(x.detach(), lambda a, b: a + b)


def _knows_only_real_tensors(x):
    if torch._C._len_torch_dispatch_stack():
        raise LookupError("no such tensor")
    return x + 1


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (_scales_by_hand, "PyTorch refuses this for the tensors of a capture: they have neither values nor memory"),
        (_knows_only_real_tensors, "the code there does not take the tensors of a capture"),
    ],
)
def test_a_stumble_is_told_in_our_words_with_the_remedy(function, cause):
    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning) as heard:
        call(torch.ones(2))
    (text,) = (str(warning.message) for warning in heard)
    assert f"`{function.__name__}` runs eagerly and can't be captured: {cause}" in text
    assert "Make that part a foregrad.eager_region, so that the rest is compiled. (" in text


def test_a_fault_of_foregrads_is_called_one(monkeypatch):
    def fails(*args, **kwargs):
        return {}["nothing"]

    monkeypatch.setattr("foregrad.tracing.capture.CaptureRun", fails)
    monkeypatch.setattr("foregrad.house._files", (__file__,))
    call = foregrad.compile(lambda x: x.sin(), backend="eager", on_unsupported="eager")
    with pytest.warns(
        ForegradWarning, match="foregrad fails where eager does not; please report it where you got foregrad"
    ):
        call(torch.ones(2))


class Locked:
    def __init__(self, x):
        self.x, self.lock = x, threading.Lock()


def test_an_argument_with_a_state_that_only_c_code_sees():
    call = foregrad.compile(lambda o: o.x * 2, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=r"args\[0\]\.lock.*lock"):
        assert torch.equal(call(Locked(torch.ones(2))), torch.full((2,), 2.0))
    assert torch.equal(call(Locked(torch.zeros(2))), torch.zeros(2))


def test_kinds_are_bounded():
    captures = []

    def refused(*xs):
        captures.append(1)
        torch.manual_seed(1)
        return xs[0]

    call = foregrad.compile(refused, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(1, 30):
            call(*[torch.ones(2)] * n)
    assert len(captures) == 29
    assert call.foregrad.refusals.always is not None


def test_through_torch_compile():
    def f(x):
        return x.relu().to_sparse().to_dense() * 2

    x = torch.tensor([1.0, -1.0])
    torch._dynamo.reset()
    call = torch.compile(f, backend="foregrad", options={"backend": "eager", "on_unsupported": "eager"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(call(x), f(x))
    torch._dynamo.reset()


def test_the_answer_to_another_word():
    with pytest.raises(ValueError, match="on_unsupported"):
        foregrad.compile(lambda x: x, on_unsupported="loud")


@pytest.mark.parametrize("counts", [False, True])
def test_an_argument_that_is_none_of_ours_after_calls_that_were_compiled(counts):
    class Net(nn.Module):
        calls = 0

        def forward(self, x, options=None):
            if counts:
                self.calls += 1
            return x * 2

    net = Net()
    compiled = foregrad.compile(net, backend="eager", on_unsupported="eager")
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        for options in (None, (n for n in "ab"), None, x.to_sparse(), None):
            assert torch.equal(compiled(x, options), x * 2)
    assert net.calls == (5 if counts else 0)
    assert foregrad.explain_recompiles(compiled).eager_calls == 2


class FitsItself(nn.Module):
    """Holds its optimizer and scheduler, as the layers of the forward-forward algorithm do, and trains in a method."""

    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.opt = make(self.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 2)

    def fit(self, x):
        loss = self.linear(x).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.schedule.step()
        return loss.detach()

    def forward(self, x):
        return self.fit(x)


@pytest.mark.parametrize("compiled", ["method", "module"])
@pytest.mark.parametrize(
    "make",
    [torch.optim.Adam, torch.optim.RMSprop, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)],
    ids=["adam", "rmsprop", "momentum"],
)
def test_the_state_of_an_optimizer_that_a_module_holds_is_left_as_it_was(make, compiled):
    def train(compile):
        torch.manual_seed(0)
        module = FitsItself(make)
        step = compile(module.fit if compiled == "method" else module)
        losses = [step(torch.randn(5, 4)) for _ in range(4)]
        state = [value for values in module.opt.state.values() for value in values.values()]
        return losses, [p.detach() for p in module.parameters()], state, module.schedule.get_last_lr()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        got = train(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    for ours, eager in zip(got, train(lambda f: f), strict=True):
        for a, b in zip(ours, eager, strict=True):
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def test_a_window_is_compiled_once_it_is_full():
    """A list that is read and grows makes calls eager; as soon as it does not grow any more they are tried again."""

    class Windowed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.recent = []

        def forward(self, x):
            self.recent.append(x.detach().mean())
            if len(self.recent) > 3:
                self.recent.pop(0)
            return x - torch.stack(self.recent).mean()

    expected, module = Windowed(), Windowed()
    compiled = foregrad.compile(module, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="the number of items in"):
        for n in range(9):
            x = torch.full((2,), float(n))
            assert torch.equal(compiled(x), expected(x))
            assert module.recent == expected.recent
    report = foregrad.explain_recompiles(compiled)
    assert len(report) == 1
    assert report.eager_calls < 6


def test_a_list_that_goes_on_growing_is_not_captured_again_and_again():
    made = []

    def growing(x):
        made.append(1)
        return x * sum(made)  # of all items: each number of items has its own graph

    compiled = foregrad.compile(growing, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="the number of items in"):
        found = [compiled(torch.ones(1)).item() for _ in range(12)]
    assert found == [float(n) for n in range(1, 13)]
    assert foregrad.explain_recompiles(compiled).eager_calls >= 11


def test_a_call_that_raises_eagerly_is_counted_and_said_too():
    def refused(x):
        torch.manual_seed(1)
        raise KeyError("mine")

    call = foregrad.compile(refused, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning), pytest.raises(KeyError, match="mine"):
        call(torch.ones(2))
    (entry,) = foregrad.explain_recompiles(call).eager
    assert entry.count == entry.timed == 1
