"""What PyTorch's own tests of exports ask for, in programs of ours: by both doors the same graph, or a refusal by both."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.experimental import control_flow
from torch import fx, nn
from torch._functorch import aot_autograd as theirs
from torch.fx import traceback

import foregrad
from foregrad.errors import UnsupportedError
from tests.joints.programs import whole_regions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
aten = torch.ops.aten


class Act(nn.Module):
    """Calls a function with a parameter, a buffer and the arguments."""

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.arange(1.0, 4.0)), act
        self.register_buffer("table", torch.linspace(0, 1, 9).view(3, 3))

    def forward(self, *args: Any) -> Any:
        return self.act(self, *args)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.norm(self.conv(x.view(1, 3, 3, 1))),)


def without_gradients_inside(m: Act, x: torch.Tensor) -> Any:
    y = x.exp()
    with torch.no_grad():
        y.mul_(3)
    return (y - x,)


def with_gradients_inside(m: Act, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        y = x.matmul(x)
        y.sub_(1).div_(2)
    return (y.tan(),)


def written_through_a_view(m: Act, x: torch.Tensor) -> Any:
    y = x.matmul(m.table)
    y.flatten()[2:].neg_()
    return (y.reshape(1, 9).amax() + y.contiguous().sum(),)


def composite_in_place(m: Act, x: torch.Tensor) -> Any:
    return (aten.arctan_.default(x.clone()), aten.square_.default(x * 2))


def a_buffer_written(m: Act, x: torch.Tensor) -> Any:
    m.table.mul_(x.mean())
    return (m.table + x,)


def an_argument_and_a_buffer_written(m: Act, x: torch.Tensor, y: torch.Tensor) -> Any:
    y.add_(x)
    m.table.sub_(y.sum())
    return (y.cos(), m.table.amin())


def an_argument_written(m: Act, x: torch.Tensor) -> Any:
    x.exp_()
    return (x.sum() * m.table,)


def nested_branches(m: Act, x: torch.Tensor) -> Any:
    def deep(z: torch.Tensor) -> torch.Tensor:
        return torch.cond(z.amax() > 0, lambda a: a.exp().mul_(2), lambda a: a.neg(), (z.tan(),))

    y = torch.cond(x.sum() > 1, lambda a: a.sin().add_(1), deep, (x,))
    return (y - 1, y.t())


def mapped_in_a_branch(m: Act, x: torch.Tensor, y: torch.Tensor) -> Any:
    def step(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return row.exp().sub_(1) * other

    def mapped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + control_flow.map(step, a.cos(), b).sum() - control_flow.map(step, a, b).amax()

    return (torch.cond(x.sum() > 0, lambda a, b: a.mul(2).add_(b.mean()), mapped, (x, y)),)


def mapped_alone(m: Act, x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = control_flow.map(lambda row, other: row.sin().mul_(2) - other, x.exp(), y)
    return (rows.mean(0), rows)


def a_branch_on_a_size(m: Act, x: torch.Tensor) -> Any:
    return (torch.cond(x.shape[0] > 4, lambda a: a.cos(), lambda a: a.sin().add_(3), (x,)),)


def square() -> torch.Tensor:
    return torch.linspace(-1, 1.5, 9).view(3, 3)


ONE, TWO = (lambda: [square()]), (lambda: [square(), square().exp()])
ABOVE = {
    "no_grad inside": (without_gradients_inside, ONE),
    "enable_grad inside, a composite operator": (with_gradients_inside, ONE),
    "a composite operator in place": (composite_in_place, ONE),
    "written through a view": (written_through_a_view, ONE),
    "a buffer written": (a_buffer_written, ONE),
    "an argument and a buffer written": (an_argument_and_a_buffer_written, TWO),
    "linear": (lambda m, x: (nn.functional.linear(x, m.table, m.weight),), ONE),
    "reshape and contiguous": (lambda m, x: (aten.contiguous.default(x).reshape(9, 1).sum(),), ONE),
    "convolution and batch norm": (Convolved, ONE),
    "a branch in a branch": (nested_branches, ONE),
    "map in a branch": (mapped_in_a_branch, TWO),
    "map": (mapped_alone, TWO),
}
BELOW = {
    "an argument written": (an_argument_written, ONE),
    "an argument and a buffer written": (an_argument_and_a_buffer_written, TWO),
    "a branch on a size": (a_branch_on_a_size, ONE),
    "a branch in a branch": (nested_branches, ONE),
    "a parameter written, nothing differentiated": (lambda m, x: (m.weight.mul_(2) + x,), ONE),
}


def made(act: Any) -> nn.Module:
    torch.manual_seed(0)
    return act() if isinstance(act, type) else Act(act)


def operators(graph: fx.GraphModule) -> list[list[str]]:
    """The operators of the graph and of each graph inside, in order."""
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    return [[str(n.target) for n in part.graph.nodes if n.op == "call_function"] for part in parts]


def exported(door: Any, act: Any, args: Any, **how: Any) -> Any:
    with torch.no_grad():
        return door.aot_export_module(made(act), args(), trace_joint=False, **how)


def check_alike(act: Any, args: Any, *, steps: bool = True, **how: Any) -> None:
    (graph, ours), (other, expected) = (exported(door, act, args, **how) for door in (foregrad, theirs))
    if steps:
        assert operators(graph) == operators(other)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    assert names == [node.name for node in other.graph.find_nodes(op="placeholder")]
    for field in ("buffers_to_mutate", "user_inputs_to_mutate", "parameters_to_mutate"):
        updates = [list(getattr(signature, field, {}).values()) for signature in (ours, expected)]
        assert updates[0] == updates[1], field
    module, given = made(act), args()
    held = [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    with torch.no_grad():
        results = [part(*copy.deepcopy([*held, *given])) for part in (graph, other)]
        eager = torch.utils._pytree.tree_leaves(module(*given))
    torch.testing.assert_close(list(results[0]), list(results[1]), rtol=0, atol=0)
    torch.testing.assert_close(list(results[0])[-len(eager) :], eager, rtol=0, atol=0)


@pytest.mark.parametrize("name", ABOVE)
def test_graphs_above_autograd_have_the_operators_of_pytorchs(name: str) -> None:
    check_alike(*ABOVE[name], steps="a view" not in name, pre_dispatch=True)  # PyTorch's has a view more


@pytest.mark.parametrize("name", BELOW)
def test_graphs_below_autograd_have_the_updates_of_pytorchs(name: str) -> None:
    check_alike(*BELOW[name], steps="branch in" not in name)  # below autograd PyTorch's branch gets sizes too


def a_view_and_its_base() -> list[torch.Tensor]:
    x = torch.ones(3)
    return [x, x.view(-1)]


REFUSED = {
    "a size changed in place": (lambda m, x: (x.unsqueeze_(0) * 2,), ONE),
    "a view written": (lambda m, x, y: (x.mul_(2) + y,), a_view_and_its_base),
    "one tensor twice, written": (lambda m, x, y: (x.mul_(2) + y,), lambda: [torch.ones(3)] * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_pytorch_refuses_are_refused(name: str) -> None:
    act, args = REFUSED[name]
    with pytest.raises(UnsupportedError):
        exported(foregrad, act, args)
    with pytest.raises(RuntimeError):
        exported(theirs, act, args)


SIMPLE = {
    "a size changed in place": (lambda w, x: (x.t_() * w,), lambda: [torch.ones(2, 1, requires_grad=True), square()]),
    "an argument written": (lambda w, x: (x.mul_(2) * w,), lambda: [torch.ones(3, requires_grad=True), square()]),
    "a leaf written": (lambda w, x: (w.mul_(2) * x,), lambda: [torch.ones(3, requires_grad=True), square()]),
    "a view written": (lambda x, y: (x.mul_(2) + y,), a_view_and_its_base),
    "one tensor twice, written": (lambda x, y: (x.mul_(2) + y,), lambda: [torch.ones(3)] * 2),
    "nested arguments": (lambda pair: (pair[0] * pair[1],), lambda: [[square(), square()]]),
}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", SIMPLE)
def test_functions_that_pytorch_refuses_are_refused(name: str, joint: bool) -> None:
    function, args = SIMPLE[name]
    for door in (foregrad, theirs):
        with pytest.raises(RuntimeError):
            door.aot_export_joint_simple(function, args(), trace_joint=joint)


def test_a_joint_graph_of_a_function_is_split_by_a_partition_of_either() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sin() * y, y * y.detach()

    args = [square().requires_grad_(), square().exp().detach().requires_grad_()]
    plain, tangents = [a.detach() for a in args], [square(), square().cos()]
    expected = f(*args)
    gradients = torch.autograd.grad(expected, args, tangents)
    from torch._functorch.partitioners import default_partition

    for split in (foregrad.default_partition, default_partition):
        joint = foregrad.aot_export_joint_simple(f, args, trace_joint=True)
        forward, backward = split(joint, args, num_fwd_outputs=2)
        results = list(forward(*plain))
        torch.testing.assert_close(results[:2], [t.detach() for t in expected], rtol=0, atol=0)
        torch.testing.assert_close(list(backward(*results[2:], *tangents)), list(gradients), rtol=0, atol=0)


class Sized(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return (torch.zeros(x.sum().item()),)


def test_a_size_of_known_values_is_a_number_and_one_of_unknown_values_is_refused_by_name() -> None:
    """PyTorch's graph has the value read in it, as a size that no guard knows."""
    graph, _ = foregrad.aot_export_module(
        Act(lambda m: (torch.zeros(torch.full((), 11).item()),)), [], trace_joint=False, dynamic_shapes=True
    )
    with torch.no_grad():
        assert graph(torch.ones(3), torch.ones(3, 3))[0].shape == (11,)
    with pytest.raises(UnsupportedError, match=r"values of tensors.*in forward"):
        foregrad.aot_export_module(Sized(), [torch.tensor([2, 3])], trace_joint=False, dynamic_shapes=True)


