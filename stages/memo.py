"""Answers about files, remembered between processes for as long as nothing wrote to the files."""

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import UsageError

__all__ = ["remembered"]

SETTLED_SECONDS = 2.0
"""A file whose times are not this much older than the answer may change again without its times telling."""

T = TypeVar("T")


class _Identity(NamedTuple):
    """What the file system says of a file; equal for as long as nothing wrote to it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> "_Identity":
        stat = file.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class _Entry(msgspec.Struct, frozen=True):
    """One remembered answer."""

    answer: msgspec.Raw
    asked_ns: int
    """Wall clock when the answer was begun."""


def remembered(cache: Path, question: object, files: Sequence[Path], kind: type[T], answer: Callable[[], T]) -> T:
    """Return what `answer` gives, or gave before for the same question about the same files.

    Processes of one machine that ask at the same time answer once: the others wait and read the `cache` folder. Raises
    UsageError for a file that changes meanwhile, OSError where a file or the cache cannot be used.
    """
    identities = [_Identity.of(file) for file in files]
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    entry_file = cache / f"{sha256_hex(canonical_json([question, identities]))}.json"
    with _locked(entry_file.with_suffix(".lock")):
        known = _read(entry_file, kind)
        if known is not None and _settled(identities, known[1]):
            return known[0]
        asked_ns = time.time_ns()
        found = answer()
        for file, identity in zip(files, identities, strict=True):
            if _Identity.of(file) != identity:
                raise UsageError(f"{file} changed while it was read; wait until it is written, then run again")
        if _settled(identities, asked_ns):
            _write(entry_file, _Entry(msgspec.Raw(msgspec.json.encode(found)), asked_ns))
        return found


def _settled(identities: Sequence[_Identity], asked_ns: int) -> bool:
    newest = max(max(identity.modified_ns, identity.changed_ns) for identity in identities)  # there is one at least
    return newest + int(SETTLED_SECONDS * 1e9) <= asked_ns


def _read(file: Path, kind: type[T]) -> tuple[T, int] | None:
    """Return an answer and when it was begun; None where there is none or it is torn: then it is found again."""
    try:
        entry = msgspec.json.decode(file.read_bytes(), type=_Entry)
        return msgspec.json.decode(entry.answer, type=kind), entry.asked_ns
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write(file: Path, entry: _Entry) -> None:
    """Replace the entry in one step; the caller holds its lock."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(entry))
    temporary.replace(file)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the exclusive lock of a file; it ends with the process, however that ends."""
    with file.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
