"""A setting that a function leaves changed is changed by each call: compiled where it changes numbers, else eagerly."""

import sys

import numpy as np
import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError
from foregrad.python._torch.settings import REPLAYED, apply_settings, settings

b = torch.backends
CHANGES = {
    "threads of the backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "print options": lambda: torch.set_printoptions(precision=2, linewidth=40),
    "TF32 in cuBLAS": lambda: setattr(b.cuda.matmul, "allow_tf32", True),
    "TF32 in cuDNN": lambda: setattr(b.cudnn, "allow_tf32", False),
    "half precision accumulation": lambda: setattr(b.cuda.matmul, "allow_fp16_accumulation", True),
    "float16 sums": lambda: setattr(b.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bfloat16 sums": lambda: setattr(b.cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
    "flags of cuDNN": lambda: b.cudnn.set_flags(_enabled=False, _benchmark=True, _deterministic=True),
    "limit of benchmarks": lambda: setattr(b.cudnn, "benchmark_limit", 3),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "precision everywhere": lambda: setattr(b, "fp32_precision", "ieee"),
    "precision of one operator": lambda: setattr(b.cudnn.conv, "fp32_precision", "ieee"),
    "precision of matrix products": lambda: setattr(b.cuda.matmul, "fp32_precision", "tf32"),
    "precision of oneDNN": lambda: setattr(b.mkldnn.matmul, "fp32_precision", "bf16"),
    "denormals": lambda: torch.set_flush_denormal(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "deterministic debug mode": lambda: torch.set_deterministic_debug_mode("warn"),
    "deterministic oneDNN": lambda: setattr(b.mkldnn, "deterministic", True),
    "NNPACK": lambda: b.nnpack.set_flags(False),
    "kernels of attention": lambda: (b.cuda.enable_cudnn_sdp(False), b.cuda.enable_math_sdp(False)),
    "sums in attention": lambda: b.cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "order of attention kernels": lambda: torch._C._set_sdp_priority_order([3, 1, 2, 0, 4]),
    "order of einsum": lambda: setattr(b.opt_einsum, "enabled", not b.opt_einsum.enabled),
    "conversions": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "swaps": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "the autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "checks of sparse tensors": lambda: torch.sparse.check_sparse_tensor_invariants.enable(),
    "forward gradients": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
}
AVAILABLE = {name for name in CHANGES if name != "order of einsum" or b.opt_einsum.is_available()}
# What Dynamo itself loses, or fails at, with every backend of torch.compile.
NOT_UNDER_DYNAMO = {"float16 sums", "bfloat16 sums", "forward gradients"}
# Settings of no table: how to set one, and to read it.
REFUSED = {
    "checks of distributions": (
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: torch.distributions.Distribution._validate_args,
    ),
    "how processes share tensors": (
        lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
        torch.multiprocessing.get_sharing_strategy,
    ),
    "NumPy's errors": (lambda: np.seterr(divide="ignore"), lambda: np.geterr()["divide"]),
    "NumPy's text": (lambda: np.set_printoptions(precision=3), lambda: np.get_printoptions()["precision"]),
    "recursion limit": (lambda: sys.setrecursionlimit(2345), sys.getrecursionlimit),
}


def after(function):
    before = settings()
    x = torch.ones(2, requires_grad=True)
    try:
        value = function(x)
        left = settings()
    finally:
        apply_settings(before)
    assert settings() == before
    return value, {name: left[name] for name in left if left[name] != before[name]}


@pytest.fixture(autouse=True)
def writable(monkeypatch):
    """`torch.compile` turns the checks off for good, and PyTorch's own tests the writing of flags."""
    monkeypatch.setitem(vars(torch.backends.m), "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.mark.filterwarnings("ignore:.*TF32", "ignore:.*and does not restore it")
@pytest.mark.parametrize("name", sorted(AVAILABLE - {"denormals"}))  # see test_settings_inside.py
def test_a_setting_outlasts_each_call(name):
    change = CHANGES[name]

    def function(x):
        y = x.sin()
        change()
        return y * 2

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    for _ in range(3):
        expected, left = after(function)
        assert left
        found, ours = after(compiled)
        assert ours == left
        assert torch.equal(found, expected)
    others = sorted(set(left) - REPLAYED)
    assert len(compiled.foregrad.specializations) == (0 if others else 1)
    if others:
        before = settings()
        with pytest.raises(UnsupportedSideEffectError, match=f"`function` changes {others[0]}"):
            foregrad.capture(function, torch.ones(2))
        assert settings() == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, where it leaves a setting to Python
@pytest.mark.parametrize("name", sorted(AVAILABLE - NOT_UNDER_DYNAMO))
def test_a_setting_outlasts_each_call_under_torch_compile(name):
    change = CHANGES[name]

    def function(x):
        y = x.sin()
        change()
        return y * 2

    torch._dynamo.reset()
    options = {"backend": "eager", "on_unsupported": "eager"}
    compiled = torch.compile(function, backend="foregrad", options=options)
    for _ in range(2):
        assert after(compiled)[1] == after(function)[1]


@pytest.fixture
def kept():
    """PyTorch's strategy, NumPy's errors and text, and Python's limit, as they are after the test."""
    strategy, errors, text, limit = (
        torch.multiprocessing.get_sharing_strategy(), np.geterr(), np.get_printoptions(), sys.getrecursionlimit(),
    )  # fmt: skip
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)
    np.seterr(**errors)
    np.set_printoptions(**text)
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_sets_what_changes_no_result_runs_eagerly_by_name(name):
    change, read = REFUSED[name]

    def function(x):
        change()
        return x * 2

    before = read()
    with pytest.raises(UnsupportedSideEffectError, match=r"calls `.*set.* at .*test_settings_table.py"):
        foregrad.capture(function, torch.ones(2))
    assert read() == before
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"calls `.*set.* at .*test_settings_table.py"):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert read() != before


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_a_precision_set_for_one_backend_alone_is_no_obstacle(backend):
    """PyTorch then raises when it is asked for the precision of all."""
    before = settings()
    try:
        getattr(b, backend).matmul.fp32_precision = "tf32" if backend == "cuda" else "bf16"
        x = torch.ones(2, 2)
        compiled = foregrad.compile(lambda x: x @ x, backend="eager")
        assert torch.equal(compiled(x), compiled(x))
        assert len(compiled.foregrad.specializations) == 1
    finally:
        apply_settings(before)
