"""`aot_export_joint_with_descriptors` and `aot_compile_joint_with_descriptors`."""

from __future__ import annotations

import contextlib
import copy
import operator

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import foregrad
from foregrad import descriptors
from foregrad.descriptors import ParamAOTInput, PlainAOTOutput
from tests.joints.programs import MODULES, Norm, Plain, Tied, Views, arguments_of, held_by, made, observed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def exported(module, args, kwargs=None, edit=lambda jd: jd, **how):
    """(the joint graph, the compiled function)."""
    compile_with = {name: how.pop(name) for name in ("fw_compiler", "bw_compiler", "partition_fn") if name in how}
    serializable = how.pop("serializable", False)
    with contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, args, kwargs, **how)
        jd = edit(jd) or jd
        run = foregrad.aot_compile_joint_with_descriptors(jd, serializable=serializable, **compile_with)
    return jd, run


def descs(jd):
    graph = jd.graph_module.graph
    output = next(iter(reversed(graph.nodes)))
    inputs = [node.meta["desc"].expr() for node in graph.find_nodes(op="placeholder")]
    return inputs, [None if desc is None else desc.expr() for desc in output.meta["desc"]]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("flat", [False, True], ids=["as the module", "one list"])
def test_the_compiled_function_is_the_module(name, flat):
    """Results, gradients, buffers and written arguments are eager's, bit for bit."""
    if flat and arguments_of(name)[1]:
        pytest.skip("keywords are given by name")
    module = made(name)
    _, run = exported(module, *arguments_of(name))

    def compiled(module, args, kwargs):
        leaves = [*held_by(module), *torch.utils._pytree.tree_leaves(args)]
        return run(leaves) if flat else run(*held_by(module), *args, **kwargs)

    found = observed(module, name, compiled)
    expected = observed(made(name), name, lambda module, args, kwargs: module(*args, **kwargs))
    assert_same(found, expected)


def test_inputs_and_outputs_say_what_they_are():
    module = Norm()
    jd, _ = exported(module, (torch.ones(3, 4),))
    inputs, outputs = descs(jd)
    assert inputs == [
        "self.get_parameter('unused')",
        "self.get_parameter('linear.weight')",
        "self.get_parameter('linear.bias')",
        "self.get_parameter('norm.weight')",
        "self.get_parameter('norm.bias')",
        "self.get_buffer('calls')",
        "self.get_buffer('norm.running_mean')",
        "self.get_buffer('norm.running_var')",
        "self.get_buffer('norm.num_batches_tracked')",
        "args[0]",
        "__output_tangent(output[0])",
    ]
    assert outputs[:5] == [
        "__input_mutation(self.get_buffer('calls'))",
        "__input_mutation(self.get_buffer('norm.running_mean'))",
        "__input_mutation(self.get_buffer('norm.running_var'))",
        "__input_mutation(self.get_buffer('norm.num_batches_tracked'))",
        "output[0]",
    ]
    assert outputs[5:7] == ["__grad(self.get_parameter('unused'))", "__grad(self.get_parameter('linear.weight'))"]
    assert outputs[-1] is None  # the argument requires no gradient
    assert jd.params_spec == [name for name, _ in module.named_parameters()]
    assert jd.buffers_spec == [name for name, _ in module.named_buffers()]


def test_a_tied_parameter_is_there_under_each_name_and_its_gradient_at_one():
    jd, _ = exported(Tied(), arguments_of("Tied")[0])
    assert jd.params_spec == ["embedding.weight", "head.weight"]
    pairs = descriptors.get_param_and_grad_nodes(jd.graph_module.graph)
    assert pairs[ParamAOTInput("embedding.weight")][1] is not None
    assert pairs[ParamAOTInput("head.weight")][1] is None


def test_views_of_inputs_are_outputs_of_the_graph_and_views_when_called():
    module, x = Views(), torch.randn(5, 4)
    jd, run = exported(module, (x,))
    outputs = descriptors.get_plain_output_and_tangent_nodes(jd.graph_module.graph)
    assert [outputs[PlainAOTOutput(i)][1] is not None for i in range(4)] == [True, False, False, False]
    assert outputs[PlainAOTOutput(2)][0].target is torch.ops.aten.view.default
    out, row, flat, same = run(*held_by(module), x)
    assert row._base is out
    assert flat._base is x
    assert same is x


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_parameters_may_be_fake_or_on_the_meta_device(kind):
    mode = torch._subclasses.FakeTensorMode()
    with mode if kind == "fake" else torch.device("meta"):
        module = Plain()
    x = torch.ones(5, 4, device="cpu" if kind == "fake" else "meta")
    jd, run = exported(module, (x,))
    if kind == "fake":
        assert jd.fake_mode is mode
        real = made("Plain")
        assert_same(run(*held_by(real), x), real(x))
    assert len(jd.params_spec) == 4


