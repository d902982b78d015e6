"""Each row of docs/limits.md: the error that it names rises, and says at which line of the program."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

import foregrad
from tests.parity.programs import load

pytestmark = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "limits.md"
# The page's first table sums up the rows below it, which the programs here run.
_, MEMORY, OTHERS = re.split(
    r"^## (?:Memory, views and sizes|Gradients and hooks)$", PAGE.read_text(), flags=re.MULTILINE
)
ROWS = re.findall(r"^\| (.+?) \| eager with a warning \(`(Unsupported\w+)`\) \| .+ \|$", MEMORY, flags=re.MULTILINE)

LEAF = "torch.randn(2, 3, requires_grad=True)"

# A region whose operators are all to be computed again.
REGION = [
    "c = torch.utils.checkpoint",
    "again = lambda *_, **__: c.CheckpointPolicy.MUST_RECOMPUTE",
    "modes = lambda: c.create_selective_checkpoint_contexts(again)",
]

PAIR = f"*(lambda a: (a, a[0]))({LEAF} * 1),"
UNTRACKED = f"*(lambda a: (a, torch.no_grad()(lambda: a[0])()))({LEAF} * 1),"

# The beginning of the row, the arguments, the body, and the line that the message is to show.
PROGRAMS = [
    ("`set_`", "torch.randn(6),", ["y = torch.zeros(6)", "y.set_(x.untyped_storage(), 0, (2,), (1,))"], 1),
    ("`set_`", "torch.randn(6), torch.randn(6)", ["x.set_(v)"], 0),
    (
        "`x.untyped_storage().resize_(0)` frees",
        "torch.randn(6),",
        ["y = x.clone()", "size = y.nbytes", "y.untyped_storage().resize_(0)", "y.untyped_storage().resize_(size)"],
        2,
    ),
    (
        "`torch.ops.inductor.resize_storage_bytes_`",
        "torch.randn(6),",
        [
            "import torch._inductor.inductor_prims",
            "y = x.clone()",
            "torch.ops.inductor.resize_storage_bytes_(y, 0)",
            "torch.ops.inductor.resize_storage_bytes_(y, 24)",
        ],
        2,
    ),
    ("`x.is_set_to(y)` asks", f"{LEAF}, {LEAF}", ["return x * 2 if x.is_set_to(v) else v * 3"], 0),
    (
        "`.data = ...` on a view",
        PAIR,
        ["v.data = v.data.clone()", "v.sin_()"],
        0,
    ),
    (
        "an argument that gradients flow to is given",
        f"{LEAF}, {LEAF}",
        ["y = v.sin()", "v.data = v.data[:1]", "x.data = x.data[:1]", "return y, x.sin()"],
        2,
    ),
    (
        "an argument that gradients flow to gets a new storage",
        f"{LEAF} * 1,",
        ["x.data = x.data.clone()", "x.mul_(2)"],
        0,
    ),
    (
        "an argument that gradients flow to gets a new storage",
        PAIR,
        ["x.data = x.data.clone()", "return v * 2"],
        0,
    ),
    (
        "an argument with a history is detached",
        f"{LEAF} * 1,",
        ["x.detach_()", "x.requires_grad_()", "return x * 2"],
        1,
    ),
    ("`resize_` makes a tensor larger", "torch.randn(6),", ["y = x * 2", "z = y[1:]", "y.resize_(9)", "return z"], 2),
    (
        "one `_foreach_` call writes to a view",
        f"({LEAF} * 1)[0],",
        ["torch._foreach_add_([x, x], [x, x])"],
        0,
    ),
    (
        "one `_foreach_` call writes to a view",
        f"{LEAF} * 1,",
        ["v = x[0]", "torch._foreach_add_([v, v], [v, v])", "return v"],
        1,
    ),
    (
        "a tensor is detached",
        f"{LEAF},",
        ["y = x * 2", "v = y[0]", "w = v.sin()", "y.detach_()", "y.mul_(2)", "return v, w"],
        3,
    ),
    ("a tensor is detached", f"{LEAF} * 1,", ["y = x.data", "y.mul_(x.sum())", "return y"], 0),
    ("a view is returned, and", "torch.randn(2, 3),", ["v = x[0]", "x.requires_grad_()", "return v"], 1),
    (
        "a view is returned, and",
        "torch.randn(2, 3),",
        ["y = x * 2", "v = y[0]", "y.requires_grad_()", "return v, y"],
        2,
    ),
    ("a view is returned, and", "torch.randn(2, 3),", ["v = x[0]", "v.requires_grad_()", "return v[1:]"], 1),
    ("a view is returned, and", f"{LEAF},", ["v = x[0]", "x.requires_grad_(False)", "return v"], 1),
    ("an argument with a history is detached", PAIR, ["x.detach_()", "return v * 2"], 0),
    ("`requires_grad_()` is called on an argument", UNTRACKED, ["v.requires_grad_()", "return v * 2"], 0),
    (
        "`as_strided` goes past the edges",
        f"{LEAF} * 1,",
        ["v = x[1:].as_strided((3, 3), (1, 0), 0)", "return v"],
        0,
    ),
    ("`as_strided` goes past the edges", "torch.zeros(6),", ["v = x[1:3].as_strided((2,), (1,), 2)", "v.add_(1)"], 0),
    ("a slice with overlapping elements", "torch.zeros(1, 3).expand(2, 3),", ["x[1].fill_(1)"], 0),
    ("sizes of an argument, of a view", f"{LEAF} * 1,", ["x.t_()", "return x * 2"], 0),
    ("sizes of an argument, of a view", f"{LEAF},", ["y = x * 2", "v = y[0]", "y.t_()", "return v"], 2),
    ("sizes of an argument, of a view", f"{LEAF},", ["y = x * 2", "v = y[:1]", "v.squeeze_(0)", "return v"], 2),
    ("sizes of an argument, of a view", f"torch.randn(6), {LEAF}", ["x.resize_(3)", "x.mul_(v[0])"], 0),
    (
        "sizes of an argument, of a view",
        "torch.randn(2, 3),",
        ["v = x.view(-1)", "v.resize_(4)", "x.requires_grad_()", "return v"],
        1,
    ),
    (
        "sizes of an argument, of a view",
        "torch.randn(6, requires_grad=True),",
        ["x.detach_()", "x.resize_(2)", "x.requires_grad_()"],
        1,
    ),
    (
        "a view is returned that was taken",
        f"{LEAF} * 1,",
        ["y = x * 2", "v = y.t()", "y.data = y.data.clone()", "y.detach_()", "return v"],
        3,
    ),
    (
        "`.data = ...` on a view",
        f"{LEAF} * 1,",
        ["v = x.data", "v.lerp_(x, 0.5)", "v.data = v.data.clone()", "return v"],
        2,
    ),
    (
        "`.data = ...` on a view",
        f"*(lambda a: (a, a[1]))({LEAF} * 1),",
        ["torch.no_grad()(x.zero_)()", "v.data = v.data.clone()"],
        1,
    ),
    (
        "`set_`",
        f"({LEAF} * 1)[1:], torch.randn(1, 3)",
        ["torch.no_grad()(x.set_)(v)", "return x * 2"],
        0,
    ),
    (
        "`.data = ...` on a view",
        f"{LEAF} * 1,",
        ["v = x[0]", "v.zero_()", "v.data = v.data.clone()", "return v"],
        2,
    ),
    (
        "`set_`",
        "torch.randn(4),",
        ["v = x.view(2, 2)", "v.requires_grad_()", "x.set_(v)"],
        2,
    ),
    (
        "a tensor is detached",
        f"{LEAF},",
        ["y = x.t().reshape(6)", "y.mul_(x.sum())", "w = y.detach()", "y.unsqueeze_(0)", "return w, y"],
        3,
    ),
    (
        "a tensor is detached",
        f"{LEAF} * 1,",
        ["y = x.detach()", "y.mul_(x.sum())", "v = y.split(1)", "x.mul_(2)", "return v"],
        2,
    ),
    (
        "an argument that gradients flow to is given",
        f"{LEAF},",
        ["y = x.sin()", "x.data = x.data.double()", "return y.sum() + x"],
        1,
    ),
    (
        "`.data = ...` on a view",
        f"{LEAF},",
        ["v = x[0]", "v.data = v.data.clone()", "return v[:1], x"],
        1,
    ),
    (
        "a selective checkpoint's policy says `MUST_RECOMPUTE` for an operator that draws",
        f"{LEAF},",
        [*REGION, "return c.checkpoint(torch.dropout, x, 0.5, True, use_reentrant=False, context_fn=modes)"],
        3,
    ),
    (
        "a selective checkpoint's policy says `MUST_RECOMPUTE` for an operator that reads an argument",
        f"{LEAF} * 1,",
        [
            *REGION,
            "y = c.checkpoint(torch.nn.functional.tanhshrink, x, use_reentrant=False, context_fn=modes)",
            "x.mul_(2)",
            "return y",
        ],
        3,
    ),
    ("a `backward()` inside", f"{LEAF} * 1,", ["(x * 2).sum().backward()", "return x * 2"], 0),
    (
        "a hook is left on an argument",
        f"{LEAF},",
        ["s = x.detach().sum()", "x.register_hook(lambda g: g * s)", "return x.sin()"],
        1,
    ),
]


def error_of(beginning):
    (found,) = [error for row, error in ROWS if row.startswith(beginning)]
    return getattr(foregrad.errors, found)


def test_every_row_has_a_program():
    """The page and the programs here name the same things."""
    beginnings = [beginning for beginning, *_ in PROGRAMS]
    table = [line for line in MEMORY.splitlines() if line.startswith("|")]
    assert len(ROWS) == len([line for line in table if "`Unsupported" in line])
    assert [row for row, _ in ROWS if not any(row.startswith(beginning) for beginning in beginnings)] == []


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_the_page_says_is_refused_is_refused_with_the_line(number):
    beginning, arguments, body, line = PROGRAMS[number]
    source = f"def make_args():\n    return ({arguments})\n\n\ndef f(x, v=None):\n" + "".join(
        f"    {step}\n" for step in body
    )
    f, make_args = load(source)
    with pytest.raises(error_of(beginning)) as refusal:
        foregrad.compile(f, backend="eager")(*make_args())
    assert f":{6 + line} in f: {body[line]}" in str(refusal.value)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_eager_does_what_is_refused(number):
    """These are no errors of the program's own, but for a view that PyTorch itself lets nobody use."""
    _, arguments, body, _ = PROGRAMS[number]
    f, make_args = load(
        f"def make_args():\n    return ({arguments})\n\n\ndef f(x, v=None):\n" + "".join(f"    {s}\n" for s in body)
    )
    torch.manual_seed(0)
    f(*make_args())
