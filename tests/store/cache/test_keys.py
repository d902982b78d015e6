"""Programs that differ in one thing have keys that differ; the same program has one key, in every process."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys

import pytest
import torch
import torch._functorch.config as functorch
from functorch.compile import min_cut_rematerialization_partition as torch_min_cut

import foregrad
from foregrad.store.cache import keeper
from foregrad.store.cache.describe import UndescribedError, describe, digest
from tests.store.cache.kept import fresh_cache, keys_in, register

aten = torch.ops.aten
NAN, MINUS_NAN = math.copysign(math.nan, 1.0), math.copysign(math.nan, -1.0)
X = {"size": (4, 3), "dtype": torch.float32, "grad": True}


def make_input(size, dtype, grad, stride=None, offset=0):
    torch.manual_seed(0)
    x = torch.randn(size, dtype=dtype)
    if stride is not None:
        x = torch.as_strided(torch.randn(100, dtype=dtype), size, stride, offset)
    return x.detach().requires_grad_(grad)


def scaled(constant):
    return lambda x: (x * constant).sin().sum()


class Module(torch.nn.Module):
    def __init__(self, mode="a", width=3):
        super().__init__()
        self.mode = mode
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        factor = 2.0 if self.mode in ("a", "b") else 3.0
        return (x * factor).sin().sum() + self.weight.sum()


def with_flag(x, flag):
    if not flag:
        return x.sum()
    return (x * 2.0).sin().sum()


def sized(least):
    def f(x):
        return (x * 2.0).sin().sum() if x.shape[0] > least else x.cos().sum()

    return f


def listed(x, values):
    return sum(part.sin().sum() for part in values) + x.sum()


def decomposition(factor):
    return {aten.cos.default: lambda x: torch.sin(x + factor)}


def other_decomposition(x):
    return torch.sin(x - 0.5) * 1.0


def policy(limit):
    return foregrad.Policy(lambda candidate: candidate.nbytes > limit)


BASE = scaled(2.0)

# name: (function, input, further arguments, options of compile, context)
PROGRAMS = {
    **{f"constant {c!r}": (scaled(c), {}, (), {}) for c in (2.0, 2.5, 2, True, 0.0, -0.0, 1e-30, math.inf, math.nan, 2.0000000000000004, 1 + 2j, 10**9)},
    **{f"closure {v!r}": (lambda x, v=v: (x + v).sin().sum(), {}, (), {}) for v in (1, 1.5, 3)},
    **{f"power {p}": (lambda x, p=p: (x**p).sin().sum(), {}, (), {}) for p in (2, 3, 2.5)},
    **{f"argument {flag!r}": (with_flag, {}, (flag,), {}) for flag in (True, 1, "yes", 7, (1,), b"1")},
    **{f"module's attribute {mode}": (Module(mode), {}, (), {}) for mode in "ab"},
    "another width": (Module("a", 5), {}, (), {}),
    **{f"dtype {d}": (BASE, {"dtype": d}, (), {}) for d in (torch.float64, torch.float16, torch.bfloat16, torch.complex64)},
    "no gradient": (BASE, {"grad": False}, (), {}),
    **{f"size {s}": (BASE, {"size": s}, (), {}) for s in ((5, 3), (3, 4), (12,), (4, 3, 1))},
    "strides": (BASE, {"stride": (1, 4)}, (), {}),
    "offset": (BASE, {"stride": (3, 1), "offset": 2}, (), {}),
    **{f"guard on a size {n}": (sized(n), {}, (), {"dynamic": True}) for n in (1, 2, 3)},
    "symbolic sizes": (BASE, {}, (), {"dynamic": True}),
    **{f"symbolic sizes, {n} first, budget": (BASE, {"size": (n, 3)}, (), {"dynamic": True, "memory_budget": 0.5}) for n in (4, 6)},
    **{f"list of {n}": (listed, {}, ([torch.ones(2)] * n,), {}) for n in (1, 2)},
    "tuple": (listed, {}, ((torch.ones(2), torch.ones(2)),), {}),
    "list of two": (listed, {}, ([torch.ones(2), torch.ones(2)],), {}),
    **{f"decomposition {f}": (BASE, {}, (), {"decompositions": decomposition(f)}) for f in (0.5, 0.25)},
    "decomposition otherwise": (BASE, {}, (), {"decompositions": {aten.cos.default: other_decomposition}}),
    "decomposition of what is not there": (BASE, {}, (), {"decompositions": {aten.tanh.default: other_decomposition}}),
    **{f"partition {p}": (BASE, {}, (), {"partition": p}) for p in ("min_cut", "fused")},
    **{f"policy {n}": (BASE, {}, (), {"partition": policy(n)}) for n in (10, 11)},
    "named policy": (BASE, {}, (), {"partition": foregrad.dots_saveable}),
    "another named policy": (BASE, {}, (), {"partition": foregrad.nothing_saveable}),
    **{f"budget {b}": (BASE, {}, (), {"memory_budget": b}) for b in (0.5, 0.75, "1 MiB")},
    **{f"PyTorch's partition, {b}": (BASE, {}, (), {"partition": torch_min_cut}, lambda b=b: functorch.patch(activation_memory_budget=b)) for b in (0.5, 1.0)},
    "backend": (BASE, {}, (), {"backend": "kept too"}),
    "backend's key": (BASE, {}, (), {"backend": "kept otherwise"}),
    "setting": (BASE, {}, (), {}, lambda: foregrad.config.override(higher_order=False)),
    "autocast": (BASE, {}, (), {}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "threads": (BASE, {}, (), {}, lambda: threads(2)),
    "function's name": (Module("a").forward, {}, (), {}),
    "two results": (lambda x: ((x * 2.0).sin().sum(), x.detach()), {}, (), {}),
    "result in a dict": (lambda x: {"y": (x * 2.0).sin().sum()}, {}, (), {}),
    "result in another dict": (lambda x: {"z": (x * 2.0).sin().sum()}, {}, (), {}),
    "a write": (lambda x: x.detach().mul_(2) is None or (x * 2.0).sin().sum(), {}, (), {}),
}  # fmt: skip


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keys_of(name):
    function, given, further, options, *context = PROGRAMS[name]
    register("kept too")
    register("kept otherwise", {"kept": 2})
    around = context[0]() if context else contextlib.nullcontext()
    with fresh_cache() as folder, around:
        foregrad.compile(function, **{"backend": "kept", **options})(make_input(**{**X, **given}), *further)
        return keys_in(folder)


def test_programs_that_differ_in_one_thing_have_different_keys():
    found = {name: keys_of(name) for name in PROGRAMS}
    assert len(PROGRAMS) >= 60
    assert {name: len(keys) for name, keys in found.items()} == dict.fromkeys(PROGRAMS, 1)
    by_key = {}
    for name, (key,) in found.items():
        by_key.setdefault(key, []).append(name)
    assert [names for names in by_key.values() if len(names) > 1] == []


def numbered(x, n):
    return (x * n).sin().sum()


@pytest.mark.parametrize("further", [(), ("a number",)])
def test_symbolic_sizes_have_one_key_whatever_comes_first(further):
    keys = []
    for first in (4, 6, 9):
        with fresh_cache() as folder:
            compiled = foregrad.compile(numbered if further else BASE, backend="kept", dynamic=True)
            for n in (first, first + 1) if further else (first,):
                compiled(make_input((first, 3), torch.float32, True), *((n,) if further else ()))
            keys.append(keys_in(folder) - (static_keys(first) if further else set()))
    assert [len(found) for found in keys] == [1, 1, 1]
    assert len(set.union(*keys)) == 1


def static_keys(number):
    with fresh_cache() as folder:
        x = make_input((number, 3), torch.float32, True)
        foregrad.compile(numbered, backend="kept", dynamic=True)(x, number)
        return keys_in(folder)


@pytest.mark.parametrize("name", list(PROGRAMS)[::4])
def test_the_same_program_has_the_same_key(name):
    assert keys_of(name) == keys_of(name)


SCRIPT = """
import sys, torch
sys.path[:0] = {path!r}
from tests.store.cache import kept
from tests.store.cache import test_keys
kept.register()
for name in ("constant 2.5", "module's attribute a", "guard on a size 2", "policy 10", "decomposition 0.5", "result in a dict"):
    print(*test_keys.keys_of(name))
