"""Modules that a function imports where it runs: what it reads and writes there is state like any other."""

import importlib
import sys
import warnings

import pytest
import torch

import foregrad

SOURCE = """
import torch
import registered_parts

count = 0
rate = 2.0
loads = registered_parts.note("settings")
table = torch.full((2,), 3.0)

class Options:
    steps = 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "in_package" / "inner").mkdir(parents=True)
    for package in ("in_package", "in_package/inner"):
        (tmp_path / package / "__init__.py").write_text("")
    for name in ("imported_settings", "in_package/inner/settings"):
        (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / "registered_parts.py").write_text(
        "parts = []\n\ndef note(name):\n    parts.append(name)\n    return len(parts)\n"
    )
    (tmp_path / "fails_halfway.py").write_text("import registered_parts\nregistered_parts.note('half')\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget():
    roots = ("imported_settings", "in_package", "registered_parts", "fails_halfway")
    for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
        del sys.modules[name]
    importlib.invalidate_caches()


def by_statement(x):
    import imported_settings

    imported_settings.count += 1
    return x * imported_settings.count


def under_another_name(x):
    def inner(y):
        import imported_settings as s

        s.Options.steps += 1
        return y * s.Options.steps + s.rate

    return inner(x)


def from_a_package(x):
    from in_package.inner import settings

    settings.count += 2
    return x + settings.count


def by_the_library(x):
    settings = importlib.import_module("imported_settings")
    settings.count += 1
    settings.table.add_(1)
    return x * settings.count + settings.table


def by_the_table_of_modules(x):
    import imported_settings  # noqa: F401

    settings = sys.modules["imported_settings"]
    settings.count += 1
    return x * settings.count


def one_that_is_not_there(x):
    try:
        import no_such_module_at_all  # noqa: F401
    except ImportError:
        return x + 1
    return x


def one_that_fails(x):
    try:
        import fails_halfway  # noqa: F401
    except ZeroDivisionError:
        return x + 1
    return x


def caught(x):
    try:
        import imported_settings
    except BaseException:
        return x - 1
    return x * imported_settings.rate


def called(function, compiled, first):
    """Results of four calls, and how often modules were run; `first`: modules that were imported before."""
    forget()
    for name in first:
        importlib.import_module(name)
    call = foregrad.compile(function, backend="eager", on_unsupported="raise") if compiled else function
    results = [call(torch.ones(2)) for _ in range(4)]
    parts = sys.modules.get("registered_parts")
    return results, None if parts is None else list(parts.parts)


@pytest.mark.parametrize("first", [(), ("imported_settings", "in_package.inner.settings")], ids=["first", "later"])
@pytest.mark.parametrize(
    "function",
    [
        by_statement,
        under_another_name,
        from_a_package,
        by_the_library,
        by_the_table_of_modules,
        one_that_is_not_there,
        caught,
    ],
)
def test_modules_imported_inside(folder, function, first):
    with warnings.catch_warnings():
        warnings.simplefilter("error", foregrad.errors.ForegradWarning)
        results, parts = called(function, True, first)
    expected, expected_parts = called(function, False, first)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)
    assert parts == expected_parts


def test_a_module_that_fails_to_import(folder):
    """It fails in each call, in eager as well; how often its code runs is not promised."""
    results, _ = called(one_that_fails, True, ())
    expected, _ = called(one_that_fails, False, ())
    assert all(map(torch.equal, results, expected))
    assert "fails_halfway" not in sys.modules


def test_a_module_is_imported_once_by_a_capture(folder):
    """Its code runs as in eager, ahead of the capture: no tensor in it stands for another."""
    forget()
    foregrad.capture(by_the_library, torch.ones(2))
    settings = sys.modules["imported_settings"]
    assert settings.count == 0
    assert settings.table.tolist() == [3.0, 3.0]
    assert sys.modules["registered_parts"].parts == ["settings"]
    assert not any(type(finder).__module__.startswith("foregrad") for finder in sys.meta_path)
