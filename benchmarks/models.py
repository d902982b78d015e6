"""The models that the benchmarks capture: small, randomly initialised, nothing downloaded.

`MODELS[kind](layers)` gives (module, args, kwargs). Sizes are small because shapes don't matter to a capture, and
layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "build", "first_tensor"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def build(name: str) -> Built:
    """The model called `kind-layers`."""
    kind, _, layers = name.partition("-")
    torch.manual_seed(0)
    return MODELS[kind](int(layers or 1))


def first_tensor(out: Any) -> torch.Tensor:
    """The loss, or the first output."""
    return out if isinstance(out, torch.Tensor) else out[0]


def _mask(batch: int, length: int) -> torch.Tensor:
    # Given as four dimensions: the models would branch on the values of a smaller one.
    return torch.zeros(batch, 1, length, length)


def gpt2(layers: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=128, n_head=4, n_positions=64, vocab_size=512, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 512, (2, 64))
    return model, (ids,), {"attention_mask": _mask(2, 64), "labels": ids.clone()}


def llama(layers: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=128, intermediate_size=352, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 512, (2, 64))
    return model, (ids,), {"attention_mask": _mask(2, 64), "labels": ids.clone()}


def bert(layers: int) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=128, intermediate_size=512, num_attention_heads=4, vocab_size=512,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    return model, (torch.randint(0, 512, (2, 64)),), {"attention_mask": _mask(2, 64)}


def resnet(layers: int) -> Built:
    """Bottleneck blocks: 50 is ResNet-50, a fourth as wide."""
    from transformers import ResNetConfig, ResNetModel

    depths = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3]}[layers]
    config = ResNetConfig(embedding_size=16, hidden_sizes=[64, 128, 256, 512], depths=depths, layer_type="bottleneck")
    return ResNetModel(config), (torch.randn(2, 3, 64, 64),), {}


def mlp(layers: int) -> Built:
    blocks = [block for _ in range(layers) for block in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*blocks), (torch.randn(32, 64),), {}


def conv(layers: int) -> Built:
    """Residual blocks of convolution, batch norm without running statistics, and relu."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(16, track_running_stats=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.norm(self.conv(x)))

    return nn.Sequential(*(Block() for _ in range(layers))), (torch.randn(2, 16, 16, 16),), {}


def chain(operators: int) -> Built:
    """`operators` elementwise operators one after the other."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for step in range(operators // 2):
                x = torch.sin(x) * self.weight if step % 2 else torch.cos(x) + self.weight
            return x

    return Chain(), (torch.randn(4),), {}


def parameters(count: int) -> Built:
    """An elementwise product with `count` parameters, one after the other."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = x * weight
            return x

    return Product(), (torch.randn(4),), {}


MODELS: dict[str, Callable[[int], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "resnet": resnet,
    "mlp": mlp,
    "conv": conv,
    "chain": chain,
    "parameters": parameters,
}
