"""`JointIndex`: a joint graph as flat lists, with the half that each node belongs to. Every partitioner starts here.

fx nodes are linked lists and dicts; a partitioner asks few questions of thousands of nodes. Here nodes are numbers in
topological order, so "needs", "is needed by" and "comes before" are one sweep over a list each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from .._torch.graphs import operands_of, size_hint
from .._torch.nested import frozen, leaves
from ..errors import PartitionError
from ..graph.meta import TensorSpec, value_of
from ..locks import cached_property
from .classify import Kind, OpClass, classify

_ONCE = (Kind.RANDOM, Kind.EFFECT)
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")
# Placeholders of the backward besides the tangents: the seeds of its random operators.
_BACKWARD_INPUTS = ("tangents", "bwd_seed", "bwd_base_offset", "bwd_rng_state")


class JointIndex:
    """The nodes of a joint graph (its output apart) by number, in their order.

    * `operands[i]`: the numbers of the nodes that node i reads.
    * `needs_tangent[i]`: can only be computed in the backward.
    * `in_forward[i]`: the forward must compute it, for its outputs or for its effect.
    * `for_backward[i]`: the gradients, or an effect of the backward, depend on it.
    * `root[i]`: the node whose memory node i shares; itself unless it is a view.
    * `once`: random operators and effects. The forward's have `in_forward`, the rest are the backward's.
    * `replays`: the random operators of the forward that may run again (see instead.py); set by a partitioner.
    * `hands_on`: whether gradients leave as they are made; set by a partitioner.
    * `policy`: the user's policy, if there is one; set by a partitioner.
    * `answers`: the policy's answers, once it was asked.
    * `written`: inputs that the call overwrites once the forward is done.
    """

    def __init__(self, joint_module: fx.GraphModule, num_fwd_outputs: int) -> None:
        self.module = joint_module
        self.policy: Callable[[Any], str | None] | None = None  # see policies.py
        self.replays: frozenset[int] = frozenset()
        self.hands_on = False
        self.answers: dict[int, str] | None = None
        *self.nodes, output = joint_module.graph.nodes
        if output.op != "output":
            raise PartitionError("the joint graph has no output node at its end")
        self.output = output
        outputs = [*leaves(output.args[0])]
        if num_fwd_outputs > len(outputs):
            raise PartitionError(f"{num_fwd_outputs} forward outputs asked of a graph with {len(outputs)} outputs")
        self.forward_outputs = outputs[:num_fwd_outputs]
        self.gradients = outputs[num_fwd_outputs:]
        self.number: dict[fx.Node, int] = {node: i for i, node in enumerate(self.nodes)}
        self.duplicates: dict[int, list[fx.Node]] = {}
        self.inputs: list[int] = []
        self.backward_inputs: list[int] = []
        self.operands: list[list[int]] = []
        self.classes: list[OpClass] = []
        self.kinds: list[Kind] = []
        self.needs_tangent = bytearray(len(self.nodes))
        self.root: list[int] = []
        self.once: list[int] = []
        self._read_nodes()
        self.written = self._written_inputs()
        self._mark_needed()

    def __len__(self) -> int:
        return len(self.nodes)

    def _read_nodes(self) -> None:
        number, operands, classes = self.number, self.operands, self.classes
        kinds, root, needs_tangent = self.kinds, self.root, self.needs_tangent
        get = dict.get
        for i, node in enumerate(self.nodes):
            reads = [number[operand] for operand in operands_of(node)]
            operands.append(reads)
            op_class = classify(node)
            classes.append(op_class)
            kind = op_class.kind
            kinds.append(kind)
            root.append(root[reads[0]] if kind is Kind.VIEW and reads else i)
            if kind in _ONCE:
                self.once.append(i)
            if kind is Kind.INPUT:
                if str(node.target).startswith(_BACKWARD_INPUTS):
                    needs_tangent[i] = 1
                    self.backward_inputs.append(i)
                else:
                    self.inputs.append(i)
                continue
            if kind is Kind.ITEM and (kinds[reads[0]] is Kind.VIEW):
                kinds[i] = Kind.VIEW
                root[i] = root[reads[0]]
            for operand in reads:
                if needs_tangent[operand]:
                    needs_tangent[i] = 1
                    break
            else:
                needs_tangent[i] = get(node.meta, "partitioner_tag") == "must_be_in_backward"

    def _mark_needed(self) -> None:
        """One sweep from the end: bit 1 says that the forward needs a node, bit 2 that the backward does."""
        number, kinds = self.number, self.kinds
        needed = bytearray(len(self.nodes))
        self.output_numbers = [number[n] for n in self.forward_outputs if isinstance(n, fx.Node)]
        self.gradient_numbers = [number[n] for n in self.gradients if isinstance(n, fx.Node)]
        for i in self.output_numbers:
            needed[i] = 1
        for i in self.gradient_numbers:
            needed[i] |= 2
        backward_only = []
        for i in range(len(needed) - 1, -1, -1):
            if kinds[i] in _ONCE:
                in_backward = self._happens_in_backward(i, needed[i])
                needed[i] |= 2 if in_backward else 1
                if in_backward and not self.needs_tangent[i]:
                    backward_only.append(i)
            if needed[i]:
                bits = needed[i]
                for operand in self.operands[i]:
                    needed[operand] |= bits
        if backward_only:
            self._tie_to_backward(backward_only)
        for i in self.inputs:
            needed[i] |= 1
        self.in_forward = needed.translate(_BIT_1)
        self.for_backward = needed.translate(_BIT_2)
        wrong = next((i for i, bits in enumerate(needed) if bits & 1 and self.needs_tangent[i]), None)
        if wrong is not None:
            reader = self._reader_of(wrong)
            raise PartitionError(
                f"the forward needs {self.describe(wrong)}, computed from the tangents; it is read by {reader}. Is "
                f"num_fwd_outputs={len(self.forward_outputs)} the number of the forward's outputs?"
            )

    def _happens_in_backward(self, i: int, bits: int) -> bool:
        """Whether an operator that runs exactly once runs in the backward."""
        if self.needs_tangent[i]:
            return True
        return not bits & 1 and dict.get(self.nodes[i].meta, "partitioner_tag") in _BACKWARD_TAGS

    def _tie_to_backward(self, once: list[int]) -> None:
        """Mark values behind a random operator of the backward as the backward's: the forward can't save them."""
        needs_tangent = self.needs_tangent
        for i in once:
            needs_tangent[i] = 1
        for i in range(min(once), len(needs_tangent)):
            if not needs_tangent[i] and any(map(needs_tangent.__getitem__, self.operands[i])):
                needs_tangent[i] = 1

    def _written_inputs(self) -> set[int]:
        """Inputs that an operator of the graph writes to, or that the caller will overwrite with an output.

        An operator that writes is in the graph (a final `copy_`). A capture may note writes of the caller: PyTorch's
        describe outputs and inputs under ``"desc"``; any other may set ``"updated"`` on the input.
        """
        written = set()
        for i, op_class in enumerate(self.classes):
            if op_class.written and not self.needs_tangent[i]:
                node = self.nodes[i]
                for position, name in op_class.written:
                    argument = node.args[position] if position < len(node.args) else node.kwargs.get(name)
                    written |= {self.root[self.number[a]] for a in leaves(argument) if isinstance(a, fx.Node)}
        descriptions = [*leaves(dict.get(self.output.meta, "desc"))][: len(self.forward_outputs)]
        updated = [getattr(d, "mutated_input", None) for d in descriptions]
        if any(slot is not None for slot in updated):
            for i in self.inputs:
                slot = dict.get(self.nodes[i].meta, "desc")
                if slot is not None and slot in updated:
                    written.add(i)
        written |= {i for i in self.inputs if dict.get(self.nodes[i].meta, "updated", False)}
        return {i for i in written if self.kinds[i] is Kind.INPUT}

    @cached_property
    def kept_gradients(self) -> list[int]:
        """The gradients that are there to the end of the backward."""
        return [] if self.hands_on else self.gradient_numbers

    @cached_property
    def last_views(self) -> set[int]:
        """Views that nothing but the output reads: the graph takes them at its end, of values handed on earlier."""
        ends: set[fx.Node] = {self.output}
        for i in range(len(self) - 1, -1, -1):
            node = self.nodes[i]
            if self.kinds[i] in (Kind.VIEW, Kind.ITEM) and node.users.keys() <= ends:
                ends.add(node)
        return {self.number[node] for node in ends - {self.output}}

    @cached_property
    def users(self) -> list[list[int]]:
        """For each node, the numbers of its readers, without dead readers."""
        users: list[list[int]] = [[] for _ in self.nodes]
        in_forward, for_backward = self.in_forward, self.for_backward
        for i, reads in enumerate(self.operands):
            if in_forward[i] or for_backward[i]:
                for operand in reads:
                    users[operand].append(i)
        return users

    @cached_property
    def backward_sequence(self) -> list[int]:
        """The nodes that only the backward can compute, in the order they run."""
        return backward_sequence(self)

    @cached_property
    def items(self) -> list[int]:
        """The nodes that pick one of several results and need no tangents."""
        return [
            i for i, op_class in enumerate(self.classes) if op_class.kind is Kind.ITEM and not self.needs_tangent[i]
        ]

    @cached_property
    def tuples(self) -> bytearray:
        """Whether a node is an operator with several results."""
        return bytearray(
            kind is not Kind.INPUT and is_tuple(node) for node, kind in zip(self.nodes, self.kinds, strict=True)
        )

    def runs_once_in_forward(self, i: int) -> bool:
        """Whether node i is a random operator or an effect of the forward that must not run again."""
        return self.kinds[i] in _ONCE and bool(self.in_forward[i])

    def exists_in_forward(self, i: int) -> bool:
        """Whether the forward has node i's value, since its outputs need some result of the operator."""
        return bool(self.in_forward[i] or (self.kinds[i] is Kind.ITEM and self.in_forward[self.operands[i][0]]))

    def bytes_of(self, i: int) -> int:
        """Bytes of a node's value: of all results for several, 0 for numbers. Symbolic sizes are estimated, without
        the guard that `nbytes_of` adds.
        """
        return value_bytes(value_of(self.nodes[i]))

    def describe(self, i: int) -> str:
        """A node for a message: its name, operator, and the user's line when known."""
        node = self.nodes[i]
        what = f"{node.name} ({node.target})" if node.op == "call_function" else f"{node.name} ({node.op})"
        trace = node.meta.get("stack_trace")
        line = str(trace).strip().splitlines()[-2:] if trace else []
        return what + (f" at {' '.join(part.strip() for part in line)}" if line else "")

    def _reader_of(self, i: int) -> str:
        if i in self.output_numbers:
            return "the forward's outputs"
        return next((self.describe(j) for j in range(i, len(self.nodes)) if i in self.operands[j]), "nobody")


