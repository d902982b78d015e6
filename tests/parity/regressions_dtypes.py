"""More programs that once told compiled from eager: views of other dtypes and of conjugates, strides, values that two
tensors have.
"""

from __future__ import annotations

from tests.parity.stored import Stored

DTYPES = Stored()
regression = DTYPES.regression
refusal = DTYPES.refusal


regression(
    "a write through a view as integers moves the counter of what was saved",
    """
def make_args():
    a1 = (torch.randn((4, 1, 2), dtype=torch.float32)[1:-1]).detach().requires_grad_() * 1
    a2 = a1[None]
    with torch.no_grad():
        a3 = a2.view(torch.int16)
    return (a1, a2, a3)


def f(x0, x1, x2):
    x1 += -1
    v1 = torch.nn.functional.layer_norm(x1, x1.shape[-1:])
    x2[..., 1:].add_(x2[..., :-1])
    return (x2, v1, x0)
""",
)

refusal(
    "an imaginary part is transposed in place",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = (torch.randn((2, 3), dtype=torch.complex64)).detach().requires_grad_() * 1
    a1 = a0.imag
    return (a1, a0)


def f(x0, x1):
    x0.t_()
    return x1
""",
)

regression(
    "out= is the conjugate of an argument as complex",
    """
def make_args():
    a0 = (torch.randn((1, 2, 2), dtype=torch.float64).expand((3, 2, 2))).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    v1 = torch.view_as_complex(x0)
    v2 = v1.conj()
    with torch.no_grad():
        torch.mul(v1, 2, out=v2)
    return ()
""",
)

regression(
    "the conjugate of a result is written",
    """
def make_args():
    return (torch.randn((2, 2), dtype=torch.complex64),)


def f(x0):
    v1 = torch.cat([x0, x0], 0)
    v4 = v1.conj()
    v4.mul_(0)
    return v1
""",
)

regression(
    "the conjugate of an argument as complex is written, with gradients",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a1 = torch.view_as_complex(a0)
    return (a1, a0)


def f(x0, x1):
    v3 = x0.mT.conj()
    v3.masked_fill_(v3 == 0.5, 0.5)
    return ()
""",
)

regression(
    "the real part is drawn of an argument that starts late in its memory, and was filled",
    """
def make_args():
    return (torch.randn((8,), dtype=torch.complex64)[1:-1],)


def f(x0):
    x0.fill_(2)
    v3 = x0.real
    v3.bernoulli_(0.5)
    return x0
""",
)

regression(
    "numbers drawn like a part of an argument have its strides",
    """
def make_args():
    return (torch.randn((1, 3), dtype=torch.float32),)


def f(x0):
    v2 = x0.tensor_split(2, 1)
    v3 = torch.rand_like(v2[1])
    v3.bernoulli_(0.5)
    return v3
""",
)

regression(
    "windows of a diagonal are written that was drawn",
    """
def make_args():
    a2 = (torch.randn((2, 2), dtype=torch.float32)).detach().requires_grad_() * 1
    a3 = a2.diagonal(0)
    return (a2, a3)


def f(x2, x3):
    x3.uniform_()
    v2 = x3.reshape((-1, 1))
    v2.unfold(0, v2.shape[0], 1).mul_(2)
    v4 = x3.sin()
    return torch.bernoulli(v4.sigmoid())
""",
)

regression(
    "a saved value is copied into an output",
    """
def make_args():
    a0 = (torch.randn((), dtype=torch.float32)).detach().requires_grad_() * 1
    return (a0,)


def f(x0):
    v0 = x0.sigmoid()
    v1 = x0.clone()
    v2 = v0.to(torch.float32)
    v1.copy_(v2)
    return v1
""",
)

refusal(
    "a detached argument is marked, then given other memory",
    "gives other memory to a view",
    """
def make_args():
    a0 = torch.randn((1, 3), dtype=torch.float32)
    return (a0, a0)


def f(x0, x1):
    v1 = x1.detach()
    v1.requires_grad_()
    v1.data = v1.data.clone()
    return v1
""",
)

refusal(
    "a view is taken between two writes to what is marked later",
    "`requires_grad` of its base changes in place",
    """
def make_args():
    a0 = torch.randn((2, 2), dtype=torch.float32)
    return (a0, a0, a0, a0)


def f(x0, x1, x2, x3):
    x2.mul_(0.5)
    v1 = x1.permute((1, 0))
    x3.lerp_(x0, 0.5)
    x0.requires_grad_()
    return v1
""",
)

refusal(
    "a list has an argument twice that shares memory with another",
    "`_foreach_` operator at",
    """
def make_args():
    a0 = torch.randn((4, 1, 2), dtype=torch.float32)[1:-1]
    a1 = a0.detach().requires_grad_()
    return (a0, a1)


def f(x0, x1):
    torch._foreach_add_([x0, x0], [x1, x1])
    return ()
""",
)

regression(
    "a saved argument is in one memory with another whose sizes change",
    """
def make_args():
    a0 = torch.randn(4)
    return (a0[:2], a0[2:], torch.randn(2).requires_grad_())


def f(x0, x1, x2):
    x0.unsqueeze_(0)
    return (x2 * x1).sum()
""",
)

regression(
    "what was saved moves its version with a part that has no elements",
    """
def make_args():
    a0 = (torch.randn((2, 2), dtype=torch.complex64)).detach().requires_grad_()
    a1 = a0[1:1:2]
    return (a1, a0)


def f(x0, x1):
    x0.detach().add_(2)
    v6 = x1 ** 2
    return v6
""",
)

regression(
    "the imaginary part of a conjugate is read after a write to a part of that",
    """
def make_args():
    a0 = (torch.randn((2, 1, 2), dtype=torch.complex64)).detach().requires_grad_()
    a1 = a0.detach()
    return (a1,)


def f(x0):
    v0 = x0.conj()
    v2 = v0.imag
    v4 = v0.unbind(1)
    v4[0].index_add_(0, torch.tensor([1]), torch.ones((1, 2), dtype=torch.complex64))
    v12 = v2.flatten()
    v12.mul_(0.5)
    return ()
""",
)

regression(
    "a view of another dtype is written that begins late in its memory, then its memory through a window",
    """
def make_args():
    a0 = torch.randn((), dtype=torch.complex64)
    a2 = torch.randn((2, 2), dtype=torch.float64)
    return (a0, a2)


def f(x0, x2):
    v1 = x2.unbind(-2)
    v3 = torch.view_as_complex(v1[1])
    v3.mul_(x0)
    v7 = v1[1].unsqueeze(0)
    v7.unfold(0, v7.shape[0], 1).mul_(0.5)
    return ()
""",
)

regression(
    "booleans that nobody reads again are multiplied by a number in lists, in overlapping parts",
    """
def make_args():
    return (torch.ones((2, 2), dtype=torch.bool),)


def f(x):
    v = x.flip(1)
    torch._foreach_mul_([v[:1], v], 2)
    return ()
""",
)
