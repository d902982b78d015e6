"""Classes of operators for partitioners: operators that share memory, are cheap to run again, or must run only once.

Schema and tags are read from the operator itself, so custom operators are understood too; names are listed only
where no tag says enough. An unknown operator counts as heavy, and an unknown Python function as an effect: it runs
once, in its place.

Known weakness: "cheap" means that a fusing compiler makes it cheap. A backend that runs one kernel an operator
pays for each.
"""

from __future__ import annotations

import enum
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch.graphs import is_higher_order, is_operator
from .._torch.ops import mkldnn_rnn_layer_for_training
from ..tracing.tape.opinfo import op_info


class Kind(enum.IntEnum):
    """The class of a node, from free to recompute to never run twice."""

    INPUT = 0  # a placeholder
    CONSTANT = 1  # an attribute of the module: there in both halves
    NUMBER = 2  # arithmetic on symbolic sizes
    ITEM = 3  # one result of an operator with several
    VIEW = 4  # shares memory with an operand
    FACTORY = 5  # cheap, reads no tensor's elements: `zeros`, `arange`, `full_like`
    CHEAP = 6  # bound by memory, and fused where a compiler fuses
    HEAVY = 7  # costly, or unknown
    RANDOM = 8  # draws random numbers
    EFFECT = 9  # does something besides making its result


class OpClass(NamedTuple):
    """The kind of an operator, and how a fusing compiler treats it.

    `fuses`: as the producer or consumer of pointwise operators. `fuses_inputs`: as their consumer only.
    `written`: the arguments it writes to.
    """

    kind: Kind
    fuses: bool = False
    fuses_inputs: bool = False
    written: tuple[tuple[int, str], ...] = ()


# Not tagged as pointwise, and as cheap: copies, casts, masks, small reductions, reading by index.
_CHEAP_ATEN = """
    __and__ __or__ __xor__ _to_copy _grad_sum_to_size amax amin any argmax argmin broadcast_tensors clone
    constant_pad_nd contiguous flip gather index lift_fresh_copy masked_fill max mean min repeat reshape std sum
    sum_to_size to tril triu type_as var var_mean where
"""
_CHEAP_PRIMS = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clone
    convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 fmax fmin fmod floor ge gt isfinite
    le lgamma log log10 log1p log2 lt maximum minimum mul ne neg nextafter pow prepare_softmax_online reciprocal
    remainder round rsqrt sign signbit sin sinh sqrt sub sum tan tanh trunc var where
    _low_memory_max_pool_offsets_to_indices
"""
_FACTORIES = """
    aten::arange aten::eye aten::full aten::full_like aten::linspace aten::new_full aten::new_ones aten::new_zeros
    aten::ones aten::ones_like aten::scalar_tensor aten::zeros aten::zeros_like prims::iota
