import pytest

from foregrad.backends import registry
from tests.store.cache.kept import register


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    """The backends of these tests are known to these tests alone."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register()
