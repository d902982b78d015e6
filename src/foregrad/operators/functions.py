"""Torch functions that read numbers straight out of a tensor's memory, in C++, before any operator is called.

A fake tensor has no memory to read. Here these functions get the numbers instead, read one by one: the recorder makes
decisions of the reads.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeGuard

import torch
from torch.nn import functional

from .._torch.engine import current_dispatch_mode, plain_execution
from .._torch.histories import AS_ARRAY_REQUIRES_GRAD
from .._torch.ops import PACK_PADDED, PAD_PACKED, Args, Kwargs
from .._torch.patches import is_capturing, numbers_in
from .._torch.stand_ins import is_stand_in
from .._torch.symbols import SYM_MATH, TracedInt
from ..errors import (
    TensorTextError,
    UnsupportedAliasError,
    UnsupportedError,
    UnsupportedMutationError,
    UnsupportedOpError,
)
from ..frontend.arrays import ArrayStandIn
from ..graph.meta import TensorSpec
from ..house import is_program_module
from ..locks import Bind
from ..tracing.aspect import Aspect, Row, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.kernels.plans import Treatment
from ..tracing.recorder.recorder import ABOUT_MEMORY
from ..tracing.values.numbers import TRACED
from ._torch.torchscript import install


@aspect
class ScriptedFunctions(Aspect):
    """Functions of TorchScript: they run as Python."""

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        install(bind, is_capturing)


@aspect
class StorageMethods(Aspect):
    """Methods of storages that raise where there is no memory, as behind a stand-in."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.where = recorder.where

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        for name, error in (("resize_", UnsupportedMutationError), ("data_ptr", UnsupportedError)):
            bind(torch.UntypedStorage, name, _refused_without_memory(name, error, current))


def _refused_without_memory(name: str, refused: type[Exception], current: Callable[[], Any]) -> Callable[..., Any]:
    original = getattr(torch.UntypedStorage, name)

    def method(self: torch.UntypedStorage, *args: Any) -> Any:
        try:
            return original(self, *args)
        except RuntimeError as error:
            here = current()
            if here is None or "invalid python storage" not in str(error):
                raise
            raise refused(
                f"`untyped_storage().{name}()` is called at {here.where()} on the memory of a tensor: a capture has "
                "none. Keep that part outside the compiled function, or mark it with `foregrad.eager_region`."
            ) from None

    return method


@aspect
class FreedMemory(Aspect):
    """An exported graph without gradients frees or restores the memory of an input that it has not written before."""

    def __init__(self, host: Host, recorder: Any) -> None:
        self.recorder, self.is_exported = recorder, host.keeps_branches

    def resumed(self) -> Aspect:
        return self

    def resize(self, plan: Treatment, args: Args, kwargs: Kwargs) -> None:
        is_written = self.recorder.value_of(args[0]).storage.is_written
        is_input = self.recorder.host.real_of(args[0]) is not None
        if not self.is_exported or torch.is_grad_enabled() or is_written or not is_input:
            raise UnsupportedOpError(ABOUT_MEMORY.format(plan.op, self.recorder.where()))
        self.recorder.checks.note(plan.op, args, kwargs)

    operators: ClassVar[Mapping[Any, Row]] = {torch.ops.inductor.resize_storage_bytes_.default: resize}


