"""The content digest of a model: a tree of SHA-256 over its weights and its configuration, cached per file. No torch.

Leaves are blocks of a file, so that one large file is hashed on all cores; above them a digest per file, and one of
all files with their names. The tokenizer is not part of it, and neither are the fields of the configuration that only
say where the model came from.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from everplex.stages.checkpoint import ADAPTER_CONFIG, INDEX, read_config, weight_files
from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import UsageError

BLOCK_BYTES = 64 << 20
READ_BYTES = 1 << 20
SETTLED_SECONDS = 2.0
"""A file whose times are not this much older than its hashing may change again without its times telling."""

_PROVENANCE = ("_name_or_path", "_commit_hash", "transformers_version")


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
    """One cached digest."""

    digest: str
    hashed_ns: int
    """Wall clock at the start of the hashing."""


def digest_model(folder: str | Path, *, cache_folder: str | Path) -> str:
    """Return the digest of what a model folder computes with: 64 hexadecimal digits.

    Processes of one machine that ask at the same time hash once: the others wait and read the cache. Raises UsageError
    for a folder without weights or configuration, for a file that cannot be read or changes meanwhile, and for a cache
    that cannot be written.
    """
    try:
        return _digest_model(Path(folder), Path(cache_folder) / "weights")
    except OSError as error:
        raise UsageError(
            f"{folder}: the model's digest could not be made ({error}); its files have to be readable and "
            f"{cache_folder} writable (EVERPLEX_CACHE names another cache folder)"
        ) from error


def _digest_model(folder: Path, cache: Path) -> str:
    config = {key: value for key, value in read_config(folder).items() if key not in _PROVENANCE}
    small = [file for name in (INDEX, ADAPTER_CONFIG) if (file := folder / name).is_file()]
    small += sorted(folder.glob("*.py"))
    digests = {file.name: sha256_hex(file.read_bytes()) for file in small}
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file in weight_files(folder):
        digests[file.name] = _cached_digest(file, cache)
    return sha256_hex(canonical_json(["everplex weights 1", config, digests]))


def _cached_digest(file: Path, cache: Path) -> str:
    identity = _Identity.of(file)
    entry_file = cache / f"{sha256_hex(canonical_json(identity))}.json"
    with _locked(entry_file.with_suffix(".lock")):
        entry = _read_entry(entry_file)
        if entry is not None and _settled(identity, entry.hashed_ns):
            return entry.digest
        hashed_ns = time.time_ns()
        digest = _hash_file(file, identity.size)
        if _Identity.of(file) != identity:
            raise UsageError(f"{file} changed while it was read; wait until it is written, then run again")
        if _settled(identity, hashed_ns):
            _write_entry(entry_file, _Entry(digest, hashed_ns))
        return digest


def _settled(identity: _Identity, hashed_ns: int) -> bool:
    return max(identity.modified_ns, identity.changed_ns) + int(SETTLED_SECONDS * 1e9) <= hashed_ns


def _hash_file(file: Path, size: int) -> str:
    """Digest of the digests of a file's blocks, hashed by as many threads as there are cores."""
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1)), "hash") as pool:
        leaves = pool.map(lambda start: _hash_block(file, start), range(0, size, BLOCK_BYTES))
        return sha256_hex(b"".join(leaves))


def _hash_block(file: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        buffer = memoryview(bytearray(READ_BYTES))
        left = BLOCK_BYTES
        while left and (count := stream.readinto(buffer[: min(left, READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _read_entry(file: Path) -> _Entry | None:
    """Return a cached digest; None where there is none or it is torn: then the file is hashed again."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Entry)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write_entry(file: Path, entry: _Entry) -> None:
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
