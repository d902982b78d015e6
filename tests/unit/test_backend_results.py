"""What a backend returns is looked at: refused where it is wrong, copied where its memory is somebody else's."""

from __future__ import annotations

import dataclasses
import logging
import operator
import weakref

import pytest
import torch

import foregrad
from foregrad.backends import results as results_module
from foregrad.backends.boxed import after_first_call
from foregrad.errors import BackendError
from foregrad.graph.meta import TensorSpec
from foregrad.inductor.backend import InductorCompiler


def function(x, w):
    return {"out": torch.sin(x @ w)}


def with_outputs(change, *, phases=("forward",)):
    """A backend that runs the graph, and changes what it returns by `change(outs, inputs)`."""
    from foregrad.graph.role import role_of

    def changing(gm, example_inputs):
        phase = role_of(gm).phase

        def run(*inputs):
            outs = list(gm(*inputs))
            return change(outs, list(inputs)) if phase in phases else outs

        return run

    return changing


def replace_first(make):
    def change(outs, inputs):
        i = next(i for i, out in enumerate(outs) if isinstance(out, torch.Tensor))
        outs[i] = make(outs[i])
        return outs

    return change


def write(outs, inputs):
    next(value for value in inputs if isinstance(value, torch.Tensor)).add_(1)
    return outs


def replace(change):
    """Gives the first input other data, by `change(input)`."""

    def replacing(outs, inputs):
        value = next(value for value in inputs if isinstance(value, torch.Tensor))
        value.data = change(value)
        return outs

    return replacing


def everywhere(outs, inputs):
    return [torch.zeros(()) if out is None else out for out in outs]


REFUSED = {
    "another dtype": (replace_first(lambda out: out.double()), "dtype torch.float32", "torch.float64"),
    "a narrower dtype": (replace_first(lambda out: out.half()), "dtype torch.float32", "torch.float16"),
    "integers": (replace_first(lambda out: out.long()), "dtype torch.float32", "torch.int64"),
    "another shape": (replace_first(lambda out: out[:1]), "shape (3, 2)", "(1, 2)"),
    "another number of dimensions": (replace_first(lambda out: out.flatten()), "shape (3, 2)", "(6,)"),
    "another device": (replace_first(lambda out: out.to("meta")), "device cpu", "meta"),
    "other strides": (replace_first(lambda out: out.t().contiguous().t()), "strides (2, 1)", "(1, 3)"),
    "None": (replace_first(lambda out: None), "a tensor f32[3, 2]", "None"),
    "a list of numbers": (replace_first(lambda out: out.tolist()), "a tensor f32[3, 2]", "`list`"),
    "a number": (replace_first(lambda out: 1.5), "a tensor f32[3, 2]", "`float`"),
    "too few": (lambda outs, inputs: outs[:-1], "results, the graph has", "out["),
    "too many": (lambda outs, inputs: [*outs, outs[0]], "results, the graph has", "out["),
    "a written input": (write, "wrote to its input `args[0]`", "but the graph only reads"),
    "a resized input": (replace(lambda _: torch.zeros(7)), "resized or replaced its input `args[0]`"),
    "an input with other memory": (replace(torch.clone), "resized or replaced its input `args[0]`"),
}


def arguments():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 4, generator=generator), torch.randn(4, 2, generator=generator)
    return x, w.requires_grad_()


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_forward_is_refused(name):
    change, *said = REFUSED[name]
    with pytest.raises(BackendError) as caught:
        foregrad.compile(function, backend=with_outputs(change))(*arguments())
    message = str(caught.value)
    assert "backend `changing`" in message
    assert "forward graph of `function`" in message
    assert all(part in message for part in said), message
    if "input" not in name and "too" not in name:
        assert "`out['out']`" in message or '`out["out"]`' in message


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("other strides", "too few", "too many")])
def test_a_wrong_backward_is_refused(name):
    change, *_ = REFUSED[name]
    call = foregrad.compile(function, backend=with_outputs(change, phases=("backward",)))
    x, w = arguments()
    out = call(x, w)["out"]
    with pytest.raises(BackendError, match=r"(?s)backend `changing`.*backward graph of `function`") as caught:
        out.sum().backward()
    assert "input" in name or "gradient of args[1]" in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_graph_without_gradients_is_refused(name):
    change, *_ = REFUSED[name]
    with torch.no_grad(), pytest.raises(BackendError, match="inference graph"):
        foregrad.compile(function, backend=with_outputs(change, phases=("inference",)))(*arguments())


