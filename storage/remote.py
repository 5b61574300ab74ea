"""Any fsspec filesystem as an object store, used so that its traps stay shut.

An object is one `pipe_file` of whole bytes, because leaving `with fs.open(url, "wb")` by an exception publishes what
was written so far. Listing caches are off, because with them an object that another process made is not there. Every
call ends by an outer deadline, because a PUT that waits for `100 Continue` never times out by itself. The filesystem
is made at the first call of each process, because none survives a fork. Nothing ever makes a bucket or a folder.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn
import msgspec
from fsspec.exceptions import FSTimeoutError

from everplex.storage.classify import store_error
from everplex.storage.codec import same_content
from everplex.storage.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreRefusedError,
    StoreUnavailableError,
    UsageError,
)
from everplex.storage.keys import check_key, check_prefix, is_key
from everplex.storage.store import Entry, Page

__all__ = ["FsspecStore", "filesystem_options"]

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Which extra of everplex brings the package for a scheme."""

DEADLINE_SECONDS = 60.0

_VERBATIM = {
    *("key", "secret", "token", "username", "password", "profile", "project", "version"),
    *("account_name", "account_key", "sas_token", "connection_string", "client_id", "client_secret", "tenant_id"),
}
"""Options that stay text even where they look like a number."""

_Request = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A filesystem's method, its positional and its named arguments."""

_memory_lock = threading.Lock()


