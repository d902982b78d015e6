"""Wrapper subclasses in a capture: what stands for them, made over the stand-ins of their plain tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..._torch.engine import keeps_versions
from ..._torch.histories import views_taken_at_once
from ..._torch.symbols import has_symbolic, is_symbolic, same_numbers
from ..._torch.tensors import (
    allows_writes,
    base_of,
    history_of,
    is_marked,
    is_no_grad_view,
    is_usable,
    is_view,
    leads_to_base,
    numbers_of_view,
    share_counters,
    storage_key,
    version_of,
)
from ...errors import UnsupportedAliasError, UnsupportedTensorError
from ...frontend.expected import ABSENT
from ...frontend.reads import FoundWrappers, ReachedWrapper, Source
from ...frontend.tree import SharedWrapper, Tree, Unwrap, flatten
from ...graph.effect_log import Detach, Effect
from ...graph.signature import PartOf
from ...graph.slots import Buffer, Closure, Param, Slot
from ...identity import ById, IdSet
from ...subclasses.conversion import (
    Samples,
    give_history,
    has_plain_gradient,
    learn_carriers,
    learn_gradient,
    predicted_spec,
    taken_apart,
    unwrap,
    wrap,
)
from ...subclasses.spec import (
    Carrier,
    GradientKindError,
    WrapperSpec,
    bare_spec,
    is_of_capture,
    is_wrapper,
    parts_of,
    rebuilt,
    spec_of,
)
from ..heap.refusals import changed_wrapper, returned_wrapper
from ..recorder.recorder import Recorder
from ..values.sizes import with_sizes_of
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


class Wrappers:
    """The wrappers of one capture. `samples` are the plain tensors of those that the function reaches by itself, which
    are the same ones in each run. `plain`: the plain tensors among the inputs, by their stand-ins.
    """

    def __init__(self, samples: Samples, recorder: Recorder, plain: ById[torch.Tensor, Any]) -> None:
        self.samples, self.recorder, self.plain = samples, recorder, plain
        self.inputs: list[WrapperInput] = []  # arguments, one that comes twice twice, then those reached by itself
        self.by_stand_in: ById[Any, WrapperInput] = ById()
        self.by_parts: dict[tuple[int, ...], WrapperInput] = {}
        self.results: ById[Any, list[Any]] = ById()  # those of the same base, by that
        self.roots: list[Any] = []  # of each wrapper among the results: itself, or what it is a view of
        self.shared: ById[Any, int] = ById()  # what several results need: its key
        self.reached: ById[Any, WrapperInput] = ById()  # by the real wrapper
        self.remade: ById[Any, Any] = ById()  # by one that the function made of real tensors
        self.marked: IdSet[Any] = IdSet()  # others that `requires_grad_()` is called on
        self.leaves: list[Any] = []  # of the result: each wrapper is one
        self.made: ById[Any, Sequence[Any]] = ById()  # by what is made of results of the graph: these
        self.taken_apart: list[tuple[Any, Sequence[Any]]] = []  # what gradients come in for, and its plain tensors

    # ---------------------------------------------------------------- inputs

    def of_argument(self, array_of: Callable[[Any], Any], spec: WrapperSpec | None, parts: Sequence[Any]) -> Any:
        """The stand-in of an argument, over the stand-ins of its plain tensors; `array_of` makes those of arrays."""
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
        """The stand-in of a wrapper that is no argument. `source_of` says where the function reaches one by itself, and
        `adopt_part(tensor, source)` makes an input of a plain tensor in it. One that is nowhere the function has made,
        of plain tensors that `adopt(tensor)` gives the stand-ins of.
        """
        if real in self.by_stand_in:
            return real
        known = self.reached.get(real)
        if known is None:
            if is_of_capture(real):
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
                adopt_part(sample, PartOf(number, i, _inner_slot(source.slot, path)))
                for i, (sample, path) in enumerate(zip(samples, spec.paths(), strict=True))
            ]
            known = self.reached[real] = WrapperInput(spec, parts, real, str(source.slot), source)
            self._add(known)
        return known.stand_in

    def _add(self, known: WrapperInput) -> None:
        self.inputs.append(known)
        self.by_stand_in[known.stand_in] = known
        if known.spec.is_leaf and known.spec.requires_grad:
            self.recorder.wrapper_leaves.add(known.stand_in)

    def find(self, tensor: Any) -> WrapperInput | None:
        """The input that a wrapper is, or stands for."""
        return self.by_stand_in.get(tensor) or self.reached.get(tensor)

    def requires_grad(self, tensor: Any, value: bool, where: str) -> bool:
        """`requires_grad_(value)` is called on a wrapper: whether that is done with."""
        known = self.find(tensor)
        if known is None:
            self.marked.add(tensor)
        if known is None or not known.requires_grad(value, lambda part: _leaf_of(self.plain[part]), where):
            return False
        if known.stand_in.requires_grad:
            self.recorder.wrapper_leaves.add(known.stand_in)
        else:
            self.recorder.wrapper_leaves.discard(known.stand_in)
        return True

    def detach(self, tensor: Any, run: Callable[[], Any]) -> None:
        """`detach_()` is called on a wrapper, which `run` does."""
        known = self.find(tensor)
        if known is None:
            run()
            return
        known.detach(run)
        self.recorder.wrapper_leaves.discard(known.stand_in)

    # ---------------------------------------------------------------- results

    def unwrap(self, stand_in: Any) -> tuple[WrapperSpec, Sequence[Any]] | None:
        """The plain stand-ins of an argument; None for another wrapper."""
        known = self.by_stand_in.get(stand_in)
        return None if known is None else (known.spec, known.parts)

    def of_results(self, results: Any, adopt: Callable[[Any], Any]) -> Unwrap:
        """What takes apart the wrappers in what the function returns."""
        self.leaves = [adopt(x) if is_wrapper(x) else x for x in flatten(results, lambda _: None)[0]]
        self.roots = [base_of(leaf) if is_view(leaf) else leaf for leaf in self.leaves if is_wrapper(leaf)]
        return lambda result: self._taken_apart(adopt(result))

    def _taken_apart(self, result: Any) -> tuple[WrapperSpec, Sequence[Any]] | SharedWrapper | None:
        """The plain tensors of a wrapper that the function returns; None for one of the inputs, returned as it is."""
        base: Any = base_of(result) if is_view(result) else None
        if base is not None and result in self.marked:
            raise returned_wrapper(
                f"a result is a view of a {type(base).__qualname__} that `requires_grad_()` is called on inside"
            )
        if base is not None and not is_wrapper(base):
            return self._of_plain(result, base)
        is_of_input = base in self.by_stand_in and result.requires_grad is base.requires_grad
        of = self.by_stand_in.get(base)
        if of is not None and of.has_changed_since(is_of_input=is_of_input):
            kind = of.spec.cls.__qualname__
            raise returned_wrapper(f"a result is a view of a {kind} that is detached, or marked, after it is taken")
        if not _is_taken_without_gradients(result):
            if base is not None and is_marked(result):
                raise _no_grad_view(base)
            _check_view(result)
        if result in self.by_stand_in or is_of_input or _detached_from(result, self.inputs) is not None:
            return None
        root = result if base is None else base
        if root.requires_grad is result.requires_grad and root not in self.by_stand_in:
            varies = base is not None and self.recorder.is_symbolic and any(map(is_symbolic, numbers_of_view(result)))
            if not varies and (
                sum(one is root for one in self.roots) > 1 or (base is not None and result.requires_grad)
            ):
                return self._shared(result, root)
        self._check_apart(result, root)
        return self._in_graph(result)

    def _of_plain(self, result: Any, base: torch.Tensor) -> tuple[WrapperSpec, Sequence[Any]]:
        """A wrapper that is a view of a plain tensor, as PyTorch makes jagged tensors of values and offsets."""
        if base.requires_grad and (base in self.plain or any(leaf is base for leaf in self.leaves)):
            kind = type(result).__qualname__
            raise returned_wrapper(f"a result is a {kind} made as a view of a plain tensor that is given, or returned")
        self._check_apart(result, base)
        return self._in_graph(result)

    def _in_graph(self, result: Any) -> tuple[WrapperSpec, Sequence[Any]]:
        inside = parts_of(result)
        if result.is_leaf and (result.requires_grad or any(part.requires_grad for part in inside)):
            # To autograd they have nothing to do with it: its own gradient ends there.
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

    def _shared(self, result: Any, root: Any) -> SharedWrapper:
        """A view of a wrapper, or one of several results that are one: the wrapper is made once, then its views."""
        if root in self.results:
            raise returned_wrapper(f"two results are one {type(result).__qualname__}, or views of one")
        is_first = root not in self.shared
        known = self.shared.setdefault(root, -1 - len(self.shared))
        if result is root:
            return SharedWrapper(known, known, None, self._in_graph(root) if is_first else None)
        key = self.shared.setdefault(result, -1 - len(self.shared))
        with_gradients = not _is_taken_without_gradients(result)
        at_once = views_taken_at_once(result) if with_gradients else None
        return SharedWrapper(known, key, result, self._in_graph(root) if is_first else None, with_gradients, at_once)

    def _check_apart(self, result: Any, base: Any) -> None:
        """Raise for a result that is there already, or a view of what another one is, or is a view of, with gradients:
        one that is written later has to change the other's history.
        """
        known = self.results.setdefault(base, [])
        is_shared = base in self.shared
        if any(other is result for other in known) or ((known or is_shared) and result.requires_grad):
            raise returned_wrapper(f"two results are one {type(result).__qualname__}, or views of one")
        known.append(result)

    def returned(self, value: Any, adopt: Callable[[Any], Any]) -> tuple[Any, ...] | None:
        """Which input a result is; or which it is a view of, the view of its stand-in, the numbers it is taken with
        where some are symbolic, whether gradients are on then, and whether it is that input, detached.
        """
        if not self.inputs:
            return None
        if not is_wrapper(value):
            _check_view(value)
            if value.requires_grad and not allows_writes(value) and is_wrapper(base_of(value)):
                kind = type(base_of(value)).__qualname__
                raise returned_wrapper(f"a result is a plain tensor that is one of several views of a {kind}")
            return None
        value = adopt(value)
        known = self.by_stand_in.get(value)
        if known is not None:
            return (self.inputs.index(known),)
        known = _detached_from(value, self.inputs)
        if known is not None:
            return self.inputs.index(known), value, None, False, True
        numbers = tuple(numbers_of_view(value)) if self.recorder.is_symbolic else ()
        of = self.inputs.index(self.by_stand_in[base_of(value)])
        return of, value, numbers if any(map(is_symbolic, numbers)) else None, not _is_taken_without_gradients(value)

    # ---------------------------------------------------------------- afterwards

    def check(self) -> None:
        """Raise where the function did to a wrapper among the inputs what no compiled call would do."""
        for known in self.by_stand_in.values():
            known.check()

    def check_gradients(self) -> None:
        """Raise where the capture is to begin again, knowing what gradients are like."""
        for known in self.inputs:
            if known.is_other is not None:
                raise known.is_other

    def writes(self) -> tuple[tuple[int, int], ...]:
        """For the inputs that were written to, how often."""
        inputs = dict.fromkeys(self.inputs)
        # Giving it another history counts once.
        times = [(self.inputs.index(known), known.writes - known.is_rewritten) for known in inputs]
        return tuple((number, count) for number, count in times if count > 0)

    def rewritten(self) -> list[tuple[int, WrapperInput]]:
        """The inputs that were written to with gradients."""
        inputs = dict.fromkeys(self.inputs)
        return [(self.inputs.index(known), known) for known in inputs if known.is_rewritten]

    def found(self, tree: Tree) -> FoundWrappers | None:
        """All of them; None where there is none. `tree` is that of the arguments."""
        if not self.inputs:
            return None
        arguments = zip(tree.wrappers(), self.inputs, strict=False)  # after these come the others
        of_leaves = {first: (known.spec, known.gradient) for (first, _), known in arguments}
        inputs = self.reached.values()
        reached = [ReachedWrapper(i.source, i.spec, i.gradient) for i in inputs if i.source is not None]
        return FoundWrappers(tuple(reached), of_leaves)


def _leaf_of(record: Any) -> Any:
    """The leaf at which the gradient of an input is taken."""
    if not (record.leaf.requires_grad and record.leaf.is_leaf):
        record.leaf = record.stand_in.detach().requires_grad_()
    return record.leaf


def _detached_from(result: Any, inputs: Sequence[WrapperInput]) -> WrapperInput | None:
    """The input that a result is, detached: the two count their writes together."""
    if result.requires_grad or is_view(result) or result.is_inference():
        return None
    return next((known for known in inputs if known.is_alike(result)), None)


def _is_taken_without_gradients(result: Any) -> bool:
    """Whether it is a view, taken under no_grad, of a wrapper that requires grad and was not written to since."""
    if not is_view(result) or not (is_wrapper(base_of(result)) and result.requires_grad and is_no_grad_view(result)):
        return False
    return is_usable(result) and history_of(result) is None


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


def _inner_slot(slot: Slot, path: str) -> Slot:
    """The slot of a plain tensor in a wrapper."""
    if isinstance(slot, (Param, Buffer)):
        return type(slot)(slot.name + path)
    assert isinstance(slot, Closure)
    return Closure(slot.path + path)
