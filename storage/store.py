"""The seam between everplex and any object store: three verbs, one for derived views, and `open_store`."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Entry", "Store"]


class Entry(NamedTuple):
    """One object in a listing."""

    key: str
    stored_bytes: int
    modified: float | None
    """Seconds since the epoch by the store's own clock, where it tells."""


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
