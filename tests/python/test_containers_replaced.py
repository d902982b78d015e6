"""A container that a call fills and replaces by a new one is another one in each call: compiled calls do as much."""

import collections
import types

import pytest
import torch

import foregrad

_SOON = 3  # graphs: the first call's, that with the container as an input, one for another branch


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, _copied(item)) for key, item in value.items()]
    if isinstance(value, (_State, _Slots)):
        return [(name, _copied(getattr(value, name))) for name in ("count", "seen", "kept", "inner")]
    return [_copied(item) for item in value] if isinstance(value, (list, tuple, collections.deque)) else value


class _State:
    """A state that each change copies, in the manner of a registry of backends or of `dataclasses.replace`."""

    def __init__(self, former=None):
        self.count, self.seen, self.kept, self.inner = 0, set(), [], None
        if former is not None:
            self.count, self.inner = former.count, former.inner
            self.seen.update(former.seen)
            self.kept.extend(former.kept)


class _Slots:
    __slots__ = ("count", "inner", "kept", "seen")

    def __init__(self, former=None):
        self.count, self.seen, self.kept = (0, (), ()) if former is None else (former.count, former.seen, former.kept)
        self.inner = types.SimpleNamespace(scale=2.0) if former is None else former.inner


def _run(make, body, wrap, between=lambda place, number: None):
    """What some calls give; what is in the container that each found, and which of them are one."""
    place = types.SimpleNamespace(kept=make(), other=None)
    call = wrap(lambda x: body(place, x))
    found, given = [], []
    for number in range(8):
        found.append(place.kept)
        given.append(call(torch.full((2,), float(number))).tolist())
        between(place, number)
    found += [place.kept, place.other]
    return [given, _copied(found), [[a is b for b in found] for a in found]], call


def _same_as_eager(make, body, most=2, **more):
    _, call = found = _run(make, body, lambda f: foregrad.compile(f, backend="eager"), **more)
    assert found[0] == _run(make, body, lambda f: f, **more)[0]
    report = foregrad.explain_recompiles(call)
    assert 0 < len(report) <= most
    assert not report.eager


def _dict(place, x):
    place.kept["a"] = x * 2
    place.kept["b"] = 3
    y = place.kept["a"] + place.kept["b"]
    place.kept = {}
    return y


def _list(place, x):
    place.kept.append(x * 2)
    y = sum(place.kept)
    place.kept = []
    return y


def _deque(place, x):
    place.kept.appendleft(x)
    y = place.kept[0] * 2
    place.kept = collections.deque()
    return y


def _defaultdict(place, x):
    place.kept["a"].append(x)
    y = place.kept["a"][0] * 2
    place.kept = collections.defaultdict(list)
    return y


def _moved(place, x):
    place.other = place.kept
    place.kept["a"] = x
    place.kept = {}
    return place.other["a"] + 1


def _nested(place, x):
    place.kept["a"] = place.kept["a"] + 1
    y = x * place.kept["a"] + len(place.kept["b"])
    place.kept = {"a": place.kept["a"] + 1, "b": [1, 2]}
    return y


def _written(place, x):
    place.kept["a"].mul_(2)
    y = x * place.kept["a"]
    place.kept = {"a": place.kept["a"].clone()}
    return y


def _only_written(place, x):
    place.kept["a"] = x
    place.kept = {}
    return x * 2


def _only_written_and_moved(place, x):
    place.kept["a"] = x
    place.other, place.kept = place.kept, {}
    return x * 2


def _object(place, x):
    place.kept = _State(place.kept)
    place.kept.seen.add("torch")
    return x * len(place.kept.seen)


def _object_that_counts(place, x):
    place.kept = _State(place.kept)
    place.kept.count += 1
    return x * place.kept.count


def _object_of_tensors(place, x):
    former, place.kept = place.kept, _State(place.kept)
    place.kept.inner = x * 2 if former.inner is None else former.inner + x
    return place.kept.inner * 3


def _object_that_stays_behind(place, x):
    place.other, place.kept = place.kept, _State(place.kept)
    place.other.count = 5
    return x + place.kept.count


def _object_with_slots(place, x):
    place.kept = _Slots(place.kept)
    place.kept.inner.scale += 1.0
    return x * place.kept.inner.scale


@pytest.mark.parametrize(
    "make, body",
    [
        (dict, _dict),
        (list, _list),
        (collections.deque, _deque),
        (lambda: collections.defaultdict(list), _defaultdict),
        (dict, _moved),
        (lambda: {"a": 1, "b": [1, 2]}, _nested),
        (lambda: {"a": torch.ones(2)}, _written),
        (dict, _only_written),
        (dict, _only_written_and_moved),
    ],
)  # fmt: skip
def test_as_in_eager(make, body):
    _same_as_eager(make, body)