def test_a_dropout_that_drops_nothing_is_its_argument_as_in_eager() -> None:
    """A write to the result is a write to the argument; PyTorch copies, or refuses above autograd."""

    def act(m: Act, x: torch.Tensor) -> Any:
        return (aten.dropout.default(x, 0.1, train=False).add_(1) * 2,)

    for how in ({}, {"pre_dispatch": True}):
        graph, signature = exported(foregrad, act, ONE, **how)
        assert list(signature.user_inputs_to_mutate.values()) == ["arg2_1"]
        x = square()
        update, result = graph(torch.ones(3), torch.ones(3, 3), x)
        expected = made(act)(given := square())
        torch.testing.assert_close([update, result], [given, *expected], rtol=0, atol=0)


def test_the_setting_that_makes_random_numbers_arguments_leaves_exports_alone() -> None:
    """PyTorch's exports refuse it; graphs of foregrad hold random operators by any setting."""
    from torch._functorch import config

    with config.patch(functionalize_rng_ops=True):
        graph, _ = exported(foregrad, lambda m, x: (nn.functional.dropout(x, 0.5),), ONE)
    torch.manual_seed(0)
    found = graph(torch.ones(3), torch.ones(3, 3), square())[0]
    torch.manual_seed(0)
    assert torch.equal(found, nn.functional.dropout(square(), 0.5))