def test_fakes_alone_say_the_mode():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight * 2

    mode = torch._subclasses.FakeTensorMode()
    with mode:
        module = Alone()
    jd, run = exported(module, ())
    assert jd.fake_mode is mode
    assert_same(run(torch.ones(3)), torch.full((3,), 2.0))


def test_the_fake_mode_stays_on_the_stack():
    with contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, Plain(), (torch.ones(5, 4),))
        assert type(torch.empty(2)).__name__ == "FakeTensor"
        assert torch.empty(2).fake_mode is jd.fake_mode
    assert type(torch.empty(2)) is torch.Tensor


@pytest.mark.parametrize("inside", [False, True])
def test_without_gradients_the_graph_is_the_forward(inside):
    module, x = nn.BatchNorm1d(4), torch.randn(5, 4)
    expected = copy.deepcopy(module)
    with torch.no_grad():
        jd, run = exported(module, (x,), keep_inference_input_mutations=inside)
        names = [node.name for node in jd.graph_module.graph.find_nodes(op="placeholder")]
        assert names[0] == "arg0_1"
        assert len(descs(jd)[1]) == (1 if inside else 4)
        copies = jd.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        assert len(copies) == (3 if inside else 0)
        for _ in range(2):
            assert_same(run(*held_by(module), x), expected(x))
    assert_same([*module.buffers()], [*expected.buffers()])


def test_sizes_of_fakes_may_be_symbolic():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    module = Views()
    _, run = exported(module, (mode.from_tensor(torch.ones(5, 4), symbolic_context=context),))
    for rows in (2, 7):
        x = torch.randn(rows, 4)
        assert_same(run(*held_by(module), x), module(x))


