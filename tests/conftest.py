"""Fixtures that several test modules use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models import save_tiny_model
from support.processes import Processes, processes
from support.runs import QuietRun, make_quiet_run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Llama and its byte tokenizer; tests must not change it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> QuietRun:
    """Return a small run and the numbers that it gives undisturbed; tests evaluate copies of it."""
    return make_quiet_run(tmp_path_factory.mktemp("quiet"), tiny_model)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    """Start real processes; none is left when the test ends."""
    with processes(tmp_path / "processes") as made:
        yield made


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a user cache of its own, so that no digest or spool leaks between tests."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EVERPLEX_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Undo what a run in the process of the tests does to torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
