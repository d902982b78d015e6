"""Programs that once told compiled from eager: views that are marked, conjugated, reshaped or made under no_grad."""

from __future__ import annotations

from tests.parity.stored import Stored

VIEWS = Stored()
regression = VIEWS.regression
refusal = VIEWS.refusal

refusal(
    "a view of a view of an argument is taken before that one is marked, and returned after it",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a2 = torch.randn((6,), dtype=torch.float32)
    return (a2,)


def f(x0):
    v0 = x0[None]
    v4 = v0[..., 2:3]
    v0.requires_grad_()
    return (v0, v4)
""",
)

regression(
    "an argument that is a view of another is marked through that one",
    """
def make_args():
    a0 = torch.randn((6,), dtype=torch.float32)
    return (a0, a0[...], a0.view(2, 3))


def f(x0, x1, x2):
    y = x1 * 2
    x0.requires_grad_()
    return x1.squeeze(-1), x2[0] + 1, y
""",
)

regression(
    "a view made under no_grad is written by itself, and through memory that autograd knows nothing of",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32).expand((2, 3))).detach().requires_grad_() * 1
    with torch.no_grad():
        a1 = a0.mT
    a3 = torch.empty(0, dtype=torch.float32).set_(a1.untyped_storage(), 0, (5,), (1,))
    return (a3, a1)


def f(x0, x1):
    x0.clamp_(-1, 1)
    v1 = x1.chunk(2, 0)
    with torch.no_grad():
        v1[1][1:].copy_(v1[1][:-1])
    return v1
""",
)

regression(
    "indices of a sort are returned, changed in place, and only another output is differentiated",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = torch.empty(0, dtype=torch.float32).set_(a0.untyped_storage(), 0, (1,), (1,))
    a3 = a0.as_strided((1,), (1,), 0)
    return (a0, a1, a3)


def f(x0, x1, x2):
    v0 = x2.sort(0)
    with torch.no_grad():
        v1 = v0[0][...]
    v2 = x0.detach()
    x0.addcmul_(v2, v2)
    return [v0[1], v1, x1, x0]
""",
)

regression(
    "the data of a saved tensor is returned and changed in place",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = torch.view_as_complex(a0)
    return (a0, a1)


def f(x0, x1):
    v1 = x1.sin() * -1
    v2 = v1.data
    return [v2, v1.sin()]
""",
)

regression(
    "the data of a saved tensor is made to require grad",
    """
def make_args():
    return ((torch.randn((2, 3))).detach().requires_grad_() * 1,)


def f(x0):
    v1 = x0.sin()
    v2 = v1.data
    v2.requires_grad_()
    return v2, v1.sin()
""",
)

regression(
    "a view made under no_grad is used, and added to what it is a view of",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float64)).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    with torch.no_grad():
        v0 = x0.squeeze()
    v1 = v0.sin()
    x0.add_(v1)
    return ()
""",
)

refusal(
    "sizes change of a tensor and of a view of it, and both are returned",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = torch.randint(-3, 4, (2, 1, 2), dtype=torch.int32)
    return (a0,)


def f(x0):
    v0 = x0 > 0
    v1 = v0.diagonal(0)
    v1.squeeze_()
    v4 = v1.contiguous()
    v7 = v0.to(torch.bool)
    v4.copy_(v4.flip(0))
    v7.unsqueeze_(0)
    return (v0, v1)
""",
)

regression(
    "what a product needs was written, on the way to a view made under no_grad",
    """
def make_args():
    a0 = torch.randint(-3, 4, (), dtype=torch.int32)
    a1 = (torch.randn((), dtype=torch.complex64)).detach().requires_grad_()
    with torch.no_grad():
        a2 = a1.conj()
    return (a0, a2, a1)


def f(x0, x1, x2):
    v2 = x0 * x1
    x0.zero_()
    return v2
""",
)

regression(
    "an imaginary part of a conjugate, which an operator writes by out=",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64)
    return (a0,)


def f(x0):
    v0 = x0.flip(0)
    v1 = v0.conj()
    v2 = v1.imag
    torch.add(v1, v1, out=v1)
    return v2
""",
)

regression(
    "an imaginary part of a conjugate argument, which is written",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64).conj()
    return (a0,)


def f(x0):
    v2 = x0.imag
    x0.copy_(x0.flip(0))
    v3 = v2.sin()
    v2.add_(1)
    return v3, x0
""",
)

