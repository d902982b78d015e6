"""A policy decides what is saved; results stay eager's bit for bit, through both doors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from foregrad import checkpoint_name
from foregrad.errors import PartitionError
from tests.covering import each


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


WEIGHTS = [torch.linspace(-1, 1, 64).view(8, 8).roll(k).requires_grad_() for k in range(3)]


def chain(x):
    for k, weight in enumerate(WEIGHTS):
        x = checkpoint_name((x @ weight).sin(), "act")
        x = checkpoint_name(x.exp(), f"exp{k}").tanh()
    return x.sum()


def dropping(x):
    for weight in WEIGHTS:
        x = checkpoint_name(nn.functional.dropout(x @ weight, 0.3), "act").sin()
    return x.sum()


def several_results(x):
    for weight in WEIGHTS:
        left, right = checkpoint_name(nn.functional.layer_norm(x @ weight, (8,)), "act").chunk(2, 1)
        x = torch.cat([left * right, checkpoint_name(right.relu(), "exp0")], 1)
        x = x * x.max(1, keepdim=True).values
    return x.sum()


def overwriting(x):
    for weight in WEIGHTS:
        x = (x @ weight).sin()
        checkpoint_name(x, "act").mul_(2)
    return checkpoint_name(x.exp(), "exp1").sum()


def with_region(x):
    def region(x, weight):
        return checkpoint_name((x @ weight).sin(), "act").exp()

    for weight in WEIGHTS:
        x = checkpoint(region, x, weight, use_reentrant=False).tanh()
    return x.sum()


def attending(x):
    q = checkpoint_name((x @ WEIGHTS[0]).view(2, 2, 2, 8), "act")
    out = nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos())
    return (checkpoint_name(out, "exp0").reshape(8, 8) @ WEIGHTS[1]).sum()


def odd_and_even(candidate):
    return {0: "save", 1: "recompute", 2: None}[len(candidate.node.name) % 3]


PROGRAMS = [chain, dropping, several_results, overwriting, with_region, attending]
POLICIES = {
    "everything": foregrad.everything_saveable,
    "nothing": foregrad.nothing_saveable,
    "dots": foregrad.dots_saveable,
    "unbatched": foregrad.dots_with_no_batch_dims_saveable,
    "names": foregrad.save_only_these_names("act", "exp1"),
    "offloaded": foregrad.offload_names("act", saved=["exp0"]),
    "own": foregrad.Policy(odd_and_even),
    "large": foregrad.Policy(lambda candidate: candidate.nbytes >= 256),
}


def results(function, doing=None):
    x = torch.linspace(0.1, 2, 64).view(8, 8).requires_grad_()
    torch.manual_seed(5)
    out = function(x)
    return [out, *torch.autograd.grad(out, [x, *WEIGHTS], allow_unused=True)]


def saved_names(f, partition, *args, **options):
    joint = foregrad.capture(f, *(args or (torch.ones(8, 8, requires_grad=True),)))
    return [
        node.name for node in foregrad.partition(joint, partition, **options).saved_nodes if node.op != "placeholder"
    ]


# Through Dynamo come names, regions and the names of nodes; what a policy of operators sees is the same graph.
TOLD_THROUGH_DYNAMO = ("names", "offloaded", "own")
RUN = [
    *(("foregrad", program, policy) for program in PROGRAMS for policy in POLICIES),
    *(("torch", *row) for row in each(PROGRAMS, TOLD_THROUGH_DYNAMO)),
    *(("torch", with_region, policy) for policy in POLICIES if policy not in TOLD_THROUGH_DYNAMO),
]


@pytest.mark.parametrize(("door", "program", "policy"), RUN)
def test_results_are_eagers_bit_for_bit(program, policy, door):
    if door == "foregrad":
        compiled = foregrad.compile(program, backend="eager", partition=POLICIES[policy])
    else:
        options = {"backend": "eager", "partition": POLICIES[policy]}
        compiled = torch.compile(program, backend="foregrad", options=options, fullgraph=True)
    for have, want in zip(results(compiled), results(program), strict=True):
        assert (have is None and want is None) or torch.equal(have, want)


def test_each_named_policy_saves_what_it_says():
    assert saved_names(chain, foregrad.nothing_saveable) == []
    assert saved_names(chain, foregrad.dots_saveable) == ["mm", "mm_1", "mm_2"]
    assert saved_names(chain, foregrad.save_only_these_names("act")) == ["sin", "sin_1", "sin_2"]
    assert saved_names(chain, foregrad.save_only_these_names("exp1")) == ["exp_1"]
    assert saved_names(chain, foregrad.everything_saveable) == saved_names(chain, "default")
    assert saved_names(attending, foregrad.dots_with_no_batch_dims_saveable) == ["view"]  # of the product


@pytest.mark.parametrize("door", ["foregrad", "torch"])
def test_a_policy_is_told_of_names_lines_and_shapes(door):
    seen = {}

    def spy(candidate):
        for name in candidate.names:
            seen[name] = candidate

    options = {"backend": "eager", "partition": foregrad.Policy(spy)}
    compile = (
        foregrad.compile(chain, **options)
        if door == "foregrad"
        else torch.compile(chain, backend="foregrad", options=options)
    )
    results(compile)
    assert sorted(seen) == ["act", "exp0", "exp1", "exp2"]
    found = seen["exp1"]
    assert found.op is torch.ops.aten.exp.default
    assert found.nbytes == 256
    assert found.spec.shape == (8, 8)
    assert "test_policies.py" in found.line
    assert found.line.endswith('x = checkpoint_name(x.exp(), f"exp{k}").tanh()')


def test_what_a_region_must_do_outranks_the_policy_and_what_it_prefers_gives_way():
    def region(x):
        return checkpoint_name(x.sin(), "act").exp()

    def with_policy(answer):
        def f(x):
            contexts = lambda: create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: answer)
            return checkpoint(region, (x @ WEIGHTS[0]), use_reentrant=False, context_fn=contexts).tanh().sum()

        return f

    names = foregrad.save_only_these_names("act")
    assert "exp" in saved_names(with_policy(CheckpointPolicy.MUST_SAVE), foregrad.nothing_saveable)
    assert saved_names(with_policy(CheckpointPolicy.PREFER_SAVE), foregrad.nothing_saveable) == []
    assert saved_names(with_policy(CheckpointPolicy.MUST_RECOMPUTE), names) == []
    assert saved_names(with_policy(CheckpointPolicy.PREFER_RECOMPUTE), names) == ["sin"]


def test_random_results_are_saved_whatever_the_policy_says():
    saved = saved_names(dropping, foregrad.nothing_saveable)
    joint = foregrad.capture(dropping, torch.ones(8, 8, requires_grad=True))
    parts = foregrad.partition(joint, foregrad.nothing_saveable)
    targets = [node.target for node in parts.backward.graph.nodes if node.op == "call_function"]
    assert not any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)
    assert len(saved) >= 3


def test_a_policy_goes_together_with_a_budget():
    everything = saved_names(chain, foregrad.Policy(lambda candidate: None), memory_budget=1.0)
    assert set(saved_names(chain, None, memory_budget=1.0)) == set(everything)
    kept = foregrad.Policy(lambda candidate: "save" if "exp1" in candidate.names else None)
    assert "exp_1" in saved_names(chain, kept, memory_budget=0.0)
    dropped = foregrad.Policy(lambda candidate: "recompute" if "exp1" in candidate.names else None)
    assert "exp_1" not in saved_names(chain, dropped, memory_budget=1.0)
    compiled = foregrad.compile(chain, backend="eager", partition=kept, memory_budget=0.0)
    assert all(map(torch.equal, results(compiled), results(chain)))


def test_a_name_under_a_transform_names_what_is_computed():
    def f(x):
        return torch.vmap(lambda row: checkpoint_name(row.sin(), "act").exp())(x @ WEIGHTS[0]).sum()

    assert saved_names(f, foregrad.save_only_these_names("act")) == ["sin"]

    def g(x):
        inner = torch.func.grad(lambda y: checkpoint_name(y.sin(), "act").exp().sum())
        return inner(x @ WEIGHTS[0]).sum()

    assert "sin" in saved_names(g, foregrad.save_only_these_names("act"))


def test_a_name_is_the_tensor_itself_and_costs_nothing():
    x = torch.ones(3, requires_grad=True)
    assert checkpoint_name(x, "x") is x
    plain = foregrad.capture(lambda x: x.sin().exp().sum(), x)
    named = foregrad.capture(lambda x: checkpoint_name(x.sin(), "a").exp().sum(), x)
    assert [node.target for node in named.graph.nodes] == [node.target for node in plain.graph.nodes]
    assert "# f32[3]  named a" in str(named)
    out = foregrad.compile(lambda x: checkpoint_name(x, "x"), backend="eager")(x)
    assert out is x


@pytest.mark.parametrize("wrong", [(3, "x"), (torch.ones(1), 3), ([torch.ones(1)], "x")])
def test_only_tensors_have_names(wrong):
    with pytest.raises(TypeError):
        checkpoint_name(*wrong)


def test_an_answer_that_is_none_is_refused_with_the_line():
    with pytest.raises(PartitionError, match=r"answered 'keep' for mm .*test_policies.py"):
        saved_names(chain, foregrad.Policy(lambda candidate: "keep"))


def test_policies_are_values():
    assert foregrad.save_only_these_names("a", "b") == foregrad.save_only_these_names("b", "a")
    assert foregrad.save_only_these_names("a") != foregrad.offload_names("a")
    assert (
        len(
            {
                foregrad.dots_saveable,
                foregrad.nothing_saveable,
                foregrad.Policy(odd_and_even),
                foregrad.Policy(odd_and_even),
            }
        )
        == 3
    )


def test_one_of_several_results_is_of_the_operator_that_makes_them():
    """A recurrent layer's operator is a function, which has no schema."""
    seen = {}
    layer = torch.nn.LSTM(4, 4)

    def f(x):
        return checkpoint_name(layer(x.sin())[0], "state").sum() + checkpoint_name(x.max(0).values, "most").sum()

    def spy(candidate):
        seen.update(dict.fromkeys(candidate.names, candidate.op))

    foregrad.partition(foregrad.capture(f, torch.randn(3, 2, 4, requires_grad=True)), foregrad.Policy(spy))
    assert seen["most"] is torch.ops.aten.max.dim
    assert "rnn_layer" in seen["state"].__name__
