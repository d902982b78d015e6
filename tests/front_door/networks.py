"""Small networks that between them have every layer of `torch.nn`, and most of `torch.nn.functional`.

`NETWORKS[name]()` builds a `Network`. Names say what kind of layer is in it; a layer that is in none must be named, with
the reason, in `LEFT_OUT`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["LEFT_OUT", "NETWORKS", "Network"]

LEFT_OUT = {
    "Module": "abstract",
    "Container": "abstract, deprecated",
    "RNNBase": "abstract",
    "RNNCellBase": "abstract",
    "NLLLoss2d": "deprecated: its constructor warns; NLLLoss does the same",
    "DataParallel": "copies the network to several GPUs",
    "SyncBatchNorm": "needs a process group and a GPU",
}


@dataclasses.dataclass
class Network:
    """`module(*inputs)`; `draws`: its results are random, so that it is compared with eager's random numbers.

    `breaks`: why Dynamo does not give its backend a graph of it, so that torch.compile runs it by itself.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    draws: bool = False
    breaks: str = ""


class Each(nn.Module):
    """Every layer on inputs of its own: `Each([(layer, input, ...), ...])`. Returns a list of what they return."""

    def __init__(self, calls: Sequence[tuple[Any, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer for layer, *_ in calls])
        self.counts = [len(inputs) for _, *inputs in calls]

    def forward(self, *inputs: Any) -> list[Any]:
        results, start = [], 0
        for layer, count in zip(self.layers, self.counts, strict=True):
            results.append(layer(*inputs[start : start + count]))
            start += count
        return results


def each(calls: Sequence[tuple[Any, ...]], **more: Any) -> Network:
    inputs = tuple(value for _, *values in calls for value in values)
    return Network(Each(calls), inputs, **more)


class Does(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def one() -> torch.Tensor:
    return torch.randn(2, 4, 12)


def two() -> torch.Tensor:
    return torch.randn(2, 4, 8, 8)


def three() -> torch.Tensor:
    return torch.randn(2, 4, 6, 6, 6)


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16)


# ------------------------------------------------------------------------------------------ linear and convolutions
def linear() -> Network:
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(24, 16), nn.Tanh(), nn.Identity(), nn.Unflatten(1, (4, 4)), nn.Linear(4, 3, bias=False)
    )
    return Network(module, (torch.randn(5, 2, 12),))


def bilinear() -> Network:
    return each([(nn.Bilinear(4, 5, 3), torch.randn(6, 4), torch.randn(6, 5))])


def convolution_1d() -> Network:
    module = nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1, groups=2), nn.ReLU(), nn.ConvTranspose1d(8, 4, 2, stride=2), nn.AvgPool1d(2)
    )
    return Network(module, (one(),))


def convolution_2d() -> Network:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, dilation=2, padding="same", padding_mode="reflect"),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return Network(module, (images(),))


def convolution_transposed_2d() -> Network:
    module = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), nn.SiLU(), nn.Conv2d(6, 3, 1))
    return Network(module, (two(),))


def convolution_3d() -> Network:
    module = nn.Sequential(nn.Conv3d(4, 4, 3), nn.ReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2))
    return Network(module, (three(),))


def lazy() -> Network:
    calls = [(nn.LazyLinear(3), torch.randn(4, 7))]
    for size, x in ((1, one()), (2, two()), (3, three())):
        calls += [
            (getattr(nn, f"LazyConv{size}d")(3, 3), x),
            (getattr(nn, f"LazyConvTranspose{size}d")(3, 2), x),
            (getattr(nn, f"LazyBatchNorm{size}d")(), x),
            (getattr(nn, f"LazyInstanceNorm{size}d")(affine=True), x),
        ]
    network = each(calls)
    network.module(*network.inputs)  # gives the parameters their sizes
    return network


# ---------------------------------------------------------------------------------------------------- pooling
def pooling_max() -> Network:
    return each([
        (nn.MaxPool1d(3, stride=2, padding=1), one()),
        (nn.MaxPool2d(2), two()),
        (nn.MaxPool2d(3, stride=1, padding=1, dilation=1, ceil_mode=True), two()),
        (nn.MaxPool3d(2), three()),
        (nn.AdaptiveMaxPool1d(5), one()),
        (nn.AdaptiveMaxPool2d((3, 4)), two()),
        (nn.AdaptiveMaxPool3d(2), three()),
    ])  # fmt: skip


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.ModuleList([nn.MaxPool1d(2, return_indices=True), nn.MaxPool2d(2, return_indices=True),
                                    nn.MaxPool3d(2, return_indices=True)])  # fmt: skip
        self.unpools = nn.ModuleList([nn.MaxUnpool1d(2), nn.MaxUnpool2d(2), nn.MaxUnpool3d(2)])

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.pools, self.unpools, inputs, strict=True)
        return [unpool(*pool(x)) for pool, unpool, x in pairs]


