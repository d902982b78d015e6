"""What AOTAutograd's doors give to partitioners and compilers: as PyTorch's give it, program by program."""

from __future__ import annotations

import inspect
import operator

import functorch.compile as theirs
import pytest
import torch
import torch._dynamo.backends.common as their_common
import torch._functorch.aot_autograd as their_entry_points
from torch import nn
from torch._dynamo.backends.common import aot_autograd as their_aot_autograd
from torch._guards import TracingContext

import foregrad
from tests.covering import each

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

aten = torch.ops.aten
says_all = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="older graphs of PyTorch's own say less"
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------ partitioners


def told_to_a_partition(aot_autograd):
    """The names and values that a partition gets under `torch.compile`."""
    told = []

    def partition(joint, inputs, **facts):
        told.append(facts)
        return foregrad.default_partition(joint, inputs, **facts)

    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    backend = aot_autograd(fw_compiler=theirs.nop, partition_fn=partition)
    torch.compile(module, backend=backend)(torch.ones(2, 3)).sum().backward()
    return told


def test_a_partition_is_told_which_inputs_live_on():
    torch._dynamo.reset()
    original = told_to_a_partition(their_aot_autograd)
    torch._dynamo.reset()
    assert told_to_a_partition(foregrad.aot_autograd) == original
    assert original[0]["static_lifetime_input_indices"]


def test_a_partition_without_that_parameter_is_called_without_it():
    called = []

    def partition(joint, inputs, *, num_fwd_outputs):
        called.append(num_fwd_outputs)
        return foregrad.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    foregrad.aot_module(nn.Linear(3, 4), foregrad.nop, partition_fn=partition)(torch.ones(2, 3))
    assert called == [1]


# ------------------------------------------------------------------------------------------ writes in the graph


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen += x.sum(0)
        return self.norm(x) + self.seen


class Swapping(nn.Module):
    """Two buffers that swap values: whoever copies one by one loses one of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("last", torch.ones(4))

    def forward(self, x):
        first = self.first.clone()
        self.first.copy_(self.last)
        self.last.copy_(first)
        return x + self.first, first


class Keeping(nn.Module):
    """The old value is a result, and a view of it the new value of another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.arange(4.0))
        self.register_buffer("before", torch.zeros(4))

    def forward(self, x):
        self.before.copy_(self.state.flip(0))
        old = self.state.detach().clone()
        self.state.add_(x[0])
        return old, self.state.view(2, 2), x * self.before


def kept_inside(api, module, calls=2):
    """(the numbers of `copy_` and of results in the graph, results and buffers of the calls)."""
    seen, found = [], []

    def compiler(gm, inputs):
        nodes = list(gm.graph.nodes)
        seen.append((sum(n.target is aten.copy_.default for n in nodes), len(nodes[-1].args[0])))
        return gm

    run = api.aot_module(module, fw_compiler=compiler, keep_inference_input_mutations=True) if api else module
    with torch.no_grad():
        for call in range(calls):
            out = run(torch.full((3, 4), call + 1.0))
            found += [t.clone() for t in (out if isinstance(out, tuple) else (out,))]
    return seen, [*found, *(b.clone() for b in module.buffers()), *(torch.tensor(b._version) for b in module.buffers())]


def test_an_update_that_the_graph_writes_is_no_output_of_it():
    ours, original = (kept_inside(api, nn.BatchNorm1d(4))[0] for api in (foregrad, theirs))
    assert ours == original == [(3, 1)]


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), Counting, Swapping, Keeping])
def test_a_graph_that_writes_its_updates_does_what_eager_does(make):
    """Values, buffers, and the counters of their versions."""
    torch.testing.assert_close(kept_inside(foregrad, make())[1], kept_inside(None, make())[1])


# ------------------------------------------------------------------------------------------ signatures

SHARED = [
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "compiled_function",
    "compiled_module",
    "debug_compile",
    "default_partition",
    "draw_graph",
    "draw_graph_compile",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "memory_efficient_fusion",
    "min_cut_rematerialization_partition",
    "minifier",
    "nop",
    "print_compile",
    "pythonkey_decompose",
    "ts_compile",
]
OF_EXPORT = ["aot_export_module", "aot_export_joint_simple"]
OF_DYNAMO = ["aot_autograd", "AotAutograd", "device_from_inputs", "dtype_from_inputs", "fake_tensor_unsupported"]


