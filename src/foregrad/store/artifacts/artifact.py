"""`Artifact`: captured functions as data. `export` makes one, `save` writes its file, `load` gives its module."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import torch

from ..._torch.fakes import without_fake_mode
from ..._torch.graphs import size_hint, symbol_of
from ...errors import ArtifactError, first_line
from ...frontend.tree import flatten
from ...graph.effect_log import Detach, MarkRequiresGrad, OutputInfo, TakeView, Write
from ...graph.meta import TensorSpec
from ...graph.signature import BaseOf, ConstantOutput, Handle, MemoryOf
from ...house import extension_name, extensions
from ...identity import ById
from ..serialize.values import checked
from .capture import Exporter
from .container import Contents, StateEntry, dump_tensors, opened, pack, read_tensors, reading, refusing, write_file
from .module import LoadedModule
from .program import StoredSpecialization, specialization_from, specialization_to
from .records import Named, Stored
from .upgrade import upgraded


class Artifact:
    """A function or module as graphs: forward, backward and derivatives, for one or more kinds of calls.

    `specializations`: one for each kind of call, with its `joint`, `forward` and `backward` graphs, which print as
    Python. `entries`: the tensors that the artifact holds.

    Examples:
        >>> import torch, foregrad
        >>> artifact = foregrad.export(torch.nn.ReLU(), (torch.ones(3),))
        >>> len(artifact.specializations)
        1
    """

    def __init__(
        self,
        name: str,
        specializations: Sequence[StoredSpecialization],
        entries: Sequence[StateEntry],
        *,
        versions: Mapping[str, str],
        again: Callable[[int], StoredSpecialization] | None = None,
        exporter: Exporter | None = None,
    ) -> None:
        self.name = name
        self.specializations = list(specializations)
        self.entries = list(entries)
        self.versions = dict(versions)
        self._again = again
        self._exporter = exporter

    # ---------------------------------------------------------------- making

    def specialize(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        dynamic_shapes: Any = None,
        derivatives: int = 1,
        name: str = "",
    ) -> StoredSpecialization:
        """Capture the function once more, for other calls: in evaluation mode, without gradients, of other lengths.

        The arguments are `export`'s. Raises `ArtifactError` for an artifact that was loaded.
        """
        if self._exporter is None:
            raise ArtifactError(
                f"the artifact `{self.name}` was loaded: only the program that exported it can capture more"
            )
        specialization = self._exporter.specialize(args, kwargs, dynamic_shapes, derivatives, name)
        taken = {specialization.name for specialization in self.specializations}
        if specialization.name in taken:
            number = next(i for i in range(2, len(taken) + 3) if f"{specialization.name} ({i})" not in taken)
            specialization = dataclasses.replace(specialization, name=f"{specialization.name} ({number})")
        self.specializations.append(specialization)
        self.entries = list(self._exporter.entries.values())
        return specialization

    # ---------------------------------------------------------------- running

    def module(self, *, backend: Any = "eager", **settings: Any) -> LoadedModule:
        """A module that runs the artifact, over tensors of its own.

        `backend` and `settings` (`partition`, `memory_budget`) are `foregrad.compile`'s.
        """
        return LoadedModule(self, _copies(self.entries), backend, settings)

    def specialization_for(self, number: int, *, fresh: bool) -> StoredSpecialization:
        """A specialization; a `fresh` specialization shares no graph, for a backend that changes graphs."""
        if not fresh:
            return self.specializations[number]
        if self._again is None:
            return _read(io.BytesIO(self.to_bytes()), "the artifact").specialization_for(number, fresh=True)
        return self._again(number)

    def exported_program(self, number: int = 0) -> Any:
        """The forward of a specialization as a `torch.export.ExportedProgram`, over copies of its tensors.

        Raises `ArtifactError` if an exported program can't express the specialization.
        """
        specialization = self.specialization_for(number, fresh=True)
        reason = _no_exported_program(specialization)
        if reason is not None:
            raise ArtifactError(f"the forward of `{self.name}` is no exported program: {reason}")
        module = _ArtifactForward(self, _copies(self.entries), "eager", {})
        module.__dict__["specialization"] = specialization
        inputs, tree = _inputs(specialization), specialization.call.tree
        args, kwargs = tree.unflatten([_example(leaf) for leaf in inputs])
        dims: Any = tree.unflatten([_dims(leaf, specialization) for leaf in inputs])
        shapes = {"args": dims[0], "kwargs": dims[1]} if kwargs else {"args": dims[0]}
        is_dynamic = specialization.joint.symbols is not None
        with torch.no_grad():
            try:
                return torch.export.export(module, args, kwargs, dynamic_shapes=shapes if is_dynamic else None)
            except Exception as error:
                said = f"torch.export refused it ({first_line(error)})"
                raise ArtifactError(f"the forward of `{self.name}` is no exported program: {said}") from error

    # ---------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to a file, as a whole or not at all. Equal contents give equal bytes.

        If `path` is a link, the file that it leads to is written. Raises `ArtifactError` if that is no file but a
        folder, a device or a pipe.
        """
        write_file(os.fspath(path), self._write)

    def to_bytes(self) -> bytes:
        """The content of the file that `save` writes."""
        file = io.BytesIO()
        self._write(file)
        return file.getvalue()

    def _write(self, file: IO[bytes]) -> None:
        constants = _Constants()
        programs = [specialization_to(specialization, constants) for specialization in self.specializations]
        state = [entry for entry in self.entries if entry.kind != "constant"]
        data, layouts, tensors = dump_tensors([*state, *constants.entries])
        manifest: dict[str, Any] = {
            **self.versions,
            "name": self.name,
            "specializations": [_summary(specialization) for specialization in self.specializations],
            "tensors": data,
            "layouts": layouts,
        }
        if used := _extensions_of(self.specializations):
            manifest["extensions"] = used
        pack(file, manifest, programs, tensors)

    def __str__(self) -> str:
        return "\n\n".join(f"# {s.name}\n{s}" for s in self.specializations)

    def __repr__(self) -> str:
        return f"Artifact({self.name!r}, {[s.name for s in self.specializations]})"