refusal(
    "a leaf is detached in place, reshaped and made to require grad again",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a1 = (torch.randn((3, 2, 2), dtype=torch.float32)).detach().requires_grad_()
    return (a1, a1)


def f(x0, x1):
    x0.detach_()
    x1.transpose_(2, -2)
    x1.requires_grad_()
    return ()
""",
)

refusal(
    "an argument is given memory, made smaller, and returned with a view of it",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.float64)
    return (a0,)


def f(x0):
    x0.data = x0.data.clone()
    x0.resize_(3)
    v3 = x0.unsqueeze(1)
    v3.neg_()
    return v3
""",
)

regression(
    "a window of a complex argument that begins late in its memory is written, after products",
    """
def make_args():
    a0 = torch.randn((6,), dtype=torch.complex64)[1:-1]
    return (a0, a0)


def f(x0, x1):
    x1.detach().add_(-1)
    x1.mul_(0.5)
    x0.unfold(0, x0.shape[0], 1).mul_(0)
    return ()
""",
)

refusal(
    "a view is written by no_grad, used, and its base detached then",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((4,), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0[...]
    return (a0, a1)


def f(x0, x1):
    with torch.no_grad():
        x0.view(-1).clamp_(-1, 1)
    v1 = x1.sum()
    x0.detach_()
    return ()
""",
)

refusal(
    "an argument is marked, a view of it taken, and detached in place",
    "in memory that is detached",
    """
def make_args():
    a1 = torch.randn((2, 3), dtype=torch.float32)
    return (a1,)


def f(x0):
    x0.requires_grad_()
    v4 = x0[1:]
    x0.detach_()
    return v4
""",
)

refusal(
    "a view is taken between a write and a mark, and the argument used then",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    return (torch.randn(6), torch.randn(6))


def f(x0, x1):
    x0.add_(x0)
    v = x0[:2]
    w = x0.split(3)
    torch._foreach_add_([x1], [x1])
    u = x1[1:].view(5)
    x0.requires_grad_()
    x1.requires_grad_()
    return v, v[0], w, u, x0.sin() + x1.cos()
""",
)

refusal(
    "a tensor takes over a part of itself, and is returned with the parts",
    "gives a tensor other memory",
    """
def make_args():
    return (torch.randn((3, 2, 2), dtype=torch.float64),)


def f(x0):
    v3 = x0 * 2
    v6 = v3.tensor_split(2, 0)
    v3.set_(v6[1])
    return (v3, v6)
""",
)

refusal(
    "a view made under no_grad is viewed after its base was detached in place",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((6,), dtype=torch.complex64)).detach().requires_grad_()
    with torch.no_grad():
        a2 = a0.narrow(0, 4, 2)
    return (a0, a2)


def f(x0, x1):
    x0.detach_()
    v3 = x1.squeeze()
    x1.masked_fill_(x1 == 0.5, 0.5)
    return v3
""",
)

refusal(
    "a view made under no_grad is used and marked then",
    "changes sizes, dtype, history",
    """
def make_args():
    a1 = (torch.randn((5, 2, 2), dtype=torch.complex64)[1:-1]).detach().requires_grad_() * 1
    with torch.no_grad():
        a2 = a1.permute((0, 2, 1))
    return (a2, a2)


def f(x0, x1):
    v0 = x1.sin()
    x0.requires_grad_()
    return v0
""",
)

refusal(
    "a view of a marked view is written under no_grad",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((), dtype=torch.float32)
    return (a0[...], a0)


def f(x0, x1):
    v1 = x1.unsqueeze(0)
    v1.requires_grad_()
    v4 = v1.unfold(0, 1, 1)
    with torch.no_grad():
        v4[..., 1:].add_(v4[..., :-1])
    return v4
""",
)

regression(
    "what a backward needs was written, beside a way to a view made under no_grad",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float64)).detach().requires_grad_()
    return (a0[1:],)


def f(x0):
    with torch.no_grad():
        v0 = x0.expand((2, 1, 3))
    v1 = v0.relu()
    v1.copy_(x0)
    return v1
""",
)

regression(
    "a write of no elements to a view that is used then, in memory that autograd knows only in part",
    """
def make_args():
    a0 = (torch.empty_strided((1, 3), (1, 1), dtype=torch.float32).copy_(torch.randn((1, 3), dtype=torch.float32))).detach().requires_grad_() * 1
    a1 = a0.squeeze(1)
    a2 = a0.data
    return (a2, a1)


def f(x0, x1):
    x1[1:].copy_(x1[:-1])
    v3 = x1 @ x1.t()
    return torch.cat([v3, v3], 1).sum(1)
""",
)

refusal(
    "a window of bytes begins before the argument that it is of",
    "goes past the edges of its source",
    """
