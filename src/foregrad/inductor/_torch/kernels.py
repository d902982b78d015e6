"""Inductor's C++ kernels of one graph compiled together, not one by one. Checked on torch 2.13.0.

Inductor starts the C++ compiler once for each kernel, and most of a start's second goes to the headers and to linking.
Here the kernels of a graph are shared out among as many files as compilers may run at once, a few kernels in each at
least, every one in a namespace of its own, and one Python module binds a file's kernels. Compiler, flags and kernels'
text are Inductor's, and so is the folder where the result is kept. Kernels that can't share a file, or files that do
not compile, go Inductor's way.

Known weakness: whole files are cached. A graph with one new kernel compiles its neighbours again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import headline
from ...interrupts import runs_compiler
from ...locks import ProcessPatch, Replacements, bound

_guards: Any = torch._C._dynamo.guards

log = logging.getLogger("foregrad")

_FEWEST = 4  # kernels in a file: they take as long as the start of a compiler does
_MOST = 64  # for the compiler's memory

_active = threading.local()


@contextlib.contextmanager
def kernels_together() -> Iterator[None]:
    """Context: kernels of all graphs that Inductor compiles inside, on this thread, are compiled together at the end.

    A nested context does nothing.
    """
    if getattr(_active, "waiting", None) is not None:
        yield
        return
    waiting: list[Any] = []
    with _patches, bound(_active, "waiting", waiting):
        yield
        _compile_waiting(waiting)


def _install() -> None:
    from torch._inductor.async_compile import AsyncCompile

    _originals[:] = [AsyncCompile.cpp_pybinding, AsyncCompile.wait]
    _replaced.bind(AsyncCompile, "cpp_pybinding", _cpp_pybinding)
    _replaced.bind(AsyncCompile, "wait", _wait)


_replaced = Replacements()
_patches = ProcessPatch(_install, _replaced.restore)
_originals: list[Any] = []


class _Pending:
    """A kernel that waits for its neighbours. Called before they are compiled, it is compiled alone."""

    def __init__(self, source: str, alone: Callable[[], Any]) -> None:
        self.source = source
        self.alone = alone

    def __call__(self, *args: Any) -> Any:
        kernel = self.alone()
        return (kernel.result() if hasattr(kernel, "result") else kernel)(*args)


def _cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
    """Replacement for `AsyncCompile.cpp_pybinding`; generated code calls it for each kernel."""
    alone = functools.partial(_originals[0], self, argtypes, source_code)
    if getattr(_active, "waiting", None) is None or not _can_share(source_code):
        return alone()
    return _Pending(source_code, alone)


def _wait(self: Any, scope: dict[str, Any]) -> None:
    """Replacement for `AsyncCompile.wait`; generated code calls it after its last kernel."""
    if any(isinstance(value, _Pending) for value in scope.values()):
        if getattr(_active, "waiting", None) is not None:
            _active.waiting.append((scope, self.submit))
        else:
            _compile_waiting([(scope, self.submit)])
    _originals[1](self, scope)


def _compile_waiting(waiting: Sequence[tuple[dict[str, Any], Any]]) -> None:
    """Replace the pending kernels of some graphs by compiled ones."""
    pending = [
        (scope, name, kernel) for scope, _ in waiting for name, kernel in scope.items() if isinstance(kernel, _Pending)
    ]
    sources = list(dict.fromkeys(kernel.source for _, _, kernel in pending))
    function_by_source: dict[str, Callable[..., Any]] = {}
    if len(sources) > 1:
        try:
            function_by_source = _compiled(sources, _compilers_at_once(), waiting[0][1])
        except Exception as error:
            log.warning("kernels are compiled one by one, because together they failed: %s", headline(error))
    for scope, name, kernel in pending:
        scope[name] = function_by_source[kernel.source] if kernel.source in function_by_source else kernel.alone()
        if hasattr(scope[name], "result"):
            scope[name] = scope[name].result()


# ----------------------------------------------------------------------------------------------------- the files


def _can_share(source: str) -> bool:
    """Whether a kernel's text may stand in a namespace beside more kernels: it has one entry, and no directives of the
    preprocessor but headers and pragmas.
    """
    directives = re.findall(r"^\s*#\s*(\w+)", source, re.MULTILINE)
    entries = re.findall(r'extern\s+"C"[^;{]*?\bkernel\s*\(', source)
    return set(directives) <= {"include", "pragma"} and len(entries) == 1 == len(re.findall(r'extern\s+"C"', source))


@runs_compiler
def _compiled(sources: Sequence[str], compilers: int, submit: Any) -> dict[str, Callable[..., Any]]:
    """`{source: function}`; `submit` compiles up to `compilers` files at once."""
    files = _shared_out(sources, compilers)
    # A submitted task takes the lock that the submitter holds, so it must run on a second thread. Without a thread, a
    # file is compiled when it is loaded.
    loads = [_cache().load_async(_file(kernels), submit_fn=submit if compilers > 1 else None) for kernels in files]
    function_by_source: dict[str, Callable[..., Any]] = {}
    for kernels, load in zip(files, loads, strict=True):
        module = load()
        module.read_addresses_with(_guards._torchinductor_pyobject_tensor_data_ptr)
        function_by_source |= {source: getattr(module, _name(source)) for source in kernels}
    return function_by_source


def _compilers_at_once() -> int:
    from torch._inductor.async_compile import get_compile_threads

    return max(1, int(get_compile_threads()))


def _shared_out(sources: Sequence[str], compilers: int) -> list[list[str]]:
    """The kernels by files of nearly equal length."""
    count = max(min(compilers, -(-len(sources) // _FEWEST)), -(-len(sources) // _MOST))
    files: list[list[str]] = [[] for _ in range(count)]
    for source in sorted(sources, key=len, reverse=True):
        min(files, key=lambda kernels: sum(map(len, kernels))).append(source)
    return files


def _name(source: str) -> str:
    return f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _file(kernels: Sequence[str]) -> str:
    """One C++ file of some kernels and the Python module that binds them."""
    headers: dict[str, None] = {}
    bodies, methods = [], []
    for source in kernels:
        name, lines = _name(source), source.splitlines()
        headers |= dict.fromkeys(line.strip() for line in lines if line.lstrip().startswith("#include"))
        body = "\n".join(line for line in lines if not line.lstrip().startswith("#include"))
        bodies.append(f"namespace in_{name} {{\n#define kernel {name}\n{body}\n#undef kernel\n}}\n")
        function = f"reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(entry<in_{name}::{name}>))"
        methods.append(f'    {{"{name}", {function}, METH_FASTCALL, nullptr}},')
    return "\n".join((*headers, *bodies, _BINDING.replace("METHODS", "\n".join(methods))))


# A kernel's parameters are known from its type: addresses of tensors' memory, and numbers.
_BINDING = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <exception>
#include <utility>

namespace {

struct Raised {};  // the Python error is set

void* (*address_of)(PyObject*) = nullptr;

template <typename T> struct Argument;
template <typename T> struct Argument<T*> {
    static T* of(PyObject* given) { return static_cast<T*>(address_of(given)); }
};
template <> struct Argument<int64_t> {
    static int64_t of(PyObject* given) {
        const long long value = PyLong_AsLongLong(given);
        if (value == -1 && PyErr_Occurred()) throw Raised();
        return value;
    }
};
template <> struct Argument<double> {
    static double of(PyObject* given) {
        const double value = PyFloat_AsDouble(given);
        if (value == -1.0 && PyErr_Occurred()) throw Raised();
        return value;
    }
};
template <> struct Argument<float> {
    static float of(PyObject* given) { return static_cast<float>(Argument<double>::of(given)); }
};

template <typename... T, size_t... I>
void call(void (*kernel)(T...), PyObject* const* given, std::index_sequence<I...>) {
    kernel(Argument<T>::of(given[I])...);  // no tuple of them: templates nest too deep for a thousand
}

template <typename... T>
void checked(void (*kernel)(T...), PyObject* const* given, Py_ssize_t count) {
    constexpr Py_ssize_t wanted = sizeof...(T);
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "a kernel of %zd arguments was given %zd", wanted, count);
        throw Raised();
    }
    call(kernel, given, std::index_sequence_for<T...>{});
}

template <auto kernel>
PyObject* entry(PyObject*, PyObject* const* given, Py_ssize_t count) {
    try {
        checked(kernel, given, count);
    } catch (const Raised&) {
        return nullptr;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "a kernel failed");
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* read_addresses_with(PyObject*, PyObject* function) {
    void* address = PyLong_AsVoidPtr(function);
    if (address == nullptr) return nullptr;
    address_of = reinterpret_cast<void* (*)(PyObject*)>(address);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
METHODS
    {"read_addresses_with", read_addresses_with, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_of_kernels = {PyModuleDef_HEAD_INIT, "kernels", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_kernels() {
    PyObject* module = PyModule_Create(&module_of_kernels);
#ifdef Py_GIL_DISABLED
    if (module != nullptr) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
"""


@functools.cache
def _cache() -> Any:
    """Inductor's compiling and loading of C++ modules, for modules of several kernels."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.utils import clear_on_fresh_cache

    class Files(CppPythonBindingsCodeCache):
        cache: dict[str, Any] = {}  # noqa: RUF012 (as in its parents, which keep theirs apart so)
        cache_clear = staticmethod(cache.clear)
        entry_function = "kernels"

    return clear_on_fresh_cache(Files)
