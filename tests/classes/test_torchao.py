"""Models that torchao has quantised, for inference and for training: equal to eager's."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import each

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def torchao():
    """`torchao("optim")`: that part, or a skip where this release has it not, or has it elsewhere."""
    pytest.importorskip("torchao")

    def part(name):
        try:
            return importlib.import_module(f"torchao.{name}")
        except ImportError as error:
            pytest.skip(str(error))

    return part


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 32))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Int8WeightOnlyConfig", {}),
        ("Int8DynamicActivationInt8WeightConfig", {}),
        ("Int4WeightOnlyConfig", {}),
        ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
        ("Int8DynamicActivationIntxWeightConfig", {"weight_dtype": torch.int4}),
    ],
)
def test_quantised_weights(torchao, name, settings):
    """Packed numbers of four bits need a library for GPUs, and are skipped without; unpacked ones do not."""
    quantization = torchao("quantization")
    model = make_model().eval()
    try:
        quantization.quantize_(model, getattr(quantization, name)(**settings))
    except ImportError as error:
        pytest.skip(str(error))
    fast = foregrad.compile(model, backend="eager", on_unsupported="raise")
    for rows in (4, 5, 6):
        x = torch.randn(rows, 64)
        assert torch.equal(fast(x), model(x))
    assert len(fast.foregrad.specializations) <= 2


def fake_quantised(torchao):
    qat, quantization = torchao("quantization.qat"), torchao("quantization")
    activations = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    config = qat.QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    model = make_model()
    quantization.quantize_(model, config)
    return model


def int8_products(torchao):
    model = make_model()
    config = torchao("prototype.quantized_training").int8_mixed_precision_training()
    torchao("quantization").quantize_(model, config)
    return model


def bitnet(torchao):
    model = make_model()
    torchao("quantization").quantize_(model, torchao("prototype.quantized_training").bitnet_training())
    return model


def float8(torchao):
    training = torchao("float8")
    return training.convert_to_float8_training(make_model(), config=training.Float8LinearConfig(emulate=True))


class QLoRA(nn.Module):
    """A frozen weight of four bits with a trained one of low rank."""

    def __init__(self, quantised, linear):
        super().__init__()
        self.weight = nn.Parameter(quantised(torch.randn(64, 64) * 0.1), requires_grad=False)
        self.linear = linear
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return self.linear(x, self.weight) + self.up(self.down(x))


def qlora(torchao):
    nf4 = torchao("quantization.quantize_.workflows.nf4.nf4_tensor")
    torch.manual_seed(0)

    def quantised(weight):
        return nf4.to_nf4(weight, block_size=64, scaler_block_size=32)

    return nn.Sequential(*(QLoRA(quantised, nf4.linear_nf4) for _ in range(2)))


def trained(make, run):
    """The losses of four steps, in which `run` makes what is called of the model, and what the model then gives."""
    model = make()
    call = run(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = call(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        return [*losses, model(torch.randn(8, 64))]


RUNS = {
    "compile": lambda model: foregrad.compile(model, backend="eager", on_unsupported="raise"),
    "torch.compile": lambda model: torch.compile(model, backend="foregrad", options={"backend": "eager"}),
}


@pytest.mark.parametrize(("make", "run"), each([fake_quantised, int8_products, bitnet, float8, qlora], RUNS))
def test_training(torchao, make, run):
    torch._dynamo.reset()
    results = [trained(lambda: make(torchao), run) for run in (lambda model: model, RUNS[run])]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
