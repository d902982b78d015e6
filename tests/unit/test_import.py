"""What `import foregrad` brings, and that everything it promises is there when it is asked for."""

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

import foregrad
from tests import forked


def _run(code: str) -> str:
    done = forked.run_text(code, bare=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_brings_next_to_nothing():
    code = "import sys, foregrad; print(*(m for m in sys.modules if m.startswith('foregrad')))"
    assert set(_run(code).split()) == {"foregrad", "foregrad.errors", "foregrad.config"}


def test_every_public_name_is_there_and_seen_by_type_checkers():
    for name in foregrad.__all__:
        assert getattr(foregrad, name) is not None
        assert name in dir(foregrad)
    tree = ast.parse(Path(foregrad.__file__).read_text())
    typed = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(foregrad.__all__) <= typed


def test_a_name_that_is_a_module_too_means_the_object():
    code = "import foregrad.api, foregrad; print(type(foregrad.config).__name__, callable(foregrad.compile))"
    assert _run(code).split() == [type(foregrad.config).__name__, "True"]


def test_parts_need_no_import_of_their_own():
    code = "import foregrad; print(foregrad.partitioners.default_partition is foregrad.default_partition)"
    assert _run(code).strip() == "True"


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute `compiled`"):
        foregrad.compiled


def test_only_public_names_are_listed():
    assert {name for name in dir(foregrad) if not name.startswith("__")} - set(foregrad.__all__) == set(foregrad._PARTS)


def test_each_setting_has_a_type_for_checkers():
    config = sys.modules["foregrad.config"]
    (holder,) = (
        one for one in ast.parse(Path(config.__file__).read_text()).body if getattr(one, "name", "") == "_Holder"
    )
    (block,) = (one for one in holder.body if isinstance(one, ast.If))
    declared = {one.target.id: ast.unparse(one.annotation) for one in block.body}
    assert declared == {field.name: field.type for field in dataclasses.fields(config.Config)}
