"""Whether code and objects are a library's or the user's; options that people keep in libraries' objects.

An Event, a ConfigParser, an optimizer, `sys.argv`: code of libraries is not followed. So all attributes of a library's
object count, and of a library's module the names listed here, where the user's code names them.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import logging
import optparse
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch.utils.weak

from ..house import is_house_module

OF_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
BAGS = (  # classes of libraries: their objects are nothing but attributes
    types.SimpleNamespace, argparse.Namespace, optparse.Values, collections.UserDict, collections.UserList,
    collections.UserString, collections.ChainMap, threading.local, torch.utils.weak.WeakIdKeyDictionary,
    BaseException,
)  # fmt: skip
_LIBRARIES = (
    "torch numpy torchgen functorch sympy pytest _pytest pluggy hypothesis coverage IPython ipykernel rich "
    "huggingface_hub httpx httpx2 httpcore httpcore2 requests urllib3 idna certifi anyio yaml tqdm filelock packaging "
    "safetensors tokenizers regex psutil PIL jinja2 typing_extensions jax jaxlib flax optax tensorflow keras mlx scipy "
    "sklearn pandas pyarrow matplotlib numba cupy triton onnx onnxruntime openvino wandb tensorboard"
)
_OUTSIDE = set(sys.stdlib_module_names) - {"__main__"} | set(_LIBRARIES.split())
_MAKERS = {"abc", "types"}
_STANDARD_FILES = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
HASHES = ("_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha3", "_sha512")
_OPERATORS = {"torch", "numpy", "torchgen", "functorch", "sympy"}
# Further threads write to objects of these classes, too.
_OF_THREADS = {"_queue", "_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}
_OF_TORCH = (
    *("torch.optim", "torch.distributions", "torch.amp", "torch.cuda.amp", "torch.nn.attention", "torch.utils.data"),
)
# The contents of their objects follow from the arguments of the constructor, or are nobody's option.
FIXED = set(
    "_frozen_importlib _frozen_importlib_external abc ast builtins contextvars dataclasses datetime decimal "
    "enum fractions functools importlib inspect logging operator pathlib random re types typing uuid "
    "warnings zipimport pytest _pytest pluggy hypothesis coverage IPython ipykernel".split()
)

_WITH_OPTIONS = _OUTSIDE - FIXED - _OPERATORS


def is_outside(module: Any) -> bool:
    """Whether a module's name says that its globals are not the user's."""
    return not isinstance(module, str) or _is_name_outside(module)


def is_class_outside(cls: type) -> bool:
    """Whether a class is a library's. A subclass of a user class counts as user code, whatever its `__module__`."""
    return all(map(is_of_library, cls.__mro__))


def is_of_library(cls: type) -> bool:
    """Whether a class itself is a library's. A class that the program makes by a call, as `make_dataclass`, may name
    `types` as its module.
    """
    module = cls.__module__
    return is_outside(module) and (module not in _MAKERS or vars(sys.modules[module]).get(cls.__name__) is cls)


@functools.lru_cache(4096)
def _is_name_outside(module: str) -> bool:
    root = module.partition(".")[0]
    is_cython = root.startswith("_cython_")  # where the class of Cython's functions is from
    return root in _OUTSIDE or is_cython or is_house_module(module)


def is_library(value: Any) -> bool:
    """Whether a value is a module of a library."""
    return isinstance(value, types.ModuleType) and is_outside(value.__name__)


def is_standard(file: str) -> bool:
    """Whether code in a file is the standard library's."""
    return file.startswith(_STANDARD_FILES) and not _is_of_package(file)


def is_installed(namespace: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of a package that was installed."""
    return _is_of_package(str(namespace.get("__file__")))


@functools.lru_cache(4096)
def _is_of_package(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(file.replace("\\", "/").split("/"))


def keeps_options(cls: type) -> bool:
    """Whether all attributes of an object are looked at, by its library class or a class derived from a library's."""
    module: Any = cls.__module__
    if not isinstance(module, str):
        return False
    root = module.partition(".")[0]
    return root in _WITH_OPTIONS or root == "numpy" or module.startswith(_OF_TORCH)


def is_constant(cls: type) -> bool:
    """Whether objects of a class never change after they are made, or hold nobody's state."""
    return all(is_of_library(base) and _holds_nothing(str(base.__module__)) for base in cls.__mro__)


def is_of_operators(cls: type) -> bool:
    """Whether a class is a library of operators' own: PyTorch's, for one."""
    return str(cls.__module__).partition(".")[0] in _OPERATORS or is_house_module(cls.__module__)


def _holds_nothing(module: str) -> bool:
    root = module.partition(".")[0]
    is_fixed = root in FIXED or root in _OF_THREADS or is_house_module(module)
    return is_fixed or (root in _OPERATORS and not module.startswith(_OF_TORCH))


def keeps_state(cls: type) -> bool:
    """Whether objects of a library's class hold state that their methods leave behind: an optimizer's moments, a
    scaler's scale, a distribution's lazy attributes; or the tensors of a block mask.
    """
    module: Any = cls.__module__
    return isinstance(module, str) and module.startswith(_OF_TORCH)


def loggers_of(value: Any) -> Iterator[Any]:
    """A logger and its ancestors, which give it a level."""
    while isinstance(value, logging.Logger):
        yield value
        value = value.parent


WEAK = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
LOCKS = (type(threading.Lock()), type(threading.RLock()))


def referent(value: Any) -> Any:
    """The object behind a weak reference or proxy; None where there is none."""
    if isinstance(value, weakref.ref):
        return weakref.ref.__call__(value)
    if type(value) in WEAK:
        try:
            return value.__repr__.__self__
        except ReferenceError:
            return None
    return None
