"""Modules for random sequences (see sequences.py): what is called, in which contexts, and what changes in between."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import foregrad

GLOBALS: dict[str, Any] = {"gain": 1, "function": torch.sin}
WEIGHTS: list[Any] = [1.0, 2]


class Options:
    kind = "add"

    def __init__(self) -> None:
        self.scale: Any = 1.0


class Part(nn.Module):
    offset: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", None)
        self.register_parameter("gate", None)
        self.options = Options()
        self.counting = True
        self.steps: list[Any] = ["scale", "offset"]
        self.table: dict[str, Any] = {"a": 1.0, "b": 3.0}

    def twist(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        x = self.drop(self.linear(x))
        for step in self.steps:
            x = x * self.options.scale if step == "scale" else x + self.offset
        if self.counting and self.training:
            self.seen.add_(x.detach().mean(0).to(self.seen.dtype))
        if self.mask is not None:
            x = x * self.mask
        if self.gate is not None:
            x = x * self.gate
        if y is not None:
            x = x + y if self.options.kind == "add" else x * y
        for factor in self.table.values():
            x = (x + 1) * factor
        return self.norm(self.twist(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.depth = 2
        self.extra: Any = None
        self.named = nn.ModuleDict({"one": nn.Identity()})

    def forward(self, x: torch.Tensor, y: Any = None, inplace: bool = False) -> dict[str, Any]:
        if inplace:
            x.mul_(2)
        for part in self.parts[: self.depth]:
            x = part(x, y)
        for module in self.named.values():
            x = module(x)
        if self.extra is not None:
            x = x + self.extra
        total = sum((p.pow(2).sum() for n, p in self.named_parameters() if n.endswith("gate")), torch.ones(()))
        x = GLOBALS["function"](x) * GLOBALS["gain"] * WEIGHTS[0] + len(WEIGHTS)
        return {"x": x, "y": y, "view": x[0], "total": total.to(x.dtype) * x.sum()}


# ---------------------------------------------------------------------------------------------- changes to a module


def _set(get: Callable[[Any, random.Random], Any], name: str, *values: Any) -> Callable[[Any, random.Random], None]:
    def change(m: Any, r: random.Random) -> None:
        value = r.choice(values)
        setattr(get(m, r), name, value() if isinstance(value, types.LambdaType) else value)

    return change


def _part(m: Any, r: random.Random) -> Any:
    return r.choice(list(m.parts))


def _replace_method(m: Any, r: random.Random) -> None:
    part = _part(m, r)
    if "twist" in vars(part):
        del part.twist
    else:
        part.twist = types.MethodType(r.choice([lambda self, x: x * 2, lambda self, x: x.flip(0)]), part)


def _rebind_class(m: Any, r: random.Random) -> None:
    Part.offset = r.choice([0, 1, 0.5])


def _kind_of_class(m: Any, r: random.Random) -> None:
    Options.kind = r.choice(["add", "multiply"])


def _toggle_hook(m: Any, r: random.Random) -> None:
    linear = _part(m, r).linear
    hooks = [
        lambda: linear.register_forward_hook(lambda _m, _i, out: out * 2),
        lambda: linear.register_forward_pre_hook(lambda _m, args: (args[0] + 1,)),
        lambda: linear.register_full_backward_hook(lambda _m, gi, go: tuple(g and g * 2 for g in gi) if 0 else None),
        lambda: linear.register_full_backward_hook(lambda _m, gi, go: (None if gi[0] is None else gi[0] * 2,)),
        lambda: linear.weight.register_hook(lambda g: g * 3) if linear.weight.requires_grad else None,
        lambda: m.register_forward_hook(lambda _m, _i, out: {**out, "x": out["x"] * 2}),
    ]
    # Hooks are remembered with the example, so that they may go again.
    handle = r.choice(hooks)()
    if handle is not None:
        HANDLES.append(handle)


HANDLES: list[Any] = []


def _remove_hook(m: Any, r: random.Random) -> None:
    if HANDLES:
        HANDLES.pop(r.randrange(len(HANDLES))).remove()


def _parametrize(m: Any, r: random.Random) -> None:
    linear = _part(m, r).linear
    if torch.nn.utils.parametrize.is_parametrized(linear):
        torch.nn.utils.parametrize.remove_parametrizations(linear, "weight")
    else:
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", Doubled())


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _own(linear: nn.Linear) -> bool:
    return "weight" in linear._parameters


def _weight(value: Callable[[], torch.Tensor]) -> Callable[[Any, random.Random], None]:
    def change(m: Any, r: random.Random) -> None:
        linear = _part(m, r).linear
        if _own(linear):
            linear.weight = nn.Parameter(value())

    return change


def _data(*values: Callable[[], torch.Tensor]) -> Callable[[Any, random.Random], None]:
    def change(m: Any, r: random.Random) -> None:
        linear, value = _part(m, r).linear, r.choice(values)()
        if _own(linear):
            linear.weight.data = value

    return change


def _tie(m: Any, r: random.Random) -> None:
    if _own(m.parts[0].linear) and _own(m.parts[-1].linear):
        m.parts[0].linear.weight = m.parts[-1].linear.weight


def _gate(m: Any, r: random.Random) -> None:
    _part(m, r).gate = r.choice([None, nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.ones(1))])


def _reorder(m: Any, r: random.Random) -> None:
    table = _part(m, r).table
    table["a"] = table.pop("a")


def _layers(m: Any, r: random.Random) -> None:
    if r.random() < 0.5 and len(m.parts) > 2:
        del m.parts[-1]
    else:
        m.parts.append(Part())


def _named(m: Any, r: random.Random) -> None:
    if r.random() < 0.5 and "two" in m.named:
        del m.named["two"]
    else:
        m.named["two"] = r.choice([nn.Tanh(), nn.Identity(), nn.Softmax(-1)])


def _weights_list(m: Any, r: random.Random) -> None:
    WEIGHTS[0] = r.choice([1.0, 2.0, 1])
    if r.random() < 0.3:
        WEIGHTS.append(0)


def _anew(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(tensor) if tensor.is_floating_point() else tensor.clone()


def _clear(m: Any, r: random.Random) -> None:
    _part(m, r).linear._forward_hooks.clear()


CHANGES: list[Callable[[Any, random.Random], Any]] = [
    lambda m, r: m.train(r.random() < 0.5),
    lambda m, r: _part(m, r).train(r.random() < 0.5),
    lambda m, r: _part(m, r).drop.train(r.random() < 0.5),
    _set(lambda m, r: _part(m, r).drop, "p", 0.0, 0.25, 0.5),
    _set(lambda m, r: _part(m, r).options, "scale", 1.0, 2.0, 1, -0.0),
    _set(lambda m, r: _part(m, r).options, "kind", "add", "multiply"),
    _set(_part, "counting", True, False),
    _set(lambda m, r: m, "depth", 1, 2),
    _set(lambda m, r: m, "extra", None, 1, 2.0, lambda: torch.ones(3), lambda: torch.ones(3, dtype=torch.float64)),
    lambda m, r: setattr(m, "unread", r.random()),
    lambda m, r: GLOBALS.update(gain=r.choice([1, 2, 2.0])),
    lambda m, r: GLOBALS.update(function=r.choice([torch.sin, torch.tanh, torch.clone])),
    lambda m, r: _part(m, r).linear.bias is not None and _part(m, r).linear.requires_grad_(r.random() < 0.5),
    lambda m, r: _part(m, r).requires_grad_(r.random() < 0.5),
    _weight(lambda: torch.randn(3, 3)),
    _weight(lambda: torch.randn(3, 3).t()),
    _data(
        lambda: torch.randn(3, 3),
        lambda: torch.randn(3, 3).t(),
        lambda: torch.randn(4, 3)[1:],
        lambda: torch.randn(3, 6)[:, ::2],
    ),
    _set(lambda m, r: _part(m, r).linear, "bias", None, lambda: nn.Parameter(torch.randn(3))),
    _set(_part, "linear", lambda: nn.Linear(3, 3)),
    lambda m, r: m.parts.__setitem__(r.choice([0, 1]), Part()),
    _tie,
    _set(_part, "seen", lambda: torch.zeros(3), lambda: torch.zeros(3, 2)[:, 0]),
    lambda m, r: setattr(m.parts[0], "seen", m.parts[1].seen),
    _set(_part, "mask", None, lambda: torch.tensor([1.0, 0.0, 1.0]), lambda: torch.tensor([True, False, True])),
    _gate,
    lambda m, r: m.load_state_dict({k: _anew(v) for k, v in m.state_dict().items()}, assign=True),
    lambda m, r: m.load_state_dict({k: _anew(v) for k, v in m.state_dict().items()}),
    _toggle_hook,
    _toggle_hook,
    _remove_hook,
    _clear,
    lambda m, r: m.to(r.choice([torch.float32, torch.float64, torch.bfloat16])),
    _replace_method,
    _rebind_class,
    _kind_of_class,
    _reorder,
    lambda m, r: _part(m, r).table.update(b=r.choice([3.0, 4.0, 3])),
    lambda m, r: setattr(_part(m, r), "steps", r.choice([[], ["scale"], ["offset", "scale"]])),
    lambda m, r: _part(m, r).steps.append("offset"),
    _layers,
    _named,
    _weights_list,
    _parametrize,
]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _both(*contexts: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


CONTEXTS: list[Any] = [
    *[contextlib.nullcontext] * 6,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    lambda: torch.autocast("cpu", torch.float16),
    lambda: torch.autocast("xpu", torch.bfloat16),
    lambda: torch.autocast("cpu", enabled=False),
    lambda: _both(lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad),
    lambda: _both(torch.no_grad, torch.enable_grad),
    lambda: _default_dtype(torch.float64),
    _deterministic,
    lambda: torch.device("cpu"),
]


def arguments(r: random.Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a few shapes, layouts and kinds, some of them one and the same or overlapping."""
    rows = r.choice([1, 2, 4])
    memory = torch.randn(2 * rows, 3, dtype=dtype)
    x = r.choice([memory[:rows], torch.randn(rows, 3, dtype=dtype), torch.randn(3, rows, dtype=dtype).t()])
    if r.random() < 0.5:
        x = x.clone().requires_grad_()
        x = x if r.random() < 0.5 else x * 1
    leaf = x.requires_grad and x.is_leaf
    y = r.choice([None, 2, 2.0, x, memory[rows // 2 : rows // 2 + rows], torch.randn(3, dtype=dtype)])
    kwargs = {"inplace": True} if not leaf and r.random() < 0.3 else {}
    return ((x,), {"y": y, **kwargs}) if r.random() < 0.3 else ((x, y), kwargs)


class ModuleExample:
    """A module that changes between its calls. `compile()` before anything else where it is to be compiled."""

    changes = tuple(CHANGES)

    def __init__(self, choice: random.Random) -> None:
        GLOBALS.update(gain=1, function=torch.sin)
        WEIGHTS[:] = [1.0, 2]
        HANDLES.clear()
        Part.offset, Options.kind = 0, "add"
        self.model: Any = Whole()
        self.call: Any = self.model
        self.dynamic = choice.choice([None, None, True, False])
        self.is_compiled = False

    def compile(self) -> None:
        self.is_compiled = True
        with foregrad.config.override(recompile_limit=10_000, path_limit=10_000):
            self.call = foregrad.compile(self.model, backend="eager", dynamic=self.dynamic)

    def change(self, index: int, choice: random.Random) -> None:
        CHANGES[index](self.model, choice)

    def live_on(self, choice: random.Random) -> None:
        """Go on with a copy of the module, made in one of the ways there are."""
        remake = choice.choice([copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
        try:
            self.call = remake(self.call)
        except (AttributeError, pickle.PicklingError, TypeError, RuntimeError):
            return  # functions of this module that have no name can't be pickled, in either twin
        self.model = self.call

    def observe(self, choice: random.Random) -> dict[str, Any]:
        """One call: what it returns or raises, and all that it changes."""
        model = self.model
        dtype = next(iter(model.parameters())).dtype
        args, kwargs = arguments(choice, dtype)
        context, backward = choice.choice(CONTEXTS), choice.random() < 0.7
        model.zero_grad(set_to_none=True)
        seen: dict[str, Any] = {}
        try:
            with context():
                out = self.call(*args, **kwargs)
            seen["x"], seen["view"], seen["total"] = out["x"], out["view"], out["total"]
            seen["shares"] = out["y"] is kwargs.get("y", args[1] if len(args) > 1 else None)
            if backward and out["x"].requires_grad:
                out["x"].float().sum().backward()
        except foregrad.errors.UnsupportedError:
            raise
        except Exception as error:
            seen["error"], seen["error text"] = type(error).__name__, str(error)
        for index, value in enumerate((*args, *kwargs.values())):
            if isinstance(value, torch.Tensor):
                seen[f"argument {index}"] = value
                seen[f"grad of argument {index}"] = value.grad if value.is_leaf and not value.is_inference() else None
        seen |= {f"parameter {n}": p for n, p in model.named_parameters()}
        seen |= {f"grad of {n}": p.grad for n, p in model.named_parameters()}
        seen |= {f"buffer {n}": b for n, b in model.named_buffers()}
        return seen
