"""Every direct binding reaches the dispatcher with the call that the operator itself makes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foregrad._torch.ops import DOORS, OpOverload, fast_call
from foregrad.backends.eager import eager_compiler

X = torch.randn(4, 6)
Y = torch.randn(4, 6)
P = torch.rand(4, 6) + 0.5
D = torch.randn(4, 6, dtype=torch.float64)
I = torch.randint(-5, 5, (4, 6))
J = torch.randint(1, 5, (4, 6))
M = X > 0
S = torch.tensor(2.5)  # 0-dim
K = torch.tensor(3)
C = torch.randn(4, 6, dtype=torch.complex64)
V = torch.randn(6)
W = torch.randn(6, 5)
B3 = torch.randn(2, 3, 4)
C3 = torch.randn(2, 4, 5)
B4 = torch.randn(2, 4, 5, 5)
IDX = torch.tensor([0, 2, 1])
GI = torch.randint(0, 4, (2, 6))
Q = torch.randn(1, 2, 4, 8)
TR = X.t()
E0 = torch.empty(0, 6)
f32, f64, i64, cpu = torch.float32, torch.float64, torch.int64, torch.device("cpu")
LAYOUT = {"dtype": f32, "device": cpu}
FULL_LAYOUT = {"dtype": f64, "layout": torch.strided, "device": cpu, "pin_memory": False}
PF, CF, CL = torch.preserve_format, torch.contiguous_format, torch.channels_last


def call(*args, **kwargs):
    return args, kwargs


UNARY = [call(X), call(P), call(S), call(TR), call(D), call(E0)]
BINARY = [call(X, Y), call(X, S), call(S, X), call(X, D), call(X, V), call(I, X), call(I, J), call(S, K)]
NUMBERS = [call(X, 2), call(X, 2.5), call(I, 2), call(I, 2.5), call(S, 2.0), call(K, 2), call(X, math.inf), call(X, -1)]
COMPARED = [call(X, 0.0), call(I, 2), call(X, 2), call(I, 2.5), call(S, 1.0), call(X, math.nan)]
REDUCED = [
    call(X, [0]), call(X, [1], True), call(X, [-1], False), call(X, [0, 1]), call(S, [0]), call(X, [0], True, dtype=f64),
    call(TR, [1]),
]  # fmt: skip
PICKED = [call(X, 0), call(X, 1, True), call(TR, -1)]
CORRECTED = [call(X, [1], correction=1), call(X, [0], correction=0, keepdim=True), call(X, None, correction=1)]

SAMPLES = {
    "mm": [call(X, W), call(TR, X), call(X, W.t().contiguous().t())],
    "addmm": [call(torch.randn(5), X, W), call(torch.randn(4, 5), X, W, beta=0.5, alpha=2), call(S, X, W)],
    "bmm": [call(B3, C3)],
    "baddbmm": [call(torch.randn(2, 3, 5), B3, C3), call(torch.randn(5), B3, C3, beta=1, alpha=0.5)],
    "mv": [call(X, V)],
    "dot": [call(V, V)],
    "addmv": [call(torch.randn(4), X, V), call(torch.randn(4), X, V, beta=2, alpha=3)],
    "add.Tensor": BINARY + NUMBERS + [call(X, Y, alpha=2), call(I, J, alpha=-1), call(X, 2, alpha=0.5), call(M, M)],
    "sub.Tensor": BINARY + NUMBERS + [call(X, Y, alpha=2)],
    "mul.Tensor": BINARY + NUMBERS + [call(M, X), call(C, 2.0), call(C, X)],
    "div.Tensor": BINARY + NUMBERS,
    "div.Tensor_mode": [call(X, P, rounding_mode="floor"), call(I, J, rounding_mode="trunc"), call(X, 2, rounding_mode="floor")],
    "pow.Tensor_Scalar": [call(P, 2), call(P, 0.5), call(I, 2), call(S, 3), call(X, -1)],
    "pow.Tensor_Tensor": [call(P, Y), call(P, S), call(I, J)],
    "atan2": BINARY[:2],
    "addcmul": [call(X, Y, P), call(X, Y, P, value=0.5), call(X, S, P, value=2)],
    "addcdiv": [call(X, Y, P), call(X, Y, P, value=0.5)],
    "maximum": BINARY[:3],
    "minimum": BINARY[:3],
    "clamp": [call(X, 0.0), call(X, -1, 1), call(X, None, 0.5), call(I, 0, 3), call(I, 0.5)],
    "clamp.Tensor": [call(X, Y), call(X, Y, P), call(X, None, P)],
    "clamp_min": [call(X, 0), call(I, 1)],
    "clamp_max": [call(X, 0.5)],
    "lerp.Scalar": [call(X, Y, 0.25), call(X, Y, 1)],
    "lerp.Tensor": [call(X, Y, P), call(X, Y, S)],
    "logical_not": [call(M), call(X)],
    "bitwise_not": [call(I), call(M)],
    "bitwise_and.Tensor": [call(I, J), call(M, M)],
    "bitwise_or.Tensor": [call(I, J), call(M, M)],
    "where.self": [call(M, X, Y), call(M, X, S), call(M, I, X)],
    "masked_fill.Scalar": [call(X, M, 0), call(X, M, -math.inf), call(I, M, 2)],
    "masked_fill.Tensor": [call(X, M, S)],
    "fill.Scalar": [call(X, 2), call(I, 2.5)],
    "nan_to_num": [call(X), call(X, 0.0, 1.0, -1.0), call(X, None, 1.0)],
    "sum": [call(X), call(I), call(X, dtype=f64)],
    "mean": [call(X), call(X, dtype=f64)],
    "sum.dim_IntList": REDUCED,
    "mean.dim": REDUCED,
    "logsumexp": [call(X, [1]), call(X, [0, 1], True)],
    "amax": [call(X, [1]), call(X, [0, 1], True), call(X)],
    "amin": [call(X, [1]), call(X, [0, 1], True)],
    "max.dim": PICKED,
    "min.dim": PICKED,
    "max": [call(X), call(I)],
    "min": [call(X)],
    "argmax": [call(X), call(X, 1), call(X, 0, True), call(X, None, True)],
    "argmin": [call(X), call(X, 1)],
    "any": [call(M), call(X)],
    "all": [call(M)],
    "any.dim": [call(M, 1), call(M, 0, True)],
    "all.dim": [call(M, 1), call(M, 0, True)],
    "prod.dim_int": [call(X, 1), call(X, 0, True), call(I, 0, dtype=f32)],
    "cumsum": [call(X, 0), call(I, 1), call(X, 1, dtype=f64)],
    "var.correction": CORRECTED,
    "std.correction": CORRECTED,
    "var_mean.correction": CORRECTED,
    "topk": [call(X, 2), call(X, 2, 0, False, True)],
    "sort": [call(X), call(X, 0, True)],
    "t": [call(X), call(V)],
    "transpose.int": [call(X, 0, 1), call(B3, -1, 0), call(S, 0, 0)],
    "permute": [call(B3, [2, 0, 1]), call(V, [0]), call(X, [-1, 0])],
    "select.int": [call(X, 0, 1), call(X, -1, -2)],
    "unsqueeze": [call(X, 0), call(X, -1), call(S, 0)],
    "squeeze": [call(X[None])],
    "squeeze.dim": [call(X[None], 0), call(X, 1)],
    "squeeze.dims": [call(X[None], [0]), call(X[None, :, None], [0, 2])],
    "diagonal": [call(X), call(B3, 1, 0, 2)],
    "as_strided": [call(X, [3, 2], [1, 6]), call(X, [3, 2], [1, 6], 4), call(X, [5], [1])],
    "split.Tensor": [call(X, 2), call(X, 4, 1), call(X, 3, 0)],
    "split_with_sizes": [call(X, [1, 3]), call(X, [2, 4], 1)],
    "unbind.int": [call(X), call(X, 1)],
    "cat": [call([X, Y]), call([X, Y, D], 1), call([X], -1)],
    "stack": [call([X, Y]), call([X, Y], -1)],
    "flip": [call(X, [0]), call(X, [0, 1])],
    "roll": [call(X, [1]), call(X, [1, 2], [0, 1]), call(X, [2], [1])],
    "tril": [call(X), call(X, 1)],
    "triu": [call(X), call(X, -1)],
    "clone": [*UNARY, call(TR, memory_format=CF), call(TR, memory_format=PF), call(B4, memory_format=CL)],
    "view_as_real": [call(C)],
    "view_as_complex": [call(torch.randn(3, 2))],
    "_conj": [call(C)],
    "gather": [call(X, 0, GI), call(X, 0, GI, sparse_grad=False)],
    "scatter.src": [call(X, 0, GI, Y)],
    "scatter.value": [call(X, 0, GI, 1.5), call(I, 0, GI, 2)],
    "scatter_add": [call(X, 0, GI, Y)],
    "index_select": [call(X, 0, IDX), call(X, 1, IDX)],
    "embedding": [call(X, IDX), call(X, GI, 1), call(X, IDX, -1, True, False)],
    "native_layer_norm": [call(X, [6], V, V, 1e-5), call(X, [4, 6], None, None, 1e-5), call(X, [6], V, None, 1)],
    "native_group_norm": [call(B4, torch.rand(4), torch.rand(4), 2, 4, 25, 2, 1e-5), call(B4, None, None, 2, 4, 25, 2, 1e-5)],
    "native_batch_norm": [call(B4, torch.rand(4), None, None, None, True, 0.1, 1e-5)],
    "_native_batch_norm_legit": [call(B4, torch.rand(4), None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5)],
    "_native_batch_norm_legit_no_training": [call(B4, None, None, torch.zeros(4), torch.ones(4), 0.1, 1e-5)],
    "_softmax": [call(X, -1, False), call(X, 0, False), call(S, 0, False)],
    "_log_softmax": [call(X, -1, False)],
    "_softmax_backward_data": [call(X, Y, 1, f32)],
    "_log_softmax_backward_data": [call(X, Y, 1, f32)],
    "convolution": [
        call(B4, torch.randn(3, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        call(B4, torch.randn(4, 2, 3, 3), torch.randn(4), [2, 2], [0, 1], [1, 1], False, [0, 0], 2),
        call(C3, torch.randn(4, 2, 3), None, [1], [1], [1], True, [0], 1),
    ],
    "native_dropout": [call(X, 0.5, True), call(X, 0.5, False), call(X, 0.5, None)],
    "bernoulli": [call(P.clamp(0, 1))],
    "bernoulli.p": [call(X, 0.25)],
    "constant_pad_nd": [call(X, [1, 2]), call(X, [1, 2, 0, 1], 0.5), call(I, [1, 0], 3)],
    "select_scatter": [call(X, V, 0, 1)],
    "slice_scatter": [call(X, Y[:2], 0, 1, 3), call(X, Y[:2], 0, 0, 4, 2), call(X, Y)],
    "_scaled_dot_product_flash_attention_for_cpu": [call(Q, Q, Q), call(Q, Q, Q, 0.0, True), call(Q, Q, Q, scale=0.5)],
    "zeros_like": [call(TR), call(X, dtype=f64), call(TR, memory_format=CF)],
    "ones_like": [call(TR), call(X, dtype=i64, device=cpu, pin_memory=False)],
    "full_like": [call(TR, 2), call(X, 2.5, dtype=f64)],
    "empty_like": [call(TR), call(X, memory_format=CF)],
    "full": [call([2, 3], 1.5, **LAYOUT), call([4], True, **LAYOUT), call([2], math.inf, **FULL_LAYOUT), call([2], 3, dtype=f32)],
    "zeros": [call([2, 3], **LAYOUT), call([4], **FULL_LAYOUT), call([], **LAYOUT)],
    "ones": [call([2, 3], **LAYOUT), call([4], **FULL_LAYOUT)],
    "empty.memory_format": [call([2, 3], **LAYOUT), call([2, 3, 4, 4], **LAYOUT, memory_format=CL)],
    "arange": [call(5, **LAYOUT), call(5, **FULL_LAYOUT), call(5)],
    "arange.start": [call(2, 5, **LAYOUT), call(0.5, 5, **LAYOUT)],
    "arange.start_step": [call(2, 9, 3, **LAYOUT), call(0.5, 5, 0.5, **LAYOUT)],
    "equal": [call(X, Y), call(X, X), call(M, M)],
    "_fft_c2r": [call(C, [1], 2, 10), call(C, [0, 1], 0, 11)],
    "_fft_r2c": [call(X, [1], 0, True), call(X, [0, 1], 1, False)],
    "_fft_c2c": [call(C, [0], 0, True), call(C, [0, 1], 2, False)],
    "scalar_tensor": [call(2.5, **LAYOUT), call(2, **LAYOUT), call(-math.inf, **LAYOUT)],
    "gelu": [call(X), call(X, approximate="tanh")],
    "leaky_relu": [call(X), call(X, 0.2)],
    "elu": [call(X), call(X, 0.5, 1.0, 2.0)],
    "hardtanh": [call(X), call(X, -0.5, 0.5), call(X, 0, 6)],
    "softplus": [call(X), call(X, 2, 10)],
    "max_pool2d_with_indices": [call(B4, [2, 2]), call(B4, [3, 3], [2, 2], [1, 1], [1, 1], True), call(B4, [2])],
    "avg_pool2d": [call(B4, [2, 2]), call(B4, [3, 3], [2, 2], [1, 1], True, False), call(B4, [2, 2], [2, 2], [0, 0], False, True, 3)],
    "_adaptive_avg_pool2d": [call(B4, [2, 2]), call(B4, [3, 2])],
    "view": [call(X, [24]), call(X, [2, 12]), call(X, [-1, 3]), call(X, [1, 4, 6]), call(S, [1]), call(S, [])],
    "view.dtype": [call(X, torch.int32), call(C, f32)],
    "expand": [call(V, [4, 6]), call(X[None], [3, -1, -1]), call(S, [2]), call(V, [4, 6], implicit=False), call(S, [])],
    "repeat": [call(X, [2, 1]), call(V, [3]), call(V, [2, 1, 1])],
    "unfold": [call(X, 1, 3, 2)],
    "copy_": [call(X, Y), call(X, D), call(X, V), call(X, Y, True)],
    "_local_scalar_dense": [call(torch.tensor(0.5)), call(torch.tensor(2)), call(torch.tensor(True))],
    "sub_.Tensor": [call(X, Y), call(X, 2), call(X, Y, alpha=2)],
    "addcmul_": [call(X, Y, P), call(X, Y, P, value=0.5)],
    "addcdiv_": [call(X, Y, P), call(X, Y, P, value=0.5)],
    "lerp_.Scalar": [call(X, Y, 0.25)],
    "lerp_.Tensor": [call(X, Y, P)],
    "neg_": [call(X)],
    "sqrt_": [call(X)],
    "reciprocal_": [call(X)],
    "add_.Tensor": [call(X, Y), call(X, 2), call(X, Y, alpha=2)],
    "mul_.Tensor": [call(X, Y), call(X, 2.5)],
    "div_.Tensor": [call(X, P), call(X, 2.5)],
    "new_zeros": [call(X, [2, 3]), call(X, [2], dtype=i64), call(X, [2], dtype=f32, layout=torch.strided, device=cpu, pin_memory=False)],
    "new_ones": [call(X, [2, 3]), call(X, [2], dtype=i64), call(X, [], dtype=f32)],
    "new_full": [call(X, [2, 3], 1.5), call(X, [2], 2, dtype=f32)],
    "_to_copy": [call(X, dtype=f64), call(X, dtype=f32), call(TR, dtype=f64), call(X, dtype=f64, device=cpu), call(M, dtype=f32)],
    "sym_size.int": [call(X, 0), call(X, -1)],
    "sym_stride.int": [call(TR, 0)],
    "sym_numel": [call(X)],
    "sym_storage_offset": [call(X[1])],
    **{
        name: [call(X, Y), call(M, M), call(X, S)] for name in ("logical_and", "logical_or", "logical_xor")
    },
    **{f"{name}.Tensor": BINARY for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{name}.Scalar": COMPARED for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys("""neg exp exp2 log log2 log1p expm1 sqrt rsqrt reciprocal square sin cos tan sinh cosh tanh asin\n        acos atan sigmoid relu erf erfc abs sign sgn floor ceil round trunc isnan detach silu hardswish hardsigmoid\n        mish""".split(), UNARY),
}  # fmt: skip

# Samples that must take the generic door, because the binding might choose another overload or result.
GENERIC = {
    "var.correction": [2], "std.correction": [2], "var_mean.correction": [2], "full": [1, 3], "arange": [2],
    "native_dropout": [2], "view": [5], "expand": [4], "_to_copy": [3],
}  # fmt: skip
# A binding fills these in where an operator is called without them.
MEANT_BY_NONE = {"layout": torch.strided, "pin_memory": False}
RANDOM_MEMORY = {"empty_like", "empty.memory_format"}


def word_of(op) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


class Recorder(TorchDispatchMode):
    """What reaches the dispatcher, arguments completed from the schema."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        complete = {}
        for position, argument in enumerate(func._schema.arguments):
            if position < len(args):
                value = args[position]
            else:
                value = kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)
            complete[argument.name] = plain(argument.name, value)
        self.calls.append((str(func), complete))
        return result


