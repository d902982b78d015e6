"""What `compile` says of arguments that mean something elsewhere."""

import io
import sys
import time

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
    for text in (said(Terminal(), None), said(io.StringIO(), True)):
        assert text.count("compiling `<lambda>`") == 1
        assert "` took" in text


def test_a_captured_function_is_told_eagers_truth_of_compiling():
    """What it does where it isn't being compiled is what the graph holds: branches on values can be taken."""

    def function(x):
        return x * 2 if torch.compiler.is_compiling() else x * 3

    assert torch.equal(foregrad.compile(function, backend="eager")(torch.ones(2)), torch.full((2,), 3.0))
