"""`torch.cond`, `while_loop`, `scan` and `map` as operators of exported graphs: values and gradients are eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module as theirs
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx

import foregrad

COND, SCAN, MAP = (getattr(torch.ops.higher_order, name) for name in ("cond", "scan", "map_impl"))
SIGNS = (1.0, -1.0)


class Doubled(torch.autograd.Function):
    """Its gradient is not that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


class Program(nn.Module):
    """A module of a function, a parameter `w` and a buffer `b`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("b", torch.randn(3))
        self.function = function

    def forward(self, s: torch.Tensor, x: torch.Tensor) -> Any:
        return (self.function(self, s, x),)


def closing_over(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.cond(s > 0, lambda x: (x @ m.w + m.b).sin(), lambda x: x.cos(), (x,)).sum()


def intermediate(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    y = x.sin() @ m.w
    z = y.exp()
    return torch.cond(s > 0, lambda x: x * y * z, lambda x: z - x, (x,)).sum()


def operands_of_operands(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    y = x * m.w
    return torch.cond(s > 0, lambda x, y: x * y, lambda x, y: x + y, (x, y)).sum()


def custom(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.cond(s > 0, lambda x: Doubled.apply(x * m.w), lambda x: x * m.w.detach(), (x,)).sum()


def no_gradients_in_one(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    def second(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * m.w

    return torch.cond(s > 0, lambda x: x * m.w, second, (x,)).sum()


def several_results(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    found = torch.cond(
        s > 0, lambda x: {"a": x, "b": (x * m.w).t(), "c": x > 0}, lambda x: {"a": x + 1, "b": x, "c": x < 0}, (x,)
    )
    return (found["a"] * 2).sum() + (found["b"].contiguous() * m.w * found["c"]).sum()


def nested(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    def first(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * m.w, lambda x: x / 2, (x.sin(),)) * m.w

    return torch.cond(s > 0, first, lambda x: x - m.w, (x,)).sum()


def in_place(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    def first(x: torch.Tensor) -> torch.Tensor:
        y = x * m.w
        y.mul_(2)
        y[0].add_(x[1])
        return y

    return torch.cond(s > 0, first, lambda x: x * 1, (x,)).sum()


def layers(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
    def first(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(nn.functional.linear(x, m.w, m.b), (3,)).softmax(-1)

    return torch.cond(s.sum() > 0, first, lambda x: x.relu() @ m.w.t(), (x,)).square().sum()


PROGRAMS = [
    closing_over,
    intermediate,
    operands_of_operands,
    custom,
    no_gradients_in_one,
    several_results,
    nested,
    in_place,
    layers,
]


def eager(function: Callable[..., Any], s: torch.Tensor, x: torch.Tensor) -> tuple[Any, Sequence[Any]]:
    module = Program(function)
    taken = COND.__class__.__call__

    def branch(_: Any, pred: Any, first: Any, second: Any, operands: Any = ()) -> Any:
        return (first if pred else second)(*operands)

    COND.__class__.__call__ = branch
    asked, torch.compiler.is_dynamo_compiling = torch.compiler.is_dynamo_compiling, lambda: True
    try:
        x = x.clone().requires_grad_()
        (loss,) = module(s, x)
        gradients = torch.autograd.grad(loss, [module.w, x], allow_unused=True) if loss.requires_grad else (None, None)
        return loss, gradients
    finally:
        COND.__class__.__call__ = taken
        torch.compiler.is_dynamo_compiling = asked


def same(found: Any, expected: Any) -> None:
    if expected is None:  # the other branch has one
        assert not found.any()
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def is_cond(module: torch.fx.GraphModule) -> bool:
    return any(node.target is COND for node in module.graph.nodes)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_joint_graph_has_the_gradients_of_the_branch_taken(program: Any) -> None:
    x, module = torch.randn(3, 3), Program(program)
    example = (torch.ones(()), x.clone().requires_grad_())
    graph, signature = foregrad.aot_export_module(module, example, trace_joint=True, output_loss_index=0)
    assert is_cond(graph)
    backward = signature.backward_signature
    assert backward is not None
    names = [str(out.name) for out in next(iter(reversed(graph.graph.nodes))).args[0]]
    for sign in SIGNS:
        s = torch.tensor(sign)
        results = dict(zip(names, graph(module.w, module.b, s, x), strict=True))
        loss, gradients = eager(program, s, x)
        same(results[backward.loss_output], loss)
        of = {value: key for key, value in backward.gradients_to_parameters.items()}
        of |= {value: key for key, value in backward.gradients_to_user_inputs.items()}
        for name, gradient in zip(("w", signature.user_inputs[1]), gradients, strict=True):
            if name in of:
                same(results[of[name]], gradient)
            else:
                assert gradient is None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_graph_without_gradients_has_both_branches(program: Any) -> None:
    x, module = torch.randn(3, 3), Program(program)
    graph, _ = foregrad.aot_export_module(module, (torch.ones(()), x), trace_joint=False)
    assert is_cond(graph)
    for sign in SIGNS:
        s = torch.tensor(sign)
        same(graph(module.w, module.b, s, x)[0], eager(program, s, x)[0])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_graph_with_descriptors_is_compiled_and_takes_either_branch(program: Any) -> None:
    x, module = torch.randn(3, 3), Program(program)
    with contextlib.ExitStack() as stack:
        example = (torch.ones(()), x.clone().requires_grad_())
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, example)
        assert is_cond(jd.graph_module)
        run = foregrad.aot_compile_joint_with_descriptors(jd)
    for sign in SIGNS:
        s = torch.tensor(sign)
        loss, gradients = eager(program, s, x)
        given = x.clone().requires_grad_()
        (found,) = run(module.w, module.b, s, given)
        same(found, loss)
        for one, gradient in zip(
            torch.autograd.grad(found, [module.w, given], allow_unused=True), gradients, strict=True
        ):
            if one is not None or gradient is not None:
                same(one, gradient)


def test_the_simple_door_keeps_a_branch() -> None:
    def f(s: torch.Tensor, x: torch.Tensor) -> Any:
        return (torch.cond(s > 0, torch.sin, torch.cos, (x,)),)

    x = torch.randn(3, requires_grad=True)
    graph = foregrad.aot_export_joint_simple(f, [torch.ones(()), x], trace_joint=True)
    for sign, derivative in ((1.0, x.cos()), (-1.0, -x.sin())):
        *_, gradient = graph([torch.tensor(sign), x.detach()], [torch.ones(3)])
        torch.testing.assert_close(gradient, derivative.detach(), rtol=0, atol=0)


def test_the_branches_are_graphs_called_as_pytorch_calls_them() -> None:
    def f(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
        def first(x: torch.Tensor) -> torch.Tensor:
            y = x + 4
            y.add_(5)
            return x.cos()

        return torch.cond(s > 0, first, lambda x: x.sin() + m.b, [x])

    graph, _ = foregrad.aot_export_module(Program(f), (torch.ones(()), torch.ones(3)), trace_joint=False)
    (node,) = graph.graph.find_nodes(op="call_function", target=COND)
    assert [str(arg) for arg in node.args[1:3]] == ["true_graph_0", "false_graph_0"]
    assert [operand.name for operand in node.args[3]] == ["arg3_1", "arg1_1"]  # the operand, then what is closed over
    first = graph.get_submodule("true_graph_0").graph
    assert [n.name for n in first.nodes] == ["arg0_1", "arg1_1", "cos", "output"]


def test_sizes_may_vary_around_a_branch() -> None:
    def f(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.cond(s > 0, lambda x: x.reshape(-1, 3) @ m.w, lambda x: x * x.shape[0], (x,)).sum()

    module = Program(f)
    graph, _ = foregrad.aot_export_module(
        module, (torch.ones(()), torch.ones(4, 3)), trace_joint=False, dynamic_shapes=True
    )
    x = torch.randn(7, 3)
    for sign in SIGNS:
        s = torch.tensor(sign)
        same(graph(module.w, module.b, s, x)[0], eager(f, s, x)[0])


def test_a_random_branch_draws_in_each_call() -> None:
    def f(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.cond(s > 0, lambda x: x + torch.rand_like(x), lambda x: x * 1, (x,))

    graph, _ = foregrad.aot_export_module(Program(f), (torch.ones(()), torch.ones(3)), trace_joint=False)
    torch.manual_seed(1)
    found = graph(torch.ones(3, 3), torch.ones(3), torch.ones(()), torch.ones(3))[0]
    torch.manual_seed(1)
    same(found, 1 + torch.rand(3))


def test_a_loop_is_one_operator() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("step", torch.tensor(2))

        def forward(self, n: torch.Tensor, x: torch.Tensor) -> Any:
            found = torch.while_loop(lambda i, x: i < n, lambda i, x: (i + self.step, x.t() * 2), (n * 0, x))
            return (found[1],)

    graph, signature = foregrad.aot_export_module(Loop(), (torch.tensor(3), torch.ones(2, 2)), trace_joint=False)
    assert signature.buffers == ["step"]
    assert [n.op for n in graph.graph.nodes].count("get_attr") == 2
    x = torch.randn(2, 2)
    for count, steps in ((0, 0), (1, 1), (5, 3)):
        (found,) = graph(torch.tensor(2), torch.tensor(count), x)
        same(found, (x.t() if steps % 2 else x) * 2**steps)


def test_a_loop_that_carries_a_tensor_twice_has_an_operand_for_each() -> None:
    def f(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.while_loop(lambda a, b: a.sum() < s, lambda a, b: (a + b, b * 1), (x, x))

    x = torch.ones(3)
    graph, _ = foregrad.aot_export_module(Program(f), (torch.tensor(10.0), x), trace_joint=False)
    first, second = graph(torch.ones(3, 3), torch.ones(3), torch.tensor(10.0), x)
    same(first, x * 4)
    same(second, x)


STEPS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "scan": lambda m, s, x: scan(lambda c, a: (c + a * m.b, c * a), s.expand(3) * 1, x),
    "several": lambda m, s, x: scan(
        lambda c, a: ({"n": c["n"] + 1, "c": a["x"] @ m.w}, (c["c"] * 1, a["y"].sum())),
        {"n": s, "c": m.b},
        {"x": x, "y": x.t()},
        dim=1,
    ),
    "reversed": lambda m, s, x: scan(lambda c, a: (c * a, c + 1), m.b, x, dim=1, reverse=True),
    "carried twice": lambda m, s, x: scan(lambda c, a: ((c[0] + a, c[1] * a), c[0] - c[1]), (m.b, m.b), x),
    "reads the whole": lambda m, s, x: scan(lambda c, a: (c + x.sum(0) * a, a * 1), m.b, x),
    "map": lambda m, s, x: map_(lambda a, w: (a.sin() @ w, a.view(1, 3) + 1), x, m.w),
    "of two": lambda m, s, x: map_(lambda a: a["p"] * a["q"] + m.b, {"p": x, "q": x.t().exp()}),
    "in a branch": lambda m, s, x: torch.cond(s > 0, lambda x: map_(lambda a: a * m.b, x), lambda x: x * 1, (x,)),
    "a branch inside": lambda m, s, x: map_(lambda a: torch.cond(a.sum() > 0, torch.sin, torch.cos, (a,)), x),
}


@pytest.mark.parametrize("name", STEPS)
def test_scan_and_map_are_one_operator_where_nothing_is_differentiated(name: str) -> None:
    """With results in the program's containers. A slice has the strides that it has in eager."""
    module, s, x = Program(STEPS[name]), torch.tensor(1.0), torch.randn(3, 3)
    graph, _ = foregrad.aot_export_module(module, (s, x), trace_joint=False)
    kept = [n for part in graph.modules() for n in part.graph.nodes if n.target in (SCAN, MAP)]
    assert len(kept) == 1
    assert len([n for n in graph.graph.nodes if n.op == "call_function"]) < 12
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(s, x))
        found = graph(module.w, module.b, s, x)
    assert [one.stride() for one in found] == [other.stride() for other in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["scan", "of two"])
