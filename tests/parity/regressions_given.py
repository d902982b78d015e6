"""Programs that once told compiled from eager: tensors that take over memory, and what was made of them before."""

from __future__ import annotations

from tests.parity.stored import SET_IN_PLACE, Stored

GIVEN = Stored()
regression = GIVEN.regression
refusal = GIVEN.refusal

regression(
    "a backward that only leads to a view made under no_grad raises, beside one that does not",
    """
def make_args():
    a0 = (torch.randn((8,), dtype=torch.float32)[1:-1]).detach().requires_grad_()
    a1 = (torch.empty_strided((2, 1, 2), (1, 2, 2), dtype=torch.float32).copy_(torch.randn((2, 1, 2), dtype=torch.float32))).detach().requires_grad_() * 1
    with torch.no_grad():
        a3 = a0[0:0]
    return (a0, a1, a3)


def f(x0, x1, x2):
    v0 = x2.relu()
    v0.add_(v0)
    x1.masked_fill_(x1 == -1, -1)
    return v0
""",
)

refusal(
    "an argument that is as_strided past the edges of a view is written",
    "goes past the edges of its source",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32).expand((1, 3))).detach().requires_grad_() * 1
    a1 = a0.diagonal(0)
    a2 = a1.as_strided((2,), (1,), 1)
    return (a0, a2)


def f(x0, x1):
    x1.copy_(x1.flip(0))
    return x0
""",
)

refusal(
    "an argument is resized and marked, and a view taken in between is written",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.float32)
    return (a0, a0)


def f(x0, x1):
    x0.resize_(3)
    v2 = x1.view_as(x1)
    v2.cumsum_(0)
    x1.requires_grad_()
    return v2
""",
)

refusal(
    "an argument is given other memory, marked, and a view of what it was is returned",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = torch.empty_strided((3, 2, 2), (1, 3, 6), dtype=torch.float32).copy_(torch.randn((3, 2, 2), dtype=torch.float32))
    a1 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    a2 = a0
    return (a0, a1, a2)


def f(x0, x1, x2):
    v1 = x2.split(2, 2)
    x0.data = x0.data.clone()
    x0.zero_()
    v5 = v1[0].unsqueeze(2)
    x0.requires_grad_()
    return v5
""",
)

regression(
    "bytes of a marked view are resized",
    """
def make_args():
    a0 = torch.randn((2, 2), dtype=torch.float32)
    a1 = a0.squeeze(1)
    return (a1, a0)


def f(x0, x1):
    x0.requires_grad_()
    x1[[0]] = 0
    v4 = x0.view(torch.uint8)
    v4.resize_(16)
    return v4
""",
)

refusal(
    "an argument takes over an expanded leaf and is written",
    SET_IN_PLACE,
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = (torch.randn((1, 1, 2), dtype=torch.float32).expand((2, 1, 2))).detach().requires_grad_()
    return (a0, a1)


def f(x0, x1):
    x0.set_(x1)
    x0[[0]] = 0
    return ()
""",
)

refusal(
    "a view is taken between a write that its version does not count and detach_",
    "in memory that is detached",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_()
    a1 = torch.empty(0, dtype=torch.float32).set_(a0.untyped_storage(), 0, (1,), (1,))
    return (a0, a1)


def f(x0, x1):
    torch._foreach_add_([x1, x1], [x1, x1])
    v2 = x0.unsqueeze(0)
    x0.detach_()
    x0.view(-1).clamp_(-1, 1)
    return v2
""",
)

regression(
    "a conjugate and its sum are returned",
    """
def make_args():
    a1 = (torch.randn((2, 1, 2), dtype=torch.complex64)).detach().requires_grad_()
    return (a1,)


def f(x0):
    v1 = x0.conj()
    v4 = v1.sum()
    return (v1, v4)
""",
)

refusal(
    "what .data gives is written with gradients and returned",
    "in memory that is detached",
    """
def make_args():
    a0 = (torch.empty_strided((3, 2, 2), (1, 3, 6), dtype=torch.complex64).copy_(torch.randn((3, 2, 2), dtype=torch.complex64))).detach().requires_grad_()
    a1 = a0[:-1]
    return (a1,)


def f(x0):
    v0 = x0.data
    v0.add_(x0)
    return v0
""",
)

regression(
    "parts of a tensor that is marked are returned, and it is written past autograd",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float64)).detach().requires_grad_() * 1
    return (a0, a0)


def f(x0, x1):
    with torch.no_grad():
        v3 = torch.stack([x0, x1.expand_as(x0)])
    v3.requires_grad_()
    v5 = v3.tensor_split(2, 0)
    v3.detach().add_(0.5)
    return v5
""",
)

refusal(
    "parts of a view are returned, whose base is detached and written",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((4,), dtype=torch.complex64)).detach().requires_grad_() * 1
    a1 = a0.squeeze()
    return (a1, a0)


