"""Where the cache folder of PyTorch's compilers can't be written, a temporary one takes its place, and the log says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.front_door.examples import ROOT

SCRIPT = """
import os, sys, logging
import torch
import foregrad

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("foregrad").addHandler(handler)
# Inductor writes Python that calls PyTorch's product; to try a compiler of C++ takes seconds in a folder that is new.
x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(4, 4)
f = foregrad.compile(lambda x: x @ weight, backend=sys.argv[1])
out = f(x)
out.sum().backward()
torch.testing.assert_close(x.grad, torch.ones(2, 4) @ weight.t())
assert len(f.foregrad.specializations) == 1
said = [m for m in messages if "can't be written" in m]
assert len(said) == 1, messages
assert sys.argv[2] in said[0]
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
assert os.path.isdir(folder)
print(folder)
"""


def run(backend, folder, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", SCRIPT, backend, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


def test_a_folder_that_can_not_be_made(tmp_path):
    blocking = tmp_path / "file"
    blocking.write_text("")
    done = run("auto", str(blocking), TORCHINDUCTOR_CACHE_DIR=str(blocking / "cache"))
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(done.stdout.strip()), "the temporary folder is gone with the process"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that even root can't write to")
def test_a_folder_that_is_there_but_can_not_be_written():
    done = run("eager", "/proc/self", TORCHINDUCTOR_CACHE_DIR="/proc/self")
    assert done.returncode == 0, done.stderr


def test_no_folder_at_all(tmp_path):
    """`auto` is eager then."""
    script = SCRIPT.replace("import foregrad\n", NO_FOLDERS + "import foregrad\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "no")}
    command = [sys.executable, "-c", script, "auto", "there is no temporary one"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


NO_FOLDERS = """
import tempfile
def none(*args, **kwargs):
    raise OSError("no space left")
tempfile.mkdtemp = tempfile.TemporaryFile = none
"""
