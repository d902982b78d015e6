"""The figures of the house only fall: see tests/house/measure.py."""

from __future__ import annotations

import ast
import fnmatch
import json

import pytest

from tests.house import measure
from tests.house.measure import RECORDED, arrows, figures, imports, module_of, risen, sources
from tests.house.subjects import ANNEXES, PACKAGE, subject_of


def test_no_figure_is_higher_than_recorded():
    assert risen(json.loads(RECORDED.read_text()), figures()) == []


@pytest.mark.parametrize("annex", ANNEXES)
def test_each_annex_has_files(annex):
    assert any(subject_of(path) == annex for path in sources())


def test_each_pattern_names_a_file():
    found = {path.relative_to(PACKAGE).as_posix() for path in sources()}
    listed = [pattern for patterns in ANNEXES.values() for pattern in patterns]
    assert not [pattern for pattern in listed if not fnmatch.filter(found, pattern)]


def test_the_contract_names_a_new_arrow_and_one_that_is_gone(monkeypatch):
    pytest.importorskip("importlinter")  # not on Python 3.10
    from tests.house import contract

    known = sorted(arrows())
    monkeypatch.setattr(contract, "listed_arrows", lambda: {*known[1:], ("foregrad.config", "foregrad.tools.cli")})
    check = contract.AnnexContract("", {}, {}).check(None, verbose=False)
    assert not check.kept
    assert check.metadata == {"new": known[:1], "gone": [("foregrad.config", "foregrad.tools.cli")]}


def test_the_contract_of_the_tools_names_what_is_not_public(monkeypatch):
    grimp = pytest.importorskip("grimp")
    pytest.importorskip("importlinter")
    from tests.house.contract import PublicContract

    graph = grimp.ImportGraph()
    for module, target in [("a.tools", "a.errors"), ("a.tools.cli", "a.tools"), ("a.tools.cli", "a.runtime")]:
        graph.add_import(importer=module, imported=target)
    options = {"package": "a.tools", "public": ["a.errors"], "exceptions": ["a.tools -> a.cache"]}
    check = PublicContract("", {"root_packages": ["a"]}, options).check(graph, verbose=False)
    assert check.metadata == {"new": ["a.tools.cli -> a.runtime"], "gone": ["a.tools -> a.cache"]}


def test_imports_are_found_in_functions_and_in_strings():
    code = "def f():\n    from ..graph import joint\n    import_module('.api')\n    return 'foregrad.config'\n"
    modules = {module_of(path): path for path in sources()}
    found = {module_of(path) for path in imports(PACKAGE / "tracing" / "parts.py", ast.parse(code), modules)}
    assert found == {"foregrad.graph.joint", "foregrad.api", "foregrad.config"}


def test_any_counts_in_quotes_and_by_other_names_and_comments_and_docstrings_are_no_code(monkeypatch, tmp_path):
    code = '"""Any."""\nfrom typing import Any\n\nTree = Any  # Any\n\ndef f(x: Tree, y: "list[Any]") -> "Any":\n    """Any."""\n    return x\n'
    path = tmp_path / "a.py"
    path.write_text(code)
    monkeypatch.setattr(measure, "sources", lambda: {path: ast.parse(code)})
    monkeypatch.setattr(measure, "subject_of", lambda path: "core")
    monkeypatch.setattr(measure, "room_of", lambda path: "room")
    assert measure.untyped() == {"room": (4, 4)}  # the alias names `Any` once, and stands for it at `x`
