"""Stand-ins of tensors: plain tensors without memory; their operators reach the dispatch mode of the capture.

`type(x)` is `torch.Tensor` (or `Parameter`), and the device, the sizes and the table of attributes are the real
tensor's, in C++ too. A stand-in is made as a wrapper subclass and becomes a plain tensor by an assignment to
`__class__`. It keeps the dispatch key of Python: if no mode is on, an operator raises and reads no memory. So code that
reads views after the function has run does so under `Unrecorded`: a view's `grad_fn` runs operators.

`Tensor._make_subclass(torch.Tensor, meta, dispatch_device=True)` gives plain tensors, too, but the mode is asked for
their device: with gradients, `as_subclass`, or any operator without a mode, ends the process. Further functions that
reach no dispatch mode: `as_subclass`, `_make_subclass` and `tolist` (see `patches`); `torch.Tensor(x)` and methods of
storages: both raise. Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from ..identity import ById, attributed
from .fakes import FakeTensor, FakeTensorMode, meta_storage, new_fake_over
from .ops import Args, Kwargs
from .symbols import symbol_made
from .tensors import share_memory

_C: Any = torch._C
_META = torch.device("meta")
_NoDispatch = _C._DisableTorchDispatch
_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_make_subclass: Any = _C.TensorBase._make_subclass
_share: Any = torch._functionalize_unsafe_set
_mark: Any = _C._set_throw_on_mutable_data_ptr
_reinterpret = _C._dynamo.guards._reinterpret_tensor
_set_data: Any = _C.TensorBase.data.__set__
_keys = _C._dispatch_keys
use_count: Any = _C.TensorBase._use_count
"""How many hold the tensor in C++; for all of its references in Python one."""
_PYTHON: Any = _C.DispatchKey.Python
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Unfinished(torch.Tensor):
    """The class of a stand-in while it is made: only classes that dispatch may be made without memory."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:  # type: ignore[override]
        return NotImplemented


