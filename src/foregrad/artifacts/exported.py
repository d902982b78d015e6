"""The forward of an artifact as a `torch.export.ExportedProgram`, for compilers and runtimes that take such programs.

PyTorch makes it: a module that holds the artifact's tensors under their names and runs its forward graph is exported
once more, by `torch.export.export`. Effects outside the graph (a view by its steps, a write to a buffer) follow in the
module, in the order of the program.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch.graphs import size_hint, symbol_of
from ..errors import ArtifactError
from ..frontend.tree import flatten
from ..graph.effect_log import Detach, MarkRequiresGrad, OutputInfo, TakeView, Write
from ..graph.meta import TensorSpec
from ..graph.signature import ConstantOutput, Handle
from .module import LoadedModule
from .program import Specialization
from .records import Stored
from .state import StateEntry


def exported_program(artifact: Any, specialization: Specialization, entries: list[StateEntry]) -> Any:
    """The forward of one specialization. Raises `ArtifactError` if an exported program can't express it."""
    reason = _refusal(specialization)
    if reason is not None:
        raise ArtifactError(f"the forward of `{artifact.name}` is no exported program: {reason}")
    module = _Forward(artifact, entries, "eager", {})
    module.__dict__["specialization"] = specialization
    args, kwargs = specialization.call.tree.unflatten([_example(leaf) for leaf in _inputs(specialization)])
    dims: Any = specialization.call.tree.unflatten([_dims(leaf, specialization) for leaf in _inputs(specialization)])
    shapes = {"args": dims[0], "kwargs": dims[1]} if kwargs else {"args": dims[0]}
    with torch.no_grad():
        try:
            return torch.export.export(
                module, args, kwargs, dynamic_shapes=shapes if specialization.joint.symbols is not None else None
            )
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise ArtifactError(
                f"the forward of `{artifact.name}` is no exported program: torch.export refused it ({text})"
            ) from error


def _refusal(specialization: Specialization) -> str | None:
    """The reason why a specialization can't be an exported program, or None."""
    signature = specialization.signature
    for info in signature.inputs:
        if info.argument is None and not isinstance(info.source, Stored):
            return f"{info.slot} is neither an argument nor held by the artifact"
        if info.number is not None:
            return f"the number {info.slot} may vary"
    for effect in signature.log:
        is_of_result = effect.result is not None and isinstance(effect, (TakeView, MarkRequiresGrad, Detach))
        if not (is_of_result or (isinstance(effect, Write) and effect.is_whole)):
            return f"it does more to its inputs than write to them ({effect})"
    if signature.python_writes:
        return "it writes to objects of Python"
    if signature.decisions:
        return f"it reads a value at {signature.decisions[0].where}"
    if signature.checks:
        return f"it checks values at {signature.checks[0].where}"
    return None


class _Forward(LoadedModule):
    """The artifact's tensors under their names; its forward is the graph of one specialization."""

    specialization: Specialization

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        specialization = self.specialization
        signature, places = specialization.signature, self._places()
        leaves, _ = flatten((args, kwargs))
        inputs = []
        for info in signature.inputs:
            if info.argument is not None:
                inputs.append(leaves[info.argument])
            else:
                table, key = places[info.source.name]
                inputs.append(table[key])
        results = list(specialization.forward(*inputs))[: signature.num_forward_outputs]
        views = [_value(info, inputs, results) for info in signature.outputs]
        for write in signature.updates:
            inputs[write.input].copy_(results[write.output])
        outputs = [
            _value(info, inputs, results) if getattr(info, "input", None) is not None else view
            for info, view in zip(signature.outputs, views, strict=True)
        ]
        return signature.output_spec.unflatten(outputs)


def _value(info: OutputInfo, inputs: list[Any], results: list[Any]) -> Any:
    if isinstance(info, ConstantOutput):
        return info.value
    assert isinstance(info, Handle)
    value = inputs[info.input] if info.input is not None else results[info.output or 0]
    for step in info.steps:
        value = step.op(value, *step.args, **dict(step.kwargs))
        value = value if step.index is None else value[step.index]
    return value


def _inputs(specialization: Specialization) -> list[Any]:
    """For each leaf of a call, its layout if it is a tensor, else the leaf."""
    specs: dict[int, TensorSpec] = {}
    for info in specialization.signature.inputs:
        if info.argument is not None:
            specs[info.argument] = info.spec
    items: list[Any] = []
    for number, leaf in enumerate(specialization.call.leaves):
        position = number if leaf.same_as is None else leaf.same_as
        items.append(specs.get(position, leaf) if leaf.is_tensor or leaf.same_as is not None else leaf)
    return items


def _example(item: Any) -> Any:
    if isinstance(item, TensorSpec):
        sizes, strides = ([size_hint(n) for n in numbers] for numbers in (item.shape, item.stride))
        return torch.empty_strided(sizes, strides, dtype=item.dtype, device=item.device).zero_()
    if item.is_tensor:
        raise ArtifactError(f"its argument {item.path} is never read, so its layout is unknown")
    return item.value


def _dims(item: Any, specialization: Specialization) -> Any:
    """The dimensions of an argument that may vary, with their limits."""
    if not isinstance(item, TensorSpec):
        return None
    table, dims = specialization.joint.symbols, {}
    for dim, size in enumerate(item.shape):
        if isinstance(size, torch.SymInt):
            symbol = symbol_of(size)
            low, high = (None, None) if symbol is None else table.limits(symbol)
            dims[dim] = torch.export.Dim.DYNAMIC(min=low, max=high)
    return dims or None
