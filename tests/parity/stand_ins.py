"""Things to put in place of `foregrad.compile`: one that is right, one that is PyTorch's own, many that are wrong.

The harness is tested with them: `identity` must pass everywhere, and each of `BROKEN` must be caught by the
comparison that its entry in `tests/parity/test_oracle.py` names. A broken one does what an ahead-of-time compiler
gets wrong in practice.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Compile = Callable[[Any], Any]


def identity(fn: Any) -> Any:
    return fn


def upstream(fn: Any) -> Any:
    """PyTorch's AOTAutograd with the same kind of backend: what a mature implementation scores here."""
    from functorch.compile import aot_function, aot_module, nop

    return aot_module(fn, fw_compiler=nop) if isinstance(fn, torch.nn.Module) else aot_function(fn, fw_compiler=nop)


def wrapper(make_result: Callable[..., Any]) -> Compile:
    """A stand-in from `make_result(fn, args, kwargs)`."""

    def compile(fn: Any) -> Any:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return make_result(fn, args, kwargs)

        return call

    return compile


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_outputs(change: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]) -> Compile:
    """A stand-in that replaces each output tensor, told the arguments."""

    def make_result(fn: Any, args: Any, kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: change(t, _tensors((args, kwargs))), out)

    return wrapper(make_result)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _is_one_of(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)


class _Backward(torch.autograd.Function):
    """The identity, with a backward that someone got wrong."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.change = change
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        return ctx.change(tangent), None


def _with_backward(change: Callable[[torch.Tensor], Any]) -> Compile:
    return _on_outputs(lambda t, _: _Backward.apply(t, change) if t.requires_grad else t)


# ------------------------------------------------------------------------------------------ wrong forwards
def _view_becomes_copy(tensor: torch.Tensor, args: list[torch.Tensor]) -> torch.Tensor:
    aliases = any(_share(tensor, other) for other in args) and not _is_one_of(tensor, args)
    return tensor.clone() if aliases else tensor


def _input_becomes_copy(tensor: torch.Tensor, args: list[torch.Tensor]) -> torch.Tensor:
    return tensor.clone() if _is_one_of(tensor, args) else tensor


def _input_becomes_view(tensor: torch.Tensor, args: list[torch.Tensor]) -> torch.Tensor:
    return tensor.view_as(tensor) if _is_one_of(tensor, args) else tensor


def _drop_mutations(fn: Any, args: Any, kwargs: Any) -> Any:
    return fn(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs)


def _mutate_without_version(fn: Any, args: Any, kwargs: Any) -> Any:
    with torch.autograd._unsafe_preserve_version_counter(tuple(_tensors(args))):
        return fn(*args, **kwargs)


def _mutate_without_grad(fn: Any, args: Any, kwargs: Any) -> Any:
    """The data is written back with no history: gradients stop at the mutated argument."""
    copies = pytree.tree_map_only(torch.Tensor, torch.clone, args)
    out = fn(*copies, **kwargs)
    for old, new in zip(_tensors(args), _tensors(copies), strict=True):
        if new._version:
            old.detach().copy_(new.detach())
    return out


def _mutate_too_much(fn: Any, args: Any, kwargs: Any) -> Any:
    out = fn(*args, **kwargs)
    for tensor in _tensors(args):
        tensor.detach().add_(1)
    return out


def _mutate_first_alias_only(fn: Any, args: Any, kwargs: Any) -> Any:
    """Arguments that share memory are treated as strangers: each gets back its own result."""
    copies = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
    out = fn(*copies, **kwargs)
    for old, new in zip(_tensors(args), _tensors(copies), strict=True):
        if new._version:
            old.detach().copy_(new)
    return out


def _other_strides(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.numel() < 2:
        return tensor
    return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)


def _extra_random(fn: Any, args: Any, kwargs: Any) -> Any:
    out = fn(*args, **kwargs)
    torch.rand(1)
    return out


def _kept_random(fn: Any, args: Any, kwargs: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        return fn(*args, **kwargs)


def _frozen(fn: Any) -> Any:
    """Results of the first call serve all."""
    memory: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not memory:
            memory.append(copy.deepcopy(pytree.tree_map_only(torch.Tensor, torch.detach, fn(*args, **kwargs))))
        return memory[0]

    return call


def _swallow_errors(fn: Any, args: Any, kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except Exception:
        return None


def _other_error(fn: Any, args: Any, kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        raise KeyError("lost") from error


def _shared_outputs(fn: Any, args: Any, kwargs: Any) -> Any:
    """All outputs of one size in one buffer, one after the other."""
    out = fn(*args, **kwargs)
    tensors = _tensors(out)
    if len(tensors) < 2 or any(t.requires_grad for t in tensors):
        return out
    buffer = torch.cat([t.reshape(-1) for t in tensors])
    parts = iter(buffer.split([t.numel() for t in tensors]))
    return pytree.tree_map_only(torch.Tensor, lambda t: next(parts).view(t.shape), out)


def _separate_outputs(fn: Any, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, fn(*args, **kwargs))


def _zeros_for_none(fn: Any, args: Any, kwargs: Any) -> Any:
    out = fn(*args, **kwargs)
    zero = sum((t.sum() * 0 for t in _tensors(args) if t.requires_grad), torch.zeros(()))
    add = lambda t: t + zero.to(t.dtype) if t.requires_grad else t
    return pytree.tree_map_only(torch.Tensor, add, out)


def _nan_signs(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    return torch.where(tensor == 0, tensor.abs(), tensor) if tensor.is_floating_point() else tensor


def _list_to_tuple(fn: Any, args: Any, kwargs: Any) -> Any:
    out = fn(*args, **kwargs)
    return tuple(out) if isinstance(out, list) else out


def _number_to_tensor(fn: Any, args: Any, kwargs: Any) -> Any:
    out = fn(*args, **kwargs)
    return pytree.tree_map_only((int, float), torch.tensor, out)


def _input_with_storage_offset(tensor: torch.Tensor, args: list[torch.Tensor]) -> torch.Tensor:
    """A view of the right argument at the wrong place."""
    if not any(_share(tensor, other) for other in args) or _is_one_of(tensor, args) or not tensor.storage_offset():
        return tensor
    return tensor.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - 1)


# ----------------------------------------------------------------------------------------- wrong backwards
def _consume_random(tangent: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return tangent


def _change_tangent(tangent: torch.Tensor) -> torch.Tensor:
    result = tangent.clone()
    tangent.detach().clone().zero_()
    if not any(stride == 0 for stride in tangent.stride()):
        tangent.add_(1)
    return result


def _ignore_expanded(tangent: torch.Tensor) -> torch.Tensor:
    """Reads a tangent's memory as if it were contiguous."""
    if tangent.is_contiguous() or not tangent.numel():
        return tangent
    flat = torch.empty(0, dtype=tangent.dtype).set_(tangent.untyped_storage())
    return flat.repeat(tangent.numel())[: tangent.numel()].view(tangent.shape)


