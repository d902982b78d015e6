"""Calls through the C++ part and through Python: each test runs with both, against eager.

tests/conftest.py does the same with the tests of some other files.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad import config
from foregrad._torch.native import native

D = torch.float64


@pytest.fixture(params=[True, False], ids=["native", "python"], autouse=True)
def way(request):
    if request.param and native() is None:
        pytest.skip("the C++ part was not built")
    with config.override(native=request.param):
        yield request.param


def tensors():
    return torch.randn(3, 4, dtype=D), *(torch.randn(*s, dtype=D, requires_grad=True) for s in ((4, 4), (4,)))


def layer(x, w, b):
    return torch.sin(x @ w + b)


def pair(x, w, b):
    y = x @ w
    return y.exp(), (y + b).tanh()


def compiled_pair(function, *args, **options):
    """(eager, compiled), the latter having been called once."""
    compiled = foregrad.compile(function, backend="eager", **options)
    compiled(*args)
    return function, compiled


def test_the_node_looks_as_that_of_a_function_does(way):
    x, w, b = tensors()
    y = foregrad.compile(layer, backend="eager")(x, w, b)
    node = y.grad_fn
    assert node.name() == type(node).__name__ == "CompiledFunctionBackward"
    assert isinstance(node, torch.autograd.graph.Node)
    assert {id(n.variable) for n, _ in node.next_functions} == {id(w), id(b)}
    assert len(node.next_functions) == 2
    assert node.needs_input_grad[-2:] == (True, True)
    assert all(isinstance(t, torch.Tensor) for t in node.saved_tensors)
    y.grad_fn.metadata["mine"] = 1
    assert y.grad_fn.metadata["mine"] == 1
    assert torch.autograd.graph.get_gradient_edge(y).node is y.grad_fn


def test_one_output_without_gradient_among_others():
    def function(x, w):
        return (x @ w).sum(0), x + 1, w * 2

    x, w, _ = tensors()
    for run in compiled_pair(function, x, w):
        outs = run(x, w)
        assert [o.requires_grad for o in outs] == [True, False, True]
        grads = torch.autograd.grad([outs[0].sum(), outs[2].sum()], w)
        assert torch.equal(grads[0], x.sum(0)[:, None].expand(4, 4) + 2)


def test_hooks_on_the_node_run_as_on_any_other():
    seen = []
    x, w, b = tensors()
    for run in compiled_pair(layer, x, w, b):
        y = run(x, w, b)
        handles = [
            y.grad_fn.register_prehook(lambda grads: seen.append("before") or tuple(g * 2 for g in grads)),
            y.grad_fn.register_hook(lambda grads, _: seen.append("after") or None),
        ]
        seen.append(torch.autograd.grad(y.sum(), w, retain_graph=True)[0])
        for handle in handles:
            handle.remove()
        seen.append(torch.autograd.grad(y.sum(), w)[0])
    eager, compiled = seen[:4], seen[4:]
    assert eager[:2] == compiled[:2] == ["before", "after"]
    assert torch.equal(eager[3], compiled[3])
    assert torch.equal(compiled[2], 2 * compiled[3])


def test_hooks_of_tensors_and_of_accumulated_gradients():
    seen = []
    x, w, b = tensors()
    w.register_hook(lambda grad: seen.append("tensor"))
    w.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    for run in compiled_pair(layer, x, w, b):
        w.grad = None
        y = run(x, w, b)
        y.register_hook(lambda grad: grad * 3)
        y.retain_grad()
        y.sum().backward()
        seen.append(y.grad)
    assert seen[0] == seen[3] == "tensor"
    assert torch.equal(seen[1], seen[4])
    assert torch.equal(seen[2], seen[5])


def test_hooks_of_saved_tensors_see_each_and_may_replace_it():
    x, w, b = tensors()
    _, compiled = compiled_pair(layer, x, w, b)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or len(kept) - 1, lambda _: None):
        y = compiled(x, w, b)
    assert len(kept) == len(y.grad_fn._raw_saved_tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        y = compiled(x, w, b)
    expected = torch.autograd.grad(layer(x, w, b).sum(), [w, b])
    for ours, theirs in zip(torch.autograd.grad(y.sum(), [w, b]), expected, strict=True):
        assert torch.allclose(ours, theirs)
    with torch.autograd.graph.save_on_cpu():
        y = compiled(x, w, b)
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], expected[0])


def test_hooks_on_one_saved_tensor():
    x, w, b = tensors()
    _, compiled = compiled_pair(layer, x, w, b)
    y = compiled(x, w, b)
    for raw in y.grad_fn._raw_saved_tensors:
        raw.register_hooks(lambda t: t.clone(), lambda t: torch.zeros_like(t))
    (grad,) = torch.autograd.grad(y.sum(), w)
    assert torch.count_nonzero(grad) == 0


def test_a_second_backward_needs_the_graph_to_be_kept():
    x, w, b = tensors()
    for run in compiled_pair(layer, x, w, b):
        y = run(x, w, b)
        first = torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(y.sum(), w)[0], first)
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            torch.autograd.grad(y.sum(), w)
        with pytest.raises(RuntimeError, match="already been freed"):
            _ = y.grad_fn.saved_tensors if run is not layer else y.grad_fn._saved_self


def test_saved_tensors_written_to_are_noticed():
    x, w, b = tensors()
    for run in compiled_pair(layer, x, w, b):
        y = run(x, w, b)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), w)


def test_missing_and_oddly_laid_out_tangents():
    x, w, b = tensors()
    results = []
    for run in compiled_pair(pair, x, w, b):
        found = []
        for used in ([0], [1], [0, 1]):
            outs = run(x, w, b)
            seeds = [torch.linspace(0, 1, 12, dtype=D).reshape(4, 3).T for _ in used]
            found += torch.autograd.grad([outs[i] for i in used], [w, b], seeds, allow_unused=True)
        results.append(found)
    for theirs, ours in zip(*results, strict=True):
        assert (theirs is None and ours is None) or torch.equal(theirs, ours)


def test_gradients_of_gradients():
    x, w, b = tensors()
    results = []
    for run in compiled_pair(layer, x, w, b):
        first = torch.autograd.grad(run(x, w, b).sum(), [w, b], create_graph=True)
        results.append(torch.autograd.grad(sum((g * g).sum() for g in first), [w, b]))
    for theirs, ours in zip(*results, strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-12)


def test_symbolic_sizes_are_kept_beside_the_tensors():
    def function(x, w):
        return (x @ w).sum(0) / x.shape[0]

    _, w, _ = tensors()
    compiled = foregrad.compile(function, backend="eager", dynamic=True)
    for rows in (5, 7, 1, 9):
        x = torch.randn(rows, 4, dtype=D)
        ours, theirs = (torch.autograd.grad(run(x, w).sum(), w)[0] for run in (compiled, function))
        assert torch.allclose(ours, theirs)


def test_autocast_during_the_backward_changes_nothing():
    x, w, b = (t.detach().float().requires_grad_(t.requires_grad) for t in tensors())
    _, compiled = compiled_pair(layer, x, w, b)
    y = compiled(x, w, b)
    (plain,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (under,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(plain, under)
    assert under.dtype == torch.float32


def boxed(run):
    run._boxed_call = True
    return run


def plain(gm, inputs):
    return foregrad.make_boxed_func(gm)


def test_anomaly_mode_remembers_the_forward_call():
    def broken(gm, inputs):
        def run(args):
            raise ValueError("broken backward")

        return boxed(run)

    x, w, b = tensors()
    compiled = foregrad.aot_function(layer, plain, broken)
    told = pytest.warns(UserWarning, match=r"Anomaly Detection|forward call")
    with told, torch.autograd.detect_anomaly(check_nan=False):
        y = compiled(x, w, b)
        with pytest.raises(ValueError, match="broken backward"):
            y.sum().backward()
    assert "traceback_" in y.grad_fn.metadata


def test_errors_of_the_graphs_come_through_and_leave_nothing_behind():
    broken = []

    def backend(gm, inputs):
        graph = foregrad.make_boxed_func(gm)

        def run(args):
            if broken:
                raise KeyError("broken forward")
            return graph(args)

        return boxed(run)

    x, w, b = tensors()
    compiled = foregrad.aot_function(layer, backend)
    expected = compiled(x, w, b)
    broken.append(1)
    with pytest.raises(KeyError, match="broken forward"):
        compiled(x, w, b)
    assert torch.is_grad_enabled()
    broken.clear()
    assert torch.equal(compiled(x, w, b), expected)


@pytest.mark.parametrize("late", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_a_graph_that_returns_too_little_is_an_error(graph, late):
    def backend(which):
        def compiler(gm, inputs):
            run, whole = foregrad.make_boxed_func(gm), [late, late]
            cut = boxed(lambda args: run(args)[: 3 if whole and whole.pop() else 1])
            return cut if which == graph else run

        return compiler

    x, w, b = tensors()
    with foregrad.config.override(check=False):
        compiled = foregrad.aot_function(layer, backend("forward"), backend("backward"))
        for _ in range(2 * late):  # results in memory that an input had are looked at in the second call too
            compiled(x, w, b).sum().backward()
        error = ValueError if late else foregrad.errors.BackendError
        with pytest.raises(error, match=r"values|gradients|returned 1 results, the graph has 3"):
            compiled(x, w, b).sum().backward()


def test_a_backend_that_returns_an_input_as_it_is():
    """It stays the user's leaf; what comes out is a copy, as eager's would be, with a history."""

    def returns_input(gm, inputs):
        def run(args):
            return [args[0]]

        return boxed(run)

    x = torch.ones(3, dtype=D, requires_grad=True)
    with foregrad.config.override(check=False):
        y = foregrad.aot_function(lambda x: x * 1.0, returns_input, plain)(x)
    assert y is not x
    assert y.data_ptr() != x.data_ptr()
    assert y.grad_fn.name() == "CompiledFunctionBackward"
    assert x.is_leaf
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_views_returned_by_a_backend_are_connected():
    def backend(gm, inputs):
        run = foregrad.make_boxed_func(gm)

        def as_views(args):
            outs = run(args)
            return [outs[0].view(outs[0].shape), *outs[1:]]

        return boxed(as_views)

    x, w, b = tensors()
    y = foregrad.aot_function(layer, backend, plain)(x, w, b)
    expected = torch.autograd.grad(layer(x, w, b).sum(), w)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], expected)


def test_saved_tensors_belong_to_the_backward_graph_alone():
    """Taken out of the list, they are gone, though autograd's node is still at work."""
    alive = []

    def backward(gm, inputs):
        def run(args):
            saved = [weakref.ref(a) for a in args[:-1]]
            shapes = [tuple(a.shape) for a in args[:-1]]
            args.clear()
            alive.append([shape for shape, r in zip(shapes, saved, strict=True) if r() is not None])
            return [None, torch.zeros(4, 4, dtype=D)]

        return boxed(run)

    def function(x, w):
        y = (x @ w).exp()
        return (y * y).sum()

    w = torch.randn(4, 4, dtype=D, requires_grad=True)
    foregrad.aot_function(function, plain, backward)(torch.randn(3, 4, dtype=D), w).backward()
    assert alive == [[]]


