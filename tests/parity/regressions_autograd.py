"""More programs that once told compiled from eager: what autograd knows of views, sizes, marks and memory taken over."""

from __future__ import annotations

from tests.parity.stored import SET_IN_PLACE, Stored

AUTOGRAD = Stored()
regression = AUTOGRAD.regression
refusal = AUTOGRAD.refusal


refusal(
    "an intermediate is unsqueezed in place under a view of it",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a1 = (torch.randn((4, 2), dtype=torch.float32)[1:-1]).detach().requires_grad_()
    a3 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a3, a1)


def f(x0, x1):
    v2 = x1 ** 2
    v3 = v2.unfold(-2, 2, 2)
    v2.unsqueeze_(2)
    return v3
""",
)

regression(
    "a view of memory that nobody writes gets its own gradient though another memory is written",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.float64)).detach().requires_grad_() * 1
    a1 = torch.view_as_complex(a0)
    a2 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    a3 = a2.unsqueeze(0)
    return (a1, a2, a3, a0)


def f(x0, x1, x2, x3):
    v0 = x0[1]
    v1 = v0.squeeze(0)
    x1.copy_(v1)
    return v0
""",
)

refusal(
    "a view is summed after its base was transposed in place",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a0, a0, a0)


def f(x0, x1, x2):
    v1 = x2.narrow(1, 1, 2)
    x2.t_()
    x1.fill_(v1.sum())
    return ()
""",
)

regression(
    "indices of a sort have strides that mean nothing",
    """
def make_args():
    a0 = (torch.randn((8,), dtype=torch.float32)[1:-1]).detach().requires_grad_()
    a1 = a0.squeeze()
    a2 = a0.view((1, 6, 1))
    a3 = a2.movedim(0, -1)
    return (a1, a3)


def f(x0, x1):
    v2 = x1.sort(-3)
    v2[1].masked_fill_(v2[1] == 0, 0)
    return v2
""",
)

regression(
    "what a backward needs is zeroed through a detached alias of a detached alias",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float64)).detach().requires_grad_()
    a2 = a0.detach().requires_grad_()
    a3 = a0.detach().requires_grad_()
    return (a3, a2, a0)


def f(x0, x1, x2):
    v0 = x1.detach()
    v1 = x2.sin()
    v0.zero_()
    return v1
""",
)

regression(
    "a view taken under no_grad outside is summed, its base written with gradients",
    """
def make_args():
    a0 = (torch.randn((4,), dtype=torch.complex64)).detach().requires_grad_()
    a1 = (torch.empty_strided((1, 3), (1, 1), dtype=torch.float32).copy_(torch.randn((1, 3), dtype=torch.float32))).detach().requires_grad_() * 1
    with torch.no_grad():
        a2 = a1.flatten()
    return (a0, a2, a1)


def f(x0, x1, x2):
    v1 = x1.sum()
    x2 += 0
    return v1
""",
)

regression(
    "a view taken under no_grad after a write of no elements",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float64)).detach().requires_grad_() * 1
    a1 = (torch.randn((5, 2, 2), dtype=torch.complex64)[1:-1]).detach().requires_grad_() * 1
    return (a1, a1, a1, a0)


def f(x0, x1, x2, x3):
    v0 = torch.view_as_real(x1)
    x1[2:2:2] = x3
    with torch.no_grad():
        v2 = v0.transpose(0, 1)
    return v2
""",
)

refusal(
    "an argument unsqueezed in place is saved for the backward",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = (torch.randn((4,), dtype=torch.float64)).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    x0.unsqueeze_(1)
    v1 = x0 * x0
    return v1
""",
)

refusal(
    "dropout in place past an argument's edges",
    "goes past the edges of its source",
    """
def make_args():
    a0 = torch.randn((6,), dtype=torch.float32)[1:-1]
    return (a0,)


def f(x0):
    v3 = x0.as_strided((4,), (1,), 0)
    v8 = torch.nn.functional.dropout(v3, 0.5, inplace=True)
    return v3
""",
)

