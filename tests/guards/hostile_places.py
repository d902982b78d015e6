"""Places that take a name or a key, each as a `World`: a function, its arguments, and a change that must be noticed."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass
class World:
    """`fn(*args, **kwargs)`, the tensors that gradients flow to, and a change after which the answer is another."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    leaves: list[torch.Tensor] = dataclasses.field(default_factory=list)
    change: Callable[[], None] = lambda: None


def _weights(count: int) -> list[torch.Tensor]:
    return [torch.tensor([1.0 + i, 0.5 * i], requires_grad=True) for i in range(count)]


def _sum(parts: Any) -> Any:
    return sum(part * (3.0 + i) for i, part in enumerate(parts))


# ------------------------------------------------------------------------------------------ arguments


def keywords(names: list[str]) -> World:
    weights = _weights(len(names))
    world = World(lambda **kw: ({k: v * 2 for k, v in kw.items()}, _sum(kw.values())), leaves=weights)
    world.kwargs = dict(zip(names, weights, strict=True))

    def change() -> None:  # the same names in another order
        world.kwargs = dict(reversed(world.kwargs.items()))

    world.change = change
    return world


def keyword_options(names: list[str]) -> World:
    world = World(lambda w, **kw: {k: w * v for k, v in kw.items()}, tuple(_weights(1)))
    world.leaves, world.kwargs = list(world.args), {name: float(i) for i, name in enumerate(names)}

    def change() -> None:
        world.kwargs[names[-1]] = 77.0

    world.change = change
    return world


def keys(names: list[Any]) -> World:
    weights = _weights(len(names))
    table = dict(zip(names, weights, strict=True))
    world = World(lambda d: ({k: v * 2 for k, v in d.items()}, [d, _sum(d.values())]), (table,), leaves=weights)

    def change() -> None:
        table[names[0]] = table.pop(names[0])

    world.change = change
    return world


def ordered_keys(names: list[Any]) -> World:
    weights = _weights(len(names))
    table = collections.OrderedDict(zip(names, weights, strict=True))
    world = World(lambda d: type(d)((k, v * 2) for k, v in d.items()), (table,), leaves=weights)
    world.change = lambda: table.move_to_end(names[0])
    return world


def texts(names: list[str]) -> World:
    """Plain arguments; the text that differs at last is one that nothing else tells from the first."""
    world = World(lambda w, *t: (w * sum(map(len, t)), t), (*_weights(1), *names))
    world.leaves = list(world.args[:1])

    def change() -> None:
        world.args = (*world.args[:-1], world.args[-1] + "x")

    world.change = change
    return world


# ------------------------------------------------------------------------------------------ classes


def dataclass_fields(names: list[str]) -> World:
    names = [n for n in names if not n.startswith("__")]
    cls = type("Fields", (), {"__annotations__": dict.fromkeys(names, torch.Tensor)})
    cls = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    value, weights = cls(), _weights(len(names))
    for name, weight in zip(names, weights, strict=True):
        object.__setattr__(value, name, weight)

    def fn(given: Any) -> Any:
        out = cls()
        for name in names:
            object.__setattr__(out, name, getattr(given, name) * 2)
        return out

    def change() -> None:
        object.__setattr__(value, names[0], torch.ones(3, requires_grad=True))
        object.__setattr__(value, names[-1], torch.ones(1, requires_grad=True))

    return World(fn, (value,), leaves=weights, change=change)


def named_tuples(names: list[str]) -> World:
    """Fields by any name, in a class by any name."""
    values, weights = [], _weights(2 * len(names))
    for i, name in enumerate(names):
        members = {"_fields": (name, "last"), "__new__": lambda cls, *items: tuple.__new__(cls, items)}
        cls = type("T", (tuple,), members)
        if "\0" not in name and name.isprintable():
            cls.__name__ = cls.__qualname__ = name
        values.append(cls(*weights[2 * i : 2 * i + 2]))
    return World(lambda *given: [type(t)(t[1] * 3, t[0] * 2) for t in given], tuple(values), leaves=weights)