def test_the_size_of_a_fake_may_be_a_part_of_a_symbolic_size():
    """A derivative reads it off the argument, which has no size that is the symbol."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return (x * self.weight).mean() * x.reshape(2 * x.shape[0], 2)

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    whole = mode.from_tensor(torch.ones(20, 4), symbolic_context=context)
    with mode:
        part = torch.empty(whole.shape[0] // 4, 4)
    module = Scaled()
    _, run = exported(module, (part,))
    for rows in (2, 7):
        x = torch.randn(rows, 4)
        results = run(*held_by(module), x), module(x)
        assert_same(*results)
        assert_same(*[torch.autograd.grad(result.square().sum(), module.weight) for result in results])


def test_what_one_graph_cannot_say_is_refused_by_name():
    class Branching(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    class Reaching(nn.Module):
        def forward(self, x):
            return x * weight

    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(foregrad.errors.UnsupportedError, match="branches on values"):
        exported(Branching(), (x,))
    with pytest.raises(foregrad.errors.UnsupportedError, match="weight by itself, and it requires grad"):
        exported(Reaching(), (x,))
    with pytest.raises(foregrad.errors.UnsupportedError, match="functional"):
        exported(Plain(), (torch.ones(5, 4),), disable_functionalization=True)


@pytest.mark.parametrize("partition", [foregrad.default_partition, foregrad.min_cut_rematerialization_partition])
def test_prints_and_checks_are_operators_of_the_graph(partition, capfd):
    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = x * self.weight
            torch._assert_async(y.sum() > 0, "too small")
            torch.ops.higher_order.print("doubled {y}", y=y + y)
            torch.ops.aten._print("done")
            return y.sin()

    def telling(graph):
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function" and not node.users]

    module, x = Telling(), torch.ones(3)
    jd, run = exported(module, (x,), partition_fn=partition)
    assert telling(jd.graph_module) == ["aten._assert_async.msg", "print", "aten._print.default"]
    assert [desc for desc in descs(jd)[1] if desc and "output" in desc] == ["output[0]"]
    assert capfd.readouterr().out == ""
    out = run(module.weight, x)
    (gradient,) = torch.autograd.grad(out.sum(), module.weight)
    assert_same(gradient, x.cos())
    assert capfd.readouterr().out == "doubled tensor([2., 2., 2.])\ndone\n"
    with pytest.raises(RuntimeError, match="too small"):
        run(module.weight, -x)
    capfd.readouterr()
    with torch.no_grad():
        assert telling(exported(module, (x,))[0].graph_module) == telling(jd.graph_module)
    graph, _ = foregrad.aot_export_module(module, (x,), trace_joint=False)
    assert telling(graph) == telling(jd.graph_module)
    graph(module.weight.detach(), x)
    assert capfd.readouterr().out == "doubled tensor([2., 2., 2.])\ndone\n"


def test_a_check_that_dead_code_removal_would_take_away_is_refused():
    class Looking(nn.Module):
        def forward(self, x, at):
            x[at]  # raises for an index out of bounds
            return x * 2

    with pytest.raises(foregrad.errors.UnsupportedError, match="checks values"):
        exported(Looking(), (torch.ones(3, requires_grad=True), torch.tensor([0])))


# ------------------------------------------------------------------------------------------------------------- editing


def test_a_replaced_graph_may_take_shards():
    """Two of four rows of the batch, and half of the columns of a weight, as one of two ranks would."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            y = x @ self.weight
            return y, y.t(), x.view(-1)

    module = Half()

    def shard(jd):
        primals, tangents = jd.inputs, jd.tangents
        locals_ = [primals[0].new_empty(4, 3), primals[1].new_empty(2, 4)]
        tangents = [tangents[0].new_empty(2, 3)]

        class Local(torch.fx.Interpreter):
            def call_function(self, target, args, kwargs):
                if target is torch.ops.aten.view.default and args[1] == [16]:
                    args = (args[0], [8])
                return super().call_function(target, args, kwargs)

        local = Local(jd.graph_module)
        graph = make_fx(lambda *v: local.run(*v, enable_io_processing=False))(*locals_, *tangents)
        return jd.replace(graph, inputs=locals_, tangents=tangents)

    _, run = exported(module, (torch.randn(4, 4),), edit=shard)
    weight, x = module.weight.detach()[:, 3:].clone().requires_grad_(), torch.randn(2, 4)
    y, transposed, flat = run(weight, x)
    assert transposed._base is y
    assert flat._base is x
    y.square().sum().backward()
    expected = module.weight.detach()[:, 3:].clone().requires_grad_()
    (x @ expected).square().sum().backward()
    assert_same((y, flat, weight.grad), (x @ expected, x.view(-1), expected.grad))


def test_the_names_of_clients_are_views():
    """What autoparallel writes into private fields of PyTorch's result."""
    module = Plain()

    def edit(jd):
        graph = jd.graph_module
        state, capture = jd._aot_state, jd._aot_graph_capture
        assert capture.graph_module is graph
        assert [value.shape for value in state.flat_args] == [p.shape for p in (*module.parameters(), x)]
        assert state.fw_metadata.num_forward_returns == 1
        assert len(state.fw_metadata.input_info) == 5
        placeholders = graph.graph.find_nodes(op="placeholder")
        placeholders[4].meta["val"] = placeholders[4].meta["val"].new_empty(2, 4)
        narrow = [value.new_empty(2, *value.shape[1:]) for value in jd.tangents]
        traced = make_fx(lambda *v: torch.fx.Interpreter(graph).run(*v, enable_io_processing=False))(
            *jd.inputs, *narrow
        )
        capture.graph_module = traced
        capture.updated_flat_args = ([node.meta["val"] for node in placeholders[:5]], narrow)
        state.flat_args = [node.meta["val"] for node in placeholders[:5]]
        state.fw_metadata.traced_tangents = narrow
        assert jd.graph_module is traced

    x = torch.randn(5, 4)
    _, run = exported(module, (x,), edit=edit)
    narrow = torch.randn(2, 4)
    assert_same(run(*held_by(module), narrow), module(narrow))


def test_a_graph_with_another_number_of_inputs_is_refused():
    def edit(jd):
        jd.graph_module.graph.erase_node(jd.graph_module.graph.find_nodes(op="placeholder")[0])

    with pytest.raises(ValueError, match="takes 11 inputs and gives 15 outputs, this graph 10 and 15"):
        exported(Norm(), (torch.ones(3, 4),), edit=edit)


