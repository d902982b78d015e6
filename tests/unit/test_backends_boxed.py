"""The calling convention: one list in, emptied; a list out; nobody in between holds an argument."""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import os
import sys
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from foregrad.backends.boxed import as_boxed, call_boxed, is_boxed, make_boxed_compiler, make_boxed_func, nop
from foregrad.errors import BackendError
from tests import forked

before_3_11 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before 3.11 the interpreter keeps the arguments of every call on its stack"
)


def arguments_are_moved():
    """Whether a function called here can free its arguments; nothing of ours is asked.

    An error inside of torch.compile leaves Dynamo's hook in the interpreter, which from then on keeps the arguments
    of every call until it returns.
    """
    states = []

    def f(a):
        del a
        states.append(ref() is None)

    value, ref = watched()
    args = [value]
    del value
    f(args.pop())
    return states == [True]


NEW = "FOREGRAD_TESTS_NEW_INTERPRETER"


def needs_moved_arguments(test):
    """Run a test in another interpreter where this one keeps arguments alive, whoever calls."""

    @functools.wraps(test)
    def run(request, **arguments):
        if arguments_are_moved() or NEW in os.environ:
            test(**arguments)
            return
        test_here = f"{__file__}::{request.node.name}"
        done = forked.run("pytest", "-q", "-p", "no:cacheprovider", test_here, **{NEW: "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 passed" in done.stdout

    taken = inspect.signature(test).parameters.values()
    own = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*(p.replace(kind=own.kind) for p in taken), own])
    return before_3_11(run)


def graph(f, *args) -> torch.fx.GraphModule:
    return make_fx(f)(*args)


def two_sins(x, y):
    return torch.sin(x), torch.sin(y)


class Watched:
    """An argument whose death can be seen."""


def watched():
    value = Watched()
    return value, weakref.ref(value)


def test_nop_returns_the_graph():
    gm = graph(torch.sin, torch.ones(2))
    assert nop(gm, []) is gm


def test_make_boxed_func_passes_the_items_in_order_and_returns_what_f_returns():
    boxed = make_boxed_func(lambda *args: args)
    assert boxed._boxed_call is True
    for count in (0, 1, 2, 300):
        args = list(range(count))
        assert boxed(args) == tuple(range(count))
        assert args == []


@needs_moved_arguments
def test_make_boxed_func_lets_f_free_its_arguments():
    states = []

    def f(a, b):
        del a
        states.append((first() is None, second() is None))
        del b
        states.append((first() is None, second() is None))

    a, first = watched()
    b, second = watched()
    args = [a, b]
    del a, b
    make_boxed_func(f)(args)
    assert states == [(True, False), (True, True)]


@pytest.mark.parametrize("take", [lambda gm: gm, lambda gm: gm.forward])
def test_make_boxed_func_of_a_graph_frees_as_the_graph_goes(take):
    died = []

    def look(x):
        died.append(ref() is None)
        return x

    g = torch.fx.Graph()
    x = g.placeholder("x")
    y = g.call_function(torch.sin, (x,))
    g.output((g.call_function(look, (y,)),))
    gm = torch.fx.GraphModule({}, g)
    value = torch.ones(2)
    ref = weakref.ref(value)
    args = [value]
    del value
    out = make_boxed_func(take(gm))(args)
    assert died == [True]
    assert type(out) is tuple


def test_make_boxed_compiler_wraps_what_the_compiler_returns():
    def compiler(fx_g, inps):
        return fx_g.forward

    x, y = torch.randn(2), torch.randn(2)
    gm = graph(two_sins, x, y)
    boxed = make_boxed_compiler(compiler)(gm, [x, y])
    assert is_boxed(boxed)
    out = boxed([x, y])
    assert torch.equal(out[0], x.sin())
    assert torch.equal(out[1], y.sin())


def test_as_boxed_keeps_what_already_fits():
    boxed = as_boxed(graph(two_sins, torch.ones(1), torch.ones(1)))
    assert as_boxed(boxed) is boxed
    again = as_boxed(lambda x: [x])
    assert as_boxed(again) is again


Out = collections.namedtuple("Out", "a b")


@pytest.mark.parametrize(
    ("result", "want"),
    [([1, 2], [1, 2]), ((1, 2), [1, 2]), (Out(1, 2), [1, 2]), (3, [3]), (2.5, [2.5]), (None, [None]), ((), [])],
)
@pytest.mark.parametrize("boxed", [True, False])
def test_as_boxed_makes_a_list_of_the_result(result, want, boxed):
    def fn(*args):
        if boxed:
            (args,) = args
        assert list(args) == ["x", "y"]
        return result

    fn._boxed_call = boxed
    args = ["x", "y"]
    out = as_boxed(fn)(args)
    assert type(out) is list
    assert out == want
    assert call_boxed(fn, ["x", "y"]) == want


def test_one_tensor_becomes_a_list_of_it():
    x = torch.ones(2)
    assert as_boxed(lambda x: x)([x])[0] is x
    assert call_boxed(lambda x: x, [x])[0] is x


