"""Foreseen figures are the measured ones: bytes saved as autograd holds them, operations as PyTorch counts them."""

from __future__ import annotations

import pytest

from benchmarks.explain import compared

pytest.importorskip("transformers")


# Those with operators of their own for attention and recurrent layers, which are counted in plain ones too.
FUSED = ("gpt2", "llama", "bert", "t5", "vit", "lstm")


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        *((name, "default") for name in FUSED),
        *((name, "min_cut") for name in (*FUSED, "resnet", "mlp", "unet", "mixer")),
    ],
)
def test_saved_bytes_and_operations_are_what_is_measured(name, partition):
    found = compared(name, partition, plainly=partition == "default")
    assert found.saved == found.held > 0
    assert found.known == found.counted
    assert found.plain == found.counted_plain
    assert found.measured_peak == pytest.approx(found.peak, rel=0.06)
    if partition == "min_cut":
        assert found.saved <= found.eager_saved * 1.01
