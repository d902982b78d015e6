"""Programs that once told compiled from eager, or are easy to get wrong: replayed on every run.

Each is plain Python: `make_args` and `f`, as `tests.parity.fuzz` prints them. Add new ones with a name that says what
was wrong.
"""

from __future__ import annotations

from tests.parity.regressions_autograd import AUTOGRAD
from tests.parity.regressions_dtypes import DTYPES
from tests.parity.regressions_given import GIVEN
from tests.parity.regressions_histories import HISTORIES
from tests.parity.regressions_memory import MEMORY
from tests.parity.regressions_storage import STORAGE
from tests.parity.regressions_views import VIEWS
from tests.parity.stored import Stored

OWN = Stored()
regression = OWN.regression
refusal = OWN.refusal


regression(
    "two overlapping halves of one base, the first one changed",
    """
def make_args():
    base = torch.randn(6)
    return (base[:4], base[2:])


def f(x0, x1):
    x0.mul_(2)
    return x1 + 1
""",
)

regression(
    "a view and its base, both changed",
    """
def make_args():
    base = torch.randn(2, 3)
    return (base, base.t())


def f(x0, x1):
    x1[0] = 5
    x0.add_(x1.t())
    return (x0[1], x1)
""",
)

regression(
    "memory shared behind the back of autograd",
    """
def make_args():
    a = torch.randn(6)
    b = torch.empty(0).set_(a.untyped_storage(), 1, (4,), (1,))
    return (a, b)


def f(x0, x1):
    x1.mul_(3)
    return x0.sum()
""",
)

regression(
    "integers written through a float's memory",
    """
def make_args():
    a = torch.randn(4)
    return (a, a.view(torch.int32))


def f(x0, x1):
    x1.zero_()
    return x0 + 1
""",
)

regression(
    "complex changed through its real view",
    """
def make_args():
    a = torch.randn(3, dtype=torch.complex64, requires_grad=True) * 1
    return (a, torch.view_as_real(a))


def f(x0, x1):
    x1.mul_(2)
    return x0 * x0
""",
)

regression(
    "a parameter changed through its detached self",
    """
def make_args():
    w = torch.randn(4, requires_grad=True)
    return (w, w.detach())


def f(x0, x1):
    y = x0 * 3
    x1.add_(1)
    return y
""",
)

regression(
    "what a backward needs is changed through a detached alias: the backward raises",
    """
def make_args():
    w = torch.randn(4, requires_grad=True)
    return (w, w.detach())


def f(x0, x1):
    y = x0.sin()
    x1.add_(1)
    return y
""",
)

regression(
    "the same non-leaf twice, changed through one of the two",
    """
def make_args():
    a = torch.randn(3, requires_grad=True) * 2
    return (a, a)


def f(x0, x1):
    x0.mul_(2)
    return x1.sin()
""",
)

regression(
    "a view of a non-leaf changed, the base returned",
    """
def make_args():
    a = torch.randn(3, 2, requires_grad=True) * 2
    return (a, a[1])


def f(x0, x1):
    x1.mul_(3)
    return (x0, x1, x0.t())
""",
)

regression(
    "outputs that view one intermediate, one of them changed",
    """
def make_args():
    return (torch.randn(2, 3, requires_grad=True),)


def f(x0):
    y = x0 * 2
    a, b = y.unbind(0)
    c = y.t()
    y.add_(1)
    return [a, (b, c), y]
""",
)

regression(
    "metadata changed under a view",
    """
def make_args():
    return (torch.randn(2, 3),)


def f(x0):
    v = x0[0]
    x0.t_()
    x0.unsqueeze_(0)
    v.fill_(7)
    return v
""",
)

regression(
    "a tensor without grad is given a history",
    """
def make_args():
    return (torch.zeros(3), torch.randn(3, requires_grad=True))


def f(x0, x1):
    x0.add_(x1)
    return None
""",
)

regression(
    "dropout in place on an argument under no_grad",
    """
def make_args():
    return (torch.randn(4, 4),)


def f(x0):
    with torch.no_grad():
        torch.nn.functional.dropout(x0, 0.5, inplace=True)
    return torch.rand_like(x0) + x0
""",
)

regression(
    "an expanded argument is read, an intermediate's expansion returned",
    """
def make_args():
    return (torch.randn(1, 3, requires_grad=True).expand(2, 3),)


def f(x0):
    y = x0.sum(0)
    return (x0, y.expand(2, 3), y[None])
""",
)

regression(
    "an error comes after a mutation",
    """
def make_args():
    return (torch.randn(2, 3),)


def f(x0):
    x0.add_(1)
    return x0.view(5)
""",
)

regression(
    "a leaf that requires grad is changed in place",
    """
def make_args():
    return (torch.randn(3, requires_grad=True),)


def f(x0):
    x0.add_(1)
    return x0
""",
)

regression(
    "a leaf that requires grad is changed under no_grad",
    """
def make_args():
    return (torch.randn(3, requires_grad=True),)


def f(x0):
    y = x0 * x0
    with torch.no_grad():
        x0.mul_(0.5)
    return y.sin()
""",
)

regression(
    "an output requires grad though its gradient leads to no input",
    """
def make_args():
    return (torch.randn(3, requires_grad=True),)


def f(x0):
    with torch.no_grad():
        v0 = x0.view_as(x0)
    return torch.nn.functional.dropout(v0, 0.5), v0.sin()[1:]
""",
)

