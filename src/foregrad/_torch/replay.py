"""Operators that note the state of a random generator, go back to it, and return. Checked on torch 2.11.0, 2.13.0.

They are for graphs that run node by node in their order: no data dependency ties a random operator to the node that
rewinds its generator. A pass that drops nodes from such a graph asks `replayed`.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import default_generator

_library = torch.library.Library("foregrad", "FRAGMENT")
_library.define("random_state(Device device) -> Tensor")
_library.define("rewind_random(Tensor state, Device device) -> Tensor")
_library.define("resume_random(Tensor state, Device device) -> ()")


def _note(device: torch.device) -> torch.Tensor:
    return default_generator(device).get_state()


def _rewind(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    now = _note(device)
    default_generator(device).set_state(state)
    return now


def _resume(state: torch.Tensor, device: torch.device) -> None:
    default_generator(device).set_state(state)


def state_bytes(device: torch.device) -> int:
    """The size of the state of a device's generator."""
    return _note(device).numel()


def _fake_note(device: torch.device) -> torch.Tensor:
    return torch.empty(state_bytes(device), dtype=torch.uint8, device="cpu")


def _fake_rewind(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(state)


def _fake_resume(state: torch.Tensor, device: torch.device) -> None:
    return None


for _name, _run, _fake in (
    ("random_state", _note, _fake_note),
    ("rewind_random", _rewind, _fake_rewind),
    ("resume_random", _resume, _fake_resume),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foregrad::{_name}", _fake, lib=_library)

NOTE: Any = torch.ops.foregrad.random_state.default
REWIND: Any = torch.ops.foregrad.rewind_random.default
RESUME: Any = torch.ops.foregrad.resume_random.default
for _op in (NOTE, REWIND, RESUME):
    torch.fx.node.has_side_effect(_op)


def replayed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The random operator between `node`, which resumes the generator's state, and the operand of `node`, which rewinds
    it; None for other nodes. A graph has all three or none.
    """
    return node.prev if node.target is RESUME else None


def rewinding(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node that rewinds the generator right before the random operator `node`; None for other nodes."""
    return node.prev if node.prev.target is REWIND else None
