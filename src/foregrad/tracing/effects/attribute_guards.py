"""What a program asks a tensor among its inputs besides values: whether it is a leaf, its `.grad`, its version, ...

What stands for the tensor in the capture would answer for itself. Here the real tensor's answer is given where the two
may differ, and each answer is a fact that a later call has to agree with: an expression of the input, and its value.
What no later call could agree with (an address) is refused.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import without_marks
from ...errors import UnsupportedError, UnsupportedSideEffectError
from ...frontend.expected import ABSENT
from ...frontend.libraries import is_of_library
from ...frontend.reads import Source, table_of
from ...frontend.scan import Scan
from ...graph.slots import Closure
from ...graph.spelling import ATTRIBUTES, key_text
from ...subclasses.spec import is_wrapper
from ..heap.records import InputRecord
from ..inputs.inputs import Inputs
from ..inputs.wrapper_inputs import WrapperInput
from .gradients import Gradients

_TENSOR: Any = torch.Tensor
_SET_GRAD = _TENSOR.grad.__set__
_PARAMETER = torch.nn.Parameter
_TABLES = {"vars", "__dict__", "__getstate__"}  # names in code by which it comes to all attributes of a tensor
_ATTRIBUTE = "{}.__dict__.get({name}, {absent})"

Asked = InputRecord | WrapperInput


class Facts:
    """Questions about tensors that one capture answered, and that guards ask again. `where()`: the user's line."""

    def __init__(self, inputs: Inputs, where: Callable[[], str]) -> None:
        self.inputs = inputs
        self.where = where
        # By the input's record, the question and the attribute that it is for: see `note`.
        self.made: dict[tuple[Asked, str, Any], Any] = {}
        self.gradients = Gradients(inputs, self.note, where)

    def ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer, or NotImplemented when it may be had from what stands for the tensor."""
        rule = _RULES.get(func)
        if rule is None or not args or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        record = self._record(args[0])
        if record is None:
            return NotImplemented
        return self._set_grad(record, func, *args[1:]) if func is _SET_GRAD else rule(self, record, func)

    def missing(self, tensor: torch.Tensor, name: str) -> None:
        """The program, or PyTorch's C++ in its place, asked for an attribute that the tensor does not have.

        PyTorch asks so about the tensors that it makes of numbers, which are no inputs.
        """
        inputs = self.inputs
        if is_wrapper(tensor):  # its class asks itself as it is taken apart; `attributes` sees to all of these
            return
        if not is_stand_in(tensor) and tensor not in inputs.by_real and not inputs.sources.known(tensor):
            return
        record = self._record(tensor)
        if record is not None:
            self.note(record, _ATTRIBUTE, ABSENT, name)

    def _table(self, record: Asked, func: Any = None) -> Any:
        """All attributes of a tensor may be asked for: it is to have no others."""
        self.note(record, ATTRIBUTES, tuple(record.real.__dict__))
        return NotImplemented

    def note(self, record: Asked, question: str, value: Any, attribute: Any = None) -> None:
        """Note the answer to a question: an expression with `{}` for the input, and with `{name}` for an attribute."""
        self.made.setdefault((record, question, attribute), value)

    def attributes(self, names: set[str] | None) -> None:
        """What the user hung onto tensors, as far as code names it; `None`: code makes names up."""
        asked: list[Asked] = [*self.inputs.records, *self.inputs.wrappers.inputs]
        for record in asked:
            there = without_marks(record.hung if isinstance(record, WrapperInput) else record.real.__dict__)
            for name in there.keys() if names is None else names & there.keys():
                value = there[name]
                self.note(record, _ATTRIBUTE, value, name)
                self.inputs.reads.contents(value, f"{record.slot}.{name}")
                if not is_of_library(type(value)) or type(value) is types.SimpleNamespace:
                    self.inputs.reads.contents(table_of(value), f"{record.slot}.{name}.__dict__")
        for wrapper in self.inputs.wrappers.inputs:  # nothing tells what one is asked for in vain
            there = wrapper.real.__dict__
            if names is not None:
                absent = wrapper.told_apart(names - there.keys())
                self.note(wrapper, "{name}.isdisjoint({}.__dict__)", True, absent)
            elif not wrapper.is_of_torch:
                self.note(wrapper, ATTRIBUTES, tuple(there))

    def of(self, inputs: int, scan: Scan) -> tuple[tuple[int, str, str | None, Any], ...]:
        """What was asked of which input, by number: the question, an attribute, the answer; see `attributes`. The
        wrappers come after all `inputs`.
        """
        self.attributes(None if scan.makes_up_names else scan.names)
        if not scan.names.isdisjoint(_TABLES):
            for record in self.inputs.records:
                self._table(record)
        wrappers = self.inputs.wrappers.inputs
        number: dict[Any, int] = {known: inputs + wrappers.index(known) for known in wrappers}
        number |= {record: index for index, record in enumerate(self.inputs.records)}
        return tuple(
            (number[record], question, attribute, value)
            for (record, question, attribute), value in self.made.items()
            if record in number
        )

    def attribute_set(self) -> str | None:
        """An attribute that the function set on an argument, which no compiled call would do."""
        for record in self.inputs.records:
            ours, theirs = without_marks(record.stand_in.__dict__), without_marks(record.real.__dict__)
            if type(record.stand_in) is not (_PARAMETER if isinstance(record.real, _PARAMETER) else torch.Tensor):
                return f"{record.slot}.__class__"
            for name in ours.keys() | theirs.keys():
                if ours.get(name, ABSENT) is not theirs.get(name, ABSENT):
                    return f"{record.slot}.{name if str(name).isidentifier() else key_text(name)}"
        for wrapper in self.inputs.wrappers.inputs:
            for name in wrapper.attributes_set():
                return f"{wrapper.slot}.{name}"
        return None

    def _record(self, tensor: torch.Tensor) -> Asked | None:
        inputs = self.inputs
        if is_wrapper(tensor):
            inputs.adopt(tensor)
            return inputs.wrappers.find(tensor)
        found = inputs.by_stand_in.get(tensor) or inputs.by_real.get(tensor)
        if found is None and not is_stand_in(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            inputs.adopt(tensor)
            found = inputs.by_real.get(tensor)
        return found

    # ---------------------------------------------------------------- one answer each

    def _is_leaf(self, record: Asked, func: Any) -> Any:
        self.note(record, "{}.is_leaf", record.real.is_leaf)
        if isinstance(record, WrapperInput):  # its stand-in is made of those of its plain tensors
            return self._grad_fn(record, _TENSOR.grad_fn.__get__) is None
        return func(record.stand_in)

    def _grad_fn(self, record: Asked, func: Any) -> Any:
        real = record.real
        self.note(record, "type({}.grad_fn)", type(real.grad_fn))
        node = func(record.stand_in)
        unwritten = real.is_inference() or record.stand_in._version == record.start_version
        return real.grad_fn if node is not None and unwritten else node

    def _version(self, record: Asked, func: Any) -> Any:
        version = record.real._version
        self.note(record, "{}._version", version)
        return version + func(record.stand_in) - record.start_version

    def _base(self, record: Asked, func: Any) -> Any:
        self._is_view(record, func)
        if record.real._base is None:
            return None
        raise UnsupportedError(
            f"the base of `{record.slot}` is asked for at {self.where()}: pass that tensor as an argument instead."
        )

    def _is_view(self, record: Asked, func: Any) -> Any:
        self.note(record, "{}._base is None", record.real._base is None)
        return record.real._base is not None

    def _offset(self, record: Asked, func: Any) -> Any:
        if isinstance(record, WrapperInput):
            return NotImplemented
        self.note(record, "{}.storage_offset()", record.real.storage_offset())
        return NotImplemented

    def _storage(self, record: Asked, func: Any) -> Any:
        if isinstance(record, WrapperInput):
            return NotImplemented
        size = record.real.untyped_storage().nbytes()
        self.note(record, "{}.untyped_storage().nbytes()", size)
        if record.stand_in.untyped_storage().nbytes() != size:
            raise UnsupportedError(
                f"the memory behind `{record.slot}` is asked for at {self.where()}, and is larger than the tensor: "
                "pass a tensor of its own (`.clone()`)."
            )
        return NotImplemented

    def _hooks(self, record: Asked, func: Any) -> Any:
        self.note(record, "{}._backward_hooks is None", record.real._backward_hooks is None)
        return func(record.real)

    def _retains(self, record: Asked, func: Any) -> Any:
        self.note(record, "{}.retains_grad", record.real.retains_grad)
        return record.real.retains_grad or func(record.stand_in)

    def _of_memory(self, record: Asked, func: Any) -> Any:
        answer = func(record.real)
        self.note(record, f"{{}}.{func.__name__}()", answer)
        return answer

    def _address(self, record: Asked, func: Any) -> Any:
        raise UnsupportedError(
            f"the address of `{record.slot}` is asked for at {self.where()}: it is another one at every call. "
            "Compute with the tensor itself, or mark the function that asks with `foregrad.eager_region`."
        )

    def _grad(self, record: Asked, func: Any) -> Any:
        if isinstance(record, InputRecord):
            return self.gradients.read(record)
        real, stand_in, source = record.real, record.stand_in, record.source
        if not real.is_leaf and not real.retains_grad:
            return None
        grad = real.grad
        self.note(record, "{}.grad is None", grad is None)
        if grad is None:
            return func(stand_in) if stand_in.is_leaf else None
        if not isinstance(source, Source):
            raise UnsupportedError(
                f"`.grad` of `{record.slot}` is read at {self.where()}: pass that gradient as an argument instead."
            )
        self.inputs.sources.add(
            grad, Source(Closure(f"{record.slot}.grad"), source.root, (*source.steps, ("attr", "grad")))
        )
        return grad

    def _set_grad(self, record: Asked, func: Any, value: Any = None) -> Any:
        if isinstance(record, InputRecord):
            self.gradients.set(record, value)
            return NotImplemented
        if record.real.grad is not None:
            raise UnsupportedSideEffectError(
                f"`.grad` of {record.slot} is set at {self.where()}, which a compiled call can't repeat. Set it "
                "outside the compiled function, for example by the optimizer's `zero_grad()`."
            )
        self.note(record, "{}.grad is None", True)
        return NotImplemented  # what it is set to is looked at when the function has run: see `check_tensors`

    def _accumulated(self, record: Asked, func: Any) -> Any:
        raise UnsupportedSideEffectError(
            f"a hook is put on {record.slot} at {self.where()} (`register_post_accumulate_grad_hook`), where it would "
            "stay after the call. Put it there outside the compiled function."
        )


_RULES: dict[Any, Callable[[Facts, Asked, Any], Any]] = {
    _TENSOR.is_leaf.__get__: Facts._is_leaf,
    _TENSOR.grad_fn.__get__: Facts._grad_fn,
    _TENSOR._version.__get__: Facts._version,
    _TENSOR._base.__get__: Facts._base,
    _TENSOR._is_view: Facts._is_view,
    _TENSOR.storage_offset: Facts._offset,
    _TENSOR.untyped_storage: Facts._storage,
    _TENSOR._backward_hooks.__get__: Facts._hooks,
    _TENSOR.retains_grad.__get__: Facts._retains,
    _TENSOR.__dir__: Facts._table,
    _TENSOR.is_shared: Facts._of_memory,
    _TENSOR.is_pinned: Facts._of_memory,
    _TENSOR.data_ptr: Facts._address,
    _TENSOR.grad.__get__: Facts._grad,
    _TENSOR.grad.__set__: Facts._set_grad,
    _TENSOR.grad.__delete__: Facts._set_grad,
    _TENSOR.register_post_accumulate_grad_hook: Facts._accumulated,
}