_BIT_1 = bytes(i & 1 for i in range(256))
_BIT_2 = bytes(i >> 1 & 1 for i in range(256))


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a symbolic or plain number rather than a tensor."""
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def is_tuple(node: fx.Node) -> bool:
    """Whether a node's value is several values."""
    return isinstance(value_of(node), (tuple, list))


def value_bytes(value: object) -> int:
    """Bytes of a value's elements: of all results for several, 0 for numbers. Symbolic sizes are estimated."""
    if isinstance(value, TensorSpec):
        token = value.token
        size = _BYTES.get(token) if token is not None else None
        if size is None:
            size = _hinted_numel(value.shape) * value.dtype.itemsize
            if token is not None:
                _BYTES[token] = size
        return size
    if isinstance(value, torch.Tensor):
        count: int = value.numel()
        if not isinstance(count, int):
            count = _hinted_numel(value.shape)
        return int(count * value.dtype.itemsize)
    if isinstance(value, (tuple, list)):
        return sum(value_bytes(item) for item in value)
    return 0


_BYTES: dict[object, int] = {}  # by the token of a spec: most values of a graph resemble many more


def _hinted_numel(shape: Iterable[object]) -> int:
    count = 1
    for size in shape:
        count *= size if type(size) is int else size_hint(size)
    return count


