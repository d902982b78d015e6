"""What `compile` says of arguments that mean something elsewhere, or nothing: what to write."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_KEYWORDS = "backend partition memory_budget dynamic decompositions on_unsupported regions".split()
_OF_INDUCTOR = (
    'write torch.compile(model, backend="foregrad", {}=...), or hand Inductor\'s settings over: '
    'foregrad.compile(model, backend=InductorCompiler({{"max_autotune": True}})), from foregrad.backends.inductor'
)
# Keywords of torch.compile's and of others' -> what to write.
_ELSEWHERE = {
    "fullgraph": "foregrad has one graph for a function, or runs it eagerly; for an error in place of that, write "
    'on_unsupported="raise"',
    "mode": _OF_INDUCTOR.format("mode"),
    "options": _OF_INDUCTOR.format("options"),
    "disable": "call the function itself, or mark a part of it with foregrad.eager_region",
    "model": "the model comes first, without a name: foregrad.compile(model)",
    "fn": "the function comes first, without a name: foregrad.compile(fn)",
    "fw_compiler": "write backend=(fw_compiler, bw_compiler), or call foregrad.aot_function",
    "bw_compiler": "write backend=(fw_compiler, bw_compiler), or call foregrad.aot_function",
    "partition_fn": "write partition=",
    "budget": "write memory_budget=",
}


def check_arguments(
    target: Any, dynamic: Any, on_unsupported: Any, others: Mapping[str, Any], regions: Any = "auto"
) -> None:
    """Raise `TypeError` or `ValueError` for what `compile` does not take."""
    for name in others:
        close = difflib.get_close_matches(name, _KEYWORDS, n=1)
        instead = _ELSEWHERE.get(name) or (f"did you mean {close[0]}=?" if close else f"it has {', '.join(_KEYWORDS)}")
        raise TypeError(f"foregrad.compile has no keyword {name}=: {instead}")
    if not (dynamic is None or isinstance(dynamic, bool)):
        raise ValueError(
            f"dynamic is None (sizes that differed between calls), True (all sizes) or False (none), not {dynamic!r}"
        )
    if on_unsupported not in (None, "eager", "raise"):
        raise ValueError(f"on_unsupported is 'eager' or 'raise', not {on_unsupported!r}")
    if regions not in (True, False, "auto"):
        raise ValueError(f"regions is True (whatever repeats), False or 'auto' (where it pays), not {regions!r}")
    if isinstance(target, str):
        raise TypeError(
            f"foregrad.compile compiles a function or a module, not {target!r}. If that is a backend, write "
            f"foregrad.compile(model, backend={target!r})"
        )
    if isinstance(target, type):
        raise TypeError(
            f"foregrad.compile compiles a function or a module, and {target.__name__} is a class. Compile an object: "
            f"foregrad.compile({target.__name__}(...)), or put @foregrad.compile() above its forward"
        )
    if target is not None and not callable(target) and getattr(type(target), "_foregrad_compile", None) is None:
        raise TypeError(
            f"foregrad.compile compiles a function or a module, not {target!r}, a {type(target).__name__}. Write "
            'foregrad.compile(model), or @foregrad.compile(backend="inductor") above a function'
        )
