"""A pipeline that works as another does, and remembers what went into each compiled graph and what came out."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..config import Config
from ..dispatch.compilers import CompiledGraph
from ..dispatch.pipeline import Pipeline, Product
from ..frontend.call import FlatCall
from ..graph.joint import JointGraph
from ..graph.role import GraphRole
from .lockstep import evaluate


@dataclasses.dataclass(frozen=True, slots=True)
class Generators:
    """The states of the global random generators: PyTorch's, Python's, NumPy's where it is imported."""

    cpu: torch.Tensor
    gpus: list[torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """As they are."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), gpus, random.getstate(), None if numpy is None else numpy.random.get_state())

    def put_back(self) -> None:
        """Have them as they were."""
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(self.gpus)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclasses.dataclass(slots=True)
class Execution:
    """One call of a compiled graph. `module` is the graph, `compiler` made the callable that ran, in
    `compile_seconds`.
    """

    module: fx.GraphModule
    joint: JointGraph
    role: GraphRole
    compiler: Callable[..., Any]
    inputs: list[Any]
    generators: Generators
    compile_seconds: float
    results: list[Any] = dataclasses.field(default_factory=list)
    _expected: list[Any] = dataclasses.field(default_factory=list)

    def expected(self) -> list[Any]:
        """The results of the graph on eager's kernels, for the same inputs."""
        if not self._expected:
            self.generators.put_back()
            self._expected = evaluate(self.module, self.inputs)
        return self._expected


@dataclasses.dataclass
class Log:
    """What a pipeline did: products, graphs before and after the backend's own passes, executions, in order.

    `tensors` are copies of the tensors that the function reaches, made when the capture had found them.
    """

    products: list[Product] = dataclasses.field(default_factory=list)
    prepared: list[tuple[fx.GraphModule, fx.GraphModule]] = dataclasses.field(default_factory=list)
    executions: list[Execution] = dataclasses.field(default_factory=list)
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class WatchedPipeline(Pipeline):
    """`watching(pipeline, log)` makes one. Nothing comes from the cache on disk, and nothing is put there."""

    log: Log = dataclasses.field(default_factory=Log)

    @classmethod
    def watching(cls, pipeline: Pipeline, log: Log) -> WatchedPipeline:
        """`pipeline`, telling `log`; a compiler that fails raises."""
        fields = {field.name: getattr(pipeline, field.name) for field in dataclasses.fields(Pipeline)}
        return cls(**{**fields, "keeper": None, "_failures": {}}, log=log)

    def build(self, call: FlatCall, name: str, config: Config) -> Product:
        product = super().build(call, name, config)
        self.log.products.append(product)
        tensors = [tensor for tensor in product.captured.tensors if tensor is not None]
        self.log.tensors += [(tensor, copy_of_tensor(tensor)) for tensor in tensors]
        return product

    def prepared(self, module: fx.GraphModule) -> fx.GraphModule:
        changed = super().prepared(module)
        if changed is not module:
            self.log.prepared.append((module, changed))
        return changed

    def compiled_graph(
        self,
        compiler: Callable[..., Any],
        module: fx.GraphModule,
        joint: JointGraph,
        role: GraphRole,
        *args: Any,
        **how: Any,
    ) -> CompiledGraph:
        begin = time.perf_counter()
        compiled = super().compiled_graph(compiler, module, joint, role, *args, **how)
        seconds = time.perf_counter() - begin

        def run(values: list[Any]) -> list[Any]:
            inputs = [copy_of_tensor(v) if isinstance(v, torch.Tensor) else v for v in values]
            done = Execution(module, joint, role, compiler, inputs, Generators.now(), seconds)
            results = compiled.run(values)
            done.results = [copy_of_tensor(v) if isinstance(v, torch.Tensor) else v for v in results]
            self.log.executions.append(done)
            return results

        return dataclasses.replace(compiled, run=run)


def copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor of the same content, strides and gaps, in memory of its own."""
    source = tensor.detach()
    if type(source) not in (torch.Tensor, torch.nn.Parameter) or source.layout is not torch.strided:
        return source.clone()
    if source.is_contiguous():
        return source.clone()
    return _with_gaps(source)


def _with_gaps(source: torch.Tensor) -> torch.Tensor:
    if source.numel() == 0:
        return source.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    flat = source.resolve_conj().resolve_neg().as_strided((span,), (1,), source.storage_offset())
    return flat.clone().as_strided(source.shape, source.stride(), 0)
