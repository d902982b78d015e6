"""Compilers written for PyTorch's AOTAutograd run unchanged, and find in a graph what they find in PyTorch's own."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle

import functorch.compile as theirs
import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd as their_aot_autograd
from torch._functorch import aot_autograd as their_engine
from torch._functorch import partitioners as their_partitioners
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.compile_fx import compile_fx_inner, get_static_input_idxs
from torch._inductor.decomposition import select_decomp_table
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import ShapeProp

import foregrad
from tests.covering import each

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------ programs


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(hidden).tanh() * x


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, stride=2), nn.Flatten())

    def forward(self, x):
        return self.net(x.reshape(3, 2, 4, 4)).softmax(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 8)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return self.linear(x) * self.seen, self.seen.clone()


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, x):
        return self.table(x.abs().long() % 7).cumsum(1).sum() * x.float().mean()


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        y = x @ self.weight
        return y.t(), y[1:], x.view(-1), torch.cat([y, y.sin()], 1).t()


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = torch.utils.checkpoint.checkpoint(lambda v: self.linear(v).sin().exp(), x, use_reentrant=False)
        return h.sum(), (h * x).std()


PROGRAMS = {
    "block": (Block, (6, 4)),
    "convolutions": (Convolutions, (3, 32)),
    "attention": (Attention, (2, 5, 8)),
    "counting": (Counting, (3, 4)),
    "embedding": (Embedding, (2, 6)),
    "views": (Views, (4, 4)),
    "checked": (Checked, (5, 4)),
}


# ------------------------------------------------------------------------------------------ compilers


def inner(gm, inputs):
    return compile_fx_inner(gm, inputs, static_input_idxs=get_static_input_idxs(0))


def inner_backward(gm, inputs):
    return compile_fx_inner(gm, inputs, is_backward=True)


def forward_method(gm, inputs):
    return gm.forward


def interpreter(gm, inputs):
    return lambda *args: fx.Interpreter(gm).run(*args)


def boxed_interpreter(gm, inputs):
    run = fx.Interpreter(gm)
    return theirs.make_boxed_func(lambda *args: run.run(*args))


def propagating(gm, inputs):
    """A compiler that works out all values itself, in the fake mode that it finds."""
    mode = detect_fake_mode(inputs)
    assert mode is TracingContext.get().fake_mode
    FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*inputs)
    ShapeProp(gm, fake_mode=mode).propagate(*inputs)
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
            assert tuple(node.meta["tensor_meta"].shape) == tuple(node.meta["val"].shape)
    return gm.forward


def rewriting(gm, inputs):
    """A compiler that changes the graph that it is given."""
    aten = torch.ops.aten
    for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
        with gm.graph.inserting_before(node):
            twice = gm.graph.call_function(aten.mul.Tensor, (node.args[0], 2.0))
            twice.meta = copy.copy(node.meta)
            sigmoid = gm.graph.call_function(aten.sigmoid.default, (twice,))
            scaled = gm.graph.call_function(aten.mul.Tensor, (sigmoid, 2.0))
            node.replace_all_uses_with(gm.graph.call_function(aten.sub.Tensor, (scaled, 1.0)))
        gm.graph.erase_node(node)
    for node in gm.graph.nodes:
        node.meta.pop("stack_trace", None)
        node.meta["mine"] = node.name
    gm.graph.lint()
    gm.recompile()
    return gm


def copying(gm, inputs):
    """A compiler that copies metadata in every way there is."""
    for node in gm.graph.nodes:
        for copied in (dict(node.meta), {**node.meta}, node.meta.copy(), copy.copy(node.meta), {} | node.meta):
            assert list(copied) == list(node.meta.keys())
            assert node.op in ("output", "get_attr") or "val" in copied
            assert not isinstance(node.target, torch._ops.OpOverload) or "original_aten" in copied
    return copy.deepcopy(gm).forward


def from_scratch(gm, inputs):
    """A compiler that builds a graph of its own, by name."""
    graph, made = fx.Graph(), {}
    for node in gm.graph.nodes:
        made[node.name] = graph.node_copy(node, lambda n: made[n.name])
        if node.op == "placeholder":
            assert node.name.startswith(("primals", "tangents")) or node.meta["val"] is not None
    return fx.GraphModule(gm, graph)


COMPILERS = {
    "inner": (inner, inner_backward),
    "theirs, ts": (theirs.ts_compile, theirs.ts_compile),
    "theirs, nop": (theirs.nop, theirs.nop),
    "forward": (forward_method, forward_method),
    "interpreter": (interpreter, interpreter),
    "boxed": (boxed_interpreter, boxed_interpreter),
    "propagating": (propagating, propagating),
    "rewriting": (rewriting, rewriting),
    "copying": (copying, copying),
    "from scratch": (from_scratch, from_scratch),
}
PARTITIONS = {
    "ours": foregrad.min_cut_rematerialization_partition,
    "theirs": their_partitioners.min_cut_rematerialization_partition,
}
DOORS = {
    "module": lambda module, **parts: foregrad.aot_module(module, **parts),
    "torch.compile": lambda module, **parts: torch.compile(module, backend=foregrad.aot_autograd(**parts)),
    "any size": lambda module, **parts: torch.compile(module, backend=foregrad.aot_autograd(**parts), dynamic=True),
}


def tensors(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def observed(module, call, shape):
    """Outputs, layouts, gradients and buffers of two steps, and of a call without gradients."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        x = torch.randn(shape, requires_grad=True)
        outs = tensors(call(x))
        sum((out * (1.0 + i)).sum() for i, out in enumerate(outs) if out.requires_grad).backward()
        found += [*outs, x.grad, *(p.grad for p in module.parameters())]
        module.zero_grad()
    with torch.no_grad():
        found += tensors(call(torch.randn(shape)))
    return [None if t is None else t.detach().clone() for t in (*found, *module.buffers())], [
        None if t is None else t.stride() for t in found
    ]


