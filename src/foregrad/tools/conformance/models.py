"""Models of `transformers` at toy size, with random weights: nothing is fetched."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .cases import Case, CaseProgram

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def _text() -> dict[str, Any]:
    return {"input_ids": torch.randint(2, 64, (2, 8))}


def _translation() -> dict[str, Any]:
    return {**_text(), "decoder_input_ids": torch.randint(2, 64, (2, 8)), "use_cache": False}


def _generated() -> dict[str, Any]:
    return {**_text(), "use_cache": False}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


# By name: the classes of the model and of its configuration, the settings, the inputs.
_MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, _generated),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        _text,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        _generated,
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SIZES, "num_key_value_heads": 2}, _generated),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 4}, _generated),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        _translation,
    ),
    "vit": ("ViTModel", "ViTConfig", _IMAGES, _pixels),
    "convnext": (
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        _pixels,
    ),
    "resnet": (
        "ResNetModel",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        _pixels,
    ),
}
_SHORT = ("llama", "bert")


class NoTransformersError(Exception):
    """The package `transformers` is not installed."""


def model_cases(*, is_full: bool) -> Iterator[Case]:
    """A case for each model."""
    for name in _MODELS if is_full else _SHORT:
        yield Case(f"models/{name}", functools.partial(_programs, name))


def _programs(name: str) -> Iterator[CaseProgram]:
    if importlib.util.find_spec("transformers") is None:
        raise NoTransformersError("`transformers` is not installed")
    transformers = importlib.import_module("transformers")

    model, config, settings, inputs = _MODELS[name]
    module = getattr(transformers, model)(getattr(transformers, config)(**settings)).train()
    yield CaseProgram(_FirstResult(module), (), inputs())


class _FirstResult(torch.nn.Module):
    """A model that gives its first result alone, so that no class of `transformers` is compared."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, return_dict=False)[0]
