"""The words between a schedule and its pump: what to do next."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from everplex.stages.records import Kind

__all__ = ["Action", "Busy", "Done", "Extra", "Refresh", "Take", "Wait"]


class Extra(NamedTuple):
    """Work beyond the first record of a chunk: an audit, a conflict to settle, a non-finite loss to try again.

    A worker does each item at most once; items that differ in any field are different ones.
    """

    chunk: str
    kind: Kind
    exclude: frozenset[str] = frozenset()
    """Devices that must not do it."""


class Take(NamedTuple):
    """Evaluate this chunk."""

    chunk: str
    kind: Kind = "work"
    why: Literal["shard", "backup", "pool", "extra"] = "shard"


@dataclass(frozen=True)  # not an empty tuple, which would be false
class Refresh:
    """List the store and tell `refreshed` or `refresh_failed`."""


@dataclass(frozen=True)  # not an empty tuple, which would be false
class Busy:
    """Evaluate what is held first."""


class Wait(NamedTuple):
    """Nothing to do for so long, unless something becomes durable."""

    seconds: float


class Done(NamedTuple):
    """Nothing left for this worker to do."""

    complete: bool


Action = Take | Refresh | Busy | Wait | Done
