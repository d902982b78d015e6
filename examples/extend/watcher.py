"""A watcher: it hears of each stage of a compilation as the stage ends. This one checks every compiled graph's results.

`stage` gets each stage's name, its value before and after, and the seconds. `compiled` may return another callable in
place of a compiled graph; the callable takes one list of values.
"""

import torch

import foregrad
from foregrad.extend import Watcher, watching


class FiniteResults(Watcher):
    def __init__(self):
        self.stages = []

    def stage(self, stage):
        self.stages.append(stage.name)

    def compiled(self, stage):
        run, phase = stage.after, stage.role.phase

        def checked(values):
            results = run(values)
            for number, result in enumerate(results):
                if isinstance(result, torch.Tensor) and not result.isfinite().all():
                    print(f"{stage.function}, {phase}: result {number} is not finite")
            return results

        return checked


def root(x):
    return x.sqrt().sum()


if __name__ == "__main__":
    watcher = FiniteResults()
    with watching(watcher):
        compiled = foregrad.compile(root, backend="eager")
        compiled(torch.tensor([0.0, 1.0], requires_grad=True)).backward()  # root, backward: result 0 is not finite
    print(*watcher.stages, sep=", ")  # capture, partition, halves, compile forward, guards, compile backward
