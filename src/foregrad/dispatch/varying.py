"""Sizes and numbers among the arguments that vary from call to call: choices of symbolic sizes, and of graphs that
serve all values.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch.engine import plain_execution
from .._torch.graphs import function_of
from .._torch.symbols import Size, concrete, is_symbolic, map_symbolic, may_vary
from .._torch.tensors import marked_in_torch
from ..errors import UnsupportedError
from ..frontend.call import FlatCall, is_item, memory_groups
from ..frontend.tree import Tree
from ..graph.joint import JointGraph
from ..graph.meta import TensorSpec, paddings, spec_of
from ..graph.signature import ConstantOutput, DecisionInfo, Handle, MemoryOf
from ..graph.source import described
from ..house import is_house_module

if TYPE_CHECKING:
    from ..tracing.capture import Captured

Limits = tuple["int | None", "int | None"]
_MARK = "_foregrad_dynamic"


def mark_dynamic(tensor: torch.Tensor, dim: int, min: int | None = None, max: int | None = None) -> None:
    """Say that dimension `dim` of an argument varies from call to call, between `min` and `max` when given.

    Then the first graph serves all sizes of 2 or more; without the mark, the second graph does. Sizes 0 and 1 always
    get separate graphs. A call of a program that works for one size only warns and runs eagerly; it raises
    `UnsupportedError` with `on_unsupported="raise"`, and in `capture`, `export` and `aot_function`. Raises
    `IndexError` for a dimension that does not exist, `ValueError` for a size out of range, `TypeError` for no tensor.

    Examples:
        >>> import torch, foregrad
        >>> double = foregrad.compile(lambda x: x * 2, backend="eager")
        >>> x = torch.ones(2)
        >>> foregrad.mark_dynamic(x, 0)
        >>> double(x).shape, double(torch.ones(5)).shape
        (torch.Size([2]), torch.Size([5]))
        >>> len(double.foregrad.specializations)
        1
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mark_dynamic marks a dimension of a tensor, not of {described(tensor)}")
    rank = tensor.dim()
    if not -rank <= dim < rank:
        raise IndexError(f"mark_dynamic: dimension {dim} of a tensor with {rank} dimensions")
    dim %= rank
    size = tensor.shape[dim]
    if (min is not None and size < min) or (max is not None and size > max):
        raise ValueError(f"dimension {dim} has size {size}, which is out of range: min={min}, max={max}")
    marks: dict[int, Limits] = dict(getattr(tensor, _MARK, {}))
    marks[dim] = (min, max)
    setattr(tensor, _MARK, marks)


def marked_dims(tensor: torch.Tensor) -> Mapping[int, Limits]:
    """The dimensions of a tensor that were passed to `mark_dynamic`, ours or PyTorch's, with their limits."""
    return {**marked_in_torch(tensor), **getattr(tensor, _MARK, {})}


class _EveryLine(frozenset[str]):
    def __contains__(self, line: object) -> bool:
        return True

    def __or__(self, lines: object) -> Any:
        return self


EVERY_LINE = _EveryLine(["every line"])
"""In place of the lines that read numbers which have varied: each number read may vary, from the first capture on."""


