"""Programs after the ideas of PyTorch's own tests of ahead-of-time autograd.

`PROGRAMS[name]` is (function or module, what makes its arguments, options of `check`).
"""

from tests.parity.idioms import derivatives, memory, modules, networks, operators, values  # noqa: F401 - they register
from tests.parity.idioms.common import PROGRAMS

__all__ = ["PROGRAMS"]