def parameters(function):
    """Names, kinds and defaults, in order; functions and our own stand-ins for them are compared by name."""
    found = []
    for one in inspect.signature(function).parameters.values():
        default = getattr(one.default, "__name__", one.default)
        found.append((one.name, one.kind, None if default is inspect.Parameter.empty else default))
    return found


@pytest.mark.parametrize("name", [*SHARED, *OF_EXPORT, *OF_DYNAMO])
def test_parameters_are_those_of_the_installed_pytorch(name):
    """In its order, with its defaults; more may follow by name alone."""
    home = theirs if name in SHARED else their_entry_points if name in OF_EXPORT else their_common
    ours, original = parameters(getattr(foregrad, name)), parameters(getattr(home, name))
    positional = [one for one in original if one[1] is not inspect.Parameter.KEYWORD_ONLY]
    if name == "minifier":  # whose default writes a program that imports PyTorch's
        ours = [(n, kind, "dump_state" if n == "dump_state" else default) for n, kind, default in ours]
    assert ours[: len(positional)] == positional
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours[len(positional) :])
    assert set(original) <= set(ours)


class Pair(nn.Module):
    def forward(self, x):
        return (x * 2,)


def test_an_unknown_argument_is_an_error_and_retired_ones_are_taken_by_name():
    x = torch.ones(2)
    retired = {"hasher_type": None, "static_argnums": None, "cudagraphs": None, "boxed_forward_device_index": None}
    assert foregrad.aot_module_simplified(Pair(), (x,), foregrad.nop, **retired)(x)[0].tolist() == [2, 2]
    with pytest.raises(TypeError):
        foregrad.aot_module_simplified(Pair(), (x,), foregrad.nop, nothing_like_it=1)
    with pytest.raises(TypeError):
        foregrad.aot_function(torch.sin, foregrad.nop, nothing_like_it=1)
    with pytest.raises(foregrad.errors.UnsupportedError, match="disable_functionalization"):
        foregrad.aot_function(torch.sin, foregrad.nop, disable_functionalization=True)


@pytest.mark.parametrize("door", ["simplified", "torch.compile"])
def test_passes_ahead_of_the_capture_are_made(door):
    def twice(gm, inputs):
        for node in gm.graph.nodes:
            if node.target in (operator.mul, "mul"):
                node.args = (node.args[0], 5)
        gm.recompile()
        return gm

    x = torch.ones(2)
    if door == "simplified":
        run = foregrad.aot_module_simplified(
            torch.fx.symbolic_trace(Pair()), (x,), foregrad.nop, pre_grad_passes=twice, compile_region_name="pair"
        )
    else:
        run = torch.compile(Pair(), backend=foregrad.aot_autograd(fw_compiler=foregrad.nop, pre_grad_passes=twice))
    assert run(x)[0].tolist() == [5, 5]


def test_opcheck_passes_its_arguments(monkeypatch):
    """`torch.library.opcheck` calls `aot_function` by names."""
    from torch.testing._internal.optests import aot_autograd as optests

    monkeypatch.setattr(optests, "aot_function", foregrad.aot_function, raising=False)
    monkeypatch.setattr("torch._functorch.aot_autograd.aot_function", foregrad.aot_function)
    optests.aot_autograd_check(torch.sin, (torch.ones(3, requires_grad=True),), {}, dynamic=False)


# ------------------------------------------------------------------------------------------ compilers that show a graph


def test_compilers_that_show_a_graph_compile_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = torch.ones(3)
    for compiler in (foregrad.print_compile, foregrad.debug_compile):
        assert torch.equal(foregrad.aot_function(lambda x: x.sin() * 2, compiler)(x), x.sin() * 2)
    printed = capsys.readouterr().out
    assert printed.count("aten.sin") == 1
    assert "from foo import FxModule" in printed
    assert (tmp_path / "foo" / "module.py").exists()


def test_a_graph_is_drawn_as_pytorch_draws_it(tmp_path):
    pytest.importorskip("pydot")
    x = torch.ones(3)
    foregrad.aot_function(lambda x: x.sin() * 2, foregrad.draw_graph_compile(str(tmp_path / "ours.dot")))(x)
    theirs.aot_function(lambda x: x.sin() * 2, theirs.draw_graph_compile(str(tmp_path / "theirs.dot")))(x)
    ours, original = ((tmp_path / f"{name}.dot").read_text() for name in ("ours", "theirs"))
    assert ours.count("aten.sin") == original.count("aten.sin") > 0


