"""What the inputs and outputs of a joint graph with descriptors are, and which of the signature's each one is.

The graph takes parameters, buffers and arguments in their order, then tangents, and drops none: a tied parameter under
its further names and a plain number among the arguments are inputs that nothing reads. It returns new values of inputs,
results, tensors that results are views of, then a gradient or None for each input of the forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .._torch.nested import flattened
from .._torch.ops import OpOverload
from .._torch.wrappers import is_wrapper
from ..descriptors import classes, tangent_of
from ..errors import UnsupportedError
from ..frontend.call import FlatCall
from ..frontend.openings import FoundOpenings, Opening
from ..frontend.source import Source
from ..frontend.tree import Tree
from ..graph.signature import ConstantOutput, Handle, InputInfo, PartOf, Signature, WrapperOutput
from ..graph.slots import Base, Buffer, Param
from ..identity import ById
from ..tracing.tape.opinfo import op_info


@dataclasses.dataclass(frozen=True, slots=True)
class Primal:
    """An input of the forward. `input`: its number in the signature; None for one that nothing reads: a further name of
    the input `twin`, or the plain `value`. `place`: where it is among the flat arguments of a call; `part`: which plain
    tensor of the wrapper there.
    """

    desc: Any
    input: int | None
    place: int
    part: int | None = None
    twin: int | None = None
    value: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardOutput:
    """An output of the forward: the new value of an input, a result, or a tensor that results are views of.

    `output`: the graph output of the signature that it is; None for a view of one, an input, or a constant. `leaf`: the
    leaf of the result that it is, -1 for others.
    """

    desc: Any
    output: int | None
    leaf: int = -1
    input: int | None = None  # that is given back


@dataclasses.dataclass(frozen=True, slots=True)
class WrapperAt:
    """A wrapper subclass among the flat arguments, its kind and that of its gradient."""

    place: int
    spec: Opening
    gradient: Opening | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The inputs and outputs in order; `constants`: inputs of the signature that the graph has as constants.

    `tangents`: for each tangent, its position among the signature's. `wrappers`: in the order of the signature's.
    `tree`: the structure of a call of the compiled function; `given`: for each of its leaves, whether it is a tensor,
    the leaf that it is once more, its value otherwise; `leaves`: the leaf at each place.
    """

    names: tuple[str, ...]  # of parameters, then buffers
    num_parameters: int
    num_places: int
    primals: tuple[Primal, ...]
    constants: tuple[int, ...]
    forward: tuple[ForwardOutput, ...]
    tangents: tuple[tuple[int, Any], ...]
    wrappers: tuple[WrapperAt, ...]
    in_spec: Any
    out_spec: Any
    tree: Tree
    given: tuple[tuple[bool, int | None, Any], ...]
    leaves: tuple[int, ...]

    @property
    def number(self) -> dict[int, int]:
        """By an input of the signature: its number among the primals."""
        return {p.input: i for i, p in enumerate(self.primals) if p.input is not None}

    def position(self, output: int) -> int:
        """Where among the forward's outputs a graph output of the signature is."""
        return next(i for i, entry in enumerate(self.forward) if entry.output == output)


class _Whole:
    """Stands for a wrapper subclass in a structure: the numbers of the leaves that are its plain tensors."""

    def __init__(self, spec: Opening | None, leaves: Sequence[int]) -> None:
        self.spec, self.leaves = spec, leaves


def _in_order(tree: Tree) -> tuple[list[Any], Any]:
    """The numbers of the leaves in the order of PyTorch's pytree, a `_Whole` for each wrapper, and PyTorch's spec."""
    wrap: Callable[..., Any] = _Whole
    return flattened(tree.unflatten(list(range(tree.size)), wrap))


def layout_of(
    mod: nn.Module, call: FlatCall, signature: Signature, wrappers: FoundOpenings | None, *, writes_inside: bool
) -> Layout:
    """The layout for a captured module. `writes_inside`: updates of inputs are written in the graph, no outputs."""
    maker = _Maker(mod, call, signature, wrappers or FoundOpenings((), {}))
    forward, out_spec = maker.outputs(writes_inside=writes_inside)
    covered = {entry.output: entry.desc for entry in reversed(forward) if entry.output is not None}
    order = {entry.output: i for i, entry in reversed(list(enumerate(forward)))}
    differentiable = signature.gradients.differentiable
    tangents = sorted(range(len(differentiable)), key=lambda i: order[differentiable[i]])
    return Layout(
        (*maker.parameters, *maker.buffers),
        len(maker.parameters),
        len(maker.held) + len(maker.arguments),
        tuple(maker.primals),
        tuple(maker.constants),
        tuple(forward),
        tuple((i, tangent_of(covered[differentiable[i]])) for i in tangents),
        tuple(maker.wrappers_found()),
        maker.in_spec,
        out_spec,
        *maker.convention(),
    )


