"""What is another in each call and can be no input: calls run eagerly after eight graphs, with one warning that names it."""

import enum
import functools
import types
import warnings

import pytest
import torch

import foregrad
from foregrad.dispatch.graphs import Specializer
from foregrad.extend import view

CALLS = 30


class Options:
    def __init__(self, scale):
        self.scale = scale


class Held:
    options = Options(2.0)


HELD = types.SimpleNamespace(options=Options(2.0), scale=1.0, count=3, names=["a"])


def an_object_made_anew(x):
    return x * HELD.options.scale


def a_float_in_text(x):
    return x * len(f"{HELD.scale:.17g}")


def a_key_of_a_table(x):
    return x * {HELD.count: 2.0}.get(HELD.count, 1.0)


def a_list_made_anew(x):
    return x * len(HELD.names)


PROGRAMS = {
    "HELD.options": (an_object_made_anew, lambda i: setattr(HELD, "options", Options(2.0))),
    "HELD.scale": (a_float_in_text, lambda i: setattr(HELD, "scale", 0.1 * i)),
    "HELD.count": (a_key_of_a_table, lambda i: setattr(HELD, "count", i + 3)),
    "HELD.names": (a_list_made_anew, lambda i: setattr(HELD, "names", ["a", str(i)])),
}


def results(function, prepare, calls=CALLS):
    torch.manual_seed(0)
    found = []
    for i in range(calls):
        prepare(i)
        found.append(function(torch.randn(3)))
    return found


def counted(function, prepare, **settings):
    """The report and the warnings, after it was compared with eager."""
    with warnings.catch_warnings(record=True) as caught, foregrad.config.override(**settings):
        warnings.simplefilter("always")
        compiled = foregrad.compile(function, backend="eager")
        found = results(compiled, prepare)
    assert all(map(torch.equal, found, results(function, prepare)))
    return foregrad.explain_recompiles(compiled), [str(w.message) for w in caught]


@pytest.mark.parametrize("place", PROGRAMS)
def test_eight_graphs_and_one_warning(place):
    report, said = counted(*PROGRAMS[place])
    assert len(report) <= 10  # the first finds that it varies
    assert report.eager_calls >= CALLS - 10
    assert len(said) == 1
    assert "in a row" in said[0]
    assert place.removeprefix("HELD") in said[0]


def test_the_text_of_a_float_among_the_arguments():
    values = iter([0.1 * i for i in range(2 * CALLS)])
    compiled = foregrad.compile(lambda x, s: x * len(str(s)), backend="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="s differs in each call"):
        results(lambda x: compiled(x, next(values)), lambda i: None)
    assert len(foregrad.explain_recompiles(compiled)) == 8


def test_values_that_come_back_have_graphs():
    report, said = counted(a_float_in_text, lambda i: setattr(HELD, "scale", 0.1 * (i // 2 % 12)))
    assert not said
    assert len(report) <= 14


def test_other_kinds_of_calls_are_compiled():
    compiled = foregrad.compile(an_object_made_anew, backend="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="in a row"):
        results(compiled, PROGRAMS["HELD.options"][1])
    before, x = foregrad.explain_recompiles(compiled), torch.ones(2, 2)
    assert torch.equal(compiled(x), an_object_made_anew(x))
    after = foregrad.explain_recompiles(compiled)
    assert (len(after), after.eager_calls) == (len(before) + 1, before.eager_calls)


def test_it_may_be_an_error():
    with pytest.raises(foregrad.errors.UnsupportedError, match="in a row"):
        counted(*PROGRAMS["HELD.scale"], error_on_recompile_limit=True)


def test_a_cache_that_each_call_fills():
    @functools.cache
    def table(number):
        return torch.full((3,), float(number))

    report, said = counted(lambda x: x * table(HELD.count), lambda i: setattr(HELD, "count", i + 3))
    assert len(said) == 1
    assert "the cache of" in said[0]
    assert report.eager_calls > CALLS - 10


def test_calls_that_raise_run_eagerly_after_eight_captures_until_one_raises_nothing(monkeypatch):
    def positive(x, n):
        if n < 0:
            raise ValueError(f"{n} is negative")
        return x * 2

    captures = []
    specialize = Specializer.specialize
    monkeypatch.setattr(Specializer, "specialize", lambda *args, **kw: captures.append(1) or specialize(*args, **kw))
    compiled, x = foregrad.compile(positive, backend="eager", on_unsupported="eager"), torch.ones(3)
    for n in range(1, 21):
        with pytest.raises(ValueError, match=f"^-{n} is negative$"):
            compiled(x, -n)
    assert len(captures) == 8
    assert torch.equal(compiled(x, 1), x * 2)  # eagerly: the call might raise
    assert torch.equal(compiled(x, 1), x * 2)
    assert len(captures) == 9
    assert len(view(compiled).graphs) == 1


class Mode(enum.IntFlag):
    SHIFT, SCALE, FOLD = 1, 2, 4


def in_mode(x, mode):
    x = x + 1 if mode & Mode.SHIFT else x
    x = x * 2 if mode & Mode.SCALE else x
    return x.sin() if mode & (Mode.FOLD | Mode.SHIFT) else x


def test_flags_that_are_combined_have_a_graph_each():
    compiled, x = foregrad.compile(in_mode, backend="eager", on_unsupported="eager"), torch.randn(3)
    for call in range(24):
        mode = Mode(5 * call % 8)
        assert torch.equal(compiled(x, mode), in_mode(x, mode))
    assert len(view(compiled).graphs) == 8
    assert sum(entry.count for entry in foregrad.explain_recompiles(compiled).eager) <= 1


def layers_dropped(x, layers):
    for layer in layers:
        if torch.rand(()).item() > 0.5:
            x = x + layer * x.cos()
    return x


def test_paths_that_serve_one_call_each_are_half_the_limit():
    compiled, layers = foregrad.compile(layers_dropped, backend="eager", on_unsupported="eager"), [*torch.randn(12, 3)]
    for call in range(60):
        torch.manual_seed(call)
        expected = layers_dropped(torch.ones(3), layers)
        torch.manual_seed(call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(compiled(torch.ones(3), layers), expected)
    assert len(view(compiled).graphs) == foregrad.config.path_limit // 2


def test_an_obstacle_in_one_call_makes_no_later_call_eager_for_ever():
    state = types.SimpleNamespace(calls=0, layer=torch.nn.Linear(2, 2))

    @foregrad.compile(backend="eager", on_unsupported="eager")
    def step(x):
        state.calls += 1
        if state.calls == 5:
            state.layer = torch.nn.Linear(2, 3)
        return state.layer(x)

    with pytest.warns(foregrad.errors.ForegradWarning, match="leaves a Linear"):
        for _ in range(300):
            x = torch.randn(2)
            assert torch.equal(step(x), state.layer(x))
    assert foregrad.explain_recompiles(step).eager_calls == 16


def test_a_call_that_never_has_a_graph_is_captured_a_few_times(monkeypatch):
    captures, original = [], Specializer.specialize
    monkeypatch.setattr(
        Specializer, "specialize", lambda *args, **kwargs: captures.append(1) or original(*args, **kwargs)
    )
    calls = []

    @foregrad.compile(backend="eager", on_unsupported="eager")
    def step(x):
        calls.append(object())
        return len(calls)

    with pytest.warns(foregrad.errors.ForegradWarning):
        assert [step(torch.ones(2)) for _ in range(1100)] == [*range(1, 1101)]
    assert 3 <= len(captures) <= 12
