"""Functions for random sequences (see sequences.py): arguments of all kinds, globals, closures, values read."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import foregrad
from tests.guards.random_modules import CONTEXTS


class Mode(enum.Enum):
    ADD = "add"
    MULTIPLY = "multiply"


@dataclasses.dataclass
class Settings:
    scale: Any
    mode: Mode
    shift: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: Any
    mode: Mode
    shift: Any = None


Pair = namedtuple("Pair", "scale mode shift")


class Named(torch.nn.Parameter):
    """A subclass without behaviour of its own."""


class Switch:
    level: Any = 1

    def __init__(self) -> None:
        self.on = True
        self.items: list[Any] = [1, 2]


GAIN: Any = 1
LIST: list[Any] = [1.0, "sin"]
TABLE: dict[str, Any] = {"p": 1, "q": 2}
OFFSET = torch.ones(3)
SWITCH = Switch()
BAG = types.SimpleNamespace(level=1, inner=types.SimpleNamespace(level=2))
NUMBERS = np.array([1.0, 2.0])
QUEUE: deque[Any] = deque([1, 2])


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _by_settings(x: torch.Tensor, settings: Any) -> torch.Tensor:
    x = x + settings.scale if settings.mode is Mode.ADD else x * settings.scale
    if settings.shift is not None:
        x = x + settings.shift
    return x * 2 if type(settings) is Settings else x


def everything(x: Any, *others: Any, scale: Any = 1.0, how: str = "sin", settings: Any = None, **tensors: Any) -> Any:
    """Looks at whatever it is given."""
    y = getattr(torch, how)(x) * scale * GAIN + torch.ones(x.shape[-1])
    for number, other in enumerate(others):
        y = y * (number + 2) + other
    for name, tensor in tensors.items():
        y = y * len(name) - tensor
    if settings is not None:
        y = _by_settings(y, settings)
    if x.requires_grad and torch.is_grad_enabled():
        y = y * 3
    y = y + (1 if x.is_contiguous() else 2) + isinstance(x, torch.nn.Parameter)
    for key, value in TABLE.items():
        y = y * value + len(key)
    y = helper(getattr(torch, LIST[1])(y) * LIST[0]) + OFFSET
    return {"y": y, "first": others[0] if others else None, "size": x.shape[0], "how": how, "sum": y.sum()}


def writes(x: Any, *others: Any, scale: Any = 1.0, how: str = "sin", settings: Any = None, **tensors: Any) -> Any:
    """Writes to what it is given, whatever shares memory with it."""
    x.mul_(2)
    for other in (*others, *tensors.values()):
        if isinstance(other, torch.Tensor) and not (other.requires_grad and other.is_leaf):
            other.add_(1)
    view = x.view(-1) if x.is_contiguous() else x.reshape(-1)
    if isinstance(scale, (int, float)) and how == "sin":
        x.detach().mul_(2)
    return {"y": x.sin() * scale, "view": view[1:], "x": x, "all": list(others)}


def looks(x: Any, *others: Any, scale: Any = 1.0, how: str = "sin", settings: Any = None, **tensors: Any) -> Any:
    """Asks for values and sizes that depend on them."""
    if (x > 0).sum() > x.numel() / 2:
        x = x * 2
    picked = x[x > 0.5]
    found = x.detach().sum().item()
    if how == "cos":
        return {"y": torch.cat([picked * found, x.reshape(-1)])}
    if how == "tanh":
        return {"y": x * (picked.shape[0] + 1), "nonzero": (x > 0).nonzero().sum(), "found": found}
    for other in others:
        if isinstance(other, torch.Tensor):
            picked = picked * other.sum()
    return {"y": picked * scale + len(LIST), "n": picked.numel()}


def sizes(x: Any, *others: Any, scale: Any = 1.0, how: str = "sin", settings: Any = None, **tensors: Any) -> Any:
    """Computes with sizes."""
    rows, columns = x.shape
    y = x.reshape(rows * columns).view(columns, rows).t() / rows
    if rows > 3:
        y = y + 1
    y = torch.cat([y, x], 0) + torch.arange(columns)
    if how == "cos":
        y = y[: rows // 2 + 1]
    if how == "tanh":
        for i in range(rows):
            y = y + i
    return {"y": y * (scale if isinstance(scale, (int, float)) else 1), "rows": rows, "n": y.numel() * 2}


def kept(x: Any, *others: Any, scale: Any = 1.0, how: str = "sin", settings: Any = None, **tensors: Any) -> Any:
    """Looks at what is kept in namespaces, arrays, queues, on functions and on tensors."""
    y = x * BAG.level + BAG.inner.level * float(NUMBERS[0])
    y = y * QUEUE[0] + len(QUEUE)
    if hasattr(SWITCH, "flag"):
        y = y * 2
    try:
        y = y + SWITCH.extra
    except AttributeError:
        y = y - 1
    if x.is_leaf:
        y = y * getattr(x, "tag", 3)
    y = y * kept.gain + int(x._is_view()) + (x.grad is None)  # type: ignore[attr-defined]
    return {"y": y.sin() * scale, "offset": x.storage_offset()}


kept.gain = 2  # type: ignore[attr-defined]


def closed(choice: Callable[[], Any]) -> Any:
    cells: dict[str, Any] = {}
    inner, weight, switch = 2, torch.arange(3.0), SWITCH

    def function(x: Any, *others: Any, scale: Any = 1.0, how: str = "sin", settings: Any = None, **tensors: Any) -> Any:
        y = x * inner + weight
        if switch.on:
            y = y * switch.level + len(switch.items)
        for other in others:
            y = y + other
        return {"y": y.sin() * scale, "seen": switch.items[0], "weight": weight}

    def set_inner(value: Any) -> None:
        nonlocal inner
        inner = value

    def set_weight(value: Any) -> None:
        nonlocal weight
        weight = value

    cells["inner"], cells["weight"] = set_inner, set_weight
    function.cells = cells  # type: ignore[attr-defined]
    return function


def _globals(**values: Any) -> Callable[[Any, random.Random], None]:
    def change(example: Any, r: random.Random) -> None:
        for name, options in values.items():
            value = r.choice(options)
            globals()[name] = value() if isinstance(value, functools.partial) else value

    return change


def _cell(name: str, *options: Callable[[], Any]) -> Callable[[Any, random.Random], None]:
    def change(example: Any, r: random.Random) -> None:
        option = r.choice(options)
        if hasattr(example.function, "cells"):
            example.function.cells[name](option())

    return change


def _move_key(example: Any, r: random.Random) -> None:
    key = r.choice(["p", "q"])
    TABLE[key] = TABLE.pop(key)


def _forget(holder: Any, name: str) -> None:
    if name in vars(holder):
        delattr(holder, name)


def _default(example: Any, r: random.Random) -> None:
    function = example.function
    if function.__kwdefaults__:
        function.__kwdefaults__ = {**function.__kwdefaults__, "scale": r.choice([1.0, 2.0, 1])}


tensor = functools.partial
CHANGES: list[Callable[[Any, random.Random], Any]] = [
    _globals(GAIN=[1, 2, 1.0, True]),
    _globals(OFFSET=[tensor(torch.ones, 3), tensor(torch.randn, 3), tensor(torch.ones, 1), tensor(torch.ones, 3, dtype=torch.float64)]),
    _globals(OFFSET=[tensor(torch.randn, 3, requires_grad=True), 0, tensor(torch.nn.Parameter, torch.ones(3))]),
    _globals(helper=[lambda x: x * 2, lambda x: x * 3, torch.sin]),
    lambda e, r: LIST.__setitem__(0, r.choice([1.0, 2.0, 1])),
    lambda e, r: LIST.__setitem__(1, r.choice(["sin", "cos"])),
    lambda e, r: LIST.append(0) if r.random() < 0.5 else LIST.__delitem__(slice(2, None)),
    lambda e, r: TABLE.update(p=r.choice([1, 2, 1.0])),
    lambda e, r: TABLE.update(rr=1) if r.random() < 0.5 else TABLE.pop("rr", None),
    _move_key,
    lambda e, r: setattr(SWITCH, "on", r.random() < 0.5),
    lambda e, r: setattr(Switch, "level", r.choice([1, 2.0])),
    lambda e, r: setattr(SWITCH, "level", r.choice([1, 3])),
    lambda e, r: vars(SWITCH).pop("level", None),
    lambda e, r: SWITCH.items.reverse(),
    lambda e, r: SWITCH.items.append(0),
    _cell("inner", lambda: 2, lambda: 3, lambda: 2.0),
    _cell("weight", lambda: torch.randn(3), lambda: torch.randn(1, 3), lambda: torch.randn(3, requires_grad=True), lambda: torch.ones(3).double()),
    _default,
    lambda e, r: setattr(r.choice([BAG, BAG.inner]), "level", r.choice([1, 2, 1.0])),
    lambda e, r: setattr(BAG, "inner", types.SimpleNamespace(level=r.choice([1, 2]))),
    lambda e, r: NUMBERS.__setitem__(0, r.choice([1.0, 3.0])),
    lambda e, r: r.choice([QUEUE.rotate, lambda: QUEUE.append(1), lambda: len(QUEUE) > 1 and QUEUE.pop()])(),
    lambda e, r: setattr(SWITCH, r.choice(["flag", "extra"]), r.choice([1, 2])),
    lambda e, r: vars(SWITCH).pop(r.choice(["flag", "extra"]), None),
    lambda e, r: setattr(Switch, "extra", r.choice([1, 2])) if r.random() < 0.5 else _forget(Switch, "extra"),
    lambda e, r: setattr(kept, "gain", r.choice([1, 2])),
    lambda e, r: torch.set_float32_matmul_precision(r.choice(["highest", "high"])),
]  # fmt: skip


def a_tensor(r: random.Random) -> torch.Tensor:
    """Two-dimensional, three columns wide; of a few lengths, layouts, dtypes and kinds."""
    rows = r.choice([1, 2, 3, 4, 6])
    dtype = r.choice([torch.float32, torch.float32, torch.float32, torch.float64])
    memory = torch.randn(rows + 2, 6, dtype=dtype)
    x: torch.Tensor = r.choice(
        [
            lambda: torch.randn(rows, 3, dtype=dtype),
            lambda: torch.randn(rows, 3, dtype=dtype),
            lambda: torch.randn(3, rows, dtype=dtype).t(),
            lambda: memory[:rows, :3],
            lambda: memory[2:, ::2],
            lambda: memory.view(-1)[: rows * 3].view(rows, 3),
            lambda: memory.view(-1)[3 : rows * 3 + 3].view(rows, 3),
            lambda: torch.randn(1, 3, dtype=dtype).expand(rows, 3) * 1,
        ]
    )()
    kind = r.random()
    if kind < 0.3:
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    elif kind < 0.45:
        x = x.detach().clone().requires_grad_() * 1
    elif kind < 0.5:
        x = torch.nn.Parameter(x.detach().clone())
    elif kind < 0.55:
        x = Named(x.detach().clone())
    elif kind < 0.6:
        with torch.inference_mode():
            x = x.clone()
    return x


def an_other(r: random.Random, x: torch.Tensor) -> Any:
    return r.choice(
        [
            lambda: 2,
            lambda: 3,
            lambda: 5,
            lambda: 2.0,
            lambda: 0.5,
            lambda: r.choice([0.1, 0.2, 0.3, 0.4]),
            lambda: True,
            lambda: x,
            lambda: x.detach() if not x.is_inference() else x,
            lambda: torch.randn(3),
            lambda: torch.randn(3, requires_grad=True),
            lambda: torch.randn(1, 3) * 1,
            lambda: torch.tensor(2.0),
            lambda: x[:1] if not x.is_inference() else 1,
        ]
    )()


def _call(r: random.Random, *, may_mark: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = a_tensor(r)
    if r.random() < 0.15 and may_mark and not x.is_inference():
        foregrad.mark_dynamic(x, 0)
    if r.random() < 0.1:
        x.tag = r.choice([1, 2])  # type: ignore[attr-defined]
    others = [an_other(r, x) for _ in range(r.choice([0, 0, 1, 1, 2]))]
    kwargs: dict[str, Any] = {}
    if r.random() < 0.4:
        kwargs["scale"] = r.choice([1.0, 2.0, 2, -0.0, 0.0, float("inf"), float("nan"), True, 0.1, 0.3])
    if r.random() < 0.4:
        kwargs["how"] = r.choice(["sin", "cos", "tanh"])
    if r.random() < 0.3:
        made = r.choice([Settings, Frozen, Pair])
        kwargs["settings"] = made(r.choice([1, 2.0, torch.randn(3)]), r.choice(list(Mode)), r.choice([None, 1]))
    named = [
        (name, r.choice([1, 2.0, torch.randn(3), x])) for name in r.sample(["a", "bb", "ccc"], r.choice([0, 0, 1, 2]))
    ]
    kwargs |= dict(named)
    if r.random() < 0.2:
        kwargs = dict(reversed(kwargs.items()))
    return (x, *others), kwargs


def _tensors(value: Any, path: str) -> dict[str, Any]:
    """The tensors in nested containers by where they are; anything else as it is."""
    if isinstance(value, dict):
        items: Any = list(value.items())
        return {k: v for key, item in items for k, v in _tensors(item, f"{path}[{key!r}]").items()} | {
            f"keys of {path}": (type(value), list(value))
        }
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in _tensors(item, f"{path}[{i}]").items()} | {
            f"length of {path}": (type(value), len(value))
        }
    if dataclasses.is_dataclass(value):
        return _tensors(vars(value) if hasattr(value, "__dict__") else dataclasses.asdict(value), path)
    return {path: value}


FUNCTIONS = [
    lambda: everything,
    lambda: writes,
    lambda: looks,
    lambda: sizes,
    lambda: kept,
    lambda: closed(lambda: None),
]


class FunctionExample:
    """A function whose arguments, globals and closure change from call to call."""

    changes = tuple(CHANGES)

    def __init__(self, choice: random.Random) -> None:
        globals().update(GAIN=1, OFFSET=torch.ones(3), helper=_HELPER)
        LIST[:] = [1.0, "sin"]
        TABLE.clear()
        TABLE.update(p=1, q=2)
        Switch.level = 1
        _forget(Switch, "extra")
        BAG.level, BAG.inner, NUMBERS[:] = 1, types.SimpleNamespace(level=2), [1.0, 2.0]
        QUEUE.clear()
        QUEUE.extend([1, 2])
        kept.gain = 2  # type: ignore[attr-defined]
        vars(SWITCH).clear()
        SWITCH.__init__()  # type: ignore[misc]
        torch.set_float32_matmul_precision("highest")
        self.function: Any = choice.choice(FUNCTIONS)()
        if self.function.__kwdefaults__:
            self.function.__kwdefaults__ = {"scale": 1.0, "how": "sin", "settings": None}
        self.call: Any = self.function
        self.dynamic = choice.choice([None, None, True, False])

    def compile(self) -> None:
        with foregrad.config.override(recompile_limit=10_000, path_limit=10_000):
            self.call = foregrad.compile(self.function, backend="eager", dynamic=self.dynamic)

    def change(self, index: int, choice: random.Random) -> None:
        CHANGES[index](self, choice)

    def live_on(self, choice: random.Random) -> None:
        """Functions have no copies."""

    def observe(self, choice: random.Random) -> dict[str, Any]:
        """One call: what it returns or raises, and all that it changes."""
        args, kwargs = _call(choice, may_mark=self.function is not sizes)  # that needs some of its sizes as numbers
        context, backward = choice.choice(CONTEXTS), choice.random() < 0.7
        given = _tensors((args, OrderedDict(kwargs)), "given")
        reached = {"OFFSET": OFFSET} | {
            f"cell {i}": c.cell_contents for i, c in enumerate(self.function.__closure__ or ())
        }
        leaves = {**given, **{k: v for k, v in reached.items() if isinstance(v, torch.Tensor)}}
        for value in leaves.values():
            if isinstance(value, torch.Tensor) and value.is_leaf and not value.is_inference():
                value.grad = None
        seen: dict[str, Any] = {}
        try:
            with context():
                out = self.call(*args, **kwargs)
            flat = _tensors(out, "out")
            seen |= flat
            for name, value in flat.items():
                if isinstance(value, torch.Tensor):
                    seen[f"{name} is"] = [k for k, v in given.items() if v is value]
            y = out["y"]
            if backward and y.requires_grad and y.is_floating_point():
                y.sum().backward()
        except foregrad.errors.UnsupportedError:
            raise
        except Exception as error:
            seen["error"], seen["error text"] = type(error).__name__, str(error)
        for name, value in leaves.items():
            if isinstance(value, torch.Tensor):
                seen[name] = value
                seen[f"grad of {name}"] = value.grad if value.is_leaf and not value.is_inference() else None
        return seen


_HELPER = helper
