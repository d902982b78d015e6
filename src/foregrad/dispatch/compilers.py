"""The call of a compiler: our own compiler gets the graph unchanged, all others get it in the form that compilers for
AOTAutograd expect.

Other compilers may change the graph, so they get a copy with plain, complete metadata. A tracing context with the fake
mode of the graph surrounds the call. Output strides that the compiler reports there, or in an attribute
`output_strides` of its function, are believed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .._torch import engine
from .._torch.graphs import copied_graph_of, ends_of, is_operator, make_graph_module
from .._torch.symbols import Size
from .._torch.tracing_context import compiler_context
from ..annexes import given
from ..backends.boxed import as_boxed
from ..backends.eager import eager_compiler
from ..backends.results import Contract, Failures, Instead, described, promised, random_states_of
from ..errors import BackendError, ForegradError, add_note
from ..graph.joint import JointGraph
from ..graph.meta import NodeMeta, TensorSpec, spec_of
from ..graph.role import STAGE, GraphRole, outlined
from ..graph.slots import Grad, Slot
from ..graph.source import a_name
from ..house import is_house_module
from ..interrupts import is_interrupt, runs_compiler
from ..passes.aliasing import results_of, tensors_in, written_inputs
from ..runtime.compiled import Boxed

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A compiled graph with its compiler's report: the strides of its outputs, the inputs that it writes into."""

    run: Boxed
    output_strides: list[tuple[Size, ...] | None] | None
    writes_into: tuple[int, ...]


def call_compiler(
    compiler: Compiler,
    module: fx.GraphModule,
    joint: JointGraph,
    role: GraphRole,
    *,
    always: bool = False,
    failures: Failures | None = None,
    may_retry: bool = False,
) -> CompiledGraph:
    """Compile one half of `joint`. Raises `BackendError` for a result that can't be called.

    Results of the compiled graph are checked in its first call, or `always`. With `failures`, a failure becomes an
    error of foregrad's, or the graph runs on eager's kernels. With `may_retry` a failure of a graph with symbolic sizes
    is raised unchanged, for a second try with plain sizes.
    """
    how: dict[str, Any] = {"always": always, "failures": failures, "may_retry": may_retry}

    def compile_part(part: fx.GraphModule, its: GraphRole, *, as_eager: bool = False) -> CompiledGraph:
        return call_compiler(eager_compiler if as_eager else compiler, part, joint, its, **how)

    for cut in given("graphs compiled in parts"):
        if (parts := cut(module, joint, role, as_eager=compiler is eager_compiler)) is not None:
            gradients = sum(isinstance(slot, Grad) for slot in _slots(module, joint, role.phase))
            return CompiledGraph(*parts.compiled(role, gradients, compile_part))
    if failures is None or compiler is eager_compiler:
        return _called(compiler, module, joint, role, always=always)

    def after(error: Exception) -> tuple[Boxed, Callable[[], None]]:
        def note() -> None:
            failures.note(described(compiler, _backend_name(compiler), _title(joint, role), module, error), error)

        return _called(eager_compiler, module, joint, role, always=always).run, note

    instead = Instead(functools.partial(random_states_of, module), after)
    try:
        return _called(compiler, module, joint, role, always=always, instead=None if failures.tell is None else instead)
    except Exception as error:
        is_said = failures.tell is None and isinstance(error, ForegradError)
        if is_said or is_interrupt(error) or (may_retry and joint.symbols is not None):
            raise
        run, note = after(error)
        note()
        return CompiledGraph(run, None, ())


def _called(
    compiler: Compiler,
    module: fx.GraphModule,
    joint: JointGraph,
    role: GraphRole,
    *,
    always: bool,
    instead: Instead | None = None,
) -> CompiledGraph:
    result, reported = called_bare(compiler, module, joint, role)
    own = is_own(compiler)
    strides = reported or _strides(getattr(result, "output_strides", None))
    writes, updated = tuple(getattr(result, "writes_into", ())), getattr(result, "updated", ())
    if own and getattr(result, "returns_list", False):
        return CompiledGraph(as_boxed(result), strides, writes)  # eager's kernels, singly
    names = _result_names(module, joint, role.phase)
    promises = promised(module, names, strides=strides or (), **_given_out(joint, role))
    for _, output in updated:
        promises[output] = promises[output].in_an_input()
    contract = Contract(
        _backend_name(compiler),
        _title(joint, role),
        promises,
        _input_names(module, joint),
        (*writes, *written_inputs(module), *(number for number, _ in updated)),
        tensors_in(module),
        is_own=own,
        any_device=bool(getattr(compiler, "any_device", False)),
        always=always,
        instead=None if own or strides is not None else instead,
    )
    run: Any = as_boxed(result, backend=contract.backend, graph=f"{role.phase} graph", first_call=contract.first_call)
    run.updated = updated
    return CompiledGraph(run, strides, writes)


