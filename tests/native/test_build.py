"""Building the C++ part: what says no and how, and that a library for something else is not loaded."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from foregrad._native import build as building
from foregrad._torch.native import native
from foregrad.tools import cli
from tests import forked


def test_the_library_is_named_for_all_that_it_depends_on(monkeypatch):
    name = building.library_name("2.13.0+cpu")
    assert "torch2.13.0+cpu" in name
    assert building.library_name("2.12.0+cpu") != name
    monkeypatch.setattr(building.sysconfig, "get_config_var", lambda _: "cpython-399-elsewhere")
    assert building.library_name("2.13.0+cpu") != name


def test_a_library_for_another_pytorch_is_not_found():
    assert building.find_library("0.0.1") is None
    if native() is not None:
        assert building.find_library(torch.__version__) is not None


def test_the_pytorch_found_without_importing_it_is_the_one_imported():
    assert building.find_torch()[1] == torch.__version__


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_compiler_or_one_that_fails(monkeypatch, tmp_path, compiler, capsys):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(building.BuildError, match=r"no C\+\+ compiler|does not compile it"):
        building.build(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert cli.main(["build-native", "--folder", str(tmp_path)]) == 1
    start, line = capsys.readouterr().err.splitlines()
    assert start.endswith("(half a minute) ...")
    assert line.startswith("not built, so calls go through Python: ")


def test_sources_that_this_pytorch_does_not_take(monkeypatch, tmp_path, capsys):
    """One line names the compiler, PyTorch and the first error; the rest is shown on request."""
    monkeypatch.setattr(building, "_UNITS", ("elsewhere.cpp",))
    monkeypatch.setattr(building, "library_name", lambda version: "some.so")
    arguments = ["build-native", "--folder", str(tmp_path)]
    assert cli.main(arguments) == 1
    _, line = capsys.readouterr().err.splitlines()
    assert torch.__version__ in line
    assert "elsewhere.cpp" in line
    assert cli.main([*arguments, "--verbose"]) == 1
    assert len(capsys.readouterr().err.splitlines()) > 3


def waited_for(done):
    for _ in range(600):
        if done():
            return
        time.sleep(0.05)
    raise AssertionError("it takes too long")


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is built there")
def test_in_the_background_each_library_is_tried_once(monkeypatch, tmp_path):
    version = torch.__version__
    monkeypatch.setattr(building, "_folders", lambda: iter([tmp_path]))
    assert not building.build_in_background(version), "the tests forbid it"
    monkeypatch.setenv("FOREGRAD_BUILD_NATIVE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert building.attempt(version) is None
    assert not building.build_in_background(version)
    assert building.attempt(version) is None, "somebody may install a compiler"
    monkeypatch.setenv("CXX", "false")
    assert building.build_in_background(version)
    waited_for(lambda: building.attempt(version))
    assert "false does not compile it" in building.attempt(version)
    assert not building.build_in_background(version)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is built there")
def test_what_was_built_in_the_background_is_found(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho built > "$2"\n')
    compiler.chmod(0o755)
    installed, folder = tmp_path / "installed", tmp_path / "cache"
    monkeypatch.setattr(building, "_folders", lambda: iter([installed, folder]))
    monkeypatch.setenv("FOREGRAD_BUILD_NATIVE", "1")
    monkeypatch.setenv("CXX", str(compiler))
    folder.mkdir()
    mark = (folder / building.library_name(torch.__version__)).with_suffix(".building")
    mark.touch()
    assert not building.build_in_background(torch.__version__), "another process is at it"
    os.utime(mark, (0, 0))
    assert building.build_in_background(torch.__version__), "that one was killed long ago"
    waited_for(lambda: building.find_library(torch.__version__) is not None and not mark.exists())
    assert building.fault_of(building.find_library(torch.__version__)) is None
    assert not installed.exists(), "pip would not know the file"


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is built there")
def test_a_compiler_that_is_installed_later_is_found(monkeypatch, tmp_path):
    """By the next process, and by the command that says how far the build is."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    monkeypatch.setattr(building, "_folders", lambda: iter([tmp_path / "cache"]))
    monkeypatch.setenv("FOREGRAD_BUILD_NATIVE", "1")
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as without:
        without.setenv("PATH", str(compiler.parent))
        assert not building.build_in_background(torch.__version__)
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    assert building.build_in_background(torch.__version__)
    waited_for(lambda: building.attempt(torch.__version__))
    assert "g++ does not compile it" in building.attempt(torch.__version__), "no word of a missing compiler"


def test_no_headers_of_pytorch(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "find_torch", lambda: (tmp_path, "2.13.0"))
    with pytest.raises(building.BuildError, match="has no headers"):
        building.build(tmp_path)


def test_a_library_that_does_not_load_is_told_about_once(tmp_path):
    """Calls then go through Python."""
    script = f"""
import warnings, torch
import foregrad._torch.native as native
path = {str(tmp_path)!r} + "/broken.so"
open(path, "w").write("not a library")
native.find_library = lambda version: path
import foregrad
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        y = foregrad.compile(lambda x: x * 2, backend="eager")(torch.ones(2, requires_grad=True))
assert ["build-native" in str(w.message) for w in told] == [True], told
assert y.grad_fn.name() == "CompiledFunctionBackward"
"""
    (tmp_path / "script.py").write_text(script)
    done = forked.run(str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr


def test_the_command_says_when_it_is_there_already(capsys):
    if native() is None:
        pytest.skip("the C++ part was not built")
    assert cli.main(["build-native"]) == 0
    assert "there already" in capsys.readouterr().out
