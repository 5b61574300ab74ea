"""Ranks that meet once, exchange values and leave in time, whatever becomes of the others.

What torch.distributed does not notice is checked here: ranks that run something else (a header of one tensor before
anything is exchanged), a failure of one rank between collectives (told on a board before the next one), additions that
could wrap, a peer that is gone (the board tells who was not heard of). Tensors are on the CPU and the backend is gloo.
"""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store

from everplex.stages.exact import check_additions
from everplex.storage.errors import EverplexError, IncompleteError

MAGIC = 0x6576_6572_0001
"""First number of the header; its last digits are the version of what the ranks say to each other."""
DESTROY_SECONDS = 5.0
POLL_SECONDS = 0.02

T = TypeVar("T")


class CollectiveFailed(IncompleteError):  # noqa: N818 - an event that the caller answers with the offline merge
    """The ranks could not merge together. `missing` are those that were not heard of, where it is known."""

    def __init__(self, reason: str, missing: Sequence[int] = ()) -> None:
        absent = f"; missing ranks: {', '.join(map(str, missing))}" if missing else ""
        super().__init__(f"the collective merge failed: {reason}{absent}; the offline merge gives the same numbers")
        self.missing = list(missing)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Who takes part, and how long they wait for each other."""

    rendezvous: Store
    """A key-value store of torch that all ranks reach and that no other meeting uses."""
    rank: int
    world_size: int
    group_size: int
    """Ranks that add up among themselves first: those of a node."""
    arrival_seconds: float = 30.0
    """How long ranks wait for each other before they start, and for each message."""
    step_seconds: float = 300.0
    """How long they wait for the slowest reader."""


@contextmanager
def gather(meeting: Meeting, identity: Sequence[str]) -> Iterator["Gathering"]:
    """Meet with ranks that have the same `identity`, texts that name what is to be done.

    Raises CollectiveFailed, on every rank that is still there, for whatever goes wrong inside.
    """
    board = _Board(meeting)
    try:
        board.meet("present", meeting.arrival_seconds)
        with _process_group(meeting):
            group = Gathering(board, meeting)
            group.check_header(identity)
            yield group
    except CollectiveFailed as error:
        board.leave(str(error))
        raise
    except RuntimeError as error:  # what torch.distributed raises, whatever happened
        board.leave(str(error))
        raise CollectiveFailed(str(error).partition("\n")[0], board.silent()) from error


class _Board:
    """Notes that ranks leave for each other; unlike a collective it tells who did not come."""

    def __init__(self, meeting: Meeting) -> None:
        self._store = PrefixStore("everplex-board", meeting.rendezvous)
        self._meeting = meeting

    def meet(self, step: str, seconds: float, note: str = "") -> list[str]:
        """Leave a note and return those of all ranks. Raises CollectiveFailed naming who left none in time."""
        ranks = range(self._meeting.world_size)
        self._store.set(f"{step}/{self._meeting.rank}", f"+{note}")
        deadline = time.monotonic() + seconds
        while not self._store.check([f"{step}/{rank}" for rank in ranks]):
            self._check_left()
            if time.monotonic() > deadline:
                absent = [rank for rank in ranks if not self._store.check([f"{step}/{rank}"])]
                raise CollectiveFailed(f"ranks did not come within {seconds:g} s ({step})", absent)
            time.sleep(POLL_SECONDS)
        self._check_left()
        return [self._store.get(f"{step}/{rank}").decode()[1:] for rank in ranks]

    def leave(self, reason: str) -> None:
        """Tell the others not to wait."""
        try:
            self._store.set("left", reason)
            self._store.set(f"left/{self._meeting.rank}", reason)
        except RuntimeError:
            return  # the store went with the rank that held it; the others find out as this one did

    def silent(self) -> list[int]:
        """Return the ranks that have not told that they leave, after waiting for them a little."""
        ranks = range(self._meeting.world_size)
        deadline = time.monotonic() + min(self._meeting.arrival_seconds, DESTROY_SECONDS)
        try:
            while True:
                absent = [rank for rank in ranks if not self._store.check([f"left/{rank}"])]
                if not absent or time.monotonic() > deadline:
                    return absent
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            return []  # the store went with the rank that held it

    def _check_left(self) -> None:
        if self._store.check(["left"]):
            raise CollectiveFailed(f"another rank left: {self._store.get('left').decode()}")


class Gathering:
    """Collectives of all ranks, after each step in which one could fail alone."""

    def __init__(self, board: _Board, meeting: Meeting) -> None:
        self._board = board
        self._meeting = meeting
        self.rank, self.world_size = meeting.rank, meeting.world_size
        dist.monitored_barrier(timeout=timedelta(seconds=meeting.arrival_seconds), wait_all_ranks=True)
        size = meeting.group_size
        nodes = [list(range(start, min(start + size, self.world_size))) for start in range(0, self.world_size, size)]
        groups = [dist.new_group(ranks) for ranks in nodes]  # every rank makes every group, in the same order
        self._leaders = dist.new_group([ranks[0] for ranks in nodes])
        self._node = groups[self.rank // size]
        self._leader = nodes[self.rank // size][0]
        self._num_steps = 0

    def check_header(self, identity: Sequence[str]) -> None:
        """Raise CollectiveFailed where a rank runs something else: torch would add it up without a word."""
        texts = [*identity, f"{self.world_size} ranks in groups of {self._meeting.group_size}"]
        digest = hashlib.sha256("\0".join(texts).encode()).digest()
        numbers = [int.from_bytes(digest[start : start + 4], "big") for start in range(0, len(digest), 4)]
        header = torch.tensor([MAGIC, *numbers], dtype=torch.int64)
        headers = [torch.zeros_like(header) for _ in range(self.world_size)]
        dist.all_gather(headers, header)
        others = [str(rank) for rank, found in enumerate(headers) if not torch.equal(found, headers[0])]
        if others:
            raise CollectiveFailed(
                f"ranks {', '.join(others)} run another version, plan, model or setting than rank 0 does"
            )

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Do something that may fail on one rank, and then fail on all of them."""
        note = ""
        cause: EverplexError | None = None
        try:
            yield
        except CollectiveFailed:
            raise
        except EverplexError as error:
            note, cause = str(error), error
        self._num_steps += 1
        notes = self._board.meet(f"{self._num_steps} {step}", self._meeting.step_seconds, note)
        for rank, text in enumerate(notes):
            if text:
                raise CollectiveFailed(f"{step}: rank {rank}: {text}") from cause

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return what every rank gave."""
        length = torch.tensor([len(data)])
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length)
        longest = max(int(one) for one in lengths)
        if not longest:
            return [b""] * self.world_size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        lots = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(lots, padded)
        return [lot.numpy().tobytes()[: int(length)] for lot, length in zip(lots, lengths, strict=True)]

    def gather_json(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks."""
        return [msgspec.json.decode(data, type=kind) for data in self.gather_bytes(msgspec.json.encode(value))]

    def add(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add up by node, then the nodes' leaders among themselves, then hand the sum back."""
        check_additions(self.world_size)
        tensor = torch.from_numpy(np.ascontiguousarray(numbers, np.int64).copy())
        dist.reduce(tensor, self._leader, group=self._node)
        if self.rank == self._leader:
            dist.all_reduce(tensor, group=self._leaders)
        dist.broadcast(tensor, self._leader, group=self._node)
        summed: NDArray[np.int64] = tensor.numpy()
        return summed


@contextmanager
def _process_group(meeting: Meeting) -> Iterator[None]:
    """Meet in a gloo group, and leave it within a deadline: destroying can hang where a peer is gone."""
    dist.init_process_group(
        "gloo",
        store=PrefixStore("everplex-group", meeting.rendezvous),
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=timedelta(seconds=meeting.arrival_seconds),
    )
    try:
        yield
    finally:
        destroy = threading.Thread(target=dist.destroy_process_group, name="destroy", daemon=True)
        destroy.start()
        destroy.join(DESTROY_SECONDS)
