"""The guards of a captured call: on its arguments, on other values that it read, and on the state of PyTorch."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch import engine
from .._torch import guards as torch_guards
from .._torch.guards import TensorGuards, global_state
from .._torch.native import make_tensor_check
from .._torch.nested import registered_functions
from .._torch.symbols import is_symbolic
from .._torch.tensors import share_memory
from ..frontend.call import FlatCall
from ..frontend.openings import FoundOpenings, Opening, opener
from ..frontend.source import Source
from ..frontend.state import of_python
from ..frontend.tree import Tree
from ..frontend.values import same_value
from ..graph.joint import JointGraph
from ..graph.signature import BaseOf, GradientOf, MemoryOf, PartOf
from ..graph.source import ATTRIBUTES, Names, a_name, unpacked
from .conditions import (
    answers,
    apart_guards,
    arrays_apart_guards,
    has_context,
    has_keys,
    is_constant,
    number_tests,
    object_lines,
    order_of_keywords_matters,
)
from .explain import Difference
from .guard_list import (
    STATE,
    Facts,
    Guard,
    GuardMaker,
    Lines,
    Sharing,
    Words,
    in_words,
    sharing_of,
    state_difference,
    tensor_facts,
)

if TYPE_CHECKING:
    from ..tracing.capture import Captured

_FEW_PAIRS = 12  # inputs, one written to: up to this number a test for each pair takes less time than sorting


class CallGuards(GuardMaker):
    """Guards for the capture of `call`; `native`: with the C++ part, if built; `transformed`: under transforms."""

    def __init__(
        self, call: FlatCall, captured: Captured, names: Names, *, native: bool = False, transformed: bool = False
    ) -> None:
        super().__init__(captured.joint, call.tree, names)
        self.call = call
        self.native = native
        self.captured = captured
        self.tensors = captured.tensors
        self.user_name = functools.partial(user_name, parameters_of(call.function))
        self.paths = list(map(self.user_name, call.paths))
        self.wrapper_specs = captured.wrappers or FoundOpenings((), {})
        self.floats: dict[int, str] = {}  # by input: the variable of the number
        self.with_gradients: dict[tuple[int, ...], str] = {}  # wrappers that require grad, by first equal leaves
        self.numbers = {i.argument: i.number for i in self.signature.inputs if i.number is not None}
        self.slots = [
            str(info.slot) if info.argument is None else self.paths[info.argument] for info in self.signature.inputs
        ]
        self._render(transformed=transformed)

    def lines(self) -> list[str]:
        lines = super().lines()
        for index, info in enumerate(self.signature.inputs):
            if info.number is float:
                name = self.floats.setdefault(index, self.inputs[index])
                if self.inputs[index] == name:
                    self.inputs[index] = self.names.fresh(f"{name}_tensor")
                made = self.bind("tensor_of", functools.partial(torch.tensor, dtype=torch.float64, device="cpu"))
                lines.append(f"{self.inputs[index]} = {made}({name})")
        return lines

    def _render(self, *, transformed: bool) -> None:
        self.take_apart(self.user_name)
        given = [(i, info.argument) for i, info in enumerate(self.signature.inputs) if info.number]
        numbers = {i: self.leaves[argument] for i, argument in given if argument is not None}
        for decision, text in number_tests(self.joint, numbers, self.bind):
            test = f"{self.bind('same_value', same_value)}({text}, {self.bind('expected', decision.value)})"
            self.require(test, f"the value read at {decision.where}", Words(repr(decision.value)), text)
        first = len(self.list.steps)
        apart = apart_guards(
            self.call, self.containers, self.signature.effects.python_writes, self.captured.reached, self.bind
        )
        for condition in apart:
            self.require(condition, "which of the containers are one", "as captured")
        self.inputs = inputs = [
            self.leaves[info.argument]
            if info.argument is not None
            else self.names.fresh(_as_name(str(getattr(info.slot, "name", "lifted"))))
            for info in self.signature.inputs
        ]
        reads = of_python().ReadGuards(self)
        static = reads.in_tables()
        self._read_closures(inputs, static)
        self._tensor_metadata(inputs, static)
        self.symbols = self.sizes()
        tensors = transformed or any(t is not None and not t.is_inference() for t in self.tensors)
        for condition in state_conditions(self.joint, self.bind, tensors=tensors):
            self.require(condition)
        watch = reads.watched(inputs, static)
        self.watch = reads.watch
        before, now = global_state(), self.bind("state_now", global_state)
        look = f"{self.bind('state_difference', state_difference)}({self.bind('before', before)}, {now}())"
        state = Guard("", look=look, facts=((STATE, before),))
        self.list.steps[first:first] = [state, Guard("", look=f"{watch}.difference()")]
        self._bases(inputs)
        self._relations(inputs)
        self._answers([*inputs, *self.wrappers])
        for guard in self.captured.guards:
            now = f"{self.bind('read', guard.read)}({', '.join(inputs[i] for i in guard.inputs)})"
            test = f"{self.bind('same_value', same_value)}({now}, {self.bind('expected', guard.expected)})"
            self.require(test, guard.name, guard.expected, now)

    def _answers(self, asked: list[str]) -> None:
        """Add guards on the tensors' answers to questions; one test covers all tensors without attributes."""
        bare: dict[str, Guard] = {}
        for index, question, attribute_asked, value in self.captured.facts:
            name, slot = asked[index], self.slots[index] if index < len(self.slots) else "a wrapper"
            if question == ATTRIBUTES and not value:
                what, now = question.format(slot), question.format(name)
                bare[name] = Guard(f"not {name}.__dict__", what, in_words(value), now)
                continue
            test, now = answers(question, name, attribute_asked, value, self.bind)
            self.require(test, question.format(slot, name=attribute_asked, absent="nothing"), value, now)
        if bare:
            test = f"not any(map({self.bind('attributes', operator.attrgetter('__dict__'))}, ({', '.join(bare)},)))"
            self.list.steps.append(Guard(test, parts=tuple(bare.values())))

    # ---------------------------------------------------------------- arguments

    def has_keywords(self, keys: tuple[str, ...]) -> str:
        if keys and order_of_keywords_matters(self.call.function):
            return has_keys("kwargs", keys, self.bind)
        return f"len(kwargs) == {len(keys)}" if keys else "not kwargs"  # each is looked up

    def open(self, name: str, tree: Tree, path: str) -> None:
        if tree.kind == "wrapper":
            self._wrapper(name, tree.context, path)
            return
        if tree.kind == "ref":
            same = Words("a container given elsewhere too")
            self.require(f"{name} is {self.containers[tree.context]}", path, same)
            return
        if tree.number >= 0:
            self.containers[tree.number] = name
        super().open(name, tree, path)

    def container(self, name: str, tree: Tree, path: str) -> list[tuple[str, str]]:
        if tree.kind in ("tuple", "list", "namedtuple", "structseq", "dict", "dataclass"):
            return super().container(name, tree, path)
        children = [self.names.fresh(f"{name}_{i}") for i in range(len(tree.children))]
        self.require(self.kind_test(name, tree), path, Words(a_name(tree.type.__name__)), f"type({name})")
        if tree.kind != "unread":
            self._take_object_apart(name, tree, children, path)
        return [(child, f"a part of {path}") for child in children]

    def _take_object_apart(self, name: str, tree: Tree, children: list[str], path: str) -> None:
        what = f"the structure of {path}", Words("as captured")
        if tree.kind in ("object", "partial", "weakref", "method", "array"):
            for line, condition in object_lines(name, tree, children, self.names, self.bind):
                if line:
                    self.let(line)
                else:
                    self.require(condition, *what)
            return
        functions = registered_functions(tree.type)
        assert functions is not None
        items, context = self.names.fresh("items"), self.names.fresh("context")
        self.let(f"{items}, {context} = {self.bind('flatten', functions[0])}({name})")
        self.require(has_context(context, tree.context, self.bind), *what)
        if children:
            self.let(f"{unpacked(children)}{items}")

    def _wrapper(self, name: str, spec: Opening, path: str) -> None:
        """Guards for a wrapper subclass: its plain tensors are the inputs of the graphs."""
        at = len(self.leaves)
        first_equal = tuple(self.call.first_of[at : at + spec.count])
        self.wrappers.append(name)
        if first_equal in self.with_gradients:
            self.require(f"{name} is {self.with_gradients[first_equal]}", path, Words("a tensor given elsewhere too"))
            self.leaves += [self.leaves[i] for i in first_equal]
            return
        parts = self._parts(name, path, *self.wrapper_specs.arguments.get(at, (spec, None)))
        if spec.requires_grad:
            self.with_gradients[first_equal] = name
        for part in parts:
            self.leaf(part)

    def _parts(self, name: str, path: str, spec: Opening, gradient: Opening | None) -> list[str]:
        """The variables of a wrapper's plain tensors; the wrapper's metadata are checked."""
        expected = Words(f"a {spec.cls.__name__} as captured")
        self.require(f"{self.bind('fits', spec.fits)}({name})", path, expected, f"type({name})")
        if spec.requires_grad:
            for other in self.with_gradients.values():
                self.require(f"{name} is not {other}", path, Words("a tensor of its own"))
        parts = [self.names.fresh(f"{name}{_as_name(path)}") for path in spec.paths()]
        self.let(f"{unpacked(parts)}{self.bind('unwrap', opener().unwrapping(spec, gradient))}({name})")
        return parts

    def leaf(self, name: str) -> None:
        index = len(self.leaves)
        self.leaves.append(name)
        value, path = self.call.leaves[index], self.paths[index]
        first = self.call.first_of[index]
        if first != index:
            same = Words(f"the same tensor as {self.paths[first]}")
            self.require(f"{name} is {self.leaves[first]}", path, same, name)
        elif index in self.numbers:
            kind = self.numbers[index]
            self.require(f"type({name}) is {kind.__name__}", path, Words(f"any {kind.__name__}"), name)
            if kind is float:
                self.require(f"{self.bind('isfinite', math.isfinite)}({name})", path, Words("finite"), name)
        elif not isinstance(value, torch.Tensor):
            self.require(is_constant(name, value, self.bind), path, value, name)

    # ---------------------------------------------------------------- inputs

    def _read_closures(self, inputs: list[str], static: dict[int, object]) -> None:
        """Read other tensors that the function reached by itself, each along its path from an object that stays."""
        roots: dict[int, str] = {}
        for index, info in enumerate(self.signature.inputs):
            if index not in static and isinstance(info.source, Source):
                self._read(inputs[index], info.source, roots)
        for number, wrapper in enumerate(self.wrapper_specs.reached):
            name = self.names.fresh("wrapper")
            self._read(name, wrapper.source, roots)
            parts = self._parts(name, str(wrapper.source.slot), wrapper.spec, wrapper.gradient)
            self.wrappers.append(name)
            if wrapper.spec.requires_grad:
                self.with_gradients[-1 - number,] = name
            for index, info in enumerate(self.signature.inputs):
                if isinstance(info.source, PartOf) and info.source.wrapper == number:
                    inputs[index] = parts[info.source.part]

    def _read(self, name: str, source: Source, roots: dict[int, str]) -> None:
        start = id(source.root)
        root = roots[start] = roots.get(start) or source.bound(self.bind)
        line = f"{name} = {source.expression(root, self.bind)}"
        gone = f"return {self.bind('gone', Difference(str(source.slot), 'there', 'gone'))}"
        self.list.steps.append(
            Lines((line,), ("try:", f"    {line}", "except (LookupError, AttributeError, TypeError):", f"    {gone}"))
        )

    def _bases(self, inputs: list[str]) -> None:
        for name, info in zip(inputs, self.signature.inputs, strict=True):
            if isinstance(info.source, (BaseOf, GradientOf)):
                of = inputs[info.source.input]
                if isinstance(info.source, GradientOf):  # PyTorch warns whoever asks a tensor that is no leaf
                    self.require(f"{of}.is_leaf", f"{self.slots[info.source.input]}.is_leaf", True, f"{of}.is_leaf")
                self.let(f"{name} = {of}.{'_base' if isinstance(info.source, BaseOf) else 'grad'}")
        bases = [i for i, info in enumerate(self.signature.inputs) if isinstance(info.source, (BaseOf, GradientOf))]
        self._check_tensors(bases, inputs)

    def _tensor_metadata(self, inputs: list[str], static: dict[int, object]) -> None:
        here = [
            i
            for i, info in enumerate(self.signature.inputs)
            if not isinstance(info.source, (MemoryOf, BaseOf, GradientOf)) and i not in static and info.number is None
        ]
        self._check_tensors(here, inputs)

    def facts_of(self, checked: Iterable[int]) -> Facts:
        return tuple((self.slots[i], tensor_facts(self._real(i), *self._numbers_of(i))) for i in checked)

    def _numbers_of(self, index: int) -> tuple[list[int | None], list[int | None]]:
        spec = self.signature.inputs[index].spec
        return _static_or_none(spec.shape), _static_or_none(spec.stride)

    def _check_tensors(self, checked: list[int], inputs: list[str]) -> None:
        """Add a guard on all metadata of the inputs, and on their being distinct objects."""
        tensors = [self.tensors[i] for i in checked]
        if not tensors:
            return
        numbers = [self._numbers_of(i) for i in checked]
        sizes, strides = [sizes for sizes, _ in numbers], [strides for _, strides in numbers]
        fits = make_tensor_check(tensors, sizes, strides, distinct=True) if self.native else None
        if fits is None:
            fits = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        check = self.bind("tensors", fits)
        operands = "".join(f"{inputs[i]}, " for i in checked)
        self.compare(f"{check}({operands[:-2]})", self.facts_of(checked), f"({operands})")

    def _parts_of_wrappers(self) -> set[int]:
        """The inputs that are parts of wrappers: each is guarded as a leaf, or not as a whole."""
        inside, inputs = self.call.inside_wrappers(), enumerate(self.signature.inputs)
        return {i for i, info in inputs if isinstance(info.source, PartOf) or info.argument in inside}

    def _real(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        assert tensor is not None  # a whole memory is not a tensor of the user's
        return tensor

    def arguments_reached_too(self, inputs: list[str]) -> None:
        """Add guards on arguments that the function also reaches by itself."""
        arguments = {info.argument for info in self.signature.inputs}
        for i, leaf in enumerate(self.call.leaves):
            if isinstance(leaf, torch.Tensor) and self.call.first_of[i] == i and i not in arguments:
                same = next(j for j, tensor in enumerate(self.tensors) if tensor is leaf)
                self.require(f"{self.leaves[i]} is {inputs[same]}", self.paths[i], Words(self.slots[same]))

    def _relations(self, inputs: list[str]) -> None:
        """Add guards on shared memory, if some of it is written, and on offsets that the graph depends on."""
        signature = self.signature
        written = {u.input for u in signature.updates} | signature.reshaped
        related = written or signature.structure.shared_memory
        sharing = sharing_of(signature, self.tensors) if related else None
        self.history(sharing, (written | signature.detached) - self._parts_of_wrappers())
        if not written:
            return
        real = [
            i for i, info in enumerate(signature.inputs) if not isinstance(info.source, MemoryOf) and not info.number
        ]
        reached = [inputs[i] for i in real if signature.inputs[i].argument is None]
        what = "the tensors that share memory with a written tensor", Words("none")
        for condition in arrays_apart_guards(self.call, self.leaves, reached, self.bind):
            self.require(condition, *what)
        if sharing is None and len(written) * len(real) <= 2 * _FEW_PAIRS:
            pairs = [(i, j) for i in real for j in real if i < j and (i in written or j in written)]
            if len(pairs) <= _FEW_PAIRS:
                shares = self.bind("shares_memory", share_memory)
                any_ = " or ".join(f"{shares}({inputs[i]}, {inputs[j]})" for i, j in pairs)
                self.require(f"not ({any_})", *what)
                return
        apart = tuple(i if i in real else None for i in range(len(inputs)))
        sharing = sharing or Sharing(apart)
        self.memories(sharing)
        users = Counter(sharing.memories)
        touched = {m for i in written if users[m := sharing.memories[i]] > 1}
        self.list.fixed = frozenset(self.slots[i] for i in real if sharing.memories[i] in touched)


def _as_name(path: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in path)


def parameters_of(function: Callable[..., object]) -> list[str]:
    """The names of a function's parameters, up to `*args`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p.name for p in itertools.takewhile(lambda p: p.kind is not p.VAR_POSITIONAL, parameters)]


def user_name(parameters: Sequence[str], path: str) -> str:
    """A path (`args[0]["x"]`) with the parameter's own name for `args[0]`."""
    if not path.startswith("args["):
        return path
    number, _, rest = path[len("args[") :].partition("]")
    return parameters[int(number)] + rest if int(number) < len(parameters) else path


def _static_or_none(numbers: tuple[Any, ...]) -> list[int | None]:
    """Sizes or strides, with None for a symbolic one, as torch's check takes them."""
    return [None if is_symbolic(number) else number for number in numbers]


# -------------------------------------------------------------------- the state of the thread
# The state of the thread and of the library during a capture, as conditions of a guard.


def state_conditions(joint: JointGraph, bind: Callable[[str, object], str], *, tensors: bool) -> list[str]:
    """Conditions that hold while the state is as it is now.

    One C++ object tests grad mode, autocast of every device, deterministic algorithms, the default dtype, tf32 and
    reduced precision, the number of threads. Filling of new memory matters only to deterministic algorithms, and the
    choice of attention kernels only to a graph for which one may have been chosen.

    `tensors`: a tensor that autograd records is checked too. Dispatch keys are the thread's, so autograd's are missing
    in inference mode, and functorch's present in transforms.
    """
    conditions = [f"{bind('global_state', torch_guards.GlobalStateGuard())}.check()"]
    if not tensors or torch_guards.is_inference():
        conditions.append(f"{bind('is_inference', torch_guards.is_inference)}() is {torch_guards.is_inference()}")
    if not tensors:
        conditions.append(f"not {bind('transforms_active', engine.transforms_active)}()")
    device = torch_guards.current_device()
    if device is None:
        conditions.append(f"not {bind('count_function_modes', engine.count_function_modes)}()")
    else:
        conditions += [
            f"{bind('count_function_modes', engine.count_function_modes)}() == 1",
            f"{bind('default_device_is_the_mode', engine.default_device_is_the_mode)}()",
            f"{bind('current_device', torch_guards.current_device)}() == {bind('device', device)}",
        ]
    if torch.are_deterministic_algorithms_enabled():
        fills = torch_guards.fills_uninitialized
        conditions.append(f"{bind('fills_uninitialized', fills)}() is {fills()}")
    precision = torch_guards.matmul_precision()
    if precision != "highest":  # tf32 is allowed with any other
        conditions.append(f"{bind('matmul_precision', torch_guards.matmul_precision)}() == {precision!r}")
    called = [str(target) for target in {id(node.target): node.target for node in joint.graph.nodes}.values()]
    if any("softmax" in name or "attention" in name for name in called):
        for number, read in enumerate(torch_guards.ATTENTION_FLAGS):
            conditions.append(f"{bind(f'attention_kernel_{number}', read)}() is {read()}")
    return conditions
