"""What can be observed of a tensor, and how two observations differ.

Everything here is a pure comparison: nothing is run, nothing is changed. The oracle gives pairs of lists of
(label, tensor), in the same order on both sides; the answer is a list of sentences, empty when nobody could
tell the two sides apart.

Known weakness: memory that eager never wrote (`torch.empty`) has no value to compare; ask for `values=False`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

Labelled = tuple[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Strictness:
    """How closely two tensors must agree.

    atol, rtol: None means bit for bit (NaN equals NaN). signed_zeros: tell -0.0 from 0.0. strict_view: an output
    that is a view in eager must be one when compiled, of the same base. exact_versions: version counters move by
    the same number, not only both or neither. slack: allow this many roundings of the largest element.
    all_strides: also those that no address depends on, of dimensions of size one and of tensors with no elements.
    strides: look at strides at all. bits: look at whether conjugation and negation are still to be done.
    """

    values: bool = True
    atol: float | None = None
    rtol: float = 0.0
    signed_zeros: bool = False
    strict_view: bool = False
    exact_versions: bool = False
    slack: int = 0
    all_strides: bool = True
    strides: bool = True
    bits: bool = True


# --------------------------------------------------------------------------------------------- structure
def leaves_of(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers with the path of each; dataclasses that nobody registered are entered."""
    if _is_plain_dataclass(tree):
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                yield from leaves_of(getattr(tree, field.name), f"{path}.{field.name}")
        return
    pairs, _ = pytree.tree_flatten_with_path(tree, is_leaf=_is_plain_dataclass)
    for keys, leaf in pairs:
        where = path + pytree.keystr(keys)
        if _is_plain_dataclass(leaf):
            yield from leaves_of(leaf, where)
        else:
            yield where, leaf


def skeleton(tree: Any) -> str:
    """Container types and keys, with every leaf as a star: equal for equally built results."""
    if _is_plain_dataclass(tree):
        inner = ", ".join(f"{f.name}={skeleton(getattr(tree, f.name, None))}" for f in dataclasses.fields(tree))
        return f"{type(tree).__name__}({inner})"
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_plain_dataclass)
    inner = [skeleton(leaf) if _is_plain_dataclass(leaf) else "*" for leaf in leaves]
    return f"{spec} of {inner}" if set(inner) - {"*"} else str(spec)


def _is_plain_dataclass(value: Any) -> bool:
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_data and type(value) not in pytree.SUPPORTED_NODES


def compare_trees(eager: Any, compiled: Any, path: str) -> list[str]:
    """Differences in structure and in leaves that are not tensors."""
    if skeleton(eager) != skeleton(compiled):
        return [f"{path}: structure: eager {skeleton(eager)}, compiled {skeleton(compiled)}"]
    found = []
    for (where, a), (_, b) in zip(leaves_of(eager, path), leaves_of(compiled, path), strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            continue
        if type(a) is not type(b) or not _equal_python(a, b):
            found.append(f"{where}: python value: eager {_short(a)}, compiled {_short(b)}")
    return found


def _equal_python(a: Any, b: Any) -> bool:
    if a is b or a == b or (a != a and b != b):
        return True
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    # An object with no equality of its own: its type is all that two separate runs can share.
    return type(a).__eq__ is object.__eq__


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 120 else text[:117] + "..."


# ----------------------------------------------------------------------------------------------- tensors
def attempt(question: Callable[[], Any]) -> Any:
    """The answer, or which exception asking for it raises (an invalid view raises when asked for its history)."""
    try:
        return question()
    except Exception as error:
        return f"raises {type(error).__name__}"


ASPECTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "type": lambda t: type(t).__name__,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "layout": lambda t: t.layout,
    "shape": lambda t: tuple(t.shape),
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: attempt(lambda: t.is_leaf),
    "conjugate bit": lambda t: t.is_conj(),
    "negative bit": lambda t: t.is_neg(),
    "is_inference": lambda t: t.is_inference(),
}


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def compare_tensor(where: str, eager: torch.Tensor, compiled: torch.Tensor, how: Strictness) -> list[str]:
    """Differences between two tensors looked at alone: metadata, strides, values."""
    found = []
    for aspect, question in ASPECTS.items():
        a, b = question(eager), question(compiled)
        if aspect.endswith(" bit") and not how.bits:
            continue
        if aspect == "is_leaf" and isinstance(a, str):
            continue  # eager made a view that nobody may use any more: there is nothing to be equal to
        if a != b:
            found.append(f"{where}: {aspect}: eager {a}, compiled {b}")
    if has_storage(eager) and has_storage(compiled) and _strides(eager, how) != _strides(compiled, how):
        found.append(f"{where}: strides: eager {eager.stride()}, compiled {compiled.stride()} of {tuple(eager.shape)}")
    alike = eager.dtype == compiled.dtype and eager.shape == compiled.shape and eager.layout == compiled.layout
    if how.values and alike and not eager.is_meta and not compiled.is_meta:
        difference = value_difference(eager, compiled, how)
        if difference:
            found.append(f"{where}: values: {difference}")
    return found


