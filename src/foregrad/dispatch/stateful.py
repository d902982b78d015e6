"""Calls of a function whose state is an argument: read the state, draw, and call the form that takes both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ..frontend.lifted import Converted, Draw, Lifted, StatePlace, lifted_arrays, lifted_places, place_of
from ..frontend.opaque import is_array as is_numpy_array
from ..frontend.program_state import ProgramState
from ..graph.python_effects import CallMethod
from ..graph.source import Names, attribute, compile_source, item, literal
from ..runtime.lines import LineWriter
from ..tracing.values.draws import DrawsDiffer
from .graphs import Specialization
from .guard_list import MISS


def state_that_varies(
    function: Any, name: str, specializations: Sequence[Specialization], fixed: Collection[tuple[int, Any]] = ()
) -> tuple[StatePlace, ...]:
    """The places in Python's state that vary and are no arguments yet: their number, array or container differs from
    the capture's, or the graphs so far change it. Examples are counters, and values that are set from outside between
    calls: an annealed temperature, the weight of a loss, the state of an environment. `fixed`: places that can't be
    arguments.
    """
    places: dict[tuple[int, Any], StatePlace] = {}
    for specialization in specializations:
        for write in specialization.signature.python_writes:
            place = place_of(write) if write.counts else None
            if place is not None:
                places.setdefault(place.identity, place)
    set_outside = {place.identity: place for s in specializations for place in _values_that_differ(s)}
    if set_outside:
        held = {id(holder.target) for holder in ProgramState([(function, name)]).holders}  # a capture restores these
        places = {key: place for key, place in set_outside.items() if id(place.target) in held} | places
    excluded = {*fixed, *(place.identity for place in lifted_places(function))}
    return tuple(place for identity, place in places.items() if identity not in excluded)


def _values_that_differ(specialization: Specialization) -> Iterator[StatePlace]:
    sites = specialization.watch.places
    changed = {id(site.holder) for site in sites if is_numpy_array(site.holder) and site.difference() is not None}
    for site in sites:
        varying = [(key, False) for key in site.other_numbers()] + [(key, True) for key in site.other_arrays(changed)]
        for key, is_array in varying:
            yield StatePlace.of_site(site, key, is_array=is_array)


def only_written_by(specialization: Specialization) -> set[tuple[int, Any]]:
    """The places of containers that a graph adds to without reading them."""
    writes = specialization.signature.python_writes
    return {(id(write.target), write.key) for write in writes if isinstance(write, CallMethod) and write.kind != "self"}


def render_stateful(
    name: str, lifted: Lifted, inner: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A function of (args, kwargs) that calls `inner` with the state ahead of them. The result is `MISS` for calls
    whose draws differ, or that need the numbers in an array.
    """
    names = Names(["args", "kwargs", "inner", "eagerly", "state", "MISS"])
    reads, remember, draws = [], "", DrawLines(names)
    draws.globals |= {"inner": inner, "eagerly": lifted.func, "MISS": MISS}
    bind = draws.bind
    for place in lifted.places:
        if isinstance(place, (Draw, Converted)):
            reads.append(draws.place(place))
            continue
        target = bind("holder", place.target)
        if place.kind == "item":
            base = dict if isinstance(place.target, dict) else list
            is_base = type(place.target) is base  # a class of the program's may give another item
            get = "" if is_base else f"{bind('get', base.__getitem__)}({target}, {bind('key', place.key)})"
            reads.append(get or item(target, place.key, bind))
        else:
            reads.append(attribute(target, place.key, bind))
    if lifted.generators.kinds:
        remember = f"    {bind('remember', lifted.generators.remember)}()\n"
    if draws.arrays:
        draws.lines.append(f"{bind('remember_arrays', lifted.generators.remember_arrays)}({', '.join(draws.arrays)})")
    drawn = "".join(f"        {line}\n" for line in draws.lines)
    put_back = f"{bind('put_back', lifted.generators.put_back)}()" if lifted.generators.kinds else "pass"
    source = (
        "def call(args, kwargs):\n"
        f"{remember}"
        "    try:\n"
        f"{drawn}"
        f"        state = ({', '.join(reads)},)\n"
        "    except (LookupError, AttributeError, ValueError, TypeError, ArithmeticError):\n"
        f"        {put_back}\n"
        "        return eagerly(*args, **kwargs)\n"
    )
    if lifted_arrays(lifted) or any(isinstance(place, (Draw, Converted)) for place in lifted.places):
        source += (
            "    try:\n"
            "        return inner(state, *args, **kwargs)\n"
            f"    except {bind('DrawsDiffer', DrawsDiffer)}:\n"
            f"        {put_back}\n"
            "    return MISS\n"
        )
    else:
        source += "    return inner(state, *args, **kwargs)\n"
    return compile_source(source, "call", draws.globals, label=f"state of {name}")


class DrawLines(LineWriter):
    """`lines` that draw, in order; `arrays` are the variables of drawn arrays."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self.arrays: list[str] = []
        self._values: list[str] = []  # variables, by the number of the draw

    def place(self, place: Draw | Converted) -> str:
        """Add the lines of one place; the expression for it among the state."""
        if isinstance(place, Converted):
            return f"{self.bind('from_numpy', torch.from_numpy)}({self._values[place.number]})"
        name = f"drawn_{len(self._values)}"
        self._values.append(name)
        function = self.bind(place.path.partition("(")[0].rpartition(".")[2], place.function)
        arguments = [*map(self._spelled, place.args), *(f"{key}={self._spelled(value)}" for key, value in place.kwargs)]
        self.lines.append(f"{name} = {function}({', '.join(arguments)})")
        if place.is_array:
            self.arrays.append(name)
        return "None" if place.is_array else name

    def _spelled(self, value: Any) -> str:
        return literal(value) or self.bind("constant", value)
