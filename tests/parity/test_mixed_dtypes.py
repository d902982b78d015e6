"""Operators of operands of several dtypes, as models under autocast have: what the graph says is what the kernels give."""

import pytest
import torch
import torch.nn.functional as F

import foregrad
from tests.covering import each, shared
from tests.dynamo.installed import make_known

HALF = [torch.bfloat16, torch.float16]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def batch_norm(training):
    return lambda x, w, b: F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 1, w, b, training)


def of_channels_last(function):
    return lambda x, w, b: function(x.contiguous(memory_format=torch.channels_last), w, b)


NORMALISATIONS = {
    "layer": lambda x, w, b: F.layer_norm(x.transpose(1, 3), (4,), w, b),
    "layer, weight alone": lambda x, w, b: F.layer_norm(x.transpose(1, 3), (4,), w),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "group, channels last": of_channels_last(lambda x, w, b: F.group_norm(x, 2, w, b)),
    "batch": batch_norm(True),
    "batch, channels last": of_channels_last(batch_norm(True)),
    "batch, eval": batch_norm(False),
    "batch, eval, channels last": of_channels_last(batch_norm(False)),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "native layer": lambda x, w, b: torch.native_layer_norm(x.transpose(1, 3), (4,), w, b, 1e-5),
    "native group": lambda x, w, b: torch.native_group_norm(x, w, b, 3, 4, 10, 2, 1e-5),
    "native batch": lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    "native batch, eval": lambda x, w, b: torch.native_batch_norm(x, w, b, b.detach(), b.detach(), False, 0.1, 1e-5),
}


def outcome(function, args):
    """Results and gradients; incoming gradients are laid out like the results."""
    args = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    results = function(*args)
    results = results if isinstance(results, tuple) else (results,)
    first = results[0]
    torch.manual_seed(1)
    incoming = torch.randn_like(first)
    inputs = [arg for arg in args if arg.requires_grad]
    return *results, *torch.autograd.grad(first, inputs, incoming, allow_unused=True)


def check(function, args):
    eager = outcome(function, args)
    make_known()
    torch._dynamo.reset()
    doors = (
        foregrad.aot_function(function, foregrad.nop),
        foregrad.compile(function, backend="eager", on_unsupported="raise"),
        foregrad.compile(function, backend=foregrad.nop, dynamic=True, on_unsupported="raise"),
        torch.compile(function, backend="foregrad", options={"backend": "eager"}),
    )
    for door in doors:
        for a, b in zip(eager, outcome(door, args), strict=True):
            assert (a is None) is (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, check_stride=True)


@pytest.mark.parametrize(("name", "dtype"), each(NORMALISATIONS, HALF))
def test_the_statistics_of_a_half_input_have_the_dtype_of_the_parameters(name, dtype):
    check(NORMALISATIONS[name], (leaf(3, 4, 5, 2, dtype=dtype), leaf(4), leaf(4)))


@pytest.mark.parametrize("name", shared(NORMALISATIONS, 0, 2))
def test_the_statistics_are_half_beside_half_parameters(name):
    check(NORMALISATIONS[name], (leaf(3, 4, 5, 2, dtype=torch.bfloat16), *(leaf(4, dtype=torch.bfloat16),) * 2))


def test_a_model_under_autocast_is_compiled_by_a_compiler_of_others():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Unflatten(1, (4, 2)),
        torch.nn.GroupNorm(2, 4), torch.nn.Conv1d(4, 4, 1), torch.nn.BatchNorm1d(4),
    )  # fmt: skip

    def step(x, *parameters):
        given = dict(zip(dict(model.named_parameters()), parameters, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(model, given, (x,))

    check(step, (torch.randn(3, 8), *model.parameters()))
    model.eval()
    check(step, (torch.randn(3, 8), *model.parameters()))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_what_a_bag_of_embeddings_keeps(dtype, mode):
    bags = torch.tensor([0, 2])
    check(lambda w: F.embedding_bag(torch.tensor([0, 1, 2, 3]), w, bags, mode=mode), (leaf(6, 4, dtype=dtype),))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_soft_margin_loss_has_the_dtype_of_its_input(dtype, reduction):
    target = torch.tensor([1.0, -1, 1])
    check(lambda x: F.soft_margin_loss(x, target, reduction=reduction), (leaf(3, dtype=dtype),))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(torch.nn.functional.bilinear, ((3, 4), (3, 5), (2, 4, 5))), (torch.linalg.pinv, ((4, 3),))],
    ids=["bilinear", "pinv"],
)
def test_a_kernel_that_casts_inside_is_eager_by_name_under_autocast(function, shapes):
    args = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    compiled = foregrad.compile(lambda *given: function(*given), backend="eager", on_unsupported="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(foregrad.errors.ForegradWarning, match="casts inside under autocast"):
            found = compiled(*args)
        expected = function(*args)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    again = foregrad.compile(lambda *given: function(*given), backend="eager", on_unsupported="raise")
    assert torch.equal(again(*args), function(*args))


@pytest.mark.parametrize("enters", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [(torch.nn.functional.bilinear, ((3, 4), (3, 5), (2, 4, 5))), (torch.linalg.pinv, ((4, 3),))],
    ids=["bilinear", "pinv"],
)
def test_a_kernel_that_casts_inside_does_so_in_each_call_of_an_eager_region(function, shapes, enters):
    def kernel(*given):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enters or torch.is_autocast_enabled("cpu")):
            return function(*given)

    marked = foregrad.eager_region(kernel)
    compiled = foregrad.compile(lambda *given: marked(*given) * 2, backend="eager", on_unsupported="raise")
    for _ in range(3):
        given = [torch.randn(shape, requires_grad=True) for shape in shapes]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enters):
            expected, found = kernel(*given) * 2, compiled(*given)
        assert torch.equal(found, expected)
        if function is not torch.linalg.pinv:  # eager's backward raises: its operators get two dtypes
            gradients = torch.autograd.grad(expected.sum(), given)
            assert all(map(torch.equal, torch.autograd.grad(found.sum(), given), gradients))