class FsspecStore:
    """Objects below one fsspec URL. Implements Store; lists page by page where the service does.

    `options` go to the filesystem as `--store-option` gave them; `deadline_seconds` bounds every request.
    Raises UsageError for a scheme that nobody knows, or whose package is not installed.
    """

    def __init__(
        self, url: str, options: Mapping[str, str] | None = None, *, deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        self._url = url.rstrip("/")
        self.scheme = url.partition("://")[0]
        self.deadline_seconds = deadline_seconds
        self._options = filesystem_options(options or {})
        self._fs: Any = None
        self._pid = 0
        self._root = ""
        self._lock = threading.Lock()
        if "::" in url:
            raise UsageError(f"store {self.url}: chained URLs cannot be written to; expected one scheme://path")
        cls = _filesystem_class(self.scheme, self.url)
        put = cls._pipe_file if cls.async_impl else cls.pipe_file
        inherited = put is fsspec.AbstractFileSystem.pipe_file  # it checks, then writes
        takes_mode = "mode" in inspect.signature(put).parameters or EXTRAS.get(self.scheme) == "azure"
        self.conditional_create = takes_mode and not inherited
        """Whether the filesystem has a conditional create at all; the service behind it may still ignore it."""
        if not urlsplit(url).netloc and self.scheme != "memory":
            raise UsageError(f"store {self.url}: expected the name of a bucket after {self.scheme}://")

    @property
    def url(self) -> str:
        """The URL, without any user name or password in it."""
        scheme, _, rest = self._url.partition("://")
        host, slash, path = rest.partition("/")
        if self.scheme not in {"abfs", "abfss", "az"}:  # there `container@account` is no credential
            host = host.rpartition("@")[2]
        return f"{scheme}://{host}{slash}{path}"

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises ObjectNotFoundError."""
        data: bytes = self._call("read", check_key(key), lambda _, path: ("cat_file", (path,), {}))
        return data

    def create(self, key: str, data: bytes) -> None:
        """Make an object that did not exist; one of equal content is success. Raises ObjectExistsError.

        "It exists" may be the answer to our own write, sent again below us after its first answer was lost: what is
        there is read back and compared.
        """
        try:
            if self.conditional_create:
                self._put("create", check_key(key), data, mode="create")
                return
            with suppress(ObjectNotFoundError):
                self._compare(key, data)
                return
            self._put("create", check_key(key), data)
        except ObjectExistsError:
            try:
                self._compare(key, data)
            except ObjectNotFoundError as error:
                reason = "the store says that it exists, but does not return it"
                raise StoreUnavailableError("create", f"{self.url}/{key}", reason) from error

    def publish(self, key: str, data: bytes) -> None:
        """Make or replace a derived view."""
        self._put("write", check_key(key), data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`."""
        page = self.list_page(prefix, None)
        yield from page.entries
        while page.next_token is not None:
            page = self.list_page(prefix, page.next_token)
            yield from page.entries

    def list_page(self, prefix: str, token: str | None) -> Page:
        """Return the first page of a listing, or the one that `token` stands for."""
        check_prefix(prefix)
        if self.scheme in {"s3", "s3a"}:
            return self._list_page_s3(prefix, token)
        try:
            found = self._call("list", prefix, lambda _, path: ("find", (path,), {"detail": True}))
        except ObjectNotFoundError:
            return Page([], None)
        entries = (self._entry(name, info) for name, info in found.items() if info.get("type") == "file")
        return Page([entry for entry in entries if is_key(entry.key) and entry.key.startswith(prefix)], None)

    def renew(self) -> None:
        """Forget the client; the next call makes one with the credentials of that moment."""
        with self._lock:
            self._fs = None

    def close(self) -> None:
        """Let go of the client; a later call makes a new one."""
        self.renew()

    def _put(self, operation: str, key: str, data: bytes, **how: str) -> None:
        # The check and the write of a memory filesystem are two steps.
        with _memory_lock if self.scheme == "memory" else nullcontext():
            self._call(operation, key, lambda _, path: ("pipe_file", (path, data), how))

    def _compare(self, key: str, data: bytes) -> None:
        if not same_content(key, self.get(key), data):
            reason = "an object of that name holds something else"
            raise ObjectExistsError("create", f"{self.url}/{key}", reason)

    def _list_page_s3(self, prefix: str, token: str | None) -> Page:
        def request(fs: Any, path: str) -> _Request:
            bucket, below, _ = fs.split_path(path)
            below = f"{below.rstrip('/')}/" if below else ""
            more = {"ContinuationToken": token} if token else {}
            return "call_s3", ("list_objects_v2",), {"Bucket": bucket, "Prefix": below + prefix, **more}

        page = self._call("list", "", request)
        bucket = self._root.partition("/")[0]
        entries = []
        for item in page.get("Contents", []):
            entry = self._entry(f"{bucket}/{item['Key']}", {"modified": item["LastModified"]})
            if is_key(entry.key):
                entries.append(entry)
        return Page(entries, page.get("NextContinuationToken") if page.get("IsTruncated") else None)

    def _entry(self, name: str, info: Mapping[str, Any]) -> Entry:
        when = next((info[field] for field in _TIMES if info.get(field) is not None), None)
        modified = when.timestamp() if isinstance(when, datetime) else when
        seconds = float(modified) if isinstance(modified, int | float) else None
        return Entry(name[len(self._root) :].lstrip("/"), lambda: seconds)

    def _call(self, operation: str, key: str, request: Callable[[Any, str], _Request]) -> Any:
        """Run one method of the filesystem within the deadline; every failure comes out as a StoreError."""
        location = f"{self.url}/{key}".rstrip("/")
        try:
            fs = self._filesystem()
            method, args, how = request(fs, f"{self._root}/{key}".rstrip("/"))
            if fs.async_impl:
                return fsspec.asyn.sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=self.deadline_seconds, **how)
            return _in_thread(getattr(fs, method), args, how, self.deadline_seconds)
        except UsageError:
            raise
        except FSTimeoutError as error:
            reason = f"no answer within {self.deadline_seconds:g} s"
            raise StoreUnavailableError(operation, location, reason) from error
        except NotImplementedError as error:
            reason = f"{self.scheme}:// cannot do that"
            raise StoreRefusedError(operation, location, reason, "use a store that can be written") from error
        except Exception as error:  # whatever a backend raises: the tables decide what it means
            raise store_error(error, operation, location) from error

    def _filesystem(self) -> Any:
        with self._lock:
            if self._fs is None or self._pid != os.getpid():
                self._fs, self._root = self._connect()
                self._pid = os.getpid()
            return self._fs

    def _connect(self) -> tuple[Any, str]:
        options = _merge(_defaults(self.scheme, self.deadline_seconds), self._options)
        options |= {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            fs, root = fsspec.core.url_to_fs(self._url, **options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"store {self.url}: {error}; check the URL and the --store-option values") from error
        if hasattr(fs, "retries"):
            fs.retries = 1  # s3fs and gcsfs would multiply what is retried below and above them
        return fs, root.rstrip("/")


_TIMES = ("modified", "LastModified", "last_modified", "mtime", "updated", "created")


def filesystem_options(given: Mapping[str, str]) -> dict[str, Any]:
    """Return `--store-option` values as a filesystem takes them.

    A dot in a name nests (`client_kwargs.region_name=eu-west-1`); values that are JSON numbers, booleans, null, lists
    or objects become such, except credentials, which stay text.
    """
    options: dict[str, Any] = {}
    for name, text in given.items():
        *outer, last = name.split(".")
        place = options
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageError(f"--store-option {name}: {part} was already given a value of its own")
        place[last] = text if last in _VERBATIM or last.startswith("aws_") else _json_or_text(text)
    return options


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _filesystem_class(scheme: str, url: str) -> Any:
    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise UsageError(
            f"store {url}: unknown scheme {scheme}://; expected a path, or s3://, gs://, az://, memory:// or another "
            "scheme that fsspec knows"
        ) from error
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"pip install everplex[{extra}]" if extra else str(error)
        raise UsageError(f"store {url}: the package for {scheme}:// is not installed; {remedy}") from error


def _defaults(scheme: str, deadline_seconds: float) -> dict[str, Any]:
    """Options that keep the layers below ours short: few tries, one request per object, checked downloads."""
    if scheme in {"s3", "s3a"}:
        timeouts = {"connect_timeout": min(10.0, deadline_seconds), "read_timeout": deadline_seconds}
        retries = {"mode": "standard", "total_max_attempts": 2}
        return {"config_kwargs": {**timeouts, "retries": retries}, "max_concurrency": 1}
    if scheme in {"gs", "gcs"}:
        return {"consistency": "md5"}
    return {}


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **given}
    for name in defaults.keys() & given.keys():
        if isinstance(defaults[name], dict) and isinstance(given[name], dict):
            merged[name] = _merge(defaults[name], given[name])
    return merged


def _in_thread(call: Callable[..., Any], args: Any, how: Any, deadline_seconds: float) -> Any:
    """Run a call that cannot be cancelled; past the deadline it is left behind. Raises FSTimeoutError."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call(*args, **how))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="everplex-store-call", daemon=True)
    thread.start()
    thread.join(deadline_seconds)
    if thread.is_alive():
        raise FSTimeoutError
    if failure:
        raise failure[0]
    return outcome[0]
