"""Who evaluates what, without a coordinator: a fixed order of all chunks, shards, and owners for backup passes.

Everything here depends on the whole plan and the present world size, never on what is recorded or pending, so ranks
that list the store at different instants still agree. Nothing that is stored depends on it.
"""

import hashlib
from collections.abc import Iterable, Sequence

__all__ = ["assign", "fixed_order", "owner"]

_MASK = (1 << 64) - 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def fixed_order(plan_digest: str, chunk_ids: Iterable[str]) -> list[str]:
    """Return the chunks in the pseudo-random order that all workers of a plan share."""
    return sorted(chunk_ids, key=lambda chunk: (_hash(f"{plan_digest}:{chunk}"), chunk))


def assign(order: Sequence[str], world_size: int) -> list[Sequence[str]]:
    """Return the shard of each rank: the fixed order, position modulo world size."""
    return [order[rank::world_size] for rank in range(world_size)]


def ranking(chunk: str, world_size: int) -> Sequence[int]:
    """Return all ranks, the best first, by rendezvous hashing: each has its own pseudo-random claim to the chunk."""
    seed = _hash(chunk)
    return sorted(range(world_size), key=lambda rank: (_mix(seed + rank * 0x9E3779B97F4A7C15), rank), reverse=True)


def owner(chunk: str, backup_pass: int, world_size: int) -> int:
    """Return the rank that a missing chunk belongs to in a backup pass (1, 2, …).

    Pass k takes the k-th of the chunk's rendezvous ranking, so each pass is a partition and after `world_size` passes
    every rank, so every living one, has had its turn.
    """
    return ranking(chunk, world_size)[(backup_pass - 1) % world_size]


def _mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
