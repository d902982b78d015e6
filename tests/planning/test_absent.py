"""Models that are not there: parameters and arguments on `meta`, and fakes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import foregrad
from foregrad.errors import (
    PlanError,
    UnsupportedDataDependentError,
    UnsupportedTensorError,
)
from foregrad.planning.work import work_of
from tests.covering import each


class Net(nn.Module):
    """Products, a dropout and a norm, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x):
        return self.body(x).square().mean()


def real():
    return Net(), torch.randn(8, 16)


def on_meta():
    with torch.device("meta"):
        return real()


def faked():
    with FakeTensorMode():
        return real()


ABSENT = pytest.mark.parametrize("make", [on_meta, faked])


def operators(joint):
    return [
        (str(node.target), str(node.meta["val"])) for node in joint.module.graph.nodes if node.op == "call_function"
    ]


def without_device(text):
    return [(name, value.replace("device='meta', ", "")) for name, value in text]


def test_fakes_are_captured_as_what_they_stand_for_is():
    model, x = faked()
    assert operators(foregrad.capture(model, x)) == operators(foregrad.capture(*real()))


def test_a_fake_mode_that_is_on_changes_nothing():
    with FakeTensorMode():
        model, x = real()
        inside = operators(foregrad.capture(model, x))
        assert foregrad.pareto(model, x).points
        assert foregrad.partition(foregrad.capture(model, x), "min_cut").report().peak > 0
    assert inside == operators(foregrad.capture(*real()))


def test_a_device_that_is_on_changes_nothing():
    model, x = real()
    expected = foregrad.plan(model, x, device="cpu", budget=1 << 20)
    with torch.device("meta"):
        inside = foregrad.plan(model, x, device="cpu", budget=1 << 20)
    assert [(one.name, one.peak) for one in inside.choices] == [(one.name, one.peak) for one in expected.choices]


@ABSENT
def test_parameters_that_a_function_reaches_by_itself(make):
    model, x = make()
    joint = foregrad.capture(lambda x: model(x) * 2, x)
    assert len(joint.signature.inputs) == 1 + len(list(model.parameters()))


@pytest.mark.parametrize("policy", ["default", "min_cut"])
def test_what_is_saved_is_what_the_real_model_saves(policy):
    expected = foregrad.partition(foregrad.capture(*real()), policy).saved_bytes
    assert foregrad.partition(foregrad.capture(*faked()), policy).saved_bytes == expected


@ABSENT
def test_explain_foresees_and_measures_nothing(make):
    model, x = make()
    found = foregrad.explain(model, x, backend="eager")
    assert found.memory.predicted_peak > 0
    assert (found.memory.measured_peak, found.memory.eager_peak, found.time) == (None, None, None)
    assert "without values" in found.not_measured


@ABSENT
def test_export_gives_the_graph(make):
    model, x = make()
    assert "aten.addmm" in str(foregrad.export(model, (x,)))


@ABSENT
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0].sum(),
        lambda x: x.nonzero().sum() + x.sum(),
        lambda x: x.sin() if x.sum() > 0 else x,
    ],
)
def test_a_value_that_is_not_there_is_asked_for_by_name(make, function):
    _, x = make()
    with pytest.raises(UnsupportedDataDependentError, match=r"test_absent.py:\d+ .* has no values"):
        foregrad.capture(function, x.requires_grad_())


def test_a_model_that_fills_a_cache_by_its_first_call():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = None
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(x.shape[-1], device=x.device)
            return (x * self.table * self.scale).sum()

    with torch.device("meta"):
        joint = foregrad.capture(Table(), torch.ones(2, 4))
    assert joint.signature.num_forward_outputs == 1


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch can make such tensors")
def test_a_fake_of_a_gpu_that_pytorch_is_not_built_for():
    with FakeTensorMode():
        x = torch.empty(4, device="cuda", requires_grad=True)
    with pytest.raises(UnsupportedTensorError, match=r"`x` is a fake tensor on cuda.*Make it on `meta`"):
        foregrad.capture(lambda x: x.sin().sum(), x=x)


transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**SMALL, "num_key_value_heads": 2}),
    "MixtralForCausalLM": ("MixtralConfig", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}),
    "BertForMaskedLM": ("BertConfig", SMALL),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64,
         "decoder_start_token_id": 0},
    ),
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 32, "patch_size": 8}),
}  # fmt: skip