def make_args():
    a0 = torch.randn((3, 3), dtype=torch.float32)[1:-1]
    a1 = a0.squeeze(-2)
    a2 = a1.detach().requires_grad_()
    a3 = a0.expand((2, 1, 3))
    return (a3, a1, a2)


def f(x0, x1, x2):
    v0 = x2.view(torch.int16)
    v1 = v0.as_strided((3,), (4,), 3)
    v3 = v1.unflatten(0, (1, -1))
    with torch.no_grad():
        x2.mul_(x2)
    v3.bernoulli_(0.5)
    return ()
""",
)

refusal(
    "a view of an argument is taken, that detached in place and written",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 1, 2), dtype=torch.float32),)


def f(x0):
    x0.requires_grad_()
    v3 = x0[..., 2:4]
    x0.detach_()
    x0.unfold(0, x0.shape[0], 1).mul_(-1)
    return v3
""",
)

regression(
    "a write of no elements to an argument that begins late in its memory, then one through a window",
    """
def make_args():
    a0 = torch.randn((8,), dtype=torch.float64)[1:-1]
    return (a0,)


def f(x0):
    x0[6:6] = torch.full((0,), 2, dtype=torch.float64)
    x0.unfold(0, x0.shape[0], 1).mul_(0.5)
    return ()
""",
)

refusal(
    "gradients by a view of an argument that is only detached, as its memory is written through `.data`",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float64)).detach().requires_grad_()
    a1 = a0.squeeze()
    a2 = a0.data
    return (a0, a1, a2)


def f(x0, x1, x2):
    x2.copy_(x1)
    x0.detach_()
    return ()
""",
)

refusal(
    "a list has an argument twice that is a view, and a view of it is returned",
    "`_foreach_` operator at",
    """
def make_args():
    a0 = torch.randn((4, 1, 2), dtype=torch.float32)[1:-1]
    a1 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_()
    return (a1, a0)


def f(x0, x1):
    v5 = x1.view((1, 2, 2))
    torch._foreach_add_([x1, x1], [x0, x0])
    return v5
""",
)

regression(
    "the backward by a view of a view made under no_grad, which is another argument, raises",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float64)).detach().requires_grad_()
    with torch.no_grad():
        a1 = a0.permute((0, 1))
    a2 = a1.as_strided((2, 2), (1, 0), 0)
    return (a0, a1, a2)


def f(x0, x1, x2):
    v5 = x2.softmax(0)
    v5.fill_(0.5)
    return v5
""",
)

refusal(
    "a view made under no_grad beside a view of another dtype that was written with a history",
    "in memory that is detached",
    """
def make_args():
    a0 = (torch.randn((1, 2), dtype=torch.float32).expand((2, 2))).detach().requires_grad_() * 1
    a2 = torch.randn((1, 2, 2), dtype=torch.float64).expand((3, 2, 2))
    return (a2, a0, a0)


def f(x0, x1, x2):
    v0 = x1.view(torch.float64)
    v1 = v0.permute((0, 1))
    v0.fill_(x2.sum())
    with torch.no_grad():
        v4 = x1.view((4,))
    return (
        x2,
        v4,
        v1,
    )
""",
)

regression(
    "the gradient by one output, the other a view made under no_grad",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_()
    return (a0,)


def f(x0):
    v0 = x0.sum()
    v3 = torch.stack([x0, x0])
    with torch.no_grad():
        v13 = v3[..., 0:1:2]
    return (v0, v13)
""",
)

regression(
    "a list has the real part of an argument and a view of that",
    """
def make_args():
    a0 = (torch.randn((1, 1, 2), dtype=torch.complex64).expand((2, 1, 2))).detach().requires_grad_()
    a1 = (torch.randn((2, 2), dtype=torch.complex64)).detach().requires_grad_() * 1
    a2 = a1.real
    a3 = (torch.randn((6,), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a2, a0, a2, a3)


def f(x0, x1, x2, x3):
    v0 = x0.reshape((4,))
    v1 = torch.stack([v0, v0.expand_as(v0)])
    v2 = v0.detach()
    torch._foreach_mul_([x2[:1], x2], 2)
    v4 = torch.cat([x2, x2], -1)
    v5 = x3.chunk(2, 0)
    v6 = v0.unbind(0)
    with torch.no_grad():
        v0[..., 1:].add_(v0[..., :-1])
    return v5[0]
""",
)

regression(
    "an index of numbers is a constant that the forward gives, and nothing else",
    """
def make_args():
    a0 = (torch.randint(0, 2, (1, 3)) > 0).expand((2, 3))
    return (a0,)


def f(x0):
    v1 = x0[[0, 0]]
    return ()
""",
)
