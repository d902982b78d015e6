"""Rows of docs/limits.md outside of its tables on memory: eager with a warning, raised, or silent, as the page says."""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib
import inspect
import itertools
import pathlib
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from foregrad import errors
from tests.parity.test_limits import PAGE, tables_of

SILENT, RAISED, EAGER = {}, {}, {}
ONES = functools.partial(torch.ones, requires_grad=True)
RATE = 1.0


def silent(beginning):
    return lambda program: SILENT.setdefault(beginning, program)


def raised(beginning, error):
    return lambda program: RAISED.setdefault(beginning, (program, error))


def eager(beginning, error):
    return lambda program: EAGER.setdefault(beginning, (program, error))


def writing(write):
    """A Function whose backward writes to its second argument."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, buffer):
            ctx.buffer = buffer
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            write(ctx.buffer, gradient)
            return gradient * 2, None

    return Writes


# ----------------------------------------------------------------------------------------- eager with a warning
@eager("computes in NumPy with an array", errors.UnsupportedSideEffectError)
def _(wrap):
    array = np.arange(1.0, 4.0)
    return wrap(lambda x, a: x * torch.from_numpy((a - 1.0) / 2.0))(ONES(3), array)


@eager("leaves a setting changed", errors.UnsupportedSideEffectError)
def _(wrap):
    def function(x):
        torch.autograd.set_multithreading_enabled(False)
        return x * 2

    with torch.autograd.set_multithreading_enabled(True):
        wrap(function)(ONES(3))


@eager("makes a random generator of PyTorch's", errors.UnsupportedSideEffectError)
def _(wrap):
    wrap(lambda x: x * torch.rand(3, generator=torch.Generator().manual_seed(4)))(ONES(3))


@eager("asks for the state or seed of a generator", errors.UnsupportedSideEffectError)
def _(wrap):
    return wrap(lambda x: x + torch.initial_seed())(torch.ones(1))


@eager("asks for a tensor's address", errors.UnsupportedError)
def _(wrap):
    x = torch.ones(1)
    return wrap(lambda x: x.data_ptr())(x) == x.data_ptr()


@eager("calls a scripted or traced function or module", errors.UnsupportedOpError)
def _(wrap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(3, 3))
    wrap(lambda x: scripted(x))(ONES(3))


@eager("reads a clock other than", errors.UnsupportedSideEffectError)
def _(wrap):
    wrap(lambda x: x + time.monotonic())(ONES(3))


@eager("has a backward (of a custom Function, a hook, a custom operator) that writes", errors.UnsupportedMutationError)
def _(wrap):
    memory = torch.zeros(4)
    apply = writing(lambda buffer, gradient: buffer.add_(gradient.sum())).apply
    wrap(lambda x, a, b: apply(x, a).sum() + b.sum())(ONES(2), memory[:2], memory[:3]).backward()
    return memory


@eager("calls, in a checkpointed part, an eager region", errors.UnsupportedSideEffectError)
def _(wrap):
    calls = []
    region = foregrad.eager_region(lambda x: calls.append(1) or x.sin())
    wrap(lambda x: checkpoint(region, x * 2, use_reentrant=False).sum())(ONES(3)).backward()
    return len(calls)


@silent("calls an eager region that begins, after the capture")
def _(wrap):
    state, values = types.SimpleNamespace(scale=1), iter((1, 2))

    @foregrad.eager_region
    def region(x):
        state.scale = next(values)
        return x * 1

    called = wrap(lambda x: region(x) * state.scale)
    return [called(torch.ones(2)) for _ in range(2)]


@silent("calls an operator of `torch.library` whose kernel")
def _(wrap):
    log = []

    @torch.library.custom_op(f"limits::kernel_{id(log)}", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        log.append(1)
        return x * 2

    noted.register_fake(torch.empty_like)
    called = wrap(lambda x: noted(x) + len(log))
    return [called(torch.ones(2)).tolist() for _ in range(3)], log


@silent("passes the result of a custom Function")
def _(wrap):
    gradients = []
    apply = writing(lambda _, gradient: gradients.append(gradient)).apply
    wrap(lambda y, x: (y * 2, x * 3))(apply(ONES(2), None), ONES(2))[1].sum().backward()
    return len(gradients)


@eager("has a backward that changes sizes or memory", errors.UnsupportedMutationError)
def _(wrap):
    found = []
    for write in (lambda b, _: b.resize_(1), lambda b, _: b.set_(torch.ones(5)), lambda b, _: b.unsqueeze_(0)):
        apply, buffer = writing(write).apply, torch.zeros(2)
        wrap(lambda x, b, apply=apply: apply(x, b).sum())(ONES(2), buffer).backward()
        found.append(buffer)
    return found


@eager("puts a hook that writes a tensor on a leaf", errors.UnsupportedMutationError)
def _(wrap):
    seen = torch.zeros(2)

    def function(x):
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(lambda gradient: seen.add_(1))
        return (x * leaf).sum()

    wrap(function)(ONES(2)).backward()
    return seen[0]


@eager("takes `.grad` of an argument as an argument", errors.UnsupportedError)
def _(wrap):
    x = ONES(2)
    x.grad = torch.ones(2)
    return wrap(lambda x, gradient: (x * gradient).sum() + x.grad.sum())(x, x.grad)


@eager("puts a hook on a tensor, and the hook has an effect in Python", errors.UnsupportedSideEffectError)
def _(wrap):
    seen = []

    def function(x):
        y, z = x.sin(), x.cos()
        y.register_hook(lambda g: seen.append((g * z).sum()))
        return y * 2

    wrap(function)(ONES(1, 2)).sum().backward()
    return seen


@eager("calls `backward()`, and the gradient goes on outside", errors.UnsupportedSideEffectError)
def _(wrap):
    def function(x):
        (x * 2).sum().backward()
        return x * 3

    leaf = ONES(2)
    wrap(function)(leaf * 1)
    return leaf.grad


def hooked(function, *args):
    function(*args).sum().backward()
    return args[0].grad


@eager(
    "puts a hook on an argument, a parameter or a closed-over tensor, and the hook", errors.UnsupportedSideEffectError
)
def _(wrap):
    def function(x):
        total = x.detach().sum()
        x.register_hook(lambda gradient: gradient * total)
        return x.sin()

    return hooked(wrap(function), ONES(2))


@eager("puts a hook on an argument, a parameter or a closed-over tensor that shares", errors.UnsupportedSideEffectError)
def _(wrap):
    def function(x, view):
        x.register_hook(lambda gradient: gradient * 2)
        return x * view

    x = ONES(2)
    return hooked(wrap(function), x, x.detach()[:1])


@eager("puts a hook on a node (`y.grad_fn.register_hook`)", errors.UnsupportedSideEffectError)
def _(wrap):
    scale = {"by": 2.0}

    def function(x):
        y = x.sin()
        y.grad_fn.register_hook(lambda inputs, _: (inputs[0] * scale["by"],))
        return y * 2

    x = ONES(1)
    y = wrap(function)(x)
    scale["by"] = 3.0
    return torch.autograd.grad(y, x)[0]


@eager("looks at the code that calls it", errors.UnsupportedSideEffectError)
def _(wrap):
    return wrap(lambda x: x * any(info.function == "_" for info in inspect.stack(0)))(torch.ones(1))


@eager("may read the exception of an `except` block", errors.UnsupportedSideEffectError)
def _(wrap):
    try:
        raise KeyError
    except KeyError:
        return wrap(lambda x: x * (2 if sys.exc_info()[0] is KeyError else 1))(torch.ones(1))


@eager("has a hook or custom Function whose backward reads an object", errors.UnsupportedSideEffectError)
def _(wrap):
    def function(x, config):
        y = x * 2
        y.register_hook(lambda gradient: gradient * config["scale"])
        return y.sum()

    x, config = ONES(2), {"scale": 2.0}
    loss = wrap(function)(x, config)
    config["scale"] = 3.0
    loss.backward()
    return x.grad


@eager("compares (`is`, `in`, a key of a dict) an argument", errors.UnsupportedTensorError)
def _(wrap):
    known = TwoTensor(torch.ones(2), torch.ones(2))
    members = {known}
    return wrap(lambda x: x * 2 if x in members else x * 3)(known).a


COUNTS = {"backwards": 0}


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        COUNTS["backwards"] += 1
        return g * 2


@eager("has a custom Function whose backward reads Python state", errors.UnsupportedSideEffectError)
def _(wrap):
    def function(x):
        Counted.apply(x).sum().backward()
        return Counted.apply(x).sum() + COUNTS["backwards"]

    COUNTS["backwards"] = 0
    x = ONES(2)
    return torch.autograd.grad(wrap(function)(x), x)[0] + COUNTS["backwards"]


@eager("returns a sparse gradient of", errors.UnsupportedLayoutError)
def _(wrap):
    def function(weight):
        loss = nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum()
        return torch.autograd.grad(loss, weight)[0]

    return wrap(function)(ONES(5, 3)).to_dense()


# ------------------------------------------------------------------------------------------------ raised
@raised("takes a sparse gradient with", errors.UnsupportedLayoutError)
def _(wrap):
    weight = ONES(5, 3)
    loss = wrap(lambda w: nn.functional.embedding(torch.tensor([1, 2]), w, sparse=True).sin().sum())(weight)
    torch.autograd.grad(loss, weight, create_graph=True)


@raised("runs a backward with `create_graph=True` that writes", errors.UnsupportedMutationError)
def _(wrap):
    x, apply = ONES(2), writing(lambda buffer, gradient: buffer.add_(gradient.sum())).apply
    torch.autograd.grad(wrap(lambda x, b: apply(x, b).sin().sum())(x, torch.zeros(2)), x, create_graph=True)


@raised("runs a second time a backward", errors.UnsupportedMutationError)
def _(wrap):
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.buffer = x.detach().clone()
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.buffer.add_(1)

    loss = wrap(lambda x: Writes.apply(x).sum())(ONES(2))
    loss.backward(retain_graph=True)
    loss.backward()


@raised("takes a gradient outside with `create_graph=True`, and the incoming", errors.UnsupportedError)
def _(wrap):
    x = ONES(2)
    out = wrap(torch.sin)(x)
    with forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones(2), torch.ones(2)), create_graph=True)


@raised("differentiates the gradient that a hook with Python", errors.UnsupportedOpError)
def _(wrap):
    kept = []

    def function(x):
        hidden = x.sin()
        hidden.register_hook(lambda gradient: kept.append(gradient))
        return (hidden * 2).cos().sum()

    x = ONES(3)
    (gradient,) = torch.autograd.grad(wrap(function)(x), x, create_graph=True)
    gradient.sum().backward()


# ------------------------------------------------------------------------------------------------ silent
def outcome_of(function):
    """The value, or the class of the error."""
    try:
        return function()
    except RuntimeError as error:
        return type(error)


@silent("takes a gradient, frees the graph")
def _(wrap):
    x = ONES(2)
    loss = wrap(lambda x: (x.exp() * x).sum())(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(loss, x)
    return outcome_of(lambda: torch.autograd.grad(gradient.sum(), x)[0])


@silent("runs a second backward through a selective")
def _(wrap):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    function = lambda x: checkpoint(lambda x: (x @ x).sin().sum(), x, use_reentrant=False, context_fn=contexts)
    loss = wrap(function)(ONES(2, 2))
    loss.backward(retain_graph=True)
    return outcome_of(loss.backward)


@silent("changes in place a returned view")
def _(wrap):
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    y = wrap(lambda x: Identity.apply(x * 2))(ONES(2))
    return outcome_of(lambda: y.mul_(2))


@silent("adds to the loss a gradient taken outside")
def _(wrap):
    def function(x):
        hidden = x.exp()
        hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return (hidden * hidden).sum()

    x = ONES(2)
    loss = wrap(function)(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.sum()).backward()
    return x.grad


@silent("takes `binary_cross_entropy` of dual numbers")
def _(wrap):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.tensor([1.0]), torch.ones(1))
        loss = wrap(nn.functional.binary_cross_entropy)(x, torch.ones(1))
        return forward_ad.unpack_dual(loss).tangent.isnan()


@silent("puts one `torch.autocast` block around several")
def _(wrap):
    weight = ONES(4, 4)
    call = wrap(lambda x: (x @ weight).sum())
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            loss = call(torch.ones(2, 4))
            with torch.no_grad():
                weight.add_(1)
    return loss


@silent("puts `torch.autocast` around a backward alone")
def _(wrap):
    x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
    loss = wrap(lambda x: (x @ x.sin()).sum())(x)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return x.grad


@silent("puts `parametrize.cached()` around several calls")
def _(wrap):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    net = nn.Linear(2, 2, bias=False)
    nn.init.ones_(net.weight)
    parametrize.register_parametrization(net, "weight", Doubled())
    call = wrap(net)
    with parametrize.cached(), torch.no_grad():
        call(torch.ones(1, 2))
        net.parametrizations.weight.original.add_(1)
        return call(torch.ones(1, 2))


@silent("uses `record_function` inside")
def _(wrap):
    def function(x):
        with torch.profiler.record_function("inside"):
            return x.sin()

    call = wrap(function)
    call(torch.ones(2))
    with torch.autograd.profiler.profile() as profile:
        call(torch.ones(2))
    return any(event.key == "inside" for event in profile.key_averages())


@silent("the function tried to import a missing module")
def _(wrap):
    def function(x):
        try:
            import foregrad_comes_later
        except ImportError:
            return x
        return x * foregrad_comes_later.rate

    call = wrap(function)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        call(torch.ones(1))
        pathlib.Path(folder, "foregrad_comes_later.py").write_text("rate = 2.0")
        importlib.invalidate_caches()
        found = call(torch.ones(1))
    sys.modules.pop("foregrad_comes_later", None)
    return found


@silent("sets `args` of an exception")
def _(wrap):
    error = ValueError(0)

    def function(x):
        error.args = (error.args[0] + 1,)
        return x * 2

    call = wrap(function)
    for _ in range(3):
        call(torch.ones(1))
    return torch.tensor(error.args[0])


@silent("uses a bare `raise`, in no `except` block")
def _(wrap):
    def function(x):
        try:
            raise  # noqa: PLE0704 (what the caller handles)
        except (RuntimeError, KeyError) as error:
            return x * (2.0 if isinstance(error, KeyError) else 1.0)

    call = wrap(function)
    call(torch.ones(1))
    try:
        raise KeyError
    except KeyError:
        return call(torch.ones(1))


@silent("changes Python state between forward and backward, and the unpack hook")
def _(wrap):
    scale, x = {"by": 1.0}, ONES(1)

    def function(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * scale["by"]):
            return x.sin()

    y = wrap(function)(x)
    scale["by"] = 2.0
    return torch.autograd.grad(y, x)[0]


@silent("sets, between forward and backward, a plain class attribute")
def _(wrap):
    class Scaled(torch.autograd.Function):
        scale = 1.0

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * Scaled.scale

    x = ONES(2)
    y = wrap(lambda x: Scaled.apply(x).sum())(x)
    type.__setattr__(Scaled, "scale", 2.0)
    y.backward()
    return x.grad


@silent("calls a function with `functools.lru_cache`")
def _(wrap):
    doubled = functools.lru_cache(lambda n: n * 2)
    call = wrap(lambda x: x * doubled(3))
    for _ in range(3):
        call(torch.ones(1))
    return doubled.cache_info().hits


@silent("changes Python state between forward and backward, and a checkpointed part")
def _(wrap):
    scale = {"by": 1.0}
    call = wrap(lambda x: checkpoint(lambda x: (x.sin() * scale["by"]).exp().sum(), x, use_reentrant=False))
    x = ONES(2)
    loss = call(x)
    scale["by"] = 3.0
    loss.backward()
    return x.grad


@silent("a function with variables of an enclosing function")
def _(wrap):
    def one_of(factor):
        return lambda x: x * factor

    part = one_of(1.0)

    call = wrap(lambda x: part(x))
    call(torch.ones(1))
    factor = 2.0
    part.__code__ = (lambda x: x * factor * 2.0).__code__
    return call(torch.ones(1))


@silent("reads items after the first behind a pointer of `ctypes`")
def _(wrap):
    array = (ctypes.c_double * 2)(2.0, 3.0)
    pointer = ctypes.cast(array, ctypes.POINTER(ctypes.c_double))
    call = wrap(lambda x: x * pointer[1])
    call(torch.ones(1))
    array[1] = 7.0
    return call(torch.ones(1))


@eager("writes to Python's state under a lock", errors.UnsupportedSideEffectError)
def _(wrap):
    lock, counts = threading.Lock(), [0]

    def function(x):
        with lock:
            counts[0] += 1
        return x.sin()

    return wrap(function)(torch.ones(1)), counts


@silent("writes an attribute, list or dict while another thread")
def _(wrap):
    counts = {"n": 0}

    def others_count(x):
        thread = threading.Thread(target=lambda: counts.update(n=counts["n"] + 1))
        thread.start()
        thread.join()
        return x.sin()

    def function(x):
        counts["n"] += 1
        return torch.ops.limits_of_threads.sin(x)

    library = torch.library.Library("limits_of_threads", "DEF")
    library.define("sin(Tensor x) -> Tensor")
    library.impl("sin", others_count, "CPU")
    library.impl("sin", torch.empty_like, "Meta")
    try:
        wrap(function)(torch.ones(1))
    finally:
        library._destroy()
    return counts["n"]


@silent("a function or method inside PyTorch, NumPy")
def _(wrap):
    call = wrap(lambda x: x.sin())
    call(torch.ones(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sin", torch.Tensor.cos)
        return call(torch.ones(1))


@silent("reads a recurrent layer's list of weights")
def _(wrap):
    layer = nn.GRU(2, 2)
    weights = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    wrap(lambda weights, x: torch.func.functional_call(layer, weights, (x,)))(weights, torch.ones(1, 2))
    return layer._flat_weights[0].any()


@silent("a built-in function or class is replaced for all modules")
def _(wrap):
    call = wrap(lambda x: x * abs(-2.0))
    call(torch.ones(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "abs", lambda value: value)
        return call(torch.ones(1))


@silent("a class gets new bases")
def _(wrap):
    class One:
        rate = 1.0

    class Two:
        rate = 2.0

    class Kind(One):
        pass

    kind = Kind()
    call = wrap(lambda x: x * kind.rate)
    call(torch.ones(1))
    Kind.__bases__ = (Two,)
    return call(torch.ones(1))


@silent("sums gradients with a dimension of size 1")
def _(wrap):
    call = wrap(lambda x: (x * 1).flip(0).sin().sum() + (x * 1).t().cos().sum())
    x = torch.randn(3, 1, requires_grad=True)
    return torch.tensor(torch.autograd.grad(call(x), x)[0].stride())


@silent("puts a hook on the node that accumulates a leaf's gradient")
def _(wrap):
    weight = ONES(1)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0] * 2,))

    def step(x):
        (x * weight).sum().backward()
        return weight.grad * 1

    return wrap(step)(torch.ones(1))


@silent("asks whether a size is a `torch.SymInt`")
def _(wrap):
    call = wrap(lambda x: x * (2.0 if isinstance(x.shape[0], torch.SymInt) else 1.0))
    call(torch.ones(2))
    return call(torch.ones(3))


@silent("reads `_version` of a tensor that it detached")
def _(wrap):
    call = wrap(lambda x: x.detach().add_(1)._version)
    x = torch.ones(1)
    call(x)
    return torch.tensor(call(x))


@silent("calls a C function of `ctypes` or Cython that no name")
def _(wrap):
    table = {"rand": ctypes.CDLL(None).rand}
    call = wrap(lambda x: x + table["rand"]())
    return len({call(torch.zeros(1, dtype=torch.int64)).item() for _ in range(6)}) == 6


@silent("writes in place to a result of `torch.unsafe_split`")
def _(wrap):
    def write(x):
        y = x * 2
        torch.unsafe_chunk(y, 2)[0].mul_(3)
        return y

    return wrap(write)(torch.ones(4))


@silent("registers `weakref.finalize` on a tensor")
def _(wrap):
    ended = []

    def function(x):
        weakref.finalize(x * 2, ended.append, 1)
        return x * 3

    call = wrap(function)
    for _ in range(3):
        call(torch.ones(1))
    return len(ended)


@silent("puts a hook on one result, or on an argument")
def _(wrap):
    called = []
    result, other = wrap(lambda x, w: (x * 2, w * 3))(ONES(2), weight := ONES(2))
    result.register_hook(lambda gradient: called.append(1))
    torch.autograd.grad(result.sum() + other.sum(), weight)
    return len(called)


@silent("calls `torch.cond`, and only the branch not taken")
def _(wrap):
    layer = nn.Linear(2, 2)
    call = wrap(lambda x: torch.cond(x.sum() > 0, layer, torch.sin, (x,)))
    call(torch.full((2,), -1.0, requires_grad=True)).sum().backward()
    return layer.weight.grad is None


@silent("passes a wrapper subclass whose class has side effects")
def _(wrap):
    class Counting(TwoTensor):
        calls = 0

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            Counting.calls += 1
            return super().__torch_dispatch__(func, types, args, kwargs)

    call = wrap(torch.sin)
    for _ in range(3):
        call(Counting(torch.ones(2), torch.ones(2)))
    return Counting.calls


@silent("asks for the class of an argument whose class is an empty subclass")
def _(wrap):
    class Weight(nn.Parameter):
        pass

    return wrap(lambda w: w * (2 if type(w) is Weight else 3))(Weight(torch.ones(1)))


# Told by other tests, or not to be shown by a program of a few lines.
ELSEWHERE = {
    "calls an operator with an ordered effect and no result": "tests/effects/test_checks.py",
    "logs, and a handler of your own": "tests/python/test_handlers_of_logs.py",
    "calls `torch.nn.functional.bilinear` or `torch.linalg.pinv` under": "tests/parity/test_mixed_dtypes.py",
    "with Inductor, writes an argument several times": "the programs here have eager's kernels",
    "writes through `.data`, after the call": "tests/parity/regressions_aliases.py: it takes a saved copy",
    "passes an argument whose own backward raises": "tests/regions/programs_once.py",
    "passes a gradient with a layout": "rounding of kernels",
    "calls `type` under a second name": "tests/parity/test_types_asked.py",
    "writes, between forward and backward, a tensor from outside": "the error is PyTorch's",
    "calls a function under `lru_cache(maxsize=n)`": "what C keeps of an entry that was taken out",
    "names a list, dict, tuple or deque of over": "tests/python/test_large_state.py",
    "names an array of NumPy": "tests/python/test_large_state.py",
    "reads an object behind 100 objects": "tests/python/test_large_state.py",
    "asks PyTorch's private names": "the keys of stand-ins are PyTorch's",
    "an operator in a graph that has written": "tests/effects/test_faults.py",
    "an operator in a graph with a collective": "tests/effects/test_faults.py",
    "an operator in a function that catches": "tests/effects/test_faults.py",
    "an operator in a backward": "tests/effects/test_faults.py",
    "an operator before `optimizer.zero_grad()`": "tests/effects/test_faults.py",
    "an interrupt while a graph runs": "tests/guards/test_interrupts.py",
    "an interrupt while the function is captured": "tests/python/test_other_threads.py",
    "an exception that another thread sets": "tests/guards/test_interrupts.py",
}


def rows_of(title):
    """The rows of the tables below a title of the page, without the tables' heads."""
    lines = tables_of(PAGE.read_text(), title).splitlines()
    return [line[2:] for line, after in itertools.pairwise(lines) if line[:2] == "| " and after[:2] != "|-"]


