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


def told(function, *, grad=False):
    STATE.step, STATE.log, STATE.seen, STATE.history, STATE.status = 0, [], set(), {"names": []}, ""
    results = []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for i in range(CALLS):
            x = torch.full((3,), 0.3 * i - 1, requires_grad=grad)
            result = function(x)
            results.append(result.tolist())
            if grad:
                results.append(torch.autograd.grad(result.sum(), x)[0].tolist())
    kept = [repr(STATE.log).replace(", grad_fn=<CloneBackward0>", ""), sorted(STATE.seen), STATE.history, STATE.status]
    return results, STATE.step, kept, out.getvalue()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_text_of_numbers_that_is_kept_needs_few_graphs(name, grad):
    compiled = compiled_alike(COMPILED[name], lambda f: told(f, grad=grad))
    assert len(compiled.foregrad.compilations) <= 4, "for the numbers 0 and 1, and for all"


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
