"""Where a program holds its tensors, as a walk through its state meets them: the nearest place of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..frontend.source import Source
from ..graph.slots import Buffer, Closure, Param
from .holders import Holder

_Place = tuple[Holder, Any, torch.Tensor]  # the holder, the key, and the tensor


class TensorPlaces:
    """The places of tensors in `holders`. `unnamed`: items of namespaces by names that no code was seen to use."""

    def __init__(self, holders: Sequence[Holder], unnamed: Mapping[str, Sequence[tuple[Any, Holder]]]) -> None:
        self._holders, self._unnamed = holders, unnamed
        self._places: dict[int, _Place] = {}  # by id
        self._met: dict[int, bool] = {}  # by id: whether anything holds the tensor, or it is an argument alone
        self._of_unnamed: tuple[int, dict[int, _Place]] = 0, {}
        self._with_attributes: list[tuple[torch.Tensor, Holder]] = []

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._met

    def add(self, tensor: torch.Tensor, parent: Holder | None, step: Any) -> None:
        """Note a place of a tensor, unless a better one is known: a module's table, else the nearest, as a key last."""
        self._met[id(tensor)] = parent is not None or self.is_reached(tensor)
        if parent is not None and parent.leads_to(tensor, step):
            place = self._places.get(id(tensor))
            if place is None or place[0].style == "key" or (parent.is_table and not place[0].is_table):
                self._places[id(tensor)] = parent, step, tensor

    def add_attributes(self, tensor: torch.Tensor, attributes: Holder) -> None:
        """Note a tensor with attributes of the program's."""
        self._with_attributes.append((tensor, attributes))

    def source_of(self, tensor: torch.Tensor) -> Source | None:
        """Where a tensor was before the run; None where no holder has the tensor."""
        if (place := self._places.get(id(tensor)) or self._in_unnamed().get(id(tensor))) is None:
            return None
        holder, key, _ = place
        root, steps = holder.way()
        name = holder.path(key)
        if isinstance(root, torch.nn.Module):  # people call a part of the running module by the part's own name
            name = name.removeprefix("self.")
        slot = (Param if holder.step == "_parameters" else Buffer)(name) if holder.is_table else Closure(name)
        return Source(slot, root, (*steps, *holder.steps_to(key)))

    def is_reached(self, tensor: torch.Tensor) -> bool:
        """Whether code can come by a tensor: it is in a global that code names, an object, a key, a weak reference."""
        return self._met.get(id(tensor), False)

    def tensors(self) -> list[torch.Tensor]:
        """The strided tensors that were held somewhere."""
        return [t for _, _, t in (self._places | self._in_unnamed()).values() if t.layout is torch.strided]

    def with_attributes(self, names: set[str]) -> Iterator[torch.Tensor]:
        """The strided tensors with an attribute under one of `names`."""
        for tensor, holder in self._with_attributes:
            if not names.isdisjoint(holder.before) and tensor.layout is torch.strided:
                yield tensor

    def _in_unnamed(self) -> dict[int, _Place]:
        """The tensors in globals that no code names; the walk goes no further there."""
        count, tensors = self._of_unnamed
        if count != len(self._holders):
            named = ((name, *item) for name, items in self._unnamed.items() for item in items)
            tensors = {id(value): (h, name, value) for name, value, h in named if isinstance(value, torch.Tensor)}
            self._of_unnamed = len(self._holders), tensors
        return tensors
