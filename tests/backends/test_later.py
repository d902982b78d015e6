"""`backend="auto"` begins with eager's kernels; another process compiles, and its graph takes over between two calls."""

import copy
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import foregrad
from foregrad.dispatch.graphs import _Noticing
from foregrad.store.later import job, successor, worker
from tests import forked

pytestmark = [
    pytest.mark.skipif(foregrad.get_backend("auto").first is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Inductor compiles at once"),
]


@pytest.fixture(autouse=True)
def begins_with_eager():
    with foregrad.config.override(background=True):
        yield


def graphs(compiled):
    return list(compiled.foregrad.all_specializations())


def is_of_inductor(graph):
    return graph.successor is None


def is_waiting(compiled):
    dispatchers = [compiled.foregrad]
    for dispatcher in dispatchers:
        dispatchers += dispatcher.inner()
    calls = [call for dispatcher in dispatchers for call in dispatcher.graphs.calls]
    return any(isinstance(call, _Noticing) and call.record.served_again for call in calls)


def wait(compiled, call, seconds=300):
    """Call until no graph waits for its successor."""
    call(), call()
    end = time.monotonic() + seconds
    while is_waiting(compiled):
        assert time.monotonic() < end
        time.sleep(0.1)
        call()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def gradients(run, parameters):
    return torch.autograd.grad(run.square().sum(), parameters)


def test_calls_have_eagers_bits_until_the_compiled_graph_takes_over():
    net = network()
    compiled, x = foregrad.compile(net), torch.randn(4, 8)
    assert torch.equal(compiled(x), net(x))
    before = compiled(x)
    assert torch.equal(before, net(x))
    assert [is_of_inductor(graph) for graph in graphs(compiled)] == [False]
    wait(compiled, lambda: compiled(x))
    assert [is_of_inductor(graph) for graph in graphs(compiled)] == [True]
    torch.testing.assert_close(compiled(x), net(x))
    for one, two in zip(gradients(compiled(x), net.parameters()), gradients(net(x), net.parameters()), strict=True):
        torch.testing.assert_close(one, two)
    # A forward from before keeps its own backward.
    for one, two in zip(gradients(before, net.parameters()), gradients(net(x), net.parameters()), strict=True):
        assert torch.equal(one, two)
    assert len(foregrad.explain_recompiles(compiled).entries) == 1
    with torch.no_grad():
        net[3].bias += 1
    torch.testing.assert_close(compiled(x), net(x))
    compiled(torch.randn(5, 8))  # the guards are the same
    assert len(foregrad.explain_recompiles(compiled).entries) == 2


def test_random_numbers_are_eagers_before_and_after():
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.4), nn.Tanh(), nn.Linear(64, 2))
    compiled, x = foregrad.compile(net), torch.randn(4, 8)

    def drawn(function):
        torch.manual_seed(3)
        return function(x), torch.rand(2)

    def check():
        for one, two in zip(drawn(compiled), drawn(net), strict=True):
            torch.testing.assert_close(one, two)

    wait(compiled, check)
    assert is_of_inductor(graphs(compiled)[0])
    check()


def test_a_graph_of_symbolic_sizes_serves_further_sizes_after_the_change():
    def loss(x):
        return torch.softmax(x @ x.t(), -1).sum() * x.shape[0]

    compiled = foregrad.compile(loss)

    def check(size):
        one = torch.randn(size, 4, requires_grad=True)
        two = one.detach().clone().requires_grad_()
        compiled(one).backward(), loss(two).backward()
        torch.testing.assert_close(one.grad, two.grad, atol=1e-4, rtol=1e-4)

    check(5)
    wait(compiled, lambda: check(7))
    assert is_of_inductor(graphs(compiled)[-1])
    for size in (3, 9, 20, 200):  # Inductor has a condition of its own on the last
        check(size)
    assert len(foregrad.explain_recompiles(compiled).entries) <= 3


