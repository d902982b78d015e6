"""A library that is not whole, is for another PyTorch, or somebody else could have written, is not loaded."""

from __future__ import annotations

import os

import pytest

from foregrad._native import build as building
from tests import forked

BODY = bytes(range(256)) * 40


@pytest.fixture
def library(tmp_path):
    """A file as `build` leaves one."""
    path = tmp_path / "library.so"
    path.write_bytes(BODY + building._seal(BODY))
    path.chmod(0o755)
    assert building.fault_of(path) is None
    return path


@pytest.mark.parametrize("length", [0, 1, 64, 5000, len(BODY) - 1, len(BODY), len(BODY) + 10, len(BODY) + 81])
def test_half_written(library, length):
    content = library.read_bytes()
    assert length < len(content)
    library.write_bytes(content[:length])
    assert "missing" in building.fault_of(library)


@pytest.mark.parametrize("at", [0, 100, 4096, len(BODY) - 1, -1, -40])
def test_another_byte(library, at):
    content = bytearray(library.read_bytes())
    content[at] ^= 1
    library.write_bytes(content)
    assert building.fault_of(library) is not None


@pytest.mark.parametrize("more", [b"\0", b"x" * 100])
def test_more_bytes(library, more):
    library.write_bytes(library.read_bytes() + more)
    assert building.fault_of(library) is not None


def test_a_hole_of_zeros(library):
    content = library.read_bytes()
    library.write_bytes(content[:1000] + bytes(4000) + content[5000:])
    assert "changed since the build" in building.fault_of(library)


def test_for_another_build_of_the_same_version(library, monkeypatch, tmp_path):
    other = tmp_path / "torch"
    other.mkdir()
    (other / "version.py").write_text("__version__ = '2.13.0'\ngit_version = 'another'\n")
    monkeypatch.setattr(building, "find_torch", lambda: (other, "2.13.0"))
    assert "a different build of PyTorch" in building.fault_of(library)


@pytest.mark.parametrize("place", ["file", "folder"])
def test_that_everybody_may_write_to(library, place):
    (library if place == "file" else library.parent).chmod(0o777)
    assert "everybody may write" in building.fault_of(library)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["file", "folder"])
def test_of_another_user(library, place):
    os.chown(library if place == "file" else library.parent, 12345, -1)
    assert "a different user" in building.fault_of(library)


def test_a_link_is_judged_by_where_it_leads(library, tmp_path):
    link = tmp_path / "link.so"
    link.symlink_to(library)
    assert building.fault_of(link) is None
    library.chmod(0o666)
    assert "everybody may write" in building.fault_of(link)


def test_a_damaged_one_is_passed_over_for_a_whole_one(library, tmp_path, monkeypatch):
    folders = [tmp_path / "first", tmp_path / "second"]
    name = building.library_name("2.13.0")
    for folder in folders:
        folder.mkdir()
        (folder / name).write_bytes(library.read_bytes())
    monkeypatch.setattr(building, "_folders", lambda: iter(folders))
    assert building.find_library("2.13.0") == folders[0] / name
    (folders[0] / name).write_bytes(BODY)
    assert building.find_library("2.13.0") == folders[1] / name


def test_a_library_cut_short_is_told_about_and_not_loaded(tmp_path):
    """Loading it could end the process."""
    script = f"""
import warnings, torch
import foregrad._torch.native as native
found = native.find_library(torch.__version__)
if found is not None:
    content = open(found, "rb").read()
    path = {str(tmp_path)!r} + "/cut.so"
    open(path, "wb").write(content[: len(content) // 2])
    native.find_library = lambda version: path
    import foregrad
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        y = foregrad.compile(lambda x: x * 2, backend="eager")(torch.ones(2, requires_grad=True))
    assert ["a part is missing" in str(w.message) for w in told] == [True], told
    assert y.grad_fn.name() == "CompiledFunctionBackward"
"""
    (tmp_path / "script.py").write_text(script)
    done = forked.run(str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
