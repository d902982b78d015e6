"""Functions that an artifact may name: operators of ATen and prims, custom operators, arithmetic on sizes.

A name is looked up among the operators that are registered in this process and in a fixed table of functions. Nothing
is imported or run by being named.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from .._torch.codegen import OpOverload
from .._torch.ops import mkldnn_rnn_layer_for_training, operator_called, refusable_namespaces
from ..errors import ArtifactError
from ..tracing.kernels.checks import VALUE_CHECKS
from ..tracing.kernels.plans import independent_of_phase
from ..tracing.tape.opinfo import item_or_empty, take_data
from ..tracing.values.numbers import NUMBER_FUNCTIONS

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}::[A-Za-z_][A-Za-z0-9_]{0,119}(\.[A-Za-z_][A-Za-z0-9_]{0,79})?")
# Operators that read files or print, whatever their arguments, and the one that calls functions of this process.
_FORBIDDEN = {"aten::from_file", "aten::from_file.out", "aten::_print", "foregrad::call"}

# For an operator that takes a view with any strides, one that first checks that the view is inside the memory.
_CHECKED = {
    "aten::_reshape_alias": torch.ops.aten.as_strided.default,
    "aten::_reshape_alias_copy": torch.ops.aten.as_strided_copy.default,
}

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in "getitem add sub mul truediv floordiv mod neg pos pow eq ne lt le gt ge and_ or_ not_ abs".split()
    },
    **{f"{function.__module__}.{function.__name__}": function for function in NUMBER_FUNCTIONS},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in "sym_max sym_min sym_float sym_int sym_not sym_ite sym_sum".split()
        if hasattr(torch, name)
    },
}
# Functions that captures put into graphs in place of operators, and after them.
_OWN: dict[str, Callable[..., Any]] = {
    "foregrad.mkldnn_rnn_layer": mkldnn_rnn_layer_for_training,
    **{f"foregrad.{check.__name__}": check for check in VALUE_CHECKS.values()},
    **{f"foregrad.{f.__name__}": f for f in (take_data, item_or_empty, independent_of_phase)},
}
_FUNCTIONS = _ARITHMETIC | _OWN
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}


def name_of_operator(target: Any) -> str | None:
    """The name of a function that an artifact may hold; None for any other function."""
    if isinstance(target, OpOverload):
        name = target.name()
        return name if _may_be_named(name) and operator_called(name) is target else None
    return _NAMES.get(id(target))


def operator_named(name: Any) -> Any:
    """The function with this name, see `name_of_operator`. Raises `ArtifactError` for any other name."""
    if type(name) is not str:
        raise ArtifactError("the name of an operator is no text")
    function = _FUNCTIONS.get(name)
    if function is not None:
        return function
    if not _may_be_named(name):
        raise ArtifactError(f"it calls {name[:200]!r}, which is no operator that an artifact may name")
    operator = _CHECKED.get(name) or operator_called(name)
    if operator is None:
        space = name.partition("::")[0]
        builtin = space in ("aten", "prims")
        remedy = (
            f"PyTorch {torch.__version__} has no such operator"
            if builtin
            else f"import the library that registers the operators of `{space}` before loading"
        )
        raise ArtifactError(f"it calls the operator {name}, which is not registered here: {remedy}")
    return operator


def is_check(function: Any) -> bool:
    """Whether the function may be called as a check, for the error that it raises."""
    return isinstance(function, OpOverload) or function in VALUE_CHECKS.values()


def is_view(function: Any) -> bool:
    """Whether the function takes a view of its first argument, and writes to none."""
    if not isinstance(function, OpOverload):
        return function is take_data
    return not function._schema.is_mutable and any(r.alias_info is not None for r in function._schema.returns)


def _may_be_named(name: str) -> bool:
    if _NAME.fullmatch(name) is None or name in _FORBIDDEN:
        return False
    return name.partition("::")[0] not in refusable_namespaces()
