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


def tables_of(page: str, title: str) -> str:
    """The part of the page below a title, up to the next title of its level or above."""
    level = len(title) - len(title.lstrip("#"))
    (found,) = re.findall(rf"^{re.escape(title)}.*?$(.*?)(?=^#{{2,{level}}} |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    return found


MEMORY = tables_of(PAGE.read_text(), "### Memory, views and sizes")
ROWS = re.findall(r"^\| (.+?) \| `(Unsupported\w+)` \| .+ \|$", MEMORY, flags=re.MULTILINE)

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
    ("calls `set_`", "torch.randn(6),", ["y = torch.zeros(6)", "y.set_(x.untyped_storage(), 0, (2,), (1,))"], 1),
    ("calls `set_`", "torch.randn(6), torch.randn(6)", ["x.set_(v)"], 0),
    (
        "frees or allocates a tensor's memory",
        "torch.randn(6),",
        ["y = x.clone()", "size = y.nbytes", "y.untyped_storage().resize_(0)", "y.untyped_storage().resize_(size)"],
        2,
    ),
    (
        "calls `torch.ops.inductor.resize_storage_bytes_`",
        "torch.randn(6),",
        [
            "import torch._inductor.inductor_prims",
            "y = x.clone()",
            "torch.ops.inductor.resize_storage_bytes_(y, 0)",
            "torch.ops.inductor.resize_storage_bytes_(y, 24)",
        ],
        2,
    ),
    ("asks `x.is_set_to(y)`", f"{LEAF}, {LEAF}", ["return x * 2 if x.is_set_to(v) else v * 3"], 0),
    (
        "sets `.data = ...` on a view",
        PAIR,
        ["v.data = v.data.clone()", "v.sin_()"],
        0,
    ),
    (
        "changes the shape or dtype of an argument",
        f"{LEAF}, {LEAF}",
        ["y = v.sin()", "v.data = v.data[:1]", "x.data = x.data[:1]", "return y, x.sin()"],
        2,
    ),
    (
        "gives an argument with gradients a new storage",
        f"{LEAF} * 1,",
        ["x.data = x.data.clone()", "x.mul_(2)"],
        0,
    ),
    (
        "gives an argument with gradients a new storage",
        PAIR,
        ["x.data = x.data.clone()", "return v * 2"],
        0,
    ),
    (
        "detaches an argument with a history",
        f"{LEAF} * 1,",
        ["x.detach_()", "x.requires_grad_()", "return x * 2"],
        1,
    ),
    ("makes a tensor with views larger", "torch.randn(6),", ["y = x * 2", "z = y[1:]", "y.resize_(9)", "return z"], 2),
    (
        "writes to a view by `_foreach_`",
        f"({LEAF} * 1)[0],",
        ["torch._foreach_add_([x, x], [x, x])"],
        0,
    ),
    (
        "writes to a view by `_foreach_`",
        f"{LEAF} * 1,",
        ["v = x[0]", "torch._foreach_add_([v, v], [v, v])", "return v"],
        1,
    ),
    (
        "detaches a tensor",
        f"{LEAF},",
        ["y = x * 2", "v = y[0]", "w = v.sin()", "y.detach_()", "y.mul_(2)", "return v, w"],
        3,
    ),
    ("detaches a tensor", f"{LEAF} * 1,", ["y = x.data", "y.mul_(x.sum())", "return y"], 0),
    ("returns a view, after", "torch.randn(2, 3),", ["v = x[0]", "x.requires_grad_()", "return v"], 1),
    (
        "returns a view, after",
        "torch.randn(2, 3),",
        ["y = x * 2", "v = y[0]", "y.requires_grad_()", "return v, y"],
        2,
    ),
    ("returns a view, after", "torch.randn(2, 3),", ["v = x[0]", "v.requires_grad_()", "return v[1:]"], 1),
    ("returns a view, after", f"{LEAF},", ["v = x[0]", "x.requires_grad_(False)", "return v"], 1),
    ("detaches an argument with a history", PAIR, ["x.detach_()", "return v * 2"], 0),
    ("calls `requires_grad_()` on an argument", UNTRACKED, ["v.requires_grad_()", "return v * 2"], 0),
    (
        "takes a view by `as_strided`",
        f"{LEAF} * 1,",
        ["v = x[1:].as_strided((3, 3), (1, 0), 0)", "return v"],
        0,
    ),
    ("takes a view by `as_strided`", "torch.zeros(6),", ["v = x[1:3].as_strided((2,), (1,), 2)", "v.add_(1)"], 0),
    ("writes to a slice with overlapping", "torch.zeros(1, 3).expand(2, 3),", ["x[1].fill_(1)"], 0),
    ("changes sizes in place", f"{LEAF} * 1,", ["x.t_()", "return x * 2"], 0),
    ("changes sizes in place", f"{LEAF},", ["y = x * 2", "v = y[0]", "y.t_()", "return v"], 2),
    ("changes sizes in place", f"{LEAF},", ["y = x * 2", "v = y[:1]", "v.squeeze_(0)", "return v"], 2),
    ("changes sizes in place", f"torch.randn(6), {LEAF}", ["x.resize_(3)", "x.mul_(v[0])"], 0),
    (
        "changes sizes in place",
        "torch.randn(2, 3),",
        ["v = x.view(-1)", "v.resize_(4)", "x.requires_grad_()", "return v"],
        1,
    ),
    (
        "changes sizes in place",
        "torch.randn(6, requires_grad=True),",
        ["x.detach_()", "x.resize_(2)", "x.requires_grad_()"],
        1,
    ),
    (
        "returns a view whose base gets",
        f"{LEAF} * 1,",
        ["y = x * 2", "v = y.t()", "y.data = y.data.clone()", "y.detach_()", "return v"],
        3,
    ),
    (
        "sets `.data = ...` on a view",
        f"{LEAF} * 1,",
        ["v = x.data", "v.lerp_(x, 0.5)", "v.data = v.data.clone()", "return v"],
        2,
    ),
    (
        "sets `.data = ...` on a view",
        f"*(lambda a: (a, a[1]))({LEAF} * 1),",
        ["torch.no_grad()(x.zero_)()", "v.data = v.data.clone()"],
        1,
    ),
    (
        "calls `set_`",
        f"({LEAF} * 1)[1:], torch.randn(1, 3)",
        ["torch.no_grad()(x.set_)(v)", "return x * 2"],
        0,
    ),
    (
        "sets `.data = ...` on a view",
        f"{LEAF} * 1,",
        ["v = x[0]", "v.zero_()", "v.data = v.data.clone()", "return v"],
        2,
    ),
    (
        "calls `set_`",
        "torch.randn(4),",
        ["v = x.view(2, 2)", "v.requires_grad_()", "x.set_(v)"],
        2,
    ),
    (
        "detaches a tensor",
        f"{LEAF},",
        ["y = x.t().reshape(6)", "y.mul_(x.sum())", "w = y.detach()", "y.unsqueeze_(0)", "return w, y"],
        3,
    ),
    (
        "detaches a tensor",
        f"{LEAF} * 1,",
        ["y = x.detach()", "y.mul_(x.sum())", "v = y.split(1)", "x.mul_(2)", "return v"],
        2,
    ),
    (
        "changes the shape or dtype of an argument",
        f"{LEAF},",
        ["y = x.sin()", "x.data = x.data.double()", "return y.sum() + x"],
        1,
    ),
    (
        "sets `.data = ...` on a view",
        f"{LEAF},",
        ["v = x[0]", "v.data = v.data.clone()", "return v[:1], x"],
        1,
    ),
    (
        "uses a selective checkpoint with `MUST_RECOMPUTE` for an operator that draws",
        f"{LEAF},",
        [*REGION, "return c.checkpoint(torch.dropout, x, 0.5, True, use_reentrant=False, context_fn=modes)"],
        3,
    ),
    (
        "uses a selective checkpoint with `MUST_RECOMPUTE` for an operator that reads",
        f"{LEAF} * 1,",
        [
            *REGION,
            "y = c.checkpoint(torch.nn.functional.tanhshrink, x, use_reentrant=False, context_fn=modes)",
            "x.mul_(2)",
            "return y",
        ],
        3,
    ),
    (
        "writes the memory of an argument with gradients that is a view",
        f"*(lambda a: (a, a[1:].as_strided((3, 3), (1, 0), 0)))({LEAF} * 1),",
        ["x.mul_(2)", "return v * 1"],
        0,
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