# --------------------------------------------------------------------------------------------- marks, by both doors


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    @torch.compiler.nested_compile_region
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        with traceback.annotate({"part": "inner"}):
            return x.sin() * 3

    def forward(self, x: torch.Tensor) -> Any:
        with traceback.annotate({"part": "outer"}):
            y = self.inner(self.first(x) - self.last(x))
        return y - 1


def marks(door: Any) -> list[str]:
    """The operators that have a mark, those of graphs inside too, with it; each once, sorted."""
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    torch._dynamo.reset()
    x = torch.ones(2, 3, requires_grad=True)
    with whole_regions(), traceback.preserve_node_meta():
        module = dynamo_graph_capture_for_export(Regions())(x)
    with torch._guards.tracing(module.meta.get("tracing_context")), contextlib.ExitStack() as stack:
        graph = door.aot_export_joint_with_descriptors(stack, module, (x,)).graph_module
    nodes = [n for part in graph.modules() if isinstance(part, fx.GraphModule) for n in part.graph.nodes]
    found = {f"{n.target} {n.meta.get('custom', {}).get('part')}" for n in nodes if n.op == "call_function"}
    return sorted(name for name in found if name.startswith("aten"))


def test_marks_around_and_in_a_nested_region_are_pytorchs() -> None:
    assert marks(foregrad) == marks(theirs)
