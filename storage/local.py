"""A folder as an object store: whole files or none, made once, there after a power cut.

The order that makes it so: a temporary file beside the final name, fsync, a hard link to the final name (it fails if
the name exists, so one of any number of writers wins), fsync of the folder and of every folder above that is new.
"""

import ctypes
import errno
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from everplex.storage.classify import store_error
from everplex.storage.codec import same_content
from everplex.storage.errors import ObjectExistsError, ObjectNotFoundError, StoreRefusedError, UsageError
from everplex.storage.keys import TEMPORARY, check_key, check_prefix, is_key
from everplex.storage.store import Entry

__all__ = ["LocalStore", "cache_folder", "expand_home"]

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_EXCLUSIVE_RENAME = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}  # some network mounts; their servers order names by themselves
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCL = -100, 1, 4


class LocalStore:
    """Objects as files below one folder, which is made at the first write. Implements Store."""

    conditional_create = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = expand_home(folder).absolute()
        self._durable: set[Path] = set()
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file; expected a folder, or a path where one can be made")

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self.folder)

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises ObjectNotFoundError."""
        path = self._path(key)
        try:
            return self._read(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectNotFoundError("read", str(path), "there is no such file") from error
        except OSError as error:
            raise store_error(error, "read", str(path)) from error

    def create(self, key: str, data: bytes) -> None:
        """Make a file that did not exist; an existing one of equal content is success. Raises ObjectExistsError."""
        path = self._path(key)
        try:
            temporary = self._write_temporary(path, data)
            try:
                link_exclusively(temporary, path)
            except FileExistsError:
                if not same_content(key, self._read(path), data):
                    reason = "a file of that name holds something else"
                    raise ObjectExistsError("create", str(path), reason) from None
            finally:
                with suppress(FileNotFoundError):  # an exclusive rename has moved it away
                    temporary.unlink()
            # An equal file may be another writer's that has not got this far: what is acknowledged must last.
            _sync_folder(path.parent)
        except OSError as error:
            raise store_error(error, "create", str(path)) from error

    def publish(self, key: str, data: bytes) -> None:
        """Make or replace a derived view."""
        path = self._path(key)
        try:
            temporary = self._write_temporary(path, data)
            try:
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except OSError as error:
            raise store_error(error, "write", str(path)) from error

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every file below `prefix` that is not still being written; nothing where the folder does not exist."""
        start = self.folder / check_prefix(prefix)
        try:
            yield from self._walk(start, prefix, frozenset())
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise store_error(error, "list", str(start)) from error

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            # NFS remembers that a name was absent for up to a minute, until its folder is opened again.
            with os.scandir(path.parent) as entries:
                next(entries, None)
            return path.read_bytes()

    def _write_temporary(self, path: Path, data: bytes) -> Path:
        """Write and fsync `data` beside `path` with mode 0600; nothing is left behind if that fails."""
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        self._make_durable(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        try:
            descriptor = os.open(temporary, flags, 0o600)
        except FileNotFoundError:  # the folder was removed since it was made
            self._durable.clear()
            self._make_durable(path.parent)
            descriptor = os.open(temporary, flags, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _make_durable(self, folder: Path) -> None:
        """Make `folder` and those above it, and fsync the names of all that a writer of this store may have made."""
        above = self.folder not in (folder, *folder.parents)
        if folder in self._durable or (above and folder.exists()):
            return
        self._make_durable(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        except FileNotFoundError as error:  # the folder above is there: it takes no new ones, as those of /proc
            hint = "choose a place that may be written"
            raise StoreRefusedError("make", str(folder), "no folder can be made there", hint) from error
        with suppress(PermissionError):  # OUT may lie in a folder that we may pass but not open
            _sync_folder(folder.parent)
        self._durable.add(folder)

    def _walk(self, folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[Entry]:
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a symbolic link that leads back up
            return
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            key = prefix + entry.name
            if not is_key(key):
                continue
            try:
                if entry.is_file():
                    yield Entry(key, partial(_modified, entry))
                elif entry.is_dir():
                    yield from self._walk(folder / entry.name, f"{key}/", above | {identity})
            except FileNotFoundError:  # a dangling link, or gone meanwhile
                continue


def _modified(entry: os.DirEntry[str]) -> float | None:
    try:
        return entry.stat().st_mtime
    except OSError:  # gone meanwhile, or on a mount that is: then nothing is told
        return None


def link_exclusively(temporary: Path, final: Path) -> None:
    """Give `temporary` the name `final` as well, or instead. Raises FileExistsError if that name is taken.

    A hard link where the mount has them, else an exclusive rename. A mount with neither gets a check and a rename: a
    reader still sees whole files only, but of two writers at the same instant the later one wins.
    """
    try:
        os.link(temporary, final)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
    else:
        return
    try:
        _rename_exclusively(temporary, final)
    except OSError as error:
        if error.errno not in _NO_EXCLUSIVE_RENAME:
            raise
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
        temporary.replace(final)


def _rename_exclusively(source: Path, target: Path) -> None:
    if sys.platform == "win32":
        source.rename(target)  # exclusive there
        return
    library = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(source), os.fsencode(target)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(old, new, _RENAME_EXCL)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with its `~` or `~user` replaced. Raises UsageError where that home folder is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: the home folder that it begins with is not known; give the whole path") from error


def cache_folder() -> Path:
    """Return this user's cache folder, made if need be.

    EVERPLEX_CACHE if set, else XDG_CACHE_HOME/everplex, else ~/.cache/everplex. Raises UsageError.
    """
    if named := os.environ.get("EVERPLEX_CACHE"):
        folder = expand_home(named)
    else:
        folder = expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "everplex"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"could not make the cache folder {folder}: {error.strerror}; "
            "set EVERPLEX_CACHE to a folder that may be written"
        ) from error
    return folder
