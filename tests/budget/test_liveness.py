"""The simulated memory of a split is what an allocator measures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.partitioners.default import choose_default
from foregrad.partitioners.index import JointIndex
from foregrad.partitioners.liveness import Storages
from tests.parity.peak import peak_of

MIB = 1 << 20


def simulated(joint):
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    return Storages(index).liveness([index.number[node] for node in choose_default(index)])


def sines(x):
    for _ in range(8):
        x = x.sin()
    return x


def test_a_row_of_sines_by_hand():
    """Eight values of 1 MiB: the backward reads the argument and seven of them; the eighth is returned."""
    found = simulated(foregrad.capture(sines, torch.ones(MIB // 4, requires_grad=True)))
    assert found.saved_bytes == 7 * MIB
    assert found.forward.peak == 8 * MIB
    # The output, the cotangent, and six saved values beside the first cosine.
    assert found.backward.peak == max(found.backward.bytes)
    assert found.peak == 10 * MIB


def tower():
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))


def attention():
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)


@pytest.mark.parametrize(("make", "shape"), [(tower, (256, 64)), (attention, (8, 64, 32))])
def test_the_allocator_agrees(make, shape):
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    compiled = foregrad.compile(lambda x: module(x).square().mean(), backend="eager", partition="default")

    def step():
        compiled(x).backward()
        for parameter in module.parameters():
            parameter.grad = None

    step()
    step()
    (specialization,) = compiled.foregrad.specializations
    found = simulated(specialization.product.captured.joint)
    assert peak_of(step) == pytest.approx(found.peak, abs=16)


def test_a_second_copy_of_a_saved_result_goes_at_once():
    """The output of each norm is saved, its statistics are computed again: that makes the output anew, for nothing."""

    def f(x):
        for _ in range(6):
            x = nn.functional.layer_norm(x, (64,))
        return x.sin().mean()

    keeps_outputs = foregrad.Policy(lambda candidate: candidate.spec.shape == (256, 64))
    x = torch.randn(256, 64, requires_grad=True)
    compiled = foregrad.compile(f, backend="eager", partition=keeps_outputs)

    def step():
        compiled(x).backward()
        x.grad = None

    step()
    step()
    joint = foregrad.capture(f, x)
    parts = foregrad.partition(joint, keeps_outputs)
    assert any(one.op == "aten.native_layer_norm.default" for one in parts.report().recomputed)
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    index.policy = keeps_outputs
    found = Storages(index).liveness([index.number[node] for node in choose_default(index)])
    assert found.peak == parts.report().peak
    assert peak_of(step) == pytest.approx(found.peak, abs=16)
