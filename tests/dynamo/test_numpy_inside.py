"""NumPy's functions on numbers inside a function that torch.compile traces: it makes tensors of the numbers."""

import numpy as np
import pytest
import torch

PROGRAMS = {
    "a number": lambda x: x * np.sqrt(2.0),
    "a number as a tensor": lambda x: x * torch.as_tensor(np.float32(np.sqrt(2.0))),
    "an array": lambda x: x + torch.as_tensor(np.arange(3) * 0.5),
    "a table": lambda x: x * torch.from_numpy(np.linspace(0.0, 1.0, 3).astype("float32")),
    "a reduction": lambda x: x * float(np.array([1.0, 2.0]).sum()),
    "of a size": lambda x: x / np.sqrt(x.shape[0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    torch._dynamo.reset()
    function = PROGRAMS[name]
    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"})
    for scale in (1.0, 2.0):
        x, y = (torch.full((3,), scale, requires_grad=True) for _ in range(2))
        expected, found = function(x), compiled(y)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=0)
