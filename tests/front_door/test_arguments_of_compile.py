"""What `compile` says of arguments that mean something elsewhere."""

import asyncio
import functools
import io
import sys
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import foregrad
from foregrad import phases


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (3, r"foregrad.compile\(model\)"),
        ([nn.Linear(2, 2)], r"foregrad.compile\(model\)"),
        ("inductor", "backend='inductor'"),
        (nn.Linear, r"foregrad.compile\(Linear\(...\)\)"),
        (property(len), "below @property"),
    ],
)
def test_what_is_no_function(target, says):
    with pytest.raises(TypeError, match=says):
        foregrad.compile(target)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"mode": "max-autotune"}, "torch.compile"),
        ({"options": {}}, "torch.compile"),
        ({"fullgraph": True}, 'on_unsupported="raise"'),
        ({"disable": True}, "eager_region"),
        ({"model": nn.Linear(2, 2)}, "comes first"),
        ({"fw_compiler": foregrad.nop}, "backend="),
        ({"backends": "eager"}, "did you mean backend="),
        ({"colour": "red"}, "it has backend, partition"),
    ],
)
def test_keywords_of_others(keywords, says):
    with pytest.raises(TypeError, match=says):
        foregrad.compile(torch.sin, **keywords)
    with pytest.raises(TypeError, match=says):
        foregrad.compile(**keywords)


def test_values_that_are_none():
    with pytest.raises(ValueError, match="dynamic is None"):
        foregrad.compile(torch.sin, dynamic="auto")
    with pytest.raises(ValueError, match="on_unsupported is"):
        foregrad.compile(torch.sin, on_unsupported="warn")


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("path_limit", "many", "an integer from 0 on, not 'many'"),
        ("recompile_limit", -3, "an integer from 0 on"),
        ("recompile_limit", True, "an integer from 0 on"),
        ("check", "yes", "True or False"),
        ("progress", "no", "True, False or None"),
        ("on_unsupported", "rais", "'eager' or 'raise'"),
        ("cache_dir", 3, "text"),
    ],
)
def test_a_setting_refuses_a_wrong_value(name, wrong, says):
    before = getattr(foregrad.config, name)
    with pytest.raises(ValueError, match=f"foregrad.config.{name} is {says}"):
        setattr(foregrad.config, name, wrong)
    with pytest.raises(ValueError, match=name), foregrad.config.override(**{name: wrong}):
        pass
    assert getattr(foregrad.config, name) == before


def test_variables_of_the_environment_are_settings(monkeypatch):
    for name, text in [
        ("CHECK", " On "),
        ("BACKGROUND", "0"),
        ("PROGRESS", ""),
        ("PATH_LIMIT", " 7 "),
        ("CACHE_DIR", "x"),
    ]:
        monkeypatch.setenv(f"FOREGRAD_{name}", text)
    found = sys.modules["foregrad.config"]._from_environment()
    assert (found.check, found.background, found.progress, found.path_limit, found.cache_dir) == (
        True,
        False,
        False,
        7,
        "x",
    )
    for name, text in [("CHECK", "maybe"), ("PATH_LIMIT", "many"), ("PATH_LIMIT", "-1"), ("ON_UNSUPPORTED", "rais")]:
        with monkeypatch.context() as wrong, pytest.raises(ValueError, match=f"{name.lower()} is .*, not '{text}'"):
            wrong.setenv(f"FOREGRAD_{name}", text)
            sys.modules["foregrad.config"]._from_environment()


class Methods:
    factor = 3

    @foregrad.compile(backend="eager")
    @staticmethod
    def of_none(x):
        return x * 2

    @foregrad.compile(backend="eager")
    @classmethod
    def of_the_class(cls, x):
        return x * cls.factor


def test_the_order_of_decorators_of_methods_is_no_matter():
    x = torch.ones(2, requires_grad=True)
    for owner in (Methods, Methods()):
        assert torch.equal(owner.of_none(x), x * 2)
        assert torch.equal(owner.of_the_class(x), x * 3)
    assert len(foregrad.explain_recompiles(Methods.of_none)) == 1


