"""Real text that is already on the machine: the sources of Python's standard library, read as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batches", "read_sources"]


def read_sources(limit_bytes: int = 2_000_000) -> bytes:
    """The first `limit_bytes` of the standard library's sources in order of file name: the same in every run.

    A Python that ships its library without sources (zipped, frozen) has PyTorch's own sources read instead.
    """
    for folder in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
        chunks: list[bytes] = []
        size = 0
        for path in sorted(folder.glob("*.py")):
            chunks.append(path.read_bytes())
            size += len(chunks[-1])
            if size >= limit_bytes:
                break
        if size:
            return b"".join(chunks)[:limit_bytes]
    message = "the demo found no text: neither Python's standard library nor PyTorch has its sources on this machine"
    raise FileNotFoundError(message)


class Batches:
    """Random windows of a text with the bytes that follow, drawn from a generator of its own.

    Drawing a batch leaves PyTorch's global random state alone: that state belongs to the training steps compared.
    """

    def __init__(self, text: bytes, *, batch: int, context: int, seed: int) -> None:
        if len(text) <= context:
            message = f"a text of {len(text)} bytes is too short for windows of {context} bytes and the one after"
            raise ValueError(message)
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.batch = batch
        self.context = context
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next batch: windows of bytes, and the same windows one byte later."""
        starts = torch.randint(len(self.data) - self.context, (self.batch, 1), generator=self.generator)
        at = starts + torch.arange(self.context)
        return self.data[at], self.data[at + 1]
