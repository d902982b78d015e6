"""What a user's first program does: the default backend in a process where nothing else has imported anything.

A few of what `make fresh` runs, which is every layer of `torch.nn` and every example. What goes wrong in a fresh process
alone is a module that nobody has imported: that is looked for in the sources as well.
"""

from __future__ import annotations

import pytest
from torch import nn

from tests.front_door.networks import LEFT_OUT, NETWORKS
from tests.front_door.run import run


@pytest.mark.parametrize(
    "command",
    [
        ("one", "convolution_2d", "compile"),
        ("one", "convolution_2d", "torch.compile"),
        ("examples", "README.md", "default"),
        ("missing_imports",),
    ],
    ids=" ".join,
)
def test_in_a_process_of_its_own(command):
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_layer_of_torch_is_in_a_network(monkeypatch):
    made: set[type] = set()
    initialised = nn.Module.__init__

    def noted(self, *args, **kwargs):
        made.add(type(self))  # a lazy layer becomes another class at its first call
        initialised(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__init__", noted)
    for make in NETWORKS.values():
        make()
    layers = {value for value in vars(nn).values() if isinstance(value, type) and issubclass(value, nn.Module)}
    assert {cls.__name__ for cls in layers - made} == LEFT_OUT.keys()
    assert len(NETWORKS) >= 20
