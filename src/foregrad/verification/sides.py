"""One side of a comparison: a copy of the function and its arguments, called and differentiated.

A module and the arguments are copied, so that the user's stay as they are; a tensor that is no leaf becomes one. What a
plain function reaches by itself is not copied: tensors that it writes to are put back afterwards, other objects that it
changes are not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.nested import leaves_of, named_leaves
from .._torch.tensors import storage_key, version_of
from ..identity import IdSet
from .watched import copy_of_tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a call left: tensors by name, other results, facts about tensors, and the error that it raised, if any.

    `layouts`: for each tensor what can be seen besides values; `shared`: the pairs of names that share memory.
    """

    values: Mapping[str, Any]
    layouts: Mapping[str, str]
    shared: frozenset[tuple[str, str]]
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A function with arguments of its own. `copies`: by the id of an original, its copy."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: dict[int, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The arguments, the parameters and buffers, by name."""
        named = (*named_leaves(self.args, "args"), *named_leaves(self.kwargs, "kwargs"))
        by_name = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        if isinstance(self.function, torch.nn.Module):
            by_name |= {f"parameter {name}": value for name, value in self.function.named_parameters()}
            by_name |= {f"buffer {name}": value for name, value in self.function.named_buffers()}
        return by_name

    def run(self, call: Callable[..., Any], order: int, reached: Callable[[], Mapping[str, torch.Tensor]]) -> Outcome:
        """Call `call` (the function, or its compiled form) with the arguments, and differentiate `order` times.

        `reached()`: after the call, the tensors that the function reaches by itself.
        """
        inputs = self.tensors()
        versions = {name: _version(tensor) for name, tensor in inputs.items()}
        try:
            results = call(*self.args, **self.kwargs)
            own = IdSet(inputs.values())
            inputs |= {name: tensor for name, tensor in reached().items() if tensor not in own}
            leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad and tensor.is_leaf}
            outputs = dict(named_leaves(results, "out"))
            layouts = {name: _layout(value) for name, value in outputs.items() if isinstance(value, torch.Tensor)}
            shared = _shared({**outputs, **inputs})
            values: dict[str, Any] = {name: _kept(value) for name, value in outputs.items()}
            layouts |= {f"{n} afterwards": _layout(t) for n, t in inputs.items()}
            gradients = _differentiated(outputs, leaves, order)
        except Exception as error:
            return Outcome({}, {}, frozenset(), error)
        values |= gradients
        for name, tensor in inputs.items():
            if name not in versions or _version(tensor) != versions[name]:
                values[f"{name} afterwards"] = _kept(tensor)
        layouts |= {
            n: f"strides {tuple(g.stride())}"
            for n, g in gradients.items()
            if g is not None and g.layout is torch.strided
        }
        return Outcome(values, layouts, shared)


def make_side(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Side:
    """A side with copies of the arguments, and of the function where that is a module."""
    memo: dict[int, Any] = {}
    is_module = isinstance(function, torch.nn.Module)
    for tensor in leaves_of((args, kwargs)):
        if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
            memo[id(tensor)] = copy_of_tensor(tensor).requires_grad_(tensor.requires_grad)
    own: Any = function if is_module else None
    own, own_args, own_kwargs = copy.deepcopy((own, tuple(args), dict(kwargs)), memo)
    return Side(own if is_module else function, own_args, own_kwargs, memo)


def put_back(saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give tensors that were written the content of their copies."""
    with torch.no_grad():
        for tensor, content in saved:
            if not torch.is_inference(tensor) and not _same(tensor, content):
                tensor.copy_(content)


def _same(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    return tensor.shape != content.shape or bool(((tensor == content) | (tensor.isnan() & content.isnan())).all())


def _differentiated(outputs: Mapping[str, Any], leaves: Mapping[str, torch.Tensor], order: int) -> dict[str, Any]:
    """Gradients of the leaves, and of these gradients' random combination, up to `order`; None where there is none."""
    values: dict[str, Any] = {}
    roots = [t for t in outputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    prefix = ""
    for depth in range(1, order + 1):
        if not roots or not leaves:
            break
        tangents = [_tangent(root, generator) for root in roots]
        gradients: Any = torch.autograd.grad(
            roots, list(leaves.values()), tangents, allow_unused=True, create_graph=depth < order
        )
        prefix = "gradient of " + prefix
        values |= {
            prefix + name: None if gradient is None else _kept(gradient)
            for name, gradient in zip(leaves, gradients, strict=True)
        }
        roots = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    return values


def _tangent(root: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The cotangent of a root, equal on each side: 1 for a single number, as for `backward()`."""
    if root.dim() == 0:
        return torch.ones_like(root)
    drawn = torch.randn(root.shape, generator=generator, dtype=torch.float64)
    return drawn.to(root.device, root.dtype).contiguous()


def _kept(value: Any) -> Any:
    return copy_of_tensor(value) if isinstance(value, torch.Tensor) else value


def _version(tensor: torch.Tensor) -> int:
    return 0 if torch.is_inference(tensor) else version_of(tensor)


def _layout(tensor: torch.Tensor) -> str:
    strides = f"strides {tuple(tensor.stride())}" if tensor.layout is torch.strided else str(tensor.layout)
    return (
        f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, {strides}, "
        f"requires_grad={tensor.requires_grad}, is_leaf={tensor.is_leaf}"
    )


def _shared(tensors: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The pairs of tensors that share memory, and, as `(name, "is NAME")`, those that are one object."""
    groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            try:
                groups.setdefault(storage_key(tensor), []).append((name, tensor))
            except (RuntimeError, NotImplementedError):  # wrapper subclasses have none
                continue
    pairs = set()
    for members in groups.values():
        for i, (name, tensor) in enumerate(members):
            for other_name, other in members[i + 1 :]:
                pairs.add((name, f"is {other_name}" if other is tensor else other_name))
    return frozenset(pairs)
