"""The main function of the process that compiles: a line of JSON for each graph, and a line in answer.

It ends when its standard input does, with the compilers that it has started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import sys
import threading
from typing import Any

import torch

from ...api import pipeline_for
from ...config import config
from ...errors import headline
from ..cache.describe import digest
from .job import PARTITIONS, StaysError, circumstances, graph_from_data, take_settings
from .successor import compiled_later, drawing_as_eager

_LOWER = 10  # priority


def main() -> None:
    """Compile until there is no more to read."""
    out = os.fdopen(os.dup(1), "w")  # compilers may print
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if hasattr(os, "nice"):
        os.nice(_LOWER)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        print(json.dumps(_answer(json.loads(lines.get()))), file=out, flush=True)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer(message: Any) -> dict[str, Any]:
    try:
        _compile(message)
    except StaysError as why:
        return {"error": str(why), "stays": True}
    except Exception as error:
        return {"error": headline(error)}
    return {}


def _compile(message: Any) -> None:
    take_settings(message["settings"])
    with config.override(**message["config"]):
        split = PARTITIONS[message["partition"]]
        _, keeper = compiled_later(split)
        if circumstances(keeper) != message["about"]:
            raise StaysError("versions, settings or extensions differ")
        joint = graph_from_data(message["graph"])
        failing = drawing_as_eager("inductor")  # raises where the other would take eager's kernels
        pipeline = dataclasses.replace(
            pipeline_for(backend=failing, partition=split, regions=message["regions"]),
            decompositions=None,
            keeper=dataclasses.replace(keeper, told=message["key"]),
            may_fail=False,
        )
        pipeline.split(joint)  # kept now; the next is as every process reads it
        halves = pipeline.prepared_halves(pipeline.split(joint), message["kept"], config.value)
        compiled = pipeline.compile(halves, None, config.value, may_retry=False)
        if not joint.signature.is_inference and joint.backward_error is None:
            inputs = halves.backward.graph.find_nodes(op="placeholder")
            compiled.make_backward([torch.empty(0) for _ in inputs])
        keeper.store.write(digest(message["key"]), {"name": joint.name, "what": "compiled"}, {})
