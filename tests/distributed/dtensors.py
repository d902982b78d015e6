"""Functions of DTensors as people write them, compiled and by themselves, on each rank: `... rank size store`."""

import functools
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import ForegradWarning

from .ranks import joined

ROWS, COLUMNS, WHOLE, SUMMED = [Shard(0)], [Shard(1)], [Replicate()], [Partial()]


@functools.cache
def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def of(*size, placed=ROWS, seed=0):
    torch.manual_seed(seed)
    return distribute_tensor(torch.randn(size), mesh(), placed).requires_grad_()


def plain(*size, seed=0):
    torch.manual_seed(seed + dist.get_rank())
    return torch.randn(size).requires_grad_()


def x(seed):
    return [of(4, 8, seed=seed)]


def _mapped(t):
    double = local_map(lambda t: t.sin() * 2, out_placements=ROWS, in_placements=(ROWS,), device_mesh=mesh())
    return double(t)


PROGRAMS = {
    "rows": (lambda a, b: a @ b, lambda s: [of(4, 8, seed=s), of(8, 6, placed=WHOLE, seed=s)]),
    "summed": (
        lambda a, b: (a @ b).redistribute(placements=WHOLE),
        lambda s: [of(4, 8, placed=COLUMNS, seed=s), of(8, 6, seed=s)],
    ),
    "summed_outside": (lambda a, b: a @ b, lambda s: [of(4, 8, placed=COLUMNS, seed=s), of(8, 6, seed=s)]),
    "whole": (lambda a: a.full_tensor() * 2, x),
    "local": (lambda a: a.to_local().sin(), x),
    "made": (lambda a: DTensor.from_local(a * 2, mesh(), ROWS), lambda s: [plain(3, 3, seed=s)]),
    "made_whole": (lambda a: DTensor.from_local(a, mesh(), SUMMED).full_tensor(), lambda s: [plain(3, 3, seed=s)]),
    "made_of_numbers": (lambda a: a * dt.ones(4, 8, device_mesh=mesh(), placements=ROWS), x),
    "dropout": (lambda a: F.dropout(a, 0.5), x),
    "sum": (lambda a: a.sum(), x),
    "mean": (lambda a: a.mean(0), x),
    "two": (lambda a: ((a * 2).sum(), (a * 3).sum()), x),
    "softmax": (lambda a: F.softmax(a, 0), lambda s: [of(4, 8, placed=COLUMNS, seed=s)]),
    "layer_norm": (lambda a: F.layer_norm(a, (8,)), x),
    "uneven": (lambda a: (a * 2).redistribute(placements=WHOLE), lambda s: [of(5, 8, seed=s)]),
    "reshaped": (lambda a: a.view(4, 2, 4).transpose(1, 2).contiguous(), x),
    "branch": (
        lambda a: a * 2 if a.placements[0].is_shard() else a * 3,
        lambda s: [of(4, 8, placed=ROWS if s % 2 else WHOLE, seed=s)],
    ),
    "mesh": (lambda a: a * a.device_mesh.size() * dist.get_world_size() + dist.get_rank(), x),
    "written": (lambda a: a.clone().add_(1).sin(), x),
    "placement_given": (
        lambda a, p: a.redistribute(placements=[p]).sin(),
        lambda s: [of(4, 8, seed=s), Shard(s % 2)],
    ),
    "placements_returned": (lambda a: (a * 2, a.placements, a.placements[0]), x),
    "indexed": (lambda a: a[:, 2:4] * 2, x),
    "joined": (lambda a: (torch.cat([a, a * 2], 1), torch.stack([a, a])), x),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), lambda s: [of(4, 8, seed=s), of(8, 6, placed=WHOLE)]),
    "cross_entropy": (F.cross_entropy, lambda s: [of(4, 8, seed=s), distribute_tensor(torch.arange(4), mesh(), ROWS)]),
    "second": (lambda a: torch.autograd.grad((a**3).sum(), a, create_graph=True)[0].sum(), x),
    "value": (lambda a: a * 2 if a.to_local().sum() > -1e9 else a, x),
    "local_map": (_mapped, x),
    "checkpoint": (lambda a: checkpoint(lambda t: t.sin().exp(), a, use_reentrant=False), x),
    "checkpointed_collective": (
        lambda a, b: checkpoint(lambda t, u: (t @ u).redistribute(placements=WHOLE).sin(), a, b, use_reentrant=False),
        lambda s: [of(4, 8, placed=COLUMNS, seed=s), of(8, 6, seed=s)],
    ),
    "sizes": (lambda a: a.sin(), lambda s: [of(4 + 2 * s, 8, seed=s)]),
}
EAGER = {
    "chunks": (lambda a: (a * 2).chunk(2, -1), x),
    "columns": (lambda a: (a + 1).unbind(1), x),
    "chunks_of_an_argument": (lambda a: a.split([2, 6], 1), x),
    "a_view_of_an_argument": (lambda a: a.view(-1), x),
    "detached": (lambda a: (a.detach(), a * 2), x),
    "marked_again": (lambda a: (a * 2, a.requires_grad_(False) * 2)[0], x),
}
BY_DYNAMO = ("summed", "whole", "made_of_numbers", "mesh", "placement_given", "placements_returned", "joined", "second")


def described(value):
    if isinstance(value, DTensor):
        return [str(value.placements), value.shape, described(value.to_local())]
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    return [described(item) for item in value] if isinstance(value, (tuple, list)) else value


def found(call, make, seed):
    torch.manual_seed(seed)
    args = make(seed)
    torch.manual_seed(seed)
    result = call(*args)
    results = result if isinstance(result, tuple) else (result,)
    losses = [r.square().sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    sum(loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses).backward()
    if len(losses) > 1 and results[0].dim() == 0:  # the backward of one alone
        args[0].grad = None
        loss = call(*args)[0].square().sum()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    return described([result, args, [a.grad for a in args if isinstance(a, torch.Tensor) and a.grad is not None]])


def main(rank, size, store):
    with joined(rank, size, store):
        wrong = []
        for name, (f, make) in PROGRAMS.items():
            calls = [foregrad.compile(f, backend="eager", on_unsupported="raise")]
            if name in BY_DYNAMO:
                calls.append(torch.compile(f, backend="foregrad", options={"backend": "eager"}))
            for call in calls:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", ForegradWarning)
                    if any(found(call, make, seed) != found(f, make, seed) for seed in range(3)):
                        wrong.append(name)
        for name, (f, make) in EAGER.items():
            call = foregrad.compile(f, backend="eager", on_unsupported="eager")
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                is_same = all(found(call, make, seed) == found(f, make, seed) for seed in range(3))
            said = [str(w.message) for w in warned if w.category is ForegradWarning]
            if not is_same or len(said) != 1 or "DTensor" not in said[0]:
                wrong.append((name, said))
        assert not wrong, wrong


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
