"""Wrapper subclasses in a capture: their stand-ins, made over the stand-ins of their plain tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch.symbols import has_symbolic, is_symbolic, same_numbers
from .._torch.tensors import (
    allows_writes,
    base_of,
    history_of,
    is_no_grad_view,
    is_view,
    leads_to_base,
    share_counters,
    storage_key,
    version_of,
)
from .._torch.wrappers import is_of_capture, is_wrapper, parts_of
from ..errors import UnsupportedSideEffectError, UnsupportedTensorError
from ..frontend.openings import FoundOpenings, GradientKindError, ReachedOpening, Sampler, Unwrap
from ..frontend.source import ABSENT, Source
from ..frontend.tree import Tree, flatten
from ..graph.effect_log import Write
from ..graph.signature import PartOf, PassedWrapper, WrapperPlace
from ..graph.slots import Buffer, Closure, Param, Slot
from ..identity import ById, IdSet
from ..tracing.effects.results import Returned
from ..tracing.heap.refusals import changed_wrapper, returned_wrapper
from ..tracing.inputs.open_inputs import OpenInputs
from ..tracing.recorder.recorder import Recorder
from ..tracing.tape.gradient_paths import passed_through
from ..tracing.tape.origin import user_line
from ._torch.jagged import is_dispatch_argument
from .conversion import learn_carriers, learn_gradient, predicted_spec, taken_apart, unwrap, wrap
from .spec import Carrier, WrapperSpec, bare_spec, rebuilt, spec_of, with_sizes_of


class WrapperInput:
    """A wrapper among the inputs, `real`: its stand-in over the stand-ins of its plain tensors.

    `slot`: its name for people. `gradient`: the spec that its gradient was found to have. `is_other`: why the capture
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
        self.history = self.stand_in.requires_grad, self.stand_in.grad_fn  # where its gradient arrives
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
        found = bare_spec(gradient)
        if self.gradient not in (None, found) or not self._is_rebuilt(found, gradient):
            raise UnsupportedTensorError(
                f"the gradient of a {spec.cls.__qualname__} is a {found.cls.__qualname__} with a different "
                "structure; this can't be compiled yet. Detach it, or keep this part outside the compiled function."
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
        """Whether a gradient follows from the plain tensors' gradients: a part without a gradient is the input's."""
        kept = dict(zip(self.spec.paths(), self.parts, strict=False))
        inside = zip(found.paths(), parts_of(gradient), found.carries, strict=True)
        return all(carries or _is_same(part, kept.get(path)) for path, part, carries in inside)

    @property
    def is_of_torch(self) -> bool:
        """Whether its class is PyTorch's own, with computed values kept in attributes."""
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

    def check(self) -> None:
        """Raise where more happened than writes to its plain tensors."""
        spec, stand_in = self.spec, self.stand_in
        is_same = all(a is b for a, b in zip(parts_of(stand_in), self.inside, strict=False))
        is_same = is_same and (stand_in.requires_grad, history_of(stand_in)) == self.history
        if not is_same or bare_spec(stand_in) != self.spec_inside:
            raise changed_wrapper(f"the function changes an argument or parameter that is a {spec.cls.__qualname__}")


def _is_same(part: torch.Tensor, kept: torch.Tensor | None) -> bool:
    """Whether two tensors without gradients have equal elements: none, or one memory, unwritten since."""
    if kept is None or part is kept:
        return kept is not None
    if any(not is_symbolic(size) and size == 0 for size in part.shape):  # a jagged tensor keeps lengths as nested sizes
        return part.dtype == kept.dtype and same_numbers(part.shape, kept.shape)
    layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype, storage_key(t), version_of(t)) for t in (part, kept)]
    return layouts[0] == layouts[1]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


# -------------------------------------------------------------------- sizes of wrappers
# Sizes of wrappers among the inputs that follow from varying sizes of the plain tensors inside.