class _Maker:
    def __init__(self, mod: nn.Module, call: FlatCall, signature: Signature, wrappers: FoundOpenings) -> None:
        self.mod, self.call, self.signature, self.wrappers = mod, call, signature, wrappers
        self.classes = classes()
        self.parameters = dict(mod.named_parameters(remove_duplicate=False))
        self.buffers = dict(mod.named_buffers(remove_duplicate=False))
        self.held = [*self.parameters.values(), *self.buffers.values()]
        self.place_of: ById[Any, int] = ById()
        for place, tensor in enumerate(self.held):
            self.place_of.setdefault(tensor, place)
        self.arguments, _ = _in_order(call.tree)
        args, kwargs = call.tree.unflatten([0] * call.tree.size, lambda *_: 0)
        _, self.in_spec = flattened(([*[0] * len(self.held), *args], kwargs))
        self.constants: list[int] = []
        self.inputs_at: dict[int, list[tuple[str, int]]] = {}  # by place: paths in a wrapper, and inputs
        self.primals = [*self._held(), *self._given()]
        known = {primal.input for primal in self.primals}
        for number, info in enumerate(signature.inputs):
            if number not in known:
                self._check_constant(number, info)
                self.constants.append(number)

    # ---------------------------------------------------------------- inputs

    def _held(self) -> Iterator[Primal]:
        """The parameters and buffers, each under each of its names."""
        by_slot = {info.slot: i for i, info in enumerate(self.signature.inputs) if type(info.slot) in (Param, Buffer)}
        parts = self._parts_reached()
        names: list[tuple[Param | Buffer, Any]] = [
            *((Param(n), self.classes.ParamAOTInput(n)) for n in self.parameters),
            *((Buffer(n), self.classes.BufferAOTInput(n)) for n in self.buffers),
        ]
        for place, ((slot, desc), tensor) in enumerate(zip(names, self.held, strict=True)):
            first = self.place_of[tensor]
            if first == place and not is_wrapper(tensor):
                self.inputs_at[place] = [("", by_slot[slot])]
            elif first == place and place in parts:
                self.inputs_at[place] = parts[place]
            elif first == place:
                raise UnsupportedError(
                    f"`{slot.name}` is a {type(tensor).__qualname__} that the module does not use: it can't be an "
                    "input of the graph. Use it, or remove it from the module."
                )
            yield from self._primals(desc, place, first)

    def _primals(self, desc: Any, place: int, first: int) -> Iterator[Primal]:
        """The inputs for the tensor at a place, which is the one at the place `first`."""
        is_first = first == place
        for part, (path, number) in enumerate(self.inputs_at[first]):
            own, twin = (number, None) if is_first else (None, number)
            if path:
                yield Primal(self._part(desc, path), own, place, part, twin)
            else:
                yield Primal(desc, own, place, None, twin)

    def _parts_reached(self) -> dict[int, list[tuple[str, int]]]:
        """By place: the path and the input of each plain tensor of the wrappers that the module reached."""
        numbers = {
            (info.source.wrapper, info.source.part): i
            for i, info in enumerate(self.signature.inputs)
            if isinstance(info.source, PartOf)
        }
        found: dict[int, list[tuple[str, int]]] = {}
        for wrapper, reached in enumerate(self.wrappers.reached):
            place = self.place_of.get(reached.source.get())
            if place is None:
                raise UnsupportedError(f"the module reaches {reached.source.slot} by itself: make it a buffer")
            found[place] = [(path, numbers[(wrapper, i)]) for i, path in enumerate(reached.spec.paths())]
        return found

    def _given(self) -> Iterator[Primal]:
        """The arguments."""
        numbers = {info.argument: i for i, info in enumerate(self.signature.inputs) if info.argument is not None}
        for idx, leaf in enumerate(self.arguments):
            desc, place = self.classes.PlainAOTInput(idx), len(self.held) + idx
            is_whole = isinstance(leaf, _Whole)
            if is_whole and leaf.spec is None:
                raise UnsupportedError(
                    f"`{self.call.paths[leaf.leaves[0]]}` is an array: pass `torch.from_numpy(array)`"
                )
            leaves = leaf.leaves if is_whole else [leaf]
            value = self.call.leaves[leaves[0]]
            if not isinstance(value, torch.Tensor) and leaves[0] not in numbers:
                yield Primal(desc, None, place, value=value)
                continue
            first = self.place_of.setdefault(value, place) if isinstance(value, torch.Tensor) else place
            if first == place:
                paths = leaf.spec.paths() if is_whole else [""]
                self.inputs_at[place] = [(path, numbers[leaf]) for path, leaf in zip(paths, leaves, strict=True)]
            yield from self._primals(desc, place, first)

    def _part(self, desc: Any, path: str, *, output: bool = False) -> Any:
        make = self.classes.SubclassGetAttrAOTOutput if output else self.classes.SubclassGetAttrAOTInput
        for attr in path.strip(".").split("."):
            desc = make(desc, attr or "grad")
        return desc

    def _check_constant(self, number: int, info: InputInfo) -> None:
        """Raise unless an input is a tensor that the graph may have as a constant."""
        if not isinstance(info.source, Source):
            raise UnsupportedError(
                f"{info.slot} shares memory with a second input, and the module writes to this memory: give each "
                "its own"
            )
        if info.requires_grad or number in self.signature.changed_inputs:
            what = "requires grad" if info.requires_grad else "is written to"
            raise UnsupportedError(f"the module reaches {info.slot} by itself, and it {what}: make it a parameter")

    def wrappers_found(self) -> Iterator[WrapperAt]:
        """The wrapper subclasses in the order of the signature: arguments first, then closed-over wrappers."""
        for idx, leaf in enumerate(self.arguments):
            if isinstance(leaf, _Whole) and leaf.spec is not None:
                spec, gradient = self.wrappers.arguments.get(leaf.leaves[0], (leaf.spec, None))
                yield WrapperAt(len(self.held) + idx, spec, gradient)
        for reached in self.wrappers.reached:
            yield WrapperAt(self.place_of[reached.source.get()], reached.spec, reached.gradient)

    def convention(self) -> tuple[Tree, tuple[tuple[bool, int | None, Any], ...], tuple[int, ...]]:
        """How the compiled function is called: `Layout.tree`, `given` and `leaves`."""
        count, tree = len(self.held), self.call.tree
        arguments = tree.children[0]
        positional = dataclasses.replace(
            arguments, children=(*[Tree("leaf")] * count, *arguments.children), size=count + arguments.size
        )
        whole = dataclasses.replace(tree, children=(positional, tree.children[1]), size=count + tree.size)
        first: ById[Any, int] = ById()
        given: list[tuple[bool, int | None, Any]] = []
        for number, leaf in enumerate([*self.held, *self.call.leaves]):
            at = first.setdefault(leaf, number) if isinstance(leaf, torch.Tensor) else number
            is_tensor = isinstance(leaf, torch.Tensor)
            given.append((is_tensor, None if at == number else at, None if is_tensor else leaf))
        of_arguments = (leaf.leaves[0] if isinstance(leaf, _Whole) else leaf for leaf in self.arguments)
        return whole, tuple(given), (*range(count), *(count + leaf for leaf in of_arguments))

    # ---------------------------------------------------------------- outputs

    def outputs(self, *, writes_inside: bool) -> tuple[list[ForwardOutput], Any]:
        signature, classes_ = self.signature, self.classes
        number = {p.input: p for p in reversed(self.primals)}
        order = {p.input: i for i, p in reversed(list(enumerate(self.primals)))}
        found: list[ForwardOutput] = []
        if not (writes_inside and signature.is_inference):
            for update in sorted(signature.updates, key=lambda update: order[update.input]):
                found.append(ForwardOutput(classes_.InputMutationAOTOutput(number[update.input].desc), update.output))
        leaves, spec = _in_order(signature.structure.output_spec)
        results = [
            entry for idx, leaf in enumerate(leaves) for entry in self._result(classes_.PlainAOTOutput(idx), leaf)
        ]
        found += results
        covered = {entry.output for entry in found}
        infos = signature.structure.outputs
        users: dict[int, Any] = {}
        for entry in results:
            base = getattr(infos[entry.leaf], "output", None)
            if base is not None:
                users.setdefault(base, entry.desc)
        for output, slot in enumerate(signature.graph_outputs.slots):
            if output not in covered and isinstance(slot, Base) and output in users:
                found.append(ForwardOutput(classes_.IntermediateBaseAOTOutput(users[output]), output))
            elif output not in covered and not (writes_inside and signature.is_inference):
                raise UnsupportedError(f"the graph has an output that is no result: {slot}")
        return found, spec

    def _result(self, desc: Any, leaf: Any) -> Iterator[ForwardOutput]:
        if isinstance(leaf, _Whole):
            assert leaf.spec is not None
            for path, number in zip(leaf.spec.paths(), leaf.leaves, strict=False):
                yield self._leaf(self._part(desc, path, output=True), number)
            return
        info = self.signature.structure.outputs[leaf]
        if not isinstance(info, WrapperOutput):
            yield self._leaf(desc, leaf)
            return
        parts = self.signature.structure.wrapper_parts[info.wrapper]
        at = self._wrapper_paths(parts)
        for path, number in zip(at, parts, strict=False):
            yield ForwardOutput(self._part(desc, path, output=True), None, leaf, number)

    def _wrapper_paths(self, parts: Sequence[int]) -> list[str]:
        by_input: Mapping[int | None, Any] = {p.input: p.desc for p in self.primals}
        return [f".{by_input[part].attr}" for part in parts]

    def _leaf(self, desc: Any, leaf: int) -> ForwardOutput:
        info = self.signature.structure.outputs[leaf]
        if isinstance(info, ConstantOutput):
            return ForwardOutput(desc, None, leaf)
        assert isinstance(info, Handle)
        if info.steps or info.output is None:
            return ForwardOutput(desc, None, leaf, None if info.steps else info.input)
        return ForwardOutput(desc, info.output, leaf)


def placeholder_names(count: int, tangents: int, *, inference: bool) -> list[str]:
    """What the inputs are called: as partitioners and compilers expect."""
    if inference:
        return [f"arg{i}_1" for i in range(count)]
    return [*(f"primals_{i + 1}" for i in range(count)), *(f"tangents_{i + 1}" for i in range(tangents))]


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and op_info(node.target).is_view


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
