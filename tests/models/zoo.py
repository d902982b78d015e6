"""Tiny, randomly initialised models of well-known architectures, and inputs to train each for a step.

Nothing is downloaded: every model is built from a configuration of two layers, 32 wide. For tests and benchmarks:

    entry = ZOO["gpt2"]
    model, inputs = entry.build("sdpa"), entry.inputs()
    loss = entry.loss(model(**inputs))

`entry.masked(kind)` is the same with an ordinary 2-D attention mask, on whose values these models branch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, BATCH, LENGTH, WIDTH = 64, 2, 8, 32
Inputs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture: its classes' names in transformers, the configuration, and how its inputs are made."""

    name: str
    model: str
    config: str
    settings: dict[str, Any]
    make_inputs: Callable[[], Inputs]
    dropout: dict[str, float]
    loss_type: str | None = None

    def build(self, attention: str = "sdpa", *, dropout: float = 0.0, seed: int = 0) -> torch.nn.Module:
        """The model in training mode; `dropout` is the rate of every dropout that the configuration has."""
        import transformers

        rates = dict.fromkeys(self.dropout, dropout)
        config = getattr(transformers, self.config)(**{**self.settings, **rates})
        config._attn_implementation = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, self.model)(config)
        if self.loss_type is not None:
            model.loss_type = self.loss_type
        return model.train()

    def inputs(self, seed: int = 0) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_inputs()

    def masked(self, kind: str) -> Entry:
        """With a 2-D attention mask: "ones", "padded" (on the left), or "mixed", which is either by the seed."""

        def make_inputs() -> Inputs:
            inputs = self.make_inputs()
            mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
            if kind == "padded" or (kind == "mixed" and torch.rand(()) > 0.5):
                mask[1, :3] = 0
            return {**inputs, "attention_mask": mask}

        return dataclasses.replace(self, make_inputs=make_inputs)

    @staticmethod
    def loss(outputs: Any) -> torch.Tensor:
        """The model's own loss, or the mean of what it gives."""
        given = getattr(outputs, "loss", None)
        return given if given is not None else outputs[0].mean()


# ------------------------------------------------------------------------------------------------- inputs
def tokens() -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH))


def text() -> Inputs:
    return {"input_ids": tokens(), "labels": tokens()}


def generated_text() -> Inputs:
    return {**text(), "use_cache": False}


def translated_text() -> Inputs:
    return {"input_ids": tokens(), "labels": tokens(), "use_cache": False}


def images(size: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 5, (BATCH,))}

    return make


def bare_images() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def speech() -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 20), "labels": tokens(), "use_cache": False}


# ------------------------------------------------------------------------------------------ configurations
BERT_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
LLAMA_SIZES = {**BERT_SIZES, "num_key_value_heads": 2, "head_dim": 8}
ENDS = {"bos_token_id": 0, "eos_token_id": 1}
BERT_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
CAUSAL = "ForCausalLM"

ENTRIES = [
    Entry(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32, **ENDS},
        generated_text,
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        CAUSAL,
    ),
    Entry("bert", "BertForMaskedLM", "BertConfig", BERT_SIZES, text, BERT_DROPOUT),
    Entry("roberta", "RobertaForMaskedLM", "RobertaConfig", BERT_SIZES, text, BERT_DROPOUT),
    Entry("albert", "AlbertForMaskedLM", "AlbertConfig", {**BERT_SIZES, "embedding_size": 16}, text, BERT_DROPOUT),
    Entry(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 32,
        },
        text,
        {"dropout": 0.1, "attention_dropout": 0.1},
    ),
    Entry(
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA_SIZES,
        generated_text,
        {"attention_dropout": 0.1},
        CAUSAL,
    ),
    Entry(
        "mistral",
        "MistralForCausalLM",
        "MistralConfig",
        {**LLAMA_SIZES, "sliding_window": 4},
        generated_text,
        {"attention_dropout": 0.1},
        CAUSAL,
    ),
    Entry(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {key: value for key, value in LLAMA_SIZES.items() if key != "head_dim"},
        generated_text,
        {"attention_dropout": 0.1},
        CAUSAL,
    ),
    Entry(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        # The plain experts each take a number of tokens that depends on the router's values.
        {**LLAMA_SIZES, "num_local_experts": 4, "experts_implementation": "eager"},
        generated_text,
        {"attention_dropout": 0.1},
        CAUSAL,
    ),
    Entry(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": WIDTH,
        },
        generated_text,
        {"dropout": 0.1, "attention_dropout": 0.1},
        CAUSAL,
    ),
    Entry(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        translated_text,
        {"dropout_rate": 0.1},
    ),
    Entry(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        speech,
        {"dropout": 0.1, "attention_dropout": 0.1},
    ),
    Entry(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
        },
        images(16),
        BERT_DROPOUT,
        "ForImageClassification",
    ),
    Entry(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5, "layer_scale_init_value": 0.5},
        images(32),
        {"drop_path_rate": 0.1},
        "ForImageClassification",
    ),
    Entry(
        "resnet",
        "ResNetModel",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        bare_images,
        {},
    ),
]

STATES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2}
WITH_STATES = [
    Entry("mamba", "MambaForCausalLM", "MambaConfig", {**STATES, "state_size": 4}, generated_text, {}),
    Entry(
        "rwkv",
        "RwkvForCausalLM",
        "RwkvConfig",
        {**STATES, "attention_hidden_size": WIDTH, "context_length": 32},
        generated_text,
        {},
    ),
]

ZOO: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
# Loops over the sequence: long graphs, so that not every test has them.
RECURRENT: dict[str, Entry] = {entry.name: entry for entry in WITH_STATES}
WITHOUT_ATTENTION = ("convnext", "resnet", *RECURRENT)
