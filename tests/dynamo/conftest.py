"""`torch.compile(backend="foregrad")` known without installing, and a Dynamo that starts empty in each test."""

from __future__ import annotations

import pytest
import torch

from tests.dynamo.installed import make_known


@pytest.fixture(autouse=True)
def fresh_dynamo():
    make_known()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
