"""Files that somebody made up, by the thousand: `python -m tests.store.artifacts.fuzz --minutes 20`.

Each is an artifact with some of its JSON changed, sealed as if it were right. Reading one must give an `ArtifactError` or
an artifact, soon and in little memory. What does not is written down as the edits that lead there, in
tests/store/artifacts/corpus.jsonl, which a test reads again; so are edits that led to an error not met before.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
import sys
import time
import traceback

import torch
from torch import nn

import foregrad
from foregrad.errors import ArtifactError
from foregrad.store.artifacts.artifact import _read
from tests.store.artifacts.faults import members_of, repacked

CORPUS = pathlib.Path(__file__).parent / "corpus.jsonl"
MOST_SECONDS = 10.0
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**40, 2**62, 2**63, -(2**63), 2**70, 0.0, 1.5, -1e308, "", "x", "s0", "args[0]", "lambda",
    "aten::mm", "aten::add.Tensor", "aten::add_.Tensor", "aten::set_.source_Tensor", "operator.getitem", "foregrad.take_data", "os::system", "cpu", "meta",
    "cuda:0", "float32", "bool", "complex64", "strided", "nan", "\x00", "../x", "é", "joint", "placeholder", "call_function", "output", "get_attr",
    [], {}, [[]], [None], {"node": 0}, {"node": 1}, {"node": 10**6}, {"tuple": []}, {"dict": []}, {"number": "s0"}, {"number": 3},
    {"tensor": 0}, {"operator": 0}, {"generator": "default"}, {"is": "Input", "path": "x"}, {"is": "Stored", "name": "weight"},
    {"is": "GraphOutput", "path": "out", "output": 0}, {"is": "InputOutput", "path": "out", "input": 0}, {"is": "BaseOf", "input": 0},
    {"is": "MemoryOf", "input": 0}, {"is": "Named", "name": "x"}, ["Add", "s0", 1], ["Mul", "s0", "s0"], ["FloorDiv", "s0", 0], ["Eq", "s0", 3],
    {"on_copies": "aten::add_.Tensor", "writes": [0]}, {"size": [2, 3]}, {"slice": [None, None, None]}, {"list": [1]},
]  # fmt: skip


def originals():
    """Small artifacts that between them use most of the format."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x, *, flag=True):
            return {"y": self.norm(self.linear(x)) * torch.tensor([1.0, 2.0, 3.0, 4.0]), "n": (1, None)}

    def writes(x, y):
        x.mul_(2)
        z = x.view(-1)
        return z, y.t(), (x.sum() * y).exp(), torch.topk(y, 1)

    def branching(x):
        return torch.linalg.inv(x) if x.sum() > 0 else x * nn.functional.dropout(x, 0.5)

    def second(x, w):
        return (x @ w).sin().sum(), x.view(-1)

    torch.manual_seed(0)
    ones = torch.eye(3) + 1
    made = [
        foregrad.export(Model(), (torch.randn(6, 3),), {"flag": True}, dynamic_shapes={"x": {0: (2, 64)}}),
        foregrad.export(writes, (torch.ones(2, 3), torch.ones(2, 3, requires_grad=True))),
        foregrad.export(branching, (ones.clone().requires_grad_(),)),
        foregrad.export(
            second, (ones.clone().requires_grad_(), ones.clone()), dynamic_shapes={"x": {0: True}}, derivatives=2
        ),
    ]
    return [artifact.to_bytes() for artifact in made]


def places(data, path=()):
    """Every place in JSON, by its path."""
    yield path
    if isinstance(data, dict):
        for key in data:
            yield from places(data[key], (*path, key))
    elif isinstance(data, list):
        for position, item in enumerate(data):
            yield from places(item, (*path, position))


def at(data, path):
    for step in path:
        data = data[step]
    return data


def apply(data, edit):
    """`data` after one edit: `[kind, path, value]`. Edits of what is no longer there do nothing."""
    kind, path, value = edit
    try:
        holder = at(data, path[:-1]) if path else None
        if kind == "put":
            if holder is None:
                return value
            holder[path[-1]] = value
        elif kind == "drop" and holder is not None:
            del holder[path[-1]]
        elif kind == "double" and isinstance(holder, list):
            holder.insert(path[-1], json.loads(json.dumps(holder[path[-1]])))
        elif kind == "add" and isinstance(at(data, path), int):
            return apply(data, ["put", path, at(data, path) + value])
        elif kind == "copy":
            return apply(data, ["put", path, json.loads(json.dumps(at(data, value)))])
        elif kind == "name" and isinstance(at(data, path), dict):
            at(data, path)[value] = 1
    except (KeyError, IndexError, TypeError):
        pass
    return data


def draw_edit(choose, data):
    """An edit of `data`; `choose(sequence)` chooses."""
    known = draw_edit.places.get(id(data))
    if known is None or known[0] is not data:
        known = draw_edit.places[id(data)] = (data, list(places(data)))
    path = list(choose(known[1]))
    kind = choose(["put", "put", "put", "drop", "double", "add", "copy", "name"])
    value = None
    if kind == "put":
        value = choose(VALUES)
    elif kind == "add":
        value = choose([-1, 1, 5, 10**9])
    elif kind == "copy":
        value = list(choose(known[1]))
    elif kind == "name":
        value = choose(["x", "is", "node", "op", "steps", "memory", "aliases", "device", "offset", "constant"])
    return [kind, path, value]


draw_edit.places = {}


def edited(original, edits):
    """The file after edits, by member."""
    members = members_of(original)
    for member, edit in edits:
        data = apply(json.loads(members[member]), edit)
        try:
            members[member] = json.dumps(data).encode()
        except (RecursionError, ValueError):
            continue
    return repacked(members)


def outcome(content):
    """("refused", the kind of error), ("read", ""), or ("fault", what is wrong)."""
    import io

    start = time.thread_time()
    try:
        artifact = _read(io.BytesIO(content), "the file")
        str(artifact)
    except ArtifactError as error:
        found = ("refused", re.sub(r"[\d\"'{\[].*", "", str(error).partition(": ")[2])[:60])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = ("fault", "".join(traceback.format_exception(error))[-2000:])
    else:
        found = ("read", "")
    seconds = time.thread_time() - start
    return ("fault", f"took {seconds:.1f} s") if seconds > MOST_SECONDS else found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add edits that led to new errors to the corpus")
    options = parser.parse_args()
    files, choice = originals(), random.Random(options.seed)
    loaded = [{n: json.loads(c) for n, c in members_of(f).items() if n.endswith(".json")} for f in files]
    end, counts, known, faults = time.monotonic() + 60 * options.minutes, {}, set(), 0
    while time.monotonic() < end:
        number = choice.randrange(len(files))
        edits = []
        for _ in range(choice.choice([1, 1, 1, 2, 3])):
            member = choice.choice(list(loaded[number]))
            edits.append([member, draw_edit(choice.choice, loaded[number][member])])
        found, what = outcome(edited(files[number], edits))
        counts[found] = counts.get(found, 0) + 1
        if found == "fault":
            faults += 1
            print(f"FAULT {what}\n{json.dumps([number, edits])[:1000]}", flush=True)
        if found == "fault" or (found == "refused" and what not in known and options.keep):
            known.add(what)
            with CORPUS.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, edits]) + "\n")
    print(counts, f"{len(known)} kinds of errors")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