def f(x0, x1):
    x0.neg_()
    v3 = x1.split(2, -1)
    x1.detach_()
    x1.add_(0.5)
    return v3
""",
)

refusal(
    "a view made under no_grad is viewed once its base is detached",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a1 = (torch.randn((6,), dtype=torch.float32)).detach().requires_grad_()
    return (a1,)


def f(x0):
    with torch.no_grad():
        v2 = x0[-5]
    x0.detach_()
    v6 = v2.flatten()
    return v6
""",
)

refusal(
    "an expanded leaf is written after a view of it was taken",
    "goes past the edges of its source",
    """
def make_args():
    a1 = (torch.randn((1, 2, 2), dtype=torch.float64).expand((3, 2, 2))).detach().requires_grad_()
    return (a1, a1)


def f(x0, x1):
    v2 = x0.squeeze(-3)
    with torch.no_grad():
        x1.masked_fill_(x1 > 0, 2)
    v7 = v2 + x0
    return v7
""",
)

regression(
    "memory that ends within an element of another dtype is written",
    """
def make_args():
    a1 = torch.randn((1, 3), dtype=torch.float32)
    a2 = torch.empty(0, dtype=torch.float32).set_(a1.untyped_storage(), 0, (2,), (1,))
    return (a1, a2)


def f(x0, x1):
    v0 = x1.view(torch.float64)
    v0.unfold(0, v0.shape[0], 1).mul_(-1)
    return ()
""",
)

regression(
    "a view made under no_grad, of one that was, is taken after a write",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.complex64)).detach().requires_grad_()
    return (a0,)


def f(x0):
    with torch.no_grad():
        v0 = x0[0:2:2]
    with torch.no_grad():
        x0.index_fill_(0, torch.tensor([0]), 0)
    with torch.no_grad():
        v2 = v0.unfold(0, 1, 2)
    return v2
""",
)

regression(
    "a view made under no_grad is written past autograd, and viewed",
    """
def make_args():
    a0 = (torch.randn((3, 2, 2), dtype=torch.float32)).detach().requires_grad_()
    with torch.no_grad():
        a2 = a0[...]
    return (a2,)


def f(x0):
    x0.detach().add_(0)
    v1 = x0.unfold(0, 2, 2)
    return ()
""",
)

regression(
    "an empty part is written before what a backward needs is saved",
    """
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_()
    a1 = a0.view(torch.float64)
    return (a1, a0)


def f(x0, x1):
    x0[..., 1:].add_(x0[..., :-1])
    v8 = torch.nn.functional.layer_norm(x1, x1.shape[-1:])
    v11 = v8.softmax(1)
    return v11
""",
)

regression(
    "a view of a marked view is returned, and written before and after",
    """
def make_args():
    a0 = torch.randn((2, 2), dtype=torch.complex64)
    a1 = a0.permute((1, 0))
    return (a1, a0)


def f(x0, x1):
    x0.add_(0)
    x0.requires_grad_()
    v2 = x0.narrow(0, 1, 1)
    with torch.no_grad():
        x0.mul_(2)
    return v2
""",
)

refusal(
    "parts are taken of a leaf between detach_ and a mark",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a1 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_()
    return (a1,)


def f(x0):
    x0.detach_()
    v1 = x0.unbind(0)
    x0.requires_grad_()
    return v1
""",
)

refusal(
    "a view made under no_grad is viewed, marked, and computed with",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    with torch.no_grad():
        a1 = a0.t()
    return (a0, a1, a1)


def f(x0, x1, x2):
    v0 = x2.diagonal(0)
    x1.requires_grad_()
    v2 = -x1
    return (v0, v2)
""",
)

regression(
    "an argument is filled with the sum of a view made under no_grad",
    """
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = (torch.randn((2, 2), dtype=torch.complex64)).detach().requires_grad_() * 1
    with torch.no_grad():
        a2 = a0.diagonal(-1)
    a3 = a1.imag
    return (a1, a2, a3, a2)


def f(x0, x1, x2, x3):
    x0.fill_(x3.sum())
    return x2
""",
)

refusal(
    "an output whose gradient leads nowhere is changed in place",
    "makes the leaf",
    """
def make_args():
    a0 = torch.randn((), dtype=torch.float64)
    a1 = torch.randn((5, 2, 2), dtype=torch.float32)[1:-1]
    return (a1, a0)


def f(x0, x1):
    v1 = x0.tensor_split(2, 1)
    v1[1].requires_grad_()
    v4 = v1[1].flip(-2)
    v4.unsqueeze_(2)
    return [x1, v4, v1[1]]
""",
)

refusal(
    "an argument is given memory and written while a view of it is another argument",
    "changes sizes, dtype, history or memory in place",
    """
def make_args():
    a0 = (torch.empty_strided((1, 3), (1, 1), dtype=torch.float32).copy_(torch.randn((1, 3), dtype=torch.float32))).detach().requires_grad_() * 1
    a1 = a0[0:1]
    a3 = (torch.randint(0, 2, (4,)) > 0)
    return (a3, a1, a0)


def f(x0, x1, x2):
    x2.data = x2.data.clone()
    x2[..., 0] = torch.full((1,), 2, dtype=torch.float32)
    v4 = x1.sum(0)
    return v4
""",
)

refusal(
    "parts of marked data are returned",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((3, 2, 2), dtype=torch.float32)
    a1 = a0.movedim(1, 0)
    a2 = a0.unbind(0)[0]
    a3 = torch.empty_strided((1, 3), (1, 1), dtype=torch.int32).copy_(torch.randint(-3, 4, (1, 3), dtype=torch.int32))
    return (a1, a3, a0, a2)


def f(x0, x1, x2, x3):
    v2 = x3.data
    v2.requires_grad_()
    v4 = v2.split(2, 0)
    return v4
""",
)

