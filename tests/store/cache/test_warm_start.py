"""A second process has from the cache what the first one worked out, and computes the same."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import pytest

from foregrad.inductor._torch.inductor import cpp_compiler_found
from foregrad.store.cache.store import Store
from tests import forked
from tests.store.cache.warm import OTHER_SIZES, PROGRAMS

HERE = pathlib.Path(__file__).parent


def fresh(name, backend, folder, **more):
    """What a program tells, and what it says on stderr, in a new interpreter, where strings have other hashes than in
    `another`, which has random ones.
    """
    environment = {
        **os.environ,
        "FOREGRAD_CACHE_DIR": str(folder),
        "PYTHONHASHSEED": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent.parent), *sys.path])),
        **more,
    }
    command = [sys.executable, "-m", "tests.store.cache.warm", name, backend]
    return told_by(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False))


def another(name, backend, folder, **more):
    """The same in a process that has imported PyTorch and done nothing else."""
    done = forked.run("tests.store.cache.warm", name, backend, seconds=500, FOREGRAD_CACHE_DIR=str(folder), **more)
    return told_by(done)


def told_by(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def without_cache(name, backend):
    return another(name, backend, "", FOREGRAD_CACHE="0")[0]


def test_the_second_process_prepares_nothing(tmp_path):
    names = [name for name in PROGRAMS if name != "through_dynamo"]  # in one process: each takes seconds to start
    plain = without_cache(",".join(names), "kept")
    first, _ = another(",".join(names), "kept", tmp_path / "cache")
    second, said = fresh(",".join(names), "kept", tmp_path / "cache")
    for name in names:
        assert plain[name]["prepared"] > 0, name
        assert first[name] == plain[name], name
        assert second[name] == {**plain[name], "prepared": 0}, name
    assert said == ""


def test_the_second_process_begins_with_another_size(tmp_path):
    names, others = ",".join(OTHER_SIZES), ",".join(other.__name__ for other in OTHER_SIZES.values())
    plain = without_cache(others, "kept")
    another(names, "kept", tmp_path / "cache")
    found, _ = another(others, "kept", tmp_path / "cache")
    assert found == {name: {**told, "prepared": 0} for name, told in plain.items()}


def test_another_process_after_the_entries_are_damaged(tmp_path):
    plain = without_cache("twice", "kept")
    another("twice", "kept", tmp_path / "cache")
    entries = Store(str(tmp_path / "cache"), 1 << 30).entries()
    assert entries
    for entry in entries:
        with open(entry.path, "r+b") as file:
            file.seek(entry.nbytes // 2)
            file.write(b"??")
    found, said = another("twice", "kept", tmp_path / "cache")
    assert found == plain
    assert "damaged" in said
    assert another("twice", "kept", tmp_path / "cache")[0]["prepared"] == 0


def test_four_processes_that_start_together(tmp_path):
    plain = without_cache("train", "kept")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(another, "train", "kept", tmp_path / "cache") for _ in range(4)]
    for process in running:
        assert process.result()[0]["results"] == plain["results"]
    entries = Store(str(tmp_path / "cache"), 1 << 30).entries()
    assert len(entries) == 1
    assert entries[0].fault is None
    assert another("train", "kept", tmp_path / "cache")[0] == {**plain, "prepared": 0}


def test_where_nothing_can_be_written_it_says_so_once(tmp_path):
    (tmp_path / "file").write_text("")
    plain = without_cache("twice", "kept")
    found, said = another("twice", "kept", tmp_path / "file" / "cache")
    assert found == plain
    assert len([line for line in said.splitlines() if "the cache in" in line]) == 1


@pytest.mark.slow
@pytest.mark.skipif(not cpp_compiler_found(), reason="no C++ compiler")
def test_with_inductor_the_second_process_compiles_nothing(tmp_path):
    # A process with Inductor takes long to start: these are programs whose graphs it makes something else of.
    names, others = (*OTHER_SIZES, "through_dynamo"), [other.__name__ for other in OTHER_SIZES.values()]
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def written():
        return {path for path in (tmp_path / "inductor").rglob("*") if path.suffix in (".so", ".cpp", ".py")}

    first, _ = another(",".join(names), "inductor", tmp_path / "cache", **inductor)
    files = written()
    second, _ = fresh(",".join(names), "inductor", tmp_path / "cache", **inductor)
    third, _ = another(",".join(others), "inductor", tmp_path / "cache", **inductor)
    plain = without_cache(",".join(others), "eager")
    for name in names:
        assert first[name]["miss"] > 0, name
        assert second[name]["results"] == first[name]["results"], name
        assert (second[name]["miss"], second[name]["bypass"]) == (0, first[name]["bypass"]), name
        assert second[name]["hit"] == first[name]["hit"] + first[name]["miss"], name
    for name, other in OTHER_SIZES.items():
        found = third[other.__name__]
        assert found["sums"] == pytest.approx(plain[other.__name__]["sums"], rel=1e-4, abs=1e-5)
        assert (found["hit"], found["miss"], found["bypass"]) == (second[name]["hit"], 0, 0)
    assert written() == files
