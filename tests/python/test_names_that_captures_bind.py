"""A library's code that writes to a name which a capture binds on PyTorch's classes for its own time."""

import sys
import types

import torch

import foregrad

LIBRARY = """
import torch

class Box:
    pass

def doubled(x, module):
    if isinstance(module, torch.nn.modules.rnn.RNNBase):
        return x
    Box()._flat_weights = 3
    return x * 2
"""


def test_a_name_that_a_capture_binds_is_no_write_of_a_library(monkeypatch):
    path = "/usr/lib/python3/site-packages/some_library/__init__.py"
    library = types.ModuleType("some_library")
    library.__file__ = path
    exec(compile(LIBRARY, path, "exec"), vars(library))
    monkeypatch.setitem(sys.modules, "some_library", library)
    layer = torch.nn.Linear(2, 2)

    def function(x):
        return library.doubled(x, layer)

    assert "_flat_weights" not in vars(torch.nn.RNNBase)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert "_flat_weights" not in vars(torch.nn.RNNBase)