def test_a_compiled_function_can_be_collected():
    def function(x, w):
        return (x @ w).sum()

    x, w, _ = tensors()
    compiled = foregrad.compile(function, backend="eager")
    compiled(x, w).backward()
    gone = weakref.ref(compiled.foregrad.specializations[0].product.compiled.partitioned.joint.graph)
    del compiled, function
    gc.collect()
    assert gone() is None


def test_many_threads_at_once():
    torch.manual_seed(0)
    x, w, b = tensors()
    compiled = foregrad.compile(pair, backend="eager")
    expected = [torch.autograd.grad(o.sum(), w, retain_graph=True)[0] for o in pair(x, w, b)]
    faults = []

    def work():
        try:
            for _ in range(50):
                for i, wanted in enumerate(expected):
                    out = compiled(x, w, b)[i]
                    if not torch.equal(torch.autograd.grad(out.sum(), w)[0], wanted):
                        raise AssertionError("another gradient")
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_one_backward_from_many_threads():
    """With the graph kept, threads may share a node."""
    x, w, b = tensors()
    y = foregrad.compile(layer, backend="eager")(x, w, b)
    expected = torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(torch.autograd.grad(y.sum(), w, retain_graph=True)[0]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(g, expected) for g in found)


def test_a_long_chain_of_calls_is_freed_without_deep_recursion():
    compiled = foregrad.compile(lambda x: x * 1.0001, backend="eager")
    x = torch.ones(2, dtype=D, requires_grad=True)
    compiled(x)
    done = []

    def chain():
        y = x
        for _ in range(4_000):
            y = compiled(y)
        del y
        done.append(True)

    # From 3.13 on, eager's own nodes written in Python are freed each inside the one before.
    is_deep = sys.version_info >= (3, 13) and not config.native
    before = threading.stack_size((8 * 1024 if is_deep else 512) * 1024)
    try:
        thread = threading.Thread(target=chain)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert done


def resident_pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_memory_does_not_grow_with_the_number_of_calls():
    try:
        resident_pages()
    except OSError:
        pytest.skip("no /proc here")
    model = nn.Linear(4, 4)
    compiled = foregrad.compile(model, backend="eager")
    x = torch.randn(2, 4)

    def steps(count):
        for i in range(count):
            y = compiled(x)
            if i % 3 == 0:
                y.sum().backward(retain_graph=i % 2 == 0)
            if i % 100 == 0:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                    torch.autograd.grad(compiled(x).sum(), model.weight, create_graph=True)

    steps(2_000)
    gc.collect()
    before = resident_pages()
    steps(6_000)
    gc.collect()
    assert resident_pages() - before < 256, "a page for each call would be 6000"


def test_the_profiler_sees_both_directions():
    x, w, b = tensors()
    _, compiled = compiled_pair(layer, x, w, b)
    with torch.autograd.profiler.profile() as profile:
        compiled(x, w, b).sum().backward()
    names = {event.name for event in profile.function_events}
    assert "CompiledFunction" in names
    assert "CompiledFunctionBackward" in names
