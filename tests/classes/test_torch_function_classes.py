"""Tensors of classes with `__torch_function__` alone: compiled, of the type and with the attributes that eager gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedTensorError


class Default(torch.Tensor):
    """As `as_subclass` makes them."""


class Switched(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class WithMeta(torch.Tensor):
    """Hands its attributes on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, WithMeta):
            for arg in args:
                if isinstance(arg, WithMeta):
                    result.__dict__.update(arg.__dict__)
        return result

    def twice(self) -> WithMeta:
        made = self * 2
        made.meta = {**self.meta, "twice": True}
        return made


class Counting(Default):
    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.count += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Unwrapping(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Off(torch.Tensor):
    """Switches torch functions off, as code for older versions does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if isinstance(result, torch.Tensor) and type(result) is not cls else result


CLASSES = [Default, Switched, WithMeta, Counting, Unwrapping, Off]


def values(*shape: int, of: type = Default, **attributes: Any) -> Any:
    made = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).as_subclass(of)
    made.__dict__.update(attributes)
    return made


def described(value: Any) -> Any:
    """Something with tensors in it, to compare."""
    if isinstance(value, torch.Tensor):
        attributes = {name: described(own) for name, own in value.__dict__.items()}
        plain = value.as_subclass(torch.Tensor)
        return type(value), plain.tolist(), plain.stride(), plain.requires_grad, attributes
    if isinstance(value, dict):
        return type(value), {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(item) for item in value]
    return type(value), value


def check(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], calls: int = 2) -> Any:
    """A function gives what it gives in eager, compiled, in each of the calls; what it is given is left the same."""
    fast = foregrad.compile(function, backend="eager")
    for _ in range(calls):
        expected_of, given = make(), make()
        expected = function(*expected_of)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ForegradWarning)
            result = fast(*given)
        assert described(result) == described(expected)
        assert described(given) == described(expected_of)
    assert foregrad.explain_recompiles(fast).eager == ()
    return fast


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_module(cls: type, requires_grad: bool) -> None:
    """A network that is called with such a batch; its gradients, and that of the batch."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    fast = foregrad.compile(model, backend="eager")
    found = []
    for run in (model, fast, model, fast):
        batch = values(2, 3, of=cls)
        batch.requires_grad_(requires_grad)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ForegradWarning)
            result = run(batch)
        result.pow(2).sum().backward()
        found.append((described(result), described([p.grad for p in model.parameters()]), described(batch.grad)))
    assert found[1] == found[0]
    assert found[3] == found[2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: (x[0], x.t(), x.unbind(0), x.chunk(2)),
        lambda x: [1 - x, -x, x > 1, x**2, x @ x.t(), x == x],
        lambda x: (x.max(dim=0), torch.cat([x, x * 2]), torch.stack([x, x])),
        lambda x: x.as_subclass(torch.Tensor) * 2,
        lambda x: (x.shape, len(x), x.ndim, x.dtype, x.stride(), type(x), isinstance(x, Default)),
        lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=2),
        lambda x: (torch.zeros_like(x), x.new_ones(2), x.detach(), x.clone()),
        lambda x: x.sum().item(),
        lambda x: x * 2 if x.sum() > 3 else x,
        lambda x: {"rows": [row * 2 for row in x]},
    ],
)
@pytest.mark.parametrize("cls", [Default, WithMeta])
def test_functions(cls: type, function: Callable[..., Any]) -> None:
    check(function, lambda: (values(2, 3, of=cls),))


def test_the_same_object() -> None:
    """A result that is the argument is that very tensor, written to or not; so is a list with such in it."""
    fast = foregrad.compile(lambda x, xs: (x.add_(1), xs), backend="eager")
    for _ in range(2):
        x, xs = values(2), [values(2)]
        result = fast(x, xs)
        assert result[0] is x
        assert result[1] is xs
        assert x.tolist() == [2.0, 3.0]


def test_in_place_on_what_it_makes() -> None:
    def function(x: Any) -> Any:
        made = x.clone()
        made += 1
        made[0] = 5
        made[:, 1] *= 2
        return made

    check(function, lambda: (values(2, 3),))


def test_mixed_classes() -> None:
    """The subclass is asked first; plain tensors take part."""
    check(
        lambda x, y, z: [x + y, y + x, x + z, z, torch.where(x > z, x, z)],
        lambda: (values(3), values(3, of=Counting), torch.ones(3)),
    )


