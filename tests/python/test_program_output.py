"""What a function prints or logs is said on every call, once, as in eager."""

import contextlib
import functools
import io
import logging
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import ForegradWarning, ProgramOutputError

LOGGER = logging.getLogger("tests.python.program_output")


@functools.cache
def _say_once(text):
    LOGGER.warning(text)


def _prints(x):
    print("size", x.shape[0])
    return x.sin()


def _prints_to_a_file(x):
    print("size", x.shape[0], file=sys.stderr)
    return x.sin()


def _prints_after_work(x):
    y = x.sin()
    print("done")
    return y


def _logs(x):
    LOGGER.info("size %d", x.shape[0])
    return x.sin()


def _logs_a_tensor(x):
    LOGGER.info("first %s", x.detach()[0])
    return x.sin()


def _logs_below_the_level(x):
    LOGGER.debug("size %d", x.shape[0])
    return x.sin()


def _logs_once(x):
    _say_once("slow path")
    return x.sin()


def _counts_and_prints():
    state = {"n": 0}

    def function(x):
        state["n"] += 1
        print("call", state["n"])
        return x * state["n"]

    return function


def _prints_first():
    state = []

    def function(x):
        if not state:
            print("first")
            state.append(1)
        return x.sin()

    return function


@pytest.fixture
def said(capsys, monkeypatch):
    handler = logging.StreamHandler(stream := io.StringIO())
    monkeypatch.setattr(LOGGER, "handlers", [handler])
    monkeypatch.setattr(LOGGER, "propagate", False)
    monkeypatch.setattr(LOGGER, "level", logging.INFO)
    LOGGER.manager._clear_cache()

    def take():
        out = capsys.readouterr()
        text = out.out, out.err, stream.getvalue()
        stream.truncate(0)
        stream.seek(0)
        return text

    return take


def _run(function, said):
    _say_once.cache_clear()
    said()
    torch.manual_seed(0)
    results = []
    for n in (3, 3, 4, 3):
        x = torch.randn(n, requires_grad=True)
        y = function(x)
        y.sum().backward()
        results.append((y.detach(), x.grad, said()))
    return results


FUNCTIONS = [_prints, _prints_to_a_file, _prints_after_work, _logs, _logs_a_tensor, _logs_below_the_level, _logs_once]
MAKERS = [*((lambda f=f: f) for f in FUNCTIONS), _counts_and_prints, _prints_first]
NAMES = [*(f.__name__ for f in FUNCTIONS), "counts_and_prints", "prints_first"]


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_said_as_in_eager(make, said):
    expected = _run(make(), said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        found = _run(foregrad.compile(make(), backend="eager", on_unsupported="eager"), said)
    for (y, gradient, text), (ours, our_gradient, our_text) in zip(expected, found, strict=True):
        assert our_text == text
        torch.testing.assert_close((ours, our_gradient), (y, gradient), rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda: _logs_once, lambda: _logs_below_the_level, _prints_first])
def test_compiled_where_later_calls_say_nothing(make, said):
    _say_once.cache_clear()
    compiled = foregrad.compile(make(), backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForegradWarning)
        for _ in range(3):
            compiled(torch.ones(2))
    report = foregrad.explain_recompiles(compiled)
    assert 1 <= len(report) <= 2  # a graph for each side of a branch
    assert report.eager_calls == 0


def test_what_is_added_to_a_record_is_logged_in_each_call(said):
    LOGGER.handlers[0].setFormatter(logging.Formatter("%(rank)s: %(message)s"))
    adapted = logging.LoggerAdapter(LOGGER, {"rank": 3})

    def function(x):
        adapted.info("size %d", x.shape[0])
        LOGGER.info("mean", extra={"rank": x.sum().item()})
        return x.sin()

    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for n in (2, 3, 2):
        compiled(torch.ones(n))
    assert said()[2] == "3: size 2\n2.0: mean\n3: size 3\n3.0: mean\n3: size 2\n2.0: mean\n"


