"""The C++ part, if it was built for this PyTorch: of calls, and of captures. Checked on torch 2.13.0.

`native` is the module with `Function`, `TensorCheck` and, if dicts count their writes, `VersionCheck`; or None.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch

from .._native.build import build_in_background, fault_of, find_library
from ..errors import ForegradWarning
from .hooks import only_defined

_NAME = "foregrad_native"
_log = logging.getLogger("foregrad.native")


@functools.cache
def native() -> Any:
    """The extension module, loaded on first use; None if there is none."""
    path = find_library(torch.__version__)
    if path is None:
        if build_in_background(torch.__version__):
            _log.info("The C++ part of calls is being built. Processes that start in half a minute use it.")
        return None
    fault = fault_of(Path(path))
    if fault is not None:
        _warn(fault)
        return None
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        _warn(error)
        return None
    module.set_before_hooks(only_defined)
    # PyTorch's list of nodes written in C++, for `isinstance(node, torch.autograd.graph.Node)`.
    setattr(torch._C._functions, module.CompiledFunctionBackward.__name__, module.CompiledFunctionBackward)
    return module


def _warn(why: object) -> None:
    warnings.warn(
        f"foregrad's C++ part does not load, so calls go through Python. `foregrad build-native` builds it again. "
        f"({why})",
        ForegradWarning,
        stacklevel=3,
    )


def make_tensor_check(
    tensors: Sequence[torch.Tensor | None],
    sizes: Sequence[Sequence[int | None]],
    strides: Sequence[Sequence[int | None]],
    *,
    distinct: bool,
) -> Any:
    """`check(*tensors)` and `check.all(tuple)`: whether tensors have the metadata of `tensors`.

    None if the extension is not built, or a tensor isn't plain memory. A size or stride of None is not checked.
    `distinct`: no two may be one object.
    """
    module = native()
    if module is None or not all(map(_is_plain, tensors)):
        return None
    return module.TensorCheck(tuple(tensors), tuple(map(tuple, sizes)), tuple(map(tuple, strides)), distinct)


def make_version_check(
    dicts: Sequence[dict[object, object]], shapes: Sequence[tuple[object, type, dict[str, object]]] = ()
) -> Any:
    """`check(anything)`: whether no dict has been written to since now, and each object in `shapes` (weak reference,
    class, `__dict__`) has kept both. None if the extension lacks the check.
    """
    make = getattr(native(), "VersionCheck", None)
    return None if make is None else make(tuple(dicts), tuple(shapes))


def make_attribute_reader(cls: type, active: object, not_read_by: Callable[[str], str]) -> object:
    """The C++ version of `_getattribute` of `patches.py` for a class; None if the extension has none."""
    make = getattr(native(), "attribute_reader", None)
    return None if make is None else make(cls, active, not_read_by)


def _is_plain(tensor: Any) -> bool:
    """Whether sizes and strides can be read without running anything."""
    return (
        not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride()))
    )


# -------------------------------------------------------------------- functions that are diverted
# The C++ part diverts C functions during a capture. The functions stay the same objects under every name, and only the
# capturing thread sees a difference.


def divert(
    function: object, instead: Callable[..., object], types: tuple[type, ...] | None, *, asked: bool = False
) -> None:
    """From now on `instead` is called with the arguments, and the function itself where that gives `NotImplemented`.
    Without the C++ part nothing changes.

    `types`: only with an argument of one of the types, or with such an item. `asked`: only by code that is being
    captured; with `types`, by this code with any arguments.
    """
    module = _module()
    if module is not None and isinstance(function, (BuiltinFunctionType, type)):
        module.divert(function, instead, types, asked)


@functools.cache
def _module() -> Any:
    module = native()
    if module is not None:
        atexit.register(module.stop_diverting)  # then modules go before their functions
    return module
