"""The comparison oracle: one function, run eagerly and compiled, must look the same to every observer.

`check` takes both sides in lock step through several calls (other values each time) and compares after each step:

    prepare   equal but separate arguments, made by running `make_args` once for each side with the same seed
    forward   results, arguments, aliasing, versions, autograd histories, RNG state; or the class of the exception
    backward  from random tangents; gradients of every leaf, also of those behind a non-leaf argument
    mutate    each output changed in place: what raises, and who sees the change

The first call asks `torch.autograd.grad` for everything; the second runs `backward()` from some of the outputs
with expanded or strided tangents into `.grad`; one more call mutates the outputs before its backward.
Everything is compared bit for bit, but for gradients of the second call: tangents laid out in another way than the
outputs are may take another path through a kernel, and round differently.

Known weakness: after an output is mutated, a backward that eager refuses is not compared (a compiled function may
have saved something else, and be right); for the same reason outputs that `.data` or `set_` gave in the memory of a
tensor that requires grad are not mutated after the call (see `Side.unwatched`).
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.parity.observe import (
    Strictness,
    attempt,
    compare_relations,
    compare_tensor,
    compare_trees,
    has_storage,
)
from tests.parity.sides import Call, Fresh, Side, Watched, tangent_for

__all__ = ["Call", "CompiledRaised", "Fresh", "Mismatch", "Refused", "check", "default_compile"]

MakeArgs = Callable[[], Any]
STAND_IN_VARIABLE = "FOREGRAD_STAND_IN"
MOST_DIFFERENCES = 12
# A kernel may round differently for a tangent of another layout than the function's output has: how often, at most.
LAYOUT_SLACK = 32


class Mismatch(AssertionError):
    """The compiled function can be told from eager."""


class CompiledRaised(Mismatch):
    """Eager answered; the compiled function raised something that is not a refusal."""


class Refused(Exception):
    """The compiled function said that it does not support this. `reason` is its error."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__name__}: {reason}")
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call of a check does after its forward."""

    into: str  # "returned": torch.autograd.grad; "accumulated": backward() into .grad
    tangents: str
    subset: bool = False
    mutate: bool = False


FIRST = Plan("returned", "like")
AGAIN = (Plan("accumulated", "expanded", subset=True), Plan("accumulated", "strided"), Plan("returned", "strided"))
MUTATED = Plan("returned", "like", mutate=True)


def default_compile(fn: Any) -> Any:
    """`foregrad.compile` with the eager backend; a stand-in where the environment names one."""
    name = os.environ.get(STAND_IN_VARIABLE)
    if name:
        from tests.parity.stand_ins import STAND_INS

        return STAND_INS[name](fn)
    import foregrad

    return foregrad.compile(fn, backend="eager")


def check(
    fn: Any,
    make_args: MakeArgs | Sequence[MakeArgs],
    *,
    compile: Callable[[Any], Any] | None = None,
    grad: bool = True,
    calls: int = 2,
    order: int = 1,
    mutate_outputs: bool = True,
    seed: int = 0,
    values: bool = True,
    atol: float | None = None,
    rtol: float = 0.0,
    signed_zeros: bool = False,
    strict_view: bool = False,
    exact_versions: bool = False,
    grad_slack: int = 0,
    grad_strides: bool = True,
    watched: bool = False,
) -> str:
    """Compare `fn` with its compiled form; "equal", or "raised" where both raise the same.

    fn: a function, a module (copied for each side, its parameters and buffers watched) or a `Fresh`.
    make_args: returns a tuple of arguments or a `Call`; run once a side and call, seeded. A sequence of them gives
        each call its own (the last one serves the rest).
    order: how many times to differentiate in the first call.
    grad_slack: how many roundings of a gradient's largest element it may be off. A gradient that flows both through
        the compiled function and through a view of an input that it returned is added up in another order.
    grad_strides: compare the strides of gradients too.
    watched: run eager under a mode that does nothing, for the formulas that PyTorch uses whenever there is one.

    Raises Mismatch (or its subclass CompiledRaised) with every difference found, Refused for an UnsupportedError.
    """
    how = Strictness(values, atol, rtol, signed_zeros, strict_view, exact_versions)
    how_grads = dataclasses.replace(how, slack=grad_slack, strides=how.strides and grad_strides)
    makers = [make_args] if callable(make_args) else list(make_args)
    plans = [FIRST, *(AGAIN[i % len(AGAIN)] for i in range(calls - 1))] + [MUTATED] * mutate_outputs
    eager, compiled = Side("eager", fn), Side("compiled", fn)
    if watched:
        eager.context = Watched
    try:
        compiled.fn = (compile or default_compile)(compiled.fn)
    except Exception as error:
        raise _blame(error, "while compiling") from error
    for index, plan in enumerate(plans):
        pair = Pair(eager, compiled, how, how_grads, f"call {index}", seed=1000 * seed + index)
        if not pair.forward(makers[min(index, len(makers) - 1)]):
            return "raised"
        if plan.mutate:
            pair.mutate()
        if grad and not pair.backward(plan, order if index == 0 else 1):
            break
    return "equal"


@dataclasses.dataclass
class Pair:
    """Both sides during one call."""

    eager: Side
    compiled: Side
    how: Strictness
    how_grads: Strictness
    where: str
    seed: int
    strides_are_given: bool = True

    def forward(self, make_args: MakeArgs) -> bool:
        """Call both and compare; False when both raise the same."""
        for side in (self.eager, self.compiled):
            side.prepare(make_args, self.seed)
        self.require(compare_relations(self.eager.inputs, self.compiled.inputs, self.how), "in the arguments")
        for side in (self.eager, self.compiled):
            side.run(self.seed + 1)
        if not self.both_answered(self.eager.error, self.compiled.error, "forward"):
            return False
        self.require(compare_trees(self.eager.out, self.compiled.out, "out"), "after the forward")
        self.compare_all("after the forward")
        return True

    def mutate(self) -> None:
        spared = self.eager.unwatched()
        results = [side.mutate_outputs(spared) for side in (self.eager, self.compiled)]
        if results[0] != results[1]:
            said = f"changing the outputs in place: eager {results[0]}, compiled {results[1]}"
            self.require([said], "after the forward")
        self.compare_all("after the outputs were changed in place")

    def backward(self, plan: Plan, order: int) -> bool:
        """Run both backwards and compare; False when eager's raised."""
        roots, leaves = self.eager.root_labels(), self.eager.leaf_labels()
        choice = torch.Generator().manual_seed(self.seed)
        if plan.subset and len(roots) > 1:
            kept = [label for label in roots if torch.rand((), generator=choice) < 0.5]
            roots = kept or roots[:1]
        if not roots:
            return True
        # Gradients are laid out as tangents are where these come in as they are, not through views put together again,
        # and where the leaf's own layout can be followed. Views of what was written later are by strides to eager.
        parts = self.eager.views()
        moved = zip(self.eager.inputs, self.eager.versions(), strict=True)
        self.strides_are_given = not (
            parts.intersection(roots)
            or self.eager.cut_off()
            or any(overlaps(t) for _, t in self.eager.inputs)
            or any(by and attempt(lambda t=t: t.requires_grad and t.is_leaf) is True for (_, t), by in moved)
        )
        grads: list[list[Any]] = []
        errors: list[Exception | None] = []
        for side in (self.eager, self.compiled):
            try:
                grads.append(differentiate(side, roots, leaves, plan, order, self.seed))
                errors.append(None)
            except Exception as error:
                errors.append(error)
            side.rng = torch.get_rng_state()
        if plan.mutate and errors[0] is not None:
            return False
        if not self.both_answered(errors[0], errors[1], "backward"):
            return False
        found = []
        for (label, a), (_, b) in zip(*grads, strict=True):
            found += self.compare_grads(label, a, b, plan)
        self.require(found, f"after the backward from {', '.join(roots)}")
        self.compare_all("after the backward")
        return True

    def compare_grads(self, label: str, eager: Any, compiled: Any, plan: Plan) -> list[str]:
        if (eager is None) != (compiled is None):
            said = ["None" if grad is None else f"a tensor of {grad.dtype}" for grad in (eager, compiled)]
            return [f"{label}: is None: eager {said[0]}, compiled {said[1]}"]
        # What accumulates into .grad may be kept as it comes when only the strides of single elements differ.
        slack = self.how_grads.slack if plan.tangents == "like" else max(self.how_grads.slack, LAYOUT_SLACK)
        slack *= 1 if eager is None else self.eager.coarseness(eager.dtype)
        # The engine adds up gradients in an order of its own: strides that mean nothing depend on it.
        exact = plan.into == "returned" and eager is not None and eager.numel() > 0 and 1 not in eager.shape
        given = self.strides_are_given and self.how_grads.strides
        # Of a gradient laid out as its leaf is not, `.grad` gets a copy, without bits.
        bits = given and (plan.into == "returned" or plan.tangents == "like")
        how = dataclasses.replace(self.how_grads, all_strides=exact, slack=slack, strides=given, bits=bits)
        return [] if eager is None else compare_tensor(label, eager, compiled, how)

    def compare_all(self, stage: str) -> None:
        """Everything that can be seen of arguments and outputs, and the generator."""
        eager, compiled = self.eager, self.compiled
        found = []
        for (label, a), (_, b) in zip(eager.tensors, compiled.tensors, strict=True):
            found += compare_tensor(label, a, b, self.how)
        found += compare_relations(eager.tensors, compiled.tensors, self.how)
        found += self.compare_inputs()
        if not torch.equal(eager.rng, compiled.rng):
            found.append("the generator: state: not what eager left")
        self.require(found, stage)

    def compare_inputs(self) -> list[str]:
        eager, compiled = self.eager, self.compiled
        found = []
        labels = [label for label, _ in eager.inputs]
        for label, a, b in zip(labels, eager.versions(), compiled.versions(), strict=True):
            if (a, b) != (None, None) and (a != b if self.how.exact_versions else bool(a) != bool(b)):
                found.append(f"{label}: version counter: eager moved by {a}, compiled by {b}")
        for label, a, b in zip(labels, eager.rewritten(), compiled.rewritten(), strict=True):
            if a != b:
                found.append(f"{label}: autograd history: rewritten in eager: {a}, compiled: {b}")
        for (label, a), (_, b) in zip(eager.inputs, compiled.inputs, strict=True):
            sizes = [t.untyped_storage().nbytes() if has_storage(t) else None for t in (a, b)]
            if sizes[0] != sizes[1]:
                found.append(f"{label}: bytes of storage: eager {sizes[0]}, compiled {sizes[1]}")
        return found

    def both_answered(self, eager: Exception | None, compiled: Exception | None, stage: str) -> bool:
        """True when neither raised, False when both raised alike; anything else is a difference."""
        if compiled is not None and eager is None:
            raise _blame(compiled, f"in the {stage} of {self.where}, where eager answers") from compiled
        if eager is None:
            return True
        if compiled is None:
            said = f"the {stage}: eager raises {type(eager).__name__} ({eager}), compiled returns"
            self.require([said], f"in the {stage}")
        if is_refusal(compiled):
            raise Refused(compiled) from compiled
        if type(compiled).__name__ == "InternalError" or not isinstance(compiled, type(eager)):
            said = f"the {stage}: eager raises {_name(eager)}, compiled raises {_name(compiled)}"
            raise CompiledRaised(f"{self.where}: {said}\n{_trace(compiled)}") from compiled
        return False

    def require(self, found: list[str], stage: str) -> None:
        if not found:
            return
        shown = found[:MOST_DIFFERENCES] + [f"... and {len(found) - MOST_DIFFERENCES} more"] * (
            len(found) > MOST_DIFFERENCES
        )
        raise Mismatch(f"compiled differs from eager, {self.where} {stage}:\n  " + "\n  ".join(shown))


