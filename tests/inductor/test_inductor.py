"""Both halves through Inductor: eager's numbers within tolerance, eager's strides, and what it can't compile."""

from __future__ import annotations

import copy
import logging
import operator
import subprocess
import sys

import pytest
import torch
from torch import fx, nn

import foregrad
from foregrad.errors import BackendError
from foregrad.graph.meta import TensorSpec, spec_of
from foregrad.graph.role import GraphRole, role_of
from foregrad.inductor import backend as inductor
from foregrad.inductor._torch import inductor as door
from foregrad.inductor.backend import InductorCompiler

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Small(nn.Module):
    """Something of most kinds: matrix products, reductions, activations, a running mean."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.running = nn.LayerNorm(16), nn.BatchNorm1d(16)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.running(self.norm(self.first(x))))
        return self.last(hidden), hidden.t()


def test_a_module_trains_like_eager():
    model = Small()
    twin = copy.deepcopy(model)
    call = foregrad.compile(twin, backend="inductor")
    for step in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        for side, module in ((model, model), (twin, call)):
            out, hidden = module(x)
            (out.pow(2).mean() + hidden.sin().sum()).backward()
            side.seen = (out, hidden)
        for a, b in zip(model.seen, twin.seen, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        torch.testing.assert_close(model.running.running_mean, twin.running.running_mean)
    with torch.no_grad():
        model.eval(), call.eval()
        torch.testing.assert_close(model(x), call(x))


def test_a_convolution_whose_saved_tensors_are_laid_out_anew():
    """Inductor prefers channels last for what is saved; the outputs and gradients keep eager's strides."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    twin = copy.deepcopy(model)
    call = foregrad.compile(twin, backend=inductor.inductor_backend({"force_layout_optimization": True}))
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, actual = model(x), call(y)
    assert expected.stride() == actual.stride()
    torch.testing.assert_close(actual, expected)
    expected.sin().sum().backward()
    actual.sin().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4)
    (specialization,) = call.foregrad.specializations
    partitioned = specialization.product.compiled.partitioned
    forward = {node.name: spec_of(node) for node in partitioned.saved_nodes}
    backward = {node.name: spec_of(node) for node in partitioned.backward.graph.nodes if node.op == "placeholder"}
    moved = [n for n, s in forward.items() if isinstance(s, TensorSpec) and s.stride != backward[n].stride]
    assert moved, "nothing was laid out anew: the test tests nothing"


def test_a_convolution_of_the_users_image_runs_backward_in_the_layout_of_its_forward(monkeypatch):
    """Image and weight are saved as they are: Inductor would fit the gradient to their layout, slow on a CPU."""
    from torch._inductor import config

    asked = []
    lays_out = door._lays_out_convolutions
    monkeypatch.setattr(door, "_lays_out_convolutions", lambda gm: asked.append(lays_out(gm)) or asked[-1])
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(8, 3, 3, 3, requires_grad=True)

    def convolved(x, w):
        return nn.functional.conv2d(x, w).relu()

    call = foregrad.compile(convolved, backend="inductor")
    actual, expected = (torch.autograd.grad(f(image, weight).sum(), weight)[0] for f in (call, convolved))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert actual.stride() == expected.stride()
    (backward,) = [node for node in call.foregrad.specializations[0].product.compiled.partitioned.backward.graph.nodes
                   if node.target is torch.ops.aten.convolution_backward.default]  # fmt: skip
    assert {node.op for node in backward.args[1:3]} == {"placeholder"}, "nothing of the user's is saved"
    assert asked == [config.layout_optimization and torch.backends.mkldnn.is_available()]


def test_writes_and_views_are_eagers():
    def step(x, y):
        x.mul_(y)
        return x[1:], x.sum(0), y.exp()

    call = foregrad.compile(step, backend="inductor")
    y = torch.rand(3, 4, requires_grad=True)
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    expected, actual = step(a, y), call(b, y)
    torch.testing.assert_close(b, a)
    torch.testing.assert_close(actual, expected)
    assert actual[0].data_ptr() == b[1:].data_ptr()
    grads = [torch.autograd.grad(sum(o.sum() for o in outs), y)[0] for outs in (expected, actual)]
    torch.testing.assert_close(*grads)