refusal(
    "pieces of a detached argument that was written with gradients",
    "in memory that is detached",
    """
def make_args():
    a0 = (torch.randn((6,), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a0, a0, a0)


def f(x0, x1, x2):
    v3 = x0.detach()
    v3.mul_(x2)
    v15 = v3.chunk(2, 0)
    return v15
""",
)

refusal(
    "a write past an argument's edges through a detached view",
    "goes past the edges of its source",
    """
def make_args():
    a0 = torch.randint(-3, 4, (8,), dtype=torch.int32)[1:-1]
    a1 = a0.unfold(-1, 4, 2)
    return (a1,)


def f(x0):
    v0 = x0.as_strided((4,), (1,), 0)
    v1 = v0.unsqueeze(1)
    v1.detach().add_(2)
    return v0
""",
)

regression(
    "what a backward needs is changed through the argument that it was detached from",
    """
def make_args():
    a0 = (torch.empty_strided((2, 2), (1, 2), dtype=torch.float64).copy_(torch.randn((2, 2), dtype=torch.float64))).detach().requires_grad_()
    a1 = a0.detach()
    return (a1, a0, a0)


def f(x0, x1, x2):
    v1 = x2.sin()
    v5 = x0.add_(-1)
    return v1
""",
)

regression(
    "a view taken under no_grad outside is concatenated, then changed under no_grad",
    """
def make_args():
    a0 = (torch.empty_strided((3, 2, 2), (1, 3, 6), dtype=torch.float64).copy_(torch.randn((3, 2, 2), dtype=torch.float64))).detach().requires_grad_()
    a2 = a0.reshape((-1, 1))
    with torch.no_grad():
        a3 = a2.movedim(-1, -1)
    return (a3, a2)


def f(x0, x1):
    v0 = x0.expand((2, 12, 1))
    v1 = torch.cat([v0, v0], -1)
    with torch.no_grad():
        x0.sin_()
    return v1
""",
)

regression(
    "a piece of an intermediate is returned twice",
    """
def make_args():
    a0 = torch.empty_strided((2, 3), (1, 2), dtype=torch.float32).copy_(torch.randn((2, 3), dtype=torch.float32))
    a1 = a0.unbind(0)[0]
    return (a1,)


def f(x0):
    v1 = torch.arange(3.)
    v2 = v1.split(1, -1)
    v4 = v2[1].squeeze(-1)
    v4.clamp_(-1, 1)
    return [v4, v4]
""",
)

regression(
    "a leaf is written through the tensor that it was detached from",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.float32).expand((1, 3))
    a1 = a0.detach().requires_grad_()
    a2 = a0[..., 1:1]
    return (a2, a1, a1, a0)


def f(x0, x1, x2, x3):
    x3.copy_(x1)
    x3.mul_(x1)
    return ()
""",
)

refusal(
    "set_ to a tensor that requires grad leaves a history that can't be differentiated",
    SET_IN_PLACE,
    """
def make_args():
    a0 = torch.randn((3, 2, 2), dtype=torch.float32)
    a1 = torch.randn((4, 2), dtype=torch.float32)[1:-1]
    a2 = a0
    a3 = torch.randn((2, 2), dtype=torch.float32)
    return (a1, a3, a2)


def f(x0, x1, x2):
    x0.requires_grad_()
    x2.set_(x0)
    return ()
""",
)

refusal(
    "a view taken before its base is marked as requiring grad",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((2, 1, 2), dtype=torch.float32)
    return (a0, a0, a0, a0)


def f(x0, x1, x2, x3):
    v1 = x3[...]
    x0.requires_grad_()
    return v1
""",
)

regression(
    "of two outputs that lead nowhere one can't be differentiated",
    """
def make_args():
    a0 = (torch.randn((8,), dtype=torch.float32)[1:-1]).detach().requires_grad_() * 1
    a1 = a0.unbind(-1)[0]
    a3 = a1.unsqueeze(0)
    return (a0, a3, a1)


def f(x0, x1, x2):
    with torch.no_grad():
        v0 = x2.unsqueeze(0)
    v1 = v0.to(torch.float64)
    v2 = v0 * v1
    v3 = torch.cat([v1, v1], 0)
    x0.mul_(-1)
    return (v2, v3)
""",
)

