"""Text made of numbers that differ in each call, where a list keeps it: each call makes it after its graph has run."""

import contextlib
import io
import types

import pytest
import torch

import foregrad
from tests.programs import Table, compiled_alike

CALLS = 14
STATE = types.SimpleNamespace(step=0, log=[], seen=set(), history={"names": []}, recent=None, status="")
TABLE = {}
compiles, is_eager = COMPILED, EAGER = Table(), Table()


@compiles
def a_count(x):
    STATE.step += 1
    STATE.log.append(f"step {STATE.step:04d}")
    return x * 2


@compiles
def a_count_and_a_loss(x):
    STATE.step += 1
    loss = (x * x).sum()
    STATE.log.append(f"step {STATE.step}: {loss.item():.3f} {STATE.step * 0.5!r} {loss:.1f}")
    return loss


@compiles
def a_loss(x):
    loss = (x * x).sum()
    STATE.log.append("loss {:.3f}".format(loss.item()))  # noqa: UP032
    return loss


@compiles
def several_in_a_container(x):
    STATE.step += 1
    loss = (x * x).sum()
    STATE.log.append({"step": STATE.step, "name": f"s{STATE.step}", "parts": (f"{loss.item():.2f}", [x])})
    return loss


@compiles
def other_methods(x):
    STATE.step += 1
    STATE.log.insert(0, f"{STATE.step}")
    STATE.log.extend([f"{STATE.step}", "and", f"{STATE.step + 1:>5}"])
    STATE.history["names"].append(f"<{STATE.step}>")
    STATE.seen.add(f"{STATE.step}")
    return x * 2


@compiles
def a_print_and_an_append(x):
    STATE.step += 1
    print(f"step {STATE.step:04d}", STATE.step, f"{x.sum().item():.2f}", sep=" | ")
    STATE.log.append(f"step {STATE.step}")
    return x * STATE.step


@compiles
def a_number_derived(x):
    STATE.step += 1
    epoch = STATE.step // 4
    STATE.log.append(f"{epoch} of {STATE.step % 7} {100 * STATE.step / 14:.0f}%")
    return x * 2


@compiles
def a_key(x):
    STATE.step += 1
    TABLE["last"] = f"{x.sum().item():.2f} at {STATE.step}"
    return x * 2


@is_eager
def an_attribute_and_a_key_among_others(x):
    STATE.step += 1
    STATE.status = f"step {STATE.step}"
    STATE.history["last"] = f"{x.sum().item():.2f} at {STATE.step}"
    return x * 2


@compiles
def a_sum_of_texts(x):
    STATE.step += 1
    STATE.log.append("step " + str(STATE.step) + ", loss " + str(x.sum().item()))
    return x * 2


@compiles
def a_result(x):
    STATE.step += 1
    return x * 2, f"step {STATE.step}", {"loss": [f"{x.sum().item():.3f}"]}


class Labelled(torch.nn.Module):
    label = ""

    def __init__(self):
        super().__init__()
        self.told = None

    def forward(self, x):
        STATE.step += 1
        self.label = f"step {STATE.step}"
        self.told = f"{x.sum().item():.2f}"
        return x * 2


LABELLED = Labelled()


@compiles
def attributes_of_a_module(x):
    return LABELLED(x)


class Watchful:
    def __setattr__(self, name, value):
        super().__setattr__(name, value.upper() if len(value) > 6 else value)


class Told:
    @property
    def status(self):
        return self.__dict__["kept"]

    @status.setter
    def status(self, value):
        self.kept = value[:3]


WATCHFUL, TOLD = Watchful(), Told()


@is_eager
def sets_what_a_setter_looks_at(x):
    STATE.step += 1
    WATCHFUL.status = f"step {STATE.step}"
    return x * 2


@is_eager
def sets_a_property(x):
    STATE.step += 1
    TOLD.status = f"{STATE.step} step"
    return x * 2


@is_eager
def reads_the_attribute_by_a_name_made_up(x):
    STATE.step += 1
    STATE.status = f"step {STATE.step}"
    name = "status" if STATE.step else "step"
    return x * len(getattr(STATE, name))


@is_eager
def reads_all_attributes(x):
    STATE.step += 1
    STATE.status = f"step {STATE.step}"
    return x * sum(len(value) for value in vars(STATE).values() if isinstance(value, str))


@is_eager
def reads_the_key(x):
    STATE.step += 1
    STATE.history["last"] = f"step {STATE.step}"
    return x * len(next(reversed(STATE.history.values())))