# Each program through torch.compile, by Inductor and by two of those that look at all that is in a graph; by those that
# only run it, one of three programs: with buffers that are written, with counters, with views. What another door hands out
# is looked at by one that works out all its values; that Inductor takes it, by two.
_LOOK = ("inner", "forward", "propagating", "copying", "from scratch")
_WAYS = [
    *((program, compiler, "torch.compile") for program, compiler in each(PROGRAMS, _LOOK, times=2)),
    *((program, "inner", "torch.compile") for program in PROGRAMS),
    *((*row, "torch.compile") for row in each(("block", "counting", "views"), COMPILERS)),
    *((program, "propagating", door) for program, door in each(PROGRAMS, DOORS, times=2)),
    *(("attention", "inner", door) for door in ("module", "any size")),
    ("counting", "inner", "module"),
]


@pytest.mark.parametrize(("program", "compiler", "door"), dict.fromkeys(_WAYS))
def test_compilers_of_others_run_unchanged(program, compiler, door):
    make, shape = PROGRAMS[program]
    fw, bw = COMPILERS[compiler]
    if compiler == "theirs, ts" and program in ("attention", "counting"):
        pytest.skip("TorchScript does not take all of these operators")
    partition = PARTITIONS["theirs" if compiler in ("inner", "interpreter") else "ours"]
    table = select_decomp_table() if compiler == "inner" else None
    eager = make()
    compiled = copy.deepcopy(eager)
    call = DOORS[door](compiled, fw_compiler=fw, bw_compiler=bw, partition_fn=partition, decompositions=table)
    expected, strides = observed(eager, eager, shape)
    actual, actual_strides = observed(compiled, call, shape)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    if compiler != "theirs, ts":
        assert actual_strides == strides


def test_two_backwards_of_one_graph_do_not_see_what_a_compiler_did_to_the_first():
    """Each pattern of tangents is compiled from the graph as it was captured."""

    def ruining(gm, inputs):
        run = theirs.make_boxed_func(fx.GraphModule(gm, copy.deepcopy(gm.graph)).forward)
        for node in reversed(list(gm.graph.nodes)):
            gm.graph.erase_node(node)
        return run

    f = foregrad.aot_function(lambda x, y: (x.sin() * y, x * y.cos()), ruining)
    for pick in ((0, 1), (0,), (1,)):
        x, y = (torch.ones(3, requires_grad=True) for _ in "xy")
        sum(f(x, y)[i].sum() for i in pick).backward()
        a, b = (torch.ones(3, requires_grad=True) for _ in "ab")
        sum((a.sin() * b, a * b.cos())[i].sum() for i in pick).backward()
        assert torch.equal(x.grad, a.grad)


# ------------------------------------------------------------------------------------------ metadata


def halves(module, x, backend):
    found = {}

    def keep(phase):
        def compiler(gm, inputs):
            found[phase] = gm, TracingContext.try_get(), inputs
            return gm

        return compiler

    table = select_decomp_table()
    torch._dynamo.reset()
    call = torch.compile(
        module, backend=backend(fw_compiler=keep("forward"), bw_compiler=keep("backward"), decompositions=table)
    )
    sum(out.sum() for out in tensors(call(x)) if out.requires_grad).backward()
    return found


_ALWAYS = {"val", "original_aten", "partitioner_tag", "seq_nr"}
# What only PyTorch's own objects can say (`desc`), and what this test looks at more closely.
_NOT_COMPARED = {"desc", "from_node", "stack_trace", "is_gradient_acc", "unbacked_bindings"}


