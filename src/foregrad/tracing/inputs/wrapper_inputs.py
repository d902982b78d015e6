"""A wrapper subclass among the inputs of a capture: its stand-in, over those of the plain tensors in it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..._torch.engine import keeps_versions
from ..._torch.jagged import is_jagged
from ..._torch.symbols import concrete, has_symbolic, is_symbolic, same_numbers
from ..._torch.tensors import history_of, is_view, share_counters, storage_key, version_of
from ...errors import UnsupportedTensorError
from ...frontend.expected import ABSENT
from ...frontend.reads import Source
from ...graph.effect_log import Detach, Effect
from ...subclasses.conversion import give_history, has_plain_gradient, learn_carriers, learn_gradient, taken_apart, wrap
from ...subclasses.spec import (
    Carrier,
    GradientKindError,
    WrapperSpec,
    bare_spec,
    is_wrapper,
    outer_sizes,
    parts_of,
    rebuilt,
)
from ..heap.refusals import changed_wrapper
from ..tape.symbols import following_strides
from .stand_ins import NonLeaf


class WrapperInput:
    """A wrapper among the inputs, `real`: its stand-in over the stand-ins of its plain tensors.

    `slot`: what people call it. `gradient`: the spec that its gradient was found to have. `is_other`: why the capture
    is to begin again.
    """

    def __init__(self, spec: WrapperSpec, parts: Sequence[Any], real: Any, slot: str, source: Source | None) -> None:
        self.given, self.parts, self.real, self.slot, self.source = spec, tuple(parts), real, slot, source
        self.gradient: WrapperSpec | None = None
        self.is_other: GradientKindError | None = None
        self.spec = spec = with_sizes_of(spec, parts)
        with torch.enable_grad():
            self.stand_in = wrap(spec, parts, self._taken)
        if spec.is_parameter:
            self.stand_in._is_param = True
        self._own = {**self.stand_in.__dict__}
        self.hung = {name: value for name, value in real.__dict__.items() if name not in self._own}
        self.stand_in.__dict__.update(self.hung)
        self.inside = parts_of(self.stand_in)
        self.spec_inside = bare_spec(self.stand_in)
        if spec.sizes is not None:  # its class may know better
            self.spec = dataclasses.replace(spec, sizes=self.spec_inside.sizes, inner=self.spec_inside.inner)
        self.history = self.stand_in.requires_grad, self.stand_in.grad_fn
        self.edge = self.stand_in.grad_fn  # where its gradient arrives
        self.twin: Any = None  # has the history that it had when it was detached
        self.is_marked = False  # it did not require grad, and does since
        self.detached: Effect | None = None  # what made it require grad no more
        self.start_version = _version(self.stand_in)

    # ---------------------------------------------------------------- its history

    def requires_grad(self, value: bool, leaf_of: Callable[[Any], Any], where: str) -> bool:
        """`requires_grad_(value)` is called on it: whether that is done with, or else its stand-in answers.

        `leaf_of` gives the leaf at which the gradient of a plain tensor is taken.
        """
        stand_in, spec = self.stand_in, self.spec
        if stand_in.requires_grad is value:
            return True
        self.check()
        if not value:
            if not (spec.is_leaf or self.is_marked) or self.is_rewritten:
                return False
            self._keep_history()
            stand_in.detach_()
            self._is_detached(in_place=False)
            return True
        if stand_in.grad_fn is not None or not (stand_in.is_floating_point() or stand_in.is_complex()):
            return False
        if spec.requires_grad and not spec.is_leaf:
            raise changed_wrapper(f"{self.slot}, a {spec.cls.__qualname__}, is detached and marked again at {where}")
        take, tensors = self._carrying, [leaf_of(p) for p, c in zip(self.parts, spec.carries, strict=True) if c]
        if self.twin is not None:
            take, tensors = _as_it_is, [self.twin]
        elif has_plain_gradient(spec):
            raise changed_wrapper(
                f"`requires_grad_()` on {self.slot} at {where}, a {spec.cls.__qualname__} whose gradient is plain"
            )
        with keeps_versions(stand_in):
            give_history(take, stand_in, *tensors)
        if not spec.requires_grad:
            self.is_marked, self.edge = True, self.edge or stand_in.grad_fn
        self.history, self.detached = (True, stand_in.grad_fn), None
        self.spec_inside = bare_spec(stand_in)  # metadata may say whether gradients are wanted
        return True

    def detach(self, run: Callable[[], Any]) -> None:
        """`detach_()` is called on it: `run` does so on the stand-in."""
        if is_view(self.real):
            raise RuntimeError("Can't detach views in-place. Use detach() instead.")
        had = self.stand_in.requires_grad
        self.check()
        if had:
            self._keep_history()
        run()
        if had:
            self._is_detached(in_place=True)

    def is_alike(self, result: Any) -> bool:
        """Whether a tensor without history holds the same memory, and counts writes with it."""
        is_of_kind = type(result) is self.spec.cls and not self.stand_in.is_inference()
        if not (is_of_kind and share_counters(result, self.stand_in)):
            return False
        pairs = zip(parts_of(result), self.inside, strict=False)
        detached = self.stand_in.detach()  # metadata may say whether gradients are wanted
        return bare_spec(result) == bare_spec(detached) and all(_is_same(*pair) for pair in pairs)

    def has_changed_since(self, *, is_of_input: bool) -> bool:
        """Whether a view of it may be of what it was. `is_of_input`: the view requires grad as it does by now."""
        return self.detached is not None or ((self.is_marked or self.twin is not None) and not is_of_input)

    def _keep_history(self) -> None:
        if self.twin is None and not self.is_rewritten:
            with torch.enable_grad():
                self.twin = NonLeaf.apply(self.stand_in, [rebuilt(self.spec, self.inside)])

    def _is_detached(self, *, in_place: bool) -> None:
        self.history, self.spec_inside = (False, None), bare_spec(self.stand_in)
        self.detached = Detach(-1, in_place) if self.spec.requires_grad or self.is_marked else None

    def _carrying(self, gradient: Any) -> list[Any]:
        return [part for part, carries in zip(self._taken(gradient), self.spec.carries, strict=True) if carries]

    def _taken(self, gradient: Any) -> list[Any]:
        """The gradient by plain tensor."""
        spec = self.spec
        if spec.is_whole is is_wrapper(gradient):
            learn_gradient(spec.cls, is_plain=not spec.is_whole)
            kind = "a wrapper" if spec.is_whole else "no wrapper"
            raise GradientKindError(f"the gradient of a {spec.cls.__qualname__} is {kind} here.")
        if spec.is_whole:
            return [*[None] * len(spec.carries), gradient]
        found = bare_spec(gradient)
        if self.gradient not in (None, found) or not self._is_rebuilt(found, gradient):
            raise UnsupportedTensorError(
                f"the gradient of a {spec.cls.__qualname__} is a {found.cls.__qualname__} of another structure, which "
                "can't be compiled yet. Detach it, or keep that part outside the compiled function."
            )
        self.gradient = found
        named = zip(found.paths(), taken_apart(gradient), found.carries, strict=True)
        carrying = {path: part for path, part, carries in named if carries}
        own = zip(self.parts, spec.carries, strict=False)
        like = spec.carriers or [part for part, carries in own if carries]
        if [(p.shape, p.dtype) for p in carrying.values()] != [(torch.Size(p.shape), p.dtype) for p in like]:
            return self._not_like_it(carrying)
        if spec.carriers:
            return [*[None] * len(spec.carries), *carrying.values()]
        rest = iter(carrying.values())
        return [next(rest) if carries else None for carries in spec.carries]

    def _not_like_it(self, carrying: Mapping[str, torch.Tensor]) -> list[Any]:
        """The gradient, by path, holds plain tensors of other sizes, as that of a DTensor that is sharded, where its
        gradient is not: the capture is to begin again, knowing so.
        """
        name = self.spec.cls.__qualname__
        if self.spec.carriers or any(has_symbolic(part.shape) for part in carrying.values()):
            raise UnsupportedTensorError(
                f"the gradient of a {name} holds tensors of other sizes than it does, and these vary. Use "
                "`dynamic=False`, or keep that part outside the compiled function."
            )
        carriers = [Carrier(p, tuple(part.shape), part.dtype, part.device) for p, part in carrying.items()]
        learn_carriers(self.spec, carriers)
        self.is_other = GradientKindError(f"the gradient of a {name} holds tensors of other sizes than it does.")
        return [None] * self.spec.count

    def _is_rebuilt(self, found: WrapperSpec, gradient: Any) -> bool:
        """Whether a gradient is known by those of the plain tensors: what has no gradient in it is the input's."""
        kept = dict(zip(self.spec.paths(), self.parts, strict=False))
        inside = zip(found.paths(), parts_of(gradient), found.carries, strict=True)
        return all(carries or _is_same(part, kept.get(path)) for path, part, carries in inside)

    @property
    def is_of_torch(self) -> bool:
        """Whether its class is PyTorch's own, which keeps what it has computed in attributes."""
        return self.spec.cls.__module__.startswith("torch.")

    def told_apart(self, names: Iterable[str]) -> frozenset[str]:
        """Attributes among `names` that are no plain tensors and, on a class of PyTorch's, none of its own."""
        own = "_" if self.is_of_torch else ()
        return frozenset(name for name in names if name not in self.spec.names and not name.startswith(own))

    def attributes_set(self) -> list[str]:
        """The attributes that the function hung onto it."""
        before, now = self._own | self.hung, self.stand_in.__dict__
        names = self.told_apart(before.keys() | now.keys())
        return [name for name in names if before.get(name, ABSENT) is not now.get(name, ABSENT)]

    def is_given_gradient(self) -> bool:
        """Whether the function has set its `.grad`."""
        with warnings.catch_warnings():  # its stand-in is no leaf
            warnings.simplefilter("ignore")
            return self.stand_in.grad is not None

    @property
    def writes(self) -> int:
        """How often it was written to."""
        return _version(self.stand_in) - self.start_version

    @property
    def is_rewritten(self) -> bool:
        """Whether it was written to with gradients, and has another history since."""
        return history_of(self.stand_in) is not self.history[1]

    def check(self) -> None:
        """Raise where more happened to it than that plain tensors in it were written."""
        spec, stand_in = self.spec, self.stand_in
        is_same = all(a is b for a, b in zip(parts_of(stand_in), self.inside, strict=False))
        if stand_in.requires_grad is not self.history[0] or stand_in.grad_fn is not self.history[1]:
            is_same = is_same and stand_in.grad_fn is not None and (not spec.is_leaf or self.history[1] is None)
        if not is_same or bare_spec(stand_in) != self.spec_inside:
            raise changed_wrapper(f"the function changes an argument or parameter that is a {spec.cls.__qualname__}")


