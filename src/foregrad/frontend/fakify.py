"""What comes in from a front end, made into fakes: `construct_fake_mode`, `process_inputs`.

The names and parameters are AOTAutograd's. The fakes may be given to `aot_module_simplified`, whose graphs are then
right for every call that meets the conditions in the mode's `ShapeEnv`; to check those is the front end's part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .._torch.contexts import fake_mode_of, is_opaque, new_symbolic_integer, shape_env, symbolic_context_of
from .._torch.fakes import FakeTensor, FakeTensorMode, NewFakeMode
from .._torch.tensors import is_wrapper_subclass
from ..errors import UnsupportedError, UnsupportedTensorError


@dataclasses.dataclass(frozen=True, slots=True)
class AOTConfig:
    """What the functions here look at; any object with these attributes will do.

    num_params_buffers: how many of the inputs, from the first, are parameters and buffers: their sizes are static.
    is_export: Python integers are parts of the program, not inputs.
    dynamic_shapes: a fake mode made here has a `ShapeEnv`.
    static_weight_shapes: False lets the sizes of parameters and buffers be symbolic as well.
    """

    num_params_buffers: int = 0
    is_export: bool = False
    dynamic_shapes: bool = False
    static_weight_shapes: bool = True


class FakifiedFlatArgs(list[Any]):
    """Flat inputs, with a fake for every tensor."""


def construct_fake_mode(flat_args: Sequence[Any], aot_config: Any) -> tuple[FakeTensorMode, Any]:
    """(fake mode, its `ShapeEnv` or None): that of the fakes given or of the trace going on, else a new one.

    Examples:
        >>> import torch, foregrad
        >>> from foregrad.frontend.fakify import AOTConfig
        >>> mode, symbols = foregrad.construct_fake_mode([torch.ones(2)], AOTConfig())
        >>> symbols is None
        True
    """
    mode = fake_mode_of(list(flat_args))
    if mode is None:
        mode = NewFakeMode(shape_env=shape_env() if aot_config.dynamic_shapes else None)
    return mode, mode.shape_env


def process_inputs(
    flat_args: Sequence[Any],
    aot_config: Any,
    fake_mode: FakeTensorMode,
    shape_env: Any,
    ignore_shape_env: bool = False,
) -> FakifiedFlatArgs:
    """A fake of `fake_mode` for each tensor and, with a `shape_env`, a symbolic integer for each Python integer.

    Fakes stay as they are, and so does everything else. A tensor that the trace going on made a fake of gets the same
    sizes. With `ignore_shape_env`, every size is a plain number. Raises `UnsupportedTensorError` for a fake of
    another mode, and `UnsupportedError` for an opaque object (a TorchScript object, say), by its class.

    Examples:
        >>> import torch, foregrad
        >>> from foregrad.frontend.fakify import AOTConfig
        >>> inputs = [torch.ones(2), 3]
        >>> mode, symbols = foregrad.construct_fake_mode(inputs, AOTConfig())
        >>> fakes = foregrad.process_inputs(inputs, AOTConfig(), mode, symbols)
        >>> fakes[0].shape, fakes[1]
        (torch.Size([2]), 3)
    """
    env = None if ignore_shape_env else shape_env
    with fake_mode:
        return FakifiedFlatArgs(
            _converted(index, value, aot_config, fake_mode, env) for index, value in enumerate(flat_args)
        )


def _converted(index: int, value: Any, config: Any, mode: FakeTensorMode, env: Any) -> Any:
    if type(value) is int and env is not None and not config.is_export:
        return new_symbolic_integer(env, value, f"sym_{index}")
    if not isinstance(value, torch.Tensor):
        if is_opaque(value):
            raise UnsupportedError(
                f"input {index} is a {_class_name(value)}, an opaque object, which can't be captured. Let the function "
                "reach it by itself, or keep the operators that take it outside."
            )
        return value
    if isinstance(value, FakeTensor):
        if value.fake_mode is not mode:
            raise UnsupportedTensorError(
                f"input {index} is a fake tensor of another fake mode. Make all fakes under one mode."
            )
        return value
    if is_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(value, name) for name in names]
        if all(isinstance(part, FakeTensor) and part.fake_mode is mode for part in parts):
            return value
    context = symbolic_context_of(value)
    if context is None and index < config.num_params_buffers and getattr(config, "static_weight_shapes", True):
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(
        value,
        static_shapes=env is None,
        symbolic_context=context,
        source=None if context is None else context.tensor_source,
    )


def _class_name(value: Any) -> str:
    name = getattr(value, "_type", None)
    return str(name().qualified_name()) if callable(name) else f"{type(value).__module__}.{type(value).__qualname__}"