def einsums(jd):
    """Views round a product become an einsum, as a pass of autoparallel's does."""
    graph, found = jd.graph_module.graph, 0
    for mm in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        first, (user, *others) = mm.args[0], list(mm.users)
        view = torch.ops.aten.view.default
        if others or user.target is not view or getattr(first, "target", None) is not view or len(user.args[1]) != 3:
            continue
        with graph.inserting_before(mm):
            new = graph.call_function(torch.ops.aten.einsum.default, ("abk,kn->abn", [first.args[0], mm.args[1]]))
        new.meta.update(user.meta)
        user.replace_all_uses_with(new)
        found += 1
    graph.eliminate_dead_code()
    jd.graph_module.recompile()
    assert found


def aliases(jd):
    graph = jd.graph_module.graph
    for node in [node for node in graph.nodes if len(node.users) > 1 and torch.is_tensor(node.meta.get("val"))]:
        with graph.inserting_after(node):
            alias = graph.call_function(torch.ops.aten.alias.default, (node,))
        alias.meta.update(node.meta)
        node.replace_all_uses_with(alias, lambda user, alias=alias: user is not alias)
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)


def retraced(jd):
    values = [*jd.inputs, *jd.tangents]
    graph = make_fx(lambda *v: torch.fx.Interpreter(jd.graph_module).run(*v, enable_io_processing=False))(*values)
    jd.graph_module = graph


def copied(jd):
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        jd.graph_module = copy.deepcopy(jd.graph_module)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.last(self.first(x).relu()), x


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch's, of its own copies of graphs
@pytest.mark.parametrize("edit", [einsums, aliases, retraced, copied])
def test_what_clients_do_between_the_calls_survives(edit):
    module, x = Deep(), torch.randn(2, 3, 4)
    _, run = exported(module, (x,), edit=edit)
    expected = copy.deepcopy(module)
    out, same = run(*held_by(module), x)
    out.square().sum().backward()
    expected(x)[0].square().sum().backward()
    assert same is x
    torch.testing.assert_close(
        [out, *(p.grad for p in module.parameters())], [expected(x)[0], *(p.grad for p in expected.parameters())]
    )


def test_a_result_that_an_edit_makes_an_input_is_a_copy():
    class Cloned(nn.Module):
        def forward(self, x):
            return x.clone(), x * 2

    def edit(jd):
        for node in jd.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            node.replace_all_uses_with(node.args[0])

    x = torch.ones(3, requires_grad=True)
    _, run = exported(Cloned(), (x,), edit=edit)
    out, _ = run(x)
    with torch.no_grad():
        out.add_(1)
    assert_same(x.detach(), torch.ones(3))


def test_unused_parameters_of_a_graph_stay():
    """Attributes put onto a graph module before the export, which its graph reads and does not use."""
    graph = torch.fx.symbolic_trace(Plain())
    graph.extra = nn.Parameter(torch.ones(2))
    first = next(iter(graph.graph.nodes))
    with graph.graph.inserting_after(first):
        graph.graph.get_attr("extra")
    graph.recompile()
    jd, _ = exported(graph, (torch.ones(5, 4),))
    assert "extra" in jd.params_spec
    assert ParamAOTInput("extra") in descriptors.get_param_and_grad_nodes(jd.graph_module.graph)


def test_metadata_of_a_graph_goes_on():
    """`custom` marks and stack traces of a graph that Dynamo made are those of the joint graph, of its backward too."""
    with torch.fx.traceback.preserve_node_meta():
        graph = torch.fx.symbolic_trace(Plain())
    for node in graph.graph.nodes:
        node.meta["custom"] = {"stage": node.name}
    jd, _ = exported(graph, (torch.ones(5, 4),))
    nodes = jd.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert [node.meta["custom"]["stage"] for node in nodes] == ["first", "last"]
    later = jd.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.threshold_backward.default)
    assert [node.meta["custom"]["stage"] for node in later] == ["relu"]


# ----------------------------------------------------------------------------------------------------------- compiling


def test_the_pass_that_the_settings_of_pytorch_name_is_run():
    seen = []

    def note(graph, inputs):
        seen.append((len(graph.graph.find_nodes(op="placeholder")), [len(half) for half in inputs]))
        return graph

    with torch._functorch.config.patch(joint_custom_pass=note):
        exported(Plain(), (torch.ones(5, 4),))
    assert seen == [(6, [5, 1])]