def _tensor_split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    name = "tensor_indices_or_sections"
    where = kwargs.get(name, args[1] if len(args) > 1 else None)
    if not isinstance(where, torch.Tensor):
        return func(*args, **kwargs)
    rest = {key: value for key, value in kwargs.items() if key != name}
    return func(args[0], where.tolist(), *args[1 if name in kwargs else 2 :], **rest)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Loss by loss, then reduced as the kernel does it: that makes a tensor of the lengths in its own memory."""
    how = reduction if isinstance(reduction, int) else {"none": 0, "mean": 1, "sum": 2}[reduction]
    inputs, given = _numbers(input_lengths), _numbers(target_lengths)
    losses = torch.ctc_loss(log_probs, targets, inputs, given, blank, 0, zero_infinity)
    if how == 1:
        lengths = torch.tensor(given, dtype=losses.dtype, device=losses.device).clamp_min(1)
        return (losses / lengths).mean()
    return losses.sum() if how == 2 else losses


def _numbers(lengths: Any) -> list[Any]:
    if isinstance(lengths, torch.Tensor):
        return [lengths.item()] if lengths.dim() == 0 else lengths.tolist()
    return list(lengths)


def _torch_ctc_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    # A reduction left out means the mean here too.
    return _ctc_loss(*args, **kwargs)


def _tolist(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return numbers_in(args[0])


# -------------------------------------------------------------------- packed sequences
# Packed sequences: functions whose kernels read lengths of sequences straight out of memory.
#
# The lengths become a part of the program, decided once for all of them. Packing and padding are written as one pick
# and one placement by indices: their derivatives read no lengths. Recurrent layers are handed the real lengths.


def _contents(tensor: torch.Tensor) -> torch.Tensor:
    """The real tensor behind a fake; its contents are a part of the program from here on."""
    if not is_stand_in(tensor):
        return tensor
    recorder: Recording = current_dispatch_mode()
    return recorder.contents(tensor)


def _packed(func: Any, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    known = _contents(lengths)
    with plain_execution():  # its checks, and the sizes of the batches
        zeros = torch.zeros(()).expand(*input.shape[:2], 1)
        sizes: torch.Tensor = func(zeros, known, batch_first)[1]
        index = _index(sizes)
    data = (input.transpose(0, 1) if batch_first else input)[tuple(map(torch.tensor, index))].contiguous()
    return data, torch.tensor(sizes.tolist(), dtype=sizes.dtype)


def _padded(
    func: Any, data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    sizes = _contents(batch_sizes)
    with plain_execution():
        zeros = torch.zeros(()).expand(data.shape[0], 1)
        shape, lengths = func(zeros, sizes, False, 0.0, total_length)
        index = _index(sizes)
    padding = torch.full((*shape.shape[:2], *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device)
    output = padding.index_put(tuple(map(torch.tensor, index)), data)
    output = output.transpose(0, 1) if batch_first else output
    return output, torch.tensor(lengths.tolist(), dtype=lengths.dtype)


def _index(sizes: torch.Tensor) -> tuple[list[int], list[int]]:
    """For each element of a packed sequence: its step and its sequence."""
    steps = [step for step, size in enumerate(sizes.tolist()) for _ in range(size)]
    sequences = [sequence for size in sizes.tolist() for sequence in range(size)]
    return steps, sequences


def _recurrent(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A recurrent layer over a packed sequence; over a padded one, its second argument is no tensor."""
    # Packed: data, sizes, states, weights. Padded: data, states, weights, and a bool.
    if len(args) > 3 and isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple)):
        args = (args[0], _contents(args[1]), *args[2:])
    return func(*args, **kwargs)


PACKERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    PACK_PADDED: lambda func, args, kwargs: _packed(func, *args, **kwargs),
    PAD_PACKED: lambda func, args, kwargs: _padded(func, *args, **kwargs),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}


# -------------------------------------------------------------------- tensors made of lists
# Tensors made of lists that hold tensors: `torch.tensor([loss, 1.0])` and its like; of numbers that the graph computes,
# in lists and alone; and of arrays that were drawn.
#
# PyTorch reads the numbers in C++, where no operator is seen, and a fake tensor has none to read. Here the tensors are
# cast, stacked and put in their places by operators instead, so that no value becomes a part of the program. Shape,
# type, device and errors come from the function on real zeros.


Path = tuple[int, ...]


