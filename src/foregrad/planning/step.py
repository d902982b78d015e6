"""The step that is planned: the user's function up to its loss, captured as one graph, with the tensors around it."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .._torch.fakes import without_fake_mode
from .._torch.nested import leaves
from .._torch.wrappers import is_wrapper, parts_of
from ..api import capture
from ..errors import PlanError, UnsupportedDataDependentError, UnsupportedOpError
from ..extend import as_compiled, module_behind
from ..graph.joint import JointGraph
from ..graph.signature import PartOf
from ..graph.slots import Buffer, Param
from ._torch import replicated, unsharded
from .asked import SaidValues, line_asked
from .kernels import AcceleratorKernels
from .links import forget_waits
from .reached import modules_in
from .symbols import at_sizes
from .work import own_path

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is there through the whole step. `kind`: "parameter", "buffer", "argument" or "closed over";
    `has_gradient`: the backward makes one for it. `elements`: of all ranks' parts of a parameter; `tensor` is this
    rank's; `is_sparse`: its gradient is; `whole`: the wrapper that it is in, or itself.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    has_gradient: bool

    elements: int = 0
    whole: Any = None
    is_sparse: bool = False

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingStep:
    """A captured step. `held`: what is there before and after it. `known`: the numbers that the function asked tensors
    for, by line.
    """

    name: str
    joint: JointGraph
    held: tuple[Held, ...]
    known: Mapping[str, list[Any]]

    def at(self, fn: Any, values: Mapping[Any, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingStep:
        """The step at these values of its graph's symbols, the values of these arguments."""
        joint = at_sizes(self.joint, values)
        with planned(fn) as plain:
            return TrainingStep(self.name, joint, _held_by(plain, joint, args, kwargs), self.known)

    def of_kind(self, kind: str) -> list[Held]:
        return [one for one in self.held if one.kind == kind]


def step_of(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_accelerator: bool,
    sizes: Mapping[str, Any] = types.MappingProxyType({}),
) -> TrainingStep:
    """Capture a function or module for a training step. `sizes`: values that are not there, by line.

    Raises `PlanError` where it has no loss, `UnsupportedDataDependentError` for a value that `sizes` lacks.
    """
    name = str(getattr(_plain(fn), "__name__", type(_plain(fn)).__name__))
    said = SaidValues(sizes)

    def step(*args: Any, **kwargs: Any) -> Any:
        with AcceleratorKernels() if is_accelerator else contextlib.nullcontext(), said:
            result = plain(*args, **kwargs)
        return loss_in(result, name)

    with without_fake_mode(), planned(fn) as plain, torch.enable_grad():
        try:
            joint = capture(step, *args, **kwargs)
        except UnsupportedDataDependentError as error:
            line = line_asked(error).rpartition("/")[2] or "model.py:41"
            remedy = (
                f"say the number, or how many elements there are: sizes={{{line!r}: 128}}; for a branch, True or False."
            )
            if any(line == one.rpartition("/")[2] for one in sizes):
                remedy = (
                    f"sizes= has a value for {line} already, and an operator at the line reads a tensor of values: "
                    "pass that tensor, such as lengths, with its values on the CPU."
                )
            raise UnsupportedDataDependentError(f"{error} For a plan, {remedy}") from error
        except UnsupportedOpError as error:
            if "to NumPy" not in str(error):
                raise
            raise UnsupportedOpError(
                f"{error} For a plan, pass the results of such a part (the pairs of a matching, for one) as arguments."
            ) from error
        if joint.backward_error is not None:
            failed = f"the backward of `{name}` fails: {joint.backward_error}"
            if "a second time" in failed:
                failed += f" Leave `backward` and the optimizer out of `{name}`, and make a plan of each loss."
            raise PlanError(failed) from joint.backward_error
        if joint.signature.is_inference:
            raise PlanError(
                f"`{name}` has no backward, so there is no training to plan: its result has no gradient with "
                "respect to a parameter or argument that requires one"
            )
        forget_waits(joint)
        return TrainingStep(name, joint, _held_by(plain, joint, args, kwargs), said.known)


def _plain(fn: Any) -> Any:
    """The function or module behind a compiled one, and inside a `DistributedDataParallel`."""
    compiled = as_compiled(fn)
    fn = fn if compiled is None else module_behind(fn) or compiled.function
    copies = replicated(fn)
    return fn if copies is None else _plain(copies[0])


