"""What a function did besides computing, that a compiled call would not repeat: found after its run, and refused."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from ..._torch.function_classes import FunctionClasses
from ..._torch.generators import MadeGenerators
from ..._torch.jagged import is_ragged
from ..._torch.tensors import gradient_of, is_usable
from ...errors import UnsupportedSideEffectError, UnsupportedTensorError
from ...frontend.call import FlatCall, are_apart, arrays_in, tensor_over
from ...frontend.function_classes import check_classes
from ...frontend.tree import Unwrap, flatten
from ...identity import IdSet
from ...subclasses.spec import is_of_capture
from ..heap.records import InputRecord
from .attribute_guards import Facts


def check_run(
    name: str,
    call: FlatCall,
    arguments: tuple[Any, Any],
    leaves: list[Any],
    unwrap: Unwrap,
) -> None:
    """A run left the containers among its arguments as they were, where no write to them is an effect of the call."""
    if call.objects:
        return
    after, tree = flatten(arguments, unwrap)
    if tree != call.tree or any(a is not b for a, b in zip(after, leaves, strict=True)):
        refuse_change(name, "a container among its arguments")


def refuse_change(name: str, what: str) -> NoReturn:
    """Refuse a write to an argument that no call would repeat."""
    raise UnsupportedSideEffectError(
        f"`{name}` changed {what} (added, removed or replaced an item), which a compiled call would not repeat. Return "
        "the new values instead."
    )


def used_up_error(name: str, what: str) -> UnsupportedSideEffectError:
    """The error for a function that takes from an iterator or a random generator."""
    return UnsupportedSideEffectError(
        f"`{name}` takes from {what}, which gives something else each time; a compiled call would not. "
        "Take from it before the call and pass what it gave (for random numbers, torch's own functions work)."
    )


def check_tensors(name: str, records: list[InputRecord], facts: Facts, accumulated_at: str) -> None:
    """Nothing was hung onto a tensor among the inputs, its gradient included."""
    attribute = facts.attribute_set()
    if attribute is not None:
        raise attribute_set_error(name, attribute)
    check_gradients(name, records, accumulated_at)
    for wrapper in facts.inputs.wrappers.inputs:
        if wrapper.is_given_gradient():
            raise _written_gradient(name, wrapper.slot, accumulated_at)


def attribute_set_error(name: str, attribute: str) -> UnsupportedSideEffectError:
    """The error for a function that sets or deletes an attribute of a tensor."""
    return UnsupportedSideEffectError(
        f"`{name}` sets {attribute}, an attribute of a tensor, which a compiled call would not repeat. Return the "
        "value instead."
    )


def check_gradients(name: str, records: list[InputRecord], where: str) -> None:
    """`.grad` of no input was written to. `where`: the line that last did so to some tensor, if one did."""
    for record in records:
        for stand_in in (record.stand_in, record.leaf):
            if stand_in is not None and is_usable(stand_in) and stand_in.is_leaf and stand_in.grad is not None:
                stand_in.grad = None
                raise _written_gradient(name, record.slot, where, goes_on=not record.real.is_leaf)


def _written_gradient(name: str, slot: Any, where: str, *, goes_on: bool = False) -> UnsupportedSideEffectError:
    if goes_on:
        return UnsupportedSideEffectError(
            f"`backward()` in `{name}`{' at ' + where if where else ''} goes on into what {slot} was computed from, "
            f"before the call; a compiled call can't. Call it outside, or use `.detach()` of {slot}."
        )
    return UnsupportedSideEffectError(
        f"`{name}` writes to `.grad` of {slot}{' at ' + where if where else ''}, which a compiled call can't repeat; "
        "use torch.autograd.grad, or do it outside."
    )


def check_generators(name: str, made: MadeGenerators) -> None:
    """It is known of each random generator whether the function makes it."""
    if made.unknown():
        raise UnsupportedSideEffectError(
            f"`{name}` draws from a new random generator, of which it can't be told whether the function makes it: "
            "make it as `torch.Generator(...)`, or outside and draw from it before the first call."
        )


def check_arrays(name: str, call: FlatCall, records: list[InputRecord], met: Iterable[Any]) -> None:
    """No tensor that was written to is over the memory of an array that the function reaches by itself: what is
    read there is read before the graph runs.
    """
    written = [r for r in records if not r.real.is_inference() and r.stand_in._version != r.start_version]
    arrays = [over for value in met if (over := tensor_over(value)) is not None] if written else []
    own = IdSet(call.leaves[leaf] for leaf, _, _ in arrays_in(call.tree))
    for record in written:
        if record.real not in own and not all(are_apart([array], [record.real]) for array in arrays):
            raise UnsupportedSideEffectError(
                f"`{name}` writes to {record.slot}, over whose memory lies a NumPy array that it also reaches: what "
                "it reads there would be what was there before the call. Use the tensor alone, or a copy."
            )


def check_results(
    name: str,
    results: Sequence[Any],
    paths: Sequence[str],
    known: Container[Any],
    generators: Container[Any],
    classes: FunctionClasses,
) -> None:
    """No result but an input (one among those `known`) has a `.grad`, is a generator that the function made, or a
    number that has no value; none is a tensor that only its class knows how to handle (`classes`).
    """
    check_classes(name, results, paths, classes)
    for result, path in zip(results, paths, strict=True):
        if is_ragged(result):
            raise UnsupportedTensorError(
                f"`{name}` returns the size of a ragged dimension, {path}, which belongs to its offsets and has no "
                "value. Return the tensor."
            )
        if isinstance(result, torch.nn.Module) and any(map(is_of_capture, _tensors_of(result))):
            raise UnsupportedSideEffectError(
                f"`{name}` returns a module that it makes, {path}: that of each call would be the same, with no values "
                "in it. Make it outside."
            )
        if result in generators:
            raise UnsupportedSideEffectError(
                f"`{name}` returns a random generator that it makes, {path}: that of each call would be the same. Make "
                "it outside."
            )
        if is_of_capture(result) and result not in known and gradient_of(result) is not None:
            raise UnsupportedSideEffectError(
                f"`{name}` sets `.grad` of {path}, which it returns; a compiled call would not. Set it outside."
            )


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        own = object.__getattribute__(part, "__dict__")
        for table in (own.get("_parameters", {}), own.get("_buffers", {}), own):
            yield from (value for value in table.values() if isinstance(value, torch.Tensor))
