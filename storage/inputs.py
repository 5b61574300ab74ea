"""What users read from: local paths, globs and fsspec URLs, as streams that digest the stored bytes on the way."""

import glob
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, cast

import fsspec

from everplex.storage.classify import Verdict, classify, store_error
from everplex.storage.errors import EverplexError, UsageError
from everplex.storage.frames import decoded

__all__ = ["InputStat", "InputStream", "digest_input", "expand", "is_folder", "is_local", "open_input", "stat_input"]

READ_BYTES = 1 << 18


class InputStat(NamedTuple):
    """Size and time of an input as its place tells them."""

    stored_bytes: int
    modified: float | None
    """Seconds since the epoch, where the place tells."""


def is_local(url: str) -> bool:
    """Whether `url` is a path of this machine."""
    return "://" not in url and "::" not in url


def expand(patterns: Sequence[str]) -> list[str]:
    """Paths and URLs that `patterns` name: each pattern's matches sorted, patterns in the given order.

    Raises UsageError for a pattern that matches nothing, an unknown scheme, and a file that is named twice.
    """
    found: list[str] = []
    for pattern in patterns:
        plain = pattern.removeprefix("file://")
        found += _expand_local(plain) if is_local(plain) else _expand_remote(plain)
    seen: set[str] = set()
    for url in found:
        place = os.path.realpath(url) if is_local(url) else url
        if place in seen:
            raise UsageError(f"{url} is named twice; its documents would count twice, so name it once")
        seen.add(place)
    return found


def stat_input(url: str) -> InputStat:
    """Return size and time of a file. Raises UsageError if there is none."""
    with _failures(url):
        if is_local(url):
            status = Path(url).stat()
            return InputStat(status.st_size, status.st_mtime)
        filesystem, path = _filesystem(url)
        size = filesystem.info(path)["size"]
        try:
            modified = filesystem.modified(path).timestamp()
        except NotImplementedError:
            modified = None
        return InputStat(int(size or 0), modified)


def is_folder(url: str) -> bool:
    """Whether `url` is a folder."""
    with _failures(url):
        if is_local(url):
            return Path(url).is_dir()
        filesystem, path = _filesystem(url)
        return bool(filesystem.isdir(path))


def open_input(url: str) -> BinaryIO:
    """Open the stored bytes of a file for reading and seeking. Raises UsageError if there is none."""
    return io.BufferedReader(_CheckedReader(url), READ_BYTES)


def digest_input(url: str) -> str:
    """SHA-256 of the stored bytes of a file."""
    with InputStream(url) as stream:
        return stream.finish()


class InputStream:
    """One input, open: `content` is what it decodes to, `finish()` the digest of all its stored bytes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stored = _DigestingReader(url)
        self.content: BinaryIO = io.BufferedReader(decoded(self._stored, url), READ_BYTES)

    @property
    def read_bytes(self) -> int:
        """Stored bytes read so far."""
        return self._stored.num_bytes

    def finish(self) -> str:
        """Read what is left of the stored bytes and return the SHA-256 of all of them."""
        while self._stored.read(READ_BYTES):
            pass
        return self._stored.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.content.close()
        self._stored.close()


class _CheckedReader(io.RawIOBase):
    """Stored bytes, with a sentence for whatever goes wrong."""

    def __init__(self, url: str) -> None:
        self.url = url
        with _failures(url):
            self._source = _open_raw(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _failures(self.url):
            return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io hands over is a memoryview
        with _failures(self.url):
            data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


class _DigestingReader(_CheckedReader):
    """Stored bytes, digested and counted as they pass."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = super().readinto(buffer)
        self._sha256.update(buffer[:count])
        self.num_bytes += count
        return count

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _expand_local(pattern: str) -> list[str]:
    path = os.path.expanduser(pattern)  # noqa: PTH111 - a pattern is no path
    if os.path.lexists(path):
        return [path]
    if not glob.has_magic(path):
        raise UsageError(f"{pattern}: no such file or folder; check the path")
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - absolute patterns and ** in one
    if not matches:
        raise UsageError(
            f"{pattern}: no file matches this pattern; check it, and quote it if the shell should not see it"
        )
    return matches


def _expand_remote(pattern: str) -> list[str]:
    filesystem, path = _filesystem(pattern)
    with _failures(pattern):
        if not any(char in path for char in "*[") or filesystem.exists(path):
            return [pattern]
        matches = sorted(str(filesystem.unstrip_protocol(match)) for match in filesystem.glob(path))
    if not matches:
        raise UsageError(f"{pattern}: no object matches this pattern; check it")
    return matches


def _open_raw(url: str) -> BinaryIO:
    if is_local(url):
        return Path(url).open("rb", buffering=0)
    filesystem, path = _filesystem(url)
    return cast("BinaryIO", filesystem.open(path, "rb"))


def _filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        # Cached listings miss objects that are there; cached clients keep old endpoints and credentials.
        filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ValueError as error:
        raise UsageError(f"{url}: {error}; use a local path or a scheme such as s3://, gs://, https://") from error
    except ImportError as error:
        raise UsageError(f"{url}: this scheme needs a package that is not installed ({error})") from error
    return filesystem, path


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Turn what a place raises into an error with a sentence."""
    try:
        yield
    except EverplexError:
        raise
    except Exception as error:  # every cloud client raises a family of its own; the store's tables sort them
        cause = error.__cause__  # fsspec's HTTP client says "not found" of a server that it did not reach
        if isinstance(cause, Exception) and classify(cause).verdict is Verdict.TRANSIENT:
            raise store_error(cause, "read", url) from error
        if classify(error).verdict is Verdict.MISSING:
            raise UsageError(f"{url}: no such file; check the path") from error
        if isinstance(error, IsADirectoryError):
            raise UsageError(
                f"{url} is a folder; name the files in it, for example {url.rstrip('/')}/*.jsonl"
            ) from error
        raise store_error(error, "read", url) from error
