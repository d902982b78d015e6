"""Models that read values, as their users plan them: from each message's entry of `sizes` to the next, to a plan. The
plan without values has the memory of the plan with the same values.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import foregrad
from foregrad.errors import UnsupportedDataDependentError, UnsupportedOpError

ENTRY = re.compile(r"For a plan, say .*sizes=\{'(test_values.py:(\d+))': 128\}")


class Experts(nn.Module):
    """A mixture of experts: each takes the rows that `nonzero` finds for it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                result.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return result.square().mean()

    @staticmethod
    def call():
        return (torch.randn(64, 32),)

    def values(self, x):
        chosen = self.gate(x).softmax(-1).topk(2)[1]
        return [[int((chosen == number).sum()) for number in range(4)]]


class Convolution(nn.Module):
    """A graph convolution as PyTorch Geometric writes it: loops are taken out by a mask, and nodes are counted."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def edges(self, edges, nodes):
        edges = edges[:, edges[0] != edges[1]]
        loops = torch.arange(nodes, device=edges.device)
        return torch.cat([edges, torch.stack([loops, loops])], 1)

    def weights(self, _hidden, edges):
        count = int(edges[1].max()) + 1
        degree = torch.zeros(count, device=edges.device).index_add(0, edges[1], torch.ones_like(edges[1]).float())
        norm = degree.rsqrt()
        return norm[edges[0]] * norm[edges[1]]

    def forward(self, x, edges):
        edges, hidden = self.edges(edges, len(x)), self.layer(x)
        picked = hidden[edges[0]] * self.weights(hidden, edges)[:, None]
        return torch.zeros_like(hidden).index_add(0, edges[1], picked).square().mean()

    @staticmethod
    def call():
        return torch.randn(50, 16), torch.randint(0, 50, (2, 300))

    def values(self, x, edges):
        return [int((edges[0] != edges[1]).sum()), len(x) - 1]


class Attention(Convolution):
    """Graph attention: a softmax over the edges of each node."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 1), nn.Linear(16, 1)

    def weights(self, hidden, edges):
        count = int(edges[1].max()) + 1
        scores = functional.leaky_relu(self.first(hidden)[edges[0], 0] + self.second(hidden)[edges[1], 0]).exp()
        return scores / torch.zeros(count, device=scores.device).index_add(0, edges[1], scores)[edges[1]]


class Retrieved(nn.Module):
    """Documents of several lengths in one tensor."""

    def __init__(self):
        super().__init__()
        self.words, self.encoder, self.head = nn.Embedding(100, 32), nn.Linear(32, 32), nn.Linear(32, 100)

    def forward(self, tokens, lengths, labels):
        parts = tokens.split(lengths.tolist())
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        places = torch.arange(int(lengths.max()), device=tokens.device)
        hidden = self.encoder(self.words(padded)) * (places < lengths[:, None])[..., None]
        return functional.cross_entropy(self.head(hidden.sum(1)), labels)

    @staticmethod
    def call():
        return torch.randint(0, 100, (300,)), torch.tensor([100, 60, 80, 20, 40]), torch.zeros(5, dtype=torch.long)

    def values(self, _tokens, lengths, _labels):
        return [lengths.tolist(), int(lengths.max())]


def absent(model, call):
    return model.to("meta"), [one.to("meta") for one in call]


def by_messages(model, call, values):
    """A plan, by the entries that the messages ask for."""
    sizes = {}
    for value in [*values, None]:
        try:
            return foregrad.plan(model, *call, optimizer="AdamW", device="h100", sizes=sizes)
        except UnsupportedDataDependentError as error:
            assert value is not None, error
            line = ENTRY.search(str(error))[1]
            assert line not in sizes
            sizes[line] = value
    raise AssertionError(sizes)


@pytest.mark.parametrize("kind", [Experts, Convolution, Attention, Retrieved])
def test_messages_lead_to_the_plan_of_the_values(kind):
    torch.manual_seed(0)
    model, call = kind(), kind.call()
    values = model.values(*call)
    expected = foregrad.plan(model, *call, optimizer="AdamW", device="h100")
    found = by_messages(*absent(model, call), values)
    for choice in ("save all", "checkpoint each layer" if kind is Experts else "min cut", "eager"):
        assert found.choice(choice).memory is not None, found.choice(choice).why_not
        if expected.choice(choice).memory is not None:
            assert found.choice(choice).peak == pytest.approx(expected.choice(choice).peak, rel=0.02)


class Packed(Retrieved):
    def forward(self, tokens, lengths, labels):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return functional.cross_entropy(self.head(self.encoder(packed.data)[: len(labels)]), labels)


def test_lengths_that_an_operator_reads_are_passed_with_their_values():
    model, (tokens, lengths, labels) = absent(
        Packed(), (torch.zeros(5, 9).long(), torch.ones(5).long(), torch.zeros(5).long())
    )
    with pytest.raises(UnsupportedDataDependentError) as asked:
        foregrad.plan(model, tokens, lengths, labels, device="h100")
    line = ENTRY.search(str(asked.value))[1]
    with pytest.raises(UnsupportedDataDependentError, match="pass that tensor, such as lengths, with its values"):
        foregrad.plan(model, tokens, lengths, labels, device="h100", sizes={line: 4})
    plan = foregrad.plan(model, tokens, torch.tensor([9, 7, 5, 3, 1]), labels, device="h100")
    assert plan.total.flops >= 3 * 2 * 25 * 32 * 32
    assert plan.choice("eager").memory is not None, plan.choice("eager").why_not


class Matched(nn.Module):
    """DETR's loss: the boxes that a matching outside of PyTorch pairs with the targets."""

    def __init__(self):
        super().__init__()
        self.queries, self.boxes = nn.Parameter(torch.randn(10, 32)), nn.Linear(32, 4)

    def forward(self, x, targets, pairs=None):
        boxes = self.boxes(self.queries + x).sigmoid()
        with torch.no_grad():
            if pairs is None:
                pairs = torch.as_tensor(torch.cdist(boxes, targets, p=1).cpu().numpy().argmin(1))
        return functional.l1_loss(boxes.gather(1, pairs[..., None].expand(-1, -1, 4)), targets)


def test_a_matching_is_passed_as_an_argument():
    model, (x, targets, pairs) = absent(
        Matched(), (torch.randn(2, 10, 32), torch.rand(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))
    )
    with pytest.raises(UnsupportedOpError, match=r"For a plan, pass the results of such a part .* as arguments"):
        foregrad.plan(model, x, targets, device="h100")
    plan = foregrad.plan(model, x, targets, pairs, device="h100")
    assert plan.choice("eager").memory is not None, plan.choice("eager").why_not


def test_a_branch_in_a_model_that_fills_a_cache():
    """As DETR of transformers: the call that fills the cache has no values either."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.places = nn.Linear(8, 8), {}

        def forward(self, x):
            if x.shape[1] not in self.places:
                self.places[x.shape[1]] = torch.arange(x.shape[1], device=x.device)
            mask = torch.ones(len(x), device=x.device)
            hidden = self.layer(x) * self.places[x.shape[1]]
            hidden = hidden if mask.bool().all() else hidden * mask[:, None]
            return hidden.sum() if hidden.isfinite().all() else hidden.clamp(-1, 1).sum()

    model, (x,) = absent(Cached(), (torch.randn(4, 8),))
    plan = by_messages(model, (x,), [True])
    assert plan.choice("eager").memory is not None, plan.choice("eager").why_not