def test_scan_and_map_stand_in_the_graph_as_in_pytorchs(name: str) -> None:
    """With equal groups of operands, and a graph of equal operators."""
    module, example = Program(STEPS[name]), (torch.tensor(1.0), torch.randn(3, 3))
    found, _ = foregrad.aot_export_module(module, example, trace_joint=False)
    torch._dynamo.reset()  # in later compilations PyTorch's operators have numbers of containers as operands
    with torch.no_grad():
        expected, _ = theirs(module, example, trace_joint=False)
    said = []
    for graph in (found, expected):
        (node,) = [n for n in graph.graph.nodes if n.target in (SCAN, MAP)]
        body = graph.get_submodule(node.args[0].target).graph
        groups = [(type(group).__name__, len(group)) for group in node.args[1:]]
        said.append((str(node.args[0].target), groups, [str(n.target) for n in body.nodes]))
    assert said[0] == said[1]


STEPS_OF_PARAMETERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "scan": lambda m, x: scan(lambda c, a: (c + a @ m.w, c * a), m.b, x),
    "map": lambda m, x: map_(lambda a: a.sin() @ m.w, x),
}


@pytest.mark.parametrize("function", STEPS_OF_PARAMETERS.values(), ids=STEPS_OF_PARAMETERS)
def test_steps_that_are_differentiated_are_in_the_graph(function: Callable[..., Any]) -> None:
    def loss(m: Any, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sum((r.square() * s).sum() for r in torch.utils._pytree.tree_leaves(function(m, x)))

    module, s, x = Program(loss), torch.tensor(2.0), torch.randn(3, 3)
    graph, _ = foregrad.aot_export_module(module, (s, x), trace_joint=True, output_loss_index=0)
    assert not [n for n in graph.graph.nodes if n.target in (SCAN, MAP)]
    found, gradient = graph(module.w, module.b, s, x)
    compiled = foregrad.compile(module, backend="eager")(s, x)[0]
    same(found, compiled)
    same(gradient, torch.autograd.grad(compiled, module.w)[0])


def test_the_number_of_steps_may_vary_and_random_steps_draw_in_each_call() -> None:
    def f(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
        return scan(lambda c, a: (c + a, c * a + torch.rand_like(a)), s.expand(3) * 1, x)

    module = Program(f)
    graph, _ = foregrad.aot_export_module(
        module, (torch.ones(()), torch.ones(4, 3)), trace_joint=False, dynamic_shapes=True
    )
    for steps in (2, 7):
        x = torch.randn(steps, 3)
        torch.manual_seed(1)
        found = graph(module.w, module.b, torch.ones(()), x)
        torch.manual_seed(1)
        for one, other in zip(found, f(module, torch.ones(()), x), strict=True):
            same(one, other)


class Keeps:
    """An object of the program's."""

    count = 0


KEPT = Keeps()


def writes(x: torch.Tensor) -> torch.Tensor:
    KEPT.count += 1
    return x * 2


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor, torch.Tensor], Any], str]] = {
    "if": (lambda m, s, x: torch.cond(s > 0, lambda x: x if x.sum() > 0 else -x, torch.sin, (x,)), "values in Python"),
    "write": (lambda m, s, x: torch.cond(s > 0, lambda x: x.mul_(2), torch.sin, (x * 1,)), "writes to a tensor"),
    "write to a buffer": (lambda m, s, x: torch.cond(s > 0, lambda x: m.b.add_(x), torch.sin, (x,)), "writes to a"),
    "Python": (lambda m, s, x: torch.cond(s > 0, writes, torch.sin, (x,)), "writes"),
    "shapes": (lambda m, s, x: torch.cond(s > 0, lambda x: x[:1], torch.sin, (x,)), "unlike another function's"),
    "containers": (lambda m, s, x: torch.cond(s > 0, lambda x: (x,), torch.sin, (x,)), "other containers"),
    "numbers": (lambda m, s, x: torch.cond(s > 0, lambda x: 3, torch.sin, (x,)), "more than tensors"),
    "loop": (lambda m, s, x: torch.while_loop(lambda x: x.sum() < s, lambda x: (x * 2,), (x,))[0], "while_loop"),
    "random": (lambda m, s, x: torch.cond(s > 0, lambda x: x * torch.rand_like(x), torch.sin, (x,)), "random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_no_graph_holds_is_refused_by_name(name: str) -> None:
    function, says = REFUSED[name]
    module = Program(lambda m, s, x: function(m, s, x).sum())
    example = (torch.ones(()), torch.ones(3, requires_grad=True))
    with pytest.raises(foregrad.errors.UnsupportedError, match=says):
        foregrad.aot_export_module(module, example, trace_joint=True, output_loss_index=0)


@pytest.mark.parametrize("name", ["cond", "scan", "map"])
def test_a_graph_with_the_operator_is_traced_again_on_fakes(name: str) -> None:
    """As tools that shard the graph do, within the stack."""
    kept = {**STEPS, "cond": lambda m, s, x: torch.cond(s > 0, lambda x: x @ m.w, torch.sin, (x,))}
    module, example = Program(kept[name]), (torch.ones(()), torch.ones(3, 3))
    with contextlib.ExitStack() as stack, torch.no_grad():
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, example)
        again = make_fx(torch.fx.Interpreter(jd.graph_module).run)(*jd.inputs)
    targets = [[n.target for n in g.graph.nodes if n.op == "call_function"] for g in (jd.graph_module, again)]
    assert set(targets[0]) == set(targets[1])


@pytest.mark.parametrize("function", STEPS_OF_PARAMETERS.values(), ids=STEPS_OF_PARAMETERS)
def test_steps_stand_in_a_graph_above_autograd(function: Callable[..., Any]) -> None:
    module, example = Program(lambda m, s, x: function(m, x)), (torch.tensor(1.0), torch.randn(3, 3))
    graph, _ = foregrad.aot_export_module(module, example, trace_joint=False, pre_dispatch=True)
    assert [n for n in graph.graph.nodes if n.target in (SCAN, MAP)]
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(*example))
        for one, other in zip(graph(module.w, module.b, *example), expected, strict=True):
            same(one, other)


