"""One compiled graph of a dispatcher, with its guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..graph.source import source_of
from ..runtime.node import NodeSource
from .explain import Difference, decided
from .guard_list import GuardList
from .pipeline import Product
from .refusals import warn_user
from .watch import Watch

__all__ = ["Specialization"]


class Specialization:
    """One compiled graph with its guards: `call(args, kwargs)` returns the result, or `MISS`."""

    def __init__(
        self,
        call: Callable[..., Any],
        node: NodeSource | None,
        product: Product,
        watch: Watch,
        guards: GuardList,
    ) -> None:
        self.call = call
        self.node = node
        self.product = product
        self.watch = watch
        self.guards = guards
        self.decides = bool(product.captured.joint.signature.decisions)

    def difference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Difference:
        """The reason why the graph is not right for a call with these arguments, made now."""
        return self.guards.first_difference(args, kwargs) or decided(self.product.captured.joint.signature.decisions)

    def makes_the_same_of_it(self, other: Specialization) -> bool:
        """Whether another capture has an equal graph, and equal outputs that are no tensors."""
        one, two = self.product.captured.joint, other.product.captured.joint
        numbers = [
            [(output.path, repr(getattr(output, "value", None))) for output in joint.signature.outputs]
            for joint in (one, two)
        ]
        return numbers[0] == numbers[1] and str(one) == str(two)

    def leave_unrepeated(self, name: str) -> None:
        """Stop watching state that the function changes on every run, if two runs gave equal graphs; warns once."""
        changed = self.watch.drop_changed()
        if changed:
            warn_user(
                f"`{name}` changes {'; '.join(changed)}. The change was made while it was captured; compiled calls do "
                "not repeat it, and do not check it. Move it out of the compiled function."
            )

    def source(self) -> str:
        """The rendered Python: guards, runtime, and the autograd node."""
        text = source_of(self.call)
        return text if self.node is None else f"{self.node.source}\n\n{text}"