def items(x):
    for i in range(3):
        yield x * i


async def awaited(x):
    return x * 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda compiled, x: list(compiled(items)(x)), "`out` is a generator: its code runs after the call"),
        (lambda compiled, x: [asyncio.run(compiled(awaited)(x))], "`out` is a coroutine: its code runs after the call"),
        (lambda compiled, x: list(compiled(lambda x: map(torch.sin, [x]))(x)), "`out` is a map: its code runs after"),
        (lambda compiled, x: [compiled(sum)(y * 2 for y in [x, x])], r"is a generator: it gives each item once"),
        (lambda compiled, x: [compiled(next)(iter([x]))], r"is a list iterator: it gives each item once. Pass a list"),
    ],
)
def test_what_runs_later_is_eager_and_the_warning_says_why(call, says):
    x = torch.arange(3.0)
    with pytest.warns(foregrad.errors.ForegradWarning, match=says):
        found = call(functools.partial(foregrad.compile, backend="eager", on_unsupported="eager"), x)
    assert all(map(torch.equal, found, call(lambda function: function, x)))


def test_a_slow_compilation_is_said_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(phases, "_AFTER_S", 0.05)

    def slow(module, inputs):
        time.sleep(0.3)
        return module

    def said(stream, wanted):
        monkeypatch.setattr(sys, "stderr", stream)
        with foregrad.config.override(progress=wanted):
            called = foregrad.compile(lambda x: x.sin(), backend=slow)
            called(torch.ones(3))
            first = stream.getvalue()
            called(torch.ones(3))
        assert stream.getvalue() == first
        return first

    assert said(io.StringIO(), None) == ""
    assert said(Terminal(), False) == ""
    for text in (said(Terminal(), None), said(io.StringIO(), True), said(cell_output(), None)):
        assert text.count("foregrad: compiling `<lambda>` (first call with these inputs) ...") == 1
        assert "` took" in text


def cell_output():
    """As `sys.stderr` in a notebook: no terminal."""
    return type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()


def test_a_compiled_module_and_what_is_found_out_are_shown_in_a_notebook():
    model = foregrad.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    model(torch.ones(1, 2))
    assert repr(model) == f"foregrad.compile({nn.Sequential(nn.Linear(2, 2))!r})"
    curve = foregrad.pareto(lambda x: x.sin().exp().sum(), torch.ones(256, requires_grad=True))
    assert repr(curve) == str(curve)
    assert curve._repr_html_().startswith("<table><caption")
    assert repr(foregrad.explain_recompiles(model)).startswith("Sequential: compiled once")


def test_lines_in_a_notebook_are_named_by_the_number_of_their_cell(monkeypatch):
    """As IPython names them; `3482616233.py:5` says nothing."""
    label = lambda name: ("Cell", "In [5]") if name == "/tmp/ipykernel_1/3482616233.py" else None
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=label))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    space = {}
    code = "def f(x):\n    y = x.sin()\n    return (y * x).sum()\n"
    exec(compile(code, "/tmp/ipykernel_1/3482616233.py", "exec"), space)
    found = foregrad.explain(space["f"], torch.ones(3, requires_grad=True), backend="eager")
    assert {line.partition(" in f")[0] for line in found.lines if line} == {"In [5]:2", "In [5]:3"}


def test_a_captured_function_is_told_eagers_truth_of_compiling():
    """What it does where it isn't being compiled is what the graph holds: branches on values can be taken."""

    def function(x):
        return x * 2 if torch.compiler.is_compiling() else x * 3

    assert torch.equal(foregrad.compile(function, backend="eager")(torch.ones(2)), torch.full((2,), 3.0))


