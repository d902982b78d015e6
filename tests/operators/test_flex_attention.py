"""`flex_attention`: score and mask functions, what these look up, gradients; against eager's own, to the last bit.

PyTorch refuses gradients of it on the CPU for want of a kernel of its compiler's. Eager's formula has no need of that,
so the check is left out in these tests, for both sides.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import foregrad
from foregrad.errors import UnsupportedOpError
from foregrad.operators._torch.control_flow import ATTENTION, BACKWARD
from tests.covering import each

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    # Dynamo, which eager's `flex_attention` calls, reads `.grad` of operands that are no leaves.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*can't be reached from the compiled function"),
]

LENGTH = 32
BIAS = torch.randn(LENGTH, LENGTH, requires_grad=True)
SLOPES = torch.tensor([0.5, 2.0])
DOCUMENT = torch.arange(LENGTH) // 8


def relative(score, b, h, q, k):
    return score + (q - k)


def learnt(score, b, h, q, k):
    return score + BIAS[q, k]


def capped(score, b, h, q, k):
    return 20 * torch.tanh(score / 20) + SLOPES[h]


def in_place(score, b, h, q, k):
    score = score * 1
    score += SLOPES[h]
    return score


def in_documents(b, h, q, k):
    return (DOCUMENT[q] == DOCUMENT[k]) & (q >= k)


MASK = create_block_mask(in_documents, B=None, H=None, Q_LEN=LENGTH, KV_LEN=LENGTH, device="cpu", BLOCK_SIZE=8)

FUNCTIONS = {
    "plain": lambda q, k, v: flex_attention(q, k, v),
    "relative": lambda q, k, v: flex_attention(q, k, v, relative) * 2,
    "learnt": lambda q, k, v: flex_attention(q.sin(), k, v, learnt),
    "capped": lambda q, k, v: flex_attention(q, k, v, capped),
    "in_place": lambda q, k, v: flex_attention(q, k, v, in_place),
    "masked": lambda q, k, v: flex_attention(q, k, v, learnt, block_mask=MASK),
    "transposed": lambda q, k, v: flex_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, relative),
    "grouped": lambda q, k, v: flex_attention(q, k[:, :1], v[:, :1], relative, enable_gqa=True),
}


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


def outcome(function, grad):
    torch.manual_seed(0)
    BIAS.grad = None
    args = [torch.randn(2, 2, LENGTH, 4, requires_grad=grad) for _ in range(3)]
    out = function(*args)
    if out.requires_grad:
        (out * torch.linspace(1, 2, out.numel()).view(out.shape)).sum().backward()
    return [out, *(a.grad for a in args), BIAS.grad]


def check(compiled, function, grad):
    expected = outcome(function, grad)
    for _ in range(2):
        for one, other in zip(expected, outcome(compiled, grad), strict=True):
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one, other) and one.stride() == other.stride())


@pytest.mark.parametrize(("name", "grad"), each(FUNCTIONS, [True, False]))
def test_it_is_eagers(name, grad):
    function = FUNCTIONS[name]
    check(foregrad.compile(function, backend="eager"), function, grad)


@pytest.mark.parametrize("name", ["learnt", "masked"])
def test_it_is_eagers_under_torch_compile(name):
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"}, fullgraph=True)
    check(compiled, function, True)


def test_a_graph_has_one_operator_for_each_half():
    graphs = []

    def keep(gm, inputs):
        graphs.append([node.target for node in gm.graph.nodes])
        return gm

    compiled = foregrad.compile(FUNCTIONS["masked"], backend=(keep, keep))
    outcome(compiled, True)
    assert [targets.count(ATTENTION) for targets in graphs] == [1, 0]
    assert [targets.count(BACKWARD) for targets in graphs] == [0, 1]


def test_a_table_that_changes_is_looked_up_anew():
    compiled = foregrad.compile(FUNCTIONS["capped"], backend="eager")
    outcome(compiled, False)
    before = SLOPES.clone()
    try:
        SLOPES.mul_(3)
        check(compiled, FUNCTIONS["capped"], False)
    finally:
        SLOPES.copy_(before)


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_that_a_score_function_reads_may_vary(kind):
    table = {"scale": kind(1)}

    def function(q):
        return flex_attention(q, q, q, lambda score, *_: score * table["scale"] + q.shape[2] * 0.1)

    compiled = foregrad.compile(function, backend="eager")
    for scale, length in ((1, 8), (2, 8), (3, 8), (3, 16), (4, 24)):
        table["scale"], q = kind(scale), torch.randn(1, 1, length, 4)
        assert torch.equal(function(q), compiled(q))


def test_it_is_not_differentiated_twice():
    def second(function):
        q, k, v = (torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3))
        (first,) = torch.autograd.grad(function(q, k, v).sum(), q, create_graph=True)
        first.sum().backward()

    for function in (FUNCTIONS["relative"], foregrad.compile(FUNCTIONS["relative"], backend="eager")):
        with pytest.raises(RuntimeError, match=r"(?i)autograd"):
            second(function)


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (lambda s, b, h, q, k: s + torch.rand(()), "draws random numbers"),
        (lambda s, b, h, q, k: SLOPES.add_(1)[h] + s, "writes to a tensor in place"),
    ],
)
def test_what_a_score_function_must_not_do_is_named(score, why):
    compiled = foregrad.compile(lambda q: flex_attention(q, q, q, score), backend="eager")
    with pytest.raises(UnsupportedOpError, match=f"the score_mod of `flex_attention` called at .* {why}"):
        compiled(torch.randn(1, 1, 8, 4))


def test_a_block_mask_is_an_argument():
    def function(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask) * 2

    compiled = foregrad.compile(function, backend="eager")
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=8)
    for mask in (MASK, causal, MASK):
        expected = outcome(lambda q, k, v, m=mask: function(q, k, v, m), True)
        found = outcome(lambda q, k, v, m=mask: compiled(q, k, v, m), True)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(compiled.foregrad.specializations) == 2


def test_a_block_mask_is_made_inside_of_what_comes_in():
    def function(q, document):
        def mask(b, h, m, n):
            return (document[m] == document[n]) & (m >= n)

        blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=8)
        return flex_attention(q, q, q, block_mask=blocks)

    compiled = foregrad.compile(function, backend="eager")
    q = torch.randn(1, 2, LENGTH, 4)
    for size in (4, 8, 16):
        document = torch.arange(LENGTH) // size
        assert torch.equal(compiled(q, document), function(q, document))
    assert len(compiled.foregrad.specializations) == 1


def test_lengths_vary():
    function = FUNCTIONS["relative"]
    compiled = foregrad.compile(function, backend="eager")
    for length in (32, 24, 16, 40):
        q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
        expected, found = function(q, k, v), compiled(q, k, v)
        assert torch.equal(expected, found)
        gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (expected, found)]
        assert all(map(torch.equal, *gradients))
    assert len(compiled.foregrad.specializations) == 2


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="PyTorch's kernel for the CPU needs AVX2")
def test_inductor_has_a_kernel_for_it():
    def function(q, k, v):
        return flex_attention(q, k, v, relative, block_mask=MASK)

    q, k, v = (torch.randn(1, 2, LENGTH, 16) for _ in range(3))
    if not torch.allclose(torch.compile(function)(q, k, v), function(q, k, v), atol=1e-5):
        pytest.skip("PyTorch's kernel is wrong on this processor")
    compiled = foregrad.compile(function, backend="inductor")
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))
    assert not torch.equal(compiled(q, k, v), function(q, k, v)), "eager's kernels give the same bits"


@pytest.mark.parametrize("door", [foregrad.compile, lambda f, backend: torch.compile(f, backend="foregrad")])
def test_a_training_step_of_inductor_goes_around_it(door):
    def function(q, k, v):
        return FUNCTIONS["capped"](q * 2, k, v).sin()

    compiled = door(function, backend="auto")
    expected = outcome(function, True)
    for one, other in zip(expected, outcome(compiled, True), strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-4, atol=1e-5)