def test_a_gradient_that_eager_does_not_give_is_refused():
    call = foregrad.compile(function, backend=with_outputs(everywhere, phases=("backward",)))
    with pytest.raises(BackendError, match=r"(?s)`gradient of args\[0\]`.*expected: None"):
        call(*arguments())["out"].sum().backward()


def test_a_wrong_backward_is_refused_under_torch_compile():
    torch._dynamo.reset()
    compiler = with_outputs(REFUSED["another shape"][0], phases=("backward",))
    backend = foregrad.aot_autograd(fw_compiler=foregrad.nop, bw_compiler=compiler)
    out = torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3, 2, requires_grad=True))
    with pytest.raises(BackendError, match="backend `changing`"):
        out.sum().backward()
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------- memory


def simplified(gm, example_inputs):
    """Returns its input where the graph returns a copy."""
    return lambda x: [x]


def viewing(gm, example_inputs):
    return lambda x: [x[:].view(-1).view(3)]


def cached(gm, example_inputs):
    memory = torch.empty(3)

    def run(x):
        return [torch.mul(x, 1, out=memory)]

    return run


def twice(gm, example_inputs):
    def run(x):
        out = x * 2
        return [out, out[1:]]

    return run


ALIASES = {
    "its input": (lambda x: x * 1, simplified),
    "a view of its input": (lambda x: x * 1, viewing),
    "what it keeps": (lambda x: x * 1, cached),
    "one memory for two": (lambda x: (x * 2, x[1:] * 2), twice),
}


@pytest.mark.parametrize("name", ALIASES)
def test_memory_of_others_is_copied_in_each_call(name, caplog):
    fn, backend = ALIASES[name]
    with foregrad.config.override(check=False):
        call = foregrad.compile(fn, backend=backend)
    kept = []
    with caplog.at_level(logging.WARNING, "foregrad"):
        for i in range(3):
            x = torch.full((3,), float(i))
            outs = call(x)
            for out in outs if isinstance(outs, tuple) else (outs,):
                kept.append((out, out + 1))
                out.add_(1)
            assert torch.equal(x, torch.full((3,), float(i)))
    assert all(torch.equal(out, expected) for out, expected in kept)
    if name == "what it keeps":  # which may be right: a backend may list what it returns
        assert not caplog.text
        return
    assert caplog.text.count("it is copied in each call") == 1
    assert f"backend `{backend.__name__}`" in caplog.text


@pytest.mark.parametrize("name", [name for name in ALIASES if name != "what it keeps"])
def test_memory_of_others_is_an_error_where_all_is_checked(name):
    fn, backend = ALIASES[name]
    with foregrad.config.override(check=True), pytest.raises(BackendError, match=r"in memory that is .*not its own"):
        foregrad.compile(fn, backend=backend)(torch.ones(3))


def test_a_gradient_in_the_memory_of_the_tangent_is_copied():
    def fn(x):
        return x * torch.ones(3)

    def passing(gm, example_inputs):
        return lambda *values: [values[-1]]

    with foregrad.config.override(check=False):
        call = foregrad.compile(fn, backend=(foregrad.nop, passing))
    for _ in range(3):
        x, tangent = torch.ones(3, requires_grad=True), torch.ones(3)
        (gradient,) = torch.autograd.grad(call(x), x, tangent)
        gradient.add_(1)
        assert torch.equal(tangent, torch.ones(3))


