"""Real architectures train through foregrad as in eager: losses, outputs, gradients, weights, bit for bit.

Straight through `foregrad.compile` and `foregrad.aot_module`, no graph captured by anything else before.
"""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch

from tests.covering import each
from tests.models.zoo import WITHOUT_ATTENTION, ZOO
from tests.parity.observe import Strictness, compare_tensor, compare_trees, leaves_of
from tests.parity.oracle import STAND_IN_VARIABLE, default_compile

pytest.importorskip("transformers")

STEPS = 2
MASKED = ("gpt2", "bert", "llama", "mistral", "qwen2", "distilbert", "albert", "mixtral")


def through_aot_module(model):
    if os.environ.get(STAND_IN_VARIABLE):
        return default_compile(model)
    import foregrad

    return foregrad.aot_module(model, fw_compiler=foregrad.nop)


def trained(entry, model, call, seed):
    """One step of `model`, run through `call`: what was observed, by name."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    outputs = call(**entry.inputs(seed))
    loss = entry.loss(outputs)
    loss.backward()
    seen = {"loss": loss, **dict(leaves_of(outputs, "out"))}
    seen |= {f"grad of {name}": parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    seen |= dict(model.named_parameters()) | dict(model.named_buffers())
    return outputs, seen, torch.get_rng_state()


def assert_trains_like_eager(entry, model, compile, steps=STEPS):
    """Two steps with other inputs and weights each: everything is bitwise what eager gives."""
    reference = copy.deepcopy(model)
    call = compile(model)
    for step in range(steps):
        expected_outputs, expected, expected_state = trained(entry, reference, reference, seed=step)
        actual_outputs, actual, actual_state = trained(entry, model, call, seed=step)
        differences = compare_trees(expected_outputs, actual_outputs, "out")
        for name, value in expected.items():
            other = actual[name]
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
                differences += compare_tensor(name, value, other, Strictness())
            elif type(value) is not type(other):
                differences.append(f"{name}: eager {type(value).__name__}, compiled {type(other).__name__}")
        if not torch.equal(expected_state, actual_state):
            differences.append("the generator is not where eager left it")
        assert not differences, f"step {step}:\n" + "\n".join(differences[:12])


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def attention_of(name):
    return "eager" if name in WITHOUT_ATTENTION else "sdpa"


@pytest.mark.parametrize("name", ZOO)
def test_a_training_step_is_eagers(name):
    """With attention written out in Python."""
    entry = ZOO[name]
    assert_trains_like_eager(entry, entry.build("eager"), default_compile)


@pytest.mark.parametrize("name", [name for name in ZOO if ZOO[name].dropout])
def test_a_training_step_with_dropout_is_eagers(name):
    """With PyTorch's attention: eager's random numbers for the same seed, and the generator where eager leaves it."""
    entry = ZOO[name]
    assert_trains_like_eager(entry, entry.build(attention_of(name), dropout=0.2), default_compile)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "resnet"])
def test_a_training_step_through_aot_module_is_eagers(name):
    """With PyTorch's attention, and no dropout: tied weights, an encoder and a decoder, experts, buffers."""
    entry = ZOO[name]
    assert_trains_like_eager(entry, entry.build(attention_of(name)), through_aot_module)


@pytest.mark.parametrize(("name", "kind"), each(MASKED, ["mixed", "padded"]))
def test_a_training_step_with_a_mask_is_eagers(name, kind):
    """The ordinary 2-D mask, on whose values the model branches; with dropout, so that a wrong branch shows."""
    entry = ZOO[name].masked(kind)
    assert_trains_like_eager(
        entry, entry.build("sdpa", dropout=0.2), default_compile, steps=4 if kind == "mixed" else 2
    )


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_wrong_compiler_is_seen(name):
    """The comparison is not blind: dropout with other numbers, and gradients off by a factor, both fail."""
    from tests.parity.stand_ins import BROKEN

    entry = ZOO[name]
    for broken in ("extra_random", "other_values", "wrong_grad"):
        with pytest.raises(AssertionError):
            assert_trains_like_eager(entry, entry.build("sdpa"), BROKEN[broken])


@pytest.mark.parametrize("name", ZOO)
def test_dropout_is_on_when_asked(name):
    """With dropout the loss depends on the seed: the tests with dropout mean what they say."""
    entry = ZOO[name]
    if not entry.dropout:
        pytest.skip("this architecture has none")
    losses = []
    for seed in range(4):
        model = entry.build("eager", dropout=0.5)
        torch.manual_seed(seed)
        losses.append(entry.loss(model(**entry.inputs())).item())
    assert len(set(losses)) > 1
