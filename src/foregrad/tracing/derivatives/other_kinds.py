"""Tangents of other kinds than a function was captured for: what stands for them, made of plain fakes.

Their sizes vary where those of the result do: numbers that are sizes of the result in the call at hand are taken for
these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch.symbols import concrete, has_symbolic
from ...graph.meta import TensorSpec, contiguous_strides
from ...graph.slots import Part, Slot
from ...graph.tangents import TangentKind, place_of_size
from ...subclasses.conversion import wrap
from ...subclasses.spec import WrapperSpec
from ..inputs.outer_sizes import with_sizes_of
from .resumable_trace import ResumableTrace

__all__ = ["result_of", "tangents_of", "with_tangents"]


def result_of(origin: ResumableTrace, kind: TangentKind) -> Any:
    """The result that a tangent is for."""
    return origin.made.get(kind.outputs, origin.outputs[kind.outputs[0]])


def with_tangents(origin: ResumableTrace, kinds: Sequence[TangentKind]) -> ResumableTrace:
    """The trace with a slot and a layout for each plain tensor of the tangents of these kinds, behind the others."""
    slots: list[Slot] = [*origin.output_slots]
    specs = [*origin.tangent_specs]
    for kind in kinds:
        paths = [""] if kind.spec is None else kind.spec.paths()
        slots += [Part(origin.output_slots[kind.outputs[0]], f" as another kind{path}") for path in paths]
        shape = result_of(origin, kind).shape
        specs += [_of_result(part, kind, shape) for part in kind.parts] if has_symbolic(shape) else kind.parts
    return dataclasses.replace(origin, output_slots=tuple(slots), tangent_specs=tuple(specs)) if kinds else origin


def tangents_of(origin: ResumableTrace, kinds: Sequence[TangentKind], fakes: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The tangents of these kinds, made of fakes of their plain tensors."""
    rest = iter(fakes)
    for kind in kinds:
        parts = [next(rest) for _ in kind.parts]
        shape = result_of(origin, kind).shape
        if kind.spec is None:
            yield parts[0]
        elif has_symbolic(shape):
            yield wrap(with_sizes_of(_at_capture(kind.spec, kind, shape), parts), parts)
        else:
            yield wrap(kind.spec, parts)


def _of_result(spec: TensorSpec, kind: TangentKind, shape: Sequence[Any]) -> TensorSpec:
    """The layout of a plain tensor in the tangent of a result whose sizes vary."""
    own = _sizes_of_result(spec.shape, kind, shape)
    return TensorSpec(own, contiguous_strides(own), spec.dtype, spec.device)


def _at_capture(spec: WrapperSpec, kind: TangentKind, shape: Sequence[Any]) -> WrapperSpec:
    """The spec with the sizes that it would have had when the function was captured."""
    own = tuple(map(concrete, _sizes_of_result(spec.shape, kind, shape)))
    inner = tuple(None if held is None else _at_capture(held, kind, shape) for held in spec.inner)
    return dataclasses.replace(spec, shape=own, stride=contiguous_strides(own), inner=inner)


def _sizes_of_result(numbers: Sequence[int], kind: TangentKind, shape: Sequence[Any]) -> tuple[Any, ...]:
    places = [place_of_size(number, dim, kind.shape) for dim, number in enumerate(numbers)]
    return tuple(number if place is None else shape[place] for number, place in zip(numbers, places, strict=True))