def language_model(name: str):
    config, settings = MODELS[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)(**settings))
        if name.startswith("ViT"):
            return model, {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
        tokens = torch.zeros(2, 8, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_with_its_loss(name):
    model, inputs = language_model(name)
    joint = foregrad.capture(model, **inputs)
    got = sum(joint.signature.gradients.returned)
    assert got == sum(parameter.requires_grad for parameter in model.parameters()) or name == "MixtralForCausalLM"
    assert foregrad.partition(joint, "min_cut").report().peak < foregrad.partition(joint).report().peak * 1.01


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel"])
def test_a_model_that_keeps_no_cache_is_planned(name):
    """It looks for packed sequences in positions of its own."""
    model, inputs = language_model(name)
    model.to(torch.bfloat16).config.use_cache = False
    plan = foregrad.plan(model, **inputs, optimizer="AdamW", device="h100")
    assert all(one.memory is not None for one in plan.choices), [one.why_not for one in plan.choices]


@ABSENT
def test_a_value_that_depends_on_no_input_is_known(make):
    with torch.device("meta") if make is on_meta else FakeTensorMode():
        x = torch.empty(64, 8, requires_grad=True)

    def positions(x):
        at = torch.arange(64, device=x.device)
        return (x * at.max().item()).sum() if (at.diff() == 1).all() else x.sum()

    def expected(x):
        return (x * 63).sum()

    found, beside = foregrad.capture(positions, x), foregrad.capture(expected, x)
    assert [node.name for node in found.module.graph.nodes if "mul" in node.name] == [
        node.name for node in beside.module.graph.nodes if "mul" in node.name
    ]


def test_a_compiled_call_does_not_know_it_as_eager_does_not():
    def scaled(x):
        return x * torch.ones(3, device=x.device).sum().item()

    for call in (scaled, foregrad.compile(scaled, backend="eager")):
        with pytest.raises(RuntimeError, match=r"cannot be called on meta tensors|has no values"):
            call(torch.empty(3, device="meta"))


# ------------------------------------------------------------------------------------------------- values that are said

ASKING = {
    "a number": lambda x, layer: layer(x).sum() * x.sum().item(),
    "a branch": lambda x, layer: layer(x).sum() if x.sum() > 0 else x.sum(),
    "a loop": lambda x, layer: sum(layer(x)[i].sum() for i in range(int(x.max()))),
    "parts": lambda x, layer: sum(part.sum() for part in layer(x).split(x.long()[0, :2].tolist())),
    "unique": lambda x, layer: layer(x).sum() * torch.unique(x.long()).numel(),
    "a mask": lambda x, layer: layer(x)[x.sum(1) > 0].sum(),
    "nonzero": lambda x, layer: layer(x)[(x.sum(1) > 0).nonzero().squeeze(1)].sum(),
    "where": lambda x, layer: layer(x)[torch.where(x.sum(1) > 0)].sum(),
    "masked_select": lambda x, layer: layer(x).masked_select(x > 0).sum(),
    "repeats": lambda x, layer: layer(x).repeat_interleave(x.long()[:, 0], dim=0).sum(),
    "a write by a mask": lambda x, layer: x.clone().index_put((x.sum(1) > 0,), layer(x)[x.sum(1) > 0]).sum(),
}


@pytest.mark.parametrize(("name", "device"), each(ASKING, ["cpu", "h100"]))
@ABSENT
def test_a_value_that_is_asked_for_is_said_by_its_line(make, name, device):
    with torch.device("meta") if make is on_meta else FakeTensorMode():
        x, layer = torch.empty(64, 8), nn.Linear(8, 8)
    function = ASKING[name]
    line = f"test_absent.py:{function.__code__.co_firstlineno}"
    with pytest.raises(UnsupportedDataDependentError, match=rf"sizes=.'{line}': 128") as asked:
        foregrad.plan(function, x, layer, device=device)
    assert "has no values" in str(asked.value)
    found = foregrad.plan(function, x, layer, device=device, sizes={line: [32, 32] if name == "parts" else 32})
    assert found.total.flops >= 2 * 2 * 64 * 8 * 8


@pytest.mark.parametrize("name", ["nets/picking.py", "nets/models/picking.py", "picking.py"])
def test_a_line_of_a_package_is_said_as_reports_spell_it(name):
    file, namespace = "/env/lib/python3/site-packages/nets/models/picking.py", {}
    exec(compile("def function(x):\n    return x[x > 0].sum()", file, "exec"), namespace)
    x = torch.empty(64, device="meta", requires_grad=True)
    assert foregrad.plan(namespace["function"], x, device="cpu", sizes={f"{name}:2": 32}).total.moved > 0


@pytest.mark.parametrize("name", ASKING)
@ABSENT
def test_sizes_are_said_to_the_other_doors(make, name):
    with torch.device("meta") if make is on_meta else FakeTensorMode():
        x, layer = torch.empty(64, 8), nn.Linear(8, 8)
    function = ASKING[name]
    line = f"test_absent.py:{function.__code__.co_firstlineno}"
    sizes = {line: [32, 32] if name == "parts" else 32}
    said = foregrad.planning.with_sizes(function, sizes)
    joint = foregrad.capture(said, x, layer)
    planned = foregrad.plan(function, x, layer, device="cpu", sizes=sizes)
    assert sum(one.flops for one in work_of(joint, planned.device).values()) == planned.total.flops
    assert foregrad.partition(joint, "min_cut").report().peak > 0
    assert foregrad.pareto(said, x, layer).points
    assert foregrad.explain(said, x, layer, backend="eager").memory.predicted_peak > 0
    assert "aten.mul" in str(foregrad.export(lambda x: said(x, layer) * 2, (x,)))


def test_a_file_of_a_graph_with_values_that_were_said_does_not_run(tmp_path):
    x = torch.ones(64, 8)
    function = ASKING["a mask"]
    line = f"test_absent.py:{function.__code__.co_firstlineno}"
    layer = nn.Linear(8, 8)
    said = foregrad.planning.with_sizes(lambda x: function(x, layer), {line: 32})
    foregrad.export(said, (x,)).save(tmp_path / "said.foregrad")
    program = (
        "import sys, torch, foregrad\n"
        "loaded = foregrad.load(sys.argv[1])\n"
        "try: loaded(torch.ones(64, 8))\n"
        "except foregrad.errors.PlanError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "said.foregrad")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"values that were said, at {line}: it foresees, and does not run" in found.stdout


@pytest.mark.parametrize("name", ["a mask", "nonzero", "where", "masked_select", "repeats"])
def test_a_graph_with_values_that_were_said_does_not_run(name):
    x, layer = torch.ones(64, 8), nn.Linear(8, 8)
    function = ASKING[name]
    line = f"test_absent.py:{function.__code__.co_firstlineno}"
    said = foregrad.planning.with_sizes(function, {line: 32})
    with pytest.raises(PlanError, match=f"values that were said, at {line}: it foresees, and does not run"):
        foregrad.compile(said, backend="eager")(x, layer)


def test_sizes_of_a_module_name_its_parameters():
    with torch.device("meta"):
        model, x = Net(), torch.empty(8, 16)
    said = foregrad.planning.with_sizes(model, {"other.py:3": 4})
    assert said.__name__ == "Net"
    assert operators(foregrad.capture(said, x)) == operators(foregrad.capture(model, x))
    with pytest.raises(PlanError, match="sizes are numbers by the line"):
        foregrad.planning.with_sizes(model, {"other.py": 4})


def test_elements_that_a_mask_chooses_have_the_memory_of_so_many():
    x, weight = torch.randn(4096, 64), torch.ones(64, requires_grad=True)
    x[1024:, 0], x[:1024, 0] = -1, 1

    def loss(x):
        return (x * weight)[x[:, 0] > 0].exp().sum()

    line = f"test_absent.py:{loss.__code__.co_firstlineno + 1}"
    there = foregrad.plan(loss, x, device="l4").choice("save all").memory
    with torch.device("meta"):
        weight = weight.to("meta").detach().requires_grad_()
        absent = foregrad.plan(loss, x.to("meta"), device="l4", sizes={line: 1024}).choice("save all").memory
    assert absent.saved == pytest.approx(there.saved, rel=0.02)
    assert absent.peak == pytest.approx(there.peak, rel=0.02)


def test_values_that_are_there_are_not_asked_for():
    x, layer = torch.ones(4, 8), nn.Linear(8, 8)

    def loss(x):
        return layer(x).sum() * x.sum().item()

    line = f"test_absent.py:{loss.__code__.co_firstlineno + 1}"
    found = foregrad.plan(loss, x, sizes={line: 3}).call[0]
    assert found.sizes == {line: 3}
    assert foregrad.plan(loss, x).total == foregrad.plan(loss, x, sizes={line: 3}).total


@pytest.mark.parametrize("sizes", [{"model.py": 3}, {"model.py:4": "many"}, {"model.py:4": []}, 3, ["model.py:4"]])
def test_sizes_that_mean_nothing(sizes):
    model, x = on_meta()
    with pytest.raises(PlanError, match="sizes are numbers by the line that asks for them"):
        foregrad.plan(model, x, sizes=sizes)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_planned_with_symbols(name):
    model, inputs = language_model(name)
    plan = foregrad.plan(model, **inputs, optimizer="AdamW", device="h100")
    found = plan.largest(under="8 MiB", choice="min cut")
    assert found.why_captured == ""
    if name in ("LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification"):
        for size in (found.size, found.size + 1):
            other = {key: value.new_zeros((size, *value.shape[1:])) for key, value in inputs.items()}
            peak = foregrad.plan(model, **other, optimizer="AdamW", device="h100").choice("min cut").peak
            assert (peak <= 8 << 20) == (size == found.size)
