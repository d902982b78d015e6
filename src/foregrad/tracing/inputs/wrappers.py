"""Wrapper subclasses in a capture: what stands for them, made over the stand-ins of their plain tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch.symbols import is_symbolic
from ..._torch.tensors import (
    base_of,
    is_marked,
    is_no_grad_view,
    is_view,
    leads_to_base,
    numbers_of_view,
    storage_key,
    version_of,
)
from ...errors import UnsupportedAliasError, UnsupportedTensorError
from ...frontend.sources import Source
from ...frontend.tree import SharedWrapper, Tree, Unwrap, flatten
from ...frontend.wrappers import FoundWrappers, ReachedWrapper
from ...graph.signature import PartOf
from ...graph.slots import Buffer, Closure, Param, Slot
from ...subclasses.conversion import (
    Samples,
    learn_gradient,
    predicted_spec,
    taken_apart,
    unwrap,
    wrap,
)
from ...subclasses.spec import GradientKindError, WrapperSpec, is_of_capture, is_wrapper, parts_of, spec_of
from ..heap.refusals import changed_wrapper, returned_wrapper
from ..recorder.recorder import Recorder
from .outer_sizes import with_sizes_of

__all__ = ["Wrappers"]

_TENSOR: Any = torch.Tensor


class _Input:
    """A wrapper among the inputs: its stand-in over the stand-ins of its plain tensors.

    `gradient`: the spec that its gradient was found to have.
    """

    def __init__(self, spec: WrapperSpec, parts: Sequence[Any], source: Source | None) -> None:
        self.given, self.parts, self.source = spec, tuple(parts), source
        self.gradient: WrapperSpec | None = None
        self.spec = spec = with_sizes_of(spec, parts)
        with torch.enable_grad():
            self.stand_in = wrap(spec, parts, self._taken)
        if spec.is_parameter:
            self.stand_in._is_param = True
        self.inside = parts_of(self.stand_in)
        self.spec_inside = _without_history(self.stand_in)
        if spec.sizes is not None:  # its class may know better
            self.spec = dataclasses.replace(spec, sizes=self.spec_inside.sizes, inner=self.spec_inside.inner)
        self.history = self.stand_in.requires_grad, self.stand_in.grad_fn
        self.start_version = _version(self.stand_in)

    def _taken(self, gradient: Any) -> list[Any]:
        """The gradient by plain tensor."""
        spec = self.spec
        if spec.is_whole is is_wrapper(gradient):
            learn_gradient(spec.cls, is_plain=not spec.is_whole)
            kind = "a wrapper" if spec.is_whole else "no wrapper"
            raise GradientKindError(f"the gradient of a {spec.cls.__qualname__} is {kind} here.")
        if spec.is_whole:
            return [*[None] * len(spec.carries), gradient]
        found = _without_history(gradient)
        if self.gradient not in (None, found) or not self._is_rebuilt(found, gradient):
            raise UnsupportedTensorError(
                f"the gradient of a {spec.cls.__qualname__} is a {found.cls.__qualname__} of another structure, which "
                "can't be compiled yet. Detach it, or keep that part outside the compiled function."
            )
        self.gradient = found
        parts = zip(taken_apart(gradient), found.carries, strict=True)
        carrying = [part for part, carries in parts if carries]
        own = [part for part, carries in zip(self.parts, spec.carries, strict=False) if carries]
        if any(part.shape != other.shape for part, other in zip(carrying, own, strict=True)):
            raise UnsupportedTensorError(
                f"the gradient of a {spec.cls.__qualname__} of sizes {list(gradient.shape)} holds tensors of other "
                "sizes than it does (a DTensor's that is sharded, where its gradient is not), which can't be compiled "
                "yet. Compile other modules than the one that uses it, as the blocks between an embedding and a head."
            )
        rest = iter(carrying)
        return [next(rest) if carries else None for carries in spec.carries]

    def _is_rebuilt(self, found: WrapperSpec, gradient: Any) -> bool:
        """Whether a gradient is known by those of the plain tensors: what has no gradient in it is the input's."""
        if sum(found.carries) != sum(self.spec.carries):
            return False
        kept = dict(zip(self.spec.paths(), self.parts, strict=False))
        inside = zip(found.paths(), parts_of(gradient), found.carries, strict=True)
        return all(carries or _is_same(part, kept.get(path)) for path, part, carries in inside)

    @property
    def writes(self) -> int:
        """How often it was written to."""
        return _version(self.stand_in) - self.start_version

    def check(self) -> None:
        """Raise where more happened to it than that plain tensors in it were written."""
        spec, stand_in = self.spec, self.stand_in
        said = f"the function changes an argument or parameter that is a {spec.cls.__qualname__}"
        is_same = all(a is b for a, b in zip(parts_of(stand_in), self.inside, strict=False))
        is_same = is_same and (stand_in.requires_grad, stand_in.grad_fn) == self.history
        if not is_same or _without_history(stand_in) != self.spec_inside:
            raise changed_wrapper(said)


