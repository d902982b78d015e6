"""What a capture was given is freed when the caller lets go of it, with no help from the garbage collector."""

import gc
import weakref

import pytest
import torch
from torch import nn

import foregrad


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_argument_of_the_first_call(no_collector):
    model = nn.Linear(3, 3)
    compiled = foregrad.compile(lambda x: model(x).sin())
    x = torch.ones(2, 3, requires_grad=True)
    freed = weakref.ref(x)
    compiled(x).sum().backward()
    del x
    assert freed() is None


def test_what_the_function_made(no_collector):
    class Made:
        pass

    made = []

    def f(x):
        thing = Made()
        made.append(weakref.ref(thing))
        return x * 2

    foregrad.compile(f)(torch.ones(3))
    assert made and all(reference() is None for reference in made)
