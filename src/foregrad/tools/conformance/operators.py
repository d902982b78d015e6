"""Operators of PyTorch's database, each as a forward and a backward graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from foregrad.tools._torch.testing import OperatorCall, operator_calls, operator_dtypes, operator_names
from foregrad.tools._torch.tools import mapped

from .cases import Case, CaseProgram

# The operators of most models.
COMMON = (
    "add", "sub", "mul", "div.no_rounding_mode", "floor_divide", "remainder", "pow", "neg", "abs", "exp", "log",
    "log1p", "sin", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal", "clamp", "where", "maximum", "round", "sign",
    "erf", "eq", "logical_and", "isnan", "bitwise_xor", "nn.functional.gelu", "nn.functional.relu",
    "nn.functional.silu", "nn.functional.softplus", "softmax", "log_softmax", "nn.functional.layer_norm",
    "nn.functional.group_norm", "nn.functional.batch_norm", "nn.functional.embedding",
    "nn.functional.cross_entropy", "nn.functional.mse_loss", "nn.functional.conv2d", "nn.functional.max_pool2d",
    "nn.functional.avg_pool2d", "nn.functional.linear", "nn.functional.pad.constant",
    "nn.functional.scaled_dot_product_attention", "nn.functional.interpolate.nearest", "matmul", "bmm", "addmm",
    "sum", "mean", "amax", "var", "argmax", "cumsum", "logsumexp", "topk", "sort", "gather", "scatter_add",
    "index_select", "index_put", "masked_fill", "cat", "stack", "split", "reshape", "transpose", "permute",
    "expand", "select_scatter", "tril", "flip", "roll",
)  # fmt: skip
# The short suite tries these operators in further dtypes.
_NARROW = (
    "add", "mul", "div.no_rounding_mode", "sum", "matmul", "nn.functional.gelu", "softmax",
    "nn.functional.layer_norm",
)  # fmt: skip
_SHORT = {
    "bfloat16": _NARROW,
    "int64": ("add", "floor_divide", "sum", "cumsum", "bitwise_xor"),
    "bool": ("where", "eq"),
}
_FULL = ("float32", "float64", "bfloat16", "float16", "int64", "bool", "complex64")
_MOST = 8  # calls of an operator in the full suite


def operator_cases(*, is_full: bool, dtypes: Sequence[str]) -> Iterator[Case]:
    """The cases; `dtypes` in place of the suite's.

    In the short suite an operator is called as in the database's first call, and in the first one with an empty tensor
    or a single number; eight operators are in one graph, and by themselves where that graph does not pass. The full
    suite has up to eight calls, the first also with strided arguments and symbolic sizes.
    """
    for name in operator_names() if is_full else COMMON:
        supported = operator_dtypes(name)
        for dtype in dtypes or (_FULL if is_full else ("float32", "int64", "bool", "bfloat16")):
            wanted = is_full or bool(dtypes) or dtype == "float32" or name in _SHORT[dtype]
            if wanted and getattr(torch, dtype) in supported:
                programs = functools.partial(_programs, name, dtype, is_full)
                yield Case(f"operators/{name} {dtype}", programs, may_join=not is_full)


def _programs(name: str, dtype: str, is_full: bool) -> Iterator[CaseProgram]:
    calls = list(operator_calls(name, getattr(torch, dtype)))
    numbers = range(_MOST) if is_full else [0, *[i for i, call in enumerate(calls) if i and _is_small(call)][:1]]
    for number, call in enumerate(calls):
        if number in numbers:
            yield CaseProgram(call.function, call.args, call.kwargs, versus_eager=False, title=f"call {number}")
    if is_full and calls:
        function, args, kwargs = calls[0]
        dynamic = {"dynamic": True}
        yield CaseProgram(function, args, kwargs, dynamic, versus_eager=False, title="call 0 with symbolic sizes")
        args, kwargs = mapped((args, kwargs), torch.Tensor, spread)
        yield CaseProgram(function, args, kwargs, versus_eager=False, title="call 0 with strided arguments")


def _is_small(call: OperatorCall) -> bool:
    tensors = [value for value in call.args if isinstance(value, torch.Tensor)]
    return any(tensor.dim() == 0 or tensor.numel() == 0 for tensor in tensors)


def spread(tensor: torch.Tensor) -> Any:
    """A tensor of equal content, with elements that stand two apart; a sparse one as it is."""
    if tensor.layout is not torch.strided:
        return tensor
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]
    with torch.no_grad():
        wide.copy_(tensor)
    return wide.requires_grad_(tensor.requires_grad)
