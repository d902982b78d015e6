"""Policies of selective checkpoint: what is saved is what they say, and results are eager's."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from foregrad.errors import UnsupportedMutationError, UnsupportedOpError
from tests.covering import each
from tests.dynamo.installed import make_known

aten = torch.ops.aten
POLICIES = ("default", "min_cut", "fused")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    make_known()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def saving(*ops, else_=CheckpointPolicy.PREFER_RECOMPUTE, kept=CheckpointPolicy.MUST_SAVE):
    return lambda ctx, op, *args, **kwargs: kept if op in ops else else_


def selected(body, policy, **options):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda x, w: checkpoint(body, x, w, use_reentrant=False, context_fn=contexts, **options).sum()


def body(x, w):
    return torch.sin(torch.tanh(x @ w) @ w).exp()


CASES = {
    "a list": ([aten.mm.default], ["mm", "mm_1"]),
    "must save": (saving(aten.mm.default), ["mm", "mm_1"]),
    "prefer save": (saving(aten.tanh.default, kept=CheckpointPolicy.PREFER_SAVE), ["tanh"]),
    "must recompute the rest": (saving(aten.tanh.default, else_=CheckpointPolicy.MUST_RECOMPUTE), ["tanh"]),
    "a bool": (lambda ctx, op, *args, **kwargs: op == aten.sin.default, ["sin"]),
    "all recomputed": (saving(else_=CheckpointPolicy.MUST_RECOMPUTE), []),
    "all saved": (saving(else_=CheckpointPolicy.MUST_SAVE), ["exp", "mm_1", "tanh"]),
    "by its arguments": (lambda ctx, op, *args: op == aten.mm.default and args[0] is not args[1], ["mm", "mm_1"]),
    # Nothing is moved to another device: what would be kept there is kept.
    "offloaded": (saving(aten.mm.default, kept=CheckpointPolicy.MUST_CPU_OFFLOAD), ["mm", "mm_1"]),
    "perhaps offloaded": (saving(aten.sin.default, kept=CheckpointPolicy.PREFER_CPU_OFFLOAD), ["sin"]),
}


def leaves():
    torch.manual_seed(0)
    return [torch.randn(3, 3, requires_grad=True) for _ in range(2)]


def same_as_eager(function, compiled):
    seen = []
    for call in (function, compiled):
        x, w = leaves()
        out = call(x, w)
        out.backward()
        seen.append((out.detach(), x.grad, w.grad, torch.rand(2)))
    for one, two in zip(*seen, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0)


def saved(function, policy):
    parts = foregrad.partition(foregrad.capture(function, *leaves()), policy)
    return sorted(node.name for node in parts.saved_nodes if node.op != "placeholder")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_what_the_policy_says(case, policy):
    choice, expected = CASES[case]
    function = selected(body, choice)
    assert saved(function, policy) == expected
    same_as_eager(function, foregrad.compile(function, backend="eager", partition=policy))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "policy"), each(CASES, POLICIES))
def test_under_torch_compile_too(case, policy):
    choice, expected = CASES[case]
    found = []

    def partition(module, inputs, **keywords):
        cut = foregrad.default_partition if policy == "default" else foregrad.min_cut_rematerialization_partition
        halves = cut(module, inputs, **keywords)
        found.append([n.name for n in halves[1].graph.nodes if n.op == "placeholder"])
        return halves

    function = selected(body, choice)
    options = {"backend": "eager", "partition": partition if policy != "fused" else "fused"}
    same_as_eager(function, torch.compile(function, backend="foregrad", options=options, fullgraph=True))
    if found:
        assert sorted(name for name in found[0] if not name.startswith(("primals", "tangents"))) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_the_outer_one_of_two_regions_decides(policy):
    save_sin, save_mm = saving(aten.sin.default), saving(aten.mm.default)
    inner = functools.partial(create_selective_checkpoint_contexts, save_mm)
    outer = functools.partial(create_selective_checkpoint_contexts, save_sin)

    def nested(context_fn):
        def part(x, w):
            return checkpoint(body, x, w, use_reentrant=False, context_fn=inner)

        options = {} if context_fn is None else {"context_fn": context_fn}
        return lambda x, w: checkpoint(part, x, w, use_reentrant=False, **options).sum()

    assert saved(nested(None), policy) == []
    assert saved(nested(outer), policy) == ["sin"]


def test_regions_one_after_the_other_have_policies_of_their_own():
    first, second = saving(aten.mm.default), saving(aten.sin.default)

    def function(x, w):
        for policy in (first, second):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(body, x, w, use_reentrant=False, context_fn=contexts)
        return x.sum()

    assert saved(function, "default") == ["exp", "mm", "mm_1", "sin_1"]
    same_as_eager(function, foregrad.compile(function, backend="eager"))


def test_random_numbers_are_eagers_and_drawn_once():
    def noisy(x, w):
        return torch.nn.functional.dropout(torch.tanh(x @ w), 0.5).sin() * torch.rand_like(x)

    for policy in (saving(aten.mm.default), saving(aten.tanh.default, aten.rand_like.default)):
        function = selected(noisy, policy)
        for partition in POLICIES:
            same_as_eager(function, foregrad.compile(function, backend="eager", partition=partition))


def test_what_must_but_can_not_be_computed_again_is_refused_by_name():
    function = selected(lambda x, w: (x * torch.rand_like(x)) @ w, saving(else_=CheckpointPolicy.MUST_RECOMPUTE))
    with pytest.raises(UnsupportedOpError, match=r"MUST_RECOMPUTE for `aten.rand_like.default` at .*test_selective"):
        foregrad.capture(function, *leaves())

    region = selected(lambda x, w: x.sin() @ w, saving(aten.mm.default, else_=CheckpointPolicy.MUST_RECOMPUTE))

    def overwrites(x, w):
        loss = region(x, w)
        x.mul_(2)
        return loss

    x, w = leaves()
    with pytest.raises(UnsupportedMutationError, match=r"`aten.sin.default` at .* reads args\[0\]"):
        foregrad.capture(overwrites, x.detach(), w)


def energy(x, w):
    (force,) = torch.autograd.grad((x @ w).tanh().exp().sum(), x, create_graph=True)
    return (force * x).sin()


def detached_energy(x, w):
    own = x.detach().requires_grad_()
    (force,) = torch.autograd.grad((own @ w.detach()).tanh().sum(), own)
    return (force * x @ w).sin().exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("part", [energy, detached_energy])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_that_takes_a_gradient_itself_is_computed_again(part, policy):
    def function(x, w):
        return checkpoint(part, x * 1.0, w, use_reentrant=False).sum()

    assert saved(function, policy) in (["mul"], [])
    same_as_eager(function, foregrad.compile(function, backend="eager", partition=policy))
    same_as_eager(function, torch.compile(function, backend="foregrad", options={"backend": "eager"}))


def test_a_region_that_takes_a_gradient_itself_has_policies():
    assert saved(selected(lambda x, w: energy(x * 1.0, w), [aten.tanh.default]), "default") == ["tanh"]


def test_outside_a_capture_nothing_has_changed():
    function = selected(body, [aten.mm.default])
    foregrad.capture(function, *leaves())
    assert "__torch_dispatch__" in vars(torch.utils.checkpoint._CachingTorchDispatchMode)
    same_as_eager(function, lambda x, w: body(x, w).sum())