class SizesSeen:
    """Sizes and numbers among the arguments of one function's captures: a number that differed between two captures is
    symbolic.

    `dynamic` is None (as above), True (every size from the beginning) or False (only marked sizes). `open_sizes` are
    symbolic from the beginning: dimensions by the path of their tensor; an integer's path has none.
    """

    def __init__(self, dynamic: bool | None, open_sizes: Mapping[str, frozenset[int]] | None = None) -> None:
        self.dynamic = dynamic
        self.open = open_sizes or {}
        self.varied: frozenset[str] = frozenset()  # lines that read numbers with values that have varied
        self._hopeless = False
        self._closed = False
        self._seen: dict[tuple[str, int], list[set[int]]] = {}
        self._pitches_seen: dict[tuple[str, int], set[tuple[Size, Size]]] = {}
        self._numbers_seen: dict[tuple[str, type], set[str]] = {}
        self.constants: Counter[str] = Counter()  # by path, the captures that needed the value
        self._symbolic: Counter[str] = Counter()  # by path, the captures that serve all values

    def make_constant(self, paths: Iterable[str], symbolic: Iterable[str] = ()) -> None:
        """Note that a capture needed values of numbers, and served all values of `symbolic`. After two more captures
        that needed a value than did not, each value gets a graph of its own.
        """
        self.constants.update(paths)
        self._symbolic.update(symbolic)

    def close(self) -> None:
        """Note that the function can't be captured with sizes of its own left open: each gets a graph of its own."""
        self._closed = True

    def give_up(self) -> None:
        """Note that the function can't be captured with symbols: from now on every size gets a graph of its own."""
        self._hopeless = True

    def seen(self, call: FlatCall, decisions: Sequence[DecisionInfo]) -> FlatCall:
        """The call with the symbolic dimensions, and the lines that read symbolic numbers, noted on the call.
        `decisions`: of the graphs so far.
        """
        if self._hopeless:
            return call
        if self.dynamic is not False:
            call = dataclasses.replace(call, varied=self.varied | numbers_read(decisions))
        if self.dynamic is not False and not self._closed:
            call = dataclasses.replace(call, sizes=sizes_found(decisions), every_size=bool(self.dynamic))
        numbers = self._numbers(call)
        if numbers:
            call = dataclasses.replace(call, numbers=numbers)
        limits_by_leaf: dict[int, dict[int, Limits]] = {}
        padded: dict[int, frozenset[int]] = {}
        wrapper_of = {first + i: (spec, i) for first, spec in call.tree.wrappers() for i in range(spec.count)}
        for index, leaf in enumerate(call.leaves):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
                continue
            padded[index] = self._padded(call.paths[index], leaf)
            wrapper, part = wrapper_of.get(index, (None, 0))
            seen = self._seen.setdefault((call.paths[index], leaf.dim()), [set() for _ in leaf.shape])
            dims: dict[int, Limits] = {}
            for dim, size in enumerate(leaf.shape):
                if is_symbolic(size) or not (wrapper is None or wrapper.may_vary(part, dim)):
                    continue
                seen[dim].add(size)
                is_open = size > 1 and dim in self.open.get(call.paths[index], ())
                varies = len(seen[dim] - {0, 1}) > 1 or (wrapper is not None and wrapper.varies(part))
                if self.dynamic or is_open or (self.dynamic is None and varies):
                    dims[dim] = (None, None)
            dims |= {dim: limits for dim, limits in marked_dims(leaf).items() if not is_symbolic(leaf.shape[dim])}
            if dims and call.first_of[index] == index:
                limits_by_leaf[index] = dims
        return dataclasses.replace(call, dynamic=limits_by_leaf, padded=padded) if limits_by_leaf else call

    def _padded(self, path: str, tensor: torch.Tensor) -> frozenset[int]:
        """The dimensions with strides that differed between two captures at equal padding: of `batch[:, :-1]`, say.
        Among sizes open from the beginning, the padded dimensions, until the padding differs.
        """
        found = set()
        for dim, pitch, padding in paddings(tensor.shape, tensor.stride()) if tensor.layout is torch.strided else ():
            seen = self._pitches_seen.setdefault((path, dim), set())
            seen.add((pitch, padding))
            is_open = bool(self.open.get(path))
            if (len(seen) > 1 or is_open) and len({padding for _, padding in seen}) == 1:
                found.add(dim)
        return frozenset(found)

    def _numbers(self, call: FlatCall) -> frozenset[int]:
        """The leaves that are varying integers or floats. The integers 0 and 1 are symbolic where the path is open, and
        in containers: of zeros and ones in a list, each sequence would need a graph.
        """
        leaves, inside = set(), tuple(f"{path}[" for path in self.open)  # a list of numbers may be replaced as a whole
        for index, (path, leaf) in enumerate(zip(call.paths, call.leaves, strict=True)):
            if type(leaf) not in (int, float) or self.constants[path] - self._symbolic[path] > 1:
                continue
            is_open = path in self.open or path.startswith(inside)
            if self.dynamic is False and not is_open:
                continue
            seen = self._numbers_seen.setdefault((path, type(leaf)), set())
            is_size = type(leaf) is int and leaf >= 0 and not is_open and not is_item(path)
            if math.isfinite(leaf) if type(leaf) is float else may_vary(leaf, is_size=is_size):
                seen.add(repr(leaf))
                if len(seen) > 1 or is_open:
                    leaves.add(index)
        return frozenset(leaves)


def numbers_read(decisions: Sequence[DecisionInfo]) -> frozenset[str]:
    """The lines where the graphs so far read a number from a tensor. A further graph is needed since it varies."""
    return frozenset(
        decision.where
        for decision in decisions
        if type(decision.value) is float or (type(decision.value) is int and decision.is_tensor)
    )