def _strides(tensor: torch.Tensor, how: Strictness) -> tuple[int, ...]:
    if not how.strides:
        return ()
    if how.all_strides:
        return tensor.stride()
    counted = tensor.numel() > 0
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if counted and size > 1)


@torch.no_grad()
def value_difference(eager: torch.Tensor, compiled: torch.Tensor, how: Strictness) -> str | None:
    """None when equal; else how many elements differ, by how much, and the first of them."""
    a, b = _plain(eager), _plain(compiled)
    if a.is_quantized or (a.dtype.itemsize == 1 and a.is_floating_point()):
        a, b = _bits(a), _bits(b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not how.signed_zeros and torch.equal(a, b):
        return None
    equal = (a == b) | ((a != a) & (b != b))
    if how.atol is not None and a.is_floating_point():
        equal |= torch.isclose(a, b, rtol=how.rtol, atol=how.atol, equal_nan=True)
    if how.slack and a.is_floating_point() and a.numel():
        largest = torch.maximum(a.abs().nan_to_num(0, 0, 0), b.abs().nan_to_num(0, 0, 0)).max()
        equal |= (a - b).abs() <= how.slack * torch.finfo(a.dtype).eps * largest
    if how.signed_zeros and a.is_floating_point():
        equal &= (a != 0) | (a.signbit() == b.signbit())
    if bool(equal.all()):
        return None
    wrong = ~equal
    first = tuple(wrong.nonzero()[0].tolist())
    gap = (a.double() - b.double()).abs()[wrong].max().item()
    some = f"at {list(first)} eager {a[first].item()!r}, compiled {b[first].item()!r}"
    return f"{int(wrong.sum())} of {a.numel()} differ, by at most {gap:.3g}; {some}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.int_repr() if tensor.is_quantized else tensor.contiguous().view(torch.uint8)


# ----------------------------------------------------------------------------------- relations between tensors
def identities(tensors: list[Labelled]) -> dict[str, str]:
    """For each label, the first label of the very same object."""
    first: dict[int, str] = {}
    return {label: first.setdefault(id(tensor), label) for label, tensor in tensors}


def sharing(tensors: list[Labelled]) -> dict[str, str]:
    """For each strided tensor's label, the first label whose tensor lives in the same storage."""
    first: dict[int, str] = {}
    return {label: first.setdefault(storage_key(t), label) for label, t in tensors if has_storage(t)}


def bases(tensors: list[Labelled]) -> dict[str, str]:
    """For each view, the first label of its base; 'a hidden base' where the base is none of them."""
    names: dict[int, str] = {}
    for label, tensor in tensors:
        names.setdefault(id(tensor), label)
    views = ((label, t._base) for label, t in tensors if t._is_view())
    return {label: names.get(id(base), "a hidden base") for label, base in views}


def compare_relations(eager: list[Labelled], compiled: list[Labelled], how: Strictness) -> list[str]:
    """Differences in who is who, who shares memory with whom and (when asked) who is a view of whom."""
    found = _differing("is the same object as", identities(eager), identities(compiled))
    shared_eager, shared_compiled = sharing(eager), sharing(compiled)
    found += _differing("shares storage with", shared_eager, shared_compiled)
    if how.strict_view:
        found += _differing("is a view of", bases(eager), bases(compiled))
    if not found:
        found += _compare_places(eager, compiled, shared_eager)
    return found


def _differing(relation: str, eager: dict[str, str], compiled: dict[str, str]) -> list[str]:
    def say(label: str, other: str | None) -> str:
        return "nothing before it" if other in (label, None) else str(other)

    return [
        f"{label}: {relation}: eager {say(label, eager.get(label))}, compiled {say(label, compiled.get(label))}"
        for label in {**eager, **compiled}
        if eager.get(label) != compiled.get(label)
    ]


def _compare_places(eager: list[Labelled], compiled: list[Labelled], shared: dict[str, str]) -> list[str]:
    """Tensors that share memory must sit at the same place in it; alone in a storage, the place can't be seen."""
    members: dict[str, int] = {}
    for first in shared.values():
        members[first] = members.get(first, 0) + 1
    found = []
    for (label, a), (_, b) in zip(eager, compiled, strict=True):
        if label not in shared or members[shared[label]] < 2 or not has_storage(b):
            continue
        if a.storage_offset() != b.storage_offset():
            found.append(f"{label}: storage offset: eager {a.storage_offset()}, compiled {b.storage_offset()}")
    return found
