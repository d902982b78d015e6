"""More programs that once told compiled from eager, or that are refused: memory given away, detach_ and lists."""

from __future__ import annotations

from tests.parity.stored import Stored

STORAGE = Stored()
regression = STORAGE.regression
refusal = STORAGE.refusal


regression(
    "a write through an alias that autograd does not know, beside a view",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_()
    a1 = a0[1:]
    a3 = a1.data
    return (a1, a3)


def f(x0, x1):
    v5 = x1.sigmoid()
    v6 = v5.as_strided((2,), (1,), 0)
    v8 = x0.sum()
    x1[[0]] = 0.5
    v6[0:2:2] = v8
    v13 = v6[0]
    return v13
""",
)

regression(
    "a base is zeroed under a view that is an argument too",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.unsqueeze(0)
    return (a1, a1, a0)


def f(x0, x1, x2):
    x2.zero_()
    v1 = x0 * 2
    return v1
""",
)

regression(
    "an argument is written that shares its version counter with a leaf saved for backward",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.detach().requires_grad_()
    return (a1, a0)


def f(x0, x1):
    v1 = x1.data
    x1.mul_(x0)
    return v1
""",
)

regression(
    "a squeezed dimension that is none, under a view made with others, beside a write",
    """
def make_args():
    a0 = (torch.empty_strided((2, 3), (1, 2), dtype=torch.float32).copy_(torch.randn((2, 3), dtype=torch.float32))).detach().requires_grad_() * 1
    a1 = a0.narrow(-2, 0, 1)
    a2 = a1.detach()
    a3 = torch.randn((6,), dtype=torch.float32)
    return (a2, a0, a3, a1)


def f(x0, x1, x2, x3):
    v2 = x3.to(torch.float64)
    v6 = v2.squeeze(1)
    v7 = v6.unbind(1)
    v8 = v7[0].to(torch.float64)
    v7[2].detach().add_(0)
    return v8
""",
)

regression(
    "sizes changed in place of what has no part in the gradients",
    """
def make_args():
    a0 = (torch.empty_strided((2, 2), (1, 2), dtype=torch.complex64).copy_(torch.randn((2, 2), dtype=torch.complex64))).detach().requires_grad_()
    a1 = (torch.randint(0, 2, (4,)) > 0)
    a3 = torch.empty_strided((2, 1, 2), (1, 2, 2), dtype=torch.int64).copy_(torch.randint(-3, 4, (2, 1, 2), dtype=torch.int64))
    return (a3, a0, a1)


def f(x0, x1, x2):
    x2.unsqueeze_(1)
    v4 = x1.narrow(0, 0, 2)
    v6 = v4 * v4.shape[0]
    return v6
""",
)

regression(
    "scatter_ of a tensor into itself",
    """
def make_args():
    a0 = (torch.empty_strided((2, 3), (1, 2), dtype=torch.float64).copy_(torch.randn((2, 3), dtype=torch.float64))).detach().requires_grad_()
    a1 = a0.unsqueeze(2)
    a2 = a0[None]
    a3 = torch.randn((1, 3), dtype=torch.float64)
    return (a0, a1, a2, a3)


def f(x0, x1, x2, x3):
    v0 = torch.where(x3 > 0, x3, x3)
    v0.scatter_(0, torch.full((1, 3), 0), v0)
    return ()
""",
)

refusal(
    "a tensor is given other memory, and a view of the old is returned beside it",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = (torch.empty_strided((3, 2, 2), (1, 3, 6), dtype=torch.float32).copy_(torch.randn((3, 2, 2), dtype=torch.float32))).detach().requires_grad_() * 1
    a1 = a0.mT
    return (a1,)


def f(x0):
    v2 = x0 * x0.shape[0]
    v4 = v2.tensor_split(2, 2)
    v2.data = v2.data.clone()
    return [v2, v4[0]]
""",
)

refusal(
    "a view taken before its base is marked, beside one taken before a write",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((6,), dtype=torch.float32)
    a1 = a0.unfold(0, 5, 2)
    return (a0, a1)


def f(x0, x1):
    v0 = x0.view((6,))
    v0.masked_fill_(v0 == 2, 2)
    v2 = x1.chunk(2, 1)
    x1.requires_grad_()
    return (v0, v2)
""",
)

refusal(
    "an argument with a history is transposed in place and nothing else",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    x0.t_()
    return ()
""",
)

