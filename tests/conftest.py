"""Settings for every test: one thread, fixed seeds, every stage checked, our own warnings are errors, hypothesis profiles."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time
import types

import hypothesis
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

os.environ.setdefault("FOREGRAD_ON_UNSUPPORTED", "raise")  # `tests/__init__.py` is not imported by every run
os.environ.setdefault("FOREGRAD_CHECK", "1")  # every stage's result is checked against its rules
os.environ["FOREGRAD_BUILD_NATIVE"] = "0"  # no compiler runs beside the tests
os.environ["FOREGRAD_BACKGROUND"] = "0"  # nor Inductor
os.environ["FOREGRAD_CACHE_DIR"] = tempfile.mkdtemp(prefix="foregrad-tests-")  # of this process's own
atexit.register(shutil.rmtree, os.environ["FOREGRAD_CACHE_DIR"], ignore_errors=True)
# Inductor's kernels are kept between runs: to compile C++ takes seconds.
KERNELS = os.path.join(tempfile.gettempdir(), f"foregrad-tests-inductor-{torch.__version__}-{os.getuid()}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", KERNELS)

ROOT = pathlib.Path(__file__).resolve().parent.parent
for folder in (str(ROOT), str(ROOT / "src")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

QUIET = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("foregrad", **QUIET)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("foregrad"), derandomize=True)
hypothesis.settings.load_profile(os.environ.get("FOREGRAD_HYPOTHESIS", "foregrad"))


def pytest_configure(config):
    # Two threads add up in either order: bit for bit needs one, and two test workers leave one core for each.
    torch.set_num_threads(1)
    # A seed is queued for devices that are not initialized, with the stack as text: milliseconds, thousands of times.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.traceback = types.SimpleNamespace(format_stack=list)
    # pytest listens to each logger that does not propagate, and where somebody listens to this one PyTorch and we write
    # a record of each stage of each graph. Who looks for listeners does not look at the parents'.
    logging.getLogger("torch.__trace").propagate = True
    # So it is with each logger of PyTorch: for each phase of each test pytest would put two listeners on all of them.
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logging.getLogger(name).propagate = True
    try:
        import foregrad.errors
    except ImportError:
        return
    # In one process, pytest's plugin of foregrad was imported ahead of this file.
    foregrad.config.on_unsupported = os.environ["FOREGRAD_ON_UNSUPPORTED"]
    foregrad.config.check = os.environ["FOREGRAD_CHECK"] == "1"
    config.addinivalue_line("filterwarnings", "error::foregrad.errors.ForegradWarning")


# Tests of what a call does: where the C++ part was built they run with it and without it. (tests/native has its own.)
CALL_PATH = (
    "backends/test_in_place.py",
    "guards/test_life.py",
    "guards/test_second_calls.py",
    "guards/test_threads.py",
    "higher/test_uses.py",
    "unit/test_capture_lets_go.py",
    "unit/test_partial_backward.py",
)


def pytest_generate_tests(metafunc):
    path = metafunc.definition.path
    if path.is_relative_to(ROOT / "tests") and path.relative_to(ROOT / "tests").as_posix() in CALL_PATH:
        from foregrad._torch.native import native

        if native() is not None:
            metafunc.fixturenames.append("call_path")
            metafunc.parametrize("call_path", [True, False], ids=["native", "python"], indirect=True)


def pytest_collection_modifyitems(config, items):
    """Through Python alone run half of the cases of such a test: the C++ part runs all."""
    from tests.covering import shared  # after the folder is on the path

    by_test = {}
    for item in items:
        if getattr(item, "callspec", None) is not None and item.callspec.params.get("call_path") is False:
            by_test.setdefault((item.path, item.originalname), []).append(item)
    left_out = {item for cases in by_test.values() for item in {*cases}.difference(shared(cases, 0, 2))}
    items[:] = [item for item in items if item not in left_out]


# pytest's own timer is a thread for each test, and waits for its end: milliseconds on a busy machine.
STANDS_STILL_S, LOOKED_AT_EVERY_S = 600, 60
_armed = -math.inf


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """A test that stands still for ten minutes, with the GIL or without, ends its worker, shows where it stood, and fails."""
    global _armed
    if time.monotonic() - _armed > LOOKED_AT_EVERY_S:
        _armed = time.monotonic()
        stderr = item.config.stash.get(fault_handler_stderr_fd_key, sys.stderr)  # without its plugin: as it is
        faulthandler.dump_traceback_later(STANDS_STILL_S + LOOKED_AT_EVERY_S, file=stderr, exit=True)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact():
    """pytest has stopped the timer."""
    global _armed
    _armed = -math.inf


def pytest_unconfigure():
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def call_path(request):
    """Calls through the C++ part, or through Python."""
    from foregrad import config

    with config.override(native=request.param):
        yield


@pytest.fixture
def captures_may_wait(monkeypatch):
    """Functions may sleep, raise signals and wait for other threads while they are captured: such calls are eager
    otherwise.
    """
    from foregrad.python import known_calls

    monkeypatch.setattr(known_calls, "TRUSTED_MODULES", known_calls.TRUSTED_MODULES | {"threading", "signal"})
    monkeypatch.setattr(known_calls, "REFUSED_METHODS", {})
    monkeypatch.setattr(known_calls, "PURE_CLASSES", known_calls.PURE_CLASSES | {"_queue.SimpleQueue"})
    for module in ("_signal", "_thread", "time"):
        monkeypatch.setitem(known_calls.PURE_FUNCTIONS, module, known_calls.EVERYTHING)


@pytest.fixture(autouse=True, scope="session")
def guards_of_dynamo_are_not_timed():
    """To time the guards of a graph, once, Dynamo empties the processor's caches: more work than a small graph is."""
    import torch._dynamo.guards

    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True, scope="session")
def frozen_objects_are_counted_once():
    """Captures ask, every so often, whether many are: here they are, and to count them takes a twentieth of a second."""
    from foregrad.tracing.tape import collection

    collection._frozen, collection._ASKS_FOR_ONE = True, 1 << 60


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_left_alone():
    """Collections look at what the tests of one file make: 12,000 tests and their imports are a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    """Each test starts from the same random state, and leaves the caller's alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# Dynamo and Inductor set the first two for good when they are first used; `set_float32_matmul_precision("highest")`
# leaves the third another way than it was at first; attention on a GPU sets the last.
NOT_PUT_BACK = {"checks of distributions", "recursion limit", "float32 precisions", "order of attention kernels"}


@pytest.fixture(autouse=True)
def settings_left_alone():
    """A test that leaves a setting of PyTorch's as it has made it fails, not the ones after it."""
    try:
        from foregrad.python._torch.settings import apply_settings, settings
    except ModuleNotFoundError:  # the core alone: see tests/house/core_alone.py
        yield
        return
    before = settings()
    yield
    left = {
        name: (before[name], value)
        for name, value in settings().items()
        if value != before[name] and name not in NOT_PUT_BACK
    }
    apply_settings({name: value for name, (value, _) in left.items()})
    assert not left
