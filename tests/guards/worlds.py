"""The table of second calls: each entry makes a world (a function, its arguments, a change) twice, once to run
eagerly and once compiled. Between two calls the change happens, and the second call may get other arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

REUSE, RECOMPILE = 1, 2  # how many graphs there are after both calls


@dataclasses.dataclass
class World:
    """`change()` may return what undoes it; `under` are contexts that the second call runs in."""

    fn: Any
    first: tuple[Any, ...] = ()
    second: tuple[Any, ...] | None = None
    change: Callable[[], Any] = lambda: None
    under: tuple[Callable[[], Any], ...] = ()
    first_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    second_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    rebuild: Callable[[Any], Any] | None = None  # what is called the second time, from what was compiled


CASES: dict[str, tuple[int, Callable[[], World]]] = {}


def case(graphs: int):
    def add(make):
        CASES[make.__name__.strip("_")] = (graphs, make)
        return make

    return add


def t(*shape, grad=False, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def double(x):
    return x * 2


# ------------------------------------------------------------------------------------------------ tensor arguments


@case(REUSE)
def other_values():
    return World(double, (t(3, 4),), (t(3, 4),))


@case(RECOMPILE)
def another_shape():
    return World(double, (t(3, 4),), (t(2, 4),))


@case(RECOMPILE)
def another_rank():
    return World(double, (t(3, 4),), (t(3, 4, 1),))


@case(RECOMPILE)
def another_dtype():
    return World(double, (t(3),), (t(3, dtype=torch.float64),))


@case(RECOMPILE)
def other_strides():
    return World(double, (t(3, 4),), (t(4, 3).t(),))


@case(RECOMPILE)
def a_tensor_that_requires_grad():
    return World(double, (t(3),), (t(3, grad=True),))


@case(RECOMPILE)
def a_tensor_that_requires_no_grad():
    return World(double, (t(3, grad=True),), (t(3),))


@case(REUSE)
def a_tensor_with_a_history():
    return World(double, (t(3, grad=True),), (t(3, grad=True) * 1,))


@case(RECOMPILE)
def a_history_under_a_write():
    # A leaf would not be allowed to be written to: that the first was none matters.
    def f(x):
        x.mul_(2)
        return x + 1

    return World(f, (t(3, grad=True) * 1,), (t(3),))


@case(RECOMPILE)
def a_parameter_instead_of_a_tensor():
    return World(double, (t(3, grad=True),), (nn.Parameter(t(3)),))


@case(RECOMPILE)
def a_conjugate():
    return World(double, (torch.randn(3, dtype=torch.complex64),), (torch.randn(3, dtype=torch.complex64).conj(),))


@case(REUSE)
def a_view_of_something_larger():
    return World(double, (t(4),), (t(8)[2:6],))


@case(RECOMPILE)
def another_offset_where_it_matters():
    def f(x):
        return x.as_strided((2,), (1,), x.storage_offset())

    big = t(8)
    return World(f, (big[0:4],), (big[2:6],))


@case(RECOMPILE)
def the_same_tensor_twice():
    x = t(3)
    return World(lambda a, b: a.add_(1) * b, (t(3), t(3)), (x, x))


@case(RECOMPILE)
def the_same_tensor_no_more():
    x = t(3)
    return World(lambda a, b: a.add_(1) * b, (x, x), (t(3), t(3)))


@case(RECOMPILE)
def the_same_tensor_twice_unwritten():
    x = t(3, grad=True)
    return World(lambda a, b: a * b, (t(3, grad=True), t(3, grad=True)), (x, x))


@case(RECOMPILE)
def arguments_that_overlap_and_one_is_written():
    x = t(8)
    return World(lambda a, b: a.mul_(3).sum() + b, (t(4), t(4)), (x[:4], x[2:6]))


@case(RECOMPILE)
def arguments_that_overlap_no_more():
    x = t(8)
    return World(lambda a, b: a.mul_(3).sum() + b, (x[:4], x[2:6]), (t(4), t(4)))


@case(RECOMPILE)
def arguments_that_overlap_elsewhere():
    x = t(8)
    return World(lambda a, b: a.mul_(3).sum() + b, (x[:4], x[2:6]), (x[:4], x[3:7]))


@case(REUSE)
def arguments_that_overlap_unwritten():
    x = t(8)
    return World(lambda a, b: a * b, (t(4), t(4)), (x[:4], x[2:6]))


# ------------------------------------------------------------------------------------------------ plain arguments


@case(REUSE)
def the_same_number():
    return World(lambda x, n: x * n, (t(3), 1000.5), (t(3), 1000.5))


@case(RECOMPILE)
def another_number():
    return World(lambda x, n: x * n, (t(3), 2), (t(3), 3))


@case(RECOMPILE)
def a_float_for_an_int():
    return World(lambda x, n: x * n, (torch.arange(3), 2), (torch.arange(3), 2.0))


@case(RECOMPILE)
def true_for_one():
    return World(lambda x, n: x + n if n is True else x - n, (torch.arange(3), 1), (torch.arange(3), True))


@case(RECOMPILE)
def minus_zero():
    return World(lambda x, n: x * 0 + n, (t(3), 0.0), (t(3), -0.0))


@case(REUSE)
def not_a_number_again():
    return World(lambda x, n: x * n, (t(3), float("nan")), (t(3), float("nan")))


@case(RECOMPILE)
def another_string():
    return World(lambda x, how: getattr(torch, how)(x), (t(3), "sin"), (t(3), "cos"))


@case(REUSE)
def an_equal_string():
    return World(lambda x, how: getattr(torch, how)(x), (t(3), "sin"), (t(3), "sine"[:3]))


@case(RECOMPILE)
def none_for_a_tensor():
    return World(lambda x, y: x if y is None else x + y, (t(3), t(3)), (t(3), None))


@case(RECOMPILE)
def a_tensor_for_none():
    return World(lambda x, y: x if y is None else x + y, (t(3), None), (t(3), t(3)))


@case(RECOMPILE)
def another_dtype_argument():
    return World(lambda x, d: x.to(d), (t(3), torch.float64), (t(3), torch.float16))


@case(RECOMPILE)
def another_function_argument():
    return World(lambda x, f: f(x), (t(3), torch.sin), (t(3), torch.cos))


@case(RECOMPILE)
def another_slice():
    return World(lambda x, s: x[s] + 0, (t(5), slice(0, 2)), (t(5), slice(0, 3)))


# ------------------------------------------------------------------------------------------------ containers

Pair = namedtuple("Pair", "a b")
Riap = namedtuple("Riap", "a b")


@case(REUSE)
def an_equal_container():
    return World(lambda d: d["a"] * d["b"][0], ({"a": t(3), "b": [t(3)]},), ({"a": t(3), "b": [t(3)]},))


@case(RECOMPILE)
def a_list_for_a_tuple():
    return World(lambda d: d[0] * len(d) + isinstance(d, list), ((t(3), t(3)),), ([t(3), t(3)],))


@case(RECOMPILE)
def a_longer_list():
    return World(sum, ([t(3), t(3)],), ([t(3), t(3), t(3)],))


@case(RECOMPILE)
def one_key_more():
    return World(lambda d: sum(d.values()), ({"a": t(3)},), ({"a": t(3), "b": t(3)},))


@case(RECOMPILE)
def another_key():
    return World(lambda d: d.get("a", 0) + d.get("b", 1), ({"a": t(3)},), ({"b": t(3)},))


@case(RECOMPILE)
def another_order_of_keys():
    def f(d):
        first, second = d.values()
        return first - second

    a, b = t(3), t(3)
    return World(f, ({"a": a, "b": b},), ({"b": b, "a": a},))


@case(RECOMPILE)
def another_class_of_namedtuple():
    return World(lambda p: p.a * (2 if type(p) is Pair else 3), (Pair(t(3), t(3)),), (Riap(t(3), t(3)),))


@case(RECOMPILE)
def by_keyword():
    return World(double, (t(3),), (), second_kwargs={"x": t(3)})


@case(RECOMPILE)
def a_default_overridden():
    def f(x, n=2):
        return x * n

    return World(f, (t(3),), (t(3), 3))


# ------------------------------------------------------------------------------------------------ contexts


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic(**settings):
    torch.use_deterministic_algorithms(True, **settings)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def unfilled():
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


@contextlib.contextmanager
def precision(text):
    torch.set_float32_matmul_precision(text)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def under(*contexts, fn=double, args=None):
    made = args or (lambda: (t(3, 3, grad=True),))
    return World(fn, made(), made(), under=contexts)


def product(x):
    return (x @ x).sum()


@case(RECOMPILE)
def without_gradients():
    return under(torch.no_grad)


@case(RECOMPILE)
def in_inference_mode():
    return under(torch.inference_mode)


@case(RECOMPILE)
def an_inference_tensor():
    with torch.inference_mode():
        x = torch.randn(3)
    return World(double, (t(3),), (x,))


@case(RECOMPILE)
def under_autocast():
    return under(lambda: torch.autocast("cpu", torch.bfloat16), fn=product)


@case(RECOMPILE)
def under_autocast_of_another_dtype():
    before = torch.autocast("cpu", torch.bfloat16)
    before.__enter__()
    world = under(lambda: torch.autocast("cpu", torch.float16), fn=product)
    return dataclasses.replace(world, change=lambda: before.__exit__(None, None, None))


@case(RECOMPILE)
def under_autocast_of_another_device():
    return under(lambda: torch.autocast("xpu", torch.bfloat16), fn=product)


@case(RECOMPILE)
def autocast_without_its_cache():
    return under(lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), fn=product)


@case(RECOMPILE)
def deterministic_algorithms():
    return under(deterministic)


@case(RECOMPILE)
def deterministic_with_warnings_only():
    return under(functools.partial(deterministic, warn_only=True))


@case(REUSE)
def memory_left_unfilled():
    return under(unfilled)


@case(RECOMPILE)
def memory_left_unfilled_where_it_matters():
    def change():
        before.__exit__(None, None, None)

    before = deterministic()
    before.__enter__()
    return dataclasses.replace(under(deterministic, unfilled), change=change)


@case(RECOMPILE)
def another_default_dtype():
    return under(lambda: default_dtype(torch.float64), fn=lambda x: x + torch.ones(3))


@case(RECOMPILE)
def another_default_device():
    return under(lambda: torch.device("cpu"), fn=lambda x: x + torch.ones(3))


@case(RECOMPILE)
def another_matmul_precision():
    return under(lambda: precision("high"), fn=product)


# ------------------------------------------------------------------------------------------------ globals, closures

SCALE = 2
FLAG = True
NAMES = {"how": "sin", "more": [1, 2]}
WEIGHT = torch.ones(3)
helper = double


def with_globals(x):
    if FLAG:
        x = x * SCALE
    return helper(getattr(torch, NAMES["how"])(x)) * WEIGHT + len(NAMES["more"])


def set_global(name, value):
    def change():
        before = globals()[name]
        globals()[name] = value
        return lambda: globals().__setitem__(name, before)

    return change


def global_world(name, value):
    return World(with_globals, (t(3),), (t(3),), change=set_global(name, value))


@case(REUSE)
def a_global_nobody_reads():
    return global_world("REUSE", 1)


@case(REUSE)
def a_global_set_to_an_equal_value():
    return global_world("SCALE", int("2"))


@case(RECOMPILE)
def another_global_int():
    return global_world("SCALE", 5)


@case(RECOMPILE)
def another_global_type():
    return global_world("SCALE", 2.0)


@case(RECOMPILE)
def another_global_bool():
    return global_world("FLAG", False)


@case(RECOMPILE)
def another_global_function():
    return global_world("helper", lambda x: x * 3)


@case(REUSE)
def another_global_tensor():
    return global_world("WEIGHT", torch.full((3,), 3.0))


@case(RECOMPILE)
def a_global_tensor_of_another_dtype():
    return global_world("WEIGHT", torch.full((3,), 3.0, dtype=torch.float64))


@case(RECOMPILE)
def an_item_of_a_global():
    def change():
        NAMES["how"] = "cos"
        return lambda: NAMES.__setitem__("how", "sin")

    return World(with_globals, (t(3),), (t(3),), change=change)


@case(RECOMPILE)
def an_item_deep_in_a_global():
    def change():
        NAMES["more"].append(3)
        return NAMES["more"].pop

    return World(with_globals, (t(3),), (t(3),), change=change)


@case(RECOMPILE)
def a_closure_cell():
    scale, offset = 2, t(3)

    def f(x):
        return x * scale + offset

    def change():
        nonlocal scale
        scale = 3

    return World(f, (t(3),), (t(3),), change=change)


@case(REUSE)
def a_closed_over_tensor_rebound():
    offset = t(3)

    def f(x):
        return x + offset

    def change():
        nonlocal offset
        offset = torch.arange(3.0)

    return World(f, (t(3),), (t(3),), change=change)


@case(RECOMPILE)
def a_default_argument():
    def f(x, n=2):
        return x * n

    def change():
        f.__defaults__ = (3,)

    return World(f, (t(3),), (t(3),), change=change)


class Options:
    kind = "class"

    def __init__(self):
        self.scale = 2
        self.other = 1

    def scaled(self, x):
        return x * self.scale if self.kind == "class" else x


@case(RECOMPILE)
def an_attribute_of_an_object():
    options = Options()
    return World(lambda x: x * options.scale, (t(3),), (t(3),), change=lambda: setattr(options, "scale", 3))


@case(REUSE)
def an_attribute_of_an_object_nobody_reads():
    options = Options()
    return World(lambda x: x * options.scale, (t(3),), (t(3),), change=lambda: setattr(options, "other", 3))


@case(RECOMPILE)
def an_attribute_read_in_a_method():
    options = Options()
    return World(options.scaled, (t(3),), (t(3),), change=lambda: setattr(options, "scale", 3))


@case(RECOMPILE)
def an_attribute_that_hides_the_class_s():
    options = Options()
    return World(options.scaled, (t(3),), (t(3),), change=lambda: setattr(options, "kind", "instance"))


@case(RECOMPILE)
def an_attribute_of_a_class():
    def change():
        Options.kind = "changed"
        return lambda: setattr(Options, "kind", "class")

    options = Options()
    return World(options.scaled, (t(3),), (t(3),), change=change)


@case(RECOMPILE)
def a_variable_of_a_python_module():
    settings = types.ModuleType("settings")
    settings.scale = 2
    return World(lambda x: x * settings.scale, (t(3),), (t(3),), change=lambda: setattr(settings, "scale", 3))


@case(RECOMPILE)
def a_partial_s_keyword():
    f = functools.partial(lambda x, n: x * n, n=2)
    return World(f, (t(3),), (t(3),), change=lambda: f.keywords.__setitem__("n", 3))
