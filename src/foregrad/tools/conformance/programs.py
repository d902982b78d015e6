"""Small programs, each with one thing to put into a graph; compared with eager, graph by graph and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from .cases import Case, CaseProgram

Make = Callable[[], CaseProgram]

PROGRAMS: list[Case] = []


def numbers(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of the sizes, that require a gradient."""
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def _add(name: str, function: Callable[..., Any], make: Callable[[], Sequence[Any]], **settings: Any) -> None:
    _add_program(name, lambda: CaseProgram(function, tuple(make()), settings=settings))


def _add_program(name: str, make: Make) -> None:
    PROGRAMS.append(Case(name, lambda: [make()]))


# -------------------------------------------------------------------- sizes and strides

_add("layouts/transposed", lambda x, y: (x.t() * y).sin(), lambda: (numbers(3, 4), numbers(4, 3)))
_add("layouts/sliced", lambda x: x[1:, ::2].exp() * 2, lambda: (numbers(5, 8),))
_add("layouts/expanded", lambda x: x.expand(4, 3) * 2, lambda: (numbers(1, 3),))
_add(
    "layouts/an expanded argument", lambda x: (x * x).sum(0), lambda: (torch.randn(1, 3).expand(4, 3).requires_grad_(),)
)
_add(
    "layouts/channels last",
    lambda x, w: functional.conv2d(x, w).relu(),
    lambda: (torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_(), numbers(4, 3, 3, 3)),
)
_add("layouts/a result in other strides", lambda x: (x * 2).permute(2, 0, 1), lambda: (numbers(2, 3, 4),))
_add(
    "layouts/an argument that begins inside its memory",
    lambda x: x.cos() + 1,
    lambda: (torch.randn(10)[3:7].requires_grad_(),),
)
_add("sizes/a single number", lambda x, y: x * y + 1, lambda: (numbers(), numbers()))
_add("sizes/a single number and a matrix", lambda x, y: (x * y).sum(), lambda: (numbers(), numbers(2, 3)))
_add("sizes/no elements", lambda x: x.sin().sum(0), lambda: (numbers(0, 3),))
_add("sizes/a product over no elements", lambda x, y: x @ y, lambda: (numbers(2, 0), numbers(0, 3)))
_add("sizes/concatenated with no elements", lambda x, y: torch.cat([x, y]) * 2, lambda: (numbers(0, 3), numbers(2, 3)))
_add("sizes/one element", lambda x: x.mean(), lambda: (numbers(1),))
_add("symbolic sizes/elementwise", lambda x, y: (x * y).tanh(), lambda: (numbers(3, 5), numbers(3, 5)), dynamic=True)
_add("symbolic sizes/a size as a number", lambda x: x.sum(0) / x.shape[0], lambda: (numbers(3, 5),), dynamic=True)
_add("symbolic sizes/reshaped", lambda x: (x * 2).reshape(-1, 2).sum(1), lambda: (numbers(4, 6),), dynamic=True)
_add("symbolic sizes/attention", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v,
     lambda: (numbers(2, 5, 4), numbers(2, 5, 4), numbers(2, 5, 4)), dynamic=True)  # fmt: skip

# -------------------------------------------------------------------- dtypes