# ------------------------------------------------------------------------------------------------ the backward's order
# The order of the capture, with operators that lower memory brought forward.
#
# Autograd computes the gradient of a layer's input before the weight's gradient, though the weight's gradient is the
# last to read the saved activation. An operator whose result is smaller than the values that it reads last runs as soon
# as its operands are ready: here the weight's gradient. Nothing passes an effect or a random operator, and operators
# stay as they are, so results do, bit for bit. Greedy, and independent of the residuals: plans are simulated for the
# order that runs.

_THROUGH = (Kind.VIEW, Kind.ITEM)  # share memory with their operands, or come along
_BARRIERS = (Kind.EFFECT, Kind.RANDOM)


def backward_sequence(index: JointIndex) -> list[int]:
    """The nodes that only the backward can compute, in the order they run."""
    kinds = index.kinds
    nodes = [
        i
        for i, bit in enumerate(index.needs_tangent)
        if (bit or (kinds[i] in _BARRIERS and not index.in_forward[i])) and kinds[i] is not Kind.INPUT
    ]
    order: list[int] = []
    start = 0
    for at, i in enumerate(nodes):
        if kinds[i] in _BARRIERS:
            order += _Stretch(index, nodes[start:at]).ordered()
            order.append(i)
            start = at + 1
    return order + _Stretch(index, nodes[start:]).ordered()


