"""Inductor's backward overwrites what the forward saved, where nobody else has it, and only there."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx

import foregrad
from foregrad import config
from foregrad._torch import memory
from foregrad._torch.native import native
from foregrad.graph.role import GraphRole
from foregrad.inductor import segments
from foregrad.inductor._torch import inductor as door
from foregrad.inductor.backend import InductorCompiler
from foregrad.runtime import compiled as donated
from tests.parity.peak import peak_of

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(params=[True, False], ids=["native", "python"])
def choices(request, monkeypatch):
    """(what may be overwritten, whether it is) of each call of a backward, with and without the C++ part."""
    if request.param and native() is None:
        pytest.skip("the C++ part was not built")
    seen, looked = [], native().owned if request.param else memory.owned_in_python

    def owned():
        def look(values, positions):
            found = looked(values, positions)
            seen.append((positions, found))
            return found

        return look

    overwriting = donated.overwriting

    def watched(backward, positions, make_careful):
        with monkeypatch.context() as patch:
            patch.setattr(memory, "owned", owned)
            return overwriting(backward, positions, make_careful)

    monkeypatch.setattr("foregrad.dispatch.pipeline.overwriting", watched)
    monkeypatch.setattr(memory, "owned", lambda: looked)
    with config.override(native=request.param):
        yield seen


def chain(x, w):
    for _ in range(3):
        x = (x @ w).sin()
    return x * 2


def example():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(16, 16, generator=generator) * 0.3 for _ in range(2))
    return x.requires_grad_(), w.requires_grad_()


def gradients(out, inputs, **options):
    return torch.autograd.grad(out, inputs, torch.ones_like(out), **options)


def expected():
    inputs = example()
    return gradients(chain(*inputs), inputs)


def test_each_step_overwrites_what_it_saved(choices):
    call = foregrad.compile(chain, backend="inductor")
    for _ in range(3):
        inputs = example()
        torch.testing.assert_close(gradients(call(*inputs), inputs), expected())
    assert len(choices) == 3
    assert all(positions and owned for positions, owned in choices)


def test_a_graph_that_is_kept_gives_the_same_gradients_again(choices):
    call = foregrad.compile(chain, backend="inductor")
    inputs = example()
    gradients(call(*inputs), inputs)
    out = call(*inputs)
    for keep in (True, True, False):
        torch.testing.assert_close(gradients(out, inputs, retain_graph=keep), expected())
    assert [owned for _, owned in choices] == [True, False, False, True]
    with pytest.raises(RuntimeError, match="second time"):
        gradients(out, inputs)


def test_a_program_that_keeps_its_first_graph_compiles_one_backward(choices, monkeypatch):
    phases = []
    compile_graph = door.compile_graph
    monkeypatch.setattr(
        door, "compile_graph", lambda *a, **k: phases.append(k["is_backward"]) or compile_graph(*a, **k)
    )
    call = foregrad.compile(chain, backend="inductor")
    inputs = example()
    out = call(*inputs)
    for keep in (True, False):
        torch.testing.assert_close(gradients(out, inputs, retain_graph=keep), expected())
    assert not choices
    assert phases == [False, True]


@pytest.mark.parametrize("first", [True, False], ids=["from the first step", "later"])
@pytest.mark.parametrize("foreign", [True, False], ids=["numpy", "torch"])
def test_what_hooks_on_saved_tensors_keep_stays_as_it_is(choices, first, foreign):
    kept = []

    def pack(tensor):
        kept.append((tensor, tensor.clone()))
        return tensor.detach().numpy() if foreign else tensor

    call = foregrad.compile(chain, backend="inductor")
    inputs = example()
    if not first:
        gradients(call(*inputs), inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy if foreign else lambda kept: kept):
        out = call(*inputs)
    torch.testing.assert_close(gradients(out, inputs), expected())
    assert kept
    for tensor, copy in kept:
        assert torch.equal(tensor, copy)
    assert [owned for _, owned in choices] == ([] if first else [True, False])


def test_memory_that_only_numpy_still_has_is_not_overwritten(choices):
    """The tensor that a hook packed is gone; its elements are not."""
    kept = []

    def pack(tensor):
        kept.append(tensor.detach().numpy().copy())
        return kept[-1]

    call = foregrad.compile(chain, backend="inductor")
    inputs = example()
    gradients(call(*inputs), inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        out = call(*inputs)
    copies = [array.copy() for array in kept]
    torch.testing.assert_close(gradients(out, inputs), expected())
    assert all((a == b).all() for a, b in zip(kept, copies, strict=True))


def test_what_was_looked_at_in_the_node_stays_as_it_is(choices):
    call = foregrad.compile(chain, backend="inductor")
    inputs = example()
    for look in (False, True):
        out = call(*inputs)
        seen = out.grad_fn.saved_tensors if look else ()
        views = [tensor.view(-1)[1:] for tensor in seen]
        del seen
        copies = [view.clone() for view in views]
        torch.testing.assert_close(gradients(out, inputs), expected())
    assert len(views) > 2
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))
    assert [owned for _, owned in choices] == [True, False]


def test_derivatives_of_a_graph_that_is_overwritten_without_them(choices):
    call = foregrad.compile(chain, backend="inductor")
    results = []
    for function in (chain, call):
        inputs = example()
        gradients(function(*inputs), inputs)
        out = function(*inputs)
        first = gradients(out, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.sum() for g in first), inputs, retain_graph=True)
        results.append((*first, *second, *gradients(out, inputs)))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_two_threads_in_one_graph(choices):
    call = foregrad.compile(chain, backend="inductor")
    inputs = example()
    gradients(call(*inputs), inputs)
    for _ in range(5):
        out, found = call(*inputs), []
        threads = [
            threading.Thread(
                target=lambda out=out, found=found: found.append(gradients(out, inputs, retain_graph=True))
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        for each in (*found, gradients(out, inputs)):
            torch.testing.assert_close(each, expected())


def test_a_compiled_backward_writes_where_it_says():
    """And Inductor's cache does not give the one for the other."""
    x, tangent = torch.randn(64), torch.randn(64)
    for allowed in ((), (0,), ()):
        graph = fx.Graph()
        saved, incoming = graph.placeholder("saved"), graph.placeholder("tangents_1")
        cos = graph.call_function(torch.ops.aten.cos.default, (saved,))
        product = graph.call_function(torch.ops.aten.mul.Tensor, (incoming, cos))
        graph.output([product])
        with torch._subclasses.FakeTensorMode() as mode:
            for node in (saved, incoming, cos, product):
                node.meta["val"] = torch.empty(64)
        module = fx.GraphModule({}, graph)
        GraphRole("backward", (0,), (0,), allowed).put_on(module)
        with mode:
            run = InductorCompiler()(module, [node.meta["val"] for node in (saved, incoming)])
        given = x.clone()
        (result,) = run([given, tangent.clone()])
        torch.testing.assert_close(result, tangent * x.cos())
        assert tuple(run.writes_into) == allowed
        assert (result.data_ptr() == given.data_ptr()) == bool(allowed)


