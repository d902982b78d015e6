"""State of PyTorch's modules beside their parameters: weights of recurrent layers, attributes of scripted modules.

Checked on torch 2.13.0.

`nn.GRU` and its like make the list anew, with weak references to its parameters, where a parameter was replaced: under
`torch.func.functional_call` in each call. The list says no more than the parameters. So a capture takes it from the
parameters, and a layer's own list stays as it was: eager makes it anew when it is next needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...locks import Bind

KEPT, REFERENCES = "_flat_weights", "_flat_weight_refs"


def follows_from_parameters(module: torch.nn.Module, name: str) -> bool:
    """Whether the attribute is a list of weights: it is no state."""
    return name in (KEPT, REFERENCES) and isinstance(module, torch.nn.RNNBase)


def install(bind: Bind, is_capturing: Callable[[], bool]) -> None:
    def weights(self: torch.nn.RNNBase) -> Any:
        if not is_capturing():
            return vars(self)[KEPT]
        return [getattr(self, name, None) for name in self._flat_weights_names]

    def keep(self: torch.nn.RNNBase, value: Any) -> None:
        vars(self)[KEPT] = value

    def update(self: torch.nn.RNNBase) -> None:
        if not is_capturing():
            original(self)

    original = torch.nn.RNNBase._update_flat_weights
    bind(torch.nn.RNNBase, KEPT, property(weights, keep))
    bind(torch.nn.RNNBase, "_update_flat_weights", update)


def attributes_of(module: torch.jit.ScriptModule) -> list[str]:
    """The names of attributes of a scripted module's object in C++, besides parameters, buffers and modules."""
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
    return list(kind.get_attributes())
