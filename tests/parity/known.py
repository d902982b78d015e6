"""Sweep cases that are known to fail, each with its reason and where it is written up. Empty is the aim.

The key is the case's name as the sweep prints it, the value says why the failure is not ours or not yet ours.
"""

KNOWN: dict[str, str] = {
    "op ormqr plain float32": "strides of one gradient: see OTHER_FORMULA",
    "op linalg.eig plain float32": "eager refuses a loss that depends on the phase, from values: see OTHER_FORMULA",
}

# PyTorch computes these (or their derivatives) with other operators when anything but a plain tensor goes in or a
# dispatch mode is on, whoever records: the result is as exact, and not the same to the last bit. Name -> tolerance.
OTHER_FORMULA = {"prod": 1e-5, "linalg.cond": 1e-4, "linalg.eigvalsh": 1e-5, "linalg.svdvals": 1e-5}

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
