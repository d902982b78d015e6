"""Descriptors of the inputs and outputs of a joint graph, and the nodes that they belong to.

In a graph of `foregrad.aot_export_joint_with_descriptors` each placeholder has `meta["desc"]`, and the output node has
a list of them in `meta["desc"]`, one for each result. The classes are PyTorch's own where the installed PyTorch has
them, so that `isinstance` tests of other people's code hold; else classes of equal names and fields. They are names of
the module here: `foregrad.descriptors.ParamAOTInput("weight")`.

A tensor subclass stands in the graph as its plain tensors: `SubclassGetAttrAOTInput(base, attr)`. The functions here
find their nodes too: the node's name is the parameter's with the attribute behind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import fx

from ._torch.descriptors import descriptor_classes

__all__ = [
    "get_all_input_and_grad_nodes",
    "get_all_output_and_tangent_nodes",
    "get_buffer_nodes",
    "get_named_buffer_nodes",
    "get_named_param_nodes",
    "get_param_and_grad_nodes",
    "get_param_nodes",
    "get_plain_input_and_grad_nodes",
    "get_plain_output_and_tangent_nodes",
]

Pairs = dict[Any, "tuple[fx.Node, fx.Node | None]"]
OutputPairs = dict[Any, "tuple[Any, fx.Node | None]"]

# --------------------------------------------------------------------------------------------------- finding the nodes


def get_all_input_and_grad_nodes(g: fx.Graph) -> Pairs:
    """`{descriptor: (node, node of the gradient or None)}` for all inputs that may be tensors with gradients, whether
    they have one or not; tangents (without gradients) are included.

    Examples:
        >>> import contextlib, torch, foregrad
        >>> with contextlib.ExitStack() as stack:
        ...     jd = foregrad.aot_export_joint_with_descriptors(stack, torch.nn.Linear(3, 2), (torch.ones(1, 3),))
        ...     pairs = foregrad.descriptors.get_all_input_and_grad_nodes(jd.graph_module.graph)
        >>> [desc.expr() for desc, (_, grad) in pairs.items() if grad is not None]
        ["self.get_parameter('weight')", "self.get_parameter('bias')"]
    """
    grads = {_input_of(desc): node for node, desc in _outputs(g) if desc is not None and _input_of(desc) is not None}
    return {desc: (node, grads.get(desc)) for node, desc in _inputs(g) if _is(_root(desc), "DifferentiableAOTInput")}


def get_all_output_and_tangent_nodes(g: fx.Graph) -> OutputPairs:
    """`{descriptor: (node, node of the tangent or None)}` for all outputs; gradients (without tangents) are included.
    An output that is a constant stands there as itself.
    """
    tangents = {_output_of(desc): node for node, desc in _inputs(g) if _output_of(desc) is not None}
    return {
        desc: (node, tangents.get(desc)) for node, desc in _outputs(g) if _is(_root(desc), "DifferentiableAOTOutput")
    }


def get_param_and_grad_nodes(graph: fx.Graph) -> Pairs:
    """`get_all_input_and_grad_nodes` of the parameters."""
    return {d: pair for d, pair in get_all_input_and_grad_nodes(graph).items() if _is(_root(d), "ParamAOTInput")}


def get_plain_input_and_grad_nodes(graph: fx.Graph) -> Pairs:
    """`get_all_input_and_grad_nodes` of the arguments."""
    return {d: pair for d, pair in get_all_input_and_grad_nodes(graph).items() if _is(_root(d), "PlainAOTInput")}


def get_plain_output_and_tangent_nodes(graph: fx.Graph) -> OutputPairs:
    """`get_all_output_and_tangent_nodes` of the results of the function, without updates of inputs."""
    return {d: pair for d, pair in get_all_output_and_tangent_nodes(graph).items() if _is(_root(d), "PlainAOTOutput")}


def get_named_param_nodes(graph: fx.Graph) -> dict[str, fx.Node]:
    """The nodes of the parameters by their names; a plain tensor in a subclass is called `weight.attribute`."""
    return _named(graph, "ParamAOTInput")


def get_named_buffer_nodes(graph: fx.Graph) -> dict[str, fx.Node]:
    """The nodes of the buffers by their names; see `get_named_param_nodes`."""
    return _named(graph, "BufferAOTInput")


def get_param_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the parameters, in the graph's order: they come first."""
    return list(get_named_param_nodes(graph).values())


def get_buffer_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the buffers, in the graph's order: after the parameters."""
    return list(get_named_buffer_nodes(graph).values())


def _inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any]]:
    for node in graph.find_nodes(op="placeholder"):
        yield node, node.meta["desc"]


def _outputs(graph: fx.Graph) -> Iterator[tuple[Any, Any]]:
    output = next(iter(reversed(graph.nodes)))
    yield from zip(flat_outputs(output), output.meta["desc"], strict=True)


def flat_outputs(output: fx.Node) -> list[Any]:
    """An output node's values, in order, through lists and tuples."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from leaves(item)
        else:
            yield value

    return list(leaves(output.args[0]))


def _named(graph: fx.Graph, kind: str) -> dict[str, fx.Node]:
    return {_name(desc): node for node, desc in _inputs(graph) if _is(_root(desc), kind)}


def _name(desc: Any) -> str:
    return f"{_name(desc.base)}.{desc.attr}" if hasattr(desc, "attr") else str(desc.target)


def _root(desc: Any) -> Any:
    """The descriptor of the whole, for one of a part of a subclass."""
    while hasattr(desc, "base"):
        desc = desc.base
    return desc


def _is(desc: Any, kind: str) -> bool:
    """Whether a descriptor, PyTorch's or ours, is of a class of the name."""
    return any(cls.__name__ == kind for cls in type(desc).__mro__)