def sizes_found(decisions: Sequence[DecisionInfo]) -> dict[str, frozenset[int]]:
    """The sizes that depend on values, as the graphs so far computed them: by line."""
    sizes_by_line: dict[str, set[int]] = {}
    for decision in decisions:
        if not decision.is_tensor and type(decision.value) is int:
            sizes_by_line.setdefault(decision.where, set()).add(decision.value)
    return {where: frozenset(values) for where, values in sizes_by_line.items()}


def check_marked(call: FlatCall, joint: JointGraph, name: str) -> None:
    """Raise `UnsupportedError` for a marked dimension if the program works for one size only."""
    for info in joint.signature.symbols:
        argument = joint.signature.inputs[info.input].argument
        if argument is None or info.dim is None or info.dim not in marked_dims(call.leaves[argument]):
            continue
        value = joint.symbols.value_of(info.symbol)
        if value is not None:
            raise UnsupportedError(
                f"dimension {info.dim} of {call.paths[argument]} was marked as dynamic, but `{name}` only works for "
                f"size {value}: an operator needs this size (a layer with {value} input features, say), or the program "
                "compares it or needs the number. Leave the mark out, or compute with the size."
            )
    if not any(isinstance(info.source, MemoryOf) for info in joint.signature.inputs):
        return
    plain = [i for i in call.tensors_apart() if i not in call.inside_wrappers()]
    for group in memory_groups([call.leaves[i] for i in plain]):
        marked = next((plain[i] for i in group if marked_dims(call.leaves[plain[i]])), None)
        if marked is not None:
            raise UnsupportedError(
                f"a dimension of {call.paths[marked]} was marked as dynamic. The tensor shares memory with a second "
                f"argument, and `{name}` writes to this memory. Pass a `.clone()`, or slice inside the function."
            )


# -------------------------------------------------------------------- numbers
# Integers among the arguments that vary from call to call: whether one graph can serve all their values.
#
# A symbolic integer differs from a plain one in `type(n) is int`, and in its text. So a graph with such a number is
# taken only if the program does the same things with the plain number in its place.


class ConstantNumbers(Exception):  # noqa: N818 - not an error: asks for another try
    """Raised when these leaves of a call must be parts of the program."""

    def __init__(self, leaves: frozenset[int]) -> None:
        super().__init__("the program depends on the values of numbers")
        self.leaves = leaves


def fixed_numbers(joint: JointGraph) -> frozenset[int]:
    """The arguments that were symbolic numbers but have a graph for a single value."""
    signature = joint.signature
    arguments = {
        signature.inputs[info.input].argument
        for info in signature.symbols
        if info.dim is None and joint.symbols.value_of(info.symbol) is not None
    }
    # A float whose value the program needed is decided on; a value computed from the float names the float as its
    # origin.
    decided = {decision.where for decision in signature.stops.decisions if type(decision.value) is float}
    arguments |= {info.argument for info in signature.inputs if info.number is not None and str(info.slot) in decided}
    return frozenset(argument for argument in arguments if argument is not None)


def check_numbers(call: FlatCall, joint: JointGraph, capture: Callable[[FlatCall], Captured] | None) -> None:
    """Raise `ConstantNumbers` unless `joint`, captured from `call`, serves many values of its symbolic integers.

    `capture` is None for a program that can't tell these from plain ones.
    """
    fixed = fixed_numbers(joint)
    if fixed:
        raise ConstantNumbers(fixed)
    if capture is None:
        return
    plain = capture(dataclasses.replace(call, numbers=frozenset())).joint
    there = {(call.paths[i], repr(call.leaves[i])) for i in call.numbers}  # a plain number is not written over itself
    there |= joint.signature.effects.numbers_there
    if _behaviour(joint, there) != _behaviour(plain, there):
        raise ConstantNumbers(call.numbers)


