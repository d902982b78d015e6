"""Programs with gradients through `set_`, `.data`, `detach_` and views made under no_grad that once differed."""

from __future__ import annotations

from tests.parity.stored import Stored

MEMORY = Stored()
regression = MEMORY.regression
refusal = MEMORY.refusal


regression(
    "a view made under no_grad is sorted, its base is never used",
    """
def make_args():
    a0 = (torch.randn((4,), dtype=torch.float32)).detach().requires_grad_()
    with torch.no_grad():
        a2 = a0[..., 0:2]
    return (a0, a2)


def f(x0, x1):
    v0 = x1.sort(-1)
    return v0
""",
)


regression(
    "a view of a view made under no_grad is read, and their base written",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    with torch.no_grad():
        a1 = a0.view((1, 6, 1))
    a3 = a1.view((1, 1, 6))
    return (a0, a3)


def f(x0, x1):
    x0.fill_(x1.sum())
    return ()
""",
)


regression(
    "a backward from one of several outputs raises that leads to no argument",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a0, a0)


def f(x0, x1):
    v0 = x1.mT
    with torch.no_grad():
        v3 = v0.view_as(v0)
    v6 = v3 ** 2
    x0.lerp_(torch.full((2, 1, 2), 2, dtype=torch.float32), 0.5)
    return (v0, v6)
""",
)


refusal(
    "a view of a view made under no_grad is marked, then its base detached",
    "changes sizes, dtype, history",
    """
def make_args():
    a0 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    with torch.no_grad():
        a1 = a0[0]
    a2 = a0[..., 1:3:2]
    a3 = a1.flatten()
    return (a0, a2, a3)


def f(x0, x1, x2):
    x2.requires_grad_()
    x0.detach_()
    return x2
""",
)


refusal(
    "an argument is resized, given other data and marked",
    "was exchanged or resized in place",
    """
def make_args():
    a0 = torch.randn((), dtype=torch.float32)
    return (a0,)


def f(x0):
    x0.resize_(1)
    x0.data = x0.data.clone()
    x0.requires_grad_()
    return ()
""",
)


refusal(
    "arguments are set to one another in turn",
    "gives a tensor other memory",
    """
def make_args():
    a0 = torch.empty_strided((2, 2), (1, 2), dtype=torch.int32).copy_(torch.randint(-3, 4, (2, 2), dtype=torch.int32))
    a1 = a0.detach()
    a2 = a0.as_strided((3,), (1,), 1)
    return (a2, a2, a1, a0)


def f(x0, x1, x2, x3):
    x2.set_(x0)
    x3.resize_(3)
    x1.set_(x3)
    return ()
""",
)


regression(
    "a power of an argument whose data is written",
    """
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = torch.randn((4, 2), dtype=torch.float32)[1:-1]
    return (a1, a0, a0, a0)


def f(x0, x1, x2, x3):
    v0 = x3.data
    v1 = x3 ** 2
    v2 = x3.data
    v2.relu_()
    return (v0, v1)
""",
)


regression(
    "a power of an argument that is written through its data",
    """
def make_args():
    a0 = (torch.randn((3, 2, 2), dtype=torch.complex64)).detach().requires_grad_()
    a1 = a0.data
    return (a0, a1, a1)


def f(x0, x1, x2):
    v0 = x0 ** 2
    torch.mul(x2, 2, out=x2)
    return (v0, x1)
""",
)


refusal(
    "a view by strides that leaves the view it is taken of, which is written",
    "goes past the edges of its source",
    """
def make_args():
    a0 = (torch.randn((4, 3), dtype=torch.float32)[1:-1]).detach().requires_grad_() * 1
    return (a0, a0)


def f(x0, x1):
    x0.view(-1).clamp_(-1, 1)
    v1 = x1.as_strided((3,), (1,), 0)
    v2 = v1.as_strided((1,), (1,), 4)
    v1.bernoulli_(0.5)
    return v2
""",
)


regression(
    "a view made under no_grad is of no use once its base is written",
    """
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.float64)).detach().requires_grad_() * 1
    a1 = (torch.randn((5, 2, 2), dtype=torch.complex64)[1:-1]).detach().requires_grad_() * 1
    with torch.no_grad():
        a2 = a0.t()
    return (a0, a2, a1, a1)


def f(x0, x1, x2, x3):
    x0.mul_(x0)
    torch._foreach_mul_([x3[:1], x3], 2)
    v5 = x0.flatten()
    return v5
""",
)


regression(
    "an argument is multiplied by its own data",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = a0.data
    a2 = a1.detach()
    return (a2, a2, a0)


def f(x0, x1, x2):
    x2.mul_(x1)
    return {'k0': x1, 'k1': x2, 'k2': x0, 'k3': x1}
""",
)

regression(
    "a slice that is filled with random numbers is returned",
    """
def make_args():
    a0 = (torch.randint(0, 2, (2, 3)) > 0)
    with torch.no_grad():
        a1 = torch.empty(0, dtype=torch.bool).set_(a0.untyped_storage(), 2, (3,), (1,))
    a2 = (torch.randn((1, 3), dtype=torch.float32)).detach().requires_grad_()
    a3 = a0.unsqueeze(0)
    return (a0, a1, a2, a3)


def f(x0, x1, x2, x3):
    v0 = torch.rand((2, 3))
    v1 = v0[..., 0:1:2]
    v1.uniform_()
    return [v1, (), {'n': 3, 'z': None}]
""",
)

# What PyTorch itself gives no sound gradients for, or needs the old and the new tensor at once: refused by name.


refusal(
    "a list with a view twice",
    "of only one write",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    v1 = x0[...]
    torch._foreach_add_([v1, v1], [x0, x0])
    v5 = v1.permute((1, 0))
    return v5
""",
)


refusal(
    "resized, marked and differentiated",
    "need a gradient",
    """
def make_args():
    a0 = torch.randn((4,), dtype=torch.complex64)
    a1 = a0.detach().requires_grad_()
    a2 = torch.empty(0, dtype=torch.complex64).set_(a1.untyped_storage(), 0, (1,), (1,))
    return (a2, a0)


def f(x0, x1):
    x1.resize_(3)
    x1.requires_grad_()
    v7 = x1.sum(-1)
    return v7
""",
)

regression(
    "a copy of an argument is returned, and a view of that is filled",
    """
def make_args():
    x = torch.randn(())
    return (x, x.view(1))


def f(x, w):
    v = x.sum()
    v.copy_(x)
    w.fill_(0.5)
    return v
""",
)