def test_the_minifier_finds_the_operator_that_fails(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    joint = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin().cos().tanh().exp())(torch.ones(2))

    def has_cos(gm, inputs):
        return any(node.target is aten.cos.default for node in gm.graph.nodes)

    small, _ = foregrad.minifier(joint, [torch.ones(2)], has_cos, lambda gm, inputs: None)
    assert [n.target for n in small.graph.find_nodes(op="call_function", target=aten.cos.default)]
    assert len([n for n in small.graph.nodes if n.op == "call_function"]) == 1


def test_pythonkey_decompose_gives_the_table():
    with foregrad.pythonkey_decompose(None) as table:
        assert table == {}
    with foregrad.pythonkey_decompose({aten.sin.default: torch.cos}) as table:
        assert list(table) == [aten.sin.default]


# ------------------------------------------------------------------------------------------ the shape of a graph


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x).sin(),)


def shapes(door, aot_autograd, grad):
    """Of each graph: the names of inputs, the class of its output node's argument, and of what a call returns."""
    found = []

    def compiler(gm, inputs):
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        assert names == [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
        found.append((names, type(gm.graph.output_node().args[0])))

        def run(*args):
            out = gm(*args)
            found.append(type(out))
            return out

        return run

    torch.manual_seed(0)
    module, x = Layer(), torch.ones(2, 4)
    with torch.set_grad_enabled(grad):
        if door == "torch.compile":
            call = torch.compile(module, backend=aot_autograd(fw_compiler=compiler))
        else:
            api = foregrad if aot_autograd is foregrad.aot_autograd else theirs
            call = api.aot_module(module, fw_compiler=compiler)
        out = call(x)[0]
        if grad:
            out.sum().backward()
    return found


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("door", ["torch.compile", "aot_module"])
def test_graphs_have_the_names_and_the_calling_convention_of_pytorchs(door, grad):
    ours = shapes(door, foregrad.aot_autograd, grad)
    torch._dynamo.reset()
    assert ours == shapes(door, their_aot_autograd, grad)


# ------------------------------------------------------------------------------------------ metadata of nodes


class Annotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = x
        for stage in range(2):
            with torch.fx.traceback.annotate({"stage": stage}), torch.fx.traceback.annotate({"kind": "first"}):
                h = self.first(h).sin()
        return (self.last(h).exp() * h).sum()


def graphs_of(api, module, x, partition=None):
    """The joint graph, the forward and the backward, by name."""
    found = {}

    def keep(name):
        def compiler(gm, inputs):
            found[name] = gm
            return gm

        return compiler

    def splitting(joint, inputs, **facts):
        found["joint"] = joint
        return (partition or api.min_cut_rematerialization_partition)(joint, inputs, **facts)

    with torch.fx.traceback.preserve_node_meta():
        run = api.aot_module(module, fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=splitting)
        run(x).backward()
    return found


def says(gm, *keys):
    """For each operator and place, in each half: what its nodes say under these keys."""
    found = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name.startswith(("primals", "tangents")):
            kind = node.name
        elif node.op == "call_function" and node.target is not aten.detach.default:
            kind = str(node.target), tuple(getattr(node.meta.get("val"), "shape", ()))
        else:
            continue
        if node.meta.get("is_gradient_acc"):
            assert "custom" not in node.meta
            continue
        found.setdefault(kind, set()).add(str([node.meta.get(key) for key in keys]))
    return found


@says_all
def test_annotations_and_halves_are_in_the_joint_graph_without_dynamo():
    ours, original = (graphs_of(api, Annotated(), torch.ones(2, 4))["joint"] for api in (foregrad, theirs))
    mine, yours = (says(gm, "custom", "partitioner_tag", "autograd_backward") for gm in (ours, original))
    assert {"primals_1", "tangents_1"} <= mine.keys()
    for kind in mine.keys() & yours.keys():
        if kind not in ((str(aten.mm.default), (4, 4)), (str(aten.t.default), (4, 4))):
            assert mine[kind] <= yours[kind] or kind[0] == str(aten.add.Tensor), kind
    assert any("'stage': 1, 'kind': 'first'" in text for text in mine[(str(aten.sin.default), (2, 4))])
    assert any("'stage': 1, 'kind': 'first'" in text for text in mine[(str(aten.cos.default), (2, 4))])


@says_all
def test_all_that_a_backward_computes_is_marked_as_of_the_backward():
    """What is computed again too, which keeps the forward's tag."""
    for api in (foregrad, theirs):
        backward = graphs_of(api, Annotated(), torch.ones(2, 4))["backward"]
        calls = [node for node in backward.graph.nodes if node.op == "call_function"]
        assert all(node.meta["autograd_backward"] for node in calls)
    again = graphs_of(foregrad, Annotated(), torch.ones(2, 4))["backward"]
    assert {node.meta["partitioner_tag"] for node in again.graph.nodes if node.op == "call_function"} >= {"is_forward"}


def test_sequence_numbers_pair_the_operators_of_the_halves():
    for api in (foregrad, theirs):
        joint = graphs_of(api, Annotated(), torch.ones(2, 4))["joint"]
        assert all("seq_nr" in node.meta for node in joint.graph.nodes if node.op == "call_function")
        number = {n.meta["seq_nr"]: n for n in joint.graph.find_nodes(op="call_function", target=aten.sin.default)}
        for node in joint.graph.find_nodes(op="call_function", target=aten.cos.default):
            assert number[node.meta["seq_nr"]].args == node.args


@pytest.mark.parametrize("backend", ["compile", "aot_function"])
def test_annotations_of_one_line_in_a_loop_differ(backend):
    seen = []

    def f(x):
        for stage in range(3):
            with torch.fx.traceback.annotate({"stage": stage}):
                x = x.sin()
        return x

    def compiler(gm, inputs):
        seen.append(
            [n.meta["custom"]["stage"] for n in gm.graph.find_nodes(op="call_function", target=aten.sin.default)]
        )
        return gm

    x = torch.ones(3)
    run = foregrad.compile(f, backend=compiler) if backend == "compile" else foregrad.aot_function(f, compiler)
    assert torch.equal(run(x), f(x))
    assert seen == [[0, 1, 2]]


# ------------------------------------------------------------------------------------------ what is known of the function


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x, y):
        y.add_(1)
        return self.norm(self.linear(x)), x * 2