def described(gm):
    """For each operator with its shape and half: the keys that all its nodes have, and what they say that can be compared."""
    found = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
            continue
        if "is_gradient_acc" in node.meta:
            continue
        # Batch norm is one of several operators, by who captured it.
        says = {"original_aten": str(node.meta["original_aten"]).replace("_legit_functional", "").replace("._", ".")}
        for key in ("source_fn_stack", "fwd_source_fn_stack"):
            says[key] = str([entry[1] for entry in (node.meta.get(key) or ())[:1]])
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            says[key] = str(list((node.meta.get(key) or {}).values()))
        keys = {key for key in node.meta if node.meta[key] is not None} - _NOT_COMPARED
        kind = str(node.target), tuple(node.meta["val"].shape), node.meta["partitioner_tag"]
        found.setdefault(kind, []).append((keys, says))
    return found


# Not `checked`: what is inside of a checkpointed part is known as that part.
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "checked"])
def test_nodes_carry_what_those_of_pytorch_carry(program):
    make, shape = PROGRAMS[program]
    module, x = make(), torch.randn(shape, requires_grad=True)
    ours, original = halves(module, x, foregrad.aot_autograd), halves(module, x, their_aot_autograd)
    compared = 0
    for phase in ("forward", "backward"):
        mine, yours = described(ours[phase][0]), described(original[phase][0])
        for key in mine.keys() & yours.keys():
            for keys, says in mine[key]:
                assert keys >= _ALWAYS
                assert any(their_keys <= keys for their_keys, _ in yours[key]), (key, yours[key][0][0] - keys)
                assert says in [their_says for _, their_says in yours[key]], (key, says, yours[key])
                compared += 1
    assert compared >= 4


@pytest.mark.parametrize("program", PROGRAMS)
def test_placeholders_and_outputs_are_described_as_those_of_pytorch(program):
    make, shape = PROGRAMS[program]
    module, x = make(), torch.randn(shape, requires_grad=True)
    ours, original = halves(module, x, foregrad.aot_autograd), halves(module, x, their_aot_autograd)
    for phase in ("forward", "backward"):
        gm, context, inputs = ours[phase]
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            assert node.meta["val"] is value
            assert node.meta["partitioner_tag"] in ("is_forward", "is_backward")
            assert not isinstance(value, torch.Tensor) or node.meta["tensor_meta"].shape == value.shape
        assert context.fake_mode is next(v.fake_mode for v in inputs if isinstance(v, torch.Tensor))
        (output,) = gm.graph.find_nodes(op="output")
        assert len(output.meta["output_stack_traces"]) == len(output.args[0])
    names = [n.name for n in ours["forward"][0].graph.find_nodes(op="placeholder")]
    assert names == [n.name for n in original["forward"][0].graph.find_nodes(op="placeholder")]
    grads = [n.meta["tensor_meta"].requires_grad for n in ours["forward"][0].graph.find_nodes(op="placeholder")]
    assert sorted(grads) == sorted(
        n.meta["tensor_meta"].requires_grad for n in original["forward"][0].graph.find_nodes(op="placeholder")
    )
    metadata, known = ours["forward"][1].fw_metadata, original["forward"][1].fw_metadata
    assert sorted(metadata.static_input_indices) == sorted(known.static_input_indices)
    assert metadata.num_mutated_inp_runtime_indices == known.num_mutated_inp_runtime_indices
    assert ours["forward"][1].aot_graph_name[0].endswith("_forward")


def test_under_torch_compile_nodes_name_the_users_lines():
    ours = halves(Block(), torch.randn(6, 4, requires_grad=True), foregrad.aot_autograd)
    for phase in ("forward", "backward"):
        for node in ours[phase][0].graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            trace = node.meta["stack_trace"]
            assert os.path.dirname(foregrad.__file__) not in trace
            assert __file__ in trace
            assert node.stack_trace == trace
    joint = foregrad.capture(Block(), torch.randn(6, 4, requires_grad=True))
    (tanh,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    assert "self.last(hidden).tanh()" in copy.copy(tanh.meta)["stack_trace"]


def test_metadata_of_a_captured_graph_is_a_dict_in_every_way():
    joint = foregrad.capture(lambda x: x.sin().cos(), torch.ones(3, requires_grad=True))
    node = next(iter(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)))

    def fresh():
        return node.meta.copy()

    expected = {"val", "spec", "tensor_meta", "original_aten", "stack_trace", "partitioner_tag", "seq_nr"}
    assert set(fresh()) == set(dict(fresh())) == set({**fresh()}) == set(fresh().keys()) == expected
    assert len(fresh()) == len(fresh().items()) == len(fresh().values()) == len(expected)
    assert set(fresh() | {"a": 1}) == set({"a": 1} | fresh()) == expected | {"a"}
    assert isinstance(fresh().pop("val"), torch.Tensor)
    meta = fresh()
    del meta["stack_trace"]
    assert "stack_trace" not in meta
    assert meta.get("stack_trace") is None
    assert "stack_trace" in node.meta
    assert meta.pop("nothing", 5) == 5
    assert meta.setdefault("original_aten", None) is torch.ops.aten.sin.default
    with pytest.raises(KeyError):
        meta.pop("nothing")
    other = {}
    other.update(fresh())
    assert set(other) == expected
    assert "val" in pickle.loads(pickle.dumps({"meta": type(meta)({"val": 1})}))["meta"]