def differentiate(
    side: Side, roots: list[str], leaves: list[str], plan: Plan, order: int, seed: int
) -> list[tuple[str, Any]]:
    """The labelled gradients of one side, None where there is none, and the tangents (nobody may change those)."""
    generator = torch.Generator().manual_seed(seed)
    outputs = side.pick(roots)
    tangents = [tangent_for(root, plan.tangents, generator) for root in outputs]
    named_tangents = [(f"tangent of {label}", tangent) for label, tangent in zip(roots, tangents, strict=True)]
    torch.manual_seed(seed + 2)
    if plan.into == "accumulated" or not leaves:
        with side.context():
            torch.autograd.backward(outputs, tangents)
        shown = [(f"{label}.grad", t.grad) for label, t in side.inputs if attempt(lambda t=t: t.is_leaf) is True]
        return shown + named_tangents
    inputs, result = side.pick(leaves), named_tangents
    for depth in range(1, order + 1):
        deeper = depth < order
        with side.context():
            grads = torch.autograd.grad(
                outputs, inputs, tangents, allow_unused=True, create_graph=deeper, retain_graph=deeper or None
            )
        name = "grad of " * depth
        result = result + [(name + label, grad) for label, grad in zip(leaves, grads, strict=True)]
        outputs = [grad for grad in grads if grad is not None and grad.requires_grad]
        tangents = [tangent_for(grad, "like", generator) for grad in outputs]
        if not outputs:
            break
    return result


def is_refusal(error: Exception) -> bool:
    """Whether an error says 'not supported' on purpose. By name: the package may not be importable here."""
    return any(kind.__name__ == "UnsupportedError" for kind in type(error).__mro__)


def _blame(error: Exception, stage: str) -> Exception:
    if is_refusal(error):
        return Refused(error)
    return CompiledRaised(f"the compiled function raises {_name(error)} {stage}\n{_trace(error)}")


def _name(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__} ({text if len(text) < 300 else text[:297] + '...'})"


def _trace(error: Exception) -> str:
    lines = traceback.format_exception(error, limit=-6, chain=False)
    return "".join(lines)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether some elements are in one place, as after expand."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
