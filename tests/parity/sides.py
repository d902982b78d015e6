"""One side of a comparison: a function, its arguments, and the steps that the oracle takes both sides through."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.observe import Labelled, attempt, has_storage, leaves_of, storage_key


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call, for functions that take keywords too."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A function that closes over tensors: `make()` builds it anew for each side, with the tensors to watch."""

    make: Callable[[], tuple[Callable[..., Any], dict[str, torch.Tensor]]]


@dataclasses.dataclass(frozen=True)
class Before:
    """What an input was before the call."""

    version: int | None
    history: Any
    nbytes: int | None


class Watched(TorchDispatchMode):
    """A mode that does nothing. Under one, PyTorch computes some things by formulas that suit any kind of tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Side:
    """Eager or compiled. The oracle takes both through the same steps and compares after each."""

    def __init__(self, name: str, fn: Any) -> None:
        self.name = name
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.state: list[Labelled] = []
        if isinstance(fn, Fresh):
            torch.manual_seed(0)
            fn, watched = fn.make()
            self.state = list(watched.items())
        elif isinstance(fn, torch.nn.Module):
            fn = copy.deepcopy(fn)
            named = [*fn.named_parameters(), *fn.named_buffers()]
            self.state = [(f"module.{name}", tensor) for name, tensor in named]
        self.fn = fn

    def prepare(self, make_args: Callable[[], Any], seed: int) -> None:
        """Make the arguments and note what they are before the call."""
        torch.manual_seed(seed)
        made = make_args()
        self.call = made if isinstance(made, Call) else Call(tuple(made))
        trees = [*leaves_of(self.call.args, "args"), *leaves_of(self.call.kwargs, "kwargs")]
        self.inputs = [(label, leaf) for label, leaf in trees if isinstance(leaf, torch.Tensor)] + self.state
        given = {id(tensor) for _, tensor in self.inputs}
        behind = [t for _, tensor in self.inputs for t in leaves_behind(tensor)]
        hidden = list({id(t): t for t in behind if id(t) not in given}.values())
        self.inputs += [(f"hidden leaf {i}", tensor) for i, tensor in enumerate(hidden)]
        self.before = [_before(tensor) for _, tensor in self.inputs]
        self.outputs: list[Labelled] = []
        self.out: Any = None

    def run(self, seed: int) -> None:
        """Call the function; `self.error` is what it raised."""
        torch.manual_seed(seed)
        self.error: Exception | None = None
        try:
            with self.context():
                self.out = self.fn(*self.call.args, **self.call.kwargs)
            self.outputs = [(p, leaf) for p, leaf in leaves_of(self.out, "out") if isinstance(leaf, torch.Tensor)]
        except Exception as error:
            self.error = error
        self.rng = torch.get_rng_state()

    @property
    def tensors(self) -> list[Labelled]:
        return self.inputs + self.outputs

    def versions(self) -> list[int | None]:
        """How far each input's version counter moved."""
        moved = []
        for (_, tensor), before in zip(self.inputs, self.before, strict=True):
            now = version_of(tensor)
            moved.append(None if now is None or before.version is None else now - before.version)
        return moved

    def rewritten(self) -> list[bool]:
        """Whether each input's autograd history is another one than before the call."""
        pairs = zip(self.inputs, self.before, strict=True)
        return [attempt(lambda t=t: t.grad_fn) is not b.history for (_, t), b in pairs]

    def leaf_labels(self) -> list[str]:
        """The inputs that a gradient may be asked of: leaves, and non-leaves whose history still stands."""
        pairs = zip(self.inputs, self.rewritten(), strict=True)
        return [label for (label, t), new in pairs if t.requires_grad and not new]

    def root_labels(self) -> list[str]:
        """What a backward can start from: outputs and mutated inputs that require grad."""
        by_id: dict[int, str] = {}
        mutated = [pair for pair, new in zip(self.inputs, self.rewritten(), strict=True) if new]
        for label, tensor in self.outputs + mutated:
            if tensor.requires_grad and has_storage(tensor) and not is_cut_off(tensor):
                by_id.setdefault(id(tensor), label)
        return list(by_id.values())

    def views(self) -> set[str]:
        """The outputs that are views, or in the memory of another tensor."""
        found = {label for label, tensor in self.outputs if tensor._is_view()}
        for label, tensor in self.outputs:
            if any(other is not tensor and _in_one_memory(tensor, other) for _, other in self.inputs):
                found.add(label)
        return found

    def cut_off(self) -> bool:
        """Whether some output requires grad and no backward can start from it: the others are but a part."""
        return any(tensor.requires_grad and is_cut_off(tensor) for _, tensor in self.outputs)

    def coarseness(self, dtype: torch.dtype) -> int:
        """How many roundings of `dtype` are one of the coarsest type that the arguments have."""
        kinds = [t.dtype.to_real() for _, t in self.inputs if t.is_floating_point() or t.is_complex()]
        if not (dtype.is_floating_point or dtype.is_complex) or not kinds:
            return 1
        return max(1, round(max(torch.finfo(kind).eps for kind in kinds) / torch.finfo(dtype).eps))

    def pick(self, labels: list[str]) -> list[torch.Tensor]:
        by_label = dict(self.tensors)
        return [by_label[label] for label in labels]

    def unwatched(self) -> set[str]:
        """The outputs that share memory with a tensor that does not count writes to them, one of the two requiring grad.

        `.data` and `set_` give those. A write after the call changes what eager saved, behind the back of autograd:
        its gradients are then of other values than it computed with, and nobody can expect them.
        """
        found = set()
        for label, tensor in self.outputs:
            for _, other in self.tensors:
                differentiated = tensor.requires_grad or other.requires_grad
                if other is not tensor and differentiated and _in_one_memory(tensor, other):
                    found |= set() if _share_counters(tensor, other) else {label}
        return found

    def mutate_outputs(self, spared: set[str]) -> list[str]:
        """Change each distinct output in place; what each attempt raised, or 'done'."""
        results = []
        for _, tensor in {id(t): (label, t) for label, t in self.outputs if label not in spared}.values():
            results.append(attempt(lambda t=tensor: _change(t)))
        return results

    def forget_grads(self) -> None:
        for _, tensor in self.inputs:
            if tensor.is_leaf:
                tensor.grad = None


