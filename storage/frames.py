"""Compressed inputs, decoded frame by frame: the libraries' own readers take a zstd frame cut short for the end."""

import io
import zlib
from collections.abc import Callable
from typing import Protocol

import zstandard

from everplex.storage.errors import UsageError

__all__ = ["decoded"]

_READ_BYTES = 1 << 18


def decoded(stored: io.RawIOBase, url: str) -> io.RawIOBase:
    """Return a reader of what `stored` decodes to, by the suffix of `url`; of `stored` itself where there is none.

    Reading raises UsageError where the data is damaged or ends inside a frame.
    """
    if url.endswith(".gz"):
        return _FrameReader(stored, url, lambda: zlib.decompressobj(wbits=31), padding=b"\0")
    if url.endswith((".zst", ".zstd")):
        return _FrameReader(stored, url, lambda: zstandard.ZstdDecompressor().decompressobj(), padding=b"")
    return stored


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _FrameReader(io.RawIOBase):
    """Content of any number of compressed frames, each of which has to be whole."""

    def __init__(self, stored: io.RawIOBase, url: str, new: Callable[[], _Decompressor], padding: bytes) -> None:
        self._stored = stored
        self._url = url
        self._new = new
        self._padding = padding
        self._frame: _Decompressor | None = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io hands over is a memoryview
        while not self._output:
            self._input = self._input or self._stored.read(_READ_BYTES) or b""
            if self._frame is None:
                if not self._input:
                    return 0
                self._input = self._input.lstrip(self._padding) if self._padding else self._input
                self._frame = self._new() if self._input else None
            elif not self._input:
                raise UsageError(f"{self._url}: the compressed data is cut short; fetch the file again")
            if self._frame is not None:
                self._decode(self._frame)
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decode(self, frame: _Decompressor) -> None:
        try:
            self._output = memoryview(frame.decompress(self._input))
        except (zlib.error, zstandard.ZstdError) as error:
            raise UsageError(f"{self._url}: the compressed data is damaged ({error}); fetch the file again") from error
        self._input = frame.unused_data if frame.eof else b""
        self._frame = None if frame.eof else frame