@runs_compiler
def called_bare(
    compiler: Compiler, module: fx.GraphModule, joint: JointGraph, role: GraphRole
) -> tuple[Callable[..., object], list[tuple[Size, ...] | None] | None]:
    """The compiler's result for a graph made of `joint`, and the strides that it reported for the graph's results."""
    own = is_own(compiler)
    graph = module if own else _for_others(module, joint, role)
    if getattr(compiler, "takes_regions", False):
        graph = outlined(graph, regions=role.regions, several=2 if role.regions is True else None)
    role.put_on(graph)
    # Eager's kernels need no fakes, and there may be very many.
    inputs = () if compiler is eager_compiler else ends_of(graph)[0]
    example_inputs = [node.meta["val"] for node in inputs]
    phase, name, reported = role.phase, joint.name, None
    with torch.no_grad(), engine.disable_autocast(), graph_being_compiled(phase):
        try:
            if own:
                result = compiler(graph, example_inputs)
            else:
                facts = next((make(joint, role) for make in given("facts for compilers")), None)
                with compiler_context(joint.fake_mode, _now.graphs, facts) as strides_reported:
                    result = compiler(graph, example_inputs)
                    reported = strides_reported()
        except ForegradError:
            raise
        except Exception as error:
            add_note(error, f"while the backend compiled the {phase} graph of `{name}`")
            raise
    if not callable(result):
        raise BackendError(
            f"the compiler of the {phase} graph of `{name}` returned {a_name(type(result).__name__)}, not a callable"
        )
    return result, reported


def is_own(compiler: object) -> bool:
    """Whether a compiler or partitioner is foregrad's."""
    return is_house_module(getattr(compiler, "__module__", ""))


def _title(joint: JointGraph, role: GraphRole) -> str:
    return f"the {role.phase} graph of `{joint.name}`"


def _backend_name(compiler: object) -> str:
    while hasattr(compiler, "func"):
        compiler = compiler.func  # of a partial
    return str(getattr(compiler, "__name__", type(compiler).__name__))


def _result_names(module: fx.GraphModule, joint: JointGraph, phase: str) -> list[str]:
    """The results of a graph as the user knows them."""
    slots = _slots(module, joint, phase)
    saved = results_of(module)[len(slots) :]
    return [*map(str, slots), *(f"saved value {node}" for node in saved)]


def _slots(module: fx.GraphModule, joint: JointGraph, phase: str) -> list[Slot]:
    """The slots of a graph's first results."""
    signature = joint.signature
    if phase != "backward":
        return list(signature.graph_outputs.slots)
    stage = module.meta.get(STAGE)
    infos = signature.inputs if stage is None else [signature.inputs[i] for i in stage]
    return [*(Grad(info.slot) for info in infos), *signature.backward.outputs]


def _input_names(module: fx.GraphModule, joint: JointGraph) -> list[str]:
    texts = joint.slot_texts()
    return [texts.get(node.name, node.name) for node in ends_of(module)[0]]


def _given_out(joint: JointGraph, role: GraphRole) -> dict[str, Any]:
    """The results with strides that the user sees, and the position of the backward's first result."""
    if role.phase == "backward":
        return {"visible": (), "kept_from": None}
    return {"visible": role.visible_outputs, "kept_from": joint.signature.num_forward_outputs}


def _strides(strides: object) -> list[tuple[Size, ...] | None] | None:
    """Strides from a compiler's attribute; None if the attribute holds something else (text, for Inductor)."""
    if not isinstance(strides, (list, tuple)) or not all(map(_is_stride, strides)):
        return None
    return [None if stride is None else tuple(stride) for stride in strides]


def _is_stride(stride: Any) -> bool:
    is_list = isinstance(stride, (list, tuple))
    return stride is None or (is_list and all(isinstance(number, (int, torch.SymInt)) for number in stride))


