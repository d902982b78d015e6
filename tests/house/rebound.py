"""Names of others that a capture binds to something else for its time, counted in a process of its own: the number
depends on what is imported. Run as a module, it prints the count; with `--names`, each name.
"""

from __future__ import annotations

import sys
import types
from unittest import mock

import torch

import foregrad
from foregrad.locks import Replacements


def rebound() -> list[str]:
    """The names that the first capture of a module with gradients rebinds, but for those of foregrad's own objects."""
    found: set[str] = set()
    bind = Replacements.bind

    def noted(self: Replacements, owner: object, name: str, value: object) -> None:
        holder = owner if isinstance(owner, type | types.ModuleType) else type(owner)
        where = f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder.__name__
        if where.partition(".")[0] not in ("foregrad", "_thread"):  # nobody else has the names of a thread of ours
            found.add(f"{where}.{name}")
        bind(self, owner, name, value)

    with mock.patch.object(Replacements, "bind", noted):
        step = foregrad.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), backend="eager")
        step(torch.ones(1, 2)).sum().backward()
    return sorted(found)


if __name__ == "__main__":
    names = rebound()
    print("\n".join(names) if "--names" in sys.argv else len(names))
