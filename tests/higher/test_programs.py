"""Programs that differentiate more than once train alike, compiled and in eager."""

from __future__ import annotations

import functools

import pytest
import torch

import foregrad
from tests.higher.programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_twenty_steps_are_those_of_eager(name):
    results = []
    for compile in (lambda f: f, functools.partial(foregrad.compile, backend="eager")):
        torch.manual_seed(0)
        results.append(PROGRAMS[name](compile, 20))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