def is_cut_off(tensor: torch.Tensor) -> bool:
    """Whether no backward can start at a view that says it requires grad.

    It was made under no_grad, or its history may not be asked for since its base was changed in place.
    """
    history = attempt(lambda: tensor.grad_fn)
    return tensor._is_view() and (history is None or isinstance(history, str))


def _in_one_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return has_storage(a) and has_storage(b) and storage_key(a) == storage_key(b)


def _share_counters(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_inference() or b.is_inference():
        return True
    before, other = a._version, b._version
    torch.autograd.graph.increment_version(a)
    shared = b._version != other
    torch._C._autograd._unsafe_set_version_counter((a,), (before,))
    return shared


def _change(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(0.5)
    else:
        tensor.add_(1)
    return "done"


def _before(tensor: torch.Tensor) -> Before:
    nbytes = tensor.untyped_storage().nbytes() if has_storage(tensor) else None
    return Before(version_of(tensor), attempt(lambda: tensor.grad_fn), nbytes)


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def leaves_behind(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from `tensor` would reach, in a fixed order."""
    if not tensor.requires_grad or tensor.grad_fn is None:
        return []
    found, seen, todo = [], set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo.extend(parent for parent, _ in reversed(node.next_functions))
    return found


def tangent_for(root: torch.Tensor, style: str, generator: torch.Generator) -> torch.Tensor:
    """A cotangent for `root`, laid out like it, expanded from one number, or strided.

    The values are small halves: sums of them are exact, so that the order in which a kernel adds does not matter.
    """
    real = root.dtype.to_real() if root.is_complex() else root.dtype

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randint(-4, 5, (*shape, 2), generator=generator).to(torch.float32) / 2
        flat = torch.view_as_complex(numbers) if root.is_complex() else numbers[..., 0]
        return flat.to(root.dtype if not root.is_complex() else real.to_complex())

    shape = tuple(root.shape)
    if style == "expanded":
        return draw(()).expand(shape)
    if style == "strided":
        return draw((*shape, 2))[..., 0]
    like = torch.empty_like(root, requires_grad=False)
    return like.copy_(draw(shape))
