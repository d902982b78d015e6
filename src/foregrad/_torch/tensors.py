"""Facts about tensors that have no public name. Checked on torch 2.13.0."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .levels import bottom_of
from .native import native

__all__ = ["is_traceable_wrapper_subclass"]  # handed on


_C: Any = torch._C
share_memory = _C._is_alias_of
"""Whether two tensors have one storage; no Python frame, a tenth of a microsecond."""


def storage_key(tensor: torch.Tensor) -> int:
    """A number equal for tensors that share their memory."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except NotImplementedError:  # a transform's wrapper lies in the memory of the tensor inside
        key = bottom_of(tensor).untyped_storage()._cdata
    return key


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The base of a view, as autograd records it; None for other tensors."""
    return tensor._base


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """`.grad` of a leaf, or of a tensor that retains it; None for any other.

    `grad_fn` and `is_leaf` of a view are not read: if the base was written, both regenerate its history, or raise.
    """
    if tensor.retains_grad:
        return tensor.grad
    if tensor._is_view() and tensor.requires_grad:
        with warnings.catch_warnings():  # one that is no leaf
            warnings.simplefilter("ignore")
            return tensor.grad
    return tensor.grad if tensor.is_leaf else None


def is_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view to autograd."""
    return tensor._is_view()


def version_of(tensor: torch.Tensor) -> int:
    """The version counter: the number of in-place writes to the tensor's memory."""
    return tensor._version


def version_unseen(tensor: torch.Tensor) -> int:
    """The version counter, read unseen by torch-function modes."""
    with torch._C.DisableTorchFunction():
        return tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor, and of all tensors that share it, to `version`."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A view with `dtype`, as a base for views; None if the memory is no whole number of elements."""
    if tensor.dtype is dtype:
        return tensor
    size = tensor.untyped_storage().nbytes()
    if size % dtype.itemsize or size % tensor.dtype.itemsize:
        return None
    return tensor.as_strided((size // tensor.dtype.itemsize,), (1,), 0).view(dtype)


def share_counters(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a version counter, as after `detach`.

    The C++ part compares the counters. Without it the answer is found by a trial write: Python has no other way.
    Inference tensors have no counter.
    """
    module = native()
    if module is not None:
        shared: bool = module.share_counters(a, b)
        return shared
    if a.is_inference() or b.is_inference():
        return False
    version, other = a._version, b._version
    torch.autograd.graph.increment_version(a)
    moved = b._version != other
    torch._C._autograd._unsafe_set_version_counter((a,), (version,))
    return moved


def history_of(tensor: torch.Tensor) -> Any:
    """The tensor's `grad_fn`; None also for a view that autograd refuses to use."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a leaf that requires grad; a view made under no_grad may be one through its base."""
    return tensor.requires_grad and is_usable(tensor) and tensor.is_leaf


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """The dtype, and whether the tensor is conjugated, and negated: metadata beyond the strides."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def leads_to_base(view: torch.Tensor) -> bool:
    """Whether gradients of a view go to its base."""
    return leads_to(view, base_of(view))


def leads_to(tensor: torch.Tensor, base: Any) -> bool:
    """Whether gradients of a tensor go to `base`, by operators of one argument."""
    end, node = history_of(base), history_of(tensor)
    while node is not None:
        if node is end or getattr(node, "variable", None) is base:
            return True
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


def is_usable(tensor: torch.Tensor) -> bool:
    """False for a view with a base that was since written in a way that autograd can't follow: most uses raise."""
    try:
        tensor.grad_fn  # noqa: B018
        return True
    except RuntimeError:
        return False


def allows_writes(tensor: torch.Tensor) -> bool:
    """False for views made under no_grad, and for one of several views made at once: in-place writes raise."""
    if not tensor._is_view():
        return True
    meta = torch._C._autograd._get_creation_meta(tensor)
    return bool(meta == torch._C._autograd.CreationMeta.DEFAULT)


def is_no_grad_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view that was taken under no_grad."""
    if not tensor._is_view():
        return False
    meta = torch._C._autograd._get_creation_meta(tensor)
    return bool(meta == torch._C._autograd.CreationMeta.NO_GRAD_MODE)


def copy_creation_meta(view: torch.Tensor, source: torch.Tensor) -> None:
    """Allow in-place writes to `view` exactly if they are allowed to `source`: views made under no_grad refuse them."""
    torch._C._autograd._set_creation_meta(view, torch._C._autograd._get_creation_meta(source))


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` that corresponds to `view` of its own base, for bases of any kind."""
    again: torch.Tensor = view._view_func_unsafe(base)
    return again


def is_inside_transform(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a torch.func transform's wrapper."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


_SMALLER = {torch.int64: torch.int8, torch.float64: torch.float16, torch.complex128: torch.complex64}


def is_number(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a number wrapped by PyTorch, the 2 of `x * 2`, with a dtype that promotes no other."""
    smaller = _SMALLER.get(tensor.dtype)
    if tensor.dim() or smaller is None or tensor.device.type != "cpu":
        return False
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.result_type(tensor, torch.zeros((), dtype=smaller)) is smaller


def is_symbolic_zero(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all zeros and has no memory."""
    return tensor._is_zerotensor()


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether the tensor only wraps other tensors, or handles its operators itself."""
    plain = torch.Tensor
    if type(tensor).__torch_dispatch__ is not plain.__torch_dispatch__:
        return True
    return is_traceable_wrapper_subclass(tensor)


def whole_memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over all of the memory that `tensor` lives in."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        whole = torch.empty(0, dtype=dtype, device=tensor.device)
        return whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def of_other_mode(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of the tensor that is an inference tensor exactly if `tensor` is none."""
    with torch.inference_mode(mode=not tensor.is_inference()), torch.no_grad():
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            alias = alias.conj()
        return alias._neg_view() if tensor.is_neg() else alias


# -------------------------------------------------------------------- marks
# The attributes that PyTorch itself hangs onto tensors: varying sizes, a wrapper that is a parameter, ...
#
# Checked on torch 2.11 to 2.15. They are no state of the user's program: Dynamo sets them as it looks at a tensor, and
# jagged nested tensors set them on their parts. The sizes and strides that a wrapper computes are kept on it.


_PREFIXES = ("_dynamo_", "_has_dynamo_", "_sym_sizes_capsule", "_sym_strides_capsule")
_NAMES = frozenset({"_is_param", "_specialize_on"})


def is_mark(name: object) -> bool:
    """Whether a tensor's attribute of the name is PyTorch's."""
    return isinstance(name, str) and (name in _NAMES or name.startswith(_PREFIXES))


def marked_in_torch(tensor: torch.Tensor) -> dict[int, tuple[int | None, int | None]]:
    """The dimensions marked by PyTorch's own `mark_dynamic`, with their least and greatest size."""
    ranges = getattr(tensor, "_dynamo_dynamic_range", ())
    return {one.dim % tensor.dim(): (one.min, one.max) for one in ranges}


def without_marks(table: dict[Any, Any]) -> dict[Any, Any]:
    """The attributes that the user gave a tensor."""
    return {name: value for name, value in [*table.items()] if not is_mark(name)} if table else {}
