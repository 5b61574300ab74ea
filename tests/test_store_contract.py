"""The stores that need no emulator keep the contract."""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.benches import Bench, local_bench, memory_bench, s3_bench
from support.contract import StoreContract
from support.faulty import FaultyStore
from support.racer import QUICK
from support.s3 import S3Server, serve_s3

from everplex.storage.local import LocalStore
from everplex.storage.remote import FsspecStore
from everplex.storage.retry import RetryingStore
from everplex.storage.store import Store


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """Run one S3 server for the module."""
    with serve_s3() as server:
        yield server


class TestLocal(StoreContract):
    """A folder."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        """Return a folder that does not exist yet."""
        folder = tmp_path / "not" / "yet"
        return local_bench(folder, lambda: LocalStore(folder), "bare")


class TestLocalWithoutHardLinks(StoreContract):
    """A folder on a mount that refuses hard links."""

    @pytest.fixture(params=[errno.EPERM, errno.ENOTSUP])
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
        """Return a folder while os.link fails."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(os, "link", refuse)
        return local_bench(tmp_path, lambda: LocalStore(tmp_path), "no-links")


class TestMemory(StoreContract):
    """The memory filesystem."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        """Return a place of its own."""
        return memory_bench(f"{tmp_path.parent.name}-{tmp_path.name}", FsspecStore)


class TestS3(StoreContract):
    """S3 over HTTP, in another process."""

    @pytest.fixture
    def bench(self, s3: S3Server, tmp_path: Path) -> Bench:
        """Return a bucket of its own."""
        bucket = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:20]
        return s3_bench(s3, bucket, FsspecStore)


class TestRetrying(StoreContract):
    """The retrying wrapper, over a folder."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        """Return a wrapped folder."""
        return local_bench(tmp_path, lambda: RetryingStore(LocalStore(tmp_path)), "bare")


class TestFaulty(StoreContract):
    """A store that fails at a third of its operations, before, after or half-way, under retries."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        """Return a wrapped folder with a fixed seed."""

        def make() -> Store:
            return RetryingStore(FaultyStore(LocalStore(tmp_path), rate=0.3, seed=7), QUICK)

        return local_bench(tmp_path, make, "faulty")
