"""Tangents of another kind than at capture: the backward is captured again for them.

Such a tangent is a wrapper subclass for a plain result; or, for a wrapper subclass, a plain tensor or a wrapper that
differs in class, metadata or plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.wrappers import is_wrapper, parts_of
from ..graph.meta import TensorSpec
from ..graph.tangents import TangentKind, place_of_size
from ..runtime.compiled import Compiled
from ..runtime.passed import check_marked
from .conversion import converted, taken_apart, unexpected
from .spec import bare_spec


class OtherKinds:
    """The backward of a compiled function for tangents of other kinds: `derivative(node, *tangents, kinds=)`, or an
    error without one.
    """

    def __init__(
        self, backward: Callable[..., object], derivative: Callable[..., object] | None, compiled: Compiled
    ) -> None:
        self.backward, self.limit = backward, compiled.path_limit
        joint = compiled.partitioned.joint
        self.varies = bool(joint.signature.symbols)
        count, error = len(joint.signature.gradients.differentiable), joint.backward_error
        self.errors = joint.failing if error is None else dict.fromkeys(range(count), error)  # eager's, for any kind
        self.derivative = None if self.errors or compiled.make_derived is None else derivative
        self.kinds: list[TangentKind] = []

    def __call__(self, node: object, tangents: Sequence[Any], handed: list[tuple[tuple[int, ...], Any]]) -> Any:
        """`handed`: tangents that were left with the node, each with the positions of its outputs."""
        plain = [_as_plain(tangent) if is_wrapper(tangent) else tangent for tangent in tangents]
        others = [*handed, *(((i,), t) for i, t in enumerate(tangents) if t is not None and plain[i] is None)]
        if not others:
            return self.backward(node, *plain)
        for places, _ in others:
            if places[0] in self.errors:
                raise type(self.errors[places[0]])(*self.errors[places[0]].args)
        if self.derivative is None or (hasattr(node, "take_rest") and node.take_rest() is not None):
            raise unexpected(others[0][1])
        if hasattr(node, "passed"):
            check_marked(node, tuple(plain))
        kinds = tuple(self._kind_of(places, tangent) for places, tangent in others)
        parts = [part for _, tangent in others for part in (taken_apart(tangent) if is_wrapper(tangent) else [tangent])]
        return self.derivative(node, *plain, *parts, kinds=kinds)

    def _kind_of(self, places: tuple[int, ...], tangent: Any) -> TangentKind:
        """The kind of a tangent, one object for all equal kinds, up to the limit."""
        parts = parts_of(tangent) if is_wrapper(tangent) else [tangent]
        layouts = [_layout(part, tuple(tangent.shape) if self.varies else ()) for part in parts]
        for kind in self.kinds:
            is_alike = kind.outputs == places and kind.layouts == layouts
            if is_alike and _is_of(kind.spec, tangent, varies=self.varies):
                return kind
        if len(self.kinds) >= self.limit:
            raise unexpected(tangent)
        spec = bare_spec(tangent) if is_wrapper(tangent) else None
        made = TangentKind(places, tuple(tangent.shape), spec, tuple(map(TensorSpec.of, parts)), layouts)
        self.kinds.append(made)
        return made


def _as_plain(tangent: Any) -> torch.Tensor | None:
    """The plain tensor that a wrapper's class converts it to; a pending collective is waited for."""
    plain = converted(tangent, None, torch.Tensor)
    return plain if type(plain) is torch.Tensor else None


def _layout(part: torch.Tensor, sizes: tuple[int, ...]) -> Any:
    """The layout of a plain tensor; its sizes by their positions among `sizes`."""
    places = [place_of_size(size, dim, sizes) for dim, size in enumerate(part.shape)]
    own = [size if place is None else ("size", place) for size, place in zip(part.shape, places, strict=True)]
    return own, part.dtype, part.device


def _is_of(spec: Any, tangent: object, *, varies: bool) -> bool:
    if spec is None or not is_wrapper(tangent):
        return spec is None and not is_wrapper(tangent)
    return type(tangent) is spec.cls and spec.has_structure_of(tangent, of_any_size=varies)