_add("dtypes/a boolean result", lambda x: (x * 2, x > 0), lambda: (numbers(6),))
_add("dtypes/whole numbers", lambda x, i: (x * i, i // 2), lambda: (numbers(6), torch.arange(6)))
_add("dtypes/whole numbers past float", lambda i: i * 3 + 1, lambda: (torch.tensor([2**53 + 1, -(2**60) - 1]),))
_add("dtypes/bytes that wrap around", lambda i: i + 200, lambda: (torch.tensor([100, 255], dtype=torch.uint8),))
_add("dtypes/double", lambda x: x.sin().cumsum(0), lambda: (numbers(6, dtype=torch.float64),))
_add("dtypes/half", lambda x, w: functional.linear(x, w).relu(),
     lambda: (numbers(3, 4, dtype=torch.bfloat16), numbers(5, 4, dtype=torch.bfloat16)))  # fmt: skip
_add(
    "dtypes/complex",
    lambda x, y: (x * y).abs().sum(),
    lambda: (numbers(4, dtype=torch.complex64), numbers(4, dtype=torch.complex64)),
)
_add("dtypes/cast and back", lambda x: (x.to(torch.float64) * 2).to(torch.float32).exp(), lambda: (numbers(6),))
_add("dtypes/layer norm of bfloat16 with a float32 weight", lambda x, w: functional.layer_norm(x, (8,), w),
     lambda: (numbers(3, 8, dtype=torch.bfloat16), numbers(8)))  # fmt: skip
_add(
    "numbers/not a number goes through",
    lambda x: (x.relu(), x.amax(), x.clamp(-1, 1)),
    lambda: (torch.tensor([1.0, torch.nan, -2.0]),),
)
_add("numbers/division by zero", lambda x, y: x / y, lambda: (torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3)))
_add("numbers/minus zero", lambda x: (x * -1.0, torch.copysign(torch.ones(2), x)), lambda: (torch.tensor([0.0, -0.0]),))
_add(
    "numbers/numbers that overflow",
    lambda x: (torch.logsumexp(x, 0), torch.softmax(x, 0)),
    lambda: (torch.tensor([1000.0, 999.0]).requires_grad_(),),
)


# -------------------------------------------------------------------- results and gradients


def _autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.layer_norm(functional.linear(x, w), (5,)).float()


def _frozen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.gelu(functional.linear(x, w))


_add("dtypes/autocast", _autocast, lambda: (numbers(3, 4), numbers(5, 4)))
_add("results/the argument itself", lambda x: (x, x * 2), lambda: (numbers(3),))
_add("results/one value twice", lambda x: (x * 2,) * 2, lambda: (numbers(3),))
_add("results/a constant", lambda x: (x * 2, torch.ones(2)), lambda: (numbers(3),))
_add("results/None and numbers between", lambda x: (x.sin(), None, 3, x.cos()), lambda: (numbers(3),))
_add("results/many", lambda x: tuple(x * i for i in range(20)), lambda: (numbers(3),))
_add("results/several of one operator", lambda x: torch.split(x * 2, 2), lambda: (numbers(6),))
_add("results/values and positions", lambda x: torch.topk(x * 2, 2), lambda: (numbers(6),))
_add("gradients/None for an argument that is not used", lambda x, y: x.sin(), lambda: (numbers(3), numbers(3)))
_add("gradients/None for a frozen weight", _frozen, lambda: (numbers(3, 4), numbers(5, 4, grad=False)))
_add(
    "gradients/None first",
    lambda w, x: functional.linear(x, w).tanh(),
    lambda: (numbers(5, 4, grad=False), numbers(3, 4)),
)
_add("gradients/None through detach", lambda x, y: x * y.detach(), lambda: (numbers(3), numbers(3)))
_add("gradients/a result without one", lambda x: (x * 2, x.detach() * 3, x.argmax()), lambda: (numbers(3),))
_add("gradients/an argument used twice", lambda x: x * x + x.sin(), lambda: (numbers(3),))
_add("gradients/the gradient is an argument", lambda x: x + 1, lambda: (numbers(3),))
_add("gradients/summed over what was broadcast", lambda x, b: x * b, lambda: (numbers(4, 3), numbers(3)))
_add("gradients/gathered twice", lambda x, i: x[i], lambda: (numbers(4, 3), torch.tensor([1, 1, 2])))
_add(
    "gradients/a mean of a ReLU of a product",
    lambda x, w: functional.linear(x, w).relu().mean(),
    lambda: (numbers(3, 4), numbers(5, 4)),
)

# -------------------------------------------------------------------- views and writes


def _writes_inside(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1:].add_(1)
    y.view(-1)[0] = 5
    return y


def _writes_its_argument(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def _writes_a_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1].copy_(y)
    return x.sum() * y


def _two_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y[0], y[1:]


def _with_its_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.sin()
    return y, y.t()


def _buffer() -> CaseProgram:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    return CaseProgram(model, (torch.randn(2, 3, 6, 6),))


def _own_constant() -> CaseProgram:
    table = torch.tensor([1.0, 2.0, 3.0])
    return CaseProgram(lambda x: x * table + torch.tensor([0.5, 0.0, 1.0]), (numbers(3),))


def _tied() -> CaseProgram:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.embed(ids))

    return CaseProgram(Tied(), (torch.tensor([1, 3, 3]),))