def facts_of(aot_autograd, grad):
    """(the facts of the forward, as values; whether its results are as many as they say)."""
    found = {}

    def compiler(gm, inputs):
        facts = TracingContext.get().fw_metadata
        if "facts" not in found:
            named = [
                "mutated_inp_runtime_indices",
                "num_mutated_inp_runtime_indices",
                "num_outputs",
                "num_forward_returns",
            ]
            named += [
                "num_outputs_aliased",
                "num_outputs_non_aliased",
                "num_intermediate_bases",
                "tokens",
                "num_forward",
            ]
            named += ["keep_input_mutations", "is_rng_op_functionalized", "aliased_out_indices", "num_backward_tokens"]
            named += ["mutated_graph_handled_indices", "unsafe_view_out_indices"]
            found["facts"] = {name: getattr(facts, name) for name in named}
            found["facts"]["static"] = sorted(facts.static_input_indices)
            of_inputs = ["is_leaf", "mutates_data", "mutates_metadata", "requires_grad", "mutation_type"]
            of_inputs += ["keep_input_mutations", "mutation_inductor_storage_resize", "mutates_storage_metadata"]
            found["inputs"] = [[getattr(info, name) for name in of_inputs] for info in facts.input_info]
            of_outputs = ["output_type", "base_idx", "requires_grad", "requires_grad_for_backward"]
            found["outputs"] = [[getattr(info, name) for name in of_outputs] for info in facts.output_info]
            found["tangents"] = [tuple(t.shape) for t in facts.traced_tangents]
        return gm

    torch.manual_seed(0)
    run = torch.compile(Writing(), backend=aot_autograd(fw_compiler=compiler))
    with torch.set_grad_enabled(grad):
        run(torch.ones(2, 4), torch.ones(3))
    return found


@says_all
@pytest.mark.parametrize("grad", [True, False])
def test_what_a_compiler_asks_of_the_function_is_what_pytorch_says(grad):
    ours = facts_of(foregrad.aot_autograd, grad)
    torch._dynamo.reset()
    assert ours == facts_of(their_aot_autograd, grad)