def classes_by_name(names: list[str]) -> World:
    """Dataclasses whose class has the name."""
    values, weights = [], _weights(len(names))
    for name, weight in zip(names, weights, strict=True):
        cls = dataclasses.make_dataclass("D", ["x"])
        if "\0" not in name and name.isprintable():
            cls.__name__ = cls.__qualname__ = name
        values.append(cls(weight))
    return World(lambda *given: [type(d)(d.x * 2) for d in given], tuple(values), leaves=weights)


# ------------------------------------------------------------------------------------------ modules


class _Module(torch.nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.order = names


def _usable(names: list[str]) -> list[str]:
    """Those that PyTorch lets parameters and submodules have."""
    return [n for n in names if n and "." not in n and not hasattr(_Module([]), n)]


def parameters(names: list[str]) -> World:
    names = _usable(names)

    class Module(_Module):
        def forward(self, x: Any) -> Any:
            return _sum(self._parameters[n] * x for n in self.order), self._parameters[self.order[-1]] * x

    module = Module(names)
    for i, name in enumerate(names):
        module.register_parameter(name, torch.nn.Parameter(torch.tensor([1.0 + i, 2.0])))

    def change() -> None:
        module._parameters[names[-1]] = torch.nn.Parameter(torch.tensor([9.0, 9.0]))

    return World(module, (torch.ones(2),), leaves=list(module.parameters()), change=change)


def attributes_of_modules(names: list[str]) -> World:
    """Parameters, buffers, options, tensors and submodules, read by `getattr`."""
    names = _usable(names)

    class Part(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Any) -> Any:
            return x * self.factor

    class Module(_Module):
        def forward(self, x: Any) -> Any:
            parts = []
            for name in self.order:
                found = getattr(self, name)
                parts.append(found(x) if isinstance(found, Part) else found * x)
            return _sum(parts), parts

    module = Module(names)
    for i, name in enumerate(names):
        value = torch.tensor([1.0 + i, 2.0])
        if i % 5 == 0:
            module.register_parameter(name, torch.nn.Parameter(value))
        elif i % 5 == 1:
            module.register_buffer(name, value)
        elif i % 5 == 2:
            object.__setattr__(module, name, float(i))
        elif i % 5 == 3:
            module.add_module(name, Part(float(i)))
        else:
            object.__setattr__(module, name, value)

    def change() -> None:
        for i, name in list(enumerate(names))[-5:]:
            if i % 5 == 1:
                module._buffers[name] = torch.tensor([8.0, 8.0])
            elif i % 5 == 2:
                object.__setattr__(module, name, 0.25)
            elif i % 5 == 3:
                module._modules[name].factor = 0.75
            elif i % 5 == 4:
                object.__setattr__(module, name, torch.tensor([5.0, 4.0]))

    return World(module, (torch.ones(2),), leaves=list(module.parameters()), change=change)


# ------------------------------------------------------------------------------------------ what a function reaches


def _with_names(function: Any, mapping: dict[str, str]) -> Any:
    """The function with other names in its code, as code that was made by a program may have."""
    code = function.__code__
    code = code.replace(
        co_names=tuple(mapping.get(n, n) for n in code.co_names),
        co_freevars=tuple(mapping.get(n, n) for n in code.co_freevars),
    )
    return types.FunctionType(code, function.__globals__, "f", function.__defaults__, function.__closure__)


def global_names(names: list[str]) -> World:
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "user"}
    weights = _weights(len(names))
    functions = []
    fixed = {"x", "G", "sum", "__name__", "__builtins__"}
    names = [n for n in names if n not in fixed]
    for name, weight in zip(names, weights, strict=False):
        exec("def f(x):\n    return x * G", namespace)
        functions.append(_with_names(namespace.pop("f"), {"G": name}))
        namespace[name] = weight

    def change() -> None:
        namespace[names[-1]] = torch.tensor([9.0, 7.0], requires_grad=True)

    return World(
        lambda x: [f(x) for f in functions], (torch.ones(2),), leaves=weights[: len(names)], change=change
    )  # fmt: skip


