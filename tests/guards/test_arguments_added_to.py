"""A container among the arguments that a call only adds to: its contents matter to no graph."""

import collections
import types
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from tests.programs import Table, compiled_alike

CALLS = 12
adds, reads = ADDING, READING = Table(), Table()


@adds
def appends_a_tensor(x, log):
    log.append((x * 2).sum().detach())
    return x * 3


@adds
def appends_a_number(x, log):
    y = (x * 2).sum()
    log.append(y.item())
    return y


@adds
def appends_its_argument(x, log):
    log.append(x)
    return x * 2


@adds
def appends_a_container(x, log):
    y = x.exp()
    log.append({"sum": y.sum(), "parts": (y, [x, None])})
    return y


@adds
def extends(x, log):
    log += [x.sin()]
    log.extend([x.cos(), x])
    log.insert(0, "first")
    return x * 2


@adds
def empties(x, log):
    log.clear()
    log.append(x * 2)
    return x


@reads
def returns_the_list(x, log):
    log.append(x * 2)
    return log, x * 3


@adds
def appends_the_list_to_itself(x, log):
    log.append(log)
    return x * 2


@adds
def appends_in_a_helper(x, log):
    def note(value, to):
        to.append(value)

    for i in range(2):
        note(x * i, log)
    return x * 2


@adds
def appends_under_a_condition(x, log):
    if x.sum() > 1:
        log.append(x * 2)
    return x * 2


@reads
def looks_at_the_length(x, log):
    log.append(x * 2)
    return x * len(log)


@reads
def looks_at_the_last(x, log):
    log.append(x * 2)
    return log[-1] + 1


@reads
def asks_whether_it_is_empty(x, log):
    log.append(x * 2)
    return x * 2 if log else x


@reads
def hands_it_to_pytorch(x, log):
    log.append(x * 2)
    return torch.stack(log[-2:])


@reads
def sets_an_item(x, log):
    log.append(x * 2)
    log[0] = x
    return x


def plain(value):
    """Tensors as lists, the list that is in itself as a word."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad
    if isinstance(value, (list, tuple, collections.deque)):
        return [plain(v) if v is not value else "itself" for v in value]
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    return value


def called(function, log, *, grad=False, calls=CALLS):
    results = []
    for i in range(calls):
        x = torch.full((3,), 0.1 * i, requires_grad=grad)
        result = function(x, log)
        results.append((plain(result), result[0] is log if isinstance(result, tuple) else None))
        if grad and isinstance(result, torch.Tensor):
            results.append(torch.autograd.grad(result.sum(), x)[0].tolist())
    return results, plain(log)


def count(compiled):
    return len(compiled.foregrad.compilations)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ADDING)
def test_a_list_that_is_added_to_needs_no_graph_for_each_length(name, grad):
    compiled = compiled_alike(ADDING[name], lambda f: called(f, ["begun"], grad=grad))
    assert count(compiled) <= 2


@pytest.mark.parametrize("name", READING)
def test_a_list_that_is_read_after_all_is_guarded(name):
    compiled_alike(READING[name], lambda f: called(f, [torch.ones(3)]), on_unsupported="eager")


def test_a_list_that_each_call_reads_and_adds_to_is_eager_by_name_after_some_graphs():
    compiled = foregrad.compile(looks_at_the_length, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=r"len\(log\) differs in each call"):
        found = called(compiled, [], calls=25)
    assert found == called(looks_at_the_length, [], calls=25)
    assert count(compiled) <= 8


def filled_set(x, kept):
    kept.add((x * 2).sum().item())
    return x


def filled_deque(x, kept):
    kept.append(x.sum().item())
    kept.appendleft(x * 2)
    return x


def filled_table(x, kept):
    kept[f"step {x.shape[0]}"] = x * 2
    kept["again"] = x * 3
    return x


def filled_lists_of_a_table(x, kept):
    kept["losses"].append(x.sum())
    kept["norms"].append(x.norm().item())
    return x


def filled_list_of_an_object(x, kept):
    kept.losses.append(x.sum())
    return x


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (filled_set, set),
        (filled_deque, collections.deque),
        (filled_deque, lambda: collections.deque(maxlen=5)),
        (filled_table, dict),
        (filled_table, lambda: collections.defaultdict(list)),
        (filled_lists_of_a_table, lambda: {"losses": [], "norms": []}),
        (filled_list_of_an_object, lambda: types.SimpleNamespace(losses=[])),
    ],
)
def test_other_containers_that_are_added_to(function, make):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    found, expected = make(), make()
    assert called(compiled, found)[0] == called(function, expected)[0]
    found, expected = (v if isinstance(v, (dict, set)) else getattr(v, "losses", v) for v in (found, expected))
    assert plain(found) == plain(expected)
    assert count(compiled) <= 2


def two_lists(x, first, second):
    first.append(x * 2)
    second.append(x * 3)
    return x


def test_two_lists_that_are_one_are_added_to_in_order():
    compiled = foregrad.compile(two_lists, backend="eager", on_unsupported="raise")
    for function in (compiled, two_lists):
        apart = [], []
        one = []
        for i in range(4):
            x = torch.full((2,), float(i))
            function(x, *apart)
            function(x, one, one)
        results = plain(apart), plain(one)
        if function is compiled:
            found = results
    assert found == results
    assert count(compiled) <= 3


def test_another_class_or_a_list_of_a_class_of_ones_own_is_told_apart():
    class Log(list):
        def append(self, value):
            super().append(("noted", value))

    compiled = foregrad.compile(appends_a_tensor, backend="eager", on_unsupported="eager")
    for function in (compiled, appends_a_tensor):
        logs = [], Log(), collections.deque()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            for i in range(4):
                for log in logs:
                    function(torch.full((2,), float(i)), log)
        with pytest.raises(AttributeError):
            function(torch.ones(2), ())
        if function is compiled:
            found = plain(list(logs))
    assert found == plain(list(logs))


KEPT = []


def test_a_list_that_the_function_also_reaches_by_itself():
    def function(x, log):
        log.append(x * 2)
        return x * len(KEPT)

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    found = []
    for f in (compiled, function):
        KEPT.clear()
        other = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            found.append([plain(f(torch.ones(2), log)) for log in (other, KEPT, other, KEPT, KEPT)] + [plain(other)])
    assert found[0] == found[1]


def test_what_was_added_before_an_error_stays():
    def function(x, index, log):
        log.append("before")
        y = x[index]
        log.append(y)
        return y

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    found = []
    for f in (compiled, function):
        log = []
        for i in (0, 1, 7, 2):
            try:
                f(torch.arange(3.0), torch.tensor(i), log)
            except IndexError:
                log.append("raised")
        found.append(plain(log))
    assert found[0] == found[1]
    assert "raised" in found[0]


def test_a_list_that_some_calls_read():
    def function(x, log, looks):
        log.append(x * 2)
        return x * len(log) if looks else x

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    found = []
    for f in (compiled, function):
        log = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            found.append(([plain(f(torch.ones(2), log, i % 3 == 2)) for i in range(9)], plain(log)))
    assert found[0] == found[1]


def test_behind_dynamo_the_list_is_as_in_eager():
    torch._dynamo.reset()
    compiled = torch.compile(appends_a_tensor, backend="foregrad", options={"backend": "eager"})
    assert called(compiled, [], calls=4) == called(appends_a_tensor, [], calls=4)