refusal(
    "a row of an expanded tensor is written",
    "goes past the edges of its source",
    """
def make_args():
    a0 = torch.randn((1, 1, 2)).expand((2, 1, 2))
    return (a0,)


def f(x0):
    x0[1].fill_(0)
    return x0.reshape((1, 4, 1)).sin()
""",
)

regression(
    "a view taken under no_grad is returned, its base written afterwards",
    """
def make_args():
    return ((torch.randn((2, 3)).requires_grad_() * 1),)


def f(x0):
    with torch.no_grad():
        v0 = x0[1]
    x0.detach().add_(1)
    return v0
""",
)

regression(
    "two arguments are written with gradients, one leads nowhere",
    """
def make_args():
    a0 = torch.randn(4).requires_grad_() * 1
    a1 = torch.randn((2, 3)).requires_grad_() * 1
    return (a0[...], a1)


def f(x0, x1):
    x1[[0]] = 2
    x0.masked_fill_(x0 == 2, 2)
    return x1
""",
)

refusal(
    "a detached view gets a history of its own",
    "in memory that is detached",
    """
def make_args():
    return (torch.randn(3, requires_grad=True), torch.randn(3))


def f(x0, x1):
    v0 = x1.detach()
    v0.fill_(x0.sum())
    return v0
""",
)

refusal(
    "a view whose sizes change is written with gradients",
    "of a tensor that has views are changed in place",
    """
def make_args():
    a0 = torch.randn((3, 2, 2)).requires_grad_() * 1
    return (a0, a0.diagonal(0))


def f(x0, x1):
    x1.unsqueeze_(2)
    x1.add_(0.5)
    return ()
""",
)

regression(
    "a product with a complex number, whose conjugate the derivative takes",
    """
def make_args():
    return (torch.randn(3, requires_grad=True),)


def f(x0):
    return (x0 * complex(2.5, 1.0)).real
""",
)

regression(
    "windows of a tensor are written, each element several times",
    """
def make_args():
    return (torch.randn(6).requires_grad_() * 1, torch.randn(4, 3).requires_grad_())


def f(x0, x1):
    v0 = x0.unfold(0, 3, 1)
    v0.mul_(x1)
    v0.add_(x0[:3])
    return (x0, v0)
""",
)

regression(
    "columns are added to columns that they overlap",
    """
def make_args():
    return (torch.randn(3, 4),)


def f(x0):
    x0[:, 1:].add_(x0[:, :-1])
    return x0.sum(0)
""",
)

regression(
    "one tensor twice in a list that is written",
    """
def make_args():
    return (torch.randn(4), torch.randn(4))


def f(x0, x1):
    torch._foreach_add_([x0, x1, x0], [x1, x0, x1])
    return x0 + x1
""",
)

regression(
    "one row of an expanded tensor is masked",
    """
def make_args():
    return (torch.randn(1, 3).expand(2, 3),)


def f(x0):
    x0.masked_fill_(torch.tensor([[False], [True]]), 2.0)
    return x0[0]
""",
)

refusal(
    "a detached tensor that overlaps itself gets a history",
    "goes past the edges",
    """
def make_args():
    a0 = torch.randn(6, requires_grad=True)
    return (a0, a0.as_strided((2, 2), (2, 2), 0).detach())


def f(x0, x1):
    x1.fill_(x0.sum())
    return None
""",
)

regression(
    "two views of a hidden base without gradients, one gets a history",
    """
def make_args():
    a0 = torch.randn(6)
    return (torch.randn((), requires_grad=True), a0[:4], a0[1:3])


def f(x0, x1, x2):
    x2.fill_(x0)
    return x1 * 2
""",
)

refusal(
    "a write by strides reaches memory that no argument has",
    "goes past the edges of its source",
    """
def make_args():
    return (torch.randn(4, 3)[1:-1],)


def f(x0):
    v0 = x0.as_strided((3, 3), (2, 1), 1)
    v0.copy_(v0.mT)
    return (v0, x0)
""",
)

regression(
    "a conjugated view of a non-leaf is written",
    """
def make_args():
    a0 = torch.randn(3, dtype=torch.complex64, requires_grad=True) * 1
    return (a0, a0.conj())


def f(x0, x1):
    x1.masked_fill_(x1 == 0.5, 0.5)
    x1.add_(x0)
    return x0
""",
)

regression(
    "complex numbers are multiplied in place",
    """
def make_args():
    return (torch.randn(2, 2, dtype=torch.complex64),)


def f(x0):
    x0[1].mul_(x0[0])
    return x0 * 1
""",
)

regression(
    "a new tensor takes the elements of an argument that starts late in its memory",
    """
def make_args():
    return (torch.randn(4, 2)[1:-1],)


def f(x0):
    v0 = x0.flip(1)
    v0.copy_(x0)
    return (v0, x0)
""",
)

ALL = (AUTOGRAD, DTYPES, GIVEN, HISTORIES, MEMORY, STORAGE, VIEWS, OWN)
REGRESSIONS = {name: source for stored in ALL for name, source in stored.same.items()}
REFUSED = {name: refusal for stored in ALL for name, refusal in stored.refused.items()}
