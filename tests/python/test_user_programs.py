"""Programs as people write them leave behind what eager leaves behind, and draw what eager draws."""

import threading
import warnings

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import shared
from tests.python import user_programs as programs

ALL = {**programs.CONTAINERS, **programs.OBJECTS, **programs.DRAWN, **programs.BACKWARDS}


FILLING = {"stacked frames"}  # calls that find places empty are counted, with no warning, until there are none


@pytest.mark.parametrize("name", ALL)
def test_as_in_eager(name):
    said, eager, _, warned = programs.check(ALL[name], name)
    assert said is None
    assert bool(warned) is (name in programs.EAGER), warned
    assert bool(eager) is (name in programs.EAGER | FILLING)


@pytest.mark.parametrize("name", shared(ALL, 0, 12))
def test_through_torch_compile(name):
    """As in eager, or as with Dynamo alone, which has random numbers of its own for NumPy's."""
    said, *_ = programs.check(ALL[name], name, programs.through_dynamo)
    assert said is None or programs.check(ALL[name], name, programs.dynamo_alone)[0] is not None


@pytest.mark.parametrize("name", programs.CLOCKS)
def test_no_time_and_no_unique_name_is_that_of_the_capture(name):
    found, _ = programs.clocks(programs.CLOCKS[name], name)
    assert len(set(found)) == len(found)


def test_dates_that_are_not_asked_for_the_time_are_no_reason_to_run_eagerly():
    body = (
        "out.append(datetime.datetime(2020, 1, 2) < datetime.datetime(2021, 1, 1) and datetime.date(2020, 1, 1).year)"
    )
    found, eager = programs.clocks(body, "dates")
    assert (found, eager) == ([2020] * 4, 0)


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = []
        self.table = {}
        self.check = lambda: None

    def forward(self, x):
        y = x * 2
        self.log.append(y.detach())
        self.check()
        return y


def compiled(module):
    return foregrad.compile(module, backend="eager", on_unsupported="eager")


def test_a_list_that_grows_is_one_graph_and_one_line():
    model = Logging()
    call = compiled(model)
    for i in range(5):
        call(torch.full((2,), float(i)))
    assert [item[0].item() for item in model.log] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert len(call.foregrad.specializations) == 1
    assert "['log'].append(" in call.foregrad.source()


def test_the_list_may_be_another_one_but_not_something_else():
    model = Logging()
    call = compiled(model)
    call(torch.ones(2))
    first, model.log = model.log, []
    call(torch.ones(2))
    assert (len(first), len(model.log), len(call.foregrad.specializations)) == (1, 1, 1)

    class Twice(list):
        def append(self, item):
            super().append(item)
            super().append(item)

    model.log = Twice()
    call(torch.ones(2))
    assert len(model.log) == 2


def test_two_names_of_one_list_are_told_from_two_lists():
    model = Logging()
    model.other = model.log
    model.check = lambda: model.other.append("other")
    call = compiled(model)
    for _ in range(2):
        call(torch.ones(2))
    assert len(model.log) == 4
    model.other = []
    call(torch.ones(2))
    assert (len(model.log), model.other) == (5, ["other"])


def matched(log):
    match log:
        case [*items]:
            return items
        case _:
            return None


@pytest.mark.parametrize(
    "look",
    [
        lambda log: len(log),
        lambda log: bool(log),
        lambda log: list(log),
        lambda log: torch.stack(log),
        lambda log: log[-1],
        lambda log: [*log],
        lambda log: (lambda *items: items)(*log),
        lambda log: str(log),
        lambda log: log == [],
        lambda log: log * 2,
        lambda log: sorted(log, key=id),
        lambda log: log.index(log[0]),
        lambda log: isinstance(log, list) and len(log),
        lambda log: type(log) is list and len(log),
        lambda log: torch.utils._pytree.tree_leaves(log),
        lambda log: __import__("copy").copy(log),
        lambda log: __import__("json").dumps(log, default=str),
        lambda log: next(iter(log)),
        lambda log: log.copy(),
        lambda log: log.__len__(),
        lambda log: zip(log, log, strict=True),
        lambda log: __import__("json").dumps(log, default=lambda _: 0),
        matched,
    ],
)
def test_whatever_reads_the_list_is_not_wrong(look):
    def run(wrap):
        model = Logging()
        seen = []

        def check():
            try:
                found = look(model.log)
            except TypeError:
                found = "error"
            seen[:] = [str(type(found)), str(len(found)) if hasattr(found, "__len__") else str(found)]

        model.check = check
        call = wrap(model)
        found = []
        for i in range(5):
            call(torch.full((2,), float(i)))
            found.append((len(model.log), [text for text in seen if " at 0x" not in text and "tensor" not in text]))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(compiled) == run(lambda model: model)


@pytest.mark.parametrize("name", ["a tuple of states", "a named tuple left", "a list of states", "a cache object"])
def test_a_state_is_an_argument_and_may_be_reset(name):
    def reset(i, model):
        if i in (4, 7):
            vars(model).update(state=None) if hasattr(model, "state") else None
            model.reset() if hasattr(model, "reset") else None

    text = programs.OBJECTS[name]
    expected, _ = programs.run(text, name, lambda model: model, 9, reset)
    found, call = programs.run(text, name, compiled, 9, reset)
    assert found == expected
    assert len(foregrad.explain_recompiles(call)) <= 3


def test_each_call_leaves_an_object_of_its_own():
    class Seen:
        __slots__ = ("first", "rest")

        def __init__(self, first, **rest):
            self.first, self.rest = first, rest

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = Seen(None)

        def forward(self, x):
            y = x + 1
            self.seen = Seen(y.detach(), shape=tuple(y.shape), mean=y.mean().item())
            return y

    model = Keeping()
    call = compiled(model)
    kept = []
    for i in range(4):
        call(torch.full((2,), float(i)))
        kept.append(model.seen)
    assert [seen.first[0].item() for seen in kept] == [1.0, 2.0, 3.0, 4.0]
    assert [seen.rest["mean"] for seen in kept] == [1.0, 2.0, 3.0, 4.0]
    assert len(set(map(id, kept))) == 4
    assert foregrad.explain_recompiles(call).eager_calls == 0


def test_another_thread_gets_at_the_list_itself():
    model = Logging()
    seen = []

    def other():
        model.log.append("other")
        seen.append((len(model.log), list(model.log)[-1]))

    def check():
        if not seen:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    model.check = check
    call = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(torch.ones(2))
        call(torch.ones(2))
    assert sum(isinstance(item, str) for item in model.log) == len(seen)
    assert len(model.log) == 2 + len(seen)


def test_a_key_that_counts():
    model = Logging()
    model.step = 0

    def note():
        model.table[model.step] = f"step {0}"
        model.step += 1

    model.check = note
    call = compiled(model)
    for _ in range(8):
        call(torch.ones(2))
    assert list(model.table) == list(range(8))
    assert all(type(key) is int for key in model.table)
    assert foregrad.explain_recompiles(call).eager_calls == 0