class InputsOfClasses(OpenInputs):
    """The wrappers of a capture. `samples` are the plain tensors of wrappers that the function reaches by itself,
    equal objects in each run.
    """

    def __init__(self, samples: Sampler, recorder: Recorder, plain: ById[torch.Tensor, Any]) -> None:
        super().__init__(samples, recorder, plain)
        self.by_parts: dict[tuple[int, ...], WrapperInput] = {}
        self.results: list[Any] = []  # tensors that are not among the inputs
        self.reached: ById[Any, WrapperInput] = ById()  # by the real wrapper
        self.remade: ById[Any, Any] = ById()  # by a wrapper that the function made of real tensors

    # ---------------------------------------------------------------- inputs

    def of_argument(self, array_of: Callable[[Any], Any], spec: WrapperSpec | None, parts: Sequence[Any]) -> Any:
        if spec is None:
            return array_of(*parts)
        key = tuple(map(id, parts))
        known = self.by_parts.get(key)
        if known is None or known.given != spec:
            slot = str(self.plain[parts[0]].slot).removesuffix(spec.paths()[0])
            known = self.by_parts[key] = WrapperInput(spec, parts, spec.of(), slot, None)
        self._add(known)
        return known.stand_in

    def adopt(
        self,
        real: Any,
        adopt_part: Callable[[torch.Tensor, PartOf], torch.Tensor],
        source_of: Callable[[torch.Tensor], Source | None],
        adopt: Callable[[torch.Tensor], torch.Tensor],
    ) -> Any:
        """The stand-in of a wrapper that is no argument. `source_of` gives the wrapper's source, if the function
        reaches it by itself, and `adopt_part(tensor, source)` makes an input of its plain tensor. Without a source the
        function made the wrapper, of plain tensors with stand-ins by `adopt(tensor)`.
        """
        if real in self.by_stand_in:
            return real
        known = self.reached.get(real)
        if known is None:
            if is_of_capture(real) or is_dispatch_argument(real):
                return real
            if real in self.remade:
                return self.remade[real]
            source = source_of(real)
            if source is None:
                made = rebuilt(spec_of(real), list(map(adopt, parts_of(real)))).requires_grad_(real.requires_grad)
                self.remade[real] = made
                return made
            spec, samples = self.samples(real)
            number = len(self.reached)
            parts = [
                adopt_part(sample, PartOf(number, i, _inner_slot(source.slot, path), source))
                for i, (sample, path) in enumerate(zip(samples, spec.paths(), strict=True))
            ]
            known = self.reached[real] = WrapperInput(spec, parts, real, str(source.slot), source)
            self._add(known)
        return known.stand_in

    def _add(self, known: WrapperInput) -> None:
        self.inputs.append(known)
        self.by_stand_in[known.stand_in] = known
        self.recorder.wrapper_inputs.add(known.stand_in)

    def find(self, tensor: Any) -> Any:
        return self.by_stand_in.get(tensor) or self.reached.get(tensor)

    def check_history(self, tensor: Any, call: str, where: str) -> None:
        if tensor in self.by_stand_in or tensor in self.reached or is_view(tensor):
            kind = type(tensor).__qualname__
            raise changed_wrapper(f"`{call}` at {where} changes a {kind} that is an argument, a parameter or a view")

    # ---------------------------------------------------------------- results

    def unwrap(self, stand_in: Any) -> tuple[WrapperSpec, Sequence[Any]] | None:
        known = self.by_stand_in.get(stand_in)
        return None if known is None else (known.spec, known.parts)

    def of_results(self, results: Any, adopt: Callable[[Any], Any]) -> Unwrap:
        self.leaves = [adopt(x) if is_wrapper(x) else x for x in flatten(results, lambda _: None)[0]]
        return lambda result: self._taken_apart(adopt(result))

    def _taken_apart(self, result: Any) -> tuple[WrapperSpec, Sequence[Any]] | None:
        """The plain tensors of a wrapper that the function returns; None for one of the inputs, returned as it is."""
        if result in self.by_stand_in:
            return None
        base: Any = base_of(result) if is_view(result) else None
        if base is None or is_wrapper(base):
            _check_view(result, self._made_at)
        elif base.requires_grad and (base in self.plain or any(leaf is base for leaf in self.leaves)):  # a jagged one
            kind = type(result).__qualname__
            raise returned_wrapper(f"a result is a {kind} made as a view of a plain tensor that is given, or returned")
        self._check_apart(result)
        return self._in_graph(result)

    def _in_graph(self, result: Any) -> tuple[WrapperSpec, Sequence[Any]]:
        inside = parts_of(result)
        spec, own = bare_spec(result), "_" if type(result).__module__.startswith("torch.") else ()
        for name in result.__dict__.keys() - {*spec.names, "_is_param"}:
            if not name.startswith(own) and name not in rebuilt(spec, inside).__dict__:
                raise UnsupportedSideEffectError(
                    f"the attribute {name} is set on a {spec.cls.__qualname__} that is a result"
                    f"{self._made_at(result)}; a compiled call would not set it. Return the value instead."
                )
        if result.is_leaf and (result.requires_grad or any(part.requires_grad for part in inside)):
            # To autograd they have nothing to do with the wrapper: its own gradient ends there.
            return dataclasses.replace(spec_of(result), keeps_parts=True), inside
        spec, parts = self.apart(result)
        self.made[result] = parts
        return spec, parts

    def apart(self, wrapper: Any) -> tuple[WrapperSpec, Sequence[Any]]:
        """The plain tensors of a wrapper, with its history."""
        spec = predicted_spec(wrapper)
        with self.recorder:
            parts = unwrap(wrapper, spec)
        self.taken_apart.append((wrapper, parts))
        return spec, parts

    def _check_apart(self, result: Any) -> None:
        """Raise for a wrapper that shares memory with a visible wrapper: one may be written later."""
        kind = type(result).__qualname__
        at = self._made_at(result)
        if any(share_counters(result, known.stand_in) for known in self.inputs):
            raise returned_wrapper(f"a result is a view of a {kind} from outside, or detached from one{at}")
        if any(result is other or share_counters(result, other) for other in self.results):
            raise returned_wrapper(f"two results are one {kind}, views of one, or detached from one{at}")
        self.results.append(result)

    def _made_at(self, result: Any) -> str:
        """The user's line that made a result."""
        values = filter(None, map(self.recorder.values.get, parts_of(result) if is_wrapper(result) else [result]))
        origins = [value.taken_at or (None if value.entry is None else value.entry.origin) for value in values]
        return next((f" at {user_line(origin)}" for origin in origins if origin is not None), "")

    def returned(self, value: Any, adopt: Callable[[Any], Any]) -> int | None:
        if not self.inputs:
            return None
        if is_wrapper(value):
            return self.inputs.index(self.by_stand_in[adopt(value)])
        _check_view(value, self._made_at)
        return None

    # ---------------------------------------------------------------- afterwards

    def in_gradients(self, returned: Returned, differentiable: Sequence[int]) -> dict[str, Any]:
        passed, results = _passed_wrappers(self, returned, differentiable), _wrapper_results(self, returned)
        return {"passed_wrappers": passed, "wrapper_results": results}

    def check(self) -> None:
        for known in self.by_stand_in.values():
            known.check()

    def check_gradients(self) -> None:
        for known in self.inputs:
            if known.is_other is not None:
                raise known.is_other

    def writes(self) -> list[tuple[WrapperInput, int]]:
        return [(known, known.writes) for known in dict.fromkeys(self.inputs) if known.writes > 0]

    def found(self, tree: Tree) -> FoundOpenings | None:
        if not self.inputs:
            return None
        arguments = zip(tree.wrappers(), self.inputs, strict=False)  # the remaining inputs follow
        of_leaves = {first: (known.spec, known.gradient) for (first, _), known in arguments}
        inputs = self.reached.values()
        reached = [ReachedOpening(i.source, i.spec, i.gradient) for i in inputs if i.source is not None]
        return FoundOpenings(tuple(reached), of_leaves)