def _transpose_memory(tangent: torch.Tensor) -> torch.Tensor:
    return _other_strides(tangent, None)


BROKEN: dict[str, Compile] = {
    "view_becomes_copy": _on_outputs(_view_becomes_copy),
    "input_becomes_copy": _on_outputs(_input_becomes_copy),
    "input_becomes_view": _on_outputs(_input_becomes_view),
    "drop_mutations": wrapper(_drop_mutations),
    "mutate_without_version": wrapper(_mutate_without_version),
    "mutate_without_grad": wrapper(_mutate_without_grad),
    "mutate_too_much": wrapper(_mutate_too_much),
    "mutate_first_alias_only": wrapper(_mutate_first_alias_only),
    "other_strides": _on_outputs(_other_strides),
    "other_offset": _on_outputs(_input_with_storage_offset),
    "other_dtype": _on_outputs(lambda t, _: t.double() if t.dtype == torch.float32 else t),
    "other_values": _on_outputs(lambda t, _: t * 1.0000002 if t.is_floating_point() else t),
    "lost_signed_zeros": _on_outputs(_nan_signs),
    "lost_grad": _on_outputs(lambda t, _: t.detach()),
    "lost_history": _on_outputs(lambda t, _: t.detach().requires_grad_(t.requires_grad)),
    "extra_random": wrapper(_extra_random),
    "kept_random": wrapper(_kept_random),
    "frozen": _frozen,
    "swallow_errors": wrapper(_swallow_errors),
    "other_error": wrapper(_other_error),
    "shared_outputs": wrapper(_shared_outputs),
    "separate_outputs": wrapper(_separate_outputs),
    "list_to_tuple": wrapper(_list_to_tuple),
    "number_to_tensor": wrapper(_number_to_tensor),
    "zeros_for_none": wrapper(_zeros_for_none),
    "wrong_grad": _with_backward(lambda g: g * 2),
    "wrong_grad_strides": _with_backward(_transpose_memory),
    "random_in_backward": _with_backward(_consume_random),
    "changed_tangent": _with_backward(_change_tangent),
    "ignored_tangent_strides": _with_backward(_ignore_expanded),
    "no_grad_at_all": _with_backward(lambda g: None),
}

STAND_INS: dict[str, Compile] = {"identity": identity, "upstream": upstream, **BROKEN}
