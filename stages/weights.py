"""The content digest of a model: a tree of SHA-256 over its weights and its configuration, cached per file. No torch.

Leaves are blocks of a file, so that one large file is hashed on all cores; above them a digest per file, and one of
all files with their names. The tokenizer is not part of it, and neither are the fields of the configuration that only
say where the model came from.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from everplex.stages.checkpoint import ADAPTER_CONFIG, INDEX, read_config, weight_files
from everplex.stages.memo import remembered
from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import UsageError

BLOCK_BYTES = 64 << 20
READ_BYTES = 1 << 20

_PROVENANCE = ("_name_or_path", "_commit_hash", "transformers_version")


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
    for file in weight_files(folder):
        digests[file.name] = remembered(cache, "weights", [file], str, partial(_hash_file, file))
    return sha256_hex(canonical_json(["everplex weights 1", config, digests]))


def _hash_file(file: Path) -> str:
    """Digest of the digests of a file's blocks, hashed by as many threads as there are cores."""
    size = file.stat().st_size
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