def pooling_undone() -> Network:
    return Network(Unpooled(), (one(), two(), three()))


def pooling_average() -> Network:
    return each([
        (nn.AvgPool1d(3, padding=1), one()),
        (nn.AvgPool2d(2, count_include_pad=False, padding=1), two()),
        (nn.AvgPool3d(2), three()),
        (nn.AdaptiveAvgPool1d(5), one()),
        (nn.AdaptiveAvgPool2d((3, None)), two()),
        (nn.AdaptiveAvgPool3d(2), three()),
        (nn.LPPool1d(2, 3), one().abs()),
        (nn.LPPool2d(2, 2), two().abs()),
        (nn.LPPool3d(2, 2), three().abs()),
    ])  # fmt: skip


def pooling_fractional() -> Network:
    return each([
        (nn.FractionalMaxPool2d(2, output_size=3, _random_samples=torch.rand(2, 4, 2)), two()),
        (nn.FractionalMaxPool3d(2, output_ratio=(0.5, 0.5, 0.5), _random_samples=torch.rand(2, 4, 3)), three()),
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------- padding, activations
def padding() -> Network:
    inputs = {1: one, 2: two, 3: three}
    calls = []
    for size, make in inputs.items():
        calls += [
            (getattr(nn, f"{kind}Pad{size}d")(2, *value), make())
            for kind, value in (("Reflection", ()), ("Replication", ()), ("Circular", ()), ("Zero", ()),
                                ("Constant", (1.5,)))
        ]  # fmt: skip
    return each(calls)


def activations_smooth() -> Network:
    kinds = (nn.CELU, nn.ELU, nn.GELU, nn.LogSigmoid, nn.Mish, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign,
             nn.Tanh, nn.Tanhshrink)  # fmt: skip
    layers = [kind() for kind in kinds]
    return each([(layer, torch.randn(6, 10)) for layer in [*layers, nn.GELU(approximate="tanh")]])


def activations_in_pieces() -> Network:
    kinds = (nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.PReLU, nn.ReLU, nn.ReLU6,
             nn.Softshrink)  # fmt: skip
    layers = [kind() for kind in kinds]
    return each([(layer, torch.randn(6, 10)) for layer in [*layers, nn.Threshold(0.1, 2.0)]])


def softmax() -> Network:
    return each([
        (nn.Softmax(1), torch.randn(6, 10)),
        (nn.LogSoftmax(0), torch.randn(6, 10)),
        (nn.Softmin(1), torch.randn(6, 10)),
        (nn.Softmax2d(), two()),
        (nn.GLU(1), torch.randn(6, 10)),
    ])  # fmt: skip


# ----------------------------------------------------------------------------------------------- normalisation
def batch_normalisation() -> Network:
    fixed = nn.BatchNorm2d(4).eval()
    return each([
        (nn.BatchNorm1d(4), one()),
        (nn.BatchNorm2d(4), two()),
        (nn.BatchNorm3d(4, affine=False), three()),
        (fixed, two()),
        (nn.InstanceNorm1d(4), one()),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), two()),
        (nn.InstanceNorm3d(4), three()),
    ])  # fmt: skip


def batch_normalisation_with_averages() -> Network:
    return each([(nn.BatchNorm2d(4, momentum=None), two())], breaks="float() of the number of batches")


def normalisation() -> Network:
    return each([
        (nn.LayerNorm((4, 12)), one()),
        (nn.RMSNorm(12), one()),
        (nn.GroupNorm(2, 4), two()),
        (nn.LocalResponseNorm(3), two()),
        (Does(lambda x: F.normalize(x, dim=1)), two()),
    ])  # fmt: skip


def normalisation_across_maps() -> Network:
    return each([(nn.CrossMapLRN2d(3), two())], breaks="an autograd.Function that is instantiated")


# --------------------------------------------------------------------------------- recurrent networks, attention
def recurrent() -> Network:
    sequence = torch.randn(2, 5, 4)
    return each([
        (nn.RNN(4, 3, batch_first=True), sequence),
        (nn.LSTM(4, 3, num_layers=2, batch_first=True), sequence),
        (nn.GRU(4, 3, bidirectional=True), sequence),
        (nn.LSTM(4, 3, proj_size=2), sequence),
    ], breaks="it leaves recurrent layers to eager")  # fmt: skip


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.gated, self.long = nn.RNNCell(4, 3), nn.GRUCell(4, 3), nn.LSTMCell(4, 3)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        a = b = None
        state = None
        for x in sequence.unbind(0):
            a, b, state = self.plain(x, a), self.gated(x, b), self.long(x, state)
        return torch.cat([a, b, *state])


