"""Our partitioners on joint graphs that PyTorch captures, next to PyTorch's own, and in their place."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.partition import MODELS, PARTITIONERS, capture, joint_graph, saved_bytes, saved_values
from foregrad.partitioners import default_partition, min_cut_rematerialization_partition
from foregrad.partitioners.classify import Kind, classify
from tests.covering import ALL, each
from tests.unit.test_partition_support import assert_valid, once, ops, saved_names

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

OURS = [default_partition, min_cut_rematerialization_partition]


def leaf(*shape, grad=True):
    return torch.randn(shape, requires_grad=grad)


def boxed(module, _):
    from functorch.compile import make_boxed_func

    return make_boxed_func(module.forward)


def aot(function, partition, **keywords):
    from functorch.compile import aot_function

    return aot_function(function, fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition, **keywords)


# ------------------------------------------------------------------------------------------------------------ programs


def perceptron(x, w, v):
    return F.gelu(x @ w) @ v


def dropouts(x, w):
    return F.dropout(F.relu(F.dropout(x, 0.3) @ w), 0.5)


def unused_noise(x):
    torch.rand(3)
    y = x * torch.rand(4)
    torch.randn(2)
    return (y * torch.rand_like(y)).sin()


def chunks(x, w):
    h = (x @ w).view(2, 2, 8).transpose(0, 1)
    a, b = h.chunk(2, -1)
    return (a * b.tanh()).reshape(4, 4) @ w[:4]


def attention(q, k, v):
    return F.scaled_dot_product_attention(q.sin(), k.cos(), v * 2, is_causal=True)


def dropped_attention(q, k, v):
    return F.scaled_dot_product_attention(q.sin(), k.cos(), v * 2, dropout_p=0.3)


def batch_norm(x, w, b, mean, var):
    return F.relu(F.batch_norm(x, mean, var, w, b, True))


def several_results(x):
    value, _ = x.max(-1)
    _, deviation = torch.var_mean(x, -1)
    return (value * deviation).sin(), deviation.exp() * value, x.sort(-1)[0].exp() * x.cumsum(-1)


def constants(x):
    return (x * torch.tensor([1.0, 2, 3, 4])).sin() * torch.ones(4).cumsum(0)


def sizes(x, w, z):
    h = torch.relu(x @ w)
    y = (h.view(h.shape[0] * h.shape[1]) * 2).sum()
    q = z.exp().expand(h.shape[0], z.shape[0]).sum()
    return y * q + (z.sum() * h.shape[1]), x.new_ones(x.shape[0] * 3).sum()


def counted(x, count, w):
    y = torch.exp(count) * w * x
    count.mul_(2)
    return y.sin()


PROGRAMS = {
    perceptron: lambda: [leaf(4, 8), leaf(8, 16), leaf(16, 3)],
    dropouts: lambda: [leaf(4, 8), leaf(8, 16)],
    unused_noise: lambda: [leaf(4)],
    chunks: lambda: [leaf(4, 8), leaf(8, 8)],
    attention: lambda: [leaf(1, 2, 8, 4), leaf(1, 2, 8, 4), leaf(1, 2, 8, 4)],
    dropped_attention: lambda: [leaf(1, 2, 8, 4), leaf(1, 2, 8, 4), leaf(1, 2, 8, 4)],
    batch_norm: lambda: [leaf(4, 3, 5, 5), leaf(3), leaf(3), torch.zeros(3), torch.ones(3)],
    several_results: lambda: [leaf(4, 5)],
    constants: lambda: [leaf(4)],
    sizes: lambda: [leaf(6, 9), leaf(9, 11), leaf(7)],
    counted: lambda: [leaf(4), leaf(4, grad=False), leaf(4)],
}


def run(function, arguments):
    """Outputs, gradients, and the arguments afterwards."""
    arguments = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    torch.manual_seed(5)
    outputs = function(*arguments)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    state = torch.get_rng_state()
    differentiable = [o for o in outputs if o.requires_grad]
    torch.manual_seed(9)
    tangents = [torch.randn_like(o) for o in differentiable]
    wanted = [a for a in arguments if a.requires_grad]
    gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
    return [*outputs, *gradients, *(a.detach() for a in arguments), state]


@pytest.mark.parametrize(("program", "partition", "dynamic"), each(PROGRAMS, OURS, [False, True], times=2))
def test_under_pytorchs_aot_function_results_are_eagers(program, partition, dynamic):
    arguments = PROGRAMS[program]()
    wanted = run(program, arguments)
    for keep in (False, True):
        got = run(aot(program, partition, dynamic=dynamic, keep_inference_input_mutations=keep), arguments)
        for want, have in zip(wanted, got, strict=True):
            torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("partition", OURS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_halves_do_what_the_joint_graph_does(program, partition):
    joint, keywords = capture(program, *PROGRAMS[program]())
    count = keywords["num_fwd_outputs"]
    forward, backward = partition(joint, (), **keywords)
    assert_valid(joint, forward, backward, count)
    assert not once(backward)


# --------------------------------------------------------------------------------------------------------------- bytes


@functools.cache
def joint_of(model, layers):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return joint_graph(f"{model}-{layers}")


@pytest.mark.parametrize("which", PARTITIONERS)
@pytest.mark.parametrize("model", MODELS)
def test_models_run_the_same_and_save_no_more_than_with_pytorch(model, which):
    joint, keywords = joint_of(model, 2)
    ours, torchs = PARTITIONERS[which]
    count = keywords["num_fwd_outputs"]
    forward, backward = ours(joint, (), **keywords)
    other, _ = torchs(copy.deepcopy(joint), (), **keywords)
    assert 0 < saved_bytes(forward, count) <= saved_bytes(other, count)
    assert len(saved_values(forward, count)) <= len(saved_values(other, count))
    assert_valid(joint, forward, backward, count)


OPERATORS = "add sub mul sin exp tanh relu gelu sigmoid mm mm sum t view slice cast softmax cat drop norm".split()


def random_program(rng, length):
    steps = [(rng.choice(OPERATORS), rng.random(), rng.random()) for _ in range(length)]
    table = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "sin": lambda a, b: a.sin(),
        "exp": lambda a, b: (a * 0.1).exp(),
        "tanh": lambda a, b: a.tanh(),
        "relu": lambda a, b: a.relu(),
        "gelu": lambda a, b: F.gelu(a),
        "sigmoid": lambda a, b: a.sigmoid(),
        "mm": lambda a, b: a @ b * 0.1,
        "sum": lambda a, b: a.sum(-1, keepdim=True) + b,
        "t": lambda a, b: a.t(),
        "view": lambda a, b: a.reshape(4, 16).sin().reshape(8, 8),
        "slice": lambda a, b: torch.cat([a[:4], b[4:]]),
        "cast": lambda a, b: a.double().sin().float(),
        "softmax": lambda a, b: a.softmax(-1),
        "cat": lambda a, b: torch.cat([a, b], 1)[:, :8],
        "drop": lambda a, b: F.dropout(a, 0.5),
        "norm": lambda a, b: F.layer_norm(a, (8,)),
    }

    def program(*values):
        values = list(values)
        for name, u, v in steps:
            # Recent values are read more often than old ones.
            a, b = (values[len(values) - 1 - int(p * p * len(values))] for p in (u, v))
            values.append(table[name](a, b))
        return sum(value.sum() for value in values[-3:])

    return program


@pytest.mark.parametrize("seed", range(12 if ALL else 6))
def test_random_programs(seed):
    """The halves do what the joint graph does, save no more than PyTorch's min-cut, and honour random tags."""
    rng = random.Random(seed)
    joint, keywords = capture(random_program(rng, rng.randint(5, 50)), leaf(8, 8), leaf(8, 8))
    count = keywords["num_fwd_outputs"]
    for ours in OURS:
        forward, backward = ours(joint, (), **keywords)
        assert_valid(joint, forward, backward, count)
    _, theirs = PARTITIONERS["min-cut"]
    assert saved_bytes(forward, count) <= saved_bytes(theirs(copy.deepcopy(joint), (), **keywords)[0], count)
    tag_at_random(joint, rng)
    for ours in OURS:
        forward, backward = ours(joint, (), **keywords)
        assert_valid(joint, forward, backward, count)
        against = [n.name for n in saved_values(forward, count) if has_to_run_again(n)]
        assert not against, f"tagged to be computed again, and saved: {against}"


