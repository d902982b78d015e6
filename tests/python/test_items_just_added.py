"""An item that a call has just added to a container, and reads back: the container's former contents don't matter."""

import collections
import warnings

import pytest
import torch

import foregrad


def _programs():
    """(A program, the container it adds to, the most graphs for eight calls; None: it runs eagerly by name.)"""

    def last_of_list(kept, x):
        kept.append(x.sum().item())
        print(f"{len('loss')} {kept[-1]:.3f}")
        return x * kept[-1]

    def last_but_one(kept, x):
        kept.append(x.sum().item())
        kept.append(x.mean().item())
        return x * kept[-2] + kept[-1]

    def tensor(kept, x):
        kept.append(x.detach() * 2)
        return x * kept[-1]

    def changed_afterwards(kept, x):
        kept.append([x.sum().item()])
        kept[-1].append(2)
        return x * kept[-1][0]

    def of_table(kept, x):
        kept["loss"] = x.sum().item()
        kept["n"] = 3
        return x * kept["loss"]

    def text_over_text(kept, x):
        kept["loss"] = "none"
        kept["loss"] = f"{x.sum().item():.2f}"
        return x * len(kept["loss"])

    def true_is_one(kept, x):
        kept[1] = x.sum().item()
        return x * kept[True]

    def replaced(kept, x):
        kept.append(1.0)
        kept.clear()
        kept.append(x.sum().item())
        return x * kept[-1]

    def earlier_than_this_call(kept, x):
        kept.append(x.sum().item())
        return x * kept[-2] if len(kept) > 1 else x * 3

    def beyond_the_call(kept, x):
        kept.append(x.sum().item())
        try:
            return x * kept[-2]
        except IndexError:
            return x * 5

    def after_insert(kept, x):
        kept.append(2.0)
        kept.insert(10**6, x.sum().item())
        return x * kept[-1]

    def from_the_front(kept, x):
        kept.append(x.sum().item())
        return x * kept[0]

    def updated(kept, x):
        kept[f"{len(kept)}"] = 1.0
        kept["loss"] = 1.0
        kept.update(loss=x.sum().item())
        return x * kept["loss"]

    deque = collections.deque
    return [
        (last_of_list, list, 2),
        (last_but_one, list, 2),
        (last_but_one, lambda: deque(maxlen=2), 2),
        (last_but_one, lambda: deque(maxlen=1), None),
        (last_of_list, lambda: deque(maxlen=0), None),
        (tensor, list, 2),
        (changed_afterwards, list, 2),
        (of_table, dict, 2),
        (text_over_text, dict, None),
        (true_is_one, dict, 2),
        (replaced, list, None),
        (earlier_than_this_call, list, None),
        (beyond_the_call, list, None),
        (after_insert, list, None),
        (from_the_front, list, None),
        (updated, dict, None),
    ]


def _run(program, container, wrap):
    kept = container()
    step = wrap(lambda x: program(kept, x))
    seen = []
    for i in range(8):
        x = torch.arange(3.0) + i
        x.requires_grad_()
        try:
            out = step(x)
            out.sum().backward()
            seen.append((out.tolist(), x.grad.tolist()))
        except IndexError as error:
            seen.append(type(error).__name__)
        seen.append(repr(kept))
    return step, seen


def _compiled(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "container", "graphs"), _programs())
def test_as_in_eager(program, container, graphs, capsys):
    _, eager = _run(program, container, lambda function: function)
    printed = capsys.readouterr().out
    compiled, ours = _run(program, container, _compiled)
    assert ours == eager
    assert capsys.readouterr().out == printed
    if graphs is not None:
        assert len(compiled.foregrad.specializations) <= graphs
        assert not foregrad.explain_recompiles(compiled).eager


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "container", "graphs"), _programs()[1:3])  # Dynamo of 2.15 can't format numbers
def test_behind_dynamo_as_in_eager(program, container, graphs, capsys):
    torch._dynamo.reset()
    _, eager = _run(program, container, lambda function: function)
    wrap = lambda function: torch.compile(function, backend="foregrad", options={"backend": "eager"})
    assert _run(program, container, wrap)[1] == eager


def test_a_list_that_is_an_argument():
    def step(x, losses):
        losses.append(x.sum().item())
        return x * losses[-1]

    compiled, ours, eager = _compiled(step), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(8):
            x = torch.arange(3.0) + i
            assert torch.equal(compiled(x, ours), step(x, eager))
    assert ours == eager
    assert len(compiled.foregrad.specializations) <= 2


def test_calls_that_raise_again_and_again_are_not_compared_with_the_graphs(monkeypatch):
    """A schedule past its end raises in every call: such calls run eagerly, and ask no graph for its difference."""
    left = [3]

    def step(x):
        left[0] -= 1
        if left[0] < -4:
            raise ValueError("the schedule is over")
        return x * left[0]

    compiled = _compiled(step)
    x = torch.ones(3)
    for _ in range(40):
        try:
            compiled(x)
        except ValueError:
            left[0] = -4
    asked = []
    original = foregrad.dispatch.graphs.Specialization.difference
    monkeypatch.setattr(
        foregrad.dispatch.graphs.Specialization, "difference", lambda *args: asked.append(1) or original(*args)
    )
    for _ in range(5):
        with pytest.raises(ValueError, match="over"):
            compiled(x)
        left[0] = -4
    assert not asked


def test_a_list_beside_an_optimizer_that_allocates_its_state_later():
    """The optimizer reads its state, which grows in that call; the list is still only written to."""
    expected, _ = every_fourth_step(lambda step: step)
    found, compiled = every_fourth_step(lambda step: foregrad.compile(step, backend="eager"))
    assert found == expected
    assert foregrad.explain_recompiles(compiled).eager_calls == 0


def every_fourth_step(compile):
    torch.manual_seed(0)
    weight, losses, calls = torch.nn.Parameter(torch.ones(3)), [], [0]
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step(x):
        loss = (weight * x).pow(2).sum()
        loss.backward()
        calls[0] += 1
        if calls[0] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    called = compile(step)
    for _ in range(12):
        called(torch.randn(3))
    return (losses, weight.tolist(), optimizer.state_dict()["state"][0]["step"].item()), called


def test_a_window_of_tensors_is_compiled_once_it_is_full():
    window = collections.deque(maxlen=12)

    def mean(x):
        window.append(x.mean(0))
        return torch.stack(list(window)).mean(0)

    compiled = foregrad.compile(mean, backend="eager", on_unsupported="eager")
    rows = []
    for _ in range(16):
        rows.append(torch.randn(4, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", foregrad.errors.ForegradWarning)
            found = compiled(rows[-1])
        assert torch.equal(found, torch.stack([row.mean(0) for row in rows[-12:]]).mean(0))
    eager = foregrad.explain_recompiles(compiled).eager_calls
    compiled(torch.randn(4, 3))
    assert foregrad.explain_recompiles(compiled).eager_calls == eager
