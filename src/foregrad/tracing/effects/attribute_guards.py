"""A program's questions to its input tensors besides values: whether one is a leaf, its `.grad`, its version, ...

The tensor's stand-in would answer for itself. Here the real tensor answers where the two may differ, and each answer is
a fact that later calls must agree with: an expression of the input, and its value. A question without an answer common
to calls (an address) is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ..._torch.hooks import UNHOOKED, gradient_hooks, hooked_as, own_gradient, set_gradient
from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import base_of, history_of, is_view, without_marks
from ..._torch.wrappers import is_wrapper
from ...errors import UnsupportedError, UnsupportedSideEffectError
from ...frontend.source import ABSENT, Source, table_of
from ...frontend.state import of_python
from ...graph.call_effects import CallEffect, ClearGradient, EffectTarget, SetGradient
from ...graph.signature import OutputInfo, PartOf
from ...graph.slots import Closure
from ...graph.source import ATTRIBUTES, key_text
from ...house import is_house_code
from ...identity import ById, IdSet
from ..aspect import Aspect, Settled
from ..heap.records import InputRecord
from ..inputs.inputs import GradientSource, Inputs
from ..inputs.open_inputs import OpenInput
from ..tape.gradient_paths import other_leaves

_TENSOR: Any = torch.Tensor
_SET_GRAD = _TENSOR.grad.__set__
_PARAMETER = torch.nn.Parameter
_TABLES = {"vars", "__dict__", "__getstate__"}  # names by which code reaches all attributes of a tensor
_ATTRIBUTE = "{}.__dict__.get({name}, {absent})"

Asked = InputRecord | OpenInput


class Facts:
    """Questions about tensors that one capture answered, and that guards ask again. `where()`: the user's line."""

    def __init__(self, inputs: Inputs, where: Callable[[], str]) -> None:
        self.inputs = inputs
        self.where = where
        # By the input's record, the question and the attribute that it is for: see `note`.
        self.made: dict[tuple[Asked, str, Any], Any] = {}
        self.gradients = Gradients(inputs, self.note, where)

    def ask(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """The answer, or NotImplemented when the stand-in may answer."""
        rule = _RULES.get(func)
        if rule is None or not args or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        record = self._record(args[0])
        if record is None:
            return NotImplemented
        return self._set_grad(record, func, *args[1:]) if func is _SET_GRAD else rule(self, record, func)

    def missing(self, tensor: torch.Tensor, name: str) -> None:
        """The program, or PyTorch's C++ in its place, asked for an attribute that the tensor does not have.

        PyTorch asks so about its tensors for numbers: these are no inputs.
        """
        inputs = self.inputs
        if is_wrapper(tensor):  # its class asks as the wrapper is taken apart; see `attributes`
            return
        if not is_stand_in(tensor) and tensor not in inputs.by_real and not inputs.sources.known(tensor):
            return
        record = self._record(tensor)
        if record is not None:
            self.note(record, _ATTRIBUTE, ABSENT, name)

    def _table(self, record: Asked, func: object = None) -> Any:
        """All attributes of a tensor may be asked for: guard the whole table."""
        self.note(record, ATTRIBUTES, tuple(record.real.__dict__))
        return NotImplemented

    def note(self, record: Asked, question: str, value: object, attribute: Any = None) -> None:
        """Note the answer to a question: an expression with `{}` for the input, and with `{name}` for an attribute."""
        self.made.setdefault((record, question, attribute), value)

    def attributes(self, names: AbstractSet[str] | None) -> None:
        """The user's attributes of tensors, as far as code names them; `None`: code makes names up."""
        asked: list[Asked] = [*self.inputs.records, *self.inputs.wrappers.inputs]
        for record in asked:
            there = without_marks(record.real.__dict__ if isinstance(record, InputRecord) else record.hung)
            for name in there.keys() if names is None else names & there.keys():
                value = there[name]
                self.note(record, _ATTRIBUTE, value, name)
                self.inputs.reads.contents(value, f"{record.slot}.{name}")
                if not of_python().is_of_library(type(value)) or type(value) is types.SimpleNamespace:
                    self.inputs.reads.contents(table_of(value), f"{record.slot}.{name}.__dict__")
        for wrapper in self.inputs.wrappers.inputs:  # nothing tells of attributes that are asked for in vain
            there = wrapper.real.__dict__
            if names is not None:
                absent = wrapper.told_apart(names - there.keys())
                self.note(wrapper, "{name}.isdisjoint({}.__dict__)", True, absent)
            elif not wrapper.is_of_torch:
                self.note(wrapper, ATTRIBUTES, tuple(there))

    def of(
        self, inputs: int, names: AbstractSet[str], *, makes_up_names: bool
    ) -> tuple[tuple[int, str, str | None, Any], ...]:
        """The questions, by input number: the question, an attribute, the answer; see `attributes`. The wrappers come
        after all `inputs`. `names`: those in the code that ran, which may make up more.
        """
        self.attributes(None if makes_up_names else names)
        if not _TABLES.isdisjoint(names):
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
        """An attribute that the function set on an argument: compiled calls can't repeat that."""
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
        if not isinstance(record, InputRecord):  # the stand-in is made of its plain tensors' stand-ins
            return self._grad_fn(record, _TENSOR.grad_fn.__get__) is None
        return func(record.stand_in)

    def _grad_fn(self, record: Asked, func: Any) -> object:
        real = record.real
        self.note(record, "type({}.grad_fn)", type(real.grad_fn))
        node = func(record.stand_in)
        unwritten = real.is_inference() or record.stand_in._version == record.start_version
        return real.grad_fn if node is not None and unwritten else node

    def _version(self, record: Asked, func: Any) -> Any:
        version = record.real._version
        self.note(record, "{}._version", version)
        return version + func(record.stand_in) - record.start_version

    def _base(self, record: Asked, func: object) -> Any:
        self._is_view(record, func)
        if record.real._base is None:
            return None
        raise UnsupportedError(
            f"the base of `{record.slot}` is asked for at {self.where()}: pass that tensor as an argument instead."
        )

    def _is_view(self, record: Asked, func: object) -> bool:
        self.note(record, "{}._base is None", record.real._base is None)
        return record.real._base is not None

    def _offset(self, record: Asked, func: object) -> Any:
        if not isinstance(record, InputRecord):
            return NotImplemented
        self.note(record, "{}.storage_offset()", record.real.storage_offset())
        return NotImplemented

    def _storage(self, record: Asked, func: object) -> object:
        if not isinstance(record, InputRecord):
            return NotImplemented
        size = record.real.untyped_storage().nbytes()
        self.note(record, "{}.untyped_storage().nbytes()", size)
        if record.stand_in.untyped_storage().nbytes() != size:
            raise UnsupportedError(
                f"the memory behind `{record.slot}` is asked for at {self.where()}, and has not its size: "
                "pass a tensor of its own (`.clone()`)."
            )
        return NotImplemented

    def _hooks(self, record: Asked, func: Any) -> object:
        self.note(record, "{}._backward_hooks is None", record.real._backward_hooks is None)
        return func(record.real)

    def _retains(self, record: Asked, func: Any) -> object:
        self.note(record, "{}.retains_grad", record.real.retains_grad)
        return record.real.retains_grad or func(record.stand_in)

    def _of_memory(self, record: Asked, func: Any) -> object:
        answer = func(record.real)
        self.note(record, f"{{}}.{func.__name__}()", answer)
        return answer

    def _address(self, record: Asked, func: object) -> object:
        raise UnsupportedError(
            f"the address of `{record.slot}` is asked for at {self.where()}: it differs in each call. "
            "Compute with the tensor itself, or mark the function that asks with `foregrad.eager_region`."
        )

    def _grad(self, record: Asked, func: Any) -> object:
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

    def _set_grad(self, record: Asked, func: object, value: object = None) -> object:
        if isinstance(record, InputRecord):
            self.gradients.set(record, value)
            return NotImplemented
        if record.real.grad is not None:
            raise UnsupportedSideEffectError(
                f"`.grad` of {record.slot} is set at {self.where()}; a compiled call can't repeat this. Set it "
                "outside the compiled function, for example by the optimizer's `zero_grad()`."
            )
        self.note(record, "{}.grad is None", True)
        return NotImplemented  # the assigned value is looked at when the function has run: see `_check_tensors`

    def _accumulated(self, record: Asked, func: object) -> object:
        raise UnsupportedSideEffectError(
            f"a hook is put on {record.slot} at {self.where()} (`register_post_accumulate_grad_hook`), where it would "
            "stay after the call. Put it there outside the compiled function."
        )


_RULES: dict[object, Callable[[Facts, Asked, Any], object]] = {
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


# -------------------------------------------------------------------- gradients
# `.grad` of the inputs while a function runs: its value when the call begins, and when the call ends.
#
# A stand-in gets a `.grad` of its own when the function first sets it, or runs a backward that adds to it: autograd
# then treats the stand-in as eager treats the tensor. The gradient at entry is one more input. The gradient at the end
# is one more output, and each call sets it.


@dataclasses.dataclass(slots=True)
class _HeldGradient:
    """An input with its `.grad` on the stand-in. `was_cleared`: the function set `.grad = None` before reading it, so
    that the graph serves calls with and without a gradient at entry.
    """

    record: InputRecord
    was_cleared: bool
    final: torch.Tensor | None = None


class Gradients(Aspect):
    """The `.grad` of inputs in one run. `note(record, question, answer)`: see `Facts`; `where()`: the user's line."""

    def __init__(self, inputs: Inputs, note: Callable[..., None], where: Callable[[], str]) -> None:
        self.inputs, self.note, self.where = inputs, note, where
        self._held: dict[InputRecord, _HeldGradient] = {}
        self._is_over = False  # the function has run
        self.values: list[torch.Tensor] = []  # that are left in `.grad`, once the function has run
        self.hooks: list[Any] = []  # that backwards inside call

    # ---------------------------------------------------------------- while the function runs

    def read(self, record: InputRecord) -> torch.Tensor | None:
        """The program's `tensor.grad`."""
        if record in self._held:
            found = own_gradient(record.stand_in)
            real = None if found is None else self.inputs.real_of(found)
            return found if real is None else real
        real = record.real
        if not real.is_leaf and not real.retains_grad:
            return None
        if real.is_leaf and not self._is_over and _is_to_be_cleared():
            self.set(record, None)
            return None
        self._note(record)
        if real.grad is not None:
            self._know(record, real.grad)
            return real.grad
        return own_gradient(record.stand_in) if record.stand_in.is_leaf else None

    def set(self, record: InputRecord, value: object) -> None:
        """Before the program sets `tensor.grad`."""
        if self._is_over or not record.real.is_leaf:
            why = "not a leaf" if not self._is_over else "in the backward"
            raise UnsupportedSideEffectError(
                f"`.grad` of {record.slot}, {why}, is set at {self.where()}; a compiled call can't repeat this. Set "
                "it outside the compiled function."
            )
        if record not in self._held:
            self._note(record, is_cleared=value is None)
            self._held[record] = _HeldGradient(record, was_cleared=value is None)

    def accumulating(self, roots: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Context: autograd's engine adds the gradients of `roots` to `.grad`, and calls the hooks of tensors."""
        if self._is_over:  # the capture's own backward puts `.grad` back
            return contextlib.nullcontext()
        by_stand_in = self.inputs.by_stand_in
        if not all(is_stand_in(root) or is_wrapper(root) for root in roots):
            raise UnsupportedError(
                f"a backward begins at {self.where()}, at a tensor that is not computed in the function, or at a "
                "gradient edge. Run it outside the compiled function."
            )
        reached = [by_stand_in[leaf] for leaf in other_leaves(roots, ()) if leaf in by_stand_in]
        for record in reached:
            self._enter(record)
        return hooked_as([(record.stand_in, record.real) for record in reached])

    def _enter(self, record: InputRecord) -> None:
        """Gradients are about to be added to `.grad`, and hooks of the tensor are to see them."""
        hooks = gradient_hooks(record.real)
        for question, answer in hooks.items() if hooks else [(UNHOOKED, True)]:
            self.note(record, question, answer)
        self.hooks += [hook for hook in hooks.values() if not isinstance(hook, int)]
        if record in self._held or not record.real.is_leaf:
            return
        grad = record.real.grad
        self._note(record)
        if grad is not None:
            self._know(record, grad)
            set_gradient(record.stand_in, self.inputs.adopt(grad))
        self._held[record] = _HeldGradient(record, was_cleared=False)

    def _note(self, record: InputRecord, *, is_cleared: bool = False) -> None:
        """Each call is to find a gradient in `.grad`, or None, as the present call does. PyTorch warns on a question to
        a non-leaf: a part of a wrapper subclass may be a leaf in one call alone.
        """
        asked = "{0}.is_leaf and {0}" if record.real.is_leaf and not isinstance(record.source, PartOf) else "{}"
        question = f"{asked}.grad is {'None' if record.real.grad is None else 'not None'}"
        self.note(record, "{}.is_leaf" if is_cleared else question, True)

    def _know(self, record: InputRecord, grad: torch.Tensor) -> None:
        """Where the gradient that an input has at entry is found in each call."""
        source = GradientSource(Closure(f"{record.slot}.grad"), record.real)
        known = self.inputs.by_real.get(grad)
        if known is not None and getattr(known.source, "owner", None) is not record.real:
            raise UnsupportedError(
                f"`.grad` of {record.slot} is {known.slot}, and both are used at {self.where()}: only one can be an "
                "input. Use a copy."
            )
        self.inputs.sources.add(grad, source)

    # ---------------------------------------------------------------- when it has run

    def finish(self) -> tuple[list[Any], list[str]]:
        """The function has run: the `values`, and their places' names for people. The stand-ins lose their `.grad`."""
        paths, self._is_over = [], True
        for held in self._held.values():
            record = held.record
            held.final = own_gradient(record.stand_in)
            set_gradient(record.stand_in, None)
            real = None if held.final is None else self.inputs.real_of(held.final)
            if held.final is not None and (real is None or real is not record.real.grad):
                if is_wrapper(held.final):
                    raise UnsupportedSideEffectError(
                        f"a {type(held.final).__qualname__} is left in `.grad` of {record.slot}; a compiled call "
                        "can't repeat this. Use torch.autograd.grad, or do it outside."
                    )
                self.values.append(held.final)
                paths.append(f"{record.slot}.grad")
        return self.values, paths

    def effects(self, run: Settled) -> list[CallEffect]:
        """The effects on `.grad`. The last results are the `values`. A call that may stop clears none before the graph
        has run.
        """
        place = ById((value, len(run.paths) - len(self.values) + at) for at, value in enumerate(self.values))
        made: list[CallEffect] = []
        for held in self._held.values():
            final, target = held.final, EffectTarget(run.number[held.record], is_input=True)
            if final is not None and final not in place:
                continue
            has_gradient = held.was_cleared or held.record.real.grad is not None
            is_cleared = held.was_cleared and not run.may_stop
            made += [ClearGradient(target)] if is_cleared else []
            if final is not None:
                made.append(SetGradient(target, place[final]))
            elif has_gradient and not is_cleared:
                made.append(SetGradient(target, None))
        return made


def _is_to_be_cleared() -> bool:
    """Whether PyTorch's `zero_grad` asks, which sets a gradient to None where there is one."""
    frame = sys._getframe(2)
    while is_house_code(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code in _CLEARING and bool(frame.f_locals["set_to_none"])


_CLEARING = {inspect.unwrap(cls.zero_grad).__code__ for cls in (torch.optim.Optimizer, torch.nn.Module)}


# -------------------------------------------------------------------- gradients of results
# Results whose gradients can be looked at: results that retain their gradients, and leaves that the function makes.
#
# Each compiled call repeats `retain_grad()` on a result or an input. Results computed inside from a tensor that retains
# its gradient, or from a leaf made inside, are refused: that tensor or leaf would get no gradient.


def check_new_leaves(
    name: str,
    results: Sequence[object],
    infos: Sequence[OutputInfo],
    known: IdSet[Any],
    fakes: Sequence[torch.Tensor | None],
    wrappers: Sequence[Any],
) -> None:
    """No output of the graph (`fakes`) was computed from a leaf that the function made and gives back, or leaves in
    Python's state. `known`: results that are inputs. `wrappers`: results that are wrapper subclasses.
    """
    made = ById(
        (result, info.path)
        for result, info in zip(results, infos, strict=True)
        if isinstance(result, torch.Tensor) and result not in known and _is_leaf(result)
    )
    made |= ById((one, f"a {type(one).__qualname__}") for one in wrappers if one not in known and _is_leaf(one))
    if not made:
        return
    outputs = [fake for fake in fakes if fake is not None and history_of(fake) is not None]
    for leaf in other_leaves(outputs, ()):
        if leaf in made:
            raise UnsupportedSideEffectError(
                f"`{name}` makes the leaf {made[leaf]} and computes further results from the leaf: a compiled call "
                "would lose their gradient. Make the leaf outside, or compile the part that computes with it."
            )


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether the tensor itself was marked. A view is not asked: the question may change its history, or raise."""
    base = base_of(tensor) if is_view(tensor) else None
    return tensor.requires_grad and (tensor.is_leaf if base is None else not base.requires_grad)