class _Constants:
    """Names for the constant tensors of graphs: one for each tensor."""

    def __init__(self) -> None:
        self.entries: list[StateEntry] = []
        self._names: ById[torch.Tensor, str] = ById()

    def __call__(self, tensor: torch.Tensor) -> str:
        name = self._names.get(tensor)
        if name is None:
            name = self._names[tensor] = f"constant.{len(self.entries)}"
            self.entries.append(StateEntry(name, "constant", tensor))
        return name


def _summary(specialization: StoredSpecialization) -> dict[str, Any]:
    return {
        "name": specialization.name,
        "nodes": [len(m.graph.nodes) for m in (specialization.joint, specialization.forward, specialization.backward)],
        "derivatives": specialization.program.order(),
    }


def _copies(entries: Sequence[StateEntry]) -> list[StateEntry]:
    """The entries over copies of their memory; the copies share as the originals do."""
    data, layouts, content = dump_tensors(entries)
    return read_tensors(data, layouts, content)


# ------------------------------------------------------------------------------------------------------ the doors


def export(
    fn_or_module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    derivatives: int = 1,
    closed_over: str = "constants",
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Artifact:
    """Capture a function or module, with its gradient, as data that can be saved, and run without its Python.

    Args:
        fn_or_module: a function, or a module in its present mode, under the present grad mode and autocast. A
            `torch.export.ExportedProgram` gets a backward.
        args: positional arguments to capture it for; `kwargs`: keyword arguments.
        dynamic_shapes: sizes that may vary: True for all, or a dict by argument name (or a sequence, as `args`) of
            dicts or sequences of dimensions: None (static), True, a `torch.export.Dim`, or (least, greatest).
        derivatives: how often the artifact can be differentiated: 0 for the forward alone, 2 for `create_graph=True`.
        closed_over: the treatment of tensors that a function closes over: "constants" are saved too (and train, if
            they require grad), "inputs" are passed to each call by name.
        decompositions: operators to replace, `{operator: function}`.

    Raises `AttributeAssignedError` if the function assigns tensors to attributes of modules that are no buffers,
    `ArtifactError` if no file can hold the function, and the errors of `foregrad.capture`.

    Examples:
        >>> import torch, foregrad
        >>> artifact = foregrad.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
        >>> artifact.module()(torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """
    exporter = Exporter(fn_or_module, closed_over=closed_over, decompositions=decompositions)
    with without_fake_mode():
        specialization = exporter.specialize(args, kwargs, dynamic_shapes, derivatives, "")
    entries = list(exporter.entries.values())
    return Artifact(exporter.name, [specialization], entries, versions=versions_now(), exporter=exporter)


def _extensions_of(specializations: Sequence[StoredSpecialization]) -> dict[str, str]:
    """By name, digests of the classes of effects that are defined outside the package."""
    effects = (effect for s in specializations for effect in s.signature.effects.around)
    names, known = {extension_name(type(effect)) for effect in effects}, extensions()
    return {name: known[name] for name in sorted(names & known.keys())}


def versions_now() -> dict[str, str]:
    """The versions for an artifact that is made now."""
    return {"foregrad": _version(), "torch": str(torch.__version__).partition("+")[0]}


def _version() -> str:
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def load(path: str | os.PathLike[str], *, backend: Any = "eager", **settings: Any) -> LoadedModule:
    """The artifact saved in a file, as a module that can be called, trained and differentiated.

    No code in the file is executed, and its graphs may only name operators that are registered here. `backend` and
    `settings` (`partition`, `memory_budget`) are as in `foregrad.compile`. Raises `ArtifactError` for a file that
    is no artifact, is damaged, or comes from an incompatible version.

    Examples:
        >>> import tempfile, torch, foregrad
        >>> artifact = foregrad.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     artifact.save(file.name)
        ...     module = foregrad.load(file.name)
        >>> module(torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """
    with opened(os.fspath(path)) as contents:
        artifact = _artifact(contents)
    return LoadedModule(artifact, artifact.entries, backend, settings)


def _read(file: IO[bytes], what: str) -> Artifact:
    with refusing(what), reading(file) as contents:
        return _artifact(contents)


def _artifact(contents: Contents) -> Artifact:
    manifest = contents.manifest
    programs = [contents.json(f"programs/{number}.json") for number in range(len(manifest["specializations"]))]
    programs = [{**one, "program": upgraded(one["program"], manifest["version"])} for one in programs]
    if len(programs) + 1 != len(manifest["members"]) or not programs:
        raise ArtifactError("it has other members than its specializations and tensors")
    entries = read_tensors(manifest["tensors"], manifest["layouts"], contents.tensors())
    constants = {entry.name: entry.tensor for entry in entries if entry.kind == "constant"}
    state = {entry.name for entry in entries if entry.kind != "constant"}

    def again(number: int) -> StoredSpecialization:
        with refusing("the artifact"):
            specialization = specialization_from(programs[number], constants)
            for info in specialization.signature.inputs:
                source = info.source
                if info.argument is None and not _is_source(source, state):
                    raise ArtifactError(f"it holds no tensor for {info.slot}")
            return specialization

    specializations = [again(number) for number in range(len(programs))]
    for name, digest in _extensions_of(specializations).items():
        if checked(manifest.get("extensions", {}), dict).get(name) != digest:
            raise ArtifactError(f"its effects are of {name}, and the source differs from the source at export")
    versions = {key: checked(manifest[key], str) for key in ("foregrad", "torch")}
    return Artifact(checked(manifest["name"], str), specializations, entries, versions=versions, again=again)


def _is_source(source: Any, state: set[str]) -> bool:
    if isinstance(source, Stored):
        return source.name in state
    return isinstance(source, (Named, BaseOf, MemoryOf))


# ----------------------------------------------------------------------------------------- exported program
# The forward of an artifact as a `torch.export.ExportedProgram`, for compilers and runtimes that take exported
# programs.
#
# PyTorch makes it: a module that holds the artifact's tensors under their names and runs its forward graph is exported
# once more, by `torch.export.export`. Effects outside the graph (a view by its steps, a write to a buffer) follow in
# the module, in the order of the program.


def _no_exported_program(specialization: StoredSpecialization) -> str | None:
    """The reason why a specialization can't be an exported program, or None."""
    signature = specialization.signature
    for info in signature.inputs:
        if info.argument is None and not isinstance(info.source, Stored):
            return f"{info.slot} is neither an argument nor held by the artifact"
        if info.number is not None:
            return f"the number {info.slot} may vary"
    for effect in signature.effects.log:
        is_of_result = effect.result is not None and isinstance(effect, (TakeView, MarkRequiresGrad, Detach))
        if not (is_of_result or (isinstance(effect, Write) and effect.is_whole)):
            return f"it has effects on its inputs besides writes ({effect})"
    for call_effect in signature.effects.around:
        return f"it does more than compute ({call_effect})"
    if signature.effects.python_writes:
        return "it writes to objects of Python"
    if signature.stops.decisions:
        return f"it reads a value at {signature.stops.decisions[0].where}"
    if signature.stops.checks:
        return f"it checks values at {signature.stops.checks[0].where}"
    return None


class _ArtifactForward(LoadedModule):
    """The artifact's tensors under their names; its forward is the graph of one specialization."""

    specialization: StoredSpecialization

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        specialization = self.specialization
        signature, places = specialization.signature, self._places()
        leaves, _ = flatten((args, kwargs))
        inputs = []
        for info in signature.inputs:
            if info.argument is not None:
                inputs.append(leaves[info.argument])
            else:
                table, key = places[info.source.name]
                inputs.append(table[key])
        results = list(specialization.forward(*inputs))[: signature.num_forward_outputs]
        views = [_value(info, inputs, results) for info in signature.structure.outputs]
        for write in signature.updates:
            inputs[write.input].copy_(results[write.output])
        outputs = [
            _value(info, inputs, results) if getattr(info, "input", None) is not None else view
            for info, view in zip(signature.structure.outputs, views, strict=True)
        ]
        return signature.structure.output_spec.unflatten(outputs)


def _value(info: OutputInfo, inputs: list[Any], results: list[Any]) -> Any:
    if isinstance(info, ConstantOutput):
        return info.value
    assert isinstance(info, Handle)
    value = inputs[info.input] if info.input is not None else results[info.output or 0]
    for step in info.steps:
        value = step.op(value, *step.args, **dict(step.kwargs))
        value = value if step.index is None else value[step.index]
    return value


def _inputs(specialization: StoredSpecialization) -> list[Any]:
    """For each leaf of a call, its layout if it is a tensor, else the leaf."""
    specs: dict[int, TensorSpec] = {}
    for info in specialization.signature.inputs:
        if info.argument is not None:
            specs[info.argument] = info.spec
    items: list[Any] = []
    for number, leaf in enumerate(specialization.call.leaves):
        position = number if leaf.same_as is None else leaf.same_as
        items.append(specs.get(position, leaf) if leaf.is_tensor or leaf.same_as is not None else leaf)
    return items


def _example(item: Any) -> Any:
    if isinstance(item, TensorSpec):
        sizes, strides = ([size_hint(n) for n in numbers] for numbers in (item.shape, item.stride))
        return torch.empty_strided(sizes, strides, dtype=item.dtype, device=item.device).zero_()
    if item.is_tensor:
        raise ArtifactError(f"its argument {item.path} is never read, so its layout is unknown")
    return item.value


def _dims(item: Any, specialization: StoredSpecialization) -> Any:
    """The dimensions of an argument that may vary, with their limits."""
    if not isinstance(item, TensorSpec):
        return None
    table, dims = specialization.joint.symbols, {}
    for dim, size in enumerate(item.shape):
        if isinstance(size, torch.SymInt):
            symbol = symbol_of(size)
            low, high = (None, None) if symbol is None else table.limits(symbol)
            dims[dim] = torch.export.Dim.DYNAMIC(min=low, max=high)
    return dims or None
