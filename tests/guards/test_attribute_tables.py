"""Every way to write an attribute that a function reads in every way, on every kind of object, is seen by its guards.

CPython keeps attributes in several forms (beside the object, in its `__dict__`, in slots) and moves them from one to
another; 3.13.0 tells nobody of writes to those that it keeps beside the object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import types

import pytest
import torch
from torch import nn

import foregrad
from foregrad.python._torch.check_tree import dict_version, versions_tell


class Plain:
    k = 1.0

    def __init__(self):
        self.k = 2.0


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 2.0


class Both:
    __slots__ = ("__dict__", "other")

    def __init__(self):
        self.k = 2.0


@dataclasses.dataclass
class Record:
    k: float = 2.0


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    k: float = 2.0


class Listed(list):
    k = 2.0


class Keyed(dict):
    def __init__(self):
        self.k = 2.0


class Wide:
    """More attributes than CPython keeps beside an object."""

    def __init__(self):
        for number in range(40):
            setattr(self, f"other_{number}", number)
        self.k = 2.0


class Late:
    """`k` comes after enough other attributes for a table of its own to be made."""

    def __init__(self):
        self.k = 2.0
        for number in range(29):
            setattr(self, f"other_{number}", number)


class Kind(type):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 2.0


class Failure(Exception):
    k = 2.0


class Hidden:
    def __init__(self):
        self._k = 2.0

    @property
    def k(self):
        return self._k

    @k.setter
    def k(self, value):
        self._k = value


class Behind:
    """Attributes that only `__getattr__` finds."""

    def __init__(self):
        self.options = {"k": 2.0}

    def __getattr__(self, name):
        if name == "k":
            return self.options["k"]
        raise AttributeError(name)

    def __setattr__(self, name, value):
        if name == "k":
            self.options["k"] = value
        else:
            object.__setattr__(self, name, value)


class Child(Plain):
    def __init__(self):
        super().__init__()
        self.other = 1


def function():
    def holder():
        pass

    holder.k = 2.0
    return holder


def a_class():
    return type("Options", (), {"k": 2.0})


def class_of_a_kind():
    return Kind("Options", (), {"k": 2.0})


HOLDERS = {
    "plain": Plain,
    "slots": Slotted,
    "slots and dict": Both,
    "dataclass": Record,
    "dataclass with slots": SlottedRecord,
    "list": Listed,
    "dict": Keyed,
    "wide": Wide,
    "late": Late,
    "module": Net,
    "exception": Failure,
    "namespace": lambda: types.SimpleNamespace(k=2.0),
    "property": Hidden,
    "getattr": Behind,
    "child": Child,
    "function": function,
    "class": a_class,
    "class of a kind": class_of_a_kind,
}


def assign(holder, value):
    holder.k = value


def assign_often(holder, value):
    for number in range(50):  # until the interpreter has specialised the assignment
        holder.k = float(number)
    holder.k = value


def by_setattr(holder, value):
    setattr(holder, "k", value)  # noqa: B010


def in_the_table(holder, value):
    table = getattr(holder, "__dict__", None)
    if type(table) is dict and "k" in table:
        table["k"] = value
    else:
        holder.k = value


def update_the_table(holder, value):
    table = getattr(holder, "__dict__", None)
    if type(table) is dict and "k" in table:
        table.update(k=value)
    else:
        holder.k = value


def delete_and_assign(holder, value):
    with contextlib.suppress(AttributeError):
        del holder.k
    holder.k = value


def grow_and_assign(holder, value):
    """Beside the object there is no more room: its table takes over."""
    try:
        for number in range(35):
            setattr(holder, f"more_{number}", number)
    except AttributeError:  # slots
        pass
    holder.k = value


UNGUARDED = (nn.Module, types.FunctionType)  # see the weaknesses that foregrad.python.scan names


def another_table(holder, value):
    table = getattr(holder, "__dict__", None)
    if type(table) is dict and "k" in table and not isinstance(holder, (types.SimpleNamespace, *UNGUARDED)):
        holder.__dict__ = {**table, "k": value}
    else:
        holder.k = value


CHANGES = [
    assign,
    assign_often,
    by_setattr,
    in_the_table,
    update_the_table,
    delete_and_assign,
    grow_and_assign,
    another_table,
]


def made_up_name(holder):
    return getattr(holder, "kk"[:1])


def in_its_table(holder):
    table = getattr(holder, "__dict__", {})
    return table.get("k", holder.k)


def by_match(holder):
    match holder:
        case object(k=k):
            return k


READERS = {
    "attribute": lambda holder: holder.k,
    "getattr": lambda holder: getattr(holder, "k", 0.5),
    "made up": made_up_name,
    "table": in_its_table,
    "attrgetter": operator.attrgetter("k"),
    "match": by_match,
}


def check(read, holder, changes):
    """Calls of a compiled function with a change before each, against eager; how many calls differ."""

    def scaled(x):
        return x * read(holder)

    x = torch.ones(3)
    compiled = foregrad.compile(scaled, backend="eager")
    compiled(x)
    wrong = []
    for number, change in enumerate(changes):
        change(holder, 3.0 + number)
        if number % 7 == 6:  # eight graphs in a row for one call each, and calls are eager
            compiled(x)
            compiled(x)
        if not torch.equal(compiled(x), scaled(x)):
            wrong.append(change.__name__)
    assert compiled.foregrad.specializations  # not run in eager
    return wrong


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_change_of_an_attribute_is_seen(kind):
    """Each change by who reads the attribute, and by half of the other readers."""
    for number, (name, read) in enumerate(READERS.items()):
        changes = CHANGES[number:] + CHANGES[:number]
        assert not check(read, HOLDERS[kind](), changes[::2] if number else changes), name


@pytest.mark.parametrize("kind", ["plain", "slots", "module", "class"])
def test_so_it_is_without_the_native_part(kind):
    with foregrad.config.override(native=False):
        assert not check(READERS["attribute"], HOLDERS[kind](), CHANGES)


def test_a_table_that_is_held_by_itself():
    """The function sees the dict and not the object whose attributes are in it."""
    for more in (0, 3, 40):
        owner = Plain()
        for number in range(more):
            setattr(owner, f"other_{number}", number)
        for read in (lambda table: table["k"], lambda table: table.get("k"), lambda table: dict(table)["k"]):
            table = vars(owner)

            def scaled(x, table=table, read=read):
                return x * read(table)

            compiled, x = foregrad.compile(scaled, backend="eager"), torch.ones(3)
            for number in range(4):
                owner.k = float(number)
                assert torch.equal(compiled(x), scaled(x)), (more, number)
            del owner.k
            owner.k = 9.0  # the same keys, in another order
            assert torch.equal(compiled(x), scaled(x)), more


def test_the_order_of_attributes():
    owner = Plain()
    owner.a, owner.b = 1.0, 2.0
    compiled = foregrad.compile(lambda x: x * next(iter(vars(owner).values())), backend="eager")
    x = torch.ones(3)
    for _ in range(4):
        assert torch.equal(compiled(x), x * next(iter(vars(owner).values())))
        first = next(iter(vars(owner)))
        value = getattr(owner, first)
        delattr(owner, first)
        setattr(owner, first, value)


def test_globals_that_are_the_attributes_of_an_object():
    owner = Plain()
    exec("def scaled(x):\n    return x * k\n", vars(owner))
    compiled, x = foregrad.compile(owner.scaled, backend="eager"), torch.ones(3)
    for number in range(4):
        owner.k = float(number)
        assert torch.equal(compiled(x), x * number)


@pytest.mark.parametrize("kind", HOLDERS)
def test_versions_tell_what_they_say_they_tell(kind):
    for size in range(45):
        holder = HOLDERS[kind]()
        for number in range(size):
            try:
                setattr(holder, f"other_{number}", number)
            except AttributeError:
                return
        table = getattr(holder, "__dict__", None)
        if type(table) is dict and versions_tell(table):
            before = dict_version(table)
            holder.k = object()
            holder.other = object()
            assert dict_version(table) != before


def test_what_pytorch_asks_of_tensors_of_its_own_is_no_input():
    """In a backward a number becomes a tensor, whose attributes PyTorch's C++ asks for while the user's code runs."""

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    joint = foregrad.capture(Tripled.apply, torch.ones(3, requires_grad=True))
    assert [str(info.slot) for info in joint.signature.inputs] == ["args[0]"]
