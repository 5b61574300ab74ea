"""What is known of every evaluation of a chunk, a row each: compact enough for millions, enough to judge them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.records import Environment

WORK, AUDIT, SENTINEL = range(3)
KINDS = {"work": WORK, "audit": AUDIT, "sentinel": SENTINEL}

COPY = np.dtype(
    [
        ("chunk", "<i4"),  # row of the plan's table of chunks
        ("source", "<i4"),  # index into `Copies.sources`
        ("line", "<i4"),  # index of the record in its segment
        ("tokens", "<i4"),
        ("digest_high", "<u8"),  # the first 128 bits of the record's digest
        ("digest_low", "<u8"),
        ("token_digest", "<u8"),  # the first 64 bits
        ("batch_shape", "<i8"),  # a hash, equal for equal shapes in one process
        ("nll", "<f8"),  # nats; NaN where a loss is not finite
        ("seconds", "<f8"),
        ("kind", "u1"),
        ("finite", "?"),
    ]
)


class Source(NamedTuple):
    """A segment that was read and believed, and what its header says of all its records."""

    key: str
    worker: str
    first: int
    seq: int
    device: str
    environment: Environment
    rank: int | None
    store_requests: dict[str, int]
    profile: dict[str, float]
    created: float
    reused_from: str | None = None


class Copies(NamedTuple):
    """All evaluations that were read: `table` has dtype COPY, in no particular order."""

    table: NDArray[np.void]
    sources: list[Source]

    @property
    def current(self) -> list[Source]:
        """Sources that hold a row of the table, sorted by key."""
        return sorted((self.sources[index] for index in np.unique(self.table["source"])), key=lambda source: source.key)

    def of_sources(self, values: list[int]) -> NDArray[np.int64]:
        """Spread one number per source over the rows of the table."""
        spread: NDArray[np.int64] = np.array(values, np.int64)[self.table["source"]]
        return spread

    def ranks(self, attribute: str) -> NDArray[np.int64]:
        """Position of each row's `attribute` of its source in the sorted distinct ones: comparable on any machine."""
        names = [getattr(source, attribute) for source in self.sources]
        order = {name: position for position, name in enumerate(sorted(set(names)))}
        return self.of_sources([order[name] for name in names])