@contextlib.contextmanager
def planned(fn: Any) -> Iterator[Any]:
    """Context: the function or module as one rank computes it, with whole parameters."""
    plain = _plain(fn)
    with contextlib.ExitStack() as inside:
        for module in modules_in(plain):
            inside.enter_context(unsharded(module))
        yield plain


def loss_in(result: Any, name: str) -> torch.Tensor:
    """The loss in what a function gives: the result, its `loss`, or the only single number in it."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(result, torch.Tensor) or isinstance(found, torch.Tensor):
        return found if isinstance(found, torch.Tensor) else result
    tensors = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    singles = [tensor for tensor in tensors if tensor.numel() == 1]
    chosen = singles if len(singles) == 1 else tensors
    if len(chosen) != 1:
        raise PlanError(
            f"`{name}` gives {len(tensors)} tensors with gradients, and none is called `loss`. Name the loss: "
            f"foregrad.plan(lambda *args: {name}(*args)[0], ...)"
        )
    return chosen[0]


def _held_by(plain: Any, joint: JointGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Held, ...]:
    module = plain if isinstance(plain, torch.nn.Module) else None
    state = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    parts = [
        (name, whole, part) for name, whole in state for part in (parts_of(whole) if is_wrapper(whole) else [whole])
    ]
    names = {id(part): name for name, _, part in parts}
    returned = joint.signature.gradients.returned
    arguments = [*leaves((args, dict(kwargs)))]
    tensors = [_tensor_of(info, arguments) for info in joint.signature.inputs]
    # DTensor's embedding, for one, has a gradient with a layout of its own: it comes as a wrapper.
    made = {
        info.source.wrapper
        for info, pair, given in zip(joint.signature.inputs, tensors, returned, strict=True)
        if given and pair is None and isinstance(info.source, PartOf)
    }
    found: dict[int, Held] = {}
    gradients = joint.outputs()[joint.signature.num_forward_outputs :]
    for info, pair, given, gradient in zip(joint.signature.inputs, tensors, returned, gradients, strict=False):
        if pair is None or id(pair[0]) in found:
            continue
        tensor, whole = pair
        kind = "argument" if info.argument is not None else _kind(info.slot, whole)
        slot = info.source.of.slot if isinstance(info.source, PartOf) else info.slot
        name = names.get(id(tensor)) or getattr(slot, "name", None) or getattr(slot, "path", str(slot))
        gets = bool(given) or (isinstance(info.source, PartOf) and info.source.wrapper in made)
        found[id(tensor)] = Held(own_path(name), kind, tensor, gets, whole.numel(), whole, _is_sparse(gradient))
    for name, whole, tensor in parts:  # a tensor that no operator reads is there all the same
        kind = "parameter" if isinstance(whole, torch.nn.Parameter) else "buffer"
        found.setdefault(id(tensor), Held(name, kind, tensor, has_gradient=False, elements=whole.numel(), whole=whole))
    storages: dict[int, Held] = {}
    for one in found.values():  # each memory once
        storages.setdefault(one.tensor.untyped_storage()._cdata, one)
    return tuple(storages.values())


def _tensor_of(info: Any, arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The tensor that an input is, and the wrapper that it is in, or itself; None for a tensor that the step makes."""
    if info.argument is not None:
        value = arguments[info.argument] if info.argument < len(arguments) else None
    elif isinstance(info.source, PartOf):
        whole = info.source.of.get()
        parts = parts_of(whole)
        return (parts[info.source.part], whole) if info.source.part < len(parts) else None
    else:
        get: Callable[[], Any] | None = getattr(info.source, "get", None)
        value = None if get is None else get()
    return (value, value) if isinstance(value, torch.Tensor) else None


def _is_sparse(gradient: Any) -> bool:
    """Whether an embedding makes a gradient with `sparse=True`."""
    target = getattr(gradient, "target", None)
    return target is aten.embedding_sparse_backward.default or (
        target is aten._embedding_bag_backward.default and gradient.args[9:10] == (True,)
    )


def _kind(slot: Any, tensor: torch.Tensor) -> str:
    if isinstance(slot, Param) or isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "buffer" if isinstance(slot, Buffer) else "closed over"
