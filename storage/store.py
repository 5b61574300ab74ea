"""The seam between everplex and any object store: three verbs, one for derived views, and `open_store`."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # they import this module
    from everplex.storage.retry import RetryingStore, RetryPolicy

__all__ = ["Entry", "Page", "Store", "open_store"]


class Entry(NamedTuple):
    """One object in a listing."""

    key: str
    look: Callable[[], float | None] = lambda: None
    """Finds out when it was made: a folder would have to ask for each file, and hardly anybody wants to know."""

    @property
    def modified(self) -> float | None:
        """Seconds since the epoch by the store's own clock, where it tells."""
        return self.look()


class Page(NamedTuple):
    """A part of a listing, as services give it."""

    entries: Sequence[Entry]
    next_token: str | None
    """What to ask the next page with; None after the last."""


@runtime_checkable
class Store(Protocol):
    """A flat namespace of immutable objects below one URL.

    Keys are relative, `/`-separated and never empty. Visibility is atomic: a reader sees a whole object or none.
    Every call ends within the store's deadline. Errors are the StoreError family, with the operation and the place.
    """

    @property
    def url(self) -> str:
        """Where the store is, as a user would write it (no credentials)."""
        ...

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises ObjectNotFoundError."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Make an object that did not exist.

        An existing object of equal decoded content is success (our own write whose answer was lost, or another
        worker's equal one); other content raises ObjectExistsError. Where a store has no conditional create, two
        racing writers may both succeed: nothing in everplex rests on it.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix` (empty, or ending in `/`), in any order."""
        ...

    def publish(self, key: str, data: bytes) -> None:
        """Make or replace a derived view. Never used for anything that is counted."""
        ...


def open_store(
    url: str,
    *,
    options: Mapping[str, str] | None = None,
    retry: "RetryPolicy | None" = None,
    stop: threading.Event | None = None,
) -> "RetryingStore":
    """Return the store at `url`: a plain path or file:// URL, memory:// (one process only), or any fsspec URL.

    `options` are `--store-option` values for the filesystem; a set `stop` ends retries. Nothing is contacted or made
    before the first call. Raises UsageError for a path that is a file, an unknown scheme, a package not installed.
    """
    # Backends are imported where they are used: most commands need one, and importing this module needs none.
    from everplex.storage.retry import RetryingStore  # noqa: PLC0415

    scheme, separator, rest = url.partition("://")
    inner: Store
    if not separator or scheme in {"file", "local"}:
        from everplex.storage.local import LocalStore  # noqa: PLC0415

        inner = LocalStore(rest if separator else url)
    else:
        from everplex.storage.remote import FsspecStore  # noqa: PLC0415

        inner = FsspecStore(url, options)
    return RetryingStore(inner, retry, stop)
