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
"""A younger file may change again without its times telling: what is found then is not kept."""

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


def remembered(cache: Path, question: object, files: Sequence[Path], kind: type[T], answer: Callable[[], T]) -> T:
    """Return what `answer` gives, or gave before for the same question about the same files.

    Processes of one machine that ask at the same time answer once: the others wait and read the `cache` folder. Raises
    UsageError for a file that changes meanwhile, OSError where a file or the cache cannot be used.
    """
    identities = [_Identity.of(file) for file in files]
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    entry_file = cache / f"{sha256_hex(canonical_json([question, identities]))}.json"
    with _locked(entry_file.with_suffix(".lock")):
        try:
            return msgspec.json.decode(entry_file.read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.DecodeError):  # not known, or torn: found again
            asked_ns = time.time_ns()
        found = answer()
        for file, identity in zip(files, identities, strict=True):
            if _Identity.of(file) != identity:
                raise UsageError(f"{file} changed while it was read; wait until it is written, then run again")
        newest_ns = max(max(identity.modified_ns, identity.changed_ns) for identity in identities)
        if newest_ns + int(SETTLED_SECONDS * 1e9) <= asked_ns:
            temporary = entry_file.with_suffix(".tmp")
            temporary.write_bytes(msgspec.json.encode(found))
            temporary.replace(entry_file)
        return found


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the exclusive lock of a file; it ends with the process, however that ends."""
    with file.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
