"""`python -m tests.store.artifacts.store`: write the artifacts that other versions must go on reading, and what they give.

They are written once for each version of the format and minor version of PyTorch, and never again.
"""

from __future__ import annotations

import pathlib

import torch
from torch import nn

import foregrad
from foregrad.store.artifacts.container import VERSION

STORED = pathlib.Path(__file__).parent / "stored"
NAMES = ("model", "writes", "energy", "effects")


def stem_of(name, torch_version):
    """`torch_version`: (major, minor) of the PyTorch that writes."""
    return f"v{VERSION}-torch{torch_version[0]}.{torch_version[1]}-{name}"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.out.bias = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x, *, scale=2.0):
        hidden = torch.tanh(self.norm(self.linear(x))) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"y": self.out(hidden) * scale, "hidden": (hidden, None)}


def writes(x, y):
    x.mul_(2)
    return x.view(-1), (x.sum() * y).sin()


def energy(positions, charges):
    steps = positions[:, None] - positions[None, :]
    distances = (steps.square().sum(-1) + 1.0).sqrt()
    return (charges[:, None] * charges[None, :] / distances).sum()


def effects(x):
    made = nn.Parameter(x.detach() * 3)
    made.role = "made"
    kept = x.sin()
    kept.retain_grad()
    return made, kept


def artifacts():
    """Name -> (artifact, arguments of a call)."""
    torch.manual_seed(0)
    model = Model()
    made = foregrad.export(model, (torch.randn(6, 3),), {"scale": 2.0}, dynamic_shapes={"x": {0: (2, 64)}})
    model.eval()
    with torch.no_grad():
        made.specialize((torch.randn(6, 3),), {"scale": 2.0})
    positions = torch.randn(4, 3, requires_grad=True)
    return {
        "model": (made, (torch.randn(5, 3),), {"scale": 2.0}),
        "writes": (
            foregrad.export(writes, (torch.ones(2, 3), torch.ones(4, requires_grad=True))),
            (torch.randn(2, 3), torch.randn(4, requires_grad=True)),
            {},
        ),
        "energy": (
            foregrad.export(energy, (positions, torch.ones(4)), derivatives=2, dynamic_shapes=True),
            (torch.randn(3, 3, requires_grad=True), torch.randn(3)),
            {},
        ),
        "effects": (
            foregrad.export(effects, (torch.ones(3, requires_grad=True),)),
            (torch.randn(3, requires_grad=True),),
            {},
        ),
    }


def results(module, args, kwargs):
    """What a call and its backward give, by name."""
    args = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    out = module(*args, **kwargs)
    found = {}
    leaves = torch.utils._pytree.tree_leaves(out)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found |= {f"out{i}": t.detach().clone() for i, t in enumerate(tensors)}
    inputs = [t for t in (*args, *module.parameters()) if t.requires_grad]
    loss = sum(t.square().sum() for t in tensors if t.requires_grad)
    higher = module.artifact.specializations[0].program.order() > 1
    grads = torch.autograd.grad(loss, inputs, create_graph=higher, allow_unused=True)
    found |= {f"grad{i}": g.detach().clone() for i, g in enumerate(grads) if g is not None}
    if higher:
        seconds = torch.autograd.grad(grads[0].square().sum(), inputs[0])
        found |= {"second": seconds[0]}
    found |= {f"written{i}": a.detach().clone() for i, a in enumerate(args)}
    return found | {f"state/{name}": t.clone() for name, t in module.state_dict().items()}


def main():
    STORED.mkdir(exist_ok=True)
    here = torch.__version__.split(".")
    for name, (artifact, args, kwargs) in artifacts().items():
        path = STORED / f"{stem_of(name, here)}.foregrad"
        if path.exists():
            print(f"{path.name} is there: files of a version are written once")
            continue
        artifact.save(path)
        known = {"args": list(args), "kwargs": kwargs, "results": results(foregrad.load(path), args, kwargs)}
        torch.save(known, path.with_suffix(".expected"))


if __name__ == "__main__":
    main()