def _behaviour(joint: JointGraph, there: Collection[tuple[str, str]]) -> list[object]:
    """The operators on tensors in a graph with their arguments, and the results that are no tensors, without writes of
    numbers that are `there`.

    Numbers, and small tensors computed from numbers and constants, have their values in the captured call.
    """
    names: dict[fx.Node, Any] = {}
    tensors: dict[fx.Node, torch.Tensor] = {}
    count = 0
    done: list[object] = []
    placeholders = joint.placeholders()
    floats = {placeholders[i] for i, info in enumerate(joint.signature.inputs) if info.number is float}
    for node in joint.graph.nodes:
        if node in floats:
            names[node] = None  # read by one operator that gives the number
            continue
        if _gives_a_number(node):
            names[node] = concrete(node.meta["val"])
            continue
        tensor = _value_of_numbers(joint, node, names, tensors)
        if tensor is not None:
            tensors[node] = tensor
            names[node] = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.tolist()}"
            continue
        if node.target in _SLICES and _sizes_at_capture(node) == _sizes_at_capture(node.args[0]):
            names[node] = names[node.args[0]]  # the whole dimension: plain sizes leave this slice out
            continue
        names[node] = f"value {count}"
        count += 1
        if node.op in ("call_function", "output"):
            results = node.args if node.op == "call_function" else _outputs(joint)
            arguments = fx.map_arg((results, node.kwargs), names.__getitem__)
            # An operator that holds arguments is a new object in each capture: its text is compared.
            done.append((repr(node.target), repr(map_symbolic(arguments, concrete))))
    nodes = joint.outputs()
    structure = joint.signature.structure
    given: list[tuple[Any, str, Any]] = []
    for output in structure.outputs:
        kind: Any = type(output)
        if isinstance(output, Handle) and output.output is not None and _is_number(nodes[output.output]):
            kind, value = ConstantOutput, concrete(nodes[output.output].meta["val"])
        elif isinstance(output, ConstantOutput):
            value = concrete(output.value)
            value = float(value) if isinstance(value, float) else value  # of NumPy, it may be
        else:
            value = [(s.op, map_symbolic((s.args, s.kwargs), concrete), s.index) for s in getattr(output, "steps", ())]
        given.append((kind, output.path, value))
    for first, text in reversed(
        [*_texts(structure.output_spec), *_texts(structure.written_spec, structure.output_spec.size)]
    ):
        parts = given[first : first + text.size]
        value = text.unflatten([value for _, _, value in parts])
        given[first : first + text.size] = [(ConstantOutput, parts[0][1].rpartition(".parts[0]")[0], value)]
    return [*done, *((kind, path, repr(value)) for kind, path, value in given if (path, repr(value)) not in there)]


def _texts(tree: Tree, first: int = 0) -> Iterator[tuple[int, Tree]]:
    """The texts that each call makes of numbers, by their first outputs: containers of a class of foregrad's own."""
    if tree.kind == "namedtuple" and is_house_module(tree.type.__module__):
        yield first, tree
    for child in tree.children:
        yield from _texts(child, first)
        first += child.size


_SLICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default)


def _sizes_at_capture(node: Any) -> list[object]:
    return [*map(concrete, node.meta["val"].shape)]


def _value_of_numbers(
    joint: JointGraph, node: fx.Node, names: dict[fx.Node, Any], tensors: dict[fx.Node, torch.Tensor]
) -> torch.Tensor | None:
    """The value of a node in the captured call, if it is a small tensor computed from numbers and constants only."""
    spec = spec_of(node)
    if not isinstance(spec, TensorSpec) or spec.device.type != "cpu":
        return None
    if any(type(size) is not int for size in spec.shape) or spec.nbytes > _LIMIT_BYTES:
        return None
    if node.op == "get_attr":
        constant: torch.Tensor = getattr(joint.module, str(node.target))
        return constant
    operands = node.all_input_nodes
    of_tensors = any(n in tensors for n in operands) and all(
        n in tensors or not isinstance(names[n], str) for n in operands
    )
    is_known = of_tensors or node.target is torch.ops.aten.scalar_tensor.default
    if not is_known or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: tensors.get(n, names[n]))
    with plain_execution(), torch.no_grad():
        result: torch.Tensor = function_of(node)(*map_symbolic(args, concrete), **map_symbolic(kwargs, concrete))
    return result


_LIMIT_BYTES = 1024


def _outputs(joint: JointGraph) -> list[Any]:
    """The graph's results, without decisions on numbers, and without gradients of numbers (they come last)."""
    outputs, signature = joint.outputs(), joint.signature
    decided = {decision.output for decision in signature.stops.decisions if not decision.is_tensor}
    count = len(outputs) - sum(1 for info in signature.inputs if info.number is not None)
    return [output for i, output in enumerate(outputs[:count]) if i not in decided and not _is_number(output)]


def _is_number(output: object) -> bool:
    return isinstance(output, fx.Node) and _gives_a_number(output)


def _gives_a_number(node: fx.Node) -> bool:
    return node.op in ("placeholder", "call_function") and not isinstance(spec_of(node), (TensorSpec, tuple, list))