def closure_names(names: list[str]) -> World:
    weights = _weights(len(names))
    functions = []
    for weight in weights:

        def make(cell: Any) -> Any:
            return lambda x: x * cell

        functions.append(make(weight))
    named = [_with_names(f, {"cell": n}) for f, n in zip(functions, names, strict=True)]

    def change() -> None:
        named[-1].__closure__[0].cell_contents = torch.tensor([9.0, 7.0], requires_grad=True)

    return World(lambda x: [f(x) for f in named], (torch.ones(2),), leaves=weights, change=change)


def closed_over_keys(names: list[Any]) -> World:
    weights = _weights(len(names))
    table = dict(zip(names, weights, strict=True))
    options = {name: float(i) for i, name in enumerate(names)}

    def change() -> None:
        table[names[-1]] = torch.tensor([9.0, 7.0], requires_grad=True)
        options[names[0]] = 0.125

    return World(
        lambda x: ({k: table[k] * x * options[k] for k in table}, [table[n] + x for n in names]),
        (torch.ones(2),),
        leaves=weights,
        change=change,
    )


def attributes_of_objects(names: list[str]) -> World:
    class Thing:
        pass

    thing, weights = Thing(), _weights(len(names))
    names = [n for n in names if not hasattr(thing, n)]
    for i, (name, weight) in enumerate(zip(names, weights, strict=False)):
        setattr(thing, name, float(i) if i % 2 else weight)

    def change() -> None:
        setattr(thing, names[-1], 0.25)

    return World(
        lambda x: [getattr(thing, name) * x for name in names],
        (torch.ones(2),),
        leaves=weights[: len(names) : 2],
        change=change,
    )


def constant_names(names: list[str]) -> World:
    """Each name stands in the code as a constant: `getattr(thing, "odd name")`, and once for nothing."""

    class Thing:
        pass

    thing = Thing()
    names = [n for n in names if not hasattr(thing, n)][::2]  # a function each
    for i, name in enumerate(names):
        setattr(thing, name, float(i))
    functions = []
    for name in names:
        known: Any = lambda x: x * getattr(thing, "KNOWN")  # noqa: B009
        maybe: Any = lambda x: x * getattr(thing, "MAYBE", 3.0)
        for function, old, new in ((known, "KNOWN", name), (maybe, "MAYBE", name + " too")):
            consts = tuple(new if c == old else c for c in function.__code__.co_consts)
            code = function.__code__.replace(
                co_consts=consts, co_names=tuple(new if n == old else n for n in function.__code__.co_names)
            )
            functions.append(types.FunctionType(code, globals(), "f", None, function.__closure__))

    def change() -> None:
        setattr(thing, names[0], 0.25)

    weight = _weights(1)
    return World(lambda x: [f(x) for f in functions], tuple(weight), leaves=weight, change=change)


def attributes_of_tensors(names: list[str]) -> World:
    weight = _weights(1)
    names = [n for n in names if not hasattr(torch.Tensor, n) and n != "constant"]  # which a FakeTensor has itself
    for i, name in enumerate(names[::2]):
        setattr(weight[0], name, float(i))

    def change() -> None:
        setattr(weight[0], names[-1], 0.25)

    return World(lambda x: x * sum(getattr(x, n, 2.0) for n in names), tuple(weight), leaves=weight, change=change)


def function_names(names: list[str]) -> World:
    weight = _weights(1)
    functions = []
    for i, name in enumerate(names):
        function = eval(f"lambda x: x * {i}.0")
        if "\0" not in name and name.isprintable():
            function.__name__ = function.__qualname__ = name
        functions.append(function)
    return World(lambda x: [f(x) for f in functions], tuple(weight), leaves=weight)


OF_NAMES: dict[str, Callable[[list[str]], World]] = {
    f.__name__: f
    for f in (
        keywords, keyword_options, keys, ordered_keys, texts, dataclass_fields, named_tuples, classes_by_name,
        parameters, attributes_of_modules, global_names, closure_names, closed_over_keys, attributes_of_objects,
        constant_names, attributes_of_tensors, function_names,
    )
}  # fmt: skip
OF_KEYS: dict[str, Callable[[list[Any]], World]] = {f.__name__: f for f in (keys, ordered_keys, closed_over_keys)}