def test_made_inside() -> None:
    check(lambda x: x.as_subclass(Default) * 2, lambda: (torch.ones(2, 3),))
    check(lambda x: torch.Tensor._make_subclass(Default, x) * 2, lambda: (torch.ones(2, 3),))
    check(lambda x: {"a": x * 2, "b": (x * 2).as_subclass(WithMeta).sum()}, lambda: (torch.ones(2, 3),))


def test_attributes() -> None:
    """They come out as they go in, are guarded, and are written to."""
    check(lambda x: (x * 2, x.twice()), lambda: (values(2, of=WithMeta, meta={"a": [1], "affine": torch.eye(2)}),))

    def by_kind(x: Any) -> Any:
        x.meta["seen"] = x.meta.get("seen", 0) + 1
        x.new = [1]
        return x * 2 if x.meta["kind"] == "CT" else x * 3

    for kind in ("CT", "MR"):
        check(by_kind, lambda kind=kind: (values(2, of=WithMeta, meta={"kind": kind}),))
    fast = foregrad.compile(lambda x: x * x.scale, backend="eager")
    assert [fast(values(1, of=WithMeta, scale=scale)).item() for scale in (2, 3, 2)] == [2.0, 3.0, 2.0]
    batch = values(2, of=WithMeta, meta={"kind": "CT"})
    assert foregrad.compile(lambda x: x + 1, backend="eager")(batch).meta is batch.meta


def test_another_class_is_another_graph() -> None:
    fast = foregrad.compile(lambda x: x * 2, backend="eager")
    for given in (torch.ones(2), values(2), values(2, of=WithMeta), torch.ones(2), values(2, of=Switched)):
        assert described(fast(given)) == described(given * 2)


def test_what_the_class_counts() -> None:
    fast = foregrad.compile(lambda x: x.exp().sum(), backend="eager")
    counts = []
    for run in (lambda x: x.exp().sum(), fast, fast, fast):
        batch, Counting.count = values(2, of=Counting), 0
        run(batch)
        counts.append(Counting.count)
    assert len(set(counts)) == 1


def test_no_grad_and_views() -> None:
    """A view of the argument is one, and writes to it arrive there."""
    fast = foregrad.compile(lambda x: x[0], backend="eager")
    for _ in range(2):
        batch = values(2, 3)
        with torch.no_grad():
            fast(batch).zero_()
        assert batch.tolist() == [[0.0, 0.0, 0.0], [4.0, 5.0, 6.0]]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


def _writes(batch: dict[str, Any]) -> Any:
    batch["out"] = batch["image"] * 2
    return batch


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x: x.requires_grad_(), lambda: values(2)),
        (lambda x: x if x.grad is None else x * 2, lambda: values(2)),
        (lambda x: Double.apply(x), lambda: values(2)),
        (_writes, lambda: {"image": values(2)}),
    ],
)
def test_runs_eagerly(function: Callable[..., Any], make: Callable[[], Any]) -> None:
    """What can't be compiled gives what eager does, with a warning."""
    fast = foregrad.compile(function, backend="eager", on_unsupported="eager")
    given, of_eager = make(), make()
    with pytest.warns(ForegradWarning):
        result = fast(given)
    assert described([result, given]) == described([function(of_eager), of_eager])
    assert (result is given) is (function(of_eager) is of_eager)
    assert described(fast(make())) == described(function(make()))


@pytest.mark.parametrize("cls", [Default, Counting])
@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: x[0], lambda x: x, lambda x: (x + 1, x.sum())])
def test_through_dynamo(cls: type, function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    fast = torch.compile(function, backend="foregrad", options={"backend": "eager"})
    for _ in range(2):
        given = values(2, 3, of=cls)
        assert described(fast(given)) == described(function(given))


def test_under_transforms() -> None:
    """Calls like this run eagerly."""
    for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
        fast = foregrad.compile(lambda x: x * 2, backend="eager", on_unsupported="eager")
        with pytest.warns(ForegradWarning):
            result = transform(fast)(values(2, 3))
        assert described(result) == described(transform(lambda x: x * 2)(values(2, 3)))


def test_one_that_the_function_reaches_by_itself_is_refused_by_name():
    """By an operator's sign too, where Python would take a `TypeError` for "not that way round"."""
    weight = torch.randn(3, 3).as_subclass(Default)
    for f in (lambda x: x @ weight, lambda x: torch.matmul(x, weight)):
        with pytest.raises(UnsupportedTensorError, match="`closed-over weight` is a Default"):
            foregrad.compile(f, backend="eager", on_unsupported="raise")(torch.randn(2, 3))
