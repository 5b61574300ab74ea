"""Fixtures that several test modules use."""

from pathlib import Path

import pytest
from support.models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Llama and its byte tokenizer; tests must not change it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a user cache of its own, so that no digest or spool leaks between tests."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EVERPLEX_CACHE", str(folder))
    return folder
