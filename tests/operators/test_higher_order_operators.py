"""Operators that take functions, functions that Dynamo compiled, and operators that take memory away: each in a
process of its own, which must not end by a signal. They answer as eager does, or are refused by name.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, os, sys, traceback
import torch, foregrad
import torch._inductor.inductor_prims
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map
from torch._higher_order_ops.scan import scan
import torch.nn.attention.flex_attention

inner = dict(
    compiled=torch.compile(torch.sin, backend="eager"),
    whole=torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=True),
    module=torch.compile(torch.nn.Linear(4, 4), backend="eager"),
    disabled=torch.compiler.disable(torch.sin),
)

def attend(x):
    return torch.ops.higher_order.flex_attention(*[x.view(1, 1, 3, 4)] * 3, lambda s, b, h, q, k: s * 2, MASK, 1.0, {})[0]

MASK = torch.nn.attention.flex_attention._create_empty_block_mask(*[torch.zeros(1, 1, 3, 4)] * 2).as_tuple()

def resized(x):
    y = torch.ones(1 << 20) * x.sum().detach()
    torch.ops.inductor.resize_storage_bytes_(y, 0)
    return y

programs = dict(
    map=lambda x: map(lambda a: a.sin() * 2, x),
    map_of_data=lambda x: map(lambda a: a.sin() * 2, x.detach()),
    scan=lambda x: scan(lambda c, a: (c + a, c * a), torch.zeros(4), x)[1],
    scan_of_data=lambda x: scan(lambda c, a: (c + a, c * a), torch.zeros(4), x.detach())[1],
    associative=lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
    attention=lambda x: attend(x.detach()),
    transformed=lambda x: torch.func.grad(lambda y: attend(y).sum())(x.detach()),
    resized=resized,
    compiled=lambda x: inner["compiled"](x) * 2,
    whole=lambda x: inner["whole"](x) * 2,
    module=lambda x: inner["module"](x) * 2,
    disabled=lambda x: inner["disabled"](x) * 2,
    made_inside=lambda x: torch.compile(lambda x: x.sin(), backend="eager", fullgraph=True)(x) * 2,
)

def said(name, door):
    function, x = programs[name], torch.randn(3, 4, requires_grad=True)
    compiled = (
        foregrad.compile(function, backend="eager")
        if door == "direct"
        else torch.compile(function, backend="foregrad", options={"backend": "eager"})
    )
    try:
        out = compiled(x)
    except Exception as error:
        return "refused " + str(error).replace(chr(10), " ")
    eager = function(x)
    assert torch.equal(out, eager)
    if out.requires_grad:
        ours, theirs = (torch.autograd.grad(result.sum(), x)[0] for result in (out, eager))
        assert torch.equal(ours, theirs)
    return "equal"


def in_a_child(name, door):
    # The parent has run nothing yet, so its children are whole processes.
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = said(name, door)
        except BaseException:
            text = traceback.format_exc()
        os.write(writes, text.encode()[:4_000])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], text


# What every child would import. No gradient is asked for, so that none of autograd's threads starts.
foregrad.compile(torch.sin, backend="eager")(torch.ones(2))
torch.compile(lambda x: x.sin(), backend="foregrad", options={"backend": "eager"})(torch.ones(2))
torch._dynamo.reset()
import torch._inductor.decomposition

gc.collect()
gc.freeze()  # a child's collections look at what it makes
print(json.dumps([in_a_child(*case) for case in json.loads(sys.argv[1])]))
"""

CASES = [
    ("map", "direct", None),
    ("map", "dynamo", None),
    ("map_of_data", "direct", None),
    ("scan", "direct", None),
    ("scan", "dynamo", None),
    ("scan_of_data", "direct", None),
    ("associative", "direct", None),
    ("attention", "direct", None),
    ("attention", "dynamo", None),
    ("transformed", "direct", "under a transform of torch.func"),
    ("resized", "direct", "resize_storage_bytes_"),
    ("compiled", "direct", None),
    ("whole", "direct", None),
    ("whole", "dynamo", None),
    ("module", "direct", None),
    ("disabled", "direct", None),
    ("made_inside", "direct", None),
]


@pytest.fixture(scope="module")
def said():
    cases = [case[:2] for case in CASES]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("name", "door", "refused"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_it_answers_as_eager_or_is_refused_by_name(name, door, refused, said):
    status, text = said[name, door]
    assert status == 0
    assert text == "equal" if refused is None else text.startswith("refused") and refused in text, text