def test_what_the_graph_makes_a_view_may_be_one():
    def fn(x):
        y = x.sin()
        return y, y.t(), y.view(-1), x.t()

    with foregrad.config.override(check=True):
        call = foregrad.compile(fn, backend=lambda gm, inputs: gm.forward)
        for requires_grad in (False, True):
            x = torch.randn(3, 4, requires_grad=requires_grad)
            assert all(map(torch.equal, call(x), fn(x)))


# ----------------------------------------------------------------------------------------------------- its cost


def test_only_the_first_call_is_looked_at(monkeypatch):
    looked, original = [], results_module.Contract.first_call
    monkeypatch.setattr(results_module.Contract, "first_call", lambda *args: (looked.append(1), original(*args))[1])

    def backend(gm, example_inputs):
        return lambda *inputs: gm(*inputs)

    for check, count in ((False, 1), (True, 3)):
        with foregrad.config.override(check=check):
            call = foregrad.compile(lambda x: x.sin(), backend=backend)
            looked.clear()
            for _ in range(3):
                call(torch.ones(3))
            assert len(looked) == count


def test_a_graph_module_runs_as_ever_after_its_first_call():
    def run(args):
        return list(args)

    run._boxed_call = run.returns_list = True
    run.source = lambda: "the text"
    calls = []

    def first_call(function, args):
        calls.append(len(args))
        return function(args), function if len(calls) > 1 else None

    stand_in = after_first_call(run, first_call)
    assert [stand_in([1, 2]), stand_in([3]), stand_in([4])] == [[1, 2], [3], [4]]
    assert calls == [2, 1]
    assert stand_in.__code__ is run.__code__
    assert stand_in.source() == "the text"


def test_inputs_are_let_go_in_the_first_call():
    joint = foregrad.capture(lambda x: x.sin(), torch.ones(3))
    contract = results_module.Contract(
        "mine", "a graph", results_module.promised(joint.module, ["out", "gradient"], (0,), 1), ["x"]
    )

    def run(args):
        reference = weakref.ref(args[0])
        out = [args[0].sin(), None]
        args.clear()
        assert reference() is None
        return out

    out, later = contract.first_call(run, [torch.ones(3)])
    assert torch.equal(out[0], torch.ones(3).sin())
    assert later is run


def test_a_seed_may_stay_on_the_cpu():
    """Attention on a GPU keeps the numbers that it draws from on the CPU, where its fake kernel says the GPU."""
    gpu = torch.device("cuda")
    seed = results_module.PromisedResult(
        "seed", object(), TensorSpec((), (), torch.int64, gpu), None, False, False, False, True
    )

    def run(result, value):
        contract = results_module.Contract("inductor", "the forward graph", [result], [], is_own=True)
        return contract.first_call(lambda values: [value], [])[0]

    assert run(seed, torch.tensor(3)) == [3]
    with pytest.raises(BackendError, match="cuda"):  # as a result of the function
        run(dataclasses.replace(seed, is_kept=False, is_handed_out=True), torch.tensor(3))
    with pytest.raises(BackendError, match="cuda"):
        run(dataclasses.replace(seed, spec=TensorSpec((1,), (1,), torch.int64, gpu)), torch.tensor([3]))
    graph = torch.fx.Graph()
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, ())
    part = graph.call_function(operator.getitem, (attention, 6))  # a result of a part of a graph
    run(dataclasses.replace(seed, node=part, is_kept=False, is_handed_out=True), torch.tensor(3))


def test_our_own_compilers_make_no_remark(caplog):
    def fn(x):
        return x * torch.ones(3), x + 0

    with caplog.at_level(logging.WARNING, "foregrad"):
        for backend in ("eager", "interpreter", "nop", "torch:eager", InductorCompiler()):
            foregrad.compile(fn, backend=backend)(torch.ones(3))
    assert not [record for record in caplog.records if record.name.startswith("foregrad")]  # PyTorch's may speak