class _Stretch:
    """Nodes of the backward with no effect between them."""

    def __init__(self, index: JointIndex, nodes: list[int]) -> None:
        self.index, self.nodes = index, nodes
        operands, kinds = index.operands, index.kinds
        inside = set(nodes)
        self.through: dict[int, set[int]] = {}  # for each view and item of the stretch: the operators that it waits for
        self.missing: dict[int, int] = {}  # for each operator of the stretch: how many it waits for
        self.reads: dict[int, tuple[int, ...]] = {}
        self.items: dict[int, list[int]] = {}
        self.dependents: dict[int, list[int]] = {}
        self.readers: dict[int, int] = {}  # for each memory: how many operators are still to read it
        self.reader: dict[int, int] = {}  # the sum of their numbers: for one operator, its number
        through, readers, reader = self.through, self.readers, self.reader
        for i in nodes:
            if kinds[i] in _THROUGH and operands[i]:
                source = operands[i][0]
                if kinds[i] is Kind.ITEM:
                    self.items.setdefault(source, []).append(i)
                through[i] = through.get(source, set()) if kinds[source] in _THROUGH else {source} & inside
                continue
            waits: set[int] = set()
            for operand in operands[i]:
                if operand in through:
                    waits |= through[operand]
                elif operand in inside:
                    waits.add(operand)
            self.missing[i] = len(waits)
            for one in waits:
                self.dependents.setdefault(one, []).append(i)
            self.reads[i] = tuple({index.root[operand] for operand in operands[i]})
            for r in self.reads[i]:
                readers[r] = readers.get(r, 0) + 1
                reader[r] = reader.get(r, 0) + i
        self.kept = {index.root[i] for i in (*index.gradient_numbers, *index.output_numbers)}
        self.sizes: dict[int, int] = {}
        self.order: list[int] = []
        self.done: set[int] = set()

    def size(self, r: int) -> int:
        if r not in self.sizes:
            kind = self.index.kinds[r]
            self.sizes[r] = 0 if kind in (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER) else self.index.bytes_of(r)
        return self.sizes[r]

    def ordered(self) -> list[int]:
        missing, readers, reader = self.missing, self.readers, self.reader
        ready = set()
        for i in self.nodes:
            if i in self.done:
                continue
            at, freeing = i, set()
            while True:
                self.emit(at)
                for user in self.dependents.get(at, ()):
                    missing[user] -= 1
                    if not missing[user]:
                        ready.add(user)
                        freeing.add(user)
                for r in self.reads.get(at, ()):
                    readers[r] -= 1
                    reader[r] -= at
                    if readers[r] == 1 and reader[r] in ready:
                        freeing.add(reader[r])
                freeing = {
                    one for one in freeing if one not in self.done and self.made_bytes(one) < self.freed_bytes(one)
                }
                if not freeing:
                    break
                # Of the operators that lower memory, the one with the smallest result comes first.
                at = min(freeing, key=lambda one: (self.made_bytes(one), one))
        return self.order

    def made_bytes(self, i: int) -> int:
        """The bytes of operator i's results."""
        if i not in self.items:
            return self.size(i) if self.readers.get(i) or i in self.kept else 0
        return sum(self.size(r) for r in self.items[i] if self.readers.get(r) or r in self.kept)

    def freed_bytes(self, i: int) -> int:
        """The bytes that are freed after operator i, if it runs now."""
        return sum(self.size(r) for r in self.reads.get(i, ()) if self.readers[r] == 1 and r not in self.kept)

    def emit(self, i: int) -> None:
        if i in self.done:
            return
        self.done.add(i)
        for operand in self.index.operands[i]:
            if operand in self.through:
                self.emit(operand)  # nothing waits for views
        self.order.append(i)
        for item in self.items.get(i, ()):
            self.emit(item)


