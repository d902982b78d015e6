"""Text is generated as in eager, by a compiled model that is handed its cache of keys and values."""

import pytest
import torch

import foregrad

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=None
    ),
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=1, max_position_embeddings=32, eos_token_id=None
    ),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()


def decoded(model, config, ids, steps=7):
    cache, found = transformers.DynamicCache(config=config), []
    for _ in range(steps):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        found.append(out.logits)
        ids = out.logits[:, -1:].argmax(-1)
    return found + [t for layer in cache.layers for t in (layer.keys, layer.values)], [*map(vars, cache.layers)]


@torch.no_grad()
def test_a_loop_that_hands_on_a_cache(model):
    ids = torch.randint(0, 32, (1, 4))
    compiled = foregrad.compile(model, backend="eager", on_unsupported="raise")
    (expected, attributes), (found, compiled_attributes) = (decoded(m, model.config, ids) for m in (model, compiled))
    assert all(map(torch.equal, expected, found))
    assert [*map(list, attributes)] == [*map(list, compiled_attributes)]
    assert len(foregrad.explain_recompiles(compiled)) <= 3


@torch.no_grad()
def test_generate(model):
    ids = torch.randint(0, 32, (1, 4))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.forward = forward = foregrad.compile(model.forward, backend="eager", on_unsupported="raise")
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert len(foregrad.explain_recompiles(forward)) <= 3
