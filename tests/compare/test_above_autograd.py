"""`aot_export_module(pre_dispatch=True)`: composite operators stay whole, as in PyTorch's graphs; values are eager's."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module as theirs
from torch._subclasses.fake_tensor import FakeTensorMode

import foregrad

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Block(nn.Module):
    """A block of a transformer, with a table and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.outer.weight = nn.Parameter(self.table.weight[:8].detach().clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, scale: float = 2.0) -> Any:
        self.calls.add_(1)
        x = self.norm(self.table(ids))
        q, k, v = self.inner(x).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = nn.functional.dropout(y, 0.5, self.training)
        return self.outer(nn.functional.gelu(y) * scale), (x @ x.mT).log_softmax(-1)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            z = nn.functional.interpolate(x, scale_factor=2.0)
        return self.bn(self.conv(x)).relu().flatten(1), z.square().mean(), torch.einsum("bchw,bdhw->cd", x, x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.gru(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return (torch.cond(x.sum() > 0, lambda x: self.inner(x), lambda x: x @ x, (x,)),)


CASES = {
    "block": (Block, (torch.randint(0, 11, (2, 5)),), True),
    "block, evaluated": (Block, (torch.randint(0, 11, (2, 5)),), False),
    "convolved": (Convolved, (torch.randn(2, 2, 4, 4),), True),
    "convolved, evaluated": (Convolved, (torch.randn(2, 2, 4, 4),), False),
    "recurrent": (Recurrent, (torch.randn(2, 5, 4),), False),
    "gate": (Gate, (torch.randn(3, 3),), True),
}


def composites(graph: torch.fx.GraphModule) -> collections.Counter[str]:
    """How often each composite operator is called, branches included."""
    found: collections.Counter[str] = collections.Counter()
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if getattr(node.target, "_can_decompose", lambda: False)():
                found[str(node.target)] += 1
    return found


def results(module: nn.Module, args: Any) -> Any:
    return torch.utils._pytree.tree_leaves(module(*args))


@pytest.mark.parametrize("name", CASES)
def test_composite_operators_are_as_in_pytorchs_graph(name: str) -> None:
    kind, args, training = CASES[name]
    module = kind().train(training)
    graph, signature = foregrad.aot_export_module(module, args, trace_joint=False, pre_dispatch=True)
    with torch.no_grad():
        expected, other = theirs(kind().train(training), args, trace_joint=False, pre_dispatch=True)
    assert composites(graph) == composites(expected)
    names = [[n.name for n in g.graph.nodes if "dropout" in n.name] for g in (graph, expected)]
    assert names[0] == names[1]
    assert composites(graph)
    assert (signature.parameters, signature.buffers) == (other.parameters, other.buffers)
    assert len(signature.user_outputs) == len(other.user_outputs)
    assert list(signature.buffers_to_mutate.values()) == list(other.buffers_to_mutate.values())


@pytest.mark.parametrize("name", CASES)
def test_the_graph_gives_eagers_values(name: str) -> None:
    kind, args, training = CASES[name]
    module = kind().train(training)
    graph, signature = foregrad.aot_export_module(module, args, trace_joint=False, pre_dispatch=True)
    held = [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    torch.manual_seed(3)
    found = graph(*held, *args)
    torch.manual_seed(3)
    expected = results(module, args)
    updates = len(signature.buffers_to_mutate)
    for one, eager in zip(found[updates:], expected, strict=True):
        torch.testing.assert_close(one, eager.detach(), rtol=0, atol=0)
    buffers = dict(module.named_buffers())
    for one, buffer in zip(found[:updates], signature.buffers_to_mutate.values(), strict=True):
        torch.testing.assert_close(one, buffers[buffer], rtol=0, atol=0)


class Dropped(nn.Module):
    """`write` writes to the argument of a `dropout`, to the dropout's result, or to another tensor."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> Any:
        y = x.sin()
        z = nn.functional.dropout(nn.functional.dropout(y[1:], 0.5, self.training).t(), 0.5, self.training)
        {"argument": y, "result": z, "other": x.exp()}[self.write].mul_(2)
        return y, z * 2


@pytest.mark.parametrize(("write", "kept"), [("argument", 0), ("result", 0), ("other", 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dropout_that_drops_nothing_stays_where_nobody_writes_to_its_memory(
    write: str, kept: int, dynamic: bool
) -> None:
    module, x = Dropped(write).eval(), torch.randn(3, 4)
    graph, _ = foregrad.aot_export_module(module, (x,), trace_joint=False, pre_dispatch=True, dynamic_shapes=dynamic)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default)) == kept
    for one, eager in zip(graph(x), module(x), strict=True):
        torch.testing.assert_close(one, eager, rtol=0, atol=0)


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers[0](x)
        with torch.fx.traceback.annotate({"stage": 1}):
            return (nn.functional.gelu(self.layers[1](x)).mul_(2),)


@pytest.mark.parametrize("dynamic", [False, True])
def test_nodes_say_their_modules_and_lines_as_pytorchs_do_and_have_marks(dynamic: bool) -> None:
    given = (torch.randn(2, 3),)
    graph, _ = foregrad.aot_export_module(Marked(), given, trace_joint=False, pre_dispatch=True, dynamic_shapes=dynamic)
    with torch.no_grad():
        expected, _ = theirs(Marked(), given, trace_joint=False, pre_dispatch=True)

    def said(module: torch.fx.GraphModule) -> list[Any]:
        calls = [n for n in module.graph.nodes if n.op == "call_function" and "size" not in n.name]
        return [(n.target, n.meta["nn_module_stack"], n.meta["stack_trace"].strip()) for n in calls]

    assert said(graph) == said(expected)
    marks = [node.meta.get("custom") for node in graph.graph.nodes if node.op == "call_function"]
    assert [mark for mark in marks if mark] == [{"stage": 1}] * 3


def test_sizes_may_vary() -> None:
    module = Block().eval()
    ids = torch.randint(0, 11, (2, 5))
    graph, _ = foregrad.aot_export_module(module, (ids,), trace_joint=False, pre_dispatch=True, dynamic_shapes=True)
    ids = torch.randint(0, 11, (3, 7))
    found = graph(*module.parameters(), *module.buffers(), ids)
    torch.testing.assert_close(found[1], results(module, (ids,))[0])


def test_arguments_may_be_fakes_and_keywords() -> None:
    with FakeTensorMode():
        module, ids = Block(), torch.zeros(2, 5, dtype=torch.int64)
    graph, _ = foregrad.aot_export_module(
        module, (), kwargs={"ids": ids, "scale": 3.0}, trace_joint=False, pre_dispatch=True
    )
    assert composites(graph)["aten.linear.default"] == 2
    assert "3.0" in graph.code


def test_a_decomposition_that_is_given_is_used() -> None:
    table = {torch.ops.aten.linear.default: lambda x, w, b=None: x @ w.t() if b is None else x @ w.t() + b}
    graph, _ = foregrad.aot_export_module(
        nn.Sequential(nn.Linear(3, 2)), (torch.ones(1, 3),), trace_joint=False, pre_dispatch=True, decompositions=table
    )
    assert "aten.linear.default" not in composites(graph)


class Stopping(nn.Module):
    """No gradient flows through some of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor, mode: str) -> Any:
        y = x * self.weight
        if mode == "off":
            with torch.no_grad():
                z = y * self.weight
                with torch.enable_grad():
                    y = y + x * self.weight
            return (y * z, y.exp())
        if mode == "detach":
            self.mean.mul_(0.9).add_(y.detach())
            return (y * y.detach() + y.sin().detach_() * self.weight, y.exp())
        z = y.detach()
        z.mul_(2)  # y is written to as well, without a history
        return (y * self.weight,)


@pytest.mark.parametrize("mode", ["off", "detach"])
def test_gradients_of_the_graph_stop_where_eagers_do(mode: str) -> None:
    x, module = torch.tensor([0.5, 1.0, 2.0]), Stopping()
    graph, _ = foregrad.aot_export_module(module, (x, mode), trace_joint=False, pre_dispatch=True)
    expected, _ = theirs(Stopping(), (x, mode), trace_joint=False, pre_dispatch=True)
    targets = [[str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in (graph, expected)]
    assert targets[0] == targets[1]
    weight = module.weight.detach().clone().requires_grad_()
    found = [t for t in graph(weight, torch.zeros(3), x, mode) if t.requires_grad]
    sum(t.sum() for t in found).backward()
    sum(t.sum() for t in module(x, mode)).backward()
    torch.testing.assert_close(weight.grad, module.weight.grad, rtol=0, atol=0)
    assert torch.is_grad_enabled()


def test_a_write_without_a_history_is_for_graphs_without_gradients() -> None:
    args = torch.tensor([0.5, 1.0, 2.0]), "written"
    with pytest.raises(
        foregrad.errors.UnsupportedError, match=r"detached memory.*z = y.detach\(\).* under torch.no_grad"
    ):
        foregrad.aot_export_module(Stopping(), args, trace_joint=False, pre_dispatch=True)
    with torch.no_grad():
        graph, _ = foregrad.aot_export_module(Stopping(), args, trace_joint=False, pre_dispatch=True)
    (found,) = graph(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), *args)
    torch.testing.assert_close(found, Stopping()(*args)[0].detach(), rtol=0, atol=0)


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x,)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return (x.sin(),)


def test_what_no_graph_holds_is_refused_by_name() -> None:
    x = torch.ones(3, 3)
    with pytest.raises(foregrad.errors.UnsupportedError, match="autocast"):
        foregrad.aot_export_module(Cast(), (x,), trace_joint=False, pre_dispatch=True)
    counting = Counting()
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"writes .*calls"):
        foregrad.aot_export_module(counting, (x,), trace_joint=False, pre_dispatch=True)
    assert counting.calls == 0
    with pytest.raises(RuntimeError, match="trace_joint=False"):
        foregrad.aot_export_module(Gate(), (x,), trace_joint=True, output_loss_index=0, pre_dispatch=True)