def _check_view(result: torch.Tensor, made_at: Callable[[Any], str]) -> None:
    """Raise for a view of a wrapper that autograd treats otherwise than a rebuilt wrapper."""
    base: Any = base_of(result) if is_view(result) else None
    if not is_wrapper(base):
        return
    kind, at = type(base).__qualname__, made_at(result)
    try:
        reaches = not (base.requires_grad and result.requires_grad) or leads_to_base(result)
    except RuntimeError as error:
        raise returned_wrapper(f"a result is a view of a {kind}{at} that eager refuses ({error})") from error
    if not reaches or (base.requires_grad and is_no_grad_view(result)):
        raise returned_wrapper(f"a result is a view of a {kind} that requires grad taken under torch.no_grad(){at}")
    if result.requires_grad and not allows_writes(result):
        raise returned_wrapper(f"a result is one of several views of a {kind}{at}")


def _inner_slot(slot: Slot, path: str) -> Slot:
    """The slot of a plain tensor in a wrapper."""
    if isinstance(slot, (Param, Buffer)):
        return type(slot)(slot.name + path)
    assert isinstance(slot, Closure)
    return Closure(slot.path + path)


# -------------------------------------------------------------------- on the way of gradients
# Gradients that pass through a wrapper on their way inside.


def _passed_wrappers(
    wrappers: OpenInputs, returned: Returned, differentiable: Sequence[int]
) -> tuple[PassedWrapper, ...]:
    """The wrappers that further results were computed from, inside."""
    targets = list(_targets(wrappers, returned))
    if not targets:
        return ()
    carrying = returned.graph.carrying_gradients()
    _, passed = passed_through(
        [carrying[i] for i in differentiable], [(at, tensor) for at, (_, tensor, _) in enumerate(targets)]
    )
    found, places = [], _places(wrappers, returned)
    for at, positions in passed:
        place, tensor, own = targets[at]
        after = tuple(position for position in positions if differentiable[position] not in own)
        others = dict.fromkeys(places.get(differentiable[position]) for position in after)
        others.pop(place, None)
        if after and (place is None or None in others):
            raise returned_wrapper(
                f"results are computed from a {type(tensor).__qualname__} that is given back too, and one of them is "
                "left in an object"
            )
        if after and place is not None:
            found.append(PassedWrapper(place, after, tuple(filter(None, others))))
    return tuple(sorted(found, key=lambda one: -len(one.after)))