refusal(
    "the data of a view of a marked argument is replaced",
    "gives other memory to a view",
    """
def make_args():
    a0 = torch.randn((6,), dtype=torch.float32)
    return (a0, a0)


def f(x0, x1):
    x0.requires_grad_()
    v3 = x1[...]
    v3.data = v3.data.clone()
    return v3
""",
)

refusal(
    "an argument keeps the memory that its new data had before it shrank",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = torch.randn((2, 2), dtype=torch.complex64)
    a2 = torch.randn((4,), dtype=torch.float32)
    return (a0, a2)


def f(x0, x1):
    x1.data = x1.data.clone()
    x1.resize_(3)
    x1.mul_(x1)
    return ()
""",
)

regression(
    "an argument that is a view is marked, a view of it was taken before",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.complex64).expand((1, 3))
    return (a0,)


def f(x0):
    v1 = x0.squeeze()
    x0.requires_grad_()
    v1.mul_(v1)
    return ()
""",
)

refusal(
    "an argument is detached in place",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64)
    a1 = a0.detach().requires_grad_()
    a2 = a1.real
    return (a0, a1, a2, a1)


def f(x0, x1, x2, x3):
    x1.detach_()
    v5 = x3.split(1, 0)
    return v5
""",
)

refusal(
    "pieces of an argument that is a view, which is marked afterwards",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.float64).expand((2, 3))
    a1 = a0
    return (a1, a0, a0, a0)


def f(x0, x1, x2, x3):
    v0 = x3.chunk(2, 0)
    x2.requires_grad_()
    return v0
""",
)

regression(
    "a view of an argument that was resized, written afterwards",
    """
def make_args():
    a0 = torch.randn((2, 3), dtype=torch.float32)
    a1 = a0.mT
    a2 = torch.randn((2, 1, 2), dtype=torch.complex64)
    return (a0, a2, a1)


def f(x0, x1, x2):
    x2.resize_(5)
    v1 = x2.unfold(-1, 3, 2)
    x2.neg_()
    return v1
""",
)

regression(
    "a view of an argument whose data was replaced is written",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.float64)
    a2 = torch.randn((1, 2, 2), dtype=torch.float32).expand((3, 2, 2))
    return (a2, a0)


def f(x0, x1):
    x1.data = x1.data.clone()
    v1 = x1.view_as(x1)
    v1[[0]] = 2
    return v1
""",
)

refusal(
    "a view of an argument whose data was replaced is marked",
    "changes sizes, dtype, history or memory in place",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.float32)
    a1 = a0[None]
    return (a0, a1, a0, a0)


def f(x0, x1, x2, x3):
    x3.data = x3.data.clone()
    v1 = x2.t()
    v1.requires_grad_()
    return v1
""",
)

refusal(
    "a view of an intermediate that is marked afterwards",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((4, 3), dtype=torch.float32)[1:-1]
    return (a0,)


def f(x0):
    v1 = x0.abs()
    v6 = v1[2:2]
    v1.requires_grad_()
    return v6
""",
)

refusal(
    "set_ to an argument whose data was replaced",
    SET_IN_PLACE,
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.float32).expand((2, 3))
    a1 = a0.squeeze(1)
    a2 = a0.expand((2, 2, 3))
    return (a2, a1, a0)


def f(x0, x1, x2):
    x2.data = x2.data.clone()
    x1.set_(x2)
    return ()
""",
)

regression(
    "a backward raises that leads to no argument",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.expand((2,))
    return (a1, a0)


def f(x0, x1):
    with torch.no_grad():
        v1 = x1.view_as(x1)
    v2 = v1.relu()
    v2.add_(-1)
    return v2
""",
)