def test_dropout_drops_the_share_that_is_asked_for():
    """Inductor's random numbers, the same mask in both halves."""
    call = foregrad.compile(lambda x: nn.functional.dropout(x, 0.25), backend="inductor")
    x = torch.ones(400, 50, requires_grad=True)
    out = call(x)
    kept = out != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    out.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    assert not torch.equal(call(x) != 0, kept)


def attention(q, k, v):
    return nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.25) @ v


def test_dropout_in_attention_is_drawn_before_it_is_read():
    """Inductor's own lowering of what a CPU draws reads memory that nobody has written."""
    q, k = (torch.rand(2, 64, 32, requires_grad=True) for _ in range(2))
    out = foregrad.compile(attention, backend="inductor")(q, k, torch.ones(2, 64, 8))
    assert out.mean().item() == pytest.approx(1, abs=0.05)  # each row of the softmax sums to 1
    assert out.std().item() > 0.01


@pytest.mark.parametrize("generator", [False, True])
def test_random_numbers_are_eagers_where_they_must_be(generator):
    """With `fallback_random`, and from a generator of the user's."""
    own = torch.Generator() if generator else None
    backend = inductor.inductor_backend({"fallback_random": not generator})

    def masked(x):
        keep = torch.empty(64, 64).bernoulli_(0.75, generator=own)
        return (x @ x.t()).softmax(-1) * (keep / 0.75)

    x = torch.randn(64, 32, requires_grad=True)
    results = []
    for function in (masked, foregrad.compile(masked, backend=backend)):
        (own.manual_seed if own is not None else torch.manual_seed)(1)
        out = function(x)
        results.append((out, *torch.autograd.grad(out.sin().sum(), x)))
    torch.testing.assert_close(*results)


def test_random_numbers_of_a_function_without_a_derivative():
    """Its forward has no joint graph, in which Inductor looks for them."""
    x = torch.ones(100, 50, requires_grad=True)
    out = foregrad.compile(lambda x: torch.bernoulli(x, 0.5) * x, backend="inductor")(x)
    assert out.mean().item() == pytest.approx(0.5, abs=0.03)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()


def test_an_operator_that_inductor_does_not_know_runs_on_eagers_kernels(caplog):
    def odd(x):
        return x + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.output([graph.call_function(odd, (x,))])
    with caplog.at_level(logging.INFO, "foregrad"):
        run = InductorCompiler()(fx.GraphModule({}, graph), [torch.ones(2)])
    assert torch.equal(run([torch.ones(2)])[0], torch.full((2,), 2.0))
    assert "odd" in caplog.text


def broken(*args, **kwargs):
    raise ValueError("no kernels today\nand a long story")


def test_a_failure_is_an_error_or_a_fallback(monkeypatch, caplog):
    monkeypatch.setattr(door, "compile_graph", broken)
    with pytest.raises(BackendError, match=r"forward graph: ValueError: no kernels today"):
        foregrad.compile(torch.sin, backend="inductor")(torch.ones(2, requires_grad=True))
    x = torch.ones(2, requires_grad=True)
    with caplog.at_level(logging.WARNING, "foregrad"):
        out = foregrad.compile(lambda x: x.sin(), backend="auto")(x)
    out.sum().backward()
    assert torch.equal(out, x.sin())
    assert "no kernels today" in caplog.text


def test_auto_is_inductor_or_says_why_not(monkeypatch, caplog):
    inductor._say_choice.cache_clear()
    with caplog.at_level(logging.INFO, "foregrad"):
        for _ in range(2):
            assert foregrad.get_backend("auto").prepare_joint is not None
    assert caplog.text.count('"auto" is Inductor') == 1
    monkeypatch.setattr(door, "cpp_compiler_found", lambda: False)
    inductor._say_choice.cache_clear()
    with caplog.at_level(logging.WARNING, "foregrad"):
        assert foregrad.get_backend("auto") is foregrad.get_backend("eager")
        foregrad.get_backend("auto")
    inductor._say_choice.cache_clear()
    assert caplog.text.count("no C++ compiler was found") == 1
    assert inductor.why_not([torch.device("meta")]) is not None


def test_importing_foregrad_imports_neither_inductor_nor_dynamo():
    code = "import foregrad, sys; print([m for m in ('torch._inductor', 'torch._dynamo') if m in sys.modules])"
    code += "; from foregrad.backends.registry import list_backends; print('eager' in list_backends())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "True"]


