"""What a function reads of Python's state may change between calls: a table of programs against eager."""

import pytest

from tests.covering import ALL
from tests.python import reads


@pytest.mark.parametrize("program", reads.programs()[:: 71 if ALL else 149], ids=", ".join)
def test_as_in_eager(program):
    assert reads.stale(program) == (None, 0)
