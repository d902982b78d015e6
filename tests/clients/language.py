"""Text: language models, encoders and decoders, adapters, state-space models."""

import torch

from .client import Program, client


def ids(*shape):
    return torch.randint(1, 60, shape)


def causal(model):
    return Program(
        model, lambda: (x := ids(2, 16), x), lambda module, x, labels: module(input_ids=x, labels=labels).loss
    )


@client("language", "transformers")
def transformers_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return causal(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)))


@client("language", "transformers")
def transformers_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return causal(LlamaForCausalLM(config))


@client("language", "transformers")
def transformers_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return causal(T5ForConditionalGeneration(config))


@client("language", "x-transformers")
def x_transformers():
    from x_transformers import Decoder, TransformerWrapper
    from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

    decoder = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=decoder))
    return Program(model, lambda: (ids(2, 16),), lambda module, x: module(x))


@client("language", "peft")
def peft_lora():
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32))
    return causal(
        get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
    )


@client("state space", "mambapy")
def mambapy():
    from mambapy.mamba import Mamba, MambaConfig

    return Program(Mamba(MambaConfig(d_model=16, n_layers=2)), lambda: (torch.randn(2, 16, 16),))
