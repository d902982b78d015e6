"""Processes killed at random moments while they compile, read and write leave no torn entry, and no wrong one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch

import foregrad
from foregrad.store.cache.store import Store
from tests import forked
from tests.store.cache import kept

ROUNDS = 20


def program(constant):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    return foregrad.compile(lambda x: (model(x).sin() * constant).sum(), backend="kept")


def results():
    """Of a few programs, compiled one after the other."""
    found = []
    for constant in (2.0, 3.0, 4.0):
        torch.manual_seed(0)
        run, x = program(constant), torch.randn(3, 4, requires_grad=True)
        y = run(x)
        y.backward()
        found += [y.item(), *x.grad.flatten().tolist()]
    return found


def _child(folder, connection):
    kept.PREPARED.clear()
    with foregrad.config.override(cache_dir=folder):
        connection.send((results(), len(kept.PREPARED)))


def _endless_child(folder):
    """It writes what is not there yet, then reads, and while its parent lives only a signal ends it, however fast."""
    parent = os.getppid()
    with foregrad.config.override(cache_dir=folder):
        while os.getppid() == parent:
            results()


def finished(context, folder):
    """What a child that nobody kills computes, how often the backend's passes were asked for, and its seconds."""
    ours, theirs = context.Pipe(duplex=False)
    process, began = context.Process(target=_child, args=(folder, theirs)), time.perf_counter()
    process.start()
    assert ours.poll(300)
    found, prepared = ours.recv()
    process.join()
    return found, prepared, time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_children_killed_while_they_compile(tmp_path):
    # In a process of its own: after some backwards of this one, its children may run none (PyTorch built for CUDA).
    done = forked.run("tests.store.cache.test_killed", str(tmp_path / "cache"), seconds=600)
    assert done.returncode == 0, done.stderr


def kill_children(folder):
    kept.register()
    context, chance = multiprocessing.get_context("fork"), random.Random(0)
    store = Store(folder, 1 << 30)
    with foregrad.config.override(cache=False):
        plain = results()
    first = finished(context, folder)
    second = finished(context, folder)
    assert first[:2] == (plain, 3)
    assert second[:2] == (plain, 0)
    looked_at = 0
    for number in range(ROUNDS):
        if chance.random() < 0.5:
            store.clear()
        process = context.Process(target=_endless_child, args=(folder,))
        process.start()
        time.sleep(chance.uniform(0, 1.1 * first[2]))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        entries = store.entries()
        looked_at += len(entries)
        assert [entry.fault for entry in entries] == [None] * len(entries)
        if number % 10 == 9:
            assert finished(context, folder)[0] == plain
    assert looked_at > ROUNDS / 4
    assert finished(context, folder)[:2] == (plain, 0)


if __name__ == "__main__":
    kill_children(*sys.argv[1:])