@pytest.mark.parametrize("mode", ["eager", "raise"])
@pytest.mark.parametrize("function", [_prints, _prints_to_a_file, _logs])
def test_each_compiled_call_says_it(function, mode, said):
    compiled = foregrad.compile(function, backend="eager", on_unsupported=mode)
    for n in (2, 3, 2):
        compiled(torch.ones(n))
    assert "".join(said()) == "size 2\nsize 3\nsize 2\n"
    assert foregrad.explain_recompiles(compiled).eager_calls == 0


def test_an_operator_says_itself_what_it_prints(said):
    def clone(word, x):
        print(word)
        return x.clone()

    with torch.library._scoped_library("saying", "DEF") as library:
        library.define("clone(Tensor x) -> Tensor")
        library.impl("clone", functools.partial(clone, "kernel"), "CPU")
        library.impl("clone", functools.partial(clone, "capture"), "Meta")
        compiled = foregrad.compile(lambda x: torch.ops.saying.clone(x).sin(), backend="eager", on_unsupported="raise")
        for _ in range(3):
            compiled(torch.ones(2))
    assert said()[0] == "capture\nkernel\nkernel\nkernel\n"


class _Reads(logging.Handler):
    """A handler of the program's own that looks at its state."""

    def __init__(self, state):
        super().__init__()
        self.state, self.seen = state, []

    def emit(self, record):
        self.seen.append((record.getMessage(), self.state["count"]))


@pytest.mark.parametrize("writes_before", [False, True])
def test_a_handler_that_looks_at_the_state(writes_before):
    state, logger = {"count": 0}, logging.getLogger("tests.python.program_output.reads")
    logger.setLevel(logging.INFO)
    handler = _Reads(state)

    def f(x):
        if writes_before:
            state["count"] += 1
        logger.info("now")
        state["count"] += 1
        return x.sin()

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    logger.addHandler(handler)
    try:
        with pytest.warns(ForegradWarning, match="code of a handler can get at"):
            for _ in range(3):
                compiled(torch.ones(2))
    finally:
        logger.removeHandler(handler)
    assert handler.seen == [("now", count) for count in ((1, 3, 5) if writes_before else (0, 1, 2))]


def test_a_reentrant_checkpoint_warns_of_inputs_without_gradients():
    weight = torch.ones(2, requires_grad=True)

    def f(x):
        return checkpoint(lambda y: y * weight, x, use_reentrant=True)

    compiled = foregrad.compile(f, backend="eager", on_unsupported="raise")
    for call in (f, compiled, compiled):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
            assert not call(torch.ones(2)).requires_grad


def test_what_no_call_could_say_again_is_refused_by_name(tmp_path):
    path = tmp_path / "said"
    stream = path.open("w")

    def f(x):
        print("size", file=stream, flush=True)
        return x.sin()

    with stream:
        with pytest.raises(ProgramOutputError, match=r"`f` prints at .*test_program_output\.py"):
            foregrad.compile(f, backend="eager", on_unsupported="raise")(torch.ones(2))
        assert path.read_text() == ""
        compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
        with pytest.warns(ForegradWarning, match=r"`f` prints at .*test_program_output\.py"):
            for _ in range(3):
                compiled(torch.ones(2))
    assert path.read_text() == "size\n" * 3


def test_an_error_that_the_program_catches_does_not_hide_what_it_prints(said):
    def f(x):
        with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
            print("aside")
        return x.sin()

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="prints at"):
        for _ in range(3):
            compiled(torch.ones(2))
    assert said()[1] == "aside\n" * 3


def test_numbers_and_text_are_said_as_they_were_then(said):
    items = [1, 2]

    def f(x, scale):
        print("sum", x.sum().item(), scale * 2, tuple(x.shape), items, sep="|")
        items[0] += 1
        return x * scale

    def run(function):
        items[:] = [1, 2]
        for n, scale in ((2, 1.5), (3, 2.5), (4, 3.5)):
            function(torch.ones(n), scale)
        return said()

    expected = run(f)
    assert run(foregrad.compile(f, backend="eager", on_unsupported="raise")) == expected


def test_doors_that_raise_say_it_while_they_capture(said):
    foregrad.capture(_prints, torch.ones(2))
    assert said()[0] == "size 2\n"


