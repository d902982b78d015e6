"""foregrad: ahead-of-time autograd for PyTorch."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from . import errors
from .config import config

if TYPE_CHECKING:
    from . import backends, dynamo, extend, graph, partitioners, passes  # noqa: F401 - given by `__getattr__`
    from .aot import (
        aot_function,
        aot_module,
        aot_module_simplified,
        compiled_function,
        compiled_module,
        construct_fake_mode,
        process_inputs,
    )
    from .api import capture, compile, explain_recompiles, partition  # noqa: A004
    from .backends.boxed import make_boxed_compiler, make_boxed_func, nop
    from .backends.registry import get_backend, list_backends, register_backend
    from .budget.curves import pareto
    from .budget.within import Budget, budget_partition
    from .composite import hessian_vector_product, value_and_grad
    from .dispatch.compilers import (
        get_aot_compilation_context,
        get_aot_graph_name,
        get_graph_being_compiled,
        set_model_name,
    )
    from .dispatch.varying import mark_dynamic
    from .distributed.named import checkpoint_name
    from .dynamo import AotAutograd, aot_autograd, device_from_inputs, dtype_from_inputs, fake_tensor_unsupported
    from .fusion import (
        debug_compile,
        draw_graph,
        draw_graph_compile,
        mem_efficient_fusion_kwargs,
        memory_efficient_fusion,
        minifier,
        print_compile,
        pythonkey_decompose,
        ts_compile,
    )
    from .graph.joint import JointGraph, Partitioned
    from .joints.doors import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
    from .joints.exports import GraphSignature, aot_export_joint_simple, aot_export_module
    from .joints.held import JointWithDescriptors
    from .logs import set_logs
    from .partitioners import default_partition, min_cut_rematerialization_partition
    from .partitioners.policies import (
        Candidate,
        Policy,
        dots_saveable,
        dots_with_no_batch_dims_saveable,
        everything_saveable,
        nothing_saveable,
        offload_names,
        save_only_these_names,
    )
    from .phases import CompileTimes, compile_times
    from .planning import Plan, plan
    from .regions.marks import eager_region, region
    from .store.artifacts.artifact import Artifact, export, load
    from .store.artifacts.capture import check_attribute_assignment
    from .tools.explanation.collect import explain
    from .tools.explanation.text import Explanation
    from .tools.verification.report import Verification, VerificationError
    from .tools.verification.verify import verify

    default_decompositions: dict[Any, Any]

__version__ = "0.1.0"

__all__ = [
    "AotAutograd",
    "Artifact",
    "Budget",
    "Candidate",
    "CompileTimes",
    "Explanation",
    "GraphSignature",
    "JointGraph",
    "JointWithDescriptors",
    "Partitioned",
    "Plan",
    "Policy",
    "Verification",
    "VerificationError",
    "aot_autograd",
    "aot_compile_joint_with_descriptors",
    "aot_export_joint_simple",
    "aot_export_joint_with_descriptors",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "budget_partition",
    "capture",
    "check_attribute_assignment",
    "checkpoint_name",
    "compile",
    "compile_times",
    "compiled_function",
    "compiled_module",
    "config",
    "construct_fake_mode",
    "debug_compile",
    "default_decompositions",
    "default_partition",
    "device_from_inputs",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "draw_graph",
    "draw_graph_compile",
    "dtype_from_inputs",
    "eager_region",
    "errors",
    "everything_saveable",
    "explain",
    "explain_recompiles",
    "export",
    "fake_tensor_unsupported",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_backend",
    "get_graph_being_compiled",
    "hessian_vector_product",
    "list_backends",
    "load",
    "make_boxed_compiler",
    "make_boxed_func",
    "mark_dynamic",
    "mem_efficient_fusion_kwargs",
    "memory_efficient_fusion",
    "min_cut_rematerialization_partition",
    "minifier",
    "nop",
    "nothing_saveable",
    "offload_names",
    "pareto",
    "partition",
    "plan",
    "print_compile",
    "process_inputs",
    "pythonkey_decompose",
    "region",
    "register_backend",
    "save_only_these_names",
    "set_logs",
    "set_model_name",
    "ts_compile",
    "value_and_grad",
    "verify",
]


# Where a name comes from: its module is imported when it is first asked for.
_HOMES = {
    "aot": "aot_function aot_module aot_module_simplified compiled_function compiled_module construct_fake_mode "
    "process_inputs",
    "api": "capture compile explain_recompiles partition",
    "store.artifacts.artifact": "Artifact export load",
    "store.artifacts.capture": "check_attribute_assignment",
    "backends.boxed": "make_boxed_compiler make_boxed_func nop",
    "backends.registry": "get_backend list_backends register_backend",
    "composite": "hessian_vector_product value_and_grad",
    "dispatch.compilers": "get_aot_compilation_context get_aot_graph_name get_graph_being_compiled set_model_name",
    "dispatch.varying": "mark_dynamic",
    "dynamo": "AotAutograd aot_autograd device_from_inputs dtype_from_inputs fake_tensor_unsupported",
    "tools.explanation.collect": "explain",
    "tools.explanation.text": "Explanation",
    "regions.marks": "eager_region region",
    "joints.doors": "aot_compile_joint_with_descriptors aot_export_joint_with_descriptors",
    "joints.exports": "GraphSignature aot_export_joint_simple aot_export_module",
    "joints.held": "JointWithDescriptors",
    "fusion": "debug_compile draw_graph draw_graph_compile mem_efficient_fusion_kwargs memory_efficient_fusion "
    "minifier print_compile pythonkey_decompose ts_compile",
    "graph.joint": "JointGraph Partitioned",
    "partitioners": "default_partition min_cut_rematerialization_partition",
    "budget.curves": "pareto",
    "budget.within": "Budget budget_partition",
    "distributed.named": "checkpoint_name",
    "partitioners.policies": "Candidate Policy dots_saveable dots_with_no_batch_dims_saveable everything_saveable "
    "nothing_saveable offload_names save_only_these_names",
    "logs": "set_logs",
    "phases": "CompileTimes compile_times",
    "planning": "Plan plan",
    "tools.verification.report": "Verification VerificationError",
    "tools.verification.verify": "verify",
}
# The contributions of annexes to the core, by seam, as `module:name`: see `annexes.py`. Captures ask their subjects in
# this order.
ANNEXES = {
    "subjects of a capture": [
        "foregrad.python.settings",
        "foregrad.distributed.checkpoint_regions",
        "foregrad.distributed.collectives",
        "foregrad.operators.sparse_kernels",
        "foregrad.transforms.levels",
        "foregrad.operators.attention",
        "foregrad.classes.tensor_classes",
        "foregrad.operators.functions",
        "foregrad.python.made_generators",
        "foregrad.tracing.effects.retain",
        "foregrad.python.borrowed",
        "foregrad.python.first_imports",
        "foregrad.python.output",
    ],
    "artifacts of joint graphs": ["foregrad.store.artifacts.of_joints:artifact_of"],
    "backends": [
        "foregrad.inductor.backend:BACKENDS",
        "foregrad.dynamo.of_dynamo:BACKENDS",
        "foregrad.backends.debugging:BACKENDS",
    ],
    "calls under transforms": ["foregrad.transforms.calls:LayeredCalls"],
    "classes of constants": ["foregrad.distributed._torch.distributed:GROUPS"],
    "effects in files": ["foregrad.planning.asked"],
    "facts for compilers": ["foregrad.joints.known:forward_facts"],
    "graphs compiled in parts": [
        "foregrad.regions.absent:cut_at_region",
        "foregrad.operators.sparse_passes:cut_for_compiler",
    ],
    "objects taken apart": ["foregrad.python.objects"],
    "Python's state": ["foregrad.python"],
    "inputs that open": ["foregrad.classes.inputs:InputsOfClasses"],
    "lines of tensors that open": ["foregrad.classes.result_lines:ResultLines"],
    "lines of Dynamo's graphs": ["foregrad.dynamo:learn_lines"],
    "memory budgets": ["foregrad.budget.within"],
    "modules that communicate": ["foregrad.distributed._torch.distributed:data_parallel"],
    "operators in graphs": ["foregrad.operators._torch.control_flow:IN_GRAPHS"],
    "Python that graphs call": ["foregrad.regions.of_run:PythonOfRun"],
    "repeated regions": ["foregrad.inductor.regions:outlined"],
    "tensor subclasses": ["foregrad.classes"],
    "stages of backwards": ["foregrad.distributed.stages"],
    "values without a layout": ["foregrad.operators.sparse_passes:SPARSE_VALUES"],
    "attempts at a call": ["foregrad.regions.calls:ATTEMPTS"],
    "the cache on disk": ["foregrad.store.cache.keeper:keeper_for"],
    "what a first compiled graph waits for": ["foregrad.inductor._torch.inductor:get_ready"],
    "graphs compiled elsewhere": ["foregrad.store.later.successor:later_for"],
}
# As `foregrad.graph`, without importing it.
_PARTS = {"backends", "descriptors", "dynamo", "extend", "graph", "partitioners", "passes", "planning", "testing"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # so that type checkers find names that there are not

    def __getattr__(name: str) -> object:
        if name == "default_decompositions":  # not kept: a fresh table for each who asks
            from .fusion import default_decompositions

            return default_decompositions()
        if name in _PARTS:
            return importlib.import_module(f".{name}", __name__)
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module `foregrad` has no attribute `{name}`", name=name, obj=sys.modules[__name__])
        value = globals()[name] = getattr(importlib.import_module(f".{home}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS, *(name for name in globals() if name.startswith("__"))})


if "FOREGRAD_LOGS" in os.environ:
    importlib.import_module(".logs", __name__).set_logs(os.environ["FOREGRAD_LOGS"])
