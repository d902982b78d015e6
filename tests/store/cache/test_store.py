"""Entries on disk: whole or not there, private, within their limit, and never in the way of a call."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import stat
import sys
import time

import pytest

import foregrad
from foregrad.store.cache import store as module
from foregrad.store.cache.store import Store, default_folder
from foregrad.tools import cli
from tests import forked

KEYS = [f"{number:064x}" for number in range(40)]
ABOUT = {"name": "f", "what": "halves"}
root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")


@pytest.fixture
def store(tmp_path):
    module._say_once.cache_clear()
    return Store(str(tmp_path / "cache"), 1 << 20)


@pytest.fixture
def said(caplog):
    with caplog.at_level(logging.WARNING, "foregrad"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "foregrad"]


def test_what_is_written_is_read(store):
    content = {"graphs": [1, 2.5, None, "é", {"a": []}]}
    assert store.read(KEYS[0]) is None
    store.write(KEYS[0], ABOUT, content)
    assert store.read(KEYS[0]) == content
    assert store.read(KEYS[1]) is None
    (entry,) = store.entries()
    assert (entry.key, entry.about, entry.fault) == (KEYS[0], ABOUT, None)


def test_the_same_content_is_the_same_file(store):
    store.write(KEYS[0], ABOUT, {"b": 1, "a": 2})
    with open(store.path(KEYS[0]), "rb") as file:
        first = file.read()
    store.write(KEYS[0], ABOUT, {"b": 1, "a": 2})
    with open(store.path(KEYS[0]), "rb") as file:
        assert file.read() == first


def test_files_are_this_users_alone(store):
    store.write(KEYS[0], ABOUT, 1)
    assert stat.S_IMODE(os.stat(store.folder).st_mode) & 0o077 == 0
    assert stat.S_IMODE(os.stat(store.path(KEYS[0])).st_mode) & 0o077 == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(store, said, mode):
    store.write(KEYS[0], ABOUT, 1)
    os.chmod(store.folder, mode)
    assert store.read(KEYS[0]) is None
    store.write(KEYS[1], ABOUT, 1)
    assert store.read(KEYS[1]) is None
    assert "writable by other users" in store.refused()
    assert len(said()) == 2  # one for reading, one for writing, however often
    os.chmod(store.folder, 0o755)
    assert store.refused() is None
    assert store.read(KEYS[0]) == 1
    assert store.read(KEYS[1]) is None


def test_a_file_that_others_may_write_to_is_not_read(store, said):
    store.write(KEYS[0], ABOUT, 1)
    os.chmod(store.path(KEYS[0]), 0o666)
    assert store.read(KEYS[0]) is None
    assert "writable by other users" in said()[0]
    assert "writable by other users" in store.entries()[0].fault


def test_what_belongs_to_another_user_is_not_read(store, said, monkeypatch):
    store.write(KEYS[0], ABOUT, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.read(KEYS[0]) is None
    assert "a different user" in said()[0]


def test_links_and_folders_in_the_place_of_entries_are_not_read(store, tmp_path, said):
    store.write(KEYS[0], ABOUT, 1)
    os.rename(store.path(KEYS[0]), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", store.path(KEYS[0]))
    os.mkdir(store.path(KEYS[1]))
    os.mkfifo(store.path(KEYS[2]), 0o600)
    assert [store.read(key) for key in KEYS[:3]] == [None] * 3
    assert all(entry.fault for entry in store.entries())
    store.write(KEYS[0], ABOUT, 2)  # in the place of the link, not through it
    assert store.read(KEYS[0]) == 2


def test_every_torn_or_changed_entry_is_told(store):
    store.write(KEYS[0], ABOUT, {"graphs": list(range(50))})
    with open(store.path(KEYS[0]), "rb") as file:
        whole = file.read()
    chance = random.Random(0)
    torn = [whole[:size] for size in range(0, len(whole), 7)]
    flipped = []
    for _ in range(200):
        at = chance.randrange(len(whole))
        flipped.append(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
    for content in (*torn, *flipped, whole + b"x", b"", b"\0" * len(whole)):
        with open(store.path(KEYS[0]), "wb") as file:
            file.write(content)
        assert store.read(KEYS[0]) is None, content
        assert store.entries()[0].fault
    store.write(KEYS[0], ABOUT, 3)
    assert store.read(KEYS[0]) == 3


def test_an_entry_under_another_key_is_told(store, said):
    store.write(KEYS[0], ABOUT, 1)
    os.rename(store.path(KEYS[0]), store.path(KEYS[1]))
    assert store.read(KEYS[1]) is None
    assert "a different key" in said()[0]


def test_the_entries_used_longest_ago_go_first(tmp_path):
    store = Store(str(tmp_path / "cache"), 40_000)
    content = random.Random(0).randbytes(5000).hex()  # some 5,700 bytes each
    for number, key in enumerate(KEYS[:6]):
        store.write(key, ABOUT, content)
        os.utime(store.path(key), (number, number))
    assert store.read(KEYS[0]) is not None  # used now
    for key in KEYS[6:8]:
        store.write(key, ABOUT, content)
    left = {entry.key for entry in store.entries()}
    assert sum(entry.nbytes for entry in store.entries()) <= 40_000
    assert KEYS[0] in left
    assert KEYS[7] in left
    assert KEYS[1] not in left


def test_what_killed_writers_left_is_removed_in_time(store):
    store.write(KEYS[0], ABOUT, 1)
    old, new = (os.path.join(store.folder, f".writing-{name}") for name in ("old", "new"))
    for path in (old, new):
        with open(path, "w"):
            pass
    os.utime(old, (time.time() - 7200,) * 2)
    store.write(KEYS[1], ABOUT, 1)
    assert not os.path.exists(old)
    assert os.path.exists(new)
    assert len(store.entries()) == 2
    assert store.clear() == 2
    assert os.listdir(store.folder) == []


def test_clear_removes_nothing_else(store):
    store.write(KEYS[0], ABOUT, 1)
    other = os.path.join(store.folder, "notes.txt")
    with open(other, "w"):
        pass
    assert store.clear() == 1
    assert os.listdir(store.folder) == ["notes.txt"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_disk_that_takes_nothing_is_said_once(store, said, monkeypatch, fault):
    store.write(KEYS[0], ABOUT, 1)

    def refuse(*args, **kwargs):
        raise fault

    monkeypatch.setattr(os, "replace", refuse)
    for key in KEYS[1:5]:
        store.write(key, ABOUT, 1)
        assert store.read(key) is None
    assert store.read(KEYS[0]) == 1
    assert [text for text in said() if fault.strerror in text] == said()
    assert len(said()) == 1
    assert len(os.listdir(store.folder)) == 1  # nothing half written


def test_a_folder_that_can_not_be_made_is_said_once(tmp_path, said):
    module._say_once.cache_clear()
    (tmp_path / "file").write_text("")
    store = Store(str(tmp_path / "file" / "cache"), 1 << 20)
    for key in KEYS[:3]:
        assert store.read(key) is None
        store.write(key, ABOUT, 1)
    assert len(said()) == 1
    assert store.refused()


@root
def test_a_folder_that_may_not_be_written_is_said_once(store, said):
    store.write(KEYS[0], ABOUT, 1)
    os.chmod(store.folder, 0o500)
    store.write(KEYS[1], ABOUT, 1)
    store.write(KEYS[2], ABOUT, 1)
    assert store.read(KEYS[0]) == 1
    assert len(said()) == 1


def test_where_it_is(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == "/somewhere/foregrad/compiled"


# -------------------------------------------------------------------------------------------------- many processes


def _write_and_read(folder, number):
    store = Store(folder, 300_000)
    chance = random.Random(number)
    wrong = 0
    for _ in range(60):
        key = chance.choice(KEYS)
        found = store.read(key)
        wrong += found is not None and found != [key, key * 50]
        store.write(key, ABOUT, [key, key * 50])
        if chance.random() < 0.1:
            store.entries()
        if chance.random() < 0.02:
            store.clear()
    sys.exit(wrong)


def test_eight_processes_read_write_and_clear_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    folder = str(tmp_path / "cache")
    running = [context.Process(target=_write_and_read, args=(folder, number)) for number in range(8)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 8
    assert all(entry.fault is None for entry in Store(folder, 1 << 20).entries())


def test_killed_at_any_moment_it_leaves_no_torn_entry(tmp_path):
    """Fifty times a writer is killed at a random moment, and what it left is read by the next one and here."""
    folder = str(tmp_path / "cache")
    store, chance, rounds, read = Store(folder, 1 << 30), random.Random(0), 50, 0
    for _ in range(rounds):
        process = forked.start("tests.store.cache.writing", [folder], os.devnull)
        time.sleep(chance.uniform(0.001, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        for entry in store.entries():
            assert entry.fault is None
            assert store.read(entry.key) == [entry.key, entry.key * 3000]
            read += 1
    assert read > rounds


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def command(store, capsys):
    """`foregrad cache WORDS` in this process: (exit status, what it printed, what it said on stderr)."""

    def command(*words):
        with foregrad.config.override(cache_dir=str(store.folder)):
            return cli.main(["cache", *words]), *capsys.readouterr()

    return command


def test_the_command_lists_checks_and_clears(store, command):
    assert command("ls")[:2] == (0, f"0 entries, 0.0 MiB of 1024, in {store.folder}\n")
    for key in KEYS[:3]:
        store.write(key, {"name": "model", "what": "halves", "nodes": [3, 4], "foregrad": "1", "torch": "2"}, key)
    assert command("path")[1] == f"{store.folder}\n"
    status, said, _ = command("ls")
    assert status == 0
    assert said.count("model: halves, 3+4 nodes, foregrad 1, PyTorch 2") == 3
    assert command("verify")[0] == 0
    with open(store.path(KEYS[1]), "r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    status, said, _ = command("verify")
    assert status == 1
    assert "damaged" in said
    assert KEYS[1][:16] in said
    for action, status, count in (("ls", 0, 3), ("verify", 1, 1)):
        code, said, _ = command(action, "--json")
        listed = json.loads(said)
        assert (code, len(listed["entries"]), listed["count"], listed["damaged"]) == (status, count, 3, 1)
    assert "damaged" in listed["entries"][0]["fault"]
    assert json.loads(command("path", "--json")[1]) == {"folder": store.folder}
    assert command("clear")[:2] == (0, f"3 entries removed from {store.folder}\n")
    assert store.entries() == []
    assert json.loads(command("clear", "--json")[1])["removed"] == 0
    os.chmod(store.folder, 0o777)
    status, _, said = command("ls")
    assert status == 1
    assert "writable by other users" in said
