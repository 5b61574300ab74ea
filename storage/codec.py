"""Bytes as they lie in the store: zstd frames that are checked whole, canonical JSON, digests.

Three traps of zstandard are closed here. A compressor shared by threads crashes, so each thread has its own. A frame
without a checksum decodes flipped bits without a word, so every frame has one. `max_output_size` is ignored where the
frame declares its size, so the declared size is checked first and an unknown one is refused.
"""

import hashlib
import threading
from typing import Any

import msgspec
import zstandard

from everplex.storage.errors import CorruptObjectError

MAX_DECODED_BYTES = 1 << 30

_local = threading.local()


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def compress(data: bytes) -> bytes:
    """One zstd frame that declares its content size and carries a checksum."""
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True)
        _local.compressor = compressor
    frame: bytes = compressor.compress(data)
    return frame


def decompress(data: bytes, where: str, max_bytes: int = MAX_DECODED_BYTES) -> bytes:
    """Content of the single zstd frame that `data` is; `where` names the object in errors.

    Raises CorruptObjectError for a torn, flipped or concatenated frame, for trailing bytes, and for one that declares
    no size or more than `max_bytes`.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0 or declared > max_bytes:
            found = "an unknown size" if declared < 0 else f"{declared} bytes"
            raise CorruptObjectError(f"{where}: expected a zstd frame of at most {max_bytes} bytes, found {found}")
        content: bytes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObjectError(f"{where}: not one whole zstd frame ({error})") from error
    if len(content) != declared:
        raise CorruptObjectError(f"{where}: expected {declared} bytes of content, found {len(content)}")
    return content


def same_content(key: str, one: bytes, other: bytes) -> bool:
    """Whether two objects of this key hold the same content, whatever zstd version compressed them."""
    if one == other:
        return True
    if not key.endswith(".zst"):
        return False
    try:
        return decompress(one, key) == decompress(other, key)
    except CorruptObjectError:
        return False
