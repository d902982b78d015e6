"""More programs that once told compiled from eager: histories of what is detached, marked, replaced, or past an edge."""

from __future__ import annotations

from tests.parity.stored import SET_IN_PLACE, Stored

HISTORIES = Stored()
regression = HISTORIES.regression
refusal = HISTORIES.refusal

refusal(
    "a view of an argument that is only detached is returned, and used",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.movedim(0, 1)
    a2 = torch.randn((), dtype=torch.float64)
    return (a2, a1, a0)


def f(x0, x1, x2):
    x0.fill_(x1.sum())
    x2.detach_()
    return x1
""",
)

refusal(
    "a detached intermediate gets gradients by a write, beside what it was detached from",
    "in memory that is detached",
    """
def make_args():
    a2 = (torch.randn((3,), dtype=torch.float32)).detach().requires_grad_()
    return (a2,)


def f(x0):
    v0 = torch.ones(3)
    v1 = v0.detach()
    v1.add_(x0)
    return (v0, v1, v1[1:])
""",
)

regression(
    "a leaf that shares its counter with another tensor's views, one of which is written",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.detach().requires_grad_()
    a2 = a0.view_as(a0)
    a3 = a1.permute((1, 2, 0))
    return (a1, a2, a3)


def f(x0, x1, x2):
    x1.mul_(x0)
    return ()
""",
)

regression(
    "what a backward needs was written, and leads to a view made under no_grad alone",
    """
def make_args():
    a0 = (torch.randn((6,), dtype=torch.float32)).detach().requires_grad_()
    with torch.no_grad():
        a1 = a0.narrow(-1, 3, 2)
    return (a0, a1)


def f(x0, x1):
    v0 = x1.sort(-1)
    v0[1].index_put_((torch.tensor([0, 0]),), torch.full((1,), 2, dtype=torch.int64), accumulate=False)
    return v0
""",
)

regression(
    "an argument with gaps is scattered into itself",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float64)).detach().requires_grad_() * 1
    a1 = a0.as_strided((2,), (2,), 1)
    return (a0, a1, a1)


def f(x0, x1, x2):
    x2.scatter_(0, torch.full((2,), 0), x1)
    return ()
""",
)

regression(
    "one random number like an element with a stride",
    """
def make_args():
    a0 = torch.randn((2, 3), dtype=torch.float64)
    return (a0,)


def f(x0):
    v1 = x0 @ x0.t()
    v2 = v1.diagonal(-1)
    v3 = torch.rand_like(v2)
    v3.relu_()
    return v3
""",
)

refusal(
    "an argument is detached, and a view of it made under no_grad written",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((4,), dtype=torch.float32)).detach().requires_grad_() * 1
    with torch.no_grad():
        a1 = a0.view_as(a0)
    return (a0, a1)


def f(x0, x1):
    x0.detach_()
    x1.masked_fill_(x1 > 0, 0.5)
    return ()
""",
)

refusal(
    "a part of a view of a leaf is transposed in place",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_()
    a1 = a0.view((1, 1))
    return (a1,)


def f(x0):
    v0 = x0.tensor_split(2, 0)
    v0[0].t_()
    return ()
""",
)

refusal(
    "a view of a view that is made a leaf",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((3, 2, 2), dtype=torch.complex64)
    return (a0,)


def f(x0):
    v1 = x0.unsqueeze(1)
    v1.requires_grad_()
    return v1.flatten()
""",
)

refusal(
    "a view of an argument as it was between two assignments",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = (torch.randn((6,), dtype=torch.float32)).detach().requires_grad_()
    return (a0,)


def f(x0):
    x0.data = x0.data.clone()
    v2 = x0.view_as(x0)
    x0.data = x0.data.clone()
    return (x0, v2)
""",
)

refusal(
    "a view of an argument that is written to in another place and then detached",
    "in memory that is detached",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.detach()
    return (a0, a1)


def f(x0, x1):
    x1[..., -2] = torch.full((2,), 2, dtype=torch.float32)
    v1 = x0.view_as(x0)
    x1.sin_()
    x0.detach_()
    return v1
""",
)

refusal(
    "an intermediate with a history is given an argument's memory",
    SET_IN_PLACE,
    """
def make_args():
    a0 = torch.randn((6,), dtype=torch.float32)
    a2 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_()
    return (a0, a2)


def f(x0, x1):
    v2 = x1 * 0
    v2.set_(x0)
    return v2
""",
)

refusal(
    "a view of what is written with gradients and detached then",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 3), requires_grad=True) * 1,)


def f(x0):
    v0 = x0[0]
    v0.sin_()
    x0.detach_()
    return v0
