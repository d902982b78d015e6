"""Artifacts that earlier versions wrote are read, and give what they gave."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.artifacts.container import VERSION
from tests.export.store import STORED, results

FILES = sorted(STORED.glob("*.foregrad"))


def test_there_are_files_of_this_version():
    assert {path.name for path in FILES} >= {f"v{VERSION}-{name}.foregrad" for name in ("model", "writes", "energy")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_earlier_versions(path):
    known = torch.load(path.with_suffix(".expected"), weights_only=True)
    found = results(foregrad.load(path), known["args"], known["kwargs"])
    assert found.keys() == known["results"].keys()
    for name, expected in known["results"].items():
        # The stored results are another processor's, whose matrix products sum in another order.
        torch.testing.assert_close(
            found[name], expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