def test_kernels_compiled_once_come_from_inductors_cache(monkeypatch):
    from torch._inductor import codecache, cpp_builder

    def gradient():
        x = torch.ones(7, requires_grad=True)
        foregrad.compile(lambda x: (x.sin() * 3).exp().sum(), backend="inductor")(x).backward()
        return x.grad

    first = gradient()
    codecache.CppPythonBindingsCodeCache.cache_clear()
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", broken)
    assert torch.equal(gradient(), first)
    with pytest.raises(BackendError, match="no kernels today"):
        foregrad.compile(lambda x: (x.sin() * 3.5).exp().sum(), backend="inductor")(torch.ones(11))


def test_a_graph_of_which_another_output_is_visible_is_another_graph():
    """One and the same forward graph returns both, once to the user and once to be kept, laid out as Inductor likes."""
    image, weight = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(8, 3, 3, 3, requires_grad=True)

    def kept(x, w):
        return nn.functional.conv2d(x, w).sin()

    def shown(x, w):
        hidden = nn.functional.conv2d(x, w)
        return hidden.sin(), hidden

    for function in (kept, shown):
        backend = inductor.inductor_backend({"force_layout_optimization": True})
        out, expected = foregrad.compile(function, backend=backend)(image, weight), function(image, weight)
        torch.testing.assert_close(out, expected)
    assert [t.stride() for t in out] == [t.stride() for t in expected]


def test_graphs_compiled_once_come_from_inductors_cache(tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def function(x):
        return (x.cos() * 3).exp().sum(), x.t() + 1

    found = []
    for _ in range(2):
        counters["inductor"].clear()
        x = torch.ones(5, 3, requires_grad=True)
        out, turned = foregrad.compile(function, backend="inductor")(x)
        out.backward()
        torch.testing.assert_close((out, turned), function(x))
        torch.testing.assert_close(x.grad, torch.autograd.grad(function(x)[0], x)[0])
        assert turned.stride() == (1, 3)
        found.append({name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")})
    assert found == [{"hit": 0, "miss": 2, "bypass": 0}, {"hit": 2, "miss": 0, "bypass": 0}]


@pytest.mark.parametrize("gradients", [True, False])
def test_inductors_passes_for_joint_graphs_are_run(monkeypatch, gradients):
    """One of them sees that a tensor of zeros is added; without gradients too."""
    seen = []
    original = door.compile_graph

    def compile_graph(gm, *args, **kwargs):
        seen.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return original(gm, *args, **kwargs)

    monkeypatch.setattr(door, "compile_graph", compile_graph)
    x = torch.randn(4).requires_grad_(gradients)
    out = foregrad.compile(lambda x: (x + torch.zeros(4)).sin(), backend="inductor")(x)
    torch.testing.assert_close(out, x.sin())
    assert len(seen) == 1
    assert "aten.add.Tensor" not in seen[0]


def test_roles_of_the_three_kinds_of_graph():
    seen = []

    def keep(gm, inputs):
        seen.append(role_of(gm))
        return gm

    def step(x, w, buffer):
        buffer.add_(1)
        return x @ w, x.sum()

    call = foregrad.compile(step, backend=keep)
    w = torch.ones(2, 2, requires_grad=True)
    call(torch.ones(2, 2), w, torch.zeros(3))[0].sum().backward()
    with torch.no_grad():
        call(torch.ones(2, 2), w, torch.zeros(3))
    forward, backward, inference = seen
    assert (forward.phase, backward.phase, inference.phase) == ("forward", "backward", "inference")
    # The first one is copied into the buffer; x is saved, and as it came in.
    assert forward.visible_outputs == (1, 2, 3)
    assert backward.visible_outputs == (1,)
    bare = fx.symbolic_trace(lambda x: (x, operator.neg(x)))
    assert role_of(bare) == GraphRole("inference", (), (0, 1))


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(door, "cpp_compiler_found", lambda: False)
    error = inductor._failure("forward", RuntimeError("InvalidCxxCompiler"), [torch.ones(2)])
    assert "Inductor failed on the forward graph: no C++ compiler was found: install g++" in str(error)
    assert "Invalid" not in str(error)