@pytest.mark.parametrize(
    "make, body, most",
    [
        (_State, _object, _SOON),
        (_State, _object_that_counts, _SOON + 1),
        (_State, _object_of_tensors, _SOON),
        (_State, _object_that_stays_behind, _SOON),
        (_Slots, _object_with_slots, _SOON + 1),
    ],
)
def test_objects_as_in_eager(make, body, most):
    """A plain object that each call replaces by one made of it."""
    _same_as_eager(make, body, most)


def test_a_tuple_in_a_list_that_each_call_replaces():
    """The state of a recurrent network, `hidden[0] = state`; the list stays."""

    def body(place, x):
        first, second = place.kept[1]
        place.kept[1] = first + x, second * 2 + x
        place.kept[0] += 1
        return first + second * place.kept[0]

    _same_as_eager(lambda: [2, (torch.zeros(2), torch.zeros(2))], body)


def test_one_that_the_program_fills_between_calls():
    def fill(place, number):
        if number % 2:
            place.kept["c"] = torch.ones(2)

    def body(place, x):
        place.kept["a"] = x
        y = place.kept["a"] + len(place.kept)
        place.kept = {}
        return y

    _same_as_eager(dict, body, _SOON, between=fill)


@pytest.mark.parametrize("replaced", ["one of two", "both by two", "both by one"])
def test_one_in_two_places(replaced):
    found = []
    for wrap in (lambda f: f, lambda f: foregrad.compile(f, backend="eager")):
        a, b = types.SimpleNamespace(), types.SimpleNamespace()
        a.kept = b.kept = {}

        def step(x, a=a, b=b):
            a.kept["a"] = x
            y = b.kept.get("a", x) * 2 + len(b.kept)
            a.kept = {}
            if replaced != "one of two":
                b.kept = a.kept if replaced == "both by one" else {}
            return y

        call = wrap(step)
        found.append([])
        for number in range(6):
            given = call(torch.full((2,), float(number))).tolist()
            found[-1].append([given, _copied(a.kept), _copied(b.kept), a.kept is b.kept])
    assert found[0] == found[1]


def test_a_function_of_a_library_in_it_is_that_function():
    """The factory of a `defaultdict`, which no code of the program names."""
    scaler = torch.amp.GradScaler("cpu")
    factory = scaler._per_optimizer_states.default_factory
    place = types.SimpleNamespace(kept=scaler._per_optimizer_states)

    @foregrad.compile(backend="eager")
    def step(x):
        place.kept = collections.defaultdict(place.kept.default_factory)
        return x + 1

    for _ in range(4):
        before = place.kept
        step(torch.ones(2))
        assert place.kept is not before
        assert place.kept.default_factory is factory
    assert not foregrad.explain_recompiles(step).eager


class Making(dict):
    """A table that makes items for missing keys, in its own way."""

    def __missing__(self, key):
        self[key] = made = {}
        return made


@pytest.mark.parametrize("table", [lambda: collections.defaultdict(dict), Making])
def test_a_look_at_a_replaced_table_makes_no_items(table):
    """A fresh table at the place of one with tensors: the earlier graph's look for its keys leaves no item behind."""

    def run(wrap):
        box = types.SimpleNamespace(weight=torch.ones(2), state=table())

        def step(x):
            state = box.state[box.weight]
            if not state:
                state["sum"] = torch.zeros(2)
            state["sum"].add_(x)
            return state["sum"] * box.weight

        call, found = wrap(step), []
        for i in range(12):
            if i in (6, 9):
                box.weight, box.state = torch.full((2,), float(i)), table()
            found += [call(torch.full((2,), float(i))), len(box.state)]
        return found

    eager, compiled = run(lambda f: f), run(foregrad.compile(backend="eager"))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_an_optimizer_replaced_with_its_model_has_its_own_state_alone(make):
    box = types.SimpleNamespace()

    def renew():
        box.model = torch.nn.Linear(3, 2)
        box.optimizer = make(box.model.parameters())

    @foregrad.compile(backend="eager")
    def step(x):
        box.optimizer.zero_grad()
        box.model(x).square().sum().backward()
        box.optimizer.step()

    for i in range(12):
        if i in (0, 6):
            renew()
        step(torch.randn(4, 3))
    assert set(box.optimizer.state) == set(box.model.parameters())
    assert len(box.optimizer.state_dict()["state"]) == 2