def tag_at_random(joint, rng):
    policies = [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE, None]
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward":
            node.meta |= {"recompute": rng.choice(policies), "ac_graph_id": 1}


def has_to_run_again(node):
    """Whether a value is tagged so, and the wish can be granted: an item goes with its operator, a view with its base."""
    if node.meta["recompute"] is not CheckpointPolicy.MUST_RECOMPUTE:
        return False
    kind = classify(node).kind
    if kind is Kind.ITEM:
        kind = classify(node.args[0]).kind
        if node.args[0].meta["recompute"] is not CheckpointPolicy.MUST_RECOMPUTE:
            return False
    return kind not in {Kind.RANDOM, Kind.VIEW}


# ---------------------------------------------------------------------------------------------------------------- tags


def block(x, w):
    return torch.relu(x @ w).sin() @ w


def noisy_block(x, w):
    return F.dropout(torch.relu(x @ w), 0.5).sin() @ w


def keep_products(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def in_two_regions(inner, context=None):
    more = {} if context is None else {"context_fn": context}

    def program(x, w, v):
        x = checkpoint(inner, x, w, use_reentrant=False, **more)
        return checkpoint(inner, x, v, use_reentrant=False, **more).tanh()

    return program


CHECKPOINTED = {
    "all": (in_two_regions(block), ["primals_1", "primals_2", "primals_3", "mm_1", "tanh"]),
    "products": (
        in_two_regions(block, functools.partial(create_selective_checkpoint_contexts, keep_products)),
        ["primals_1", "primals_2", "primals_3", "mm", "mm_1", "mm_2", "tanh"],
    ),
    "dropout": (
        in_two_regions(noisy_block),
        ["primals_1", "primals_2", "primals_3", "getitem", "getitem_1", "mm_1", "getitem_2", "getitem_3", "tanh"],
    ),
}


@pytest.mark.parametrize("partition", OURS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_regions_that_dynamo_captured(name, partition):
    from torch._dynamo.backends.common import aot_autograd

    program, expected = CHECKPOINTED[name]
    halves = []

    def spy(joint, inputs, **keywords):
        halves.append((*partition(joint, inputs, **keywords), keywords["num_fwd_outputs"]))
        return halves[-1][:2]

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=spy)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    arguments = [leaf(4, 8), leaf(8, 8), leaf(8, 8)]
    for want, have in zip(run(program, arguments), run(compiled, arguments), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0)
    forward, backward, count = halves[0]
    assert saved_names(forward, count) == expected
    again = {n for n in ops(forward) if n in set(ops(backward))}
    assert {"relu", "relu_1"} <= again
    assert ("mm" in again) == (name != "products")
    assert not once(backward)