# ------------------------------------------------------------------------------------------------ likely mistakes
def doubled(x):
    return x * 2


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: foregrad.compile(doubled, "eager"), r"backend is a keyword: .*backend='eager'"),
        (lambda: foregrad.compile(doubled, 1, 2), "the rest are keywords: backend, partition"),
        (lambda: foregrad.compile(torch.ones(1000)), r"not a Tensor of shape \(1000,\)\. Write"),
        (
            lambda: foregrad.capture(torch.ones(1000)),
            r"takes a function or a module .* not a Tensor of shape \(1000,\)$",
        ),
        (lambda: foregrad.explain(torch.ones(1000)), r"foregrad.explain takes a function .* shape \(1000,\)$"),
        (lambda: foregrad.verify(torch.ones(1000)), r"foregrad.verify takes a function .* shape \(1000,\)$"),
        (lambda: foregrad.pareto(torch.ones(1000)), r"foregrad.pareto takes a function .* shape \(1000,\)$"),
        (lambda: foregrad.plan(torch.ones(1000)), r"foregrad.plan takes a function .* shape \(1000,\)$"),
        (lambda: foregrad.partition(doubled), "takes a result of foregrad.capture, not doubled$"),
        (lambda: foregrad.mark_dynamic(3, 0), "a dimension of a tensor, not of 3$"),
        (lambda: setattr(foregrad.config, "full_tracback", True), r"`full_tracback` \(did you mean `full_tracebacks`"),
        (lambda: foregrad.config.recompile_limits, r"`recompile_limits` \(did you mean `recompile_limit`"),
        (lambda: foregrad.export(nn.Linear(4, 2), torch.randn(2, 4)), r"args is a tuple .*export\(model, \(x,\)\)"),
        (lambda: foregrad.compile(doubled, partition="mincut"), "`mincut` .did you mean `min_cut`.*budget"),
        (
            lambda: foregrad.explain_recompiles(torch.compile(nn.Linear(2, 2))),
            "a module of class Linear, made by torch",
        ),
        (lambda: foregrad.explain_recompiles(torch.compile(doubled)), "doubled, made by torch.compile.*TORCH_LOGS"),
        (lambda: foregrad.explain_recompiles(nn.Sequential(nn.ReLU())), "not a module of class Sequential$"),
    ],
)
def test_a_likely_mistake_is_answered_with_what_to_write(mistake, says):
    with pytest.raises((TypeError, ValueError, AttributeError), match=says) as raised:
        mistake()
    assert len(str(raised.value)) < 400


def test_a_misspelt_public_name_can_be_suggested_by_python():
    with pytest.raises(AttributeError) as raised:
        foregrad.compil
    assert (raised.value.name, raised.value.obj) == ("compil", foregrad)


# ------------------------------------------------------------------------------------------------ tracebacks
def fails_eagerly(x):
    raise KeyError("mine")


def fails_for_some_shapes(x):
    return x @ torch.ones(3)


def own_frames(error):
    package = foregrad.__path__[0]
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [file for file in files if file.startswith((package, "<foregrad"))], files[-1]


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("function", [fails_eagerly, fails_for_some_shapes])
def test_the_traceback_of_the_functions_own_error_has_one_frame_of_foregrads(function, calls_before):
    compiled = foregrad.compile(function, backend="eager")
    for _ in range(calls_before if function is fails_for_some_shapes else 0):
        compiled(torch.ones(3))
    for _ in range(2):
        with pytest.raises((KeyError, RuntimeError)) as raised:
            compiled(torch.ones(2))
        own, innermost = own_frames(raised.value)
        assert len(own) == 1
        assert innermost == __file__


def test_capturing_hides_foregrads_frames_too():
    with pytest.raises(KeyError) as raised:
        foregrad.capture(fails_eagerly, torch.ones(2))
    own, innermost = own_frames(raised.value)
    assert (len(own), innermost) == (1, __file__)


def test_all_frames_are_shown_on_request():
    with foregrad.config.override(full_tracebacks=True), pytest.raises(KeyError) as raised:
        foregrad.compile(fails_eagerly, backend="eager")(torch.ones(2))
    assert len(own_frames(raised.value)[0]) > 2


def test_the_traceback_of_an_error_of_foregrads_own_is_whole():
    compiled = foregrad.compile(lambda x: x.numpy().sum(), backend="eager", on_unsupported="raise")
    with pytest.raises(foregrad.errors.UnsupportedError) as raised:
        compiled(torch.ones(2))
    assert len(own_frames(raised.value)[0]) > 2
