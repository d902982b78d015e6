"""Projects built on AOTAutograd, with foregrad's doors in place of PyTorch's: `python benchmarks/client_compilers.py`.

Prints a row for each project that is installed: the largest difference of the results and gradients from eager, by
PyTorch's doors and by foregrad's. The clients' own code runs unchanged; one name in their modules is another.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

import foregrad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(12, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class WithoutNorms(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *[layer for layer in self.net if not isinstance(layer, (nn.LayerNorm, nn.BatchNorm1d))]
        )


def difference(
    compiled: Callable[[nn.Module], Callable[..., torch.Tensor]], *, training: bool, model: type[Model] = Model
) -> float:
    """The largest difference from eager over three seeds: of results, and of gradients and buffers in training."""
    worst = 0.0
    for seed in range(3):
        torch._dynamo.reset()
        found = []
        for make in (lambda module: module, compiled):
            module = model().train(training)
            torch.manual_seed(seed)
            x = torch.randn(6, 12)
            with torch.set_grad_enabled(training):
                out = make(module)(x)
            if training:
                out.square().mean().backward()
            found.append([out.detach(), *(p.grad for p in module.parameters() if training), *module.buffers()])
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*found, strict=True)))
    return worst


def openvino(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """OpenVINO's backend with `aot_autograd`, at full precision."""
    import openvino.frontend.pytorch.torchdynamo.backend as client
    import openvino.torch  # noqa: F401
    from torch._dynamo.backends.common import aot_autograd

    client.aot_autograd = foregrad.aot_autograd if door == "foregrad" else aot_autograd

    def fell_back(*_: object) -> None:
        raise AssertionError("OpenVINO failed, and would compile by Inductor")

    client.compile_fx = fell_back
    options = {"aot_autograd": True, "config": {"INFERENCE_PRECISION_HINT": "f32"}}
    return lambda module: torch.compile(module, backend="openvino", options=options)


def timm(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """`memory_efficient_fusion`, as timm calls it."""
    from functorch.compile import memory_efficient_fusion

    return foregrad.memory_efficient_fusion if door == "foregrad" else memory_efficient_fusion


def deepspeed(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """Its partition, which recomputes what is made of sharded parameters, and its table of parameters and gradients."""
    from deepspeed.compile import partitioner
    from deepspeed.compile.graph_param import DSGraphParamManager

    aten = torch.ops.aten
    partitioner.get_no_copy_ops = lambda: {aten.t.default, aten.view.default}  # its own list is in C++ for CUDA

    if door == "foregrad":
        client = foregrad
    else:
        from functorch import compile as client
    simplified, boxed = client.aot_module_simplified, client.make_boxed_func
    min_cut = client.min_cut_rematerialization_partition

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        indices = [(i, i, value.shape) for i, value in enumerate(inputs) if isinstance(value, nn.Parameter)]
        managers = []

        def forward(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
            managers.append(DSGraphParamManager(graph.graph, given, indices))
            return boxed(graph.forward)

        def backward(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
            manager = managers[-1]
            _, gradients = manager.get_bwd_mapping(graph.graph)
            for name, gradient in gradients.items():
                assert gradient.meta["val"].shape == manager.params[name].shape, name
            assert len(manager.replace_fake_tensors_with_real_params(given, graph.graph)) == len(given)
            assert partitioner.get_num_fwd_outputs(0) is not None
            return boxed(graph.forward)

        partition = partitioner.get_wrapped_partitioner(True, indices, min_cut, 0, set())
        return simplified(gm, inputs, fw_compiler=forward, bw_compiler=backward, partition_fn=partition)

    return lambda module: torch.compile(module, backend=backend)


def iree(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """IREE turbine's backend: graphs become MLIR, and run on IREE."""
    from iree.turbine.dynamo.backends import base as client
    from torch._dynamo.backends.common import aot_autograd

    made = foregrad.aot_autograd if door == "foregrad" else aot_autograd
    return lambda module: torch.compile(module, backend=made(fw_compiler=client._backend))


def torch_mlir(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """torch-mlir's importer takes both halves, after the decompositions that it asks for; they run on eager's kernels."""
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd
    from torch_mlir import ir
    from torch_mlir.dialects import torch as dialect
    from torch_mlir.extras.fx_decomp_util import DEFAULT_DECOMPOSITIONS
    from torch_mlir.extras.fx_importer import FxImporter

    made = foregrad.aot_autograd if door == "foregrad" else aot_autograd

    def compiler(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = ir.Context()
        dialect.register_dialect(context)
        importer = FxImporter(context=context)
        importer.import_graph_module(gm)
        assert "torch.aten" in str(importer.module_op)
        return foregrad.make_boxed_func(gm.forward)

    table = get_decompositions(DEFAULT_DECOMPOSITIONS)
    return lambda module: torch.compile(module, backend=made(fw_compiler=compiler, decompositions=table))


def tinygrad(door: str) -> Callable[[nn.Module], Callable[..., torch.Tensor]]:
    """The backend of its `extra/torch_backend`, from a checkout on the path; with `DEV=PYTHON` it needs no C compiler.

    Results are on its own device. Its jit is left out: from the second call on it refuses results that are PyTorch's.
    """
    import tinygrad as package

    package.TinyJit = lambda function: function
    import extra.torch_backend.test_compile as client
    from torch._functorch.aot_autograd import aot_module_simplified

    def on_any_device(gm: fx.GraphModule, inputs: list[Any], *, fw_compiler: Any, **settings: Any) -> Any:
        def compiler(*given: Any) -> Any:
            return fw_compiler(*given)

        compiler.any_device = True  # type: ignore[attr-defined]
        return foregrad.aot_module_simplified(gm, inputs, fw_compiler=compiler, **settings)

    client.aot_module_simplified = on_any_device if door == "foregrad" else aot_module_simplified

    def compiled(module: nn.Module) -> Callable[..., torch.Tensor]:
        run = torch.compile(module, backend="tiny")
        return lambda x: run(x).cpu()

    return compiled


PROJECTS = {
    "openvino": ("openvino", openvino),
    "timm, memory_efficient_fusion": ("torch", timm),
    "deepspeed, partition and parameters": ("deepspeed", deepspeed),
    "IREE turbine": ("iree.turbine", iree),
    "torch-mlir, importer": ("torch_mlir", torch_mlir),
    "tinygrad, its backend": ("extra.torch_backend.test_compile", tinygrad),
}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'project':38}{'what':12}{'PyTorch':>12}{'foregrad':>12}")
    for name, (package, make) in PROJECTS.items():
        if not _is_installed(package):
            print(f"{name:38}not installed")
            continue
        for training in (False, True):
            cells = []
            for door in ("PyTorch", "foregrad"):
                try:
                    model = WithoutNorms if make is tinygrad else Model  # its device has no kernels of norms
                    cells.append(f"{difference(make(door), training=training, model=model):.1e}")
                except Exception as error:  # a row says so
                    cells.append(type(error).__name__)
            print(f"{name:38}{'training' if training else 'forward':12}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
