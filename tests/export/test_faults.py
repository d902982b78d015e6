"""Three hundred damaged files: each a clear error, in bounded time and memory; nothing runs, no number changes unnoticed."""

from __future__ import annotations

import io
import os
import resource
import sys
import time

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ArtifactError
from tests.export import faults

MOST_SECONDS = 20.0  # on a busy machine; most take milliseconds
MOST_MEMORY = 1 << 30


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x):
        return (self.norm(self.linear(x)) * self.mask * torch.tensor([1.0, 2.0, 3.0, 4.0])).tanh()


@pytest.fixture(scope="module")
def content():
    torch.manual_seed(0)
    artifact = foregrad.export(Small(), (torch.randn(6, 3),))
    artifact.specialize((torch.randn(6, 3),), dynamic_shapes=({0: (2, 99)},), name="of any length")
    return artifact.to_bytes()


def answers(module):
    torch.manual_seed(1)
    x = torch.randn(6, 3)
    out = module(x)
    out.sum().backward()
    return [out.detach(), *(p.grad for p in module.parameters())]


def test_every_damaged_file_is_refused(content, tmp_path, monkeypatch):
    path = tmp_path / "damaged.foregrad"
    path.write_bytes(content)
    expected = answers(foregrad.load(path))
    ran = []
    monkeypatch.setattr(os, "system", lambda *_: ran.append("os.system"))
    count, kept, slowest = 0, [], ("", 0.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, damaged in faults.every_kind(content):
        count += 1
        path.write_bytes(damaged)
        start = time.thread_time()
        try:
            module = foregrad.load(path)
        except ArtifactError as error:
            assert str(path) in str(error), what
            assert "can't be read" in str(error)
        else:
            # Read: then it must be the same program.
            if damaged != content and not all(map(torch.equal, expected, answers(module))):
                kept.append(what)
            elif damaged != content:
                kept.append(f"{what} (equal)")
        slowest = max(slowest, (what, time.thread_time() - start), key=lambda pair: pair[1])
    scale = 1 if sys.platform == "darwin" else 1024
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * scale
    assert count >= 300
    assert kept == []
    assert ran == []
    assert slowest[1] < MOST_SECONDS, slowest
    assert used < MOST_MEMORY, used


def test_inspect_refuses_them_too(content, tmp_path, capsys):
    from foregrad.cli import main

    path = tmp_path / "damaged.foregrad"
    found = [
        *faults.bit_flips(content, 10, seed=7),
        *faults.truncations(content, 20, seed=7),
        *faults.containers(content),
    ]
    for what, damaged in found:
        path.write_bytes(damaged)
        if main(["inspect", str(path)]) == 0:
            assert what.startswith(("safetensors", "the tensors", "tensors.safetensors")), (
                what
            )  # which it does not read
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_changes_while_it_is_read(content):
    class Shrinking(io.BytesIO):
        def read(self, size=-1):
            return b"" if self.tell() > 100 and size > 1000 else super().read(size)

    from foregrad.artifacts.artifact import _read

    with pytest.raises(ArtifactError):
        _read(Shrinking(content), "the file")
