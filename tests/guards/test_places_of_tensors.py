"""Tensors in tuples of classes, in distributions, in subclasses of containers with methods of their own; attributes that
a function writes before it reads them. None of it is a warning, and what is rebound is read anew.
"""

import collections
import contextlib
import functools
import weakref

import pytest
import torch
from torch import nn

import foregrad

Tableau = collections.namedtuple("Tableau", "alpha beta")


class Solver:
    tableau = Tableau(torch.tensor([1.0, 2.0, 3.0]), (torch.tensor(2.0), [1.0]))

    def __init__(self, x):
        self.x = x

    def step(self):
        return self.x * self.tableau.alpha + self.tableau.beta[0]


def in_a_tuple_of_a_class():
    return (lambda x: Solver(x).step()), lambda: setattr(Solver, "tableau", Tableau(torch.ones(3), (torch.ones(3),)))


class Strange(tuple):
    __slots__ = ()

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError

    def total(self):
        return sum(tuple.__iter__(self))


class StrangeList(list):
    def __iter__(self):
        raise NotImplementedError

    def total(self):
        return sum(list.__iter__(self))


def in_a_tuple_with_methods():
    held = Strange((1.0, 2.0))
    return (lambda x: x * held.total()), lambda: None


def in_a_list_with_methods():
    held = StrangeList([1.0, 2.0])
    return (lambda x: x * held.total()), lambda: held.append(4.0)


def in_a_distribution():
    prior = torch.distributions.LogNormal(torch.tensor(0.5), torch.tensor(2.0))

    def change():
        prior.base_dist.loc = torch.tensor(-1.0)

    return (lambda x: prior.log_prob(x.exp())), change


def in_a_distribution_of_a_module():
    module = nn.Linear(3, 3)
    module.prior = torch.distributions.Normal(torch.tensor(0.5), torch.tensor(2.0))

    def change():
        module.prior = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))

    return (lambda x: module(x) + module.prior.log_prob(x)), change


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = None

    def forward(self, x):
        self.alpha = x.exp()
        out = x * self.alpha
        self.alpha = None
        return out


def written_before_it_is_read():
    return Remembers(), lambda: None


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.last = x * 2
        self.total = self.total + x
        return self.last + self.total


def in_a_module_made_inside():
    def function(x):
        module = Keeps()
        return module(module(x))

    return function, lambda: None


def in_an_object_of_a_library():
    stack = contextlib.ExitStack()
    stack.scale = torch.tensor([2.0, 1.0, 1.0])
    return (lambda x: x * stack.scale), lambda: setattr(stack, "scale", torch.ones(3))


def in_a_large_list():
    held = [torch.full((3,), i % 7.0) for i in range(10_010)]
    return (lambda x: x * held[10_005]), lambda: held.__setitem__(10_005, torch.ones(3))


def behind_a_weak_reference():
    solver = Solver(torch.tensor([2.0, 1.0, 1.0]))
    reference = weakref.ref(solver)

    def program(x):
        return x * reference().x

    program.keeps = solver
    return program, lambda: setattr(solver, "x", torch.ones(3))


def in_a_partial_application():
    held = {"scale": torch.tensor([2.0, 1.0, 1.0])}
    program = functools.partial(lambda table, x, *, shift: x * table["scale"] + shift[0], held, shift=(torch.ones(3),))
    return program, lambda: held.update(scale=torch.ones(3))


def under_a_name_that_is_made_up():
    globals()["made_up_scale"] = torch.tensor([2.0, 1.0, 1.0])
    return (lambda x: x * globals()["made_up" + "_scale"]), lambda: globals().update(made_up_scale=torch.ones(3))


def on_a_tensor():
    weight = torch.ones(3)
    weight.scale = torch.tensor([2.0, 1.0, 1.0])
    return (lambda x: x * weight * weight.scale), lambda: setattr(weight, "scale", torch.ones(3))


PROGRAMS = [
    in_a_module_made_inside,
    in_a_tuple_of_a_class,
    in_a_tuple_with_methods,
    in_a_list_with_methods,
    in_a_distribution,
    in_a_distribution_of_a_module,
    written_before_it_is_read,
    in_an_object_of_a_library,
    in_a_large_list,
    behind_a_weak_reference,
    in_a_partial_application,
    under_a_name_that_is_made_up,
    on_a_tensor,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_read_anew_and_no_warning(program):
    function, change = program()
    compiled = foregrad.compile(function, backend="eager")
    x = torch.tensor([0.5, -1.0, 2.0])
    for _ in range(3):
        assert torch.equal(compiled(x), function(x))
    assert len(compiled.foregrad.specializations) == 1
    change()
    for _ in range(2):
        assert torch.equal(compiled(x), function(x))
