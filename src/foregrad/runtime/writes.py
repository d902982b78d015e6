"""Writes of a call and of its backward, into tensors and the program's objects: lines, and functions called there."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._torch import engine
from .._torch.tensors import is_view
from ..errors import UnsupportedMutationError
from ..frontend.openings import opener
from ..graph.effect_log import CheckInfo, Write
from ..graph.meta import TensorSpec
from ..graph.python_effects import (
    AddToSet,
    CallMethod,
    DeleteAttribute,
    DeleteItem,
    OfArgument,
    PythonWrite,
    RemoveFromSet,
    SetAttribute,
    SetCell,
    SetItem,
    SetItems,
    put_back_deque,
)
from ..graph.signature import Signature
from ..graph.source import Names, literal, unpacked
from .decisions import check_arguments, generator_lines, one_call
from .lines import LineWriter, op_name


def write_with_history(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target` takes the elements and the autograd history of `value`.

    Its earlier history is an input of the autograd node already: a copy would also send it zeros.
    """
    if not is_view(target) and not target.retains_grad:
        target.detach_()
    target.copy_(value)


def write_overlapping(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a tensor with elements that overlap in memory; overlapping elements of `value` are equal."""
    for dim in range(target.dim()):
        if target.stride(dim) == 0 and target.size(dim) > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if TensorSpec.of(target).overlaps_itself:
        for part, new in zip(target.unbind(0), value.unbind(0), strict=True):
            write_overlapping(part, new)
    else:
        target.copy_(value)


class _History(torch.autograd.Function):
    """Tensors that require grad and are no leaves, with gradients that go nowhere."""

    @staticmethod
    def forward(ctx: Any, nobody: torch.Tensor, tensors: list[torch.Tensor], error: Exception | None) -> Any:
        ctx.error = error
        return tuple(tensor.data for tensor in tensors)  # without their view relations

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.error is not None:
            raise type(ctx.error)(*ctx.error.args)
        return None, None, None


_history = engine.direct_apply(_History)
_nobody = torch.empty(0, requires_grad=True)


def with_history(tensors: list[torch.Tensor], error: Exception | None = None) -> tuple[torch.Tensor, ...]:
    """The tensors as results of a differentiable operator without a path to any input.

    `error`: the exception of their backward.
    """
    result: tuple[torch.Tensor, ...] = _history(_nobody, tensors, error)
    return result


# ------------------------------------------------------------------------------------------------ writes of a backward
# Lines for the effects of a backward besides gradients: its checks, then its writes, after it has run.


class EffectLines(LineWriter):
    """The lines of one node's backward, and their globals."""

    def __init__(self, signature: Signature, names: Names, globals: dict[str, Any], tangents: list[str]) -> None:
        super().__init__(names)
        self.signature, self.effects, self.tangents = signature, signature.backward, tangents
        self.globals = globals
        self.results = [names.fresh(f"effect_{i + 1}") for i in range(len(self.effects.outputs))]
        self.save, self.undo = generator_lines(self.effects.generators, self.bind)
        self.wrapped = {one.input: names.fresh(f"grad_{one.input + 1}") for one in self.effects.wrapped}
        self.live = [names.fresh(f"live_{i + 1}") for i in range(len(self.effects.live))]

    def first(self) -> list[str]:
        """Lines at the beginning of every backward."""
        if not self.effects.once:
            return []
        once = self.bind("refuse_again", _refusing(self.effects.once))
        return ["if hasattr(ctx, 'has_run'):", f"    {once}()", "ctx.has_run = True"]

    def before(self) -> list[str]:
        """Lines before the graph."""
        live = [f"{unpacked(self.live)}ctx.live"] if self.live else []
        return [*live, *self.save]

    def after(self) -> list[str]:
        """Lines after the graph."""
        lines = [line for check in self.effects.checks for line in self._check(check)]
        for update in self.effects.updates:
            if update.live is None:
                target, spec = self.tangents[update.tangent], self.signature.gradients.tangent_specs[update.tangent]
            else:
                target, spec = self.live[update.live], self.signature.inputs[self.effects.live[update.live]].spec
            lines.append(update_line(self, target, self.results[update.output], spec, counted=update.counted))
        for gradient in self.effects.wrapped:
            parts = ", ".join(self.results[output] for output in gradient.outputs)
            make = self.bind("wrap", functools.partial(opener().rebuilt, gradient.spec))
            lines.append(f"{self.wrapped[gradient.input]} = {make}([{parts}])")
        return lines

    def _check(self, check: CheckInfo) -> list[str]:
        op = self.bind(op_name(check.op), check.op)
        return one_call(op, check_arguments(self, check, (), self.results), check, self.undo)


def update_line(writer: LineWriter, target: str, value: str, spec: TensorSpec, *, counted: bool) -> str:
    """A write to a tensor: autograd sees only its version."""
    # Neither counts as a write to a leaf; `detach` shares the version counter, `data` does not.
    hidden = f"{target}.{'detach()' if counted else 'data'}"
    if spec.overlaps_itself:
        return f"{writer.bind('write_overlapping', write_overlapping)}({hidden}, {value})"
    return f"{hidden}.copy_({value})"


def graph_arguments(names: Sequence[str], forward: Any, updates: Iterable[Write]) -> str:
    """A graph's arguments, without gradients, as a list. It writes to an input whose version stays through `data`."""
    done = {number for number, _ in getattr(forward, "updated", ())}
    hidden = done & {update.input for update in updates if not update.counted}
    return f"[{', '.join([f'{name}.data' if i in hidden else name for i, name in enumerate(names)])}]"


def _refusing(message: str) -> Any:
    def refuse_again() -> None:
        raise UnsupportedMutationError(message)

    return refuse_again


# ---------------------------------------------------------------------------------------------------- writes to Python
# Lines for side effects in Python: one for each write, in program order, at the end of a call.


def write_lines(writer: LineWriter, writes: Sequence[PythonWrite], values: list[str]) -> list[str]:
    """Lines for `writes`, given the expressions of the written values."""
    return [_LINES[type(write)](writer, write, values) for write in writes]


def _key(writer: LineWriter, key: Any) -> str:
    return literal(key) or writer.bind("key", key)


def _table(writer: LineWriter, write: PythonWrite) -> str:
    target = write.target
    if type(target) is not OfArgument:
        return writer.bind("state", target)
    name = writer.containers[target.number]
    if not target.attributes:
        return name
    return f"{writer.bind('attribute_of', object.__getattribute__)}({name}, '__dict__')"


def _class(write: PythonWrite) -> type:
    """The class of the target."""
    target = write.target
    if type(target) is not OfArgument:
        return type(target)
    return dict if target.attributes else target.cls


def _unbound(writer: LineWriter, write: Any, method: str) -> str:
    """A method of the built-in class behind the target, even if its own class overrides it."""
    bases = (collections.OrderedDict, dict, list, collections.deque, set)
    base = next(base for base in bases if issubclass(_class(write), base))
    return writer.bind(f"{base.__name__}_{method.strip('_')}", getattr(base, method))


def _set_item(writer: LineWriter, write: SetItem, values: list[str]) -> str:
    table, key = _table(writer, write), _key(writer, write.key)
    if _class(write) is dict:
        return f"{table}[{key}] = {values[write.value]}"
    return f"{_unbound(writer, write, '__setitem__')}({table}, {key}, {values[write.value]})"


def _delete_item(writer: LineWriter, write: DeleteItem, values: list[str]) -> str:
    return f"{_unbound(writer, write, 'pop')}({_table(writer, write)}, {_key(writer, write.key)}, None)"


def _set_attribute(writer: LineWriter, write: SetAttribute, values: list[str]) -> str:
    setter = type.__setattr__ if isinstance(write.target, type) else object.__setattr__
    name = literal(write.name) or writer.bind("name", write.name)
    return f"{writer.bind('set_attribute', setter)}({_table(writer, write)}, {name}, {values[write.value]})"


def _delete_attribute(writer: LineWriter, write: DeleteAttribute, values: list[str]) -> str:
    deleter = type.__delattr__ if isinstance(write.target, type) else object.__delattr__
    name = literal(write.name) or writer.bind("name", write.name)
    return f"{writer.bind('delete_attribute', deleter)}({_table(writer, write)}, {name})"


def _call_method(writer: LineWriter, write: CallMethod, values: list[str]) -> str:
    container = _table(writer, write)
    if write.kind != "self":
        container = f"{container}[{_key(writer, write.key)}]" if write.kind == "item" else f"{container}.{write.key}"
    if write.name == "__setitem__":
        key, value = (values[at] for at in write.args)
        return f"{container}[{key}] = {value}"
    return f"{container}.{write.name}({', '.join(values[at] for at in write.args)})"


def _set_cell(writer: LineWriter, write: SetCell, values: list[str]) -> str:
    cell = writer.bind("cell", write.target)
    return f"del {cell}.cell_contents" if write.value is None else f"{cell}.cell_contents = {values[write.value]}"


def _set_items(writer: LineWriter, write: SetItems, values: list[str]) -> str:
    sequence = _table(writer, write)
    items = [values[item] if item >= 0 else f"{sequence}[{-1 - item}]" for item in write.items]
    if issubclass(_class(write), collections.deque):
        return f"{writer.bind('set_deque', put_back_deque)}({sequence}, [{', '.join(items)}])"
    if _class(write) is list:
        return f"{sequence}[{write.start}:] = [{', '.join(items)}]"
    return f"{_unbound(writer, write, '__setitem__')}({sequence}, slice({write.start}, None), [{', '.join(items)}])"


def _add(writer: LineWriter, write: AddToSet, values: list[str]) -> str:
    return f"{_unbound(writer, write, 'add')}({_table(writer, write)}, {values[write.value]})"


def _remove(writer: LineWriter, write: RemoveFromSet, values: list[str]) -> str:
    return f"{_unbound(writer, write, 'discard')}({_table(writer, write)}, {values[write.value]})"


_LINES: dict[type, Callable[[LineWriter, Any, list[str]], str]] = {
    SetItem: _set_item,
    DeleteItem: _delete_item,
    SetAttribute: _set_attribute,
    DeleteAttribute: _delete_attribute,
    SetCell: _set_cell,
    SetItems: _set_items,
    AddToSet: _add,
    CallMethod: _call_method,
    RemoveFromSet: _remove,
}
