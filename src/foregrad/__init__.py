"""foregrad: ahead-of-time autograd for PyTorch."""

from __future__ import annotations

from . import errors
from .aot import aot_function, aot_module, aot_module_simplified, compiled_function, compiled_module
from .api import capture, compile, partition  # noqa: A004
from .backends.boxed import make_boxed_compiler, make_boxed_func, nop
from .backends.registry import get_backend, list_backends, register_backend
from .config import config
from .dispatch.naming import (
    get_aot_compilation_context,
    get_aot_graph_name,
    get_graph_being_compiled,
    set_model_name,
)
from .dispatch.shapes import mark_dynamic
from .graph.joint import JointGraph
from .graph.partitioned import Partitioned
from .partitioners import default_partition, min_cut_rematerialization_partition

__version__ = "0.1.0.dev0"

__all__ = [
    "JointGraph",
    "Partitioned",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "capture",
    "compile",
    "compiled_function",
    "compiled_module",
    "config",
    "default_partition",
    "errors",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_backend",
    "get_graph_being_compiled",
    "list_backends",
    "make_boxed_compiler",
    "make_boxed_func",
    "mark_dynamic",
    "min_cut_rematerialization_partition",
    "nop",
    "partition",
    "register_backend",
    "set_model_name",
]