def is_stand_in(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value stands for a tensor in a capture; for sparse tensors fakes do."""
    kind = type(value)
    if kind in _PLAIN:
        return bool(_keys(value).has(_PYTHON))
    return kind is FakeTensor and value.layout is not torch.strided


def new_stand_in(
    shape: object, stride: object, dtype: torch.dtype, device: torch.device, offset: object = 0
) -> torch.Tensor:
    """A stand-in over memory of its own."""
    stand_in: torch.Tensor = _make_wrapper(_Unfinished, shape, stride, offset, None, dtype, torch.strided, device)
    _mark(stand_in)
    stand_in.__class__ = torch.Tensor
    return stand_in


def new_stand_in_over(
    base: torch.Tensor, shape: object, stride: object, dtype: torch.dtype, device: torch.device, offset: object
) -> torch.Tensor:
    """A stand-in over a stand-in's memory."""
    stand_in = new_stand_in(shape, stride, dtype, device, offset)
    _share(stand_in, base)
    return stand_in


def become_parameter(stand_in: torch.Tensor) -> None:
    """Turn a stand-in into one of a parameter."""
    stand_in.__class__ = torch.nn.Parameter


def absent_number(zero: torch.Tensor) -> torch.Tensor:
    """`zero`, perhaps the tangent of the 2 in `x * 2`: operators get an instance of `ABSENT` in its place."""
    if not zero.dim():
        attributed(zero, _wrapped_number=ABSENT[zero.is_complex()](0))
    return zero


ABSENT: tuple[type, type] = (type("AbsentNumber", (float,), {}), type("AbsentComplex", (complex,), {}))


def twin(stand_in: torch.Tensor) -> torch.Tensor:
    """A second stand-in of equal layout over the stand-in's memory, without history."""
    with _NoDispatch():
        other: torch.Tensor = _make_subclass(_Unfinished, stand_in)
    _mark(other)
    other.__class__ = torch.Tensor
    return other


def like(model: torch.Tensor, base: torch.Tensor | None, nbytes: object) -> torch.Tensor:
    """A stand-in of the layout of `model`, over the memory of `base`, or without one over `nbytes` of its own.

    With symbolic sizes this is the quick way: facts that follow from sizes (is it contiguous? how many elements?) cost
    a fifth of a millisecond to compute, and are copied here.
    """
    stand_in = twin(model)
    memory = base
    if memory is None:
        memory = _make_wrapper(
            _Unfinished, (0,), (1,), 0, None, model.dtype, torch.strided, model.device, storage_size=nbytes
        )
    _share(stand_in, memory)
    return stand_in


def like_source(source: torch.Tensor, views: Any) -> Any:
    """Views of `source`, inference tensors exactly if the source is, under any mode."""
    if isinstance(views, (tuple, list)):
        return type(views)(like_source(source, view) for view in views)
    with torch.inference_mode(mode=source.is_inference()), torch.no_grad():
        view = new_stand_in_over(source, *_layout(views)[:2], views.dtype, views.device, views.storage_offset())
    _copy_bits(view, views)
    return view


def on_meta(op: Any, spec: Any, nbytes: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """A view operator on a meta tensor of the layout in a memory of `nbytes`. The results must not be kept."""
    with _NoDispatch():
        memory = torch.empty(nbytes // spec.dtype.itemsize, dtype=spec.dtype, device=_META)
        return op(_reinterpret(memory, spec.shape, spec.stride, spec.offset), *args, **kwargs)


def set_layout(stand_in: torch.Tensor, new: torch.Tensor) -> None:
    """Give a stand-in the sizes, strides and memory of `new`; the object, its history and version stay."""
    with _NoDispatch():
        _set_data(stand_in, new)


class FakeRuns:
    """Runs operators on fakes of the stand-ins among their arguments, and gives stand-ins for the results.

    `is_symbolic`: fakes of symbolic sizes take long to make, and are kept.
    """

    def __init__(self, mode: FakeTensorMode, is_symbolic: bool) -> None:
        self.mode, self.is_symbolic = mode, is_symbolic
        self._kept: ById[torch.Tensor, FakeTensor] = ById()  # by stand-in
        self._memory: dict[int, tuple[Any, Any]] = {}  # by storage: the storage, and the storage of its fakes

    def run(self, call: Callable[[Any, Any, Any], object], func: Any, args: Args, kwargs: Kwargs) -> Any:
        """`call(func, args, kwargs)` on fakes."""
        used: list[tuple[torch.Tensor, FakeTensor]] = []
        args = tuple(self._to_fakes(arg, used) for arg in args)
        kwargs = {key: self._to_fakes(value, used) for key, value in kwargs.items()}
        before = [_layout(fake) for _, fake in used] if func._schema.is_mutable else []
        out = call(func, args, kwargs)
        for (stand_in, fake), layout in zip(used, before, strict=False):
            is_in_place = self._is_in_place(stand_in, fake)
            if not is_in_place or not _is_same(_layout(fake), layout):
                keeps_memory = is_in_place and _nbytes(fake) == _nbytes(stand_in)
                set_layout(stand_in, self._stand_in(fake, [p for p in used if keeps_memory or p[0] is not stand_in]))
                self._kept.pop(stand_in, None)
        if not self.is_symbolic:
            self._memory.clear()
        return self._to_stand_ins(out, used)

    def _is_in_place(self, stand_in: torch.Tensor, fake: FakeTensor) -> bool:
        memories = self._memory.get(stand_in.untyped_storage()._cdata)
        return memories is not None and memories[1]._cdata == fake.untyped_storage()._cdata

    def _to_fakes(self, value: Any, used: list[tuple[torch.Tensor, FakeTensor]]) -> object:
        kind = type(value)
        if kind in _PLAIN:
            if not is_stand_in(value):
                return value
            fake = next((fake for stand_in, fake in used if stand_in is value), None)
            if fake is None:
                fake = self.fake_of(value)
                used.append((value, fake))
            return fake
        if kind is list or kind is tuple:
            return kind(self._to_fakes(item, used) for item in value)
        return value

    def fake_of(self, stand_in: torch.Tensor) -> FakeTensor:
        """A fake of the stand-in's layout; fakes share memory as their stand-ins do."""
        kept = self._kept.get(stand_in)
        storage = stand_in.untyped_storage()
        if kept is not None and _is_same(_layout(stand_in), _layout(kept)):
            memories = self._memory.get(storage._cdata)
            if memories is not None and memories[1]._cdata == kept.untyped_storage()._cdata:
                return kept
        shape, stride, offset = _layout(stand_in)
        memories = self._memory.get(storage._cdata)
        if memories is None:
            with _C.DisableTorchFunction():
                memory = meta_storage(storage.nbytes())
            self._memory[storage._cdata] = storage, memory
        else:
            memory = memories[1]
        with torch.inference_mode(mode=stand_in.is_inference()), _C.DisableTorchFunction():
            fake = new_fake_over(self.mode, memory, shape, stride, stand_in.dtype, stand_in.device, offset)
        _copy_bits(fake, stand_in)
        if self.is_symbolic:
            self._kept[stand_in] = fake
        return fake

    def _to_stand_ins(self, out: object, used: list[tuple[torch.Tensor, FakeTensor]]) -> Any:
        if type(out) is FakeTensor:
            existing = next((stand_in for stand_in, fake in used if fake is out), None)
            if existing is not None or out.layout is not torch.strided:
                return out if existing is None else existing
            new = self._stand_in(out, used)
            used.append((new, out))
            return new
        if isinstance(out, (list, tuple)):
            return (list if isinstance(out, list) else tuple)(self._to_stand_ins(item, used) for item in out)
        return out

    def _stand_in(self, fake: FakeTensor, others: list[tuple[torch.Tensor, FakeTensor]]) -> torch.Tensor:
        shape, stride, offset = _layout(fake)
        base = next((stand_in for stand_in, other in others if share_memory(other, fake)), None)
        with torch.inference_mode(mode=fake.is_inference()):
            if base is None:
                stand_in = new_stand_in(shape, stride, fake.dtype, fake.fake_device, offset)
            else:
                stand_in = new_stand_in_over(base, shape, stride, fake.dtype, fake.fake_device, offset)
        _copy_bits(stand_in, fake)
        if self.is_symbolic:
            self._kept[stand_in] = fake
            storage = stand_in.untyped_storage()
            self._memory.setdefault(storage._cdata, (storage, fake.untyped_storage()))
        return stand_in


def _nbytes(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage().nbytes()


def _layout(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _is_same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    if len(one[0]) != len(other[0]):
        return False
    pairs = zip((*one[0], *one[1], one[2]), (*other[0], *other[1], other[2]), strict=True)
    return all(a is b or _number(a) == _number(b) for a, b in pairs)


def _number(value: object) -> Any:
    return value if type(value) is int else symbol_made(value)


def _copy_bits(tensor: torch.Tensor, source: torch.Tensor) -> None:
    if source.is_conj():
        _C._set_conj(tensor, True)
    if source.is_neg():
        _C._set_neg(tensor, True)
