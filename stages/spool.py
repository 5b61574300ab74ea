"""The local spool: segments that the store could not take wait on this machine, the same bytes under the same keys.

One folder per run identity, `<cache>/spool/<run id>/`, readable by its user alone. Each worker only ever adds names
of its own, and a file goes only after a store has acknowledged its content, so any number of processes may fill and
empty the spool at the same time.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everplex.stages.layout import SEGMENTS_PREFIX
from everplex.stages.segments import decode_segment
from everplex.storage.errors import (
    CorruptObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreRefusedError,
    UsageError,
)
from everplex.storage.local import LocalStore, cache_folder
from everplex.storage.store import Store

__all__ = ["ListedSpool", "LocalSpool", "Uploaded", "spool_folder", "upload", "upload_spool"]

_RUN_ID = re.compile(r"[0-9a-f]{16}")


def spool_folder(run_id: str) -> Path:
    """Return where the segments of a run wait on this machine; it may not exist."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(f"expected a run id of 16 hexadecimal digits, found {run_id!r}")
    return cache_folder() / "spool" / run_id


class ListedSpool(Protocol):
    """A spool that says what is in it."""

    @property
    def url(self) -> str:
        """Where it is."""
        ...

    def keys(self) -> Iterator[str]:
        """Every segment that waits."""
        ...

    def get(self, key: str) -> bytes:
        """Return a segment. Raises ObjectNotFoundError."""
        ...

    def remove(self, key: str) -> None:
        """Forget a segment."""
        ...


class LocalSpool:
    """The spool of one run on this machine. Nothing is made before the first segment is kept."""

    def __init__(self, run_id: str) -> None:
        self.folder = spool_folder(run_id)
        self._store = LocalStore(self.folder)

    @property
    def url(self) -> str:
        """The folder."""
        return str(self.folder)

    def create(self, key: str, data: bytes) -> None:
        """Keep a segment, durably. Raises StoreError where the disk refuses."""
        try:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreRefusedError("create", str(self.folder), os.strerror(error.errno or 0)) from error
        self._store.create(key, data)

    def get(self, key: str) -> bytes:
        """Return a segment. Raises ObjectNotFoundError."""
        return self._store.get(key)

    def keys(self) -> Iterator[str]:
        """Every segment that waits."""
        for entry in self._store.list(SEGMENTS_PREFIX):
            yield entry.key

    def remove(self, key: str) -> None:
        """Forget a segment that the store has acknowledged; its empty folders stay."""
        (self.folder / key).unlink(missing_ok=True)


@dataclass
class Uploaded:
    """What became of the segments that were in the spool."""

    keys: list[str] = field(default_factory=list)
    """Acknowledged by the store and gone from the spool."""
    refused: list[str] = field(default_factory=list)
    """One sentence per segment that stays in the spool because it is damaged or of another plan."""


def upload_spool(
    store: Store, run_id: str, plan_digest: str | None = None, *, stop: Callable[[], bool] = lambda: False
) -> Uploaded:
    """Upload what waits on this machine for a run, and forget what the store has acknowledged.

    May be repeated, interrupted and run twice at once. A damaged segment, or one of another run or plan, is left where
    it is and named. Raises StoreError where the store doesn't take a segment; the rest stays for the next time.
    """
    return upload(LocalSpool(run_id), store, run_id, plan_digest, stop=stop)


def upload(
    spool: ListedSpool,
    store: Store,
    run_id: str,
    plan_digest: str | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Uploaded:
    """Upload what waits in any spool, as `upload_spool` does."""
    result = Uploaded()
    for key in sorted(spool.keys()):
        if stop():
            break
        try:
            data = spool.get(key)
        except ObjectNotFoundError:  # another process has uploaded it since the listing
            continue
        try:
            _check(key, data, run_id, plan_digest)
            store.create(key, data)
        except (CorruptObjectError, ObjectExistsError) as error:
            result.refused.append(f"{spool.url}/{key}: left in the spool ({error})")
            continue
        spool.remove(key)
        result.keys.append(key)
    return result


def _check(key: str, data: bytes, run_id: str, plan_digest: str | None) -> None:
    header = decode_segment(key, data).header
    if header.run != run_id:
        raise CorruptObjectError(f"{key}: expected a segment of run {run_id}, found one of {header.run}")
    if plan_digest is not None and header.plan != plan_digest:
        raise CorruptObjectError(f"{key}: expected plan {plan_digest[:16]}, found {header.plan[:16]}")