def _targets(wrappers: OpenInputs, returned: Returned) -> Iterator[tuple[WrapperPlace | None, Any, frozenset[int]]]:
    """The visible wrappers with a history of the call's: their places, and their own graph outputs."""
    own = _own_outputs(wrappers, returned)
    seen: IdSet[Any] = IdSet()
    for at, leaf in enumerate(wrappers.leaves):
        if is_wrapper(leaf) and leaf not in seen and leaf not in wrappers.by_stand_in:
            seen.add(leaf)
            if leaf.requires_grad and history_of(leaf) is not None:
                yield WrapperPlace("result", at), leaf, own.get(leaf, frozenset())
    for made in wrappers.made:
        if made not in seen and own[made]:
            yield None, made, own[made]


def _wrapper_results(wrappers: OpenInputs, returned: Returned) -> tuple[tuple[WrapperPlace, frozenset[int]], ...]:
    """Wrappers made of graph outputs with gradients: their places, and these outputs."""
    own = _own_outputs(wrappers, returned)
    found: dict[WrapperPlace, frozenset[int]] = {}
    for at, leaf in enumerate(wrappers.leaves):
        if is_wrapper(leaf):
            outputs = own.get(leaf)
            if outputs and outputs not in found.values():
                found[WrapperPlace("result", at)] = outputs
    return tuple(found.items())


def _own_outputs(wrappers: OpenInputs, returned: Returned) -> ById[Any, frozenset[int]]:
    """By wrapper, the graph outputs with gradients that it is made of."""
    outputs = ById((fake, i) for i, fake in returned.graph.carrying_gradients().items())
    made = wrappers.made.items()
    return ById((one, frozenset(outputs[part] for part in parts if part in outputs)) for one, parts in made)


def _places(wrappers: OpenInputs, returned: Returned) -> dict[int, WrapperPlace]:
    """By graph output, the places after the call of values made from it."""
    writes = [entry.effect for entry in returned.log if isinstance(entry.effect, Write) and entry.effect.is_whole]
    places = {write.output: WrapperPlace("input", write.input) for write in writes if write.differentiable}
    outputs = ById((fake, i) for i, fake in returned.graph.carrying_gradients().items())
    own = _own_outputs(wrappers, returned)
    for at, leaf in enumerate(wrappers.leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        made_of = own.get(leaf, outputs.get(leaf))
        for output in made_of if isinstance(made_of, frozenset) else () if made_of is None else (made_of,):
            places.setdefault(output, WrapperPlace("result", at))
    return places
