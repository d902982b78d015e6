"""Calls of a function whose state varies like an argument: read the state, and call what takes it as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..errors import UnsupportedSideEffectError
from ..frontend.call import FlatCall
from ..frontend.lifted import Draw, Lifted, StatePlace, lifted_places, place_of
from ..graph.python_effects import CallMethod
from ..graph.source import Names, compile_source
from ..graph.spelling import attribute, item, literal
from ..tracing.values.draws import DrawsDiffer
from .specialization import Specialization

__all__ = ["check_draws", "counters_of", "only_written_by", "render_stateful"]


def counters_of(function: Any, specializations: Iterable[Specialization]) -> tuple[StatePlace, ...]:
    """The places where a graph leaves another number, or container, than it found, and that are no arguments yet."""
    known = {place.identity for place in lifted_places(function)}
    found: dict[tuple[int, Any], StatePlace] = {}
    for specialization in specializations:
        for write in specialization.product.captured.joint.signature.python_writes:
            place = place_of(write) if write.counts else None
            if place is not None and place.identity not in known:
                found.setdefault(place.identity, place)
    return tuple(found.values())


def only_written_by(specialization: Specialization) -> set[tuple[int, Any]]:
    """The places of containers that a graph adds to, whatever is in them."""
    writes = specialization.product.captured.joint.signature.python_writes
    return {
        (id(write.target), "cell_contents" if write.kind == "cell" else write.key)
        for write in writes
        if isinstance(write, CallMethod) and write.kind != "self"
    }


def check_draws(name: str, call: FlatCall, constants: Collection[str]) -> None:
    """Raise where the program needs to know a float that it draws: no graph would be right twice."""
    places = call.function.places if isinstance(call.function, Lifted) else ()
    for place, value in zip(places, call.leaves, strict=False):
        if isinstance(place, Draw) and place.path in constants and type(value) is float:
            raise UnsupportedSideEffectError(
                f"`{name}` needs to know the number that it takes from {place.path.partition('(')[0]} (a function of "
                "`math`, int(), text). Compute with it as with a tensor, or take it before the call and pass it."
            )


def render_stateful(
    name: str, lifted: Lifted, inner: Callable[..., Any], differently: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A function of (args, kwargs) that calls `inner` with the state ahead of them. `differently` makes the calls that
    draw other numbers, or none.
    """
    names = Names(["args", "kwargs", "inner", "eagerly", "state"])
    globals_: dict[str, Any] = {"inner": inner, "eagerly": lifted.func}

    def bind(wanted: str, value: Any) -> str:
        bound = names.fresh(wanted)
        globals_[bound] = value
        return bound

    reads, remember = [], ""
    for place in lifted.places:
        if isinstance(place, Draw):
            given = [literal(value) or bind("constant", value) for value in place.args]
            given += [f"{key}={literal(value) or bind('constant', value)}" for key, value in place.kwargs]
            reads.append(f"{bind(place.path.rpartition('.')[2], place.function)}({', '.join(given)})")
            continue
        target = bind("holder", place.target)
        if place.kind == "item":
            reads.append(item(target, place.key, bind))
        else:
            reads.append(attribute(target, place.key if place.kind == "attribute" else "cell_contents", bind))
    if lifted.generators.kinds:
        remember = f"    {bind('remember', lifted.generators.remember)}()\n"
    source = (
        "def call(args, kwargs):\n"
        f"{remember}"
        "    try:\n"
        f"        state = ({', '.join(reads)},)\n"
        "    except (KeyError, AttributeError, ValueError):\n"
        "        return eagerly(*args, **kwargs)\n"
    )
    if any(isinstance(place, Draw) for place in lifted.places):
        put_back = (
            f"        {bind('put_back', lifted.generators.put_back)}()\n"
            if lifted.generators.kinds
            else "        pass\n"
        )
        source += (
            "    try:\n"
            "        return inner(state, *args, **kwargs)\n"
            f"    except {bind('DrawsDiffer', DrawsDiffer)}:\n"
            f"        {put_back}\n"
            f"    return {bind('differently', differently)}(args, kwargs)\n"
        )
    else:
        source += "    return inner(state, *args, **kwargs)\n"
    return compile_source(source, "call", globals_, label=f"state of {name}")