class Wrappers:
    """The wrappers of one capture. `samples` are the plain tensors of those that the function reaches by itself, which
    are the same ones in each run.
    """

    def __init__(self, samples: Samples, recorder: Recorder) -> None:
        self.samples, self.recorder = samples, recorder
        self.inputs: list[_Input] = []  # arguments, one that comes twice twice, then those that it reached by itself
        self.by_stand_in: dict[int, _Input] = {}
        self.by_parts: dict[tuple[int, ...], _Input] = {}
        self.results: dict[int, list[Any]] = {}  # those of the same base, by its id
        self.roots: collections.Counter[int] = collections.Counter()  # how many results are that tensor or views of it
        self.shared: dict[int, tuple[int, Any]] = {}  # by id, what several results need: its key, and itself
        self.reached: dict[int, tuple[Any, _Input]] = {}  # by the id of the real wrapper, which is kept alive

    # ---------------------------------------------------------------- inputs

    def of_argument(self, array_of: Callable[[Any], Any], spec: WrapperSpec | None, parts: Sequence[Any]) -> Any:
        """The stand-in of an argument, over the stand-ins of its plain tensors; `array_of` makes those of arrays."""
        if spec is None:
            return array_of(*parts)
        key = tuple(map(id, parts))
        known = self.by_parts.get(key)
        if known is None or known.given != spec:
            known = self.by_parts[key] = _Input(spec, parts, None)
        self.inputs.append(known)
        self.by_stand_in[id(known.stand_in)] = known
        return known.stand_in

    def adopt(
        self,
        real: Any,
        adopt_part: Callable[[torch.Tensor, PartOf], torch.Tensor],
        source_of: Callable[[torch.Tensor], Source],
    ) -> Any:
        """The stand-in of a wrapper that the function reaches by itself, which `source_of` says where; one that it made
        is none of those. `adopt_part(tensor, source)` makes an input of a plain tensor in it.
        """
        if id(real) in self.by_stand_in:
            return real
        known = self.reached.get(id(real))
        if known is None:
            if is_of_capture(real):
                return real
            source = source_of(real)
            spec, samples = self.samples(real)
            number = len(self.reached)
            parts = [
                adopt_part(sample, PartOf(number, i, _inner_slot(source.slot, path)))
                for i, (sample, path) in enumerate(zip(samples, spec.paths(), strict=True))
            ]
            known = self.reached[id(real)] = real, _Input(spec, parts, source)
            self.inputs.append(known[1])
            self.by_stand_in[id(known[1].stand_in)] = known[1]
        return known[1].stand_in

    def answer(self, stand_in: Any, func: Any, where: Callable[[], str]) -> Any:
        """What a program asks an input for besides its values."""
        known = self.by_stand_in.get(id(stand_in))
        if known is None or func in _ANSWERED:
            return NotImplemented
        if func == _TENSOR.is_leaf.__get__:
            return known.spec.is_leaf
        if func == _TENSOR.grad_fn.__get__ and known.spec.is_leaf:
            return None
        raise UnsupportedTensorError(
            f"`{getattr(func, '__self__', func).__name__}` of an input that is a {known.spec.cls.__qualname__} is used "
            f"at {where()}, which can't be compiled yet. Do that outside the compiled function."
        )

    # ---------------------------------------------------------------- results

    def unwrap(self, stand_in: Any) -> tuple[WrapperSpec, Sequence[Any]] | None:
        """The plain stand-ins of an argument; None for another wrapper."""
        known = self.by_stand_in.get(id(stand_in))
        return None if known is None else (known.spec, known.parts)

    def of_results(self, results: Any, adopt: Callable[[Any], Any]) -> Unwrap:
        """What takes apart the wrappers in what the function returns."""
        leaves = [adopt(leaf) for leaf in flatten(results, lambda _: None)[0] if is_wrapper(leaf)]
        self.roots = collections.Counter(id(base_of(leaf) if is_view(leaf) else leaf) for leaf in leaves)
        return lambda result: self._taken_apart(adopt(result))

    def _taken_apart(self, result: Any) -> tuple[WrapperSpec, Sequence[Any]] | SharedWrapper | None:
        """The plain tensors of a wrapper that the function returns; None for one of the inputs, returned as it is."""
        base: Any = base_of(result) if is_view(result) else None
        is_of_input = id(base) in self.by_stand_in and result.requires_grad is base.requires_grad
        if base is not None and is_marked(result):
            raise _no_grad_view(base)
        _check_view(result)
        if id(result) in self.by_stand_in or is_of_input:
            return None
        root = result if base is None else base
        if root.requires_grad is result.requires_grad and id(root) not in self.by_stand_in:
            varies = base is not None and self.recorder.is_symbolic and any(map(is_symbolic, numbers_of_view(result)))
            if not varies and (self.roots[id(root)] > 1 or (base is not None and result.requires_grad)):
                return self._shared(result, root)
        self._check_apart(result, root)
        return self._in_graph(result)

    def _in_graph(self, result: Any) -> tuple[WrapperSpec, Sequence[Any]]:
        if any(part.requires_grad for part in parts_of(result)):
            raise UnsupportedTensorError(
                f"a {type(result).__qualname__} that the function returns was made of tensors with a history: in eager "
                "its gradient would not go on there. Detach them, or make it in a torch.autograd.Function."
            )
        spec = predicted_spec(result)
        with self.recorder:
            return spec, unwrap(result, spec)

    def _shared(self, result: Any, root: Any) -> SharedWrapper:
        """A view of a wrapper, or one of several results that are one: the wrapper is made once, then its views."""
        if id(root) in self.results:
            raise returned_wrapper(f"two results are one {type(result).__qualname__}, or views of one")
        is_first = id(root) not in self.shared
        known, _ = self.shared.setdefault(id(root), (-1 - len(self.shared), root))
        if result is root:
            return SharedWrapper(known, known, None, self._in_graph(root) if is_first else None)
        key, _ = self.shared.setdefault(id(result), (-1 - len(self.shared), result))
        return SharedWrapper(known, key, result, self._in_graph(root) if is_first else None)

    def _check_apart(self, result: Any, base: Any) -> None:
        """Raise for a result that is there already, or a view of what another one is, or is a view of, with gradients:
        one that is written later has to change the other's history.
        """
        known = self.results.setdefault(id(base), [])
        is_shared = id(base) in self.shared
        if any(other is result for other in known) or ((known or is_shared) and result.requires_grad):
            raise returned_wrapper(f"two results are one {type(result).__qualname__}, or views of one")
        known.append(result)

    def returned(self, value: Any, adopt: Callable[[Any], Any]) -> tuple[Any, ...] | None:
        """Which input a result is; or which it is a view of, the view of its stand-in, and the numbers it is taken with
        where some are symbolic.
        """
        if not self.inputs:
            return None
        if not is_wrapper(value):
            _check_view(value)
            return None
        value = adopt(value)
        known = self.by_stand_in.get(id(value))
        if known is not None:
            return (self.inputs.index(known),)
        numbers = tuple(numbers_of_view(value)) if self.recorder.is_symbolic else ()
        of = self.inputs.index(self.by_stand_in[id(base_of(value))])
        return of, value, numbers if any(map(is_symbolic, numbers)) else None

    # ---------------------------------------------------------------- afterwards

    def check(self) -> None:
        """Raise where the function did to a wrapper among the inputs what no compiled call would do."""
        for known in self.by_stand_in.values():
            known.check()

    def writes(self) -> tuple[tuple[int, int], ...]:
        """For the inputs that were written to, how often."""
        inputs = {id(known): known for known in self.inputs}.values()
        return tuple((self.inputs.index(known), known.writes) for known in inputs if known.writes)

    def found(self, tree: Tree) -> FoundWrappers | None:
        """All of them; None where there is none. `tree` is that of the arguments."""
        if not self.inputs:
            return None
        arguments = zip(tree.wrappers(), self.inputs, strict=False)  # after these come the others
        of_leaves = {first: (known.spec, known.gradient) for (first, _), known in arguments}
        inputs = [known for _, known in self.reached.values()]
        reached = [ReachedWrapper(i.source, i.spec, i.gradient) for i in inputs if i.source is not None]
        return FoundWrappers(tuple(reached), of_leaves)


