"""The tracing context that is active, its fakes, and torch's opaque objects. Checked on torch 2.13.0."""

from __future__ import annotations

from typing import Any

import torch


def shape_env() -> Any:
    """A new `ShapeEnv`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def fake_mode_of(values: Any) -> Any:
    """The fake mode of the active trace, of the modes that are on, or of fakes among `values`; or None.

    Raises torch's error if there are two different ones.
    """
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def symbolic_context_of(tensor: torch.Tensor) -> Any:
    """The active trace's symbolic context of a tensor: which sizes are symbolic, and the tensor's source."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.tensor_to_context.get(tensor)


def is_opaque(value: Any) -> bool:
    """Whether a value is an object whose contents only its own operators know."""
    if isinstance(value, torch.ScriptObject):
        return True
    from torch._library.opaque_object import is_opaque_type

    return bool(is_opaque_type(type(value)))


def is_opaque_value(value: Any) -> bool:
    """Whether the value's class is registered as one of constants, of which equal ones are interchangeable."""
    try:
        from torch._library.opaque_object import is_opaque_value_type
    except ImportError:  # torch 2.11
        return False
    return bool(is_opaque_value_type(type(value)))


def new_symbolic_integer(env: Any, value: int, name: str) -> Any:
    """A symbolic integer of `env` that is `value` now; a plain one if `env` specializes (0 and 1)."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = env.create_symbol(value, source, positive=value >= 0)
    return env.create_symintnode(symbol, hint=value, source=source)
