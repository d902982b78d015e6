"""The C++ kernels of a graph are compiled in one go, bound to Python, and compute what they do when compiled alone."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

import foregrad
from foregrad.inductor._torch import inductor as door
from foregrad.inductor._torch import kernels

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
HALVE = f"""
{HEADER}
extern "C" void kernel(const float* in, float* out, const int64_t n)
{{
    #pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) out[i] = in[i] / 2;
}}
"""
CHECK = f"""
{HEADER}
static int64_t limit() {{ return 3; }}
extern "C" void kernel(float* out, const int64_t n)
{{
    if (n > limit()) throw std::runtime_error("too many");
    out[0] = static_cast<float>(n);
}}
"""
NUMBERS = [f"n{i}" for i in range(1000)]  # as many arguments as an optimizer's update of a deep network has
SUM = f"""
{HEADER}
extern "C" void kernel(float* out, {", ".join(f"const int64_t {n}" for n in NUMBERS)})
{{
    out[0] = {" + ".join(NUMBERS)};
}}
"""


@pytest.fixture(scope="module")
def made():
    # A helper of the same name in two kernels, and two kernels called `kernel`.
    scale = CHECK.replace("limit() { return 3", "limit() { return 30").replace("(n)", "(n * 2)")
    sources = [HALVE, CHECK, scale, SUM]
    found = kernels._compiled(sources, 1, None)
    return [found[source] for source in sources]


def test_kernels_of_one_file_are_called_with_tensors_and_numbers(made):
    halve, check, scale, total = made
    x, out = torch.arange(4.0), torch.empty(4)
    assert halve(x, out, 3) is None
    assert torch.equal(out[:3], x[:3] / 2)
    check(out, 2)
    assert out[0] == 2
    scale(out, 5)
    assert out[0] == 10
    total(out, *range(1000))
    assert out[0] == sum(range(1000))


def test_what_goes_wrong_in_a_kernel_is_a_python_error(made):
    halve, check, *_ = made
    out = torch.empty(1)
    with pytest.raises(RuntimeError, match="too many"):
        check(out, 4)
    with pytest.raises(RuntimeError, match="non-tensor"):
        check("no tensor", 1)
    with pytest.raises(TypeError):
        check(out, "no number")
    with pytest.raises(OverflowError):
        check(out, 2**70)
    with pytest.raises(TypeError, match="a kernel of 3 arguments was given 2"):
        halve(out, out)


def test_which_kernels_can_share_a_file():
    assert kernels._can_share(HALVE)
    assert not kernels._can_share(HALVE.replace(HEADER, "#define n 3"))
    assert not kernels._can_share(HALVE.replace("kernel(", "other("))
    assert not kernels._can_share(HALVE + 'extern "C" void helper() {}')


def test_files_are_as_many_as_compilers_and_of_a_few_kernels_each():
    sources = ["k" * n for n in range(1, 18)]

    def sizes(count, compilers):
        files = kernels._shared_out(sources[:count], compilers)
        assert sorted(source for file in files for source in file) == sorted(sources[:count])
        return sorted(map(len, files))

    assert sizes(17, 1) == [17]
    assert sizes(4, 8) == [4]
    assert sizes(5, 8) == [2, 3]
    assert len(sizes(17, 2)) == 2
    assert len(sizes(17, 100)) == 5
    many = [str(n) for n in range(200)]
    assert max(map(len, kernels._shared_out(many, 1))) <= kernels._MOST


class Steps(torch.nn.Module):
    """Several kernels with products of matrices in between."""

    def forward(self, x, w):
        for shift in range(1, 4):
            x = torch.tanh((x + shift) @ w)
        return x.softmax(1).sum(0)


def gradients(run):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator).requires_grad_()
    w = torch.randn(7, 7, generator=generator).requires_grad_()
    out = run(x, w)
    return out, *torch.autograd.grad(out.sin().sum(), (x, w))


def test_the_graphs_of_a_function_are_a_file_each(monkeypatch):
    files = []
    original = kernels._file
    monkeypatch.setattr(kernels, "_file", lambda sources: (files.append(len(sources)), original(sources))[1])
    monkeypatch.setattr(kernels, "_compilers_at_once", lambda: 1)
    torch.testing.assert_close(gradients(foregrad.compile(Steps(), backend="inductor")), gradients(Steps()))
    assert len(files) == 2
    assert min(files) > 1
    assert AsyncCompile.wait.__module__ == AsyncCompile.__module__  # PyTorch's own is back


def test_what_does_not_compile_together_is_compiled_one_by_one(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_file", lambda sources: "#error nothing")
    with caplog.at_level(logging.WARNING, "foregrad"):
        found = gradients(foregrad.compile(Steps(), backend="inductor"))
    torch.testing.assert_close(found, gradients(Steps()))
    assert "kernels are compiled one by one" in caplog.text


def test_other_threads_compile_as_ever():
    from torch._inductor.async_compile import AsyncCompile

    seen = []

    def elsewhere():
        seen.append(getattr(kernels._active, "waiting", None))

    before = AsyncCompile.cpp_pybinding
    with kernels.kernels_together():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with kernels.kernels_together():
            assert AsyncCompile.cpp_pybinding is not before
    assert AsyncCompile.cpp_pybinding is before
    assert seen == [None]


def test_a_kernel_called_before_its_neighbours_are_there_is_compiled_alone():
    class Later:
        def result(self):
            return lambda x: x + 1

    assert kernels._Pending("source", lambda: Later())(1) == 2
    assert kernels._Pending("source", lambda: lambda x: x + 2)(1) == 3
