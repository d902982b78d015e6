"""Wrapper subclasses in a capture: what stands for them, made over the stand-ins of their plain tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch.histories import views_taken_at_once
from ..._torch.symbols import is_symbolic
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
)
from ...errors import UnsupportedAliasError
from ...frontend.reads import FoundWrappers, ReachedWrapper, Source
from ...frontend.tree import SharedWrapper, Tree, Unwrap, flatten
from ...graph.signature import PartOf
from ...graph.slots import Buffer, Closure, Param, Slot
from ...identity import ById, IdSet
from ...subclasses.conversion import Samples, predicted_spec, unwrap
from ...subclasses.spec import WrapperSpec, is_of_capture, is_wrapper, parts_of, rebuilt, spec_of
from ..heap.refusals import returned_wrapper
from ..recorder.recorder import Recorder
from .wrapper_inputs import WrapperInput


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