def test_second_derivatives_hold_after_the_change():
    net = network()
    compiled, x = foregrad.compile(net), torch.randn(4, 8, requires_grad=True)

    def twice(function):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, net[0].weight, net[1].weight])

    wait(compiled, lambda: compiled(x).sum().backward())
    assert is_of_inductor(graphs(compiled)[0])
    for one, two in zip(twice(compiled), twice(net), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_effects_and_settings_are_the_same_after_the_change():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            x.mul_(2)
            return self.linear(self.norm(x))

    net = Net()
    other = copy.deepcopy(net)
    compiled = foregrad.compile(net)

    def check():
        x, y = torch.randn(3, 4), None
        y = x.clone()
        with torch.autocast("cpu", torch.bfloat16):
            one, two = compiled(x), other(y)
        assert one.dtype == two.dtype == torch.bfloat16
        torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)
        assert torch.equal(x, y)
        one.sum().backward(), two.sum().backward()

    wait(compiled, check)
    assert is_of_inductor(graphs(compiled)[0])
    check()
    for one, two in zip(net.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_whole_step_that_reads_numbers_from_tensors_goes_there_as_data_and_back():
    net = network()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled, x = foregrad.compile(step, backend="eager"), torch.randn(4, 8)
    for _ in range(3):
        compiled(x)
    joint = graphs(compiled)[-1].product.captured.joint
    data = json.loads(json.dumps(job.graph_as_data(joint)))
    assert data["floats"]
    assert str(job.graph_from_data(data).module.graph) == str(joint.module.graph)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_graph_called_again_in_a_forked_process_stays_on_eagers_kernels():
    compiled, x = foregrad.compile(lambda x: x.exp() + 0.625), torch.randn(5)
    compiled(x)
    child = os.fork()
    if not child:
        compiled(x)
        os._exit(is_waiting(compiled) or not torch.equal(compiled(x), x.exp() + 0.625))
    assert os.waitpid(child, 0)[1] == 0


def test_several_threads_call_through_the_change():
    net = network()
    compiled, x, wrong = foregrad.compile(net), torch.randn(4, 8), []
    expected = net(x)
    over = threading.Event()

    def calls():
        while not over.is_set():
            try:
                torch.testing.assert_close(compiled(x), expected)
            except Exception as error:
                wrong.append(error)
            time.sleep(0.01)

    compiled(x)
    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait(compiled, lambda: compiled(x))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert [is_of_inductor(graph) for graph in graphs(compiled)] == [True]


def test_a_graph_with_an_operator_of_this_process_is_compiled_here():
    @torch.library.custom_op("foregrad_later::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    compiled, x = foregrad.compile(lambda x: twice(x.sin()).cos()), torch.randn(5)
    wait(compiled, lambda: compiled(x))
    assert is_of_inductor(graphs(compiled)[0])
    torch.testing.assert_close(compiled(x), (x.sin() * 2).cos())


def test_a_graph_stays_on_eagers_kernels_if_the_process_that_compiles_ends(caplog, monkeypatch):
    monkeypatch.setattr(worker, "_START", "import sys; sys.stdin.readline()")
    worker.WORKER.stop()
    compiled, x = foregrad.compile(lambda x: x.sin().cos() + 0.125), torch.randn(5)
    wait(compiled, lambda: compiled(x))
    assert not is_of_inductor(graphs(compiled)[0])
    assert torch.equal(compiled(x), x.sin().cos() + 0.125)
    assert "stays on eager's kernels" in caplog.text
    assert "the process that compiled it has ended" in caplog.text


def test_a_failure_of_inductors_leaves_the_graph_on_eagers_kernels(caplog, monkeypatch):
    compiled, x = foregrad.compile(lambda x: x.cos().sin() + 0.375), torch.randn(5)
    monkeypatch.setattr(successor._Task, "message", lambda self: 1 // 0)
    wait(compiled, lambda: compiled(x))
    assert not is_of_inductor(graphs(compiled)[0])
    assert "ZeroDivisionError" in caplog.text


def first_is_of_inductor(**how):
    compiled = foregrad.compile(lambda x: x.exp() + 0.5, **how)
    compiled(torch.randn(5))
    return is_of_inductor(graphs(compiled)[0])


def test_where_the_moment_of_the_change_would_matter_inductor_compiles_at_once():
    assert not first_is_of_inductor()
    assert first_is_of_inductor(backend="inductor")
    assert first_is_of_inductor(memory_budget=1.0)
    assert first_is_of_inductor(partition=foregrad.everything_saveable)
    assert not first_is_of_inductor(partition="min_cut")
    with foregrad.config.override(background=False):
        assert first_is_of_inductor()
    with foregrad.config.override(cache=False):
        assert first_is_of_inductor()
    torch.use_deterministic_algorithms(True)
    try:
        assert first_is_of_inductor()
    finally:
        torch.use_deterministic_algorithms(False)


def test_tools_and_dynamo_take_inductor_at_once():
    compiled, x = foregrad.compile(lambda x: x.exp() + 0.25), torch.randn(5)
    compiled.foregrad.graph_for((x,), {})
    assert is_of_inductor(graphs(compiled)[0])
    assert compiled.foregrad.like(lambda x: x.exp(), on_unsupported="raise").pipeline.first is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_starts_no_process():
    child = os.fork()
    if not child:
        os._exit(worker.may_work())
    assert os.waitpid(child, 0)[1] == 0
    assert worker.may_work()


def test_a_graph_as_data_comes_back_as_it_was():
    joint = foregrad.capture(network(), torch.randn(4, 8))
    back = job.graph_from_data(job.graph_as_data(joint))
    assert str(back.module.graph) == str(joint.module.graph)
    assert job.graph_as_data(back) == job.graph_as_data(joint)


SCRIPT = """
import os, sys, torch, foregrad
foregrad.config.progress = True
compiled = foregrad.compile(lambda x: x.sin() + {number}, backend="auto")
for _ in range(3):
    compiled(torch.ones(3))
from foregrad.store.later.worker import WORKER
import time
while WORKER._process is None:
    time.sleep(0.05)
print(WORKER._process.pid)
"""


@pytest.mark.skipif(os.name != "posix", reason="process ids of POSIX")
def test_the_process_that_compiles_ends_with_the_program():
    number = time.time()  # which no former process has compiled
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(number=number)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "FOREGRAD_BACKGROUND": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "`<lambda>` runs with eager's kernels until Inductor's are compiled" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


SLOW_IMPORT = """
import os, sys, threading, time
from foregrad.locks import importing
sys.path.insert(0, sys.argv[1])
begun = threading.Event()
sys.modules["begun_here"] = begun

def work():
    with importing():
        import imported_slowly

threading.Thread(target=work).start()
begun.wait()
child = os.fork()
if not child:
    import imported_slowly
    os._exit(imported_slowly.done)
end = time.monotonic() + 30
while time.monotonic() < end:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        print("exit", os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    print("hangs")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_waits_for_imports_of_the_thread_that_hands_over_graphs(tmp_path):
    """A module's lock that a thread of the parent holds at the fork is never free in the child."""
    slowly = "import sys, time\nsys.modules['begun_here'].set()\ntime.sleep(1)\ndone = 7\n"
    (tmp_path / "imported_slowly.py").write_text(slowly)
    (tmp_path / "forks.py").write_text(SLOW_IMPORT)
    assert forked.run(str(tmp_path / "forks.py"), str(tmp_path)).stdout == "exit 7\n"
