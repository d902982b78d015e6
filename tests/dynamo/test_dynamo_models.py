"""Real architectures train through `torch.compile(backend="foregrad")` with eager's losses, bit for bit.

Llama takes another path through its masks when it is traced, by whomever (equal in mathematics): there, eager is what
Dynamo traced, run as it is. A few of them here; `python -m tests.dynamo.training` does all.
"""

from __future__ import annotations

import pytest
import torch

from tests.dynamo.training import train_both

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["distilbert", "llama", "vit", "resnet", "rwkv"])
def test_five_steps_have_eagers_losses(name):
    graphs = []

    def compile(model):
        from foregrad.backends.eager import eager_compiler

        def seen(gm, inputs):
            graphs.append(gm)
            return eager_compiler(gm, inputs)

        return torch.compile(model, backend="foregrad", options={"backend": seen})

    traced = {"reference_call": lambda model: torch.compile(model, backend="eager")} if name == "llama" else {}
    expected, actual, off = train_both(name, compile, **traced)
    assert actual == expected
    assert off == 0
    assert len(set(expected)) == len(expected), "nothing was learned"
    assert len(graphs) >= 2
