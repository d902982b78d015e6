"""The list of what foregrad takes from private PyTorch: complete, fulfilled here, and telling what is gone."""

from __future__ import annotations

import ast
import warnings

import pytest
import torch

import foregrad
from foregrad._torch import versions
from foregrad._torch.versions import untested, warn_if_untested
from foregrad.errors import ForegradWarning
from foregrad.tools._torch import requirements
from foregrad.tools._torch.requirements import FALLS_BACK, missing
from tests.unit.test_layers import is_private, names_of_torch


def test_every_private_name_in_the_sources_is_in_the_list():
    listed = {requirement.name for requirement in requirements.requirements()}
    for path in requirements.doors():
        for line, name in names_of_torch(ast.parse(path.read_text())):
            if is_private(name) and not name.rpartition(".")[2].startswith("__"):
                assert name in listed, f"{path.name}:{line}"


def test_what_falls_back_is_told_of_files_that_are_there():
    using = {file for requirement in requirements.requirements() for file in requirement.files}
    assert FALLS_BACK.keys() <= using | {file.partition("/")[0] for file in using}
    assert all(requirement.falls_back for requirement in requirements.requirements())


def test_this_pytorch_has_all_of_it():
    assert missing() == []


def test_a_name_that_is_gone_is_told(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    ((name, fault, falls_back),) = missing()
    assert name == "torch._C._dynamo.guards.TensorGuards"
    assert "missing" in fault
    assert falls_back == "nothing: capturing any function needs it"


def test_a_module_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(requirements, "_is_module", lambda path: path != "torch._inductor.async_compile")
    monkeypatch.delattr(torch._inductor, "async_compile", raising=False)
    assert {name for name, _, _ in missing()} >= {"torch._inductor.async_compile.AsyncCompile"}


def test_arguments_that_have_changed_are_told(monkeypatch):
    from torch._inductor import codecache

    monkeypatch.setattr(codecache, "compiled_fx_graph_hash", lambda graph: None)
    ((name, fault, falls_back),) = missing()
    assert name.endswith("compiled_fx_graph_hash")
    assert "arguments" in fault
    assert falls_back == FALLS_BACK["inductor"]


def test_a_name_that_the_code_asks_for_may_be_missing(monkeypatch):
    from torch._library import opaque_object

    monkeypatch.delattr(opaque_object, "is_opaque_value_type", raising=False)
    assert missing() == []


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", "2.15.0a0+git1", "unknown"])
def test_versions_that_are_tested(version):
    assert untested(version) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0"])
def test_versions_that_are_not(version):
    assert f"foregrad is tested with PyTorch 2.11 to 2.15, this is {version}" in untested(version)


def test_an_untested_version_is_told_once_and_not_refused(monkeypatch):
    monkeypatch.setattr(versions, "NEWEST", (2, 10))
    warn_if_untested.cache_clear()
    x = torch.ones(3)
    with pytest.warns(ForegradWarning, match="is tested with PyTorch"):
        assert foregrad.compile(torch.sin, backend="eager")(x).equal(x.sin())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert foregrad.compile(torch.cos, backend="eager")(x).equal(x.cos())