refusal(
    "a part taken under no_grad is viewed once its base is marked",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((2, 1, 2), dtype=torch.float32)
    return (a0,)


def f(x0):
    with torch.no_grad():
        v0 = x0.tensor_split(2, 0)
    x0.requires_grad_()
    v3 = v0[0].unsqueeze(1)
    return v3
""",
)

regression(
    "a window past the elements of a conjugate is read",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64)[::3].conj()
    return (a0,)


def f(x0):
    v0 = x0.as_strided((2,), (1,), 0)
    return v0.sum()
""",
)

regression(
    "a window past the elements of a conjugate is read, expanded",
    """
def make_args():
    a0 = torch.randn((1, 4), dtype=torch.complex64).expand((2, 4))[:, :1].conj()
    return (a0,)


def f(x0):
    v0 = x0.as_strided((2,), (1,), 0)
    return v0.sum()
""",
)

regression(
    "a window past the elements of a conjugate is read, negated",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64).conj().imag[::2]
    return (a0,)


def f(x0):
    v0 = x0.as_strided((2,), (1,), 0)
    return v0.sum()
""",
)

refusal(
    "a window past the elements of a conjugate is written",
    "goes past the edges of its source",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64)[::3].conj()
    return (a0,)


def f(x0):
    v0 = x0.as_strided((2,), (1,), 0)
    v0.mul_(1 + 2j)
    return v0.sum()
""",
)

regression(
    "a window past the elements of a conjugate is written, negated",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64).conj().imag[::2]
    return (a0,)


def f(x0):
    v0 = x0.as_strided((2,), (1,), 0)
    v0.mul_-2
    return v0.sum()
""",
)

refusal(
    "a window past the edges of a part is reshaped",
    "goes past the edges of its source",
    """
def make_args():
    a1 = (torch.randn((3, 2, 2), dtype=torch.float64)).detach().requires_grad_() * 1
    return (a1,)


def f(x0):
    v1 = x0.narrow(0, 1, 1)
    v4 = v1.as_strided((3, 3), (1, 0), 0)
    v4.squeeze_()
    return v4
""",
)

refusal(
    "numbers of another dtype are marked, and a view of them is returned",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randint(-3, 4, (4,), dtype=torch.int64)
    return (a0,)


def f(x0):
    v0 = x0.view(torch.float32)
    v0.requires_grad_()
    x0[2] = torch.full((), 2, dtype=torch.int64).detach()
    v3 = v0.squeeze()
    return [v3, x0]
""",
)

refusal(
    "a view that is detached memory's is written under no_grad",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_()
    a1 = a0[0]
    return (a1, a0)


def f(x0, x1):
    x1.detach_()
    with torch.no_grad():
        v2 = x0.narrow(0, 1, 2)
    v2.addcmul_(v2, v2)
    return ()
""",
)

refusal(
    "a window of an argument is returned, and that detached and marked",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((2, 3), dtype=torch.complex64)
    return (a0, a0)


def f(x0, x1):
    v0 = x1.as_strided((1,), (1,), 3)
    x1.detach_()
    x0.requires_grad_()
    return v0
""",
)

refusal(
    "what reshape copied is written, and returned beside a view of it, with other sizes",
    "or copied by `reshape`",
    """
def make_args():
    a0 = (torch.randn((1, 1, 2), dtype=torch.float32).expand((2, 1, 2))).detach().requires_grad_()
    a1 = a0.unfold(1, 1, 2)
    return (a1, a1, a0)


def f(x0, x1, x2):
    v0 = x2.reshape((1, 4, 1))
    v0.fill_(x1.sum())
    v5 = v0.detach()
    v0.unsqueeze_(0)
    return {'k0': v5, 'k1': x0, 'k2': v0}
""",
)
