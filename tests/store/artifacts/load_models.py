"""`python load_models.py FOLDER`: train what is loaded from files alone; prints a line of JSON for each.

Runs with foregrad and PyTorch on the path, and nothing of the models.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import training  # noqa: E402

sys.path[:] = [path for path in sys.path if path != str(HERE)]
import foregrad  # noqa: E402


def main(folder, backend):
    for path in sorted(folder.glob("*.foregrad")):
        known = torch.load(path.with_suffix(".expected"), weights_only=True)
        model = foregrad.load(path, backend=backend)
        inputs, generators = iter(known["inputs"]), iter(range(training.STEPS))

        def draw(inputs=inputs, generators=generators, known=known):
            args, kwargs = next(inputs)
            step = next(generators)
            torch.manual_seed(step)
            torch.set_rng_state(states(known, step))
            return args, kwargs

        found = training.steps(model, draw)
        expected = known["expected"]
        differing = [name for name in expected if name not in found or not same(found[name], expected[name])]
        differing += [name for name in found if name not in expected]
        size = path.stat().st_size
        report = {
            "name": path.stem,
            "differing": differing[:5],
            "count": len(expected),
            "bytes": size,
            "weights": known["weights"],
            "nodes": known["nodes"],
            "allowed": 1.05 * known["weights"] + 200 * known["nodes"],
            "importable": [m for m in ("tests", "transformers", "architectures") if m in sys.modules or findable(m)],
        }
        print(json.dumps(report), flush=True)


def states(known, step):
    return known["states"][step]


def findable(module):
    return module != "transformers" and importlib.util.find_spec(module) is not None


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "eager")
