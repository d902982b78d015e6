"""The seam between a capture and its subjects."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading

import pytest
import torch

import foregrad
from foregrad import annexes
from foregrad.extend import view
from foregrad.tracing import aspect as seam
from foregrad.tracing.aspect import Aspect, aspect, aspect_classes
from tests import forked
from tests.unit import aspect_outside
from tests.unit.aspect_outside import COUNTED, MOMENTS, Counting, counted


@contextlib.contextmanager
def registered(cls):
    aspect_classes()
    aspect(cls)
    try:
        yield
    finally:
        seam._classes.remove(cls)
        COUNTED.clear()
        MOMENTS.clear()


def test_every_class_is_registered_by_a_module_that_the_package_lists():
    """In a process of its own: a module that a program imports (`foregrad.planning`) may register more."""
    asked = "from foregrad.tracing.aspect import aspect_classes; print(*{cls.__module__ for cls in aspect_classes()})"
    modules = forked.run_text(asked, bare=True).stdout.split()
    assert set(modules) == set(foregrad.ANNEXES["subjects of a capture"])


def test_a_capture_waits_for_a_subject_that_another_thread_is_importing(tmp_path, monkeypatch):
    (tmp_path / "slow_aspect.py").write_text(
        "import threading\nbegun, go_on = threading.Event(), threading.Event()\nbegun.set()\ngo_on.wait(60)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    subjects = [*foregrad.ANNEXES["subjects of a capture"], "slow_aspect"]
    monkeypatch.setitem(foregrad.ANNEXES, "subjects of a capture", subjects)
    annexes.given.cache_clear()
    importing = threading.Thread(target=importlib.import_module, args=("slow_aspect",))
    importing.start()
    while "slow_aspect" not in sys.modules or not hasattr(sys.modules["slow_aspect"], "begun"):
        pass
    slow = sys.modules["slow_aspect"]
    threading.Timer(0.2, slow.go_on.set).start()
    aspect_classes()
    assert slow.whole
    importing.join()
    annexes.given.cache_clear()
    del sys.modules["slow_aspect"]


def test_a_subject_outside_the_package_adds_an_effect_to_each_call():
    with registered(Counting):
        compiled = foregrad.compile(lambda x: counted(x) * 2, backend="eager", on_unsupported="raise")
        x = torch.ones(3, requires_grad=True)
        for calls in (1, 2, 3):
            compiled(x).sum().backward()
            assert len(COUNTED) == calls
        assert torch.equal(x.grad, torch.full((3,), 6.0))
        (effect,) = view(compiled).graphs[0].effects
        assert (effect.kind, effect.what) == ("call", "the call is counted")
        assert "count_call()" in view(compiled).graphs[0].source


def test_a_function_that_does_not_concern_a_subject_has_no_effect_of_it():
    with registered(Counting):
        foregrad.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
        assert COUNTED == []


def test_the_moments_come_in_the_order_of_a_capture():
    with registered(Counting):
        foregrad.compile(lambda x: x.sin(), backend="eager")(torch.ones(3, requires_grad=True))
        order = ["begins", "ends", "ran", "ran", "effects", "finished"]  # the backward runs, too
        assert order == MOMENTS


def test_what_a_file_can_not_hold_is_refused_with_the_effect_of_a_subject():
    with registered(Counting), pytest.raises(foregrad.errors.UnsupportedSideEffectError, match="the call is counted"):
        foregrad.export(counted, (torch.ones(3),))


def test_two_subjects_can_not_own_one_function():
    class Second(Aspect):
        functions = {torch.positive: lambda self, function, args, kwargs: function(*args, **kwargs)}

    with registered(Counting), pytest.raises(TypeError, match=r"Second and Counting both own"):
        aspect(Second)


def test_two_subjects_can_not_own_one_operator():
    class First(Aspect):
        operators = {"c10d": lambda self, plan, args, kwargs: None}

    with pytest.raises(TypeError, match="both own c10d"):
        aspect(First)


def test_a_derivative_asks_the_subjects_that_answer_there():
    class Lasting(Counting):
        functions = {}

        def resumed(self):
            MOMENTS.append("resumed")
            return self

    with registered(Lasting):
        compiled = foregrad.compile(lambda x: x**3, backend="eager")
        x = torch.tensor(2.0, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient, x)
        assert second == 12
        assert "resumed" in MOMENTS


def test_the_outside_file_is_the_house_s_to_a_capture():
    assert foregrad.extend.is_house_module(aspect_outside.__name__)
