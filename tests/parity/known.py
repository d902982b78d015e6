"""Sweep cases that are known to fail, each with its reason and where it is written up. Empty is the aim.

The key is the case's name as the sweep prints it, the value says why the failure is not ours or not yet ours.
"""

KNOWN: dict[str, str] = {}

# PyTorch computes these (or their derivatives) with other operators while any dispatch mode is on, whoever records:
# `prod` divides by its factors only where it may look for zeros first, a weighted loss with smoothed labels adds up
# zeros for what it ignores. The result is as exact, and not the same to the last bit. Name -> tolerance against eager;
# against eager under a mode that does nothing, these too are compared bit for bit.
OTHER_FORMULA = {
    "prod": 1e-5,
    "masked.prod": 1e-5,
    "nn.functional.cross_entropy": 1e-6,
    "nn.functional.linear_cross_entropy": 1e-6,
    "nn.CrossEntropyLoss": 1e-6,
    "nn.LinearCrossEntropyLoss": 1e-6,
}

# Ops whose result is memory that nobody wrote: two eager runs differ, so only metadata is compared.
UNWRITTEN = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "nn.functional.rrelu.noise",
    }
)

# Ops whose result depends on where memory lies: two eager runs may differ in the last bits. Name -> tolerance.
UNREPEATABLE = {"linalg.lstsq": 1e-4, "linalg.lstsq.grad_oriented": 1e-4}

# The refusals that are no failure: layouts that are not strided.
ALLOWED_REFUSALS = frozenset({"UnsupportedLayoutError"})
