"""The order of the backward: what frees memory comes first, and nothing passes an effect."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.partitioners.classify import Kind
from foregrad.partitioners.default import choose_default
from foregrad.partitioners.index import JointIndex
from foregrad.partitioners.liveness import Storages


def layers():
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (4, 4, 1)),
        *(part for _ in range(3) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())),
    )


def attention():
    return nn.Sequential(
        nn.Unflatten(0, (16, 32)), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    )


PROGRAMS = {"layers": layers, "convolutions": convolutions, "attention": attention}


def index_of(name):
    torch.manual_seed(0)
    module = PROGRAMS[name]()
    joint = foregrad.capture(lambda x: module(x).square().mean(), torch.randn(512, 16, requires_grad=True))
    return JointIndex(joint.module, joint.signature.num_forward_outputs)


def captured(index):
    return [i for i, bit in enumerate(index.needs_tangent) if bit and index.kinds[i] is not Kind.INPUT]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_order_has_each_operator_once_and_after_what_it_reads(name):
    index = index_of(name)
    order = index.backward_sequence
    assert sorted(order) == captured(index)
    place = {i: k for k, i in enumerate(order)}
    assert all(place[operand] < place[i] for i in order for operand in index.operands[i] if operand in place)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_at_most_that_of_the_captured_order(name):
    peaks = []
    for is_captured in (True, False):
        index = index_of(name)
        if is_captured:
            index.backward_sequence = captured(index)
        saved = [index.number[node] for node in choose_default(index)]
        peaks.append(Storages(index).liveness(saved).backward.peak)
    assert peaks[1] <= peaks[0]


def test_what_frees_more_than_it_makes_comes_first():
    """The weight's gradient is small and the last to read the large `hidden`; autograd makes the input's first."""

    def f(x, w):
        hidden = x.sin() * 2
        return (hidden @ w).sum()

    joint = foregrad.capture(f, torch.randn(4096, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    order = [i for i in index.backward_sequence if index.nodes[i].target is torch.ops.aten.mm.default]
    before = [i for i in captured(index) if index.nodes[i].target is torch.ops.aten.mm.default]
    shapes = [tuple(index.nodes[i].meta["val"].shape) for i in order]
    assert shapes == [(8, 8), (4096, 8)]
    assert set(order) == set(before)


def test_nothing_passes_an_effect():
    """The hook writes to a buffer halfway through the backward; what was before it stays before it."""
    seen = torch.zeros(8)

    def f(x, w):
        hidden = x @ w
        hidden.register_hook(lambda gradient: seen.copy_(gradient.sum(0)))
        return (hidden.sin() @ w).sum()

    joint = foregrad.capture(f, torch.randn(64, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    effects = [i for i in index.backward_sequence if index.kinds[i] is Kind.EFFECT]
    for effect in effects:
        at = index.backward_sequence.index(effect)
        assert set(index.backward_sequence[:at]) == {i for i in captured(index) if i < effect}