def plain(name, value):
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    if isinstance(value, (list, tuple)):
        return [plain(name, item) for item in value]
    if value is None and name in MEANT_BY_NONE:
        value = MEANT_BY_NONE[name]
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return type(value).__name__, value


def program(op, args, kwargs):
    """A graph of one call of `op`: tensors come as placeholders, the rest as literals. Several outputs are picked."""
    graph = torch.fx.Graph()
    inputs = []

    def lift(value):
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return graph.placeholder(f"x{len(inputs)}")
        return [lift(item) for item in value] if isinstance(value, (list, tuple)) else value

    node_args = tuple(lift(value) for value in args)
    node = graph.call_function(op, node_args, {key: lift(value) for key, value in kwargs.items()})
    torch.manual_seed(1)
    expected = op(*copies(args), **kwargs)
    if isinstance(expected, (list, tuple)):
        picks = [graph.call_function(__import__("operator").getitem, (node, i)) for i in range(len(expected))]
        graph.output(tuple(picks))
    else:
        graph.output((node,))
        expected = [expected]
    return torch.fx.GraphModule(torch.nn.Module(), graph), inputs, list(expected)


def copies(values):
    """Fresh tensors of the same layout, for operators that write to them."""
    return [
        copy_of(v) if isinstance(v, torch.Tensor) else copies(v) if isinstance(v, (list, tuple)) else v for v in values
    ]