def test_a_tensor_made_inside_is_not_used_outside() -> None:
    def f(m: Any, s: torch.Tensor, x: torch.Tensor) -> Any:
        left: list[torch.Tensor] = []

        def first(x: torch.Tensor) -> torch.Tensor:
            left.append(x.sin())
            return x.cos()

        return torch.cond(s > 0, first, torch.sin, (x,)) + left[0]

    with pytest.raises(foregrad.errors.UnsupportedError, match="made outside the capture"):
        foregrad.aot_export_module(Program(f), (torch.ones(()), torch.ones(3)), trace_joint=False)


def test_compiled_functions_still_take_the_branch_alone() -> None:
    compiled = foregrad.compile(lambda s, x: torch.cond(s > 0, torch.sin, torch.cos, (x,)), backend="eager")
    x = torch.randn(3)
    same(compiled(torch.tensor(1.0), x), x.sin())
    same(compiled(torch.tensor(-1.0), x), x.cos())
    joint = foregrad.capture(lambda s, x: torch.cond(s > 0, torch.sin, torch.cos, (x,)), torch.ones(()), x)
    assert not is_cond(joint.module)


def frees(x: torch.Tensor, y: torch.Tensor) -> Any:
    """As FSDP's graphs do with gathered parameters."""
    torch.ops.inductor.resize_storage_bytes_(y, 0)
    return (x * 2,)