def _is_same(part: torch.Tensor, kept: torch.Tensor | None) -> bool:
    """Whether two tensors without gradients have the same elements: none, or are the same memory, not written to
    since.
    """
    if kept is None or part is kept:
        return kept is not None
    if any(not is_symbolic(size) and size == 0 for size in part.shape):  # a jagged tensor keeps lengths as such sizes
        return part.dtype == kept.dtype and same_numbers(part.shape, kept.shape)
    layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype, storage_key(t), version_of(t)) for t in (part, kept)]
    return layouts[0] == layouts[1]


def _as_it_is(gradient: Any) -> list[Any]:
    return [gradient]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


# -------------------------------------------------------------------- sizes of wrappers
# Sizes of wrappers among the inputs that follow from varying sizes of the plain tensors inside.


def with_sizes_of(spec: WrapperSpec, parts: Sequence[Any]) -> WrapperSpec:
    """`spec` for a wrapper around plain stand-ins, some of whose sizes vary.

    A size of the wrapper is taken to be the one of a plain tensor that it is equal to: guards look at each call.
    """
    parts = parts[: len(spec.carries)]
    varying = [(dim, size) for part in parts for dim, size in enumerate(part.shape) if is_symbolic(size)]
    if not varying or is_jagged(spec.cls):  # its class computes its sizes
        return spec
    inner: list[WrapperSpec | None] = []
    first = 0
    for held in spec.inner:
        count = 1 if held is None else len(held.carries)
        inner.append(None if held is None else with_sizes_of(held, parts[first : first + count]))
        first += count
    shape = tuple(_same_size(size, dim, varying) for dim, size in enumerate(spec.shape))
    sizes = outer_sizes(spec.cls, shape, following_strides(spec, shape), parts)
    return dataclasses.replace(spec, sizes=sizes, inner=tuple(inner))


def _same_size(size: int, dim: int, varying: Sequence[tuple[int, Any]]) -> Any:
    equal = [(other_dim != dim, other) for other_dim, other in varying if concrete(other) == size]
    return min(equal, key=lambda pair: pair[0])[1] if equal else size
