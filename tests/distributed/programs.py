"""Training in parallel, eager and compiled: what differs between the two, printed, on each rank.

A program is a way to be parallel (`PARALLEL`), and where it is compiled (`SIDES`). Losses, gradients, parameters and
the state that each rank has are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import foregrad

from .ranks import joined
from .transformer import LENGTH, VOCABULARY, Transformer

# ------------------------------------------------------------------------------------------------ ways to be parallel


def sharded(model, mesh=None, **settings):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


_COLUMN, _ROW = ("query", "key", "value", "up"), ("out", "down")


def by_heads(model, mesh=None):
    """Tensor parallel: heads and hidden units are shared out."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in _COLUMN} | {name: RowwiseParallel() for name in _ROW}
        parallelize_module(block, mesh, plan)
    return model


def by_sequence(model):
    """Tensor parallel, and between the blocks each rank has a part of the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in _COLUMN}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in _ROW}
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm", "norm_2")}
        for name in _COLUMN:
            plan[name] = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(block, mesh, plan)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    plan["norm"] = SequenceParallel()
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    model.position = torch.nn.Parameter(
        model.position.detach().chunk(dist.get_world_size())[mesh.get_local_rank()].clone()
    )
    return parallelize_module(model, mesh, plan)


def by_vocabulary(model):
    """Tensor parallel, of the embedding and the head too, each rank with a part of the rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(by_heads(model, mesh), mesh, plan)


def with_tied_weights(model):
    """The same, and head and embedding have one weight."""
    by_vocabulary(model)
    model.head.weight = model.embed.weight
    return model


def two_dimensional(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    by_heads(model, mesh["tensor"])
    return sharded(model, mesh["data"])


_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PARALLEL = {
    "fsdp": sharded,
    "fsdp, kept": lambda model: sharded(model, reshard_after_forward=False),
    "fsdp, half kept": lambda model: sharded(model, reshard_after_forward=1),
    "fsdp, mixed": lambda model: sharded(model, mp_policy=_MIXED),
    "fsdp, accumulated": sharded,
    "tensor": by_heads,
    "sequence": by_sequence,
    "vocabulary": by_vocabulary,
    "tied": with_tied_weights,
    "fsdp and tensor": two_dimensional,
    "ddp": DistributedDataParallel,
    "ddp, accumulated": DistributedDataParallel,
    "ddp, unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp, static": lambda model: DistributedDataParallel(model, static_graph=True),
}

# ------------------------------------------------------------------------------------------------ where it is compiled


def compiled(module):
    return foregrad.compile(module, backend="eager", on_unsupported="raise")


def by_dynamo(module):
    return torch.compile(module, backend="foregrad", options={"backend": "eager"})


def _each_block(model, change):
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    for index, block in enumerate(inner.blocks):
        inner.blocks[index] = change(block)
    return model


def _put_forward(module):
    module.forward = compiled(module.forward)
    return module


def _in_place(module):
    module.compile(backend="foregrad", options={"backend": "eager"})
    return module


SIDES = {
    "eager": lambda model, parallel: parallel(model),
    "blocks, then parallel": lambda model, parallel: parallel(_each_block(model, compiled)),
    "parallel, then blocks": lambda model, parallel: _each_block(parallel(model), compiled),
    "forwards, then parallel": lambda model, parallel: parallel(_each_block(model, _put_forward)),
    "parallel, then forwards": lambda model, parallel: _each_block(parallel(model), _put_forward),
    "whole, then parallel": lambda model, parallel: parallel(compiled(model)),
    "parallel, then whole": lambda model, parallel: compiled(parallel(model)),
    "dynamo: blocks": lambda model, parallel: parallel(_each_block(model, _in_place)),
    "dynamo: parallel, then blocks": lambda model, parallel: _each_block(parallel(model), _in_place),
    "dynamo: whole": lambda model, parallel: by_dynamo(parallel(model)),
}

# ------------------------------------------------------------------------------------------------ training


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextlib.contextmanager
def _accumulating(model, is_last):
    if hasattr(model, "no_sync"):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(is_last)
        yield


def training(parallel, side):
    """Endless steps of training: what a rank sees of each, and of its state, as a list of tensors and names."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Transformer()
    if parallel == "ddp, unused":
        net.unused = torch.nn.Linear(3, 3)
    model = SIDES[side](net, PARALLEL[parallel])
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    random = torch.Generator().manual_seed(data_rank(parallel))
    parts = 2 if "accumulated" in parallel else 1
    while True:
        seen = [[name.replace("_orig_mod.", "") for name in parameters]]
        for part in range(parts):
            ids = torch.randint(VOCABULARY, (2, LENGTH), generator=random)
            with _accumulating(model, part == parts - 1) if parts > 1 else contextlib.nullcontext():
                loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
                loss.backward()
            seen.append(local(loss))
        seen += [None if p.grad is None else local(p.grad) for p in parameters.values()]
        optimizer.step()
        optimizer.zero_grad()
        yield [*seen, *map(local, model.state_dict().values())]


def data_rank(parallel):
    """Which part of the data this process has: ranks that share out a model are given the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {"tensor": 0, "sequence": 0, "vocabulary": 0, "tied": 0, "fsdp and tensor": rank // (size // 2)}.get(
        parallel, rank
    )


def train(parallel, side, steps):
    return [item for seen in itertools.islice(training(parallel, side), steps) for item in seen]


def is_same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def main(rank, size, store, steps, *programs):
    """Each program is a way to be parallel and the sides, as one text with `|` between them."""
    wrong = []
    with joined(int(rank), int(size), store):
        for program in programs:
            parallel, *sides = program.split(" | ")
            expected = train(parallel, "eager", int(steps))
            for side in sides:
                found = train(parallel, side, int(steps))
                if len(found) != len(expected) or not all(map(is_same, found, expected)):
                    wrong.append((parallel, side))
    sys.exit(f"not as eager: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