refusal(
    "a view is stacked whose base was written and detached",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.transpose(0, 0)
    return (a1, a1, a0, a0)


def f(x0, x1, x2, x3):
    x2.zero_()
    x3.detach_()
    v2 = torch.stack([x0, x3.expand_as(x0)])
    return ()
""",
)

refusal(
    "a view is twice in one list that is written",
    "`_foreach_` operator at",
    """
def make_args():
    a0 = (torch.randn((4, 3), dtype=torch.float32)[1:-1]).detach().requires_grad_() * 1
    a1 = a0[...]
    a2 = (torch.randn((2, 3), dtype=torch.float64)).detach().requires_grad_()
    return (a0, a2, a1, a1)


def f(x0, x1, x2, x3):
    torch._foreach_add_([x2, x2], [x3, x3])
    return ()
""",
)

refusal(
    "a tensor is resized, a view of it is taken, and it is made to require grad",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.float32)
    return (a0,)


def f(x0):
    v0 = x0.clone()
    v0.resize_(2)
    v4 = v0.view(2)
    v0.requires_grad_()
    return v4.view_as(v4)
""",
)

refusal(
    "several views made at once of memory that is detached, marked, and no argument's any more",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float64)).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    x0.data = x0.data.clone()
    v1 = x0.detach()
    v2 = v1.expand((2,))
    v1.requires_grad_()
    return v2.split(1, 0)
""",
)

refusal(
    "gradients by a view of a leaf that is detached in place, and a view made under no_grad is another argument",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.complex64).requires_grad_()
    a1 = a0.permute((1, 0))
    with torch.no_grad():
        a2 = a1[None]
    return (a1, a0, a2)


def f(x0, x1, x3):
    v5 = x0[[0, 0]]
    x1.detach_()
    return v5
""",
)

refusal(
    "a view of what an argument was given, which is detached then",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 3), requires_grad=True),)


def f(x0):
    x0.data = x0.data.clone()
    v0 = x0[0]
    x0.detach_()
    return v0
""",
)

refusal(
    "a view of what an argument was, which is given other memory, written and detached",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn((2, 3), requires_grad=True) * 1,)


def f(x0):
    v0 = x0[0]
    x0.data = x0.data.clone()
    with torch.no_grad():
        x0.mul_(3)
    x0.detach_()
    return v0
""",
)

refusal(
    "a view made under no_grad of what was written with gradients and given other memory",
    "was exchanged or resized in place",
    """
def make_args():
    return (torch.randn((2, 3)), torch.randn((), requires_grad=True))


def f(x0, x1):
    x0.mul_(x1)
    with torch.no_grad():
        v0 = x0[:1]
    x0.data = x0.data.clone()
    return v0
""",
)

refusal(
    "several views made at once between two swaps",
    "was exchanged or resized in place",
    """
def make_args():
    return (torch.randn(2, 3), torch.randn(2, 3))


def f(x, y):
    x.data = y.data
    v = x.unbind(0)
    x.data, y.data = y.data, x.data
    return v, y
""",
)

regression(
    "a gradient of the sizes that a tensor had: the backward raises",
    """
def make_args():
    return (torch.randn(2, 3, requires_grad=True) * 1, torch.randn(2, 3))


def f(x, y):
    x.data = y[:1]
    return x * 2
""",
)

refusal(
    "a gradient of another dtype",
    "changes sizes, dtype, history or memory in place",
    """
def make_args():
    return (torch.randn(2, 3, requires_grad=True),)


def f(x):
    x.data = x.data.double()
    return x * 2
""",
)

regression(
    "`t_` of three dimensions",
    """
def make_args():
    return (torch.randn(2, 3, 4),)


def f(x):
    x.t_()
    return x * 2
""",
)

refusal(
    "set_ of a leaf to itself, before it is used",
    "gives a tensor other memory",
    """
def make_args():
    return (torch.randn((2, 2)).requires_grad_(),)


def f(x):
    with torch.no_grad():
        x.set_(x)
    return (x * 2, x[1])
""",
)

regression(
    "a list has a tensor twice, while another one is given other memory",
    """
def make_args():
    return (torch.randn((2, 2)).requires_grad_(),)


def f(x):
    v = x * 2
    x.data = x.data.clone()
    torch._foreach_add_([v, v], [v, v])
    return v
""",
)

regression(
    "a list has a tensor twice, and views of it are taken without gradients",
    """
def make_args():
    return (torch.randn((2, 2)).requires_grad_() * 1,)


def f(x):
    torch._foreach_add_([x, x], [x, x])
    with torch.no_grad():
        v = x.unbind(0)[1]
    return (v, v.flatten())
""",
)

refusal(
    "sizes change and elements are written between two assignments of other memory",
    "was exchanged or resized in place",
    """
def make_args():
    return (torch.randn((2, 2)),)


def f(x):
    x.data = x.data.clone()
    x.resize_(3)
    x[0] = 2
    x.data = x.data.clone()
    return x * 2
""",
)
