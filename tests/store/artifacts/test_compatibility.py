"""Artifacts that other versions of foregrad and of PyTorch wrote are read, and give what they gave."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad._torch.versions import NEWEST, OLDEST
from tests.store.artifacts.store import NAMES, STORED, results, stem_of

FILES = sorted(STORED.glob("*.foregrad"))


@pytest.mark.parametrize("torch_version", [OLDEST, NEWEST])
def test_there_are_files_of_this_format_by_the_first_and_the_last_pytorch(torch_version):
    assert {path.stem for path in FILES} >= {stem_of(name, torch_version) for name in NAMES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_other_versions(path):
    known = torch.load(path.with_suffix(".expected"), weights_only=True)
    found = results(foregrad.load(path), known["args"], known["kwargs"])
    assert found.keys() == known["results"].keys()
    for name, expected in known["results"].items():
        # The stored results are another processor's, whose matrix products sum in another order.
        torch.testing.assert_close(
            found[name], expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