def recurrent_cells() -> Network:
    return Network(Unrolled(), (torch.randn(4, 2, 4),))


class WithMask(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, mask=mask, is_causal=True)


def transformer() -> Network:
    module = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return Network(module, (torch.randn(2, 5, 8), torch.randn(2, 4, 8)))


def transformer_parts() -> Network:
    settings = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    encoder = nn.TransformerEncoderLayer(**settings, norm_first=True, activation="gelu")
    decoder = nn.TransformerDecoderLayer(**settings)
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    return each([
        (WithMask(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)), x),
        (nn.TransformerDecoder(decoder, 1), x, memory),
        (nn.MultiheadAttention(8, 2, batch_first=True), x, memory, memory),
        (Does(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True)), torch.randn(2, 2, 5, 4)),
    ])  # fmt: skip


def embedding() -> Network:
    ids = torch.randint(0, 10, (3, 4))
    return each([
        (nn.Embedding(10, 6, padding_idx=1), ids),
        (nn.Embedding(10, 6, scale_grad_by_freq=True), ids),
        (Does(lambda x: F.one_hot(x, 10).float()), ids),
    ])  # fmt: skip


def embedding_bag() -> Network:
    ids, starts = torch.randint(0, 10, (12,)), torch.tensor([0, 5, 7])
    calls = [(nn.EmbeddingBag(10, 6, mode=mode), ids, starts) for mode in ("sum", "mean", "max")]
    return each([*calls, (nn.EmbeddingBag(10, 6, mode="sum"), ids.view(3, 4))])


# ---------------------------------------------------------------------------------------------- random numbers
def dropout() -> Network:
    calls = [
        (nn.Dropout(0.3), torch.randn(6, 10)),
        (nn.Dropout1d(0.5), one()),
        (nn.Dropout2d(0.5), two()),
        (nn.Dropout3d(0.5), three()),
        (nn.AlphaDropout(0.3), torch.randn(6, 10)),
        (nn.FeatureAlphaDropout(0.3), two()),
    ]
    return each(calls, draws=True)


def random_activations() -> Network:
    calls = [
        (nn.RReLU(), torch.randn(6, 10)),
        (Does(lambda x: F.gumbel_softmax(x, dim=1)), torch.randn(6, 10)),
        (nn.LSTM(4, 3, num_layers=2, dropout=0.4), torch.randn(5, 2, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), torch.randn(2, 5, 8)),
    ]
    return each(calls, draws=True)


# ---------------------------------------------------------------------------------------------------- losses
def losses_of_values() -> Network:
    def x() -> torch.Tensor:
        return torch.randn(6, 4)

    return each([
        (nn.MSELoss(), x(), x()),
        (nn.L1Loss(reduction="sum"), x(), x()),
        (nn.SmoothL1Loss(), x(), x()),
        (nn.HuberLoss(delta=0.5), x(), x()),
        (nn.PoissonNLLLoss(full=True), x(), x().exp()),
        (nn.KLDivLoss(reduction="batchmean"), x().log_softmax(1), x().softmax(1)),
        (nn.BCELoss(), x().sigmoid(), torch.rand(6, 4)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)), x(), torch.rand(6, 4)),
    ])  # fmt: skip


def losses_that_check() -> Network:
    values = [torch.randn(6, 4), torch.randn(6, 4), torch.rand(6, 4)]
    return each([(nn.GaussianNLLLoss(), *values)], breaks="a branch on values")


def losses_of_classes() -> Network:
    logits, classes = torch.randn(6, 5), torch.randint(0, 5, (6,))
    return each([
        (nn.CrossEntropyLoss(label_smoothing=0.1), logits, classes),
        (nn.CrossEntropyLoss(ignore_index=2), logits, classes),
        (nn.NLLLoss(weight=torch.rand(5)), logits.log_softmax(1), classes),
        (nn.MultiMarginLoss(), logits, classes),
        (nn.MultiLabelMarginLoss(), logits, torch.tensor([[0, 2, -1, 0, 0]] * 6)),
        (nn.MultiLabelSoftMarginLoss(), logits, torch.randint(0, 2, (6, 5))),
        (nn.SoftMarginLoss(), logits, torch.randint(0, 2, (6, 5)) * 2 - 1),
        *[(kind(5, 7), logits, classes) for kind in [getattr(nn, "LinearCrossEntropyLoss", None)] if kind],
    ])  # fmt: skip