def _for_others(module: fx.GraphModule, joint: JointGraph, role: GraphRole) -> fx.GraphModule:
    infos = zip(joint.placeholders(), joint.signature.inputs, strict=False)  # tangents come after the inputs
    with_gradient = {node.name for node, info in infos if info.requires_grad}
    is_backward, inputs = role.phase == "backward", set(ends_of(module)[0])

    def metadata(node: fx.Node) -> dict[str, Any]:
        op, requires_grad = "placeholder" if node in inputs else node.op, node.name in with_gradient
        return _metadata(node, op, requires_grad=requires_grad, is_backward=is_backward)

    graph = copied_graph_of(module, metadata)
    if role.phase == "inference":
        for number, node in enumerate(graph.find_nodes(op="placeholder")):
            node.name = node.target = f"arg{number}_1"
    output = graph.output_node()
    results: Any = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    output.args = (tuple(results),)
    # Results that must have the graph's strides: Inductor looks for the mark there.
    output.meta["user_visible_output_idxs"] = [i for i in role.visible_outputs if isinstance(results[i], fx.Node)]
    output.meta["output_stack_traces"] = [getattr(result, "meta", {}).get("stack_trace") for result in results]
    return make_graph_module(module, graph)


def _metadata(node: fx.Node, op: str, *, requires_grad: bool, is_backward: bool) -> dict[str, Any]:
    """The metadata that nodes of PyTorch's own graphs have. Costly entries are made when they are read. `op`: of the
    node in the graph, which may take the node's value as an input.
    """
    source = node.meta if isinstance(node.meta, NodeMeta) else NodeMeta(node.meta)
    if requires_grad and isinstance(spec_of(node), TensorSpec):
        meta = source.copy(tensor_meta=lambda: source["tensor_meta"]._replace(requires_grad=True))
    else:
        meta = source.copy()
    if op in ("call_function", "get_attr") and is_backward:
        meta["autograd_backward"] = True  # of values that the forward computes and the backward computes again
    if op == "placeholder":
        meta.setdefault("partitioner_tag", "is_backward" if node.name.startswith("tangents_") else "is_forward")
    elif op == "call_function" and "original_aten" not in meta:
        made_of = (node, *node.args[:1])  # a node, and the operator that it takes a result of
        operators = [n.target for n in made_of if isinstance(n, fx.Node) and is_operator(n.target)]
        meta |= {"original_aten": operators[0]} if operators else {}
    return meta


# -------------------------------------------------------------------- names
# Names of the graph being compiled, for compilers that write files or logs.

_model_name = "model"
_nth_graph = 0
_functions = itertools.count()


class _OfThread(threading.local):
    graphs: tuple[str, ...] = ()


_now = _OfThread()


def set_model_name(name: str) -> None:
    """The name that graph names start with from now on.

    Examples:
        >>> import foregrad
        >>> foregrad.set_model_name("gpt")
        >>> foregrad.get_aot_compilation_context()[1]
        'gpt'
        >>> foregrad.set_model_name("model")
    """
    global _model_name
    _model_name = name


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """(labels of the graph being compiled, model name, how many graphs were compiled before).

    Examples:
        >>> import foregrad
        >>> labels, model, number = foregrad.get_aot_compilation_context()
        >>> labels, model  # no graph is being compiled now
        ([], 'model')
    """
    return list(_now.graphs), _model_name, _nth_graph


def get_aot_graph_name() -> str:
    """The name of the graph being compiled: `model__0_forward_1`. Also called `get_graph_being_compiled`.

    Examples:
        >>> import torch, foregrad
        >>> def compiler(gm, example_inputs):
        ...     print(foregrad.get_aot_graph_name().split("__")[0])
        ...     return gm
        >>> out = foregrad.compile(lambda x: x * 2, backend=compiler)(torch.ones(2))
        model
    """
    return f"{_model_name}__{'_'.join(_now.graphs)}_{_nth_graph}"


get_graph_being_compiled = get_aot_graph_name


@contextlib.contextmanager
def graph_being_compiled(phase: str) -> Iterator[None]:
    """Context: a graph of the phase (forward, backward, inference) is being compiled."""
    global _nth_graph
    outer = _now.graphs
    _now.graphs = (f"{next(_functions)}_{phase}",)
    try:
        yield
    finally:
        _nth_graph += 1
        _now.graphs = outer