_add("views/of an argument", lambda x: x.view(-1)[1:], lambda: (numbers(2, 3),))
_add("views/of a value inside", lambda x: (x * 2).view(-1), lambda: (numbers(2, 3),))
_add("views/two of one value", _two_views, lambda: (numbers(3, 2),))
_add("views/a result and its view", _with_its_view, lambda: (numbers(3, 2),))
_add("views/as_strided", lambda x: (x * 2).as_strided((2, 2), (1, 2)), lambda: (numbers(5),))
_add("views/diagonal", lambda x: (x * 2).diagonal() + 1, lambda: (numbers(3, 3),))
_add("writes/inside", _writes_inside, lambda: (numbers(2, 2),))
_add("writes/an argument", _writes_its_argument, lambda: (numbers(3, grad=False), numbers(3)))
_add("writes/an argument, in the graph", _writes_its_argument, lambda: (numbers(3, grad=False), numbers(3, grad=False)),
     keep_inference_input_mutations=True)  # fmt: skip
_add("writes/part of an argument", _writes_a_part, lambda: (numbers(2, 3, grad=False), numbers(3)))
_add_program("writes/the statistics of a batch norm", _buffer)
_add_program("constants/tensors of the program's own", _own_constant)
_add_program("constants/a tied weight", _tied)
_add("constants/made inside", lambda x: x * torch.arange(3) + torch.full((3,), 2.0), lambda: (numbers(3),))
_add("constants/only constants", lambda x: torch.zeros(3) + 1, lambda: (numbers(3, grad=False),))

# -------------------------------------------------------------------- what compilers fuse


def _read_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x + y
    return total.relu() * total


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax((scores * 0.5).masked_fill(mask, -torch.inf), -1)


_add("fusions/a sum and a ReLU", lambda x, y: (x + y).relu(), lambda: (numbers(3, 4), numbers(3, 4)))
_add("fusions/a sum and a ReLU, broadcast", lambda x, y: (x + y).relu(), lambda: (numbers(4), numbers(3, 4)))
_add("fusions/a sum and a ReLU, of two dtypes", lambda x, i: (x + i).relu(), lambda: (numbers(4), torch.arange(4)))
_add(
    "fusions/a sum with a factor, and a ReLU",
    lambda x, y: torch.add(x, y, alpha=2).relu(),
    lambda: (numbers(4), numbers(4)),
)
_add("fusions/a sum that is read twice", _read_twice, lambda: (numbers(3, 4), numbers(3, 4)))
_add("fusions/a bias and a GELU", lambda x, b: functional.gelu(x + b), lambda: (numbers(3, 4), numbers(4)))
_add("fusions/a gated SiLU", lambda x, y: functional.silu(x) * y, lambda: (numbers(3, 4), numbers(3, 4)))
_add(
    "fusions/a residual and a layer norm",
    lambda x, y: functional.layer_norm(x + y, (4,)),
    lambda: (numbers(3, 4), numbers(3, 4)),
)
_add("fusions/a scaled and masked softmax", _masked, lambda: (numbers(3, 4), torch.eye(3, 4, dtype=torch.bool)))