"""
_CHEAP = frozenset(
    [f"aten::{name}" for name in _CHEAP_ATEN.split()] + [f"prims::{name}" for name in _CHEAP_PRIMS.split()]
)
_FACTORY = frozenset(_FACTORIES.split())
# Their schemas promise a fresh tensor or "maybe a view"; the kernel gives a view.
_VIEWS = frozenset({"aten::_unsafe_view", "aten::lift_fresh"})
# Their schemas say "maybe a view"; the kernel may copy.
_MAYBE_VIEWS = frozenset({"aten::contiguous", "aten::pin_memory", "aten::reshape", "aten::to"})
_SIZES = frozenset({"aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"})
_RANDOM_THAT_FUSES = frozenset({"aten::native_dropout", "aten::rand_like", "aten::randn_like"})
# Every process must run collectives in an equal order, equally often; a collective's wait is no separate effect.
_COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "_dtensor"})
_RANDOM_WRAPPERS = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})

_ARITHMETIC = frozenset(
    [abs, bool, float, int, max, min, pow, round, sum]
    + [getattr(operator, f"__{name}__") for name in "abs add and eq floordiv ge gt inv invert le lshift lt mod".split()]
    + [getattr(operator, f"__{name}__") for name in "mul ne neg not or pos pow rshift sub truediv xor".split()]
)

_HEAVY = OpClass(Kind.HEAVY)
_EFFECT = OpClass(Kind.EFFECT)
_RANDOM = OpClass(Kind.RANDOM)
_INPUT = OpClass(Kind.INPUT)
_CONSTANT = OpClass(Kind.CONSTANT)
_NUMBER = OpClass(Kind.NUMBER)
_ITEM = OpClass(Kind.ITEM, fuses=True)
_CHEAP_CLASS = OpClass(Kind.CHEAP, fuses=True)

_cache: dict[int, tuple[OpClass, object]] = {}  # by the operator's id; with the operator


def classify(node: fx.Node) -> OpClass:
    """The class of a node. Looked up by its operator, except where the arguments decide."""
    if node.op != "call_function":
        if node.op == "placeholder":
            return _INPUT
        return _CONSTANT if node.op == "get_attr" else _EFFECT
    target = node.target
    if dict.__contains__(node.meta, "runs_once"):  # a collective that the user called
        return _EFFECT
    entry = _cache.get(id(target))
    if entry is None:
        if is_higher_order(target):
            return _classify_higher_order(node)
        op_class = _classify_operator(node) if is_operator(target) else _classify_function(node)
        entry = _cache[id(target)] = op_class, target
    op_class, _ = entry
    if op_class is _RANDOM:
        # Attention takes a dropout probability, mostly 0: then it draws nothing.
        return _HEAVY if _dropout_is_off(node) else op_class
    if op_class.kind is Kind.NUMBER and isinstance(node.meta.get("val"), torch.Tensor):
        return _CHEAP_CLASS
    return op_class


def kind_of(node: fx.Node) -> Kind:
    return classify(node).kind


def _classify_operator(node: fx.Node) -> OpClass:
    op: Any = node.target
    info, name = op_info(op), op._schema.name
    if op.namespace in _COLLECTIVES and not info.writes:
        return _HEAVY
    if info.writes or not info.returns_written or node.is_impure(impure_random=False):
        return OpClass(Kind.EFFECT, written=tuple((i, info.argument_names[i]) for i in info.writes))
    if info.is_random:
        return OpClass(Kind.RANDOM, fuses=True) if name in _RANDOM_THAT_FUSES else _RANDOM
    if name in _SIZES:
        return _NUMBER
    if name in _VIEWS or (info.is_view and name not in _MAYBE_VIEWS):
        return OpClass(Kind.VIEW, fuses=True)
    if name in _FACTORY:
        return OpClass(Kind.FACTORY, fuses=True)
    if name in _CHEAP or torch.Tag.pointwise in op.tags:
        # A pointwise operator without operands is a constant.
        takes_tensor = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
        return _CHEAP_CLASS if takes_tensor else OpClass(Kind.FACTORY, fuses=True)
    if name in {"aten::cat", "aten::stack"}:
        return OpClass(Kind.HEAVY, fuses_inputs=True)
    return _HEAVY


def _dropout_is_off(node: fx.Node) -> bool:
    operator: Any = node.target
    arguments: Any = operator._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            default = argument.default_value
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
            return isinstance(value, (int, float)) and value == 0
    return False


def _classify_function(node: fx.Node) -> OpClass:
    target = node.target
    if target is operator.getitem:
        return _ITEM
    if target is mkldnn_rnn_layer_for_training:
        return _HEAVY
    if node.is_impure():
        return _EFFECT
    module = getattr(target, "__module__", None)
    name = getattr(target, "__name__", "")
    if target in _ARITHMETIC or getattr(math, name, None) is target:
        return _NUMBER
    if name.startswith(("sym_", "_sym_")) and str(module).partition(".")[0] == "torch":
        return _NUMBER
    return _EFFECT


def _classify_higher_order(node: fx.Node) -> OpClass:
    """Random or an effect if a graph among its arguments is; heavy otherwise."""
    name = str(getattr(node.target, "__name__", ""))
    if name in _RANDOM_WRAPPERS:
        return _RANDOM
    if name == "with_effects" or node.is_impure(impure_random=False):
        return _EFFECT
    worst = max((int(_worst_inside(argument)) for argument in node.all_input_nodes), default=0)
    inner: list[object] = [a for a in node.args if is_operator(a)]
    if any(op_info(op).is_random for op in inner):
        worst = max(worst, Kind.RANDOM)
    if worst >= Kind.EFFECT:
        return _EFFECT
    return _RANDOM if worst == Kind.RANDOM else _HEAVY


def _worst_inside(argument: fx.Node) -> Kind:
    """RANDOM or EFFECT when `argument` is a graph with random operators or effects."""
    module = argument.graph.owning_module
    if argument.op != "get_attr" or module is None:
        return Kind.HEAVY
    value: Any = module
    for part in str(argument.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, fx.GraphModule):
        return Kind.HEAVY
    return max((classify(n).kind for n in value.graph.nodes if n.op == "call_function"), default=Kind.HEAVY)