def _tensors_at(data: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    for index, item in enumerate(data):
        if isinstance(item, (list, tuple)):
            yield from _tensors_at(item, (*path, index))
        elif isinstance(item, torch.Tensor):
            yield (*path, index), item
        elif type(item) in TRACED:
            yield (*path, index), torch.scalar_tensor(item, dtype=_kind_of(item))


def _on_zeros(data: Any) -> Any:
    """A nested list with a real zero in place of each tensor."""
    if isinstance(data, (list, tuple)):
        return [_on_zeros(item) for item in data]
    if isinstance(data, torch.Tensor):
        return torch.zeros((), dtype=data.dtype, device=data.device).expand(tuple(map(int, data.shape)))
    if type(data) in TRACED:
        return 0.0 if isinstance(data, float) else 0
    return data


def _kind_of(number: Any) -> torch.dtype:
    return torch.float64 if isinstance(number, float) else torch.int64


def _made(data: Any, make: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
    """The result of `make(data)`; None where the list, or number, `data` is known."""
    is_number = type(data) in TRACED
    places = list(_tensors_at([data] if is_number else data))
    if not places:
        return None
    with plain_execution():
        zeros = make(_on_zeros(data))
        like: dict[str, Any] = {"dtype": zeros.dtype, "device": zeros.device}
        numbers, shape, strides = zeros.tolist(), tuple(zeros.shape), zeros.contiguous().stride()
    if is_number:
        return torch.scalar_tensor(data, **like)
    with torch.no_grad():
        values = torch.stack([tensor.detach().reshape(()).to(**like) for _, tensor in places])
        if len(places) == zeros.numel():
            return values.reshape(shape)
        flat = [sum(i * step for i, step in zip(path, strides, strict=True)) for path, _ in places]
        whole = torch.tensor(numbers, **like).reshape(-1)
        return whole.index_put((torch.tensor(flat, device=zeros.device),), values).reshape(shape)


def _tensor(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.tensor`, `as_tensor`, `asarray`: of a list, a new tensor each, without a history."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if _is_array(data):
        return _of_array(func, data, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("data", "obj")})
    if not isinstance(data, (list, tuple)) and type(data) not in TRACED:
        return func(*args, **kwargs)
    rest = {key: value for key, value in kwargs.items() if key not in ("data", "obj", "requires_grad")}
    made = _made(data, lambda zeros: func(zeros, *args[1:], **rest))
    if made is None:
        return func(*args, **kwargs)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _of_array(func: Any, array: ArrayStandIn, *args: Any, **kwargs: Any) -> Any:
    if func is not torch.tensor:
        return func(array.tensor(), *args, **kwargs)
    like = {name: value for name, value in kwargs.items() if name in ("dtype", "device") and value is not None}
    made = array.tensor().clone().to(**like) if like else array.tensor().clone()
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _is_array(value: Any) -> TypeGuard[ArrayStandIn]:
    return issubclass(type(value), ArrayStandIn)


def _item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x[index]` and `x[index] = y`, where an index may be an array that was drawn. A varying number stays a number:
    PyTorch's own reading would ask for its value.
    """
    index = args[1]
    items = index if type(index) is tuple else (index,)
    if items and items[0] is ...:
        items = *[slice(None)] * (args[0].dim() - len(items) + 1), *items[1:]
    if TracedInt in map(type, items) and {*map(type, items)} <= {TracedInt, int, slice}:
        tensor, dim = args[0], 0
        for item in items:
            if type(item) is slice:
                tensor = tensor if item == slice(None) else func(tensor, (slice(None),) * dim + (item,))
                dim += 1
            else:
                tensor = tensor.select(dim, item)
        return tensor if len(args) == 2 else func(tensor, ..., args[2])
    if _is_array(index):
        index = index.tensor()
    elif type(index) is tuple and any(_is_array(part) for part in index):
        index = tuple(part.tensor() if _is_array(part) else part for part in index)
    return func(args[0], index, *args[2:], **kwargs)


def _new_tensor(func: Any, args: Args, kwargs: Kwargs) -> Any:
    data = args[1] if len(args) > 1 else kwargs.get("data")
    like = {"dtype": args[0].dtype, "device": args[0].device}
    like |= {key: value for key, value in kwargs.items() if key in like and value is not None}
    if _is_array(data):
        return _of_array(torch.tensor, data, requires_grad=kwargs.get("requires_grad"), **like)
    if not isinstance(data, (list, tuple)) and type(data) not in TRACED:
        return func(*args, **kwargs)
    made = _made(data, lambda zeros: torch.tensor(zeros, **like))
    if made is None:
        return func(*args, **kwargs)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x.new(data)`: as `new_tensor`, where it is given a list."""
    given = args[1:] or tuple(kwargs[name] for name in ("data",) if name in kwargs)
    if len(given) == 1 and _is_array(given[0]):
        return _of_array(torch.tensor, given[0], dtype=args[0].dtype, device=args[0].device)
    if len(given) != 1 or not isinstance(given[0], (list, tuple)) or isinstance(given[0], torch.Size):
        return func(*args, **kwargs)
    made = _made(given[0], lambda zeros: torch.tensor(zeros, dtype=args[0].dtype, device=args[0].device))
    return func(*args, **kwargs) if made is None else made


MAKERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.asarray: _tensor,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.new: _new,
}


_READERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.Tensor.tolist: _tolist,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.ctc_loss: _torch_ctc_loss,
    functional.ctc_loss: _torch_ctc_loss,
    **dict.fromkeys(SYM_MATH, lambda func, args, kwargs: SYM_MATH[func](*args)),
    **MAKERS,
    **PACKERS,
}


# -------------------------------------------------------------------- tensors as objects
# A tensor as a Python object: its text, its pickle, copies of it.
#
# Text and pickles hold values, and no graph has values: a call that asks for them runs eagerly. Copies are tensors:
# `copy.copy` shares the memory, `copy.deepcopy` does not; neither has a history.


_TENSOR: Any = torch.Tensor


class ValuesAsked:
    """Whether a function asked for values as text, whoever has caught the error."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.failed: TensorTextError | None = None

    def refuse(self, what: str, tensor: Any) -> None:
        kind = "a tensor" if not is_stand_in(tensor) else f"a tensor {TensorSpec.of(tensor)}"
        self.failed = TensorTextError(
            f"the {what} of {kind} is read at {self.where()}: values of a compiled call exist only in its graph. "
            "Print, log or save the result of the function."
        )
        raise self.failed


def _text(asked: ValuesAsked, tensor: Any, *_: Any, **__: Any) -> Any:
    asked.refuse("text", tensor)


def _reduced(asked: ValuesAsked, tensor: Any, *_: Any, **__: Any) -> Any:
    """For `copy.copy`, a function that gives the copy; anybody else stores the tensor's contents."""
    if not is_stand_in(tensor) or not _is_called_by(copy.copy.__code__):
        asked.refuse("pickle", tensor)
    return _copied, (tensor,)


def _is_called_by(code: types.CodeType) -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_program_module(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame.f_code is code


def _copied(tensor: Any) -> Any:
    return _as_plain(tensor, tensor.data, dict(tensor.__dict__))


def _deep_copy(asked: ValuesAsked, tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    spec = TensorSpec.of(tensor)
    is_whole = spec.is_dense and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if not is_whole or tensor.grad is not None:
        raise UnsupportedAliasError(
            f"copy.deepcopy at {asked.where()} of a tensor {spec} copies memory around it, or its "
            "`.grad`: use `.detach().clone()`."
        )
    with torch.no_grad():
        new = tensor.detach().clone()
    new = memo[id(tensor)] = _as_plain(tensor, new, copy.deepcopy(dict(tensor.__dict__), memo))
    return new


def _as_plain(tensor: Any, new: Any, attributes: dict[str, Any]) -> Any:
    """A tensor over `new`'s memory, with equal class, marks and attributes."""
    if type(tensor) is torch.nn.Parameter:
        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        new.requires_grad_()
    new.__dict__.update(attributes)
    return new


# The work done with these functions' arguments (stand-ins by then), in place of the call.
_OBJECTS: dict[Any, Callable[..., Any]] = {
    _TENSOR.__repr__: _text,
    _TENSOR.__reduce_ex__: _reduced,
    torch.nn.Parameter.__reduce_ex__: _reduced,
    _TENSOR.__deepcopy__: _deep_copy,
    torch.nn.Parameter.__deepcopy__: _deep_copy,
}


@aspect
class ValueReaders(Aspect):
    """The functions above. `asked`: text or a pickle of values was wanted."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder, self.asked = recorder, ValuesAsked(recorder.where)

    def resumed(self) -> Aspect:
        return ValueReaders(self.recorder.host, self.recorder)

    def raise_caught(self) -> None:
        if self.asked.failed is not None:
            raise self.asked.failed

    def _read(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        return _READERS[func](func, args, kwargs)

    def _formatted(self, func: Any, args: Args, kwargs: Kwargs) -> str:
        tensor, spec = args
        if type(tensor) is not torch.Tensor or tensor.dim() or not is_stand_in(tensor):
            self.asked.refuse("text", tensor)
        return format(self.recorder.decisions.numbers.ours(tensor.item()), spec)

    def _indexed(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """PyTorch takes an integer tensor without dimensions as its number."""
        index = args[1]
        index = tuple(map(self._number, index)) if type(index) is tuple else self._number(index)
        return _item(func, (args[0], index, *args[2:]), kwargs)

    def _number(self, index: Any) -> Any:
        is_one = type(index) is torch.Tensor and index.dim() == 0 and index.dtype in _INTEGERS
        return self.recorder.decisions.numbers.ours(index.item()) if is_one else index

    def _as_object(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        return _OBJECTS[func](self.asked, *args, **kwargs)

    def _as_array(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Of a tensor, what `asarray` does to its history in C++ is done by functions that are recorded."""
        data = args[0] if args else kwargs["obj"]
        if not isinstance(data, torch.Tensor):
            return _READERS[func](func, args, kwargs)
        requires_grad = kwargs.get("requires_grad", AS_ARRAY_REQUIRES_GRAD)
        if requires_grad is not None:  # told to leave it as it is
            dtype = kwargs.get("dtype") or data.dtype
            has_history = data.requires_grad and (dtype.is_floating_point or dtype.is_complex)
            kwargs = {**kwargs, "requires_grad": has_history}
        made = func(*args, **kwargs)
        if requires_grad is None or made.requires_grad == requires_grad:
            return made
        with self.recorder.host.lifting:
            return made.requires_grad_(requires_grad) if requires_grad or made.is_leaf else made.detach()

    def _made(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """A tensor of numbers; on `meta` PyTorch makes it below all modes."""
        made = _READERS[func](func, args, kwargs)
        if made.is_meta and not is_stand_in(made):
            constant = self.recorder.constant(made)
            return constant.requires_grad_() if made.requires_grad else constant
        return made

    functions: ClassVar[Mapping[Any, Row]] = {
        **dict.fromkeys(_READERS, _read),
        **dict.fromkeys(_OBJECTS, _as_object),
        _TENSOR.__format__: _formatted,
        **dict.fromkeys((torch.Tensor.__getitem__, torch.Tensor.__setitem__), _indexed),
        torch.asarray: _as_array,
        torch.tensor: _made,
    }


_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