def test_decomposed_operators_name_the_one_they_come_from():
    table = {torch.ops.aten.addmm.default: lambda b, x, y: torch.mm(x, y) + b}
    seen = []

    def compiler(gm, inputs):
        seen.append(
            {
                str(n.target): str(n.meta["original_aten"])
                for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
            }
        )
        return gm

    foregrad.aot_function(nn.Linear(3, 2), compiler, decompositions=table)(torch.ones(4, 3))
    assert seen[0] == {"aten.mm.default": "aten.addmm.default"}


# ------------------------------------------------------------------------------------------ generators, strides


@pytest.mark.parametrize("compiler", COMPILERS)
def test_generators_are_read_from_the_module(compiler):
    generator = torch.Generator()

    def f(x):
        noise = torch.rand(3, generator=generator) + torch.bernoulli(torch.full((3,), 0.5), generator=generator)
        return (noise * x).tanh()

    if compiler in ("theirs, ts", "propagating", "copying"):
        pytest.skip("TorchScript has no generators, and copies have another")
    fw, bw = COMPILERS[compiler]
    compiled = foregrad.aot_function(f, fw, bw, decompositions=select_decomp_table() if compiler == "inner" else None)
    for seed in (0, 1):
        results = []
        for function in (f, compiled):
            x = torch.ones(3, requires_grad=True)
            generator.manual_seed(seed)
            out = function(x)
            out.sum().backward()
            results.append((out.detach(), x.grad, generator.get_state()))
        torch.testing.assert_close(results[0], results[1])


def test_strides_that_a_compiler_chose_are_those_that_the_backward_is_compiled_for():
    seen = []

    def forward(gm, inputs):
        count = len(gm.graph.find_nodes(op="output")[0].args[0])
        reported = TracingContext.get().output_strides
        reported += [None] * (count - 1) + [(1, 2)]
        return lambda *args: [*gm(*args)[:-1], gm(*args)[-1].t().contiguous().t()]

    def backward(gm, inputs):
        seen.extend(value.stride() for value in inputs)
        return gm

    x = torch.randn(2, 2, requires_grad=True)
    f = foregrad.aot_function(lambda x: x.exp().sum(), forward, backward)
    f(x).backward()
    assert (1, 2) in seen
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_an_attribute_of_that_name_that_says_no_strides_is_passed_over():
    def compiler(gm, inputs):
        def run(*args):
            return gm(*args)

        run.output_strides = [("s0", "1")]
        return run

    x = torch.randn(3, requires_grad=True)
    foregrad.aot_function(lambda x: x.sin(), compiler)(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("door", ["aot_module", "torch.compile", "descriptors"])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_saved_values_in_unreported_strides_are_taken_by_both(door, memory_format):
    def laid_out(value):
        return value.clone(memory_format=memory_format) if value.dim() == 4 else value

    def forward(gm, inputs):
        return lambda *args: [gm(*args)[0], *map(laid_out, gm(*args)[1:])]

    def compiled(engine, module, x):
        how = {"fw_compiler": forward, "bw_compiler": lambda gm, inputs: gm}
        if door == "torch.compile":
            torch._dynamo.reset()
            aot_autograd = foregrad.aot_autograd if engine is foregrad else their_aot_autograd
            return torch.compile(module, backend=aot_autograd(**how))
        if door == "aot_module":
            return engine.aot_module(module, **how)
        with contextlib.ExitStack() as stack:
            jd = engine.aot_export_joint_with_descriptors(stack, module, (x,))
            run = engine.aot_compile_joint_with_descriptors(jd, **how)
        return lambda x: run(*module.parameters(), x)

    module, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Sigmoid()), torch.randn(2, 4, 5, 2).permute(0, 3, 1, 2)
    gradients = []
    for run in (module, compiled(foregrad, module, x), compiled(their_engine, module, x)):
        run(x).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
        module.zero_grad()
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])