def losses_of_many_classes() -> Network:
    layer, classes = nn.AdaptiveLogSoftmaxWithLoss(32, 20, [5, 10]), torch.randint(0, 20, (6,))
    return each([(layer, torch.randn(6, 32), classes)], breaks="sizes that depend on values")


def losses_of_sequences() -> Network:
    targets, lengths = torch.randint(1, 5, (2, 3)), torch.tensor([3, 2])
    return each([(nn.CTCLoss(), torch.randn(7, 2, 5).log_softmax(2), targets, torch.tensor([7, 6]), lengths)],
                breaks="lengths are read as numbers")  # fmt: skip


def losses_of_distances() -> Network:
    def x() -> torch.Tensor:
        return torch.randn(6, 4)

    signs = torch.randint(0, 2, (6,)).float() * 2 - 1
    return each([
        (nn.CosineEmbeddingLoss(), x(), x(), signs),
        (nn.HingeEmbeddingLoss(), x()[:, 0], signs),
        (nn.MarginRankingLoss(), x()[:, 0], x()[:, 1], signs),
        (nn.TripletMarginLoss(), x(), x(), x()),
        (nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance()), x(), x(), x()),
        (nn.CosineSimilarity(), x(), x()),
        (nn.PairwiseDistance(), x(), x()),
        (Does(F.pdist), x()),
        (Does(torch.cdist), x(), x()),
    ])  # fmt: skip


# ----------------------------------------------------------------------------------------------------- images
def pixels() -> Network:
    return each([
        (nn.PixelShuffle(2), two()),
        (nn.PixelUnshuffle(2), two()),
        (nn.ChannelShuffle(2), two()),
        (nn.Unfold(3, padding=1, stride=2), two()),
        (nn.Fold((5, 5), 2), torch.randn(2, 8, 16)),
    ])  # fmt: skip


def resizing() -> Network:
    sizes = [("nearest", two()), ("bilinear", two()), ("bicubic", two()), ("trilinear", three()), ("linear", one()),
             ("nearest-exact", two())]  # fmt: skip
    grid = torch.rand(2, 5, 5, 2) * 2 - 1
    return each([
        *[(nn.Upsample(scale_factor=2, mode=mode), x) for mode, x in sizes],
        (nn.UpsamplingBilinear2d(scale_factor=2), two()),
        (nn.UpsamplingNearest2d(scale_factor=2), two()),
        (Does(lambda x: F.interpolate(x, size=(5, 5), mode="area")), two()),
        (Does(lambda x, g: F.grid_sample(x, g, align_corners=False)), two(), grid),
        (Does(lambda t: F.affine_grid(t, [2, 4, 5, 5], align_corners=False)), torch.randn(2, 2, 3)),
    ])  # fmt: skip


# ------------------------------------------------------------------------------------ containers, parametrizations
class Contained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
        self.in_order = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.rand(4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.by_name.values():
            x = layer(x)
        for layer, scale in zip(self.in_order, self.scales, strict=True):
            x = layer(x) * scale
        return x + self.shifts["a"]


def containers() -> Network:
    return Network(Contained(), (torch.randn(3, 4),))


def parametrizations() -> Network:
    from torch.nn.utils import parametrizations as kinds

    module = nn.Sequential(
        kinds.weight_norm(nn.Linear(4, 6)), nn.Tanh(), kinds.spectral_norm(nn.Linear(6, 6)), nn.Tanh(),
        kinds.orthogonal(nn.Linear(6, 4), orthogonal_map="cayley"),
    )  # fmt: skip
    return Network(module, (torch.randn(3, 4),))


NETWORKS: dict[str, Callable[[], Network]] = {
    make.__name__: make
    for make in (
        linear, bilinear, convolution_1d, convolution_2d, convolution_transposed_2d, convolution_3d, lazy,
        pooling_max, pooling_undone, pooling_average, pooling_fractional, padding, activations_smooth,
        activations_in_pieces, softmax, batch_normalisation, batch_normalisation_with_averages, normalisation, normalisation_across_maps, recurrent,
        recurrent_cells, transformer, transformer_parts, embedding, embedding_bag, dropout, random_activations,
        losses_of_values, losses_that_check, losses_of_classes, losses_of_many_classes, losses_of_sequences, losses_of_distances, pixels,
        resizing, containers, parametrizations,
    )
}  # fmt: skip
