"""Whole training steps: a learning rate that a scheduler changes makes no graph of its own, and all is eager's bit by bit."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import each

OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.05, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.01, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.01, amsgrad=True, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=0.01, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=0.01, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.01, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.01, lr_decay=1e-3, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, lr=0.01, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=0.01, **k),
    "Adafactor": lambda p, foreach: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p, foreach: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
}
OF = torch.optim.lr_scheduler
SCHEDULERS = {
    "linear": lambda o: OF.LinearLR(o, total_iters=100),
    "exponential": lambda o: OF.ExponentialLR(o, 0.95),
    "lambda": lambda o: OF.LambdaLR(o, lambda epoch: min(1.0, (epoch + 1) / 10)),
    "polynomial": lambda o: OF.PolynomialLR(o, total_iters=100, power=2.0),
    "cosine": lambda o: OF.CosineAnnealingLR(o, 100),
    "one cycle": lambda o: OF.OneCycleLR(o, 0.1, total_steps=100),
}
OTHERS = {
    "step": lambda o: OF.StepLR(o, 10),
    "milestones": lambda o: OF.MultiStepLR(o, [8, 20, 30]),
    "constant": lambda o: OF.ConstantLR(o, total_iters=20),
    "multiplicative": lambda o: OF.MultiplicativeLR(o, lambda epoch: 0.95),
    "restarts": lambda o: OF.CosineAnnealingWarmRestarts(o, 10, 2),
    "cyclic": lambda o: OF.CyclicLR(o, 1e-3, 0.1, step_size_up=7, cycle_momentum="momentum" in o.defaults),
    "warm-up, then cosine": lambda o: OF.SequentialLR(
        o, [OF.LinearLR(o, total_iters=10), OF.CosineAnnealingLR(o, 40)], [10]
    ),
    "chained": lambda o: OF.ChainedScheduler([OF.ConstantLR(o, total_iters=5), OF.ExponentialLR(o, 0.9)]),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=10),
}


def training(optimizer, scheduler, foreach, *, inside, wrap, steps=12):
    """What the steps give, and how many graphs there were after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = OPTIMIZERS[optimizer](list(model.parameters()), foreach=foreach)
    scheduler = (SCHEDULERS | OTHERS)[scheduler](optimizer)

    def update():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def step(x):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    def whole_step(x):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        update()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    call = wrap(whole_step if inside else step)
    losses, graphs = [], []
    for _ in range(steps):
        losses.append(call(torch.randn(5, 4)))
        if not inside:
            scheduler.step()
        graphs.append(len(foregrad.explain_recompiles(call)) if wrap is compiled else 0)
    last = {name: vars(scheduler).get(name) for name in ("last_epoch", "_step_count", "_last_lr")}
    return [losses, list(model.parameters()), optimizer.state_dict(), last], graphs


def compiled(function):
    return foregrad.compile(function, backend="eager")


def is_same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b


def check(optimizer, scheduler, foreach, *, inside, most=2, steps=12, settled=7):
    how = {"inside": inside, "steps": steps}
    expected, _ = training(optimizer, scheduler, foreach, **how, wrap=lambda f: f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, graphs = training(optimizer, scheduler, foreach, **how, wrap=compiled)
    assert is_same(found, expected)
    assert graphs[-1] - graphs[0] <= most
    assert graphs[-1] == graphs[settled]


ONE_WAY = {"Adafactor", "Muon"}  # no `foreach` in them


@pytest.mark.parametrize(
    ("optimizer", "foreach"),
    dict.fromkeys((name, way or name in ONE_WAY) for name, way in each(OPTIMIZERS, (True, False))),
)
def test_every_optimizer_with_a_scheduler_inside(optimizer, foreach):
    ways = 2 if optimizer == "RAdam" else 1  # it takes another in its first five steps
    check(optimizer, "cosine", foreach, inside=True, most=1 + ways)


def with_an_optimizer(schedulers):
    """A scheduler sets numbers of the groups, whatever optimizer reads them: each with one of two, which has momentum."""
    return list(zip(itertools.cycle(["momentum", "AdamW"]), schedulers, strict=False))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("optimizer", "scheduler"), with_an_optimizer(SCHEDULERS))
def test_every_scheduler(optimizer, scheduler, inside):
    check(optimizer, scheduler, None, inside=inside)


@pytest.mark.parametrize(("optimizer", "scheduler"), with_an_optimizer(OTHERS))
def test_fifty_steps_with_every_other_scheduler_outside(optimizer, scheduler):
    check(optimizer, scheduler, None, inside=False, steps=50, settled=22)


PLATEAUS = {
    "outside": (4, None),
    "of a number": (9, torch.Tensor.item),
    "of a tensor": (9, torch.Tensor.detach),
}


@pytest.mark.parametrize("where", PLATEAUS)
def test_a_plateau_that_depends_on_the_loss(where):
    (most, inside), found = PLATEAUS[where], []
    for wrap in (lambda function: function, compiled):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = OF.ReduceLROnPlateau(optimizer, patience=2)

        def step(x, model=model, optimizer=optimizer, scheduler=scheduler):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if inside is not None:
                scheduler.step(inside(loss))
            return loss.detach()

        call, losses = wrap(step), []
        for _ in range(50):
            losses.append(call(torch.randn(5, 4)))
            if inside is None:
                scheduler.step(losses[-1])
        found.append([losses, *model.parameters(), optimizer.state_dict(), scheduler.best, scheduler.num_bad_epochs])
    assert is_same(*found)
    report = foregrad.explain_recompiles(call)
    assert len(report) <= most
    assert report.eager_calls == 0


