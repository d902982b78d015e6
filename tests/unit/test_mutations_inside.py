"""`keep_inference_input_mutations`: writes to inputs as operators of the graph."""

import torch

from foregrad import aot_function, make_boxed_func


def compiled(function, seen, keep):
    def compiler(module, example_inputs):
        seen.append(module)
        return make_boxed_func(module.forward)

    return aot_function(function, fw_compiler=compiler, keep_inference_input_mutations=keep)


def copies(module):
    return [n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default]


def two_writes(x, y):
    x.mul_(2)
    y.t_()
    y.add_(x.sum())
    return x + 1


def test_the_graph_writes_where_it_may_and_the_runtime_does_the_rest():
    seen = []
    f = compiled(two_writes, seen, keep=True)
    for _ in range(2):
        x, y = torch.randn(3), torch.randn(2, 3)
        x2, y2 = x.clone(), y.clone()
        versions = x._version, y._version
        assert torch.equal(f(x, y), two_writes(x2, y2))
        assert torch.equal(x, x2) and torch.equal(y, y2)
        assert x._version > versions[0] and y._version > versions[1]
    assert len(seen) == 1
    assert [n.args[0].name for n in copies(seen[0])] == ["arg0_1"]  # y's sizes change too


def test_without_it_the_graph_is_functional():
    seen = []
    compiled(two_writes, seen, keep=False)(torch.randn(3), torch.randn(2, 3))
    assert copies(seen[0]) == []


def test_an_output_that_is_the_written_input_stays_that_object():
    seen = []
    f = compiled(lambda x: x.add_(1), seen, keep=True)
    x = torch.zeros(3)
    assert f(x) is x
    assert torch.equal(x, torch.ones(3))
    assert len(copies(seen[0])) == 1


def test_with_gradients_nothing_is_written_inside():
    seen = []
    f = compiled(lambda x, w: x.mul_(2) * w, seen, keep=True)
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    f(x, w).sum().backward()
    assert torch.equal(x, torch.full((3,), 2.0))
    assert torch.equal(w.grad, torch.full((3,), 2.0))
    assert copies(seen[0]) == []


def test_a_leaf_that_requires_grad_is_written_under_no_grad():
    seen = []

    def scale(w):
        with torch.no_grad():
            w.mul_(3)

    w = torch.ones(3, requires_grad=True)
    compiled(scale, seen, keep=True)(w)
    assert len(copies(seen[0])) == 1
    assert torch.equal(w, torch.full((3,), 3.0))


def test_a_write_counts_for_all_inputs_in_that_memory():
    """The second input's version moves with the first's: no hidden write of the graph."""

    def function(x, y):
        x.add_(1)
        return x + y

    found = []
    for run in (function, compiled(function, [], keep=True)):
        memory = torch.zeros(4)
        found.append((run(memory[:2], memory[1:3]).tolist(), memory.tolist()))
    assert found[0] == found[1]