def test_every_row_is_told():
    titles = ("## Silent differences", "## Calls that run eagerly", "## Operations that raise")
    rows = [row for title in (*titles, "## When an operator raises") for row in rows_of(title)]
    rows = [row for row in rows if row not in rows_of("### Memory, views and sizes")]
    known = [*SILENT, *RAISED, *EAGER, *ELSEWHERE]
    assert [row for row in rows if not any(row.startswith(one) for one in known)] == []
    assert [one for one in known if not any(row.startswith(one) for row in rows)] == []


@pytest.mark.parametrize(
    ("title", "programs"),
    [("## Silent differences", SILENT), ("## Calls that run eagerly", EAGER), ("## Operations that raise", RAISED)],
)
def test_a_row_is_in_the_table_of_its_outcome(title, programs):
    rows = rows_of(title)
    assert [one for one in programs if not any(row.startswith(one) for row in rows)] == []


def eagerly(function):
    return function


def compiled(function, **how):
    return foregrad.compile(function, backend="eager", **how)


def same(left, right):
    if isinstance(left, list):
        return all(map(same, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("beginning", EAGER)
def test_eager_by_name(beginning):
    program, error = EAGER[beginning]
    with pytest.raises(error):
        program(functools.partial(compiled, on_unsupported="raise"))
    with pytest.warns(errors.ForegradWarning):
        found = program(functools.partial(compiled, on_unsupported="eager"))
    assert same(found, program(eagerly))


@pytest.mark.parametrize("beginning", RAISED)
def test_raised(beginning):
    program, error = RAISED[beginning]
    with pytest.raises(error):
        program(compiled)


@pytest.mark.parametrize("beginning", SILENT)
def test_silent(beginning):
    """When this fails, the row goes: the program is as in eager."""
    program = SILENT[beginning]
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.ForegradWarning)
        found = program(functools.partial(compiled, on_unsupported="eager"))
    assert not same(found, program(eagerly))