# -------------------------------------------------------------------------------------------------- equal computations
# Equal computations made one (common subexpressions), before the cheapest residuals are chosen.
#
# Mixed precision, for instance, casts an activation anew for each of its readers; each cast would be saved.
#
# Left alone are operators that run once, and values that share memory with an output or gradient: two equal outputs
# must stay two tensors, and a caller's writes to an output must not reach a residual.

_KEPT_APART = (Kind.INPUT, Kind.RANDOM, Kind.EFFECT)


def merge_equal(index: JointIndex) -> int:
    """Let each node stand for its later equals, in `index` alone, not in the joint graph; returns how many went."""
    nodes, kinds, root, number = index.nodes, index.kinds, index.root, index.number
    visible = {root[i] for i in (*index.output_numbers, *index.gradient_numbers)}
    first: dict[object, int] = {}
    stands_for: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if stands_for:
            index.operands[i] = [stands_for.get(operand, operand) for operand in index.operands[i]]
            root[i] = root[stands_for.get(root[i], root[i])]
        if kinds[i] in _KEPT_APART or root[i] in visible or not (index.in_forward[i] or index.for_backward[i]):
            continue
        key = _key(node, number)
        kept = first.setdefault(key, i)
        if kept != i:
            _merge(index, kept, i)
            stands_for[i] = kept
    return len(stands_for)


def _merge(index: JointIndex, kept: int, gone: int) -> None:
    node = index.nodes[gone]
    index.number[node] = kept
    index.duplicates.setdefault(kept, []).append(node)
    index.in_forward[kept] |= index.in_forward[gone]
    index.for_backward[kept] |= index.for_backward[gone]
    index.in_forward[gone] = index.for_backward[gone] = 0


def _key(node: fx.Node, number: dict[fx.Node, int]) -> Any:
    """A key that is equal for nodes with equal computations and equal tags."""
    get = dict.get
    meta = node.meta
    if "empty" in getattr(node.target, "__name__", ""):
        return id(node)  # its elements are undefined
    return (
        node.op,
        node.target,
        frozen(node.args, fx.Node, number.__getitem__),
        frozen(node.kwargs, fx.Node, number.__getitem__) if node.kwargs else None,
        get(meta, "recompute"),
        get(meta, "ac_graph_id"),
        get(meta, "partitioner_tag") in {"must_be_in_forward", "must_be_in_backward"},
    )