# What the stand-in itself can tell.
_ANSWERED = {_TENSOR.storage_offset, _TENSOR.untyped_storage, _TENSOR.is_shared, _TENSOR.is_pinned}


def _check_view(result: torch.Tensor) -> None:
    """Raise for a view that eager raises about when it is looked at after a write."""
    base: Any = base_of(result) if is_view(result) else None
    if not is_wrapper(base):
        return
    try:
        reaches = not (base.requires_grad and result.requires_grad) or leads_to_base(result)
    except RuntimeError as error:
        said = f"a result is a view of a {type(base).__qualname__} that eager refuses ({error})"
        raise returned_wrapper(said) from error
    if not reaches or (base.requires_grad and is_no_grad_view(result)):
        raise _no_grad_view(base)


def _no_grad_view(base: torch.Tensor) -> UnsupportedAliasError:
    said = f"a result is a view of a {type(base).__qualname__} that requires grad taken under torch.no_grad()"
    return returned_wrapper(said)


def _without_history(wrapper: Any) -> WrapperSpec:
    """Its spec, whatever history it has."""
    return dataclasses.replace(spec_of(wrapper), requires_grad=False, is_leaf=True, is_parameter=False)


def _is_same(part: torch.Tensor, kept: torch.Tensor | None) -> bool:
    """Whether two tensors without gradients have the same elements: are the same memory, not written to since."""
    if kept is None or part is kept:
        return kept is not None
    layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype, storage_key(t), version_of(t)) for t in (part, kept)]
    return layouts[0] == layouts[1]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _inner_slot(slot: Slot, path: str) -> Slot:
    """The slot of a plain tensor in a wrapper."""
    if isinstance(slot, (Param, Buffer)):
        return type(slot)(slot.name + path)
    assert isinstance(slot, Closure)
    return Closure(slot.path + path)
