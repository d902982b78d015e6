"""foregrad: ahead-of-time autograd for PyTorch."""

from __future__ import annotations

from typing import Any

from . import errors
from .aot import aot_function, aot_module, aot_module_simplified, compiled_function, compiled_module
from .api import capture, compile, explain_recompiles, partition  # noqa: A004
from .backends.boxed import make_boxed_compiler, make_boxed_func, nop
from .backends.registry import get_backend, list_backends, register_backend
from .composite import hessian_vector_product, value_and_grad
from .config import config
from .dispatch.naming import (
    get_aot_compilation_context,
    get_aot_graph_name,
    get_graph_being_compiled,
    set_model_name,
)
from .dispatch.shapes import mark_dynamic
from .dynamo import (
    AotAutograd,
    aot_autograd,
    device_from_inputs,
    dtype_from_inputs,
    fake_tensor_unsupported,
)
from .frontend.fakify import construct_fake_mode, process_inputs
from .fusion import mem_efficient_fusion_kwargs, memory_efficient_fusion, ts_compile
from .graph.joint import JointGraph
from .graph.partitioned import Partitioned
from .partitioners import default_partition, min_cut_rematerialization_partition

__version__ = "0.1.0.dev0"

__all__ = [
    "AotAutograd",
    "JointGraph",
    "Partitioned",
    "aot_autograd",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "capture",
    "compile",
    "compiled_function",
    "compiled_module",
    "config",
    "construct_fake_mode",
    "default_decompositions",
    "default_partition",
    "device_from_inputs",
    "dtype_from_inputs",
    "errors",
    "explain_recompiles",
    "fake_tensor_unsupported",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_backend",
    "get_graph_being_compiled",
    "hessian_vector_product",
    "list_backends",
    "make_boxed_compiler",
    "make_boxed_func",
    "mark_dynamic",
    "mem_efficient_fusion_kwargs",
    "memory_efficient_fusion",
    "min_cut_rematerialization_partition",
    "nop",
    "partition",
    "process_inputs",
    "register_backend",
    "set_model_name",
    "ts_compile",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name == "default_decompositions":  # late: the table takes a second to import
        from .fusion import default_decompositions

        return default_decompositions()
    raise AttributeError(f"module `foregrad` has no attribute `{name}`")
