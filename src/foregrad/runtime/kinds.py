"""Tangents of another kind than at capture: the backward is captured again for them.

Such a tangent is a wrapper subclass for a plain result; or, for a result that is a wrapper subclass, a plain tensor or
a wrapper of another class, of other metadata, or of other plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph.meta import TensorSpec
from ..graph.tangents import TangentKind, place_of_size
from ..subclasses.conversion import converted, take_handed, taken_apart, unexpected
from ..subclasses.spec import bare_spec, is_wrapper, parts_of
from .compiled import Compiled
from .passed import check_marked

_MOST_KINDS = 16


def of_other_kinds(
    backward: Callable[..., Any], derivative: Callable[..., Any] | None, compiled: Compiled
) -> Callable[..., Any]:
    """`backward(node, *tangents)`; if some tangents are of other kinds, `derivative(node, *tangents, kinds=)`, or an
    error without one.
    """
    kinds_so_far: list[TangentKind] = []
    joint = compiled.partitioned.joint
    varies = bool(joint.signature.symbols)
    count, error = len(joint.signature.differentiable), joint.backward_error
    errors = joint.failing if error is None else dict.fromkeys(range(count), error)  # eager's, for any kind
    if errors or compiled.make_derived is None:
        derivative = None

    def run(node: Any, *tangents: Any) -> Any:
        for tangent in tangents:
            if type(tangent) is not torch.Tensor:
                break
        else:
            return backward(node, *tangents)
        others = take_handed(node)
        plain = [_as_plain(tangent) if is_wrapper(tangent) else tangent for tangent in tangents]
        others += [((i,), t) for i, t in enumerate(tangents) if t is not None and plain[i] is None]
        tangents = tuple(plain)
        if not others:
            return backward(node, *tangents)
        for places, _ in others:
            if places[0] in errors:
                raise type(errors[places[0]])(*errors[places[0]].args)
        if derivative is None or (hasattr(node, "take_rest") and node.take_rest() is not None):
            raise unexpected(others[0][1])
        if hasattr(node, "passed"):
            check_marked(node, tangents)
        kinds = [_kind_of(kinds_so_far, places, tangent, varies=varies) for places, tangent in others]
        parts = [part for _, tangent in others for part in _parts(tangent)]
        return derivative(node, *tangents, *parts, kinds=tuple(kinds))

    return run


def _as_plain(tangent: Any) -> torch.Tensor | None:
    """The plain tensor that a wrapper's class converts it to; a pending collective is waited for."""
    plain = converted(tangent, None, torch.Tensor)
    return plain if type(plain) is torch.Tensor else None


def _parts(tangent: Any) -> Sequence[torch.Tensor]:
    return taken_apart(tangent) if is_wrapper(tangent) else [tangent]


def _kind_of(kinds: list[TangentKind], places: tuple[int, ...], tangent: Any, *, varies: bool) -> TangentKind:
    """The kind of a tangent, one object for all of the same kind. `varies`: sizes of results may vary."""
    parts = parts_of(tangent) if is_wrapper(tangent) else [tangent]
    layouts = [_layout(part, tuple(tangent.shape) if varies else ()) for part in parts]
    for kind in kinds:
        if kind.outputs == places and kind.layouts == layouts and _is_of(kind.spec, tangent, varies=varies):
            return kind
    if len(kinds) >= _MOST_KINDS:
        raise unexpected(tangent)
    spec = bare_spec(tangent) if is_wrapper(tangent) else None
    kinds.append(TangentKind(places, tuple(tangent.shape), spec, tuple(map(TensorSpec.of, parts)), layouts))
    return kinds[-1]


def _layout(part: torch.Tensor, sizes: tuple[int, ...]) -> Any:
    """The layout of a plain tensor; its sizes by their positions among `sizes`."""
    places = [place_of_size(size, dim, sizes) for dim, size in enumerate(part.shape)]
    own = [size if place is None else ("size", place) for size, place in zip(part.shape, places, strict=True)]
    return own, part.dtype, part.device


def _is_of(spec: Any, tangent: Any, *, varies: bool) -> bool:
    if spec is None or not is_wrapper(tangent):
        return spec is None and not is_wrapper(tangent)
    return type(tangent) is spec.cls and spec.has_structure_of(tangent, of_any_size=varies)