def _input_of(desc: Any) -> Any:
    """The input that an output is the gradient of; None for an output of the forward."""
    return _of_whole(desc, "grad_of", "SubclassGetAttrAOTInput")


def _output_of(desc: Any) -> Any:
    """The output that an input is the tangent of; None for a primal."""
    return _of_whole(desc, "output", "SubclassGetAttrAOTOutput")


def _of_whole(desc: Any, field: str, part: str) -> Any:
    if not hasattr(desc, "attr"):
        return getattr(desc, field, None)
    whole = _of_whole(desc.base, field, part)
    return None if whole is None else getattr(classes(), part)(whole, desc.attr)


# ------------------------------------------------------------------------------------------------- making descriptors


def gradient_of(desc: Any) -> Any:
    """The descriptor of the gradient of an input."""
    if hasattr(desc, "attr"):
        return classes().SubclassGetAttrAOTOutput(gradient_of(desc.base), desc.attr)
    return classes().GradAOTOutput(desc)


def tangent_of(desc: Any) -> Any:
    """The descriptor of the tangent of an output."""
    if hasattr(desc, "attr"):
        return classes().SubclassGetAttrAOTInput(tangent_of(desc.base), desc.attr)
    return classes().TangentAOTInput(desc)


# --------------------------------------------------------------------------------------------------------- the classes

# Name: base, fields, text of `expr()`.
_INPUTS = {
    "DifferentiableAOTInput": ("AOTInput", (), ""),
    "ParamAOTInput": ("DifferentiableAOTInput", ("target",), "self.get_parameter({0.target!r})"),
    "BufferAOTInput": ("DifferentiableAOTInput", ("target",), "self.get_buffer({0.target!r})"),
    "PlainAOTInput": ("DifferentiableAOTInput", ("idx",), "args[{0.idx}]"),
    "ViewBaseAOTInput": ("DifferentiableAOTInput", ("base_of",), "{1}._base"),
    "SyntheticBaseAOTInput": ("DifferentiableAOTInput", ("base_of",), "__make_synthetic_base({1})"),
    "TangentAOTInput": ("DifferentiableAOTInput", ("output",), "__output_tangent({1})"),
    "SubclassGetAttrAOTInput": ("AOTInput", ("base", "attr"), "{1}.{0.attr}"),
    "SubclassSizeAOTInput": ("AOTInput", ("base", "idx"), "{1}.size({0.idx})"),
    "SubclassStrideAOTInput": ("AOTInput", ("base", "idx"), "{1}.stride({0.idx})"),
    "DummyAOTInput": ("AOTInput", ("idx",), "__dummy{0.idx}"),
}
_OUTPUTS = {
    "DifferentiableAOTOutput": ("AOTOutput", (), ""),
    "PlainAOTOutput": ("DifferentiableAOTOutput", ("idx",), "output[{0.idx}]"),
    "InputMutationAOTOutput": ("DifferentiableAOTOutput", ("mutated_input",), "__input_mutation({1})"),
    "IntermediateBaseAOTOutput": ("DifferentiableAOTOutput", ("base_of",), "__intermediate_base({1})"),
    "MetadataMutationAOTOutput": ("DifferentiableAOTOutput", ("idx",), "__aliased_arg_with_metadata_mutation{0.idx}"),
    "GradAOTOutput": ("DifferentiableAOTOutput", ("grad_of",), "__grad({1})"),
    "SubclassGetAttrAOTOutput": ("AOTOutput", ("base", "attr"), "{1}.{0.attr}"),
    "SubclassSizeAOTOutput": ("AOTOutput", ("base", "idx"), "{1}.size({0.idx})"),
    "SubclassStrideAOTOutput": ("AOTOutput", ("base", "idx"), "{1}.stride({0.idx})"),
    "SavedForBackwardsAOTOutput": ("AOTOutput", ("idx",), "__saved_for_backwards_{0.idx}"),
    "DummyAOTOutput": ("AOTOutput", ("idx",), "__dummy{0.idx}"),
}


@functools.cache
def classes() -> Any:
    """The module with the classes: PyTorch's, or ours."""
    return descriptor_classes() or own_classes()


def own_classes() -> Any:
    """Classes with the names, fields and methods of PyTorch's."""
    made: dict[str, Any] = {}
    for root, table in (("AOTInput", _INPUTS), ("AOTOutput", _OUTPUTS)):
        made[root] = _made(root, object, (), "")
        for name, (base, fields, text) in table.items():
            made[name] = _made(name, made[base], fields, text)
    return SimpleNamespace(**made)


def _made(name: str, base: type, fields: tuple[str, ...], text: str) -> type:
    def expr(self: Any) -> str:
        inner: Any = getattr(self, fields[0]) if fields else None
        return text.format(self, inner.expr() if hasattr(inner, "expr") else "")

    namespace: dict[str, Any] = {"expr": expr, "__doc__": text, "__module__": __name__}
    for asked, kind in (("param", "Param"), ("buffer", "Buffer"), ("tangent", "Tangent"), ("grad", "Grad")):
        namespace[f"is_{asked}"] = functools.partialmethod(_asked, kind)
    return dataclasses.make_dataclass(
        name, [(field, Any) for field in fields], bases=(base,), namespace=namespace, frozen=True
    )


def _asked(desc: Any, kind: str) -> bool:
    return type(_root(desc)).__name__ in (f"{kind}AOTInput", f"{kind}AOTOutput")


def __getattr__(name: str) -> Any:
    if "AOT" in name and hasattr(classes(), name):
        return getattr(classes(), name)
    raise AttributeError(f"module `foregrad.descriptors` has no attribute `{name}`")