@is_eager
def reads_the_attribute_of_a_module(x):
    return LABELLED(x) * len(LABELLED.label)


@is_eager
def a_result_of_a_helper(x):
    STATE.step += 1

    def named():
        return f"step {STATE.step}"

    return x * len(named())


def shouted(function):
    return lambda x: (lambda y, text: (y, text.upper() if len(text) > 6 else text))(*function(x))


@is_eager
@shouted
def a_result_that_a_decorator_looks_at(x):
    STATE.step += 1
    return x * 2, f"step {STATE.step}"


class Sum:
    def __radd__(self, text):
        return len(text)


@is_eager
def a_sum_with_an_object(x):
    STATE.step += 1
    return x * (str(STATE.step) + Sum())


@is_eager
def a_sum_with_text_of_a_name(x):
    STATE.step += 1
    name = Sum()
    STATE.log.append(str(STATE.step) + name)
    return x


@is_eager
def looks_at_the_text(x):
    STATE.step += 1
    text = f"step {STATE.step}"
    STATE.log.append(text)
    return x * len(text)


@is_eager
def looks_at_the_list(x):
    STATE.step += 1
    STATE.log.append(f"step {STATE.step}")
    return x * len(STATE.log[-1])


@is_eager
def keeps_it_in_an_attribute(x):
    STATE.step += 1
    STATE.status = f"step {STATE.step}"
    return x * len(STATE.status)


@is_eager
def hands_it_to_a_function(x):
    STATE.step += 1

    def note(text):
        STATE.log.append(text.upper() if len(text) > 6 else text)

    note(f"step {STATE.step}")
    return x * 2


@is_eager
def takes_it_as_a_key(x):
    STATE.step += 1
    STATE.log.append({f"step {STATE.step}": x * 2})
    return x


@is_eager
def tells_what_the_number_is(x):
    STATE.step += 1
    STATE.log.append(f"{STATE.step}" if type(STATE.step) is int else "no integer")
    return x * 2


@is_eager
def stores_it_twice(x):
    STATE.step += 1
    STATE.status = STATE.history["last"] = f"step {STATE.step}"
    return x * 2


def told(function, *, grad=False):
    STATE.step, STATE.log, STATE.seen, STATE.history, STATE.status = 0, [], set(), {"names": []}, ""
    LABELLED.label, LABELLED.told = "", None
    for table in (TABLE, vars(WATCHFUL), vars(TOLD)):
        table.clear()
    results = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for i in range(CALLS):
            x = torch.full((3,), 0.3 * i - 1, requires_grad=grad)
            result = function(x)
            result, *told = result if isinstance(result, tuple) else (result,)
            results += [result.tolist(), told]
            if grad:
                results.append(torch.autograd.grad(result.sum(), x)[0].tolist())
    kept = [repr(STATE.log).replace(", grad_fn=<CloneBackward0>", ""), sorted(STATE.seen), STATE.history, STATE.status]
    kept += [TABLE.copy(), LABELLED.label, LABELLED.told, dict(vars(WATCHFUL)), dict(vars(TOLD))]
    return results, STATE.step, kept, out.getvalue()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_text_of_numbers_that_is_kept_needs_few_graphs(name, grad):
    compiled = compiled_alike(COMPILED[name], lambda f: told(f, grad=grad))
    assert len(compiled.foregrad.compilations) <= 4, "for the first number, and for all"


@pytest.mark.parametrize("name", EAGER)
def test_text_that_is_looked_at_is_eagers(name):
    compiled_alike(EAGER[name], told, on_unsupported="eager")


def in_a_list_that_is_an_argument(x, step, log):
    log.append(f"step {step:03d}: {x.sum().item():.2f}")
    return x * 2


def test_text_in_a_list_that_is_an_argument():
    compiled = foregrad.compile(in_a_list_that_is_an_argument, backend="eager", on_unsupported="raise")
    logs = [], []
    for i in range(CALLS):
        x = torch.full((2,), 0.1 * i)
        for log, function in zip(logs, (compiled, in_a_list_that_is_an_argument), strict=True):
            assert torch.equal(function(x, i, log), x * 2)
    assert logs[0] == logs[1]
    assert all(type(text) is str for text in logs[0])
    assert len(compiled.foregrad.compilations) <= 4


def test_behind_dynamo_a_kept_text_is_as_in_eager():
    torch._dynamo.reset()
    compiled = torch.compile(a_loss, backend="foregrad", options={"backend": "eager"})
    assert told(compiled) == told(a_loss)
