"""Fake tensors, and the flags of the dispatch modes that they run under. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _python_dispatch

from ..locks import ProcessPatch, bound
from .nested import mapped
from .ops import Args, Kwargs
from .symbols import Size, has_symbolic, new_ragged_size

__all__ = ["FakeTensor", "FakeTensorMode"]  # handed on

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)

_META = torch.device("meta")
_NoDispatch = torch._C._DisableTorchDispatch
_empty_strided = torch._C._VariableFunctions.empty_strided
_make_subclass: Any = torch.Tensor._make_subclass


class NewFakeMode(FakeTensorMode):
    """A fake mode that leaves the process able to fork, and, after use on two threads, to compile (`flags_kept`).

    If PyTorch is built for CUDA and there is no GPU, entering its fake mode pretends that there is one device. The next
    backward then starts a thread for that device, and no forked child can run a backward any more.
    """

    @property
    def avoid_device_init(self) -> bool:
        return False

    def __enter__(self) -> NewFakeMode:
        flags_kept.__enter__()
        try:
            super().__enter__()
        except BaseException:
            flags_kept.__exit__()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            flags_kept.__exit__()

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """The size of a ragged dimension: an integer without a value, so no symbol."""
        return new_ragged_size()


class FakeFactory:
    """Fake tensors of one mode, made from their layout in 4 us rather than the 15 us of the class's constructor.

    The constructor checks and sets twenty equal attributes each time; here they are copied from an earlier fake for the
    device, as a dict with keys that all fakes share: half of the memory.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        c: Any = torch._C
        warns = mode._allow_unsafe_data_ptr_access
        self._mark = c._set_warn_deprecated_on_mutable_data_ptr if warns else c._set_throw_on_mutable_data_ptr
        self._made: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    def new(
        self, shape: Sequence[Size], stride: Sequence[Size], dtype: torch.dtype, device: torch.device, offset: Size = 0
    ) -> FakeTensor:
        """A fake over memory of its own."""
        # The modes of an enclosing capture must not see how its fakes are made.
        with _NoDispatch():
            if type(offset) is int and offset == 0:
                meta = _empty_strided(shape, stride, dtype=dtype, device=_META)
            else:
                span = 1 + offset + sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
                meta = torch.empty(span, dtype=dtype, device=_META).as_strided(shape, stride, offset)
        return self.over(meta, device)

    def over(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake over the memory of a meta tensor, in its layout."""
        template = self._made.get(device)
        if template is None:
            fake = FakeTensor(self.mode, meta, device)
            template = self._made[device] = (fake.fake_device, fake.__dict__.copy())
        else:
            fake = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=template[0])
            self._mark(fake)
        _set_attributes(fake, template[1].copy())
        return fake

    @classmethod
    def of(cls, mode: FakeTensorMode) -> FakeFactory:
        """The factory that a mode keeps."""
        factory: FakeFactory | None = mode.__dict__.get("_foregrad_factory")
        if factory is None:
            factory = mode.__dict__["_foregrad_factory"] = cls(mode)
        return factory


_set_attributes = torch.Tensor.__dict__["__dict__"].__set__


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
    offset: Size = 0,
) -> FakeTensor:
    """A fake tensor of the layout; ten times faster than `FakeTensorMode.from_tensor`."""
    return FakeFactory.of(mode).new(shape, stride, dtype, device, offset)


def new_fake_over(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    shape: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
    offset: Size,
) -> FakeTensor:
    """A fake tensor over a fake storage (made by `meta_storage`).

    `set_` with symbolic sizes asks whether they are contiguous and adds guards. So only the memory is exchanged.
    """
    factory = FakeFactory.of(mode)
    with _NoDispatch():
        meta = torch.empty(0, dtype=dtype, device=_META)
        if mode.shape_env is None:
            meta.set_(storage, offset, shape, stride)
            return factory.over(meta, device)
        meta.set_(storage, 0, (0,), (1,))
        fake = factory.new(shape, stride, dtype, device, offset)
        # Since 2.15 only the memory of a tensor on an equal device can be taken.
        torch._functionalize_unsafe_set(fake, factory.over(meta, device))
    return fake


def fake_grouped_mm(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> object:
    """`aten._grouped_mm` on fakes: torch's rule takes bfloat16 alone, the CPU's kernel other floats too."""
    func = torch.ops.aten._grouped_mm.default
    dtype = args[0].dtype
    if dtype is torch.bfloat16 or args[1].dtype is not dtype:
        return mode.dispatch(func, (), args, kwargs)
    lowered = [new_fake(mode, t.shape, t.stride(), torch.bfloat16, fake_device(t)) for t in args[:2]]
    out: Any = mode.dispatch(func, (), (*lowered, *args[2:]), kwargs)
    out_dtype = kwargs.get("out_dtype") or dtype
    return new_fake(mode, out.shape, out.stride(), out_dtype, fake_device(args[0]))


def fake_multilabel_margin_loss(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> object:
    """`aten.multilabel_margin_loss_forward` on fakes: torch takes the unreduced loss of one sample for a vector."""
    out: Any = mode.dispatch(torch.ops.aten.multilabel_margin_loss_forward.default, (), args, kwargs)
    loss, is_target = out
    if args[0].dim() < 2:
        loss = new_fake(mode, (), (), loss.dtype, fake_device(args[0]))
    return loss, is_target


def _fake_of_stride(func: Any, stride_of: Callable[[torch.Tensor, Any], Any]) -> object:
    def run(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> Any:
        """The kernels' results have this stride, also in dimensions of size 1."""
        out: Any = mode.dispatch(func, (), args, kwargs)
        stride = stride_of(args[0], out)

        def made(t: torch.Tensor) -> torch.Tensor:
            return t if t.stride() == stride else new_fake(mode, t.shape, stride, t.dtype, fake_device(t))

        return mapped(out, torch.Tensor, made)

    return run


def _fake_of_dtype(func: object, dtype_of: Callable[[tuple[Any, ...], int], torch.dtype]) -> object:
    def run(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> Any:
        """The CPU's kernel gives floating results, by number, these dtypes."""
        out: Any = _by_rule(mode, func, args, kwargs)
        if fake_device(args[0]).type != "cpu":
            return out
        if isinstance(out, torch.Tensor):
            return _of_dtype(mode, out, dtype_of(args, 0))
        return tuple(_of_dtype(mode, t, dtype_of(args, at)) for at, t in enumerate(out))

    return run


def _of_parameters(args: tuple[Any, ...], at: int) -> torch.dtype:
    """A normalisation's statistics are float32 beside float32 parameters, with any input."""
    parameters = [t for t in args[1:] if at and isinstance(t, torch.Tensor)]
    found: torch.dtype = (*parameters, args[0])[0].dtype
    return found


def _fake_embedding_bag(func: object) -> object:
    def run(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> Any:
        """The CPU's kernel has for bfloat16, too, the quick way that torch's rule knows for other floats."""
        if args[0].dtype is not torch.bfloat16 or fake_device(args[0]).type != "cpu":
            return _by_rule(mode, func, args, kwargs)
        args = tuple(_of_dtype(mode, a, torch.float16) if isinstance(a, torch.Tensor) else a for a in args)
        return tuple(_of_dtype(mode, t, torch.bfloat16) for t in _by_rule(mode, func, args, kwargs))

    return run


def _fake_bmm(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> object:
    """The CPU's kernel compares dtypes only where there are elements to multiply."""
    left, right = args
    if left.dtype is not right.dtype and fake_device(left).type == "cpu" and 0 in (left.numel(), right.numel()):
        left = _of_dtype(mode, left, right.dtype)
    return _by_rule(mode, torch.ops.aten.bmm.default, (left, right), kwargs)


def _by_rule(mode: FakeTensorMode, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return mode.dispatch(func, (), args, kwargs) if mode.shape_env is None else symbolic_fake(mode, func, args, kwargs)


def _of_dtype(mode: FakeTensorMode, fake: torch.Tensor, dtype: torch.dtype) -> Any:
    """The fake; for a floating fake of a different dtype, an equal fake of `dtype`."""
    if fake.dtype is dtype or not fake.is_floating_point():
        return fake
    return new_fake(mode, fake.shape, fake.stride(), dtype, fake_device(fake))


def _fake_view(mode: FakeTensorMode, args: Args, kwargs: Kwargs) -> object:
    """`aten.view` on fakes: FakeTensor keeps the strides of dimensions of size one, the kernel computes them."""
    source: Any = args[0]
    out: Any = mode.dispatch(torch.ops.aten.view.default, (), args, kwargs)
    if not has_symbolic((*source.shape, *source.stride(), *args[1])) and 1 in out.shape:
        stride = torch.empty_strided(source.shape, source.stride(), device="meta").view(args[1]).stride()
        if stride != out.stride():
            where = (source, list(out.shape), list(stride), source.storage_offset())
            out = mode.dispatch(torch.ops.aten.as_strided.default, (), where, {})
    return out


_NORMALISATIONS = (
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
    torch.ops.aten._batch_norm_no_update.default,
)

_FILLS = torch.ops.aten.masked_fill.Scalar, torch.ops.aten.masked_fill.Tensor
_LIKE_THE_FIRST = (
    torch.ops.aten.soft_margin_loss.default,
    torch.ops.aten.huber_loss.default,
    torch.ops.aten.normal.Tensor_Tensor,
)

# Torch's rules for fakes differ from its kernels for these operators.
CORRECTED: dict[Any, Any] = {
    torch.ops.aten.view.default: _fake_view,
    **{
        op: _fake_of_stride(op, lambda a, _: torch.empty_strided(a.shape, a.stride(), device="meta").clone().stride())
        for op in (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)
    },
    **{op: _fake_of_stride(op, lambda _, out: make_contiguous_strides_for(out.shape)) for op in _FILLS},
    # The kernel draws into a clone.
    torch.ops.aten.uniform.default: lambda mode, args, _: mode.dispatch(torch.ops.aten.clone.default, (), args[:1], {}),
    torch.ops.aten.bmm.default: _fake_bmm,
    **{op: _fake_of_dtype(op, _of_parameters) for op in _NORMALISATIONS},
    **{op: _fake_of_dtype(op, lambda args, at: args[0].dtype) for op in _LIKE_THE_FIRST},
    torch.ops.aten._embedding_bag.default: _fake_embedding_bag(torch.ops.aten._embedding_bag.default),
    torch.ops.aten._embedding_bag_forward_only.default: _fake_embedding_bag(
        torch.ops.aten._embedding_bag_forward_only.default
    ),
    torch.ops.aten._grouped_mm.default: fake_grouped_mm,
    torch.ops.aten.multilabel_margin_loss_forward.default: fake_multilabel_margin_loss,
}


def symbolic_fake(mode: FakeTensorMode, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """An operator on fakes of symbolic sizes, by its Python kernel if there is one.

    Kernels in C++ may read sizes as plain numbers: some raise, some silently specialize the graph.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher():
        return mode.dispatch(func, (), args, kwargs)


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage of `nbytes` bytes without memory."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def fake_device(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor, without the dispatch that `.device` costs on a fake."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


without_fake_mode: Callable[[], contextlib.AbstractContextManager[object]] = unset_fake_temporarily
"""Context: a fake mode of the program's is off, under which all that is made would be fake."""


def is_absent(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor without values: on `meta`, or fake."""
    return isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta)


def real_constants(mode: FakeTensorMode | None) -> contextlib.AbstractContextManager[None]:
    """Context: operators take a graph's constants, real tensors, beside fakes."""
    return contextlib.nullcontext() if mode is None else bound(mode, "allow_non_fake_inputs", True)


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The fake mode of the active trace, of the modes that are on, or of fakes among `values`; or None.

    Raises torch's error if there are two different ones.
    """
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


# -------------------------------------------------------------------- flags of modes
# PyTorch's flags that some dispatch mode is on: the flags are per process, a mode is per thread.
#
# Each mode restores the flags it found. If two modes on two threads exit in the order of their entry, the flags stay
# set, and Dynamo compiles nothing any more. `flags_kept` restores them once no thread is inside. Checked on torch
# 2.11.0, 2.13.0.
#
# Known weakness: a mode that the program enters on one thread in the meantime goes unseen.


_NAMES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_TELL = "set_is_in_mode_without_ignore_compile_internals"
_clear: list[str] = []


def _note() -> None:
    _clear[:] = [name for name in _NAMES if vars(_python_dispatch).get(name) is False]


def _put_back() -> None:
    for name in _clear:
        setattr(_python_dispatch, name, False)
    if _NAMES[-1] in _clear:
        vars(_python_dispatch)[_TELL](False)


flags_kept = ProcessPatch(_note, _put_back)