"""


def test_keys_are_the_same_in_other_processes_and_for_other_hash_seeds():
    found = set()
    for seed in ("0", "77"):
        script = SCRIPT.format(path=sys.path)
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(done.stdout.split()) == 6
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("named", [torch, torch.version], ids=["version", "commit"])
def test_another_pytorch_has_keys_of_its_own(monkeypatch, named):
    before = keys_of("constant 2.5")
    with monkeypatch.context() as patch:
        patch.setattr(named, {torch: "__version__", torch.version: "git_version"}[named], "2.99.0")
        keeper.process.cache_clear()
        other = keys_of("constant 2.5")
    keeper.process.cache_clear()
    assert len(other) == 1
    assert other.isdisjoint(before)
    assert keys_of("constant 2.5") == before


# ------------------------------------------------------------------------------------------------ what can be described


def test_functions_are_described_by_their_source():
    def made(constant, default=1):
        def f(x, y=default):
            return g(x) + constant

        def g(x):
            return x * constant

        return f

    same, other, otherwise = made(2.0), made(3.0), made(2.0, default=2)
    assert describe(made(2.0)) == describe(same)
    assert len({digest(describe(f)) for f in (same, other, otherwise, lambda x: x, lambda x: -x)}) == 5


def test_what_may_behave_otherwise_next_time_is_not_described():
    class Opaque:
        pass

    thing = Opaque()
    for value in (thing, Opaque, lambda: thing, pytest, torch.ones(2), object(), iter(()), [].append):
        with pytest.raises(UndescribedError):
            describe(value)


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0, True, "1", 1j, b"1", (1,), [1], {1}, {1: None}, torch.Size([1]), range(1), slice(1)),
        (0.0, -0.0, math.nan, None, "", (), [], {}, set(), frozenset([()]), ...),
        (torch.float32, "torch.float32", torch.device("cpu"), "cpu", torch.strided, torch.channels_last),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}, [["a", 1], ["b", 2]]),
        (aten.add.Tensor, aten.add.Scalar, torch.add, math.sin, math.cos),
    ],
)
def test_values_that_differ_are_described_differently(values):
    assert len({digest(describe(value)) for value in values}) == len(values)


def test_sets_have_one_description():
    assert describe({"a", "b", "c"}) == describe({"c", "b", "a"})


@pytest.mark.parametrize(("one", "other"), [(NAN, MINUS_NAN), (0.0, -0.0), (complex(1, NAN), complex(1, MINUS_NAN))])
def test_the_sign_of_nan_and_of_zero_is_a_part_of_a_key(one, other):
    assert describe(one) == describe(one)
    assert describe(one) != describe(other)


def test_the_sign_of_nan_is_a_part_of_guards_constants_and_artifacts(tmp_path):
    def function(x, value):
        return torch.copysign(x, torch.full_like(x, value)), torch.copysign(x, torch.full_like(x, MINUS_NAN))

    compiled, x = foregrad.compile(function, backend="eager"), torch.ones(2)
    for value in (NAN, MINUS_NAN, NAN):
        assert all(map(torch.equal, compiled(x, value), function(x, value)))
    foregrad.export(lambda x: function(x, NAN), (x,)).save(tmp_path / "file")
    assert all(map(torch.equal, foregrad.load(tmp_path / "file")(x), function(x, NAN)))
