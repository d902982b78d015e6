"""`python -m tests.store.artifacts.save_models FOLDER NAME...`: export networks, and what five training steps of eager's give."""

from __future__ import annotations

import copy
import pathlib
import sys

import torch

import foregrad
from tests.store.artifacts.architectures import ARCHITECTURES
from tests.store.artifacts.training import STEPS, steps


def made(name):
    """(the model, what makes its arguments)."""
    torch.manual_seed(0)
    if name in ARCHITECTURES:
        make, inputs = ARCHITECTURES[name]
        return make().train(), lambda: (tuple(one() for one in inputs), {})
    from tests.models.zoo import ZOO

    entry = ZOO[name.removeprefix("zoo:")]
    return entry.build("sdpa", dropout=0.1), lambda: ((), entry.make_inputs())


def main(folder, names):
    for name in names:
        model, make_inputs = made(name)
        torch.manual_seed(0)
        args, kwargs = make_inputs()
        artifact = foregrad.export(copy.deepcopy(model), args, kwargs)
        artifact.save(folder / f"{name}.foregrad")
        given, states = [], []
        for step in range(STEPS):
            torch.manual_seed(step)
            given.append(make_inputs())
            states.append(torch.get_rng_state())
        tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}
        weights = sum(t.numel() * t.element_size() for t in tensors.values())
        graphs = (s for s in artifact.specializations for s in (s.joint, s.forward, s.backward))
        known = {
            "inputs": given,
            "states": states,
            "weights": weights,
            "nodes": sum(len(g.graph.nodes) for g in graphs),
        }
        torch.save({"expected": steps(model, make_inputs), **known}, folder / f"{name}.expected")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
