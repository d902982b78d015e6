"""Packed sequences as arguments, in between, and as results: lengths are decided once, values are values."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

import foregrad
from tests.parity.oracle import check

SORTED, MIXED = [4, 3, 2], [4, 2, 3]
LAYERS = {
    "lstm": lambda: nn.LSTM(5, 6, batch_first=True),
    "gru": lambda: nn.GRU(5, 6, batch_first=True),
    "rnn": lambda: nn.RNN(5, 6, batch_first=True),
    "two layers, both ways": lambda: nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True),
    "dropout": lambda: nn.GRU(5, 6, 2, batch_first=True, dropout=0.5),
    "projection": lambda: nn.LSTM(5, 6, proj_size=3, batch_first=True),
}


def padded():
    return torch.randn(3, 4, 5, requires_grad=True)


def packed():
    return pack_padded_sequence(padded(), MIXED, batch_first=True, enforce_sorted=False)


class Inside(nn.Module):
    def __init__(self, layer, in_order):
        super().__init__()
        self.layer, self.in_order = layer, in_order

    def forward(self, x, lengths):
        sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.in_order)
        out, state = self.layer(sequence)
        return pad_packed_sequence(out, batch_first=True), state


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_over_sequences_packed_inside(layer, in_order):
    torch.manual_seed(0)
    lengths = SORTED if in_order else MIXED
    module = Inside(LAYERS[layer](), in_order)
    check(module, lambda: (padded(), lengths))
    check(module, lambda: (padded(), torch.tensor(lengths)))


class Over(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, sequence):
        return tuple(self.layer(sequence)[0])[:2]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_over_a_packed_argument(layer):
    torch.manual_seed(0)
    check(Over(LAYERS[layer]()), lambda: (packed(),))


FUNCTIONS = {
    "packed": lambda x: pack_padded_sequence(x, MIXED, batch_first=True, enforce_sorted=False),
    "packed, steps first": lambda x: pack_padded_sequence(x.transpose(0, 1), SORTED).data * 2,
    "several": lambda x: pack_sequence([x[0, :1], x[1, :2], x[2]], enforce_sorted=False).data.sin(),
    "unpacked": lambda x: unpack_sequence(pack_padded_sequence(x, SORTED, batch_first=True)),
    "longer": lambda x: pad_packed_sequence(
        pack_padded_sequence(x, SORTED, batch_first=True), batch_first=True, padding_value=-1.0, total_length=6
    ),
    "of one number each": lambda x: pad_packed_sequence(pack_padded_sequence(x[:, :, 0], SORTED, batch_first=True)),
    "too short": lambda x: pad_packed_sequence(pack_padded_sequence(x, SORTED, batch_first=True), total_length=2),
    "not in order": lambda x: pack_padded_sequence(x, [2, 3, 4], batch_first=True),
    "no length": lambda x: pack_padded_sequence(x, [4, 3, 0], batch_first=True),
    "one length too few": lambda x: pack_padded_sequence(x, [4, 3], batch_first=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_padded_sequences(name):
    check(FUNCTIONS[name], lambda: (padded(),))


def test_functions_of_packed_sequences():
    check(
        lambda p: PackedSequence(p.data * 2, p.batch_sizes, p.sorted_indices, p.unsorted_indices), lambda: (packed(),)
    )
    check(lambda p: pad_packed_sequence(p, batch_first=True), lambda: (packed(),))


def test_other_lengths_are_another_graph():
    torch.manual_seed(0)
    module = Inside(nn.GRU(5, 6, batch_first=True), False)
    compiled = foregrad.compile(module, backend="eager")
    for lengths in (MIXED, [1, 4, 2], MIXED, [4, 4, 4]):
        x = padded()
        found = [[*tree(side(x, torch.tensor(lengths)))] for side in (module, compiled)]
        assert all(torch.equal(eager, ours) for eager, ours in zip(*found, strict=True))
    assert len(compiled.foregrad.specializations) == 3


def tree(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in value for leaf in tree(item)]
