"""Calls of a function with its state as an argument: read the state, draw, and call the form that takes both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ..dispatch.graphs import Specialization
from ..dispatch.guard_list import MISS
from ..frontend.arrays import is_array as is_numpy_array
from ..frontend.source import Source
from ..graph.meta import TensorSpec
from ..graph.source import Bind, Names, attribute, compile_source, item, literal
from ..runtime.lines import LineWriter
from ..tracing.tape.again import ArgumentsDiffer
from .effects import CallMethod, StatePlace
from .journals import KINDS
from .lifted import Answer, Draw, Formula, Lifted, lifted_places, window_of
from .program_state import ProgramState


def state_that_varies(
    function: Any, name: str, specializations: Sequence[Specialization], fixed: Collection[tuple[int, Any]] = ()
) -> tuple[StatePlace, ...]:
    """The places in Python's state that vary and are no arguments yet: their number, array or container differs from
    the capture's, or the graphs so far change it. Examples are counters, and values that are set from outside between
    calls: an annealed temperature, the weight of a loss, an environment's state. `fixed`: places that are no arguments.
    """
    places: dict[tuple[int, Any], StatePlace] = {}
    for specialization in specializations:
        for write in specialization.signature.effects.python_writes:
            place = write.place if write.counts else None
            if place is not None:
                places.setdefault(place.identity, place)
    set_outside = {place.identity: place for s in specializations for place in _values_that_differ(s)}
    set_outside |= {place.identity: place for s in specializations for place in _tensors_of_other_sizes(s)}
    if set_outside:
        held = {id(h.place): h.target for h in ProgramState([(function, name)]).holders}  # a capture restores these
        places = {key: place.on(held[key[0]]) for key, place in set_outside.items() if key[0] in held} | places
    excluded = {*fixed, *(place.identity for place in lifted_places(function))}
    return tuple(place for identity, place in places.items() if identity not in excluded)


def _values_that_differ(specialization: Specialization) -> Iterator[StatePlace]:
    sites = specialization.watch.places
    changed = {id(site.holder) for site in sites if is_numpy_array(site.holder) and site.difference() is not None}
    for site in sites:
        varying = [(key, False) for key in site.other_numbers()] + [(key, True) for key in site.other_arrays(changed)]
        for key, is_array in varying:
            yield StatePlace.of_site(site, key, is_array=is_array)


def _tensors_of_other_sizes(specialization: Specialization) -> Iterator[StatePlace]:
    """The places of tensors that have grown since the capture: keys and values, a replay buffer."""
    for info in specialization.signature.inputs:
        source, spec = info.source, info.spec
        if not isinstance(source, Source) or not source.steps or not isinstance(spec, TensorSpec):
            continue
        *way, (kind, key) = source.steps
        holder = Source(source.slot, source.root, tuple(way)).now()
        now = source.now()
        if type(now) is not torch.Tensor or now.dtype is not spec.dtype or now.dim() != len(spec.shape):
            continue
        own = getattr(holder, "__dict__", None) if kind == "attr" and not isinstance(holder, type) else None
        if own is not None and (table := next((t for t in (own, own.get("_buffers", {})) if key in t), None)):
            kind, holder = "item", table
        dims = frozenset(d for d, size in enumerate(now.shape) if size != spec.shape[d])
        if dims and (kind == "attr" or type(holder) in (dict, list)):
            yield StatePlace("attribute" if kind == "attr" else "item", holder, key, str(info.slot), dims=dims)


def only_written_by(specialization: Specialization) -> set[tuple[int, Any]]:
    """The places of containers that a graph adds to without reading them, and of containers that have grown since its
    capture: perhaps code writes to them that did not run then.
    """
    writes, sites = specialization.signature.effects.python_writes, specialization.watch.places
    grown = [site.holder for site in sites if type(site.holder) in KINDS and site.has_grown()]
    found = {(id(site.holder), key) for site in sites for container in grown for key in site.keys_of(container)}
    return found | {(id(w.target), w.key) for w in writes if isinstance(w, CallMethod) and w.kind != "self"}


def render_stateful(name: str, lifted: Lifted) -> Callable[..., Any]:
    """A function of (args, kwargs, inner) that calls `inner` with the state ahead of its arguments. The result is
    `MISS` for calls with different draws, or that need the numbers in an array.
    """
    names = Names(["args", "kwargs", "inner", "eagerly", "state", "MISS"])
    reads, draws = [], LineWriter(names)
    draws.globals |= {"eagerly": lifted.func, "MISS": MISS}
    bind, numbers = draws.bind, list[str]()
    for place in lifted.places:
        if isinstance(place, Draw):
            numbers.append(_drawn(place, draws, numbers))
            reads.append(numbers[-1])
        elif isinstance(place, Answer):
            is_place = isinstance(place.container, StatePlace)
            container = _read(place.container, bind) if is_place else bind("container", place.container)
            reads.append(f"{bind('length', len)}({container})")
            tests = []
            if (index := place.index) is not None:
                tests.append(f"{reads[-1]} > {index if index >= 0 else -index - 1}")
                reads[-1] = f"{container}[{index}]"
            if place.window is not None:
                tests.append(f"{bind('window_of', window_of)}({container}) == {place.window}")
            reads[-1] += f" if {' and '.join(tests)} else None" if tests else ""
        else:
            reads.append(_read(place, bind))
    remember = f"    {bind('remember', lifted.generators.remember)}()\n" if lifted.generators.kinds else ""
    drawn = "".join(f"        {line}\n" for line in draws.lines)
    put_back = f"{bind('put_back', lifted.generators.put_back)}()" if lifted.generators.kinds else "pass"
    source = (
        "def call(args, kwargs, inner):\n"
        f"{remember}"
        "    try:\n"
        f"{drawn}"
        f"        state = ({', '.join(reads)},)\n"
        "    except (LookupError, AttributeError, ValueError, TypeError, ArithmeticError):\n"
        f"        {put_back}\n"
        f"        return {'MISS' if numbers else 'eagerly(*args, **kwargs)'}\n"
    )
    if lifted.arrays or numbers:
        source += (
            "    try:\n"
            "        return inner(state, *args, **kwargs)\n"
            f"    except {bind('ArgumentsDiffer', ArgumentsDiffer)}:\n"
            f"        {put_back}\n"
            "    return MISS\n"
        )
    else:
        source += "    return inner(state, *args, **kwargs)\n"
    return compile_source(source, "call", draws.globals, label=f"state of {name}")


def _read(place: StatePlace, bind: Bind) -> str:
    """The expression for a place's value."""
    target = bind("holder", place.target)
    if place.kind != "item":
        return attribute(target, place.key, bind)
    base = dict if isinstance(place.target, dict) else list
    is_base = type(place.target) is base  # a class of the program's may give a different item
    get = "" if is_base else f"{bind('get', base.__getitem__)}({target}, {bind('key', place.key)})"
    return get or item(target, place.key, bind)


def _drawn(draw: Draw, lines: LineWriter, earlier: Sequence[str]) -> str:
    """Add the line that draws; returns the variable of the number."""

    def spelled(value: Any) -> str:
        if type(value) is Formula:
            return f"{lines.bind('compute', value.compute)}(({', '.join(earlier)},))"
        return literal(value) or lines.bind("constant", value)

    name = lines.names.fresh("drawn")
    function = lines.bind(draw.path.partition("(")[0].rpartition(".")[2], draw.function)
    arguments = [*map(spelled, draw.args), *(f"{key}={spelled(value)}" for key, value in draw.kwargs)]
    lines.lines.append(f"{name} = {function}({', '.join(arguments)})")
    return name
