"""Each thing that a captured function does is an operator, a tracked read or write, or known to be pure; or it is eager."""

import array
import collections
import contextlib
import contextvars
import ctypes
import datetime as dt
import decimal
import gc
import hashlib
import importlib
import io
import logging
import multiprocessing
import multiprocessing.util
import os
import pathlib
import random
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError
from foregrad.python import known_calls

X = torch.ones(2)
DIGEST = hashlib.sha256()
LIMIT = sys.getrecursionlimit()
LOCK = threading.Lock()
CLASSES = dt.datetime, dt.date


@pytest.fixture(params=[True, False], ids=["native", "python"], autouse=True)
def observer(request, monkeypatch):
    """Both observers, in C++ and in Python."""
    if not request.param:
        monkeypatch.setattr("foregrad.python.observed.make_observer", lambda *_: None)
    return request.param


def called(function, times=3):
    """What calls of a compiled function give, and the warnings of ours."""
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [compiled(X) for _ in range(times)]
    return results, [str(one.message) for one in said if issubclass(one.category, ForegradWarning)], compiled


NEW_THREAD = "_thread.start_joinable_thread" if sys.version_info >= (3, 13) else "_thread.start_new_thread"
FOREIGN = {
    "time.sleep": lambda: time.sleep(0.0),
    "posix.putenv": lambda: os.environ.__setitem__("FOREGRAD_TEST", "1"),
    "_signal.signal": lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
    "io.open": lambda: open(os.devnull).close(),
    "posix.stat": lambda: os.path.exists(os.devnull),
    "sys.setrecursionlimit": lambda: sys.setrecursionlimit(LIMIT),
    "sys.getrecursionlimit": lambda: sys.getrecursionlimit(),
    "sys.getprofile": lambda: sys.getprofile(),  # of what observes the capture
    "sys.getrefcount": lambda: sys.getrefcount(X),
    NEW_THREAD: lambda: threading.Thread(target=int).start(),
    "posix.getpid": lambda: os.getpid(),
    "datetime.now": lambda: CLASSES[0].now(),
    "lock.locked": lambda: LOCK.locked(),
    "HASH.update": lambda: DIGEST.update(b"1"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_function_of_c_that_is_not_in_the_table_makes_the_call_eager_by_name(name):
    foreign = FOREIGN[name]

    def step(x):
        foreign()
        return x + 1

    results, said, _ = called(step)
    assert all(torch.equal(result, X + 1) for result in results)
    assert len(said) == 1
    assert f"{name}` at {__file__}:" in said[0]
    assert "eager_region" in said[0]


def test_a_class_of_dates_may_be_reached():
    def step(x):
        import datetime as dt

        return x * CLASSES[1](2024, 1, 5).day + dt.timedelta(days=1).days

    results, said, compiled = called(step)
    assert all(torch.equal(result, X * 6) for result in results)
    assert not said
    assert len(foregrad.explain_recompiles(compiled)) == 1


def test_it_is_refused_where_no_call_is_to_run_eagerly():
    def step(x):
        time.sleep(0.0)
        return x + 1

    for door in (lambda: foregrad.compile(step, on_unsupported="raise")(X), lambda: foregrad.capture(step, X)):
        with pytest.raises(UnsupportedSideEffectError, match=r"time\.sleep"):
            door()


EXTENSION = """
#include <Python.h>
static PyObject *count(PyObject *self, PyObject *arg) {
  static long calls = 0;
  return PyLong_FromLong(++calls);
}
static PyMethodDef methods[] = {{"count", count, METH_NOARGS, ""}, {"again", count, METH_NOARGS, ""}, {0}};
static PyMethodDef of_counter[] = {{"count", count, METH_NOARGS, ""}, {"again", count, METH_NOARGS, ""}, {0}};
static PyType_Slot slots[] = {{Py_tp_methods, of_counter}, {0}};
static PyType_Spec spec = {"counting_c.Counter", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, slots};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "counting_c", 0, -1, methods};
PyMODINIT_FUNC PyInit_counting_c(void) {
  PyObject *made = PyModule_Create(&definition);
  if (made && PyModule_AddObject(made, "Counter", PyType_FromSpec(&spec))) return NULL;
  return made;
}
"""


LIBC = ctypes.CDLL(None)
RAND = LIBC.rand


class OfCtypes:
    def __init__(self):
        self.lib = LIBC

    def __call__(self, x):
        return x + (self.lib.rand() >= 0)


def in_a_cell():
    rand = LIBC.rand
    return lambda x: x + (rand() >= 0)


UNTOLD = {
    "LIBC": lambda x: x + (LIBC.rand() >= 0),
    "RAND": lambda x: x + (RAND() >= 0),
    "lib": OfCtypes(),
    "rand": in_a_cell(),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_code_with_the_name_of_a_function_of_ctypes_is_eager(name):
    results, said, _ = called(UNTOLD[name])
    assert all(torch.equal(result, X + 1) for result in results)
    assert len(said) == 1 and f"`{name}` at {__file__}:" in said[0]


def test_code_with_the_name_of_a_function_of_cython_is_eager():
    of_cython = pytest.importorskip("zmq.backend.cython._zmq")
    own = of_cython.zmq_errno
    for function in (lambda x: x + (of_cython.zmq_errno() >= 0), lambda x: x + (own() >= 0)):
        results, said, _ = called(function)
        assert all(torch.equal(result, X + 1) for result in results)
        assert len(said) == 1 and "a function not known to be pure" in said[0]


def test_numpy_and_pytorch_are_no_unknown_c():
    import numpy as np

    results, said, _ = called(lambda x: x * float(np.float64(2.0) + np.hypot(3.0, 4.0)) + torch.special.expit(x))
    assert all(torch.equal(result, X * 7.0 + torch.special.expit(X)) for result in results)
    assert not said


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """A folder with the module `counting_c` of C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "counting_c.c").write_text(EXTENSION)
    target = folder / f"counting_c{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [compiler, "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(folder / "counting_c.c")]
    subprocess.run([*command, "-o", str(target)], check=True)
    return folder


@pytest.fixture
def counting_c(extension, monkeypatch):
    monkeypatch.syspath_prepend(str(extension))
    monkeypatch.delitem(sys.modules, "counting_c", raising=False)
    return importlib.import_module("counting_c")


def test_a_function_of_an_extension_is_called_as_often_as_in_eager(counting_c):
    """What an extension keeps for itself nobody can see: it is not called before the call is known to be eager."""

    def step(x):
        return x * counting_c.count()

    results, said, _ = called(step)
    first = results[0][0].item()
    assert [result[0].item() - first for result in results] == [0, 1, 2]
    assert len(said) == 1
    assert "`counting_c.count`" in said[0]


CALLS_OF_AN_EXTENSION = {
    "counting_c.count": lambda c: c.count(),
    "counting_c.again": lambda c: c.again(),
    "counting_c.Counter.count": lambda c: c.Counter.count(COUNTERS[c]),
    "counting_c.Counter.again": lambda c: COUNTERS[c].again(),
}
COUNTERS = {}
SAID_TO_BE_PURE = {
    "counting_c": {*CALLS_OF_AN_EXTENSION},
    "counting_c:count": {"counting_c.count"},
    "counting_c:Counter": {"counting_c.Counter.count", "counting_c.Counter.again"},
    "counting_c:Counter.again": {"counting_c.Counter.again"},
    "counting_c.inner": set(),
    "counting_c:missing": set(),
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a package with an entry in the group."""
    known_calls._declared.cache_clear()

    def install(value):
        info = tmp_path / "counting-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[foregrad.pure]\nsome = {value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield install
    known_calls._declared.cache_clear()


@pytest.mark.parametrize("entry", SAID_TO_BE_PURE)
def test_a_package_says_what_is_pure_by_an_entry_point(entry, counting_c, installed):
    installed(entry)
    COUNTERS[counting_c] = counting_c.Counter()
    for name, call in CALLS_OF_AN_EXTENSION.items():

        def step(x, call=call):
            return x + min(call(counting_c), 1)

        results, said, compiled = called(step)
        assert all(torch.equal(result, X + 1) for result in results)
        assert len(foregrad.explain_recompiles(compiled)) == (name in SAID_TO_BE_PURE[entry]), name
        assert len(said) == (name not in SAID_TO_BE_PURE[entry]), name


def test_no_package_speaks_for_the_standard_library(installed):
    installed("time:sleep")

    def step(x):
        time.sleep(0.0)
        return x + 1

    _, said, _ = called(step)
    assert len(said) == 1


def test_a_refusal_that_the_function_catches_stays_one():
    def step(x):
        try:
            time.sleep(0.0)
        except Exception:
            return x - 1
        return x + 1

    results, said, _ = called(step)
    assert all(torch.equal(result, X + 1) for result in results)
    assert len(said) == 1


LEFT = contextvars.ContextVar("left", default=0)


class Written:
    """Things of the process and of the standard library that a step writes to; `now()` is what is there."""

    def __init__(self):
        self.file = io.StringIO()
        self.number, self.numbers, self.bytes = ctypes.c_int(0), array.array("i", [0]), bytearray(1)
        self.view, self.shared = memoryview(bytearray(1)), multiprocessing.Value("i", 0)
        self.logger, self.stack = logging.getLogger("tests.world.written"), contextlib.ExitStack()
        self.logger.setLevel(1)

    def number_of_c(self):
        self.number.value += 1

    def view_of_memory(self):
        self.view[0] += 1

    def level_of_a_logger(self):
        self.logger.setLevel(self.logger.level + 1)

    def stack_of_contexts(self):
        self.stack.callback(int)

    def growing_buffers(self):
        self.bytes.append(1)
        self.numbers.append(1)

    def number_of_processes(self):
        with self.shared.get_lock():
            self.shared.value += 1

    def environment(self):
        os.environ["FOREGRAD_TEST"] = str(int(os.environ.get("FOREGRAD_TEST", "0")) + 1)

    def path(self):
        sys.path.append("/nowhere")

    def context(self):
        LEFT.set(LEFT.get() + 1)

    def decimals(self):
        decimal.getcontext().prec += 1

    def text(self):
        self.file.write("a")

    def filters(self):
        warnings.filterwarnings("ignore", message=f"number {len(warnings.filters)}")

    def now(self):
        filters = [one for one in warnings.filters if "number" in str(one)]
        seen = os.environ.get("FOREGRAD_TEST"), sys.path.count("/nowhere"), LEFT.get(), decimal.getcontext().prec
        numbers = self.number.value, [*self.numbers], bytes(self.bytes), bytes(self.view), self.shared.value
        objects = self.logger.level, len(self.stack._exit_callbacks)
        return *seen, self.file.getvalue(), len(filters), numbers, objects


@pytest.mark.parametrize("what", [name for name in vars(Written) if not name.startswith("_") and name != "now"])
def test_what_is_written_is_written_once_in_each_call(what):
    """The capture that is given up has written nothing; the calls write as in eager."""

    def after(wrap):
        written = Written()
        write = getattr(written, what)

        def step(x):
            write()
            return x + 1

        def run():
            call = wrap(step)
            for _ in range(3):
                call(X)
            return written.now()

        path, precision = list(sys.path), decimal.getcontext().prec
        environment = os.environ.pop("FOREGRAD_TEST", None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ForegradWarning)
                return contextvars.copy_context().run(run)
        finally:
            sys.path[:], decimal.getcontext().prec = path, precision
            os.environ.pop("FOREGRAD_TEST", None)
            if environment is not None:
                os.environ["FOREGRAD_TEST"] = environment

    assert after(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager")) == after(lambda f: f)


def use_of_fresh_objects(x):
    parts, table, seen = [], {}, set()
    for i in range(200):
        parts.append(x * i)
        table.setdefault(i % 3, []).append(i)
        seen.add(i)
    table.update(a=1)
    counts = collections.Counter("abca")
    counts.update("a")
    window = collections.deque(maxlen=2)
    window.extend(range(5))
    text = io.StringIO()
    text.write("abc")
    variable = contextvars.ContextVar("inside", default=1.0)
    token = variable.set(2.0)
    factor = variable.get()
    variable.reset(token)
    with decimal.localcontext() as context:
        context.prec = 4
        third = float(decimal.Decimal(1) / 3)
    key = hashlib.sha256(b"abc").hexdigest()
    generator = random.Random(3)
    parts.sort(key=id)
    parts.reverse()
    return (
        sum(parts)
        * factor
        * third
        * len(seen)
        * len(key)
        * counts["a"]
        * window[0]
        * len(text.getvalue())
        * (1 + generator.random())
    )


def test_what_the_call_makes_may_be_written_to():
    """Methods that write are fine on objects that are no older than the call."""
    results, said, compiled = called(use_of_fresh_objects)
    assert not said
    assert all(torch.allclose(result, use_of_fresh_objects(X)) for result in results)
    assert len(foregrad.explain_recompiles(compiled)) == 1


def test_an_older_object_that_nobody_met_is_not_written_to_in_silence():
    """It is found by a way that no scan of code sees; the write is taken back, and each call makes it."""
    hidden = ["a"]
    address = id(hidden)

    def step(x):
        import gc

        found = next(one for one in gc.get_objects() if id(one) == address)
        found.append("b")
        return x + 1

    _, said, _ = called(step)
    assert hidden == ["a", "b", "b", "b"]
    assert len(said) == 1


def test_a_warning_is_given_by_each_call_as_in_eager():
    def step(x):
        warnings.warn("as in eager", stacklevel=1)
        return x + 1

    compiled = foregrad.compile(step, backend="eager", on_unsupported="eager")
    for _ in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compiled(X)
        assert sum(str(one.message) == "as in eager" for one in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", ForegradWarning)
        with pytest.raises(UserWarning, match="as in eager"):
            compiled(X)


def test_a_profiler_is_told_of_what_it_would_be_told():
    told = []

    def profiler(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "step":
            told.append(event)

    def step(x):
        return x + len([1, 2])

    compiled = foregrad.compile(step, backend="eager", on_unsupported="eager")
    sys.setprofile(profiler)
    try:
        compiled(X)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert told == ["call"]


def test_every_name_in_the_table_is_one():
    """The table names what is there: in the Python that runs, or in another that is supported."""
    named = [(module, names) for module, names in known_calls.PURE_FUNCTIONS.items() if module in sys.modules]
    for module, names in named:
        of = sys.modules[module]
        known = [name for name in names.split() if name != known_calls.EVERYTHING]
        assert not known or any(hasattr(of, name) for name in known), module
    for qualified, names in known_calls.WRITING_METHODS.items():
        module, _, name = qualified.rpartition(".")
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None:
            missing = {method for method in names.split() if not hasattr(cls, method)}
            assert missing <= {"__missing__", "clear", "__setstate__"}, qualified  # of another class, or Python


def test_the_page_shows_the_table():
    """docs/closed_world.md is made from the table by docs/generate.py."""
    docs = pathlib.Path(__file__).parents[2] / "docs"
    made = runpy.run_path(str(docs / "generate.py"))["closed_world_page"]()
    assert (docs / "closed_world.md").read_text() == made


def test_files_are_read_anew_in_each_call():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "scale.txt"

        def step(x):
            return x * float(path.read_text())

        compiled = foregrad.compile(step, backend="eager", on_unsupported="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            for scale in (2.0, 3.0):
                path.write_text(str(scale))
                assert torch.equal(compiled(X), X * scale)


def test_a_collection_of_garbage_is_of_what_the_call_made(observer):
    """Neither what listens to the collector nor the finalizer of an older object is part of the program."""
    finalized = []

    class Circle:
        def __init__(self, name):
            self.name, self.me = name, self

        def __del__(self):
            finalized.append(self.name)

    def listener(phase, info):
        os.getloadavg()

    def f(x):
        Circle("made")
        gc.collect()
        return x * 2

    older = Circle("older")
    multiprocessing.util.Finalize(older, finalized.append, ("finalizer",))
    call = foregrad.compile(f, backend="eager", on_unsupported="raise")
    gc.callbacks.append(listener)
    try:
        gc.disable()
        del older
        if not observer:  # in C++
            with pytest.raises(UnsupportedSideEffectError, match=r"calls `gc\.collect`"):
                call(X)
            return
        for count in (1, 2):
            assert torch.equal(call(X), X * 2)
            assert finalized.count("made") == count
    finally:
        gc.enable()
        gc.callbacks.remove(listener)
    gc.collect()
    assert sorted(finalized) == ["finalizer", "made", "made", "older"]  # each once


def test_static_methods_of_c_are_of_their_class():
    """The interpreter tells no owner of `str.maketrans`."""

    def step(x):
        return x * len("aab".translate(str.maketrans("a", "b")).replace("b", "", 1))

    assert torch.equal(foregrad.compile(step, backend="eager", on_unsupported="raise")(X), X * 2)