@needs_moved_arguments
@pytest.mark.parametrize("run", [lambda f, args: as_boxed(f)(args), call_boxed])
def test_no_frame_of_ours_holds_an_argument(run):
    states = []

    def f(a):
        del a
        states.append(ref() is None)
        return ()

    value, ref = watched()
    args = [value]
    del value
    run(f, args)
    assert states == [True]


def test_an_untouched_graph_module_runs_as_generated_source():
    x, y = torch.randn(2), torch.randn(2)
    gm = graph(two_sins, x, y)
    boxed = as_boxed(gm)
    assert "torch_sin(" in boxed.source()
    args = [x, y]
    assert [torch.equal(a, b) for a, b in zip(boxed(args), gm(x, y), strict=True)] == [True, True]
    assert args == []


def with_hook(gm):
    gm.register_forward_hook(lambda module, args, out: tuple(value + 1 for value in out))


def with_pre_hook(gm):
    gm.register_forward_pre_hook(lambda module, args: tuple(value + 1 for value in args))


def with_forward(gm):
    gm.forward = lambda x, y: (y, x)


def with_codegen(gm):
    gm.graph.set_codegen(Swapped())
    gm.recompile()


class Swapped(torch.fx.graph.CodeGen):
    def gen_fn_def(self, free_vars, maybe_return_annotation):
        return super().gen_fn_def(list(reversed(free_vars)), maybe_return_annotation)


def with_transformer(gm):
    gm.graph.on_generate_code(lambda old: lambda body: [*body[:-1], body[-1].replace("return", "return (1,) +")])
    gm.recompile()


@pytest.mark.parametrize("touch", [with_hook, with_pre_hook, with_forward, with_codegen, with_transformer])
def test_a_touched_graph_module_is_called_as_it_is(touch):
    x, y = torch.randn(2), torch.randn(2)
    gm = graph(two_sins, x, y)
    touch(gm)
    want = gm(x, y)
    for got in (as_boxed(gm)([x, y]), call_boxed(gm, [x, y]), make_boxed_func(gm)([x, y])):
        assert len(got) == len(want)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, want, strict=True))


def test_a_global_hook_counts_as_a_touch():
    gm = graph(two_sins, torch.ones(1), torch.ones(1))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: (7, 7))
    try:
        assert as_boxed(gm)([torch.ones(1), torch.ones(1)]) == [7, 7]
    finally:
        handle.remove()


def test_a_subclass_of_graph_module_is_called_as_it_is():
    class Doubled(torch.fx.GraphModule):
        def __call__(self, *args):
            return [2 * value for value in super().__call__(*args)]

    x, y = torch.randn(2), torch.randn(2)
    gm = Doubled({}, graph(two_sins, x, y).graph)
    assert torch.equal(as_boxed(gm)([x, y])[0], 2 * x.sin())


def test_defaults_of_placeholders_are_left_to_the_module():
    g = torch.fx.Graph()
    g.output((g.placeholder("x"), g.placeholder("y", default_value=5)))
    gm = torch.fx.GraphModule({}, g)
    assert as_boxed(gm)([1]) == [1, 5]


def test_errors_name_backend_and_graph():
    with pytest.raises(BackendError, match=r"backend `fast` returned an object of type `int` for the forward of step"):
        as_boxed(3, backend="fast", graph="forward of step")
    with pytest.raises(BackendError, match="returned None for the graph"):
        as_boxed(None)
    with pytest.raises(BackendError, match=r"backend `fast` compiled the backward .* type `dict`"):
        as_boxed(dict, backend="fast", graph="backward")([])


def test_a_graph_module_is_written_when_first_run():
    gm = graph(two_sins, torch.ones(1), torch.ones(1))
    boxed = as_boxed(gm)
    stub = boxed.__code__
    first, second = (boxed([torch.ones(1), torch.ones(1)]) for _ in range(2))
    assert boxed.__code__ is not stub, "later calls go straight to the graph's own code"
    assert all(map(torch.equal, first, second))
    assert "sin" in boxed.source()


def test_the_source_of_a_graph_is_there_before_it_runs_and_after_it_is_gone():
    gm = graph(two_sins, torch.ones(1), torch.ones(1))
    assert "sin" in as_boxed(gm).source()  # the function itself dies before the call
    boxed = as_boxed(gm)
    assert boxed.source() == as_boxed(gm).source()
    assert len(boxed([torch.ones(1), torch.ones(1)])) == len(as_boxed(gm)([torch.ones(1), torch.ones(1)]))


@pytest.mark.parametrize("is_run", [False, True])
def test_a_dropped_graph_leaves_no_cycle(is_run):
    boxed = as_boxed(graph(two_sins, torch.ones(1), torch.ones(1)))
    if is_run:
        boxed([torch.ones(1), torch.ones(1)])
    gone = weakref.ref(boxed)
    gc.disable()
    try:
        del boxed
        assert gone() is None
    finally:
        gc.enable()