def test_print_is_itself_again():
    compiled = foregrad.compile(_prints, backend="eager", on_unsupported="eager")
    before, handle = print, logging.Logger.handle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        compiled(torch.ones(2))
    assert print is before and logging.Logger.handle is handle
    assert issubclass(ProgramOutputError, foregrad.errors.UnsupportedSideEffectError)


def test_each_call_prints_to_a_redirected_stream():
    def f(x):
        print("out")
        print("err", file=sys.stderr)
        return x.sin()

    compiled, stream = foregrad.compile(f, backend="eager", on_unsupported="raise"), io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        for _ in range(3):
            compiled(torch.ones(2))
    assert stream.getvalue() == "out\nerr\n" * 3


def _logs_text(x):
    total = (x * 2).sum()
    LOGGER.warning("total %s", f"{total.item():.1f}")
    return total


def test_text_of_a_value_is_no_graph_for_each(said):
    compiled = foregrad.compile(_logs_text, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="each value needs its own graph"):
        for n in range(5):
            compiled(torch.full((2,), float(n)))
    assert "".join(said()) == "".join(f"total {4.0 * n}\n" for n in range(5))
    assert len(compiled.foregrad.compilations) == 2


@pytest.mark.parametrize("number", [torch.Tensor.item, float])
def test_a_number_that_is_printed_is_no_graph_for_each(number, said):
    def f(x):
        total = (x * 2).sum()
        print("total", number(total))
        return total

    compiled = foregrad.compile(f, backend="eager")
    for n in range(5):
        compiled(torch.full((2,), float(n)))
    assert "".join(said()) == "".join(f"total {4.0 * n}\n" for n in range(5))
    assert len(compiled.foregrad.compilations) == 1


class _Holder:
    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return f"of {self.size}"


class _Braces(logging.LogRecord):
    def getMessage(self):
        return f"<{super().getMessage()}>"


ARGUMENTS = {
    "size": lambda x: ("%s", x.shape),
    "tuple": lambda x: ("%s", tuple(x.shape)),
    "list": lambda x: ("%s", [x.shape[0]]),
    "dict": lambda x: ("%s", {"n": x.shape[0]}),
    "named": lambda x: ("%(n)s", {"n": x.shape}),
    "beside a list": lambda x: ("%s %s", x.shape[0], [1]),
    "nested": lambda x: ("%s %d", [x.shape, ({"n": (x.shape[0] * 2,)},)], x.shape[0]),
    "slice": lambda x: ("%s", slice(0, x.shape[0])),
    "object": lambda x: ("%s", _Holder(x.shape[0])),
}
BY_VALUE = ("tuple", "list", "beside a list")


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_sizes_in_what_is_logged_are_those_of_the_call(kind, said):
    def f(x):
        LOGGER.info(*ARGUMENTS[kind](x))
        return x.sin()

    def run(function):
        for n in (1, 2, 3, 4, 2):
            function(torch.ones(n))
        return said()[2]

    compiled = foregrad.compile(f, backend="eager", on_unsupported="raise")
    assert run(compiled) == run(f)
    if kind in BY_VALUE:
        assert len(compiled.foregrad.compilations) == 3  # of 1, of 2, of any size


def test_a_record_that_makes_its_own_text_is_refused_by_name(said, monkeypatch):
    monkeypatch.setattr(logging, "_logRecordFactory", _Braces)

    def f(x):
        LOGGER.info("%s", x.shape)
        return x.sin()

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="`f` logs at"):
        for n in (2, 3, 4):
            compiled(torch.ones(n))
    assert said()[2] == "".join(f"<torch.Size([{n}])>\n" for n in (2, 3, 4))


def _helper(a, b):
    warnings.warn(f"sizes {a.shape}", stacklevel=2)
    return F.mse_loss(a, b)


class _Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = torch.nn.L1Loss()

    def forward(self, a, b):
        return self.loss(a, b)


