"""A compiled joint graph as an artifact of foregrad's: its halves as data, which run without the module's Python."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...errors import UnsupportedError
from ...graph.joint import Partitioned
from .artifact import Artifact, versions_now
from .container import StateEntry
from .program import CallSpec, Leaf, Program, StoredSpecialization, context_now
from .records import Stored


def artifact_of(jd: Any, halves: Partitioned) -> Artifact:
    """The artifact of the halves of a graph, called as the compiled function is. Raises `UnsupportedError` for tensor
    subclasses, symbolic sizes and autocast.
    """
    layout, signature = jd.captured.layout, halves.joint.signature
    for what, is_there in (
        ("takes tensor subclasses", layout.wrappers),
        ("has symbolic sizes", signature.symbols),
        ("was captured under autocast", jd.captured.autocast),
    ):
        if is_there:
            raise UnsupportedError(f"a graph that {what} can't be an artifact: pass serializable=False")
    number, entries, inputs = layout.number, [], []
    for i, info in enumerate(signature.inputs):
        if i in number:
            leaf = layout.leaves[layout.primals[number[i]].place]
            inputs.append(dataclasses.replace(info, argument=leaf, source=None))
        else:
            name = f"reached.{i}"
            entries.append(StateEntry(name, "tensor", info.source.get()))
            inputs.append(dataclasses.replace(info, source=Stored(name)))
    joint = dataclasses.replace(halves.joint, signature=dataclasses.replace(signature, inputs=tuple(inputs)))
    program = Program(Partitioned(joint, halves.forward, halves.backward))
    leaves = tuple(Leaf(f"args[{i}]", *given) for i, given in enumerate(layout.given))
    specialization = StoredSpecialization("joint", program, CallSpec(layout.tree, leaves), context_now(), None)
    return Artifact(joint.name, [specialization], entries, versions=versions_now())