def test_parameters_become_constants_by_inductors_own_function():
    """`replace_params_with_constants`, as OpenVINO calls it: what is written stays an argument."""
    from torch._inductor.freezing import replace_params_with_constants

    kept = []

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return (self.norm(self.linear(x)),)

    module = Frozen()
    state = [*module.parameters(), *module.buffers()]

    def compiler(gm, inputs):
        facts = TracingContext.get().fw_metadata
        indices = replace_params_with_constants(gm, [t.detach() for t in state], facts)
        kept.append(indices)
        return theirs.make_boxed_func(lambda *args: gm(*[args[i] for i in indices]))

    x = torch.randn(3, 4)
    with torch.no_grad():
        before = [b.clone() for b in module.buffers()]
        run = foregrad.aot_module_simplified(module, (x,), compiler)
        out = run(x)[0]
        after = [b.clone() for b in module.buffers()]
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
        torch.testing.assert_close(out, module(x)[0])
        torch.testing.assert_close(after, [b.clone() for b in module.buffers()])
    assert kept == [[4, 5, 6, 7]]  # the buffers that batch norm writes, and the argument


@says_all
def test_what_the_graph_writes_is_told_to_its_compiler():
    found = []

    def compiler(gm, inputs):
        facts = TracingContext.get().fw_metadata
        found.append(
            (facts.mutated_inp_runtime_indices, facts.mutated_graph_handled_indices, facts.num_forward_returns)
        )
        assert len(gm.graph.output_node().args[0]) == facts.num_forward_returns
        return gm

    for aot_autograd in (foregrad.aot_autograd, their_aot_autograd):
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
        with torch.no_grad():
            torch.compile(nn.BatchNorm1d(4), backend=backend)(torch.ones(3, 4))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------ mixed dtypes


def low(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def full(*shape):
    return torch.randn(*shape, requires_grad=True)


MIXED = {
    "layer norm": lambda x, w, b: nn.functional.layer_norm(x, (8,), w, b),
    "layer norm without bias": lambda x, w, b: nn.functional.layer_norm(x, (8,), w),
    "group norm": lambda x, w, b: nn.functional.group_norm(x, 2, w, b),
    "batch norm": lambda x, w, b: nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8), w, b, True),
    "batch norm, evaluated": lambda x, w, b: nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8), w, b),
    "root mean square norm": lambda x, w, b: nn.functional.rms_norm(x, (8,), w),
    "softmax of another dtype": lambda x, w, b: nn.functional.softmax(x, -1, dtype=torch.float32) * w,
    "sum of another dtype": lambda x, w, b: x.sum(0, dtype=torch.float64) * w,
    "concatenation": lambda x, w, b: torch.cat([x.flatten(), w, b]),
    "huber loss": lambda x, w, b: nn.functional.huber_loss(x.detach(), w.detach().expand(4, 8)) + b,
    "huber loss of each": lambda x, w, b: nn.functional.huber_loss(
        x.detach(), w.detach().expand(4, 8), reduction="none"
    ),
    "soft margin loss": lambda x, w, b: nn.functional.soft_margin_loss(x.detach(), w.detach().expand(4, 8)) + b,
}


@pytest.mark.parametrize("door", ["aot_function", "compile", "torch.compile"])
@pytest.mark.parametrize("name", MIXED)
def test_operators_of_mixed_dtypes_pass_through_a_foreign_compiler(name, door):
    """A compiler that runs the graph as it is returns what the graph says, and the call is eager's."""
    f = MIXED[name]

    def compiler(gm, inputs):
        return gm.forward

    run = {
        "aot_function": lambda: foregrad.aot_function(f, foregrad.nop),
        "compile": lambda: foregrad.compile(f, backend=compiler, on_unsupported="raise"),
        "torch.compile": lambda: torch.compile(f, backend=foregrad.aot_autograd(fw_compiler=compiler)),
    }[door]()
    found = []
    for call in (f, run):
        torch.manual_seed(0)
        inputs = low(4, 8), full(8), full(8)
        out = call(*inputs)
        if out.requires_grad:
            out.float().sum().backward()
        found.append((out.detach(), [value.grad for value in inputs]))
    torch.testing.assert_close(found[1], found[0], check_dtype=True, rtol=1.6e-2, atol=1e-3)


# ------------------------------------------------------------------------------------------ results elsewhere, inputs


