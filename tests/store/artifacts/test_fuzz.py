"""Made-up files: hypothesis edits the JSON of small artifacts, and the corpus of earlier edits is read again."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.artifacts import fuzz
from tests.store.artifacts.faults import members_of

KEPT = fuzz.CORPUS.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def originals():
    return fuzz.originals()


def test_the_originals_are_read(originals):
    assert [fuzz.outcome(original)[0] for original in originals] == ["read"] * len(originals)


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_edited_files_are_read_or_refused(originals, data):
    def choose(items):
        return items[data.draw(st.integers(0, len(items) - 1))]

    number = data.draw(st.integers(0, len(originals) - 1))
    parts = {n: json.loads(c) for n, c in members_of(originals[number]).items() if n.endswith(".json")}
    edits = []
    for _ in range(data.draw(st.integers(1, 3))):
        member = choose(sorted(parts))
        edits.append([member, fuzz.draw_edit(choose, parts[member])])
    found, what = fuzz.outcome(fuzz.edited(originals[number], edits))
    assert found != "fault", f"{what}\n{json.dumps([number, edits])}"


def test_the_corpus_is_read_or_refused(originals):
    assert len(KEPT) > 20
    for line in KEPT:
        number, edits = json.loads(line)
        found, what = fuzz.outcome(fuzz.edited(originals[number], edits))
        assert found != "fault", f"{line}: {what}"


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=2000), sealed=st.booleans())
def test_bytes_that_are_no_artifact(content, sealed):
    if sealed:
        from tests.store.artifacts.faults import SEAL, with_seal

        content = with_seal(b"PK" + content + SEAL + b"0" * 64)
    assert fuzz.outcome(content)[0] == "refused"
