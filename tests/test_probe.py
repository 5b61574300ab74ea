"""Does the store honour conditional create? Asked of good ones and of two kinds of bad ones."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faulty import FaultyStore
from support.s3 import serve_s3

from everplex.storage.errors import ObjectExistsError, ObjectNotFoundError, StoreRefusedError
from everplex.storage.local import LocalStore
from everplex.storage.probe import honours_conditional_create
from everplex.storage.remote import FsspecStore
from everplex.storage.retry import RetryingStore, RetryPolicy
from everplex.storage.store import Entry

QUICK = RetryPolicy(max_attempts=50, first_wait_seconds=0.001, longest_wait_seconds=0.01)


class SeveralWin:
    """A store that refuses a name that exists, but looks before all racers have written: each of them wins."""

    url = "stub://"

    def __init__(self, num_racers: int) -> None:
        self.objects: dict[str, bytes] = {}
        self._looked = threading.Barrier(num_racers)

    def get(self, key: str) -> bytes:
        """Read."""
        if key not in self.objects:
            raise ObjectNotFoundError("read", key, "absent")
        return self.objects[key]

    def create(self, key: str, data: bytes) -> None:
        """Check, let everyone else check, write."""
        exists = key in self.objects
        if key.endswith("race"):
            self._looked.wait(60)
        if exists and self.objects[key] != data:
            raise ObjectExistsError("create", key, "taken")
        self.objects[key] = data

    def publish(self, key: str, data: bytes) -> None:
        """Write."""
        self.objects[key] = data

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List."""
        return (Entry(key) for key in self.objects if key.startswith(prefix))


def test_folder_honours(tmp_path: Path) -> None:
    """A folder does, each time it is asked, with the same few objects."""
    store = LocalStore(tmp_path)
    assert honours_conditional_create(store)
    objects = {entry.key: store.get(entry.key) for entry in store.list()}
    assert 1 <= len(objects) <= 2
    assert honours_conditional_create(store)
    assert {entry.key: store.get(entry.key) for entry in store.list()} == objects


def test_lost_answers_do_not_change_the_answer(tmp_path: Path) -> None:
    """Failures under retries do not make a good store look bad."""
    for seed in range(10):
        faulty = FaultyStore(LocalStore(tmp_path / str(seed)), rate=0.4, seed=seed)
        assert honours_conditional_create(RetryingStore(faulty, QUICK))


def test_server_that_ignores_the_condition() -> None:
    """An S3 server that overwrites all the same is found out, again and again; a good one is not."""
    for ignores in (True, False):
        with serve_s3(ignore_conditions=ignores) as server:
            store = RetryingStore(FsspecStore(f"{server.make_bucket('probed')}/run", server.options()))
            assert honours_conditional_create(store) is not ignores
            assert honours_conditional_create(store) is not ignores
            assert 1 <= len(server.keys("probed")) <= 2
            store.close()


def test_server_that_lets_several_win() -> None:
    """A store that refuses a second create, but not one at the same instant, is found out."""
    assert not honours_conditional_create(SeveralWin(num_racers=4))


def test_filesystem_without_the_verb() -> None:
    """A filesystem that knows no conditional create is not asked."""
    store = FsspecStore("ftp://host.invalid/run")
    assert not store.conditional_create
    assert not honours_conditional_create(store)


def test_refusal_is_passed_on(tmp_path: Path) -> None:
    """A store that cannot be written to is an error, not an answer."""
    store = FaultyStore(LocalStore(tmp_path), rate=1.0, error=lambda verb, key: StoreRefusedError(verb, key, "denied"))
    with pytest.raises(StoreRefusedError, match="denied"):
        honours_conditional_create(store)
