"""Functions that call data-parallel modules: eager's results, by eager calls."""

import sys
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError

from .ranks import joined


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def around_ddp():
    model = DistributedDataParallel(net())
    return model, lambda x: model(x) * 2, "`DistributedDataParallel`"


def forward_of_ddp():
    model = DistributedDataParallel(net())
    return model, model.forward, "`DistributedDataParallel`"


def around_shards():
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, model.forward, "`fully_shard`"


def trained(model, call, rank):
    torch.manual_seed(rank)
    found = []
    for _ in range(2):
        x = torch.randn(3, 4)
        call(x).square().sum().backward()
        found += [x, *(ranks_own(parameter.grad) for parameter in model.parameters())]
        model.zero_grad()
    return found


def ranks_own(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


MADE = around_ddp, forward_of_ddp, around_shards


def check(make, rank):
    expected = trained(*make()[:2], rank)
    model, function, named = make()
    if make is not around_shards:
        try:
            foregrad.compile(function, on_unsupported="raise")(torch.randn(3, 4))
        except UnsupportedError as error:
            assert named in str(error), error
        else:
            raise AssertionError(make)
        model, function, named = make()
    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = trained(model, call, rank)
    assert all(map(torch.equal, found, expected)), make
    assert [named in str(w.message) for w in warned if w.category is ForegradWarning] == [True], warned
    assert foregrad.explain_recompiles(call).eager_calls == 2


def main(rank, size, store):
    with joined(rank, size, store):
        for make in MADE:
            check(make, rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