def test_compilers_get_both_halves_at_once():
    seen = []

    def compiler(gm, inputs):
        seen.append([node.name for node in gm.graph.find_nodes(op="placeholder")])
        return foregrad.make_boxed_func(gm.forward)

    exported(Plain(), (torch.ones(5, 4),), fw_compiler=compiler, bw_compiler=compiler)
    assert seen[0] == [f"primals_{i}" for i in range(1, 6)]
    assert seen[1][-1] == "tangents_1"


@pytest.mark.slow
def test_inductor_compiles_the_halves():
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    name = "Norm"
    module = made(name)
    args, kwargs = arguments_of(name)
    _, run = exported(
        module,
        args,
        kwargs,
        decompositions=select_decomp_table(),
        fw_compiler=compile_fx_inner,
        bw_compiler=compile_fx_inner,
    )
    found = observed(module, name, lambda module, args, kwargs: run(*held_by(module), *args))
    expected = observed(made(name), name, lambda module, args, kwargs: module(*args, **kwargs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "foregrad"])
def test_torch_compile_goes_through_the_compiled_function(backend):
    torch._dynamo.reset()
    module, x = made("Norm"), torch.randn(5, 4)
    _, run = exported(module, (x,))

    def step(*args):
        return run(*args).square().sum() * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    held = held_by(module)
    compiled(*held, x).backward()
    expected = made("Norm")
    (expected(x).square().sum() * 2).backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])
    torch.testing.assert_close([*module.buffers()], [*expected.buffers()])


def test_the_result_may_be_an_artifact(tmp_path):
    name = "Nested"
    module = made(name)
    args, kwargs = arguments_of(name)
    _, run = exported(module, args, kwargs, serializable=True)
    run.artifact.save(tmp_path / "joint.foregrad")
    loaded = foregrad.load(tmp_path / "joint.foregrad")
    found = observed(module, name, lambda module, args, kwargs: loaded(*held_by(module), *args, **kwargs))
    expected = observed(made(name), name, lambda module, args, kwargs: module(*args, **kwargs))
    assert_same(found, expected)


def test_equal_graphs_have_equal_keys():
    x = torch.ones(5, 4)
    one, two = (exported(made("Plain"), (x,))[0] for _ in range(2))
    other = exported(made("Plain"), (torch.ones(6, 4),))[0]
    assert one.cache_hash() == two.cache_hash() != other.cache_hash()


def test_the_graph_is_called_with_primals_and_tangents():
    module, x = Plain(), torch.randn(5, 4)
    jd, _ = exported(module, (x,))
    outputs, gradients = jd.graph_module([*held_by(module), x], [torch.ones(5, 4)])
    module(x).sum().backward()
    assert_same([outputs[0].detach(), *gradients], [module(x).detach(), *(p.grad for p in module.parameters()), None])


def test_keywords_come_in_any_order_and_others_are_refused():
    class Two(nn.Module):
        def forward(self, *, a, b):
            return a - b

    _, run = exported(Two(), (), {"a": torch.ones(2), "b": torch.ones(2)})
    assert_same(run(b=torch.ones(2), a=torch.full((2,), 3.0)), torch.full((2,), 2.0))
    with pytest.raises(TypeError, match="takes the keywords"):
        run(a=torch.ones(2), c=torch.ones(2))


def test_classes_of_ours_are_like_those_of_pytorch():
    """Names, fields, bases and texts."""
    theirs, ours = descriptors.classes(), descriptors.own_classes()
    for name, cls in vars(ours).items():
        other = getattr(theirs, name)
        assert [field.name for field in other.__dataclass_fields__.values()] == list(cls.__dataclass_fields__)
        assert {base.__name__ for base in other.__mro__} == {base.__name__ for base in cls.__mro__}
    pairs = [
        (make(theirs), make(ours))
        for make in (
            lambda c: c.TangentAOTInput(c.InputMutationAOTOutput(c.BufferAOTInput("a.b"))),
            lambda c: c.SubclassGetAttrAOTOutput(c.GradAOTOutput(c.ParamAOTInput("w")), "inner"),
            lambda c: c.IntermediateBaseAOTOutput(c.PlainAOTOutput(3)),
            lambda c: c.ViewBaseAOTInput(c.PlainAOTInput(3)),
        )
    ]
    for their, our in pairs:
        assert their.expr() == our.expr()
        assert hash(our) == hash(copy.copy(our))
        for asked in ("is_param", "is_buffer", "is_tangent", "is_grad"):
            if hasattr(their, asked):
                assert getattr(their, asked)() == operator.methodcaller(asked)(our)