""",
)


refusal(
    "a view of what is written with gradients and detached twice",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 3), requires_grad=True) * 1,)


def f(x0):
    v0 = x0[0]
    x0.mul_(v0.sum())
    v1 = x0[1]
    x0.detach_()
    x0.detach_()
    return v1
""",
)


refusal(
    "a view taken between two detaches",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    return (torch.randn((2, 3), requires_grad=True),)


def f(x0):
    w = (x0 * 2).sum()
    x0.detach_()
    v0 = x0.unbind(0)[0]
    x0.mul_(w)
    x0.detach_()
    return v0
""",
)


refusal(
    "a view of a view made under no_grad of what is detached then",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 3)).requires_grad_() * 1,)


def f(x0):
    x0.mul_(2)
    with torch.no_grad():
        v0 = x0[:1]
    v1 = v0[0]
    x0.detach_()
    return (v0, v1)
""",
)


refusal(
    "views between a mark, a detach and a mark",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 3)),)


def f(x0):
    x0.requires_grad_()
    v0 = x0[1]
    w = x0.sum()
    x0.detach_()
    v1 = x0[0]
    x0.requires_grad_()
    return (x0 * w, v0, v1)
""",
)


refusal(
    "a view is taken between a write and one through `.data`, and what it is of is marked then",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    return (torch.randn(3, 2),)


def f(x):
    x.mul_(2)
    v = x[0]
    x.requires_grad_()
    y = (x * 2).sum()
    x.data.mul_(2)
    return v, y
""",
)

refusal(
    "a view of a view made under no_grad is taken once its base requires no grad any more, before that is written",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    return (torch.randn((3, 2)).requires_grad_(),)


def f(x):
    with torch.no_grad():
        v = x[0]
    x.requires_grad_(False)
    w = v.view_as(v)
    x.mul_(2)
    return w
""",
)

regression(
    "one of several views made at once is written under no_grad, and a view of it is taken",
    """
def make_args():
    return ((torch.randn((2, 2)).requires_grad_() * 1).unbind(0)[0],)


def f(x):
    with torch.no_grad():
        x.add_(2)
    x[1:]
    return ()
""",
)

refusal(
    "a plain view is used between the mark and the `detach_` of what it is of, and keeps its history",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn(3, 2),)


def f(x):
    v = x[0]
    x.mul_(3)
    x.requires_grad_()
    w = v * 2
    x.detach_()
    return v, w
""",
)

regression(
    "a view made under no_grad, and one of that, are taken between a write and one through `.data`",
    """
def make_args():
    return (torch.randn((3, 2)).requires_grad_(),)


def f(x):
    with torch.no_grad():
        x.mul_(2)
        v = x[0]
    w = v.view_as(v)
    x.data.mul_(2)
    return v, w
""",
)

for made in ("a0.diagonal(0)", "a0[0]", "a0.unbind(0)[1]"):
    for written in ("torch.add(v0, x2, out=v0)", "v0.add_(x2)", "x1.mul_(x2)", "x0.mul_(x2)"):
        for returned in ("v0.t()", "v0[0], v0.t()[1:]", "v0.t(), v0"):
            regression(
                f"views under no_grad of one written in between: {made}, {written}, {returned}",
                f"""
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    with torch.no_grad():
        a1 = {made}
    return (a0, a1, torch.randn(()))


def f(x0, x1, x2):
    v0 = x1.view((1, 2))
    with torch.no_grad():
        {written}
        return {returned}
""",
            )

for marks in ("x0 x1", "x1 x0", "x0 x1 -x1", "x0 x1 -x1 x1", "x0 -x0 x1"):
    for taken in ("a0.view(4)", "a0.t()", "a0[1]", "a0.detach()"):
        for returned in ("x1 * 2", "x1.chunk(2)", "x0 * 3, x1 * 2"):
            lines = [f"{m.strip('-')}.requires_grad_({not m.startswith('-')})" for m in marks.split()]
            regression(
                f"a view is marked beside its base: {marks}, {taken}, {returned}",
                f"""
def make_args():
    a0 = torch.randn((2, 2))
    return (a0, {taken})


def f(x0, x1):
    {chr(10).join(lines).replace(chr(10), chr(10) + "    ")}
    return {returned}
""",
            )

for given in ("a0.detach().requires_grad_()", "a0.data.requires_grad_()", "torch.randn((4,)).requires_grad_()"):
    for copied in ("x0.copy_(x1)", "x0[:] = x1", "x0.view(2, 2)[:] = x1.view(2, 2)", "x0.data.copy_(x1)"):
        regression(
            f"a copy of an argument is saved, not the argument: {given}, {copied}",
            f"""
def make_args():
    a0 = torch.randn((4,))
    return (a0, {given})


def f(x0, x1):
    {copied}
    return x0.abs()
""",
        )