def test_a_compiler_that_says_so_returns_results_on_another_device():
    def compiler(gm, inputs):
        return lambda *args: [value.to("meta") for value in gm(*args)]

    f = foregrad.aot_function(lambda x: (x.sin(),), compiler)
    with pytest.raises(foregrad.errors.BackendError, match="device"):
        f(torch.ones(3))
    compiler.any_device = True
    f = foregrad.aot_function(lambda x: (x.sin(),), compiler)
    assert f(torch.ones(3))[0].device.type == "meta"


def test_results_on_another_device_may_have_no_storage():
    """As those of a device that is somebody's own; here, of oneDNN's layout."""

    def compiler(gm, inputs):
        return lambda *args: [value.to_mkldnn() for value in gm(*args)]

    compiler.any_device = True
    f = foregrad.aot_function(lambda x: (x.sin(), x.cos()), compiler)
    for _ in range(2):
        assert [value.to_dense().tolist() for value in f(torch.zeros(3))] == [[0, 0, 0], [1, 1, 1]]


class WritesFirst(nn.Module):
    def forward(self, x, y):
        x.add_(1)
        return (y * 2,)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


class WithFunction(nn.Module):
    def forward(self, x):
        return (Doubling.apply(x).sin(),)


def test_inputs_of_a_simplified_module_may_share_memory_and_be_written():
    found = []
    for kind in ("ours", "eager"):
        memory = torch.zeros(6)
        x, y = memory[:4], memory[2:]
        run = foregrad.aot_module_simplified(WritesFirst(), (x, y), foregrad.nop) if kind == "ours" else WritesFirst()
        found.append([run(x, y)[0].tolist() for _ in range(2)] + [memory.tolist()])
        apart = torch.zeros(4), torch.zeros(4)
        found[-1] += [run(*apart)[0].tolist(), apart[0].tolist()]
    assert found[0] == found[1]


def test_a_simplified_module_may_have_custom_functions_and_be_a_lazy_graph():
    from torch.fx._lazy_graph_module import _LazyGraphModule

    found = []
    for kind in ("ours", "eager"):
        x = torch.ones(3, requires_grad=True)
        run = foregrad.aot_module_simplified(WithFunction(), (x,), foregrad.nop) if kind == "ours" else WithFunction()
        run(x)[0].sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    lazy = _LazyGraphModule.from_graphmodule(torch.fx.symbolic_trace(Pair()))
    assert foregrad.aot_module_simplified(lazy, (torch.ones(2),), foregrad.nop)(torch.ones(2))[0].tolist() == [2, 2]


def attentions(x):
    for _ in range(4):
        mixed = torch.softmax(x @ x.t(), -1) @ x
        x = nn.functional.layer_norm(x + torch.tanh(mixed), (16,))
    return x.sum()


def products(x):
    for _ in range(6):
        x = nn.functional.gelu(x @ x)
    return x.sum()


@pytest.mark.parametrize(("function", "door"), each([attentions, products], ["aot_function", "torch.compile"]))
def test_pytorchs_budget_of_activations_holds_at_the_min_cut_partition(function, door):
    """It is a part of the bytes that the partition saves otherwise: all at 1, none but inputs at 0."""
    from torch._functorch import config as their_config

    def saved(budget):
        halves = []

        def compiler(gm, inputs):
            halves.append(gm)
            return gm

        parts = {"fw_compiler": compiler, "partition_fn": foregrad.min_cut_rematerialization_partition}
        torch._dynamo.reset()
        x = torch.linspace(-1, 1, 256).view(16, 16).requires_grad_()
        with their_config.patch(activation_memory_budget=budget):
            run = foregrad.aot_function(function, **parts)
            if door == "torch.compile":
                run = torch.compile(function, backend=foregrad.aot_autograd(**parts))
            run(x).backward()
        torch.testing.assert_close(x.grad, *torch.autograd.grad(function(x), x))
        results = {node.meta["val"] for node in halves[0].graph.output_node().args[0][1:] if node.op != "placeholder"}
        return sum(value.untyped_storage().nbytes() for value in results)

    whole = saved(1)
    found = {budget: saved(budget) for budget in (0.75, 0.5, 0.25)}
    assert all(0.5 * budget * whole <= bytes <= budget * whole for budget, bytes in found.items()), (whole, found)
    assert saved(0) == 0