def layers(x, w):
    """A row of layers, each a region, with work before and behind it."""
    x = x.exp()
    for _ in range(4):
        y = x @ w
        for k in range(6):
            y = (y.sin() * k + y).tanh()
        x = x + y
    return x.cos()


def test_regions_overwrite_what_was_saved_for_them_alone(choices, monkeypatch):
    given, compile_graph = [], door.compile_graph
    monkeypatch.setattr(
        door, "compile_graph", lambda *a, **k: given.append(tuple(k.get("donated", ()))) or compile_graph(*a, **k)
    )
    call = foregrad.compile(layers, backend="inductor", regions=True)
    inputs = example()
    wanted = gradients(layers(*inputs), inputs)
    for _ in range(3):
        torch.testing.assert_close(gradients(call(*inputs), inputs), wanted)
    assert all(positions and owned for positions, owned in choices)
    assert sum(map(bool, given)) > 1  # a region, and what is beside it
    out = call(*inputs)
    for keep in (True, True, False):
        torch.testing.assert_close(gradients(out, inputs, retain_graph=keep), wanted)
    assert [owned for _, owned in choices[-3:]] == [False, False, True]


def test_the_peak_with_regions_is_that_without():
    inputs, peaks = [torch.ones(256, 256, requires_grad=True) for _ in range(2)], []
    for regions in (False, True):
        call = foregrad.compile(layers, backend="inductor", regions=regions)
        gradients(call(*inputs), inputs)
        peaks.append(peak_of(lambda call=call: gradients(call(*inputs), inputs)))
    assert peaks[1] <= 1.01 * peaks[0]


def part_of(build):
    """The values that a part of a backward may overwrite, by name; `build` makes the graph, and gives the part."""
    graph = fx.Graph()
    saved = [graph.placeholder(name) for name in ("saved", "kept", "tangents_1")]
    part = build(graph, *saved)
    operands = list(dict.fromkeys(node for each in part for node in each.all_input_nodes if node not in part))
    with torch._subclasses.FakeTensorMode():
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty(4, 4)
    positions = segments.overwritable(fx.GraphModule({}, graph), operands, set(part), (0,))
    return {operands[i].name for i in positions}


@pytest.mark.parametrize(
    ("read_again", "expected"),
    [
        ("nothing", {"saved", "sin_default"}),
        ("the input", {"sin_default"}),
        ("a view of the input", {"sin_default"}),
        ("what was made", {"saved"}),
        ("a view of what was made", {"saved"}),
    ],
)
def test_a_part_may_overwrite_what_only_it_reads(read_again, expected):
    aten = torch.ops.aten

    def build(graph, saved, kept, tangent):
        made = graph.call_function(aten.sin.default, (kept,))
        last = graph.call_function(aten.mul.Tensor, (saved, made))
        other = graph.call_function(aten.mul.Tensor, (last, kept))
        source = {"the input": saved, "what was made": made}.get(read_again.removeprefix("a view of "))
        view = None
        if read_again.startswith("a view"):
            view = source = graph.call_function(aten.t.default, (source,))
        graph.output([other, *([source] if source is not None else [])])
        return [last, other] if view is None else [last, other, view]

    assert part_of(build) == expected


def test_a_view_is_not_overwritten():
    def build(graph, saved, kept, tangent):
        view = graph.call_function(
            torch.ops.aten.t.default, (graph.call_function(torch.ops.aten.sin.default, (kept,)),)
        )
        last = graph.call_function(torch.ops.aten.mul.Tensor, (saved, view))
        graph.output([last])
        return [last]

    assert part_of(build) == {"saved"}