class Frees(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return frees(x, y)


DOORS: dict[str, Callable[..., Any]] = {
    "aot_function": lambda *given: foregrad.aot_function(frees, foregrad.nop)(*given),
    "aot_module": lambda *given: foregrad.aot_module(Frees(), foregrad.nop)(*given),
    "aot_module_simplified": lambda *given: foregrad.aot_module_simplified(Frees(), given, foregrad.nop),
    "aot_export_module": lambda *given: foregrad.aot_export_module(Frees(), given, trace_joint=False),
    "aot_export_joint_simple": lambda *given: foregrad.aot_export_joint_simple(frees, given, trace_joint=False),
    "descriptors": lambda *given: foregrad.aot_export_joint_with_descriptors(contextlib.ExitStack(), Frees(), given),
    "capture": lambda *given: foregrad.capture(frees, *given),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_operator_that_frees_memory_is_in_exported_graphs_and_refused_elsewhere(door: str) -> None:
    given = torch.ones(3), torch.ones(3)
    if door.startswith("aot_export"):
        graph = DOORS[door](*given)
        assert given[1].untyped_storage().nbytes() == 12
        graph = graph[0] if isinstance(graph, tuple) else graph
        same(graph(*given)[0], given[0] * 2)
        assert given[1].untyped_storage().nbytes() == 0
        return
    with pytest.raises(foregrad.errors.UnsupportedOpError, match=r"resize_storage_bytes_.*in frees"):
        DOORS[door](*given)
    assert given[1].untyped_storage().nbytes() == 12


def test_memory_is_restored_before_a_write_and_refused_after_a_write_and_for_gradients() -> None:
    """PyTorch's graph of memory that is restored, filled, used and freed again ends the process when it runs."""

    class Filled(nn.Module):
        def __init__(self, *, again: bool = False) -> None:
            super().__init__()
            self.again = again

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            torch.ops.inductor.resize_storage_bytes_(y, 12)
            y.copy_(x)
            z = (y * 2).sum()
            if self.again:
                torch.ops.inductor.resize_storage_bytes_(y, 0)
            return (z,)

    x, y = torch.ones(3), torch.zeros(3)
    y.untyped_storage().resize_(0)
    graph, signature = foregrad.aot_export_module(Filled(), (x, y), trace_joint=False)
    assert signature.user_inputs_to_mutate == {"copy": "arg1_1"}
    update, result = graph(x, y)
    same(y.copy_(update), x)
    same(result, (x * 2).sum())
    with pytest.raises(foregrad.errors.UnsupportedOpError, match="resize_storage_bytes_"):
        foregrad.aot_export_module(Filled(again=True), (x, y), trace_joint=False)
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(foregrad.errors.UnsupportedOpError, match="resize_storage_bytes_"):
        foregrad.aot_export_module(Filled(), (weight, y), trace_joint=True, output_loss_index=0)


def test_memory_is_freed_where_the_call_runs_eagerly_by_name() -> None:
    import torch._inductor.inductor_prims

    def stored(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.untyped_storage().resize_(0)
        return (x * 2,)

    for function in (frees, stored):
        for compiled in (
            foregrad.compile(function, backend="eager", on_unsupported="eager"),
            torch.compile(function, backend="foregrad", options={"backend": "eager", "on_unsupported": "eager"}),
        ):
            x, y = torch.ones(3), torch.ones(3)
            with pytest.warns(foregrad.errors.ForegradWarning, match="resize_"):
                same(compiled(x, y)[0], x * 2)
            assert y.untyped_storage().nbytes() == 0


def test_freeing_memory_is_refused_by_name_at_each_door() -> None:
    class Freed(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.sin()
            y.untyped_storage().resize_(0)
            return (x * 2,)

    x = torch.ones(3)
    with pytest.raises(foregrad.errors.UnsupportedMutationError, match=r"resize_\(\)` is called at .*test_branches.py"):
        foregrad.aot_export_module(Freed(), (x,), trace_joint=False)
    with pytest.raises(foregrad.errors.UnsupportedError, match="data_ptr"):
        foregrad.capture(lambda x: x * x.untyped_storage().data_ptr(), x)
    with pytest.warns(foregrad.errors.ForegradWarning, match="resize_"):
        same(foregrad.compile(Freed(), backend="eager", on_unsupported="eager")(x)[0], x * 2)
    assert x.untyped_storage().resize_(16).nbytes() == 16
