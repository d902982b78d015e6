"""Functions of DTensors give what eager gives, in one graph and without a warning."""

import pytest
import torch.distributed as dist

from . import ranks

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there")


def test_functions_of_dtensors(tmp_path):
    codes, said = ranks.run("dtensors", 2, tmp_path)
    assert codes == [0, 0], "\n".join(said)
