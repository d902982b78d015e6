"""Programs of earlier versions of the format, as data of the present version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ArtifactError

Data = dict[str, Any]


def upgraded(program: Any, version: int) -> Any:
    """A program with its derivatives, from the data of an earlier version. Raises `ArtifactError` for effects in a form
    that only development versions wrote.
    """
    if version != 1 or type(program) is not dict or type(program.get("signature")) is not dict:
        return program
    derived = [
        {**one, "program": upgraded(one.get("program"), version)} if type(one) is dict else one
        for one in program.get("derived", [])
    ]
    program = {**program, "signature": _grouped(_with_effects(_with_log(program["signature"])))}
    return {**program, "derived": derived} if derived else program


def _with_log(signature: Data) -> Data:
    """A signature with one log of effects in place of several lists."""
    if "metadata_writes" not in signature:
        return signature
    signature = dict(signature)
    if signature.pop("metadata_writes") or signature.pop("counted", ()):
        raise ArtifactError("effects in the form of a development version: export the function again")
    updates = [{**update, "is": "Write"} if type(update) is dict else update for update in signature.pop("updates", ())]
    return {**signature, "log": updates}


def _with_effects(signature: Data) -> Data:
    """A signature with effects in place of fields for actions around the graph."""
    signature = dict(signature)
    effects = [effect for name, make in _FIELDS.items() for effect in make(signature.pop(name, []))]
    return {**signature, "effects": effects} if effects else signature


def _grouped(signature: Data) -> Data:
    """A signature with its fields in groups."""
    signature = dict(signature)
    found: Data = {}
    for group, (cls, fields) in _GROUPS.items():
        contents = {new: signature.pop(old) for old, new in fields.items() if old in signature}
        found |= {group: {"is": cls, **contents}} if contents else {}
    effects = signature.pop("in_backward", None)
    return signature | found | ({} if effects is None else {"backward": effects})


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


_GROUPS = {
    "graph_outputs": (
        "GraphOutputs",
        {"graph_outputs": "slots", "graph_output_specs": "specs"} | _same("runtime_views"),
    ),
    "gradients": (
        "GradientInfo",
        {"gradients": "returned"}
        | _same("differentiable tangent_specs rootless reached_from arrival stages saving passed passed_aliases")
        | _same("passed_wrappers wrapper_results hooked_inside"),
    ),
    "structure": ("StructureInfo", _same("outputs output_spec written_spec shared_memory wrapper_parts")),
    "effects": ("EffectInfo", {"effects": "around"} | _same("log python_writes counted_along")),
    "stops": ("StopInfo", _same("decisions checks generators eager_regions")),
}


def _target(number: Any, *, is_input: bool = False) -> Data:
    return {"is": "EffectTarget", "number": number, **({"is_input": True} if is_input else {})}


_FIELDS: Mapping[str, Callable[[Any], list[Data]]] = {
    "apart": lambda groups: [
        {"is": "KeepApart", "targets": targets, "others": others, "message": message}
        for targets, others, message in groups
    ],
    "settings_inside": lambda pairs: [{"is": "RunUnder", "settings": pairs}] if pairs else [],
    "other_mode": lambda outputs: [{"is": "ChangeInference", "output": output} for output in outputs],
    "retained_inputs": lambda inputs: [
        {"is": "RetainGradient", "target": _target(number, is_input=True)} for number in inputs
    ],
    "retained": lambda results: [{"is": "RetainGradient", "target": _target(number)} for number in results],
    "parameters": lambda results: [{"is": "MakeParameter", "target": _target(number)} for number in results],
    "attributes": lambda attributes: [
        {"is": "GiveAttribute", "target": _target(number), "name": name, "value": value}
        for number, name, value in attributes
    ],
}
