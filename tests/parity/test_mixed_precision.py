"""A spread of the operator database in mixed precision through a compiler that runs graphs as they are."""

from __future__ import annotations

import pytest

from tests.parity.cases import REFUSED, op_cases
from tests.parity.mixed_precision import KINDS, run
from tests.parity.test_sweep_subset import judge

ALWAYS = (
    "add bmm cat einsum index_put lerp linalg.pinv.singular mul native_batch_norm native_layer_norm nn.functional.batch_norm "
    "nn.functional.binary_cross_entropy nn.functional.conv2d nn.functional.embedding nn.functional.group_norm "
    "nn.functional.huber_loss nn.functional.layer_norm nn.functional.linear nn.functional.prelu nn.functional.rms_norm "
    "nn.functional.scaled_dot_product_attention normal softmax where"
).split()
CASES = [case for case in op_cases(["float32"]) if case.variant == "plain"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in ALWAYS] + CASES[7::60], ids=str)
def test_an_operator_is_eagers(kind, case):
    result = run(kind, case, limit=2)
    if result.status == REFUSED:
        pytest.skip(", ".join(result.reasons))
    judge(result)