LOSS = _Loss()
WARNING = {
    "mse": lambda a, b: F.mse_loss(a, b),
    "l1": lambda a, b: F.l1_loss(a, b),
    "smooth l1": lambda a, b: F.smooth_l1_loss(a, b),
    "module": lambda a, b: LOSS(a, b),
    "at the line of the caller": lambda a, b: F.softmax(a) + b.sum(),
    "deprecated": lambda a, b: torch.nn.modules.rnn.apply_permutation(a, torch.arange(a.shape[0]), 0) + b.sum(),
    "both": lambda a, b: _helper(a, b),
}


def _heard(function, action):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter(action)
        warnings.simplefilter("error", ForegradWarning)
        for n in (2, 3, 4, 2):
            function(torch.ones(n, 1), torch.ones(n))
    return [(str(w.message), w.category, w.filename, w.lineno) for w in heard]


@pytest.mark.parametrize("kind", WARNING)
def test_what_pytorch_warns_of_is_the_calls(kind):
    expected = _heard(WARNING[kind], "always")
    assert len(expected) >= 4
    compiled = foregrad.compile(WARNING[kind], backend="eager", on_unsupported="raise")
    assert _heard(compiled, "always") == expected
    assert _heard(compiled, "always") == expected
    assert _heard(compiled, "ignore") == []


def test_a_warning_of_pytorchs_that_is_an_error_comes_in_place_of_the_call():
    compiled = foregrad.compile(WARNING["mse"], backend="eager", on_unsupported="eager")
    args = torch.ones(2, 1), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(*args)
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ForegradWarning)
        with pytest.raises(UserWarning, match=r"target size \(torch\.Size\(\[2\]\)\)"):
            compiled(*args)


def test_what_pytorch_warns_of_once_in_a_process_is_not_repeated():
    def f(a, b):
        return a + b.storage().size()

    torch.storage._reset_warn_typed_storage_removal()
    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(torch.ones(2), torch.ones(2))
    assert len([w for w in heard if "TypedStorage" in str(w.message)]) == 1


def test_a_warning_in_a_region_comes_once_a_call():
    @foregrad.eager_region
    def region(x):
        warnings.warn("in a region", stacklevel=1)
        return x.sin()

    def f(x):
        return region(x) * 2

    def run(function):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for n in (2, 3, 4):
                function(torch.ones(n))
        return [str(w.message) for w in heard]

    assert run(foregrad.compile(f, backend="eager", on_unsupported="eager")) == run(f)


def test_the_line_of_a_print_of_a_tensor_is_the_programs():
    def f(x):
        print(x.detach())
        return x.sin()

    with pytest.warns(ForegradWarning, match=r"the text of a tensor .* is read at [^ ]*test_program_output\.py:"):
        foregrad.compile(f, backend="eager", on_unsupported="eager")(torch.ones(2))


# ------------------------------------------------------------------------------------------------ text of a loss
def prints_the_number(x):
    loss = (x * x).sum()
    print("loss", loss.item())
    return loss


def logs_the_number(x):
    loss = (x * x).sum()
    logging.getLogger("training").warning("loss %.3f", loss.item())
    return loss


def prints_its_text(x):
    loss = (x * x).sum()
    print(f"loss {loss.item():.3f}")
    return loss


def prints_the_tensor(x):
    loss = (x * x).sum()
    print("loss", loss)
    return loss


def prints_a_matrix(x):
    print("x", x)
    return (x * x).sum()


@pytest.mark.parametrize(
    ("function", "compiles"),
    [
        (prints_the_number, True),
        (logs_the_number, True),
        (prints_its_text, True),
        (prints_the_tensor, True),
        (prints_a_matrix, False),
    ],
)
def test_a_loss_that_is_printed_as_the_tutorial_says(function, compiles, capsys):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with contextlib.nullcontext() if compiles else pytest.warns(ForegradWarning) as warned:
        for i in range(5):
            compiled(torch.full((3,), float(i)))
    eager = foregrad.explain_recompiles(compiled).eager
    assert (sum(one.count for one in eager) == 0) is compiles
    if not compiles:  # the reason that the report gives is that of the warning
        assert str(warned[0].message).startswith(eager[0].why)
        assert "path_limit" not in eager[0].reason
