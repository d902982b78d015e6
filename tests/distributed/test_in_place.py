"""`dist.all_reduce` and the like in compiled functions: nodes of the graph, as often as eager calls them."""

import os

import pytest
import torch.distributed as dist

from . import ranks

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there")

_HAS_FOUR = bool(os.environ.get("FOREGRAD_FOUR_RANKS"))
FOUR = pytest.param(4, marks=pytest.mark.skipif(not _HAS_FOUR, reason="FOREGRAD_FOUR_RANKS is not set"))


@pytest.mark.parametrize("size", [2, FOUR])
def test_programs_of_users(size, tmp_path):
    codes, said = ranks.run("in_place", size, tmp_path)
    assert codes == [0] * size, "\n".join(said)