def copy_of(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def cases():
    for op in fast_operators():
        for number, sample in enumerate(SAMPLES.get(word_of(op), [])):
            yield pytest.param(op, number, *sample, id=f"{word_of(op)}-{number}")


def fast_operators():
    """Every operator that may have a direct binding."""
    operators = []
    for word in DOORS:
        name, _, overload = word.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, OpOverload):
            operators.append(op)
    return operators


@pytest.mark.parametrize(("op", "number", "args", "kwargs"), list(cases()))
def test_a_binding_makes_the_same_dispatcher_call(op, number, args, kwargs):
    word = word_of(op)
    gm, inputs, expected = program(op, args, kwargs)
    compiled = eager_compiler(gm, inputs)
    is_generic = number in GENERIC.get(word, [])
    assert ("aten_" in compiled.source()) == is_generic, compiled.source()

    ours_inputs, reference_inputs = copies(inputs), copies(args)
    torch.manual_seed(1)
    with Recorder() as ours:
        results = compiled(ours_inputs)
    with Recorder() as reference:
        op(*reference_inputs, **kwargs)

    assert ours.calls == reference.calls
    for result, wanted in zip(results, expected, strict=True):
        if not isinstance(wanted, torch.Tensor):
            assert (type(result), result) == (type(wanted), wanted)
            continue
        assert (result.dtype, result.shape, result.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        if word not in RANDOM_MEMORY:
            assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(wanted))
            assert torch.equal(torch.isnan(result), torch.isnan(wanted))


def test_every_binding_has_samples():
    missing = [word_of(op) for op in fast_operators() if not SAMPLES.get(word_of(op))]
    assert missing == []


def test_every_binding_exists_in_this_torch():
    assert [word_of(op) for op in fast_operators() if fast_call(op) is None] == []
