"""Real architectures train through `torch.compile(backend="foregrad")` with eager's losses, bit for bit.

A few of them here; `python -m tests.dynamo.training` does all.
"""

from __future__ import annotations

import pytest
import torch

from tests.dynamo.training import train_both

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["distilbert", "llama", "vit", "resnet"])
def test_five_steps_have_eagers_losses(name):
    graphs = []

    def compile(model):
        from foregrad.backends.eager import eager_compiler

        def seen(gm, inputs):
            graphs.append(gm)
            return eager_compiler(gm, inputs)

        return torch.compile(model, backend="foregrad", options={"backend": seen})

    expected, actual, off = train_both(name, compile)
    assert actual == expected
    assert off == 0
    assert len(set(expected)) == len(expected), "nothing was learned"
    assert len(graphs) >= 2
