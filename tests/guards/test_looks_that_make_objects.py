"""Places where each look gives another object though nothing has changed: methods, sets, what a thread has of its own.

They are no change of the function's: no warning, no graph too many. What does change there is noticed.
"""

import dataclasses
import threading
import weakref

import pytest
import torch

import foregrad


class Sink:
    def __init__(self, gain=2.0):
        self.gain = gain

    def scaled(self, x):
        return x * self.gain


class Slotted:
    __slots__ = ("call", "gain")

    def __init__(self, call):
        self.call, self.gain = call, 2.0


class OwnState(threading.local):
    depth = 1.0

    def __init__(self):
        self.items = [1.0]

    def total(self):
        return self.depth + sum(self.items)


class Handler:
    """As a library that logs has them: a lock, what a thread holds, those that are alive."""

    def __init__(self):
        self.lock, self.own, self.alive, self.sinks = threading.Lock(), threading.local(), weakref.WeakSet(), set()
        self.sink = Sink()
        self.own.acquired = False  # as the names of all options may be asked for, a name that appears is a change
        self.sinks.add(self.sink)
        self.alive.add(self.sink)
        self.write = self.sink.scaled

    def emit(self, x):
        with self.lock:
            self.own.acquired = True
            try:
                return sum((sink.scaled(x) for sink in list(self.alive) + list(self.sinks)), self.write(x))
            finally:
                self.own.acquired = False

    def options(self):
        return {name: getattr(self, name) for name in ("lock", "own")}


@dataclasses.dataclass
class Options:
    call: object
    own: object


def made_up(value, names=("scaled", "gain", "depth", "total", "items")):
    methods = value.__init__, value.__eq__, value.__format__, value.__setattr__
    return sum(method is not None for method in methods) + sum(getattr(value, name, None) is not None for name in names)


def handler():
    held = Handler()
    return (lambda x: held.emit(x) + len(held.options()) + made_up(held)), held


def local():
    own = threading.local()
    own.gain = 3.0
    return (lambda x: x * own.gain + made_up(own)), own


def local_of_a_class():
    own = OwnState()
    return (lambda x: x * own.total() + made_up(own)), own


def local_untouched():
    own = threading.local()
    return (lambda x: x * getattr(own, "gain", 2.0) + made_up(own)), own


def method_in_a_slot():
    held = Slotted(Sink().scaled)
    return (lambda x: held.call(x) + held.gain), held


def method_of_a_container():
    items = [1.0, 2.0]
    held = Slotted(items.count)
    return (lambda x: x * held.call(1.0) + held.gain), held


def method_wrapper():
    held = Slotted((2.0).__mul__)
    return (lambda x: x * held.call(3.0) + held.gain), held


def method_in_a_dataclass():
    held = Options(Sink().scaled, threading.local())
    return (lambda x: held.call(x) + made_up(held.own) + len(dataclasses.fields(held))), held


def methods_in_a_list():
    held = [Sink().scaled, Sink(3.0).scaled]
    return (lambda x: sum(call(x) for call in held)), held


def set_of_objects():
    held = {Sink(), Sink(3.0)}
    return (lambda x: sum(sink.scaled(x) for sink in held)), held


def set_of_methods():
    held = {Sink().scaled}
    return (lambda x: sum(call(x) for call in held)), held


def set_of_functions():
    held = {torch.sin, torch.cos}
    return (lambda x: sum(call(x) for call in sorted(held, key=str))), held


def weak_set():
    sink = Sink()
    held = weakref.WeakSet([sink])
    return (lambda x: sum(item.scaled(x) for item in held) + sink.gain), held


PROGRAMS = [
    handler,
    local,
    local_of_a_class,
    local_untouched,
    method_in_a_slot,
    method_of_a_container,
    method_wrapper,
    method_in_a_dataclass,
    methods_in_a_list,
    set_of_objects,
    set_of_methods,
    set_of_functions,
    weak_set,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_one_graph_and_no_warning(program):
    function, _held = program()
    compiled = foregrad.compile(function, backend="eager")
    x = torch.randn(3)
    for _ in range(4):
        assert torch.equal(compiled(x), function(x))
    assert len(compiled.foregrad.specializations) == 1


def _in_a_slot(held):
    held.call = Sink(7.0).scaled


def _in_a_list(held):
    held[1] = Sink(7.0).scaled


def _of_a_local(held):
    held.gain = 7.0


CHANGES = [
    (local, _of_a_local),
    (local, lambda held: delattr(held, "gain") or setattr(held, "gain", 5.0)),
    (local_untouched, _of_a_local),
    (local_of_a_class, lambda held: setattr(held, "depth", 4.0)),
    (local_of_a_class, lambda held: held.items.append(4.0)),
    (local_of_a_class, lambda held: setattr(held, "total", lambda: 4.0)),
    (method_in_a_slot, _in_a_slot),
    (method_in_a_slot, lambda held: setattr(held.call.__self__, "gain", 5.0)),
    (method_in_a_slot, lambda held: setattr(held, "call", torch.sin)),
    (method_of_a_container, lambda held: setattr(held, "call", [1.0, 1.0].count)),
    (method_wrapper, lambda held: setattr(held, "call", (3.0).__mul__)),
    (method_wrapper, lambda held: setattr(held, "call", (2.0).__add__)),
    (method_in_a_dataclass, _in_a_slot),
    (methods_in_a_list, _in_a_list),
    (set_of_objects, lambda held: held.add(Sink(7.0))),
    (set_of_objects, lambda held: (held.pop(), held.add(Sink(7.0)))),
    (set_of_methods, lambda held: (held.pop(), held.add(Sink(7.0).scaled))),
    (set_of_functions, lambda held: (held.discard(torch.sin), held.add(torch.exp))),
    (handler, lambda held: held.sinks.add(Sink(7.0))),
    (handler, lambda held: setattr(held, "write", Sink(7.0).scaled)),
]


@pytest.mark.parametrize(("program", "change"), CHANGES)
def test_a_change_is_noticed(program, change):
    function, held = program()
    compiled = foregrad.compile(function, backend="eager")
    x = torch.randn(3)
    for _ in range(2):
        assert torch.equal(compiled(x), function(x))
    change(held)
    for _ in range(2):
        assert torch.equal(compiled(x), function(x))