def test_a_count_that_is_set_to_the_value_that_it_has():
    class Stopping:
        best, bad, step = float("inf"), 0, 0

        def after(self, loss):
            self.step += 1
            self.bad = 0 if loss < self.best else self.bad + 1
            self.best = min(self.best, loss)
            return self.bad

    losses, found = [3.0, 2.0, 1.0, 0.5, 4.0, 5.0, 0.4, 0.3, 6.0, 0.2, 0.1, 7.0, 8.0, 9.0, 0.05], []
    for wrap in (lambda function: function, compiled):
        stopping = Stopping()
        call = wrap(lambda x, stopping=stopping: stopping.after(x.mean().item()))
        results = [call(torch.full((3,), loss)) for loss in losses]
        found.append([results, stopping.best, stopping.bad, stopping.step])
    assert is_same(*found)
    assert len(foregrad.explain_recompiles(call)) <= 6


def counting(graphs):
    def compiler(gm, example_inputs):
        graphs.append(gm)
        return gm

    return compiler


@pytest.mark.parametrize(("optimizer", "foreach"), each(OPTIMIZERS, [False, True]))
def test_the_first_graph_that_is_compiled_serves_every_step(optimizer, foreach):
    """A number read from a tensor that the call has written differs in the next call: it is symbolic from the first."""
    ways = 2 if optimizer == "RAdam" else 1
    model, graphs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), []
    made = OPTIMIZERS[optimizer](list(model.parameters()), foreach=foreach)

    @foregrad.compile(backend=counting(graphs))
    def step(x):
        model(x).square().mean().backward()
        made.step()
        made.zero_grad()

    step(torch.ones(2, 4))  # makes the state
    step(torch.ones(2, 4))
    before = len(graphs)
    for _ in range(8):
        step(torch.ones(2, 4))
    assert before == 1
    assert len(graphs) <= ways


USES_OF_A_COUNT = {
    "arithmetic": lambda x, n: x / (1 - 0.9**n),
    "a branch": lambda x, n: x * 2 if n > 3 else x,
    "text": lambda x, n: x + len(f"{n:.1f}"),
    "an index": lambda x, n: x[: int(n) % 3 + 1],
    "a value in a list": lambda x, n: x + [1.0, 2.0, 3.0][int(n) % 3],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("use", USES_OF_A_COUNT)
def test_a_count_that_the_call_raises_and_reads(use, dtype):
    """Where it can't be symbolic, its value is decided on, as before."""
    found = []
    for wrap in (lambda function: function, compiled):
        count = torch.zeros((), dtype=dtype)

        def function(x, count=count):
            count.add_(1)
            return USES_OF_A_COUNT[use](x, count.item())

        call = wrap(function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", foregrad.errors.ForegradWarning)  # of those that go eager in the end
            found.append([call(torch.ones(4)) for _ in range(6)] + [count])
    assert is_same(*found)


def test_what_a_comparison_of_a_counter_gives_may_be_kept():
    """A flag of an early stop, and `create_graph` in every third step."""

    def make():
        state = {"steps": 0, "stop": False}

        def step(x):
            state["steps"] += 1
            state["stop"] = state["steps"] >= 9
            (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=state["steps"] % 3 == 0)
            return torch.autograd.grad(g.sum(), x)[0] if g.requires_grad else g

        return state, step

    (state, step), (expected_state, expected) = make(), make()
    compiled = foregrad.compile(step, backend="eager", on_unsupported="raise")
    for i in range(20):
        x = torch.tensor([1.0, 2.0 + i], requires_grad=True)
        assert torch.equal(compiled(x), expected(x))
        assert state == expected_state
        assert type(state["stop"]) is bool
    assert len(foregrad.explain_recompiles(compiled)) <= 6


def test_a_number_that_is_set_to_its_own_value_by_arithmetic():
    """A scheduler that is told fractions of epochs keeps the whole epoch: for many steps the number is the old one."""

    def make():
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], 0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
        state = {"epoch": 0, "batch": 0}

        def step(x):
            optimizer.zero_grad()
            (weight * x).square().sum().backward()
            optimizer.step()
            scheduler.step(state["epoch"] + state["batch"] / 10)
            state["batch"] += 1
            if state["batch"] == 10:
                state["batch"], state["epoch"] = 0, state["epoch"] + 1
            return scheduler.last_epoch, scheduler.get_last_lr()

        return weight, step

    (weight, step), (expected_weight, expected) = make(), make()
    compiled = foregrad.compile(step, backend="eager", on_unsupported="raise")
    for i in range(25):
        x = torch.tensor([1.0, 0.1 * i])
        assert compiled(x) == expected(x)
        assert torch.equal(weight, expected_weight)
    assert len(foregrad.explain_recompiles(compiled)) <= 8
