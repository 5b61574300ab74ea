"""The writer as a state machine: records become segments, and a chunk is done only when the store has acknowledged it.

No threads, clocks or I/O: it says what to do next (`next`), someone does it (`perform`) and tells it how that went
(`succeeded`, `failed`). One pump is `everplex.stages.write.WriterThread`, a simulation is another::

    queue ──▶ header ──▶ store ──▶ acknowledged            at most one step at a time, so at most one PUT in flight;
                           │                               what queues meanwhile goes into the next segment
                           ╰──▶ spool ──▶ recover ──▶ acknowledged
                                  ╰──▶ lost (missing: evaluated again by whoever sees it)

`capacity` bounds the records that are submitted and not acknowledged, so that a SIGKILL loses at most that many and
the chunk being evaluated. With the default of 1, every chunk is a segment of its own; larger values group.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from everplex.stages.layout import ROLLUP_EVERY
from everplex.stages.records import Header, Kind, Record
from everplex.stages.segments import decode_segment, encode_record, encode_segment
from everplex.storage.errors import (
    CorruptObjectError,
    EverplexError,
    ObjectExistsError,
    StoreError,
    StoreUnavailableError,
)
from everplex.storage.store import Store

__all__ = ["Change", "Outcome", "QueueFullError", "Receipt", "Spool", "Step", "Writer", "perform"]

MAX_COLLISIONS = 3


class Spool(Protocol):
    """A place on this machine for segments that the store could not take: the same bytes under the same keys."""

    def create(self, key: str, data: bytes) -> None:
        """Keep a segment, durably."""
        ...

    def get(self, key: str) -> bytes:
        """Return a segment. Raises ObjectNotFoundError."""
        ...

    def remove(self, key: str) -> None:
        """Forget a segment that the store has acknowledged."""
        ...


class Receipt(NamedTuple):
    """One record as the writer accounts for it."""

    chunk: str
    kind: Kind


class Change(NamedTuple):
    """What was settled since the last time."""

    durable: list[Receipt]
    """In the store since."""
    aside: list[Receipt]
    """In the spool, or lost: this worker is rid of them and the store doesn't have them yet."""


class Step(NamedTuple):
    """One thing to do: make a header, PUT a segment, spool it, or PUT one that was spooled."""

    do: Literal["header", "store", "spool", "recover"]
    key: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """Where everything that was submitted is."""

    stored: int
    """Records that the store acknowledged."""
    spooled: list[Receipt]
    lost: list[Receipt]
    """Neither stored nor spooled: the chunks stay missing."""
    stuck: bool = False
    """Whether the thread is still inside a call that does not return; then only `os._exit` ends the process."""


class QueueFullError(EverplexError):
    """The queue is full: wait for an acknowledgement."""

    exit_code = 75


@dataclass
class _Segment:
    """A segment of this writer; when it has left its hands, the lines stay for the next roll-up."""

    seq: int
    lines: list[bytes]
    receipts: list[Receipt]
    key: str = ""
    data: bytes = b""
    repeats: list["_Segment"] = field(default_factory=list)
    accounted: bool = False
    """Whether its records are in the store, or in a later segment of their own."""


class _SpoolError(Exception):
    """A spooled segment could not be read back whole."""


class Writer:
    """Queue, group commit, roll-ups, spill: see the module. Times are monotonic seconds, given by the caller."""

    def __init__(
        self,
        *,
        capacity: int = 1,
        spooling: bool = True,
        spool_cap: int = 1024,
        cooldown_seconds: float = 30.0,
        rollup_every: int = ROLLUP_EVERY,
    ) -> None:
        """Make an empty writer.

        `spooling` tells whether there is a spool, `spool_cap` how many records may be out of the store before the
        writer fails, `cooldown_seconds` how long an unavailable store is left alone (at least as long as the failed
        attempt took, so that trying never takes more than half of the time).
        """
        self._capacity = capacity
        self._spooling = spooling
        self._spool_cap = spool_cap
        self._cooldown = cooldown_seconds
        self._rollup_every = rollup_every
        self._queue: deque[tuple[bytes, Receipt]] = deque()
        self._sealed: _Segment | None = None
        self._to_spool = False
        self._step: Step | None = None
        self._started = 0.0
        self._header: Header | None = None
        self._history: list[_Segment] = []
        self._seq = 0
        self._collisions = 0
        self._retry_at = float("-inf")
        self._stored = 0
        self._durable: list[Receipt] = []
        self._aside: list[Receipt] = []
        self._spooled: dict[str, list[Receipt]] = {}
        self._lost: dict[str, list[Receipt]] = {}
        self._closing = False
        self._gave_up = False
        self._ended = False
        self.failure: BaseException | None = None

    # What the evaluator sees

    @property
    def unacknowledged(self) -> int:
        """Records that are queued or in flight."""
        return len(self._queue) + (len(self._sealed.receipts) if self._sealed is not None else 0)

    @property
    def full(self) -> bool:
        """Whether the next record has to wait."""
        return self.unacknowledged >= self._capacity

    def submit(self, record: Record, *, force: bool = False) -> None:
        """Queue a record. It is encoded here and now, so that what happens to it later changes nothing.

        Raises the writer's failure where it has failed, QueueFullError where it is full and `force` is false.
        """
        line = encode_record(record)
        if self.failure is not None:
            raise self.failure
        if self._closing or self._ended:
            raise RuntimeError("submit after close")
        if self.full and not force:
            raise QueueFullError(f"{self.unacknowledged} records wait for the store")
        self._queue.append((line, Receipt(record.chunk, record.kind)))

    def close(self) -> None:
        """Take no more records; `finished` becomes true when the rest is stored, spooled or lost."""
        self._closing = True

    @property
    def finished(self) -> bool:
        """Whether there is nothing to do and there never will be."""
        if self._ended:
            return True
        idle = self._step is None and self._sealed is None and not self._queue
        return idle and (self.failure is not None or (self._closing and (self._gave_up or not self._spooled)))

    def outcome(self, *, stuck: bool = False) -> Outcome:
        """Return where everything is now; what is queued or in flight is in none of the lists."""
        return Outcome(
            stored=self._stored,
            spooled=[receipt for receipts in self._spooled.values() for receipt in receipts],
            lost=[receipt for receipts in self._lost.values() for receipt in receipts],
            stuck=stuck,
        )

    # What the pump sees

    def next(self, now: float) -> Step | None:
        """Return the next thing to do, or None. Its end has to be told before the next call."""
        if self._step is not None:
            raise RuntimeError(f"{self._step.do} has not ended")
        self._step = self._choose(now)
        self._started = now
        return self._step

    def _choose(self, now: float) -> Step | None:
        if self._ended:
            return None
        if self._sealed is not None:
            spool = self._spooling and (self._to_spool or not self._may_try(now))
            return Step("spool" if spool else "store", self._sealed.key, self._sealed.data)
        if self._queue:
            return Step("header")
        if self._spooled and self._may_try(now):
            return Step("recover", next(iter(self._spooled)))
        return None

    def _may_try(self, now: float) -> bool:
        """Whether the store is worth a try; a closing writer doesn't wait for a cool-down, it tries once more."""
        if self.failure is not None or self._gave_up:
            return False
        return self._closing or now >= self._retry_at

    def idle_seconds(self, now: float) -> float | None:
        """Return when to look again although nothing happened; None for never."""
        return max(0.0, self._retry_at - now) if self._spooled and self.failure is None else None

    def changes(self) -> Change:
        """Return what was settled since the last call; to be asked after every event."""
        change = Change(self._durable, self._aside)
        self._durable, self._aside = [], []
        return change

    def succeeded(self, header: Header | None = None) -> None:
        """Take note that the step ended well; a header step brings the header."""
        step = self._end_step()
        if step is None:
            return
        if step.do == "header":
            assert header is not None  # perform() gives one
            self._header = header
            try:
                self._sealed = self._seal(header)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at the next submit
                self.fail(error)
        elif step.do == "spool":
            self._put_aside(self._spooled)
        else:
            self._retry_at = float("-inf")
            self._collisions = 0
            durable = self._recovered(step.key) if step.do == "recover" else self._acknowledged()
            self._stored += len(durable)
            self._durable += durable

    def _recovered(self, key: str) -> list[Receipt]:
        for segment in self._history:
            segment.accounted = segment.accounted or segment.key == key
        return self._spooled.pop(key)

    def _acknowledged(self) -> list[Receipt]:
        assert self._sealed is not None
        segment, self._sealed = self._sealed, None
        durable = list(segment.receipts)
        for earlier in segment.repeats:  # those that had failed are in the store now
            if not earlier.accounted:
                durable += self._spooled.get(earlier.key, []) + self._lost.pop(earlier.key, [])
                if earlier.key in self._spooled:
                    self._spooled[earlier.key] = []
        segment.accounted, segment.data, segment.repeats = True, b"", []
        return durable

    def failed(self, error: Exception, now: float) -> None:
        """Take note that the step ended with an error."""
        step = self._end_step()
        if step is None:
            return
        if step.do == "store":
            self._store_failed(error, now)
        elif step.do == "spool":
            self._put_aside(self._lost)
        elif step.do == "header":
            self.fail(error)
        elif isinstance(error, StoreUnavailableError):
            self._outage(now)
        elif isinstance(error, (_SpoolError, ObjectExistsError)):
            self._lost[step.key] = self._spooled.pop(step.key)
        else:
            self._fail_with(error)

    def _end_step(self) -> Step | None:
        step, self._step = self._step, None
        return None if self._ended else step

    def _store_failed(self, error: Exception, now: float) -> None:
        assert self._sealed is not None
        if isinstance(error, ObjectExistsError) and self._collisions < MAX_COLLISIONS:
            # Something else lies under our key, such as a torn write: the same records under the next one.
            self._collisions += 1
            segment, self._sealed = self._sealed, None
            segment.accounted = True
            self._queue.extendleft(reversed(list(zip(segment.lines, segment.receipts, strict=True))))
            return
        if isinstance(error, StoreUnavailableError):
            self._outage(now)
        else:
            self._fail_with(error)
        self._to_spool = self._spooling
        if not self._spooling:
            self._put_aside(self._lost)

    def _outage(self, now: float) -> None:
        self._retry_at = now + max(self._cooldown, now - self._started)
        self._gave_up = self._closing

    def _put_aside(self, where: dict[str, list[Receipt]]) -> None:
        """End the sealed segment without the store."""
        assert self._sealed is not None
        segment, self._sealed, self._to_spool = self._sealed, None, False
        where[segment.key] = segment.receipts
        self._aside += segment.receipts
        segment.data, segment.repeats = b"", []
        spooled = sum(map(len, self._spooled.values()))
        lost = sum(map(len, self._lost.values()))
        if spooled + lost >= self._spool_cap and self.failure is None:
            self._fail_with(
                StoreUnavailableError(
                    "write",
                    "segments",
                    f"the store has not taken {spooled + lost} chunks ({spooled} of them are in the local spool)",
                    "run the same command again on this machine when the store is back",
                )
            )

    def _seal(self, header: Header) -> _Segment:
        """Make the next segment of all that is queued; every 64th repeats the records of the previous 63."""
        segment = _Segment(self._seq, [line for line, _ in self._queue], [receipt for _, receipt in self._queue])
        is_rollup = (segment.seq + 1) % self._rollup_every == 0
        segment.repeats = self._history if is_rollup else []
        lines = [line for earlier in segment.repeats for line in earlier.lines]
        first = segment.repeats[0].seq if segment.repeats else segment.seq
        header = msgspec.structs.replace(header, seq=segment.seq, first=first)
        segment.key, segment.data = encode_segment(header, [*lines, *segment.lines])
        self._seq += 1
        self._queue.clear()
        self._history = [] if is_rollup else [*self._history, segment]
        return segment

    def _fail_with(self, error: Exception) -> None:
        """Fail, but save what is queued, if there is a spool."""
        self.failure = error
        if not self._spooling:
            self._drop_queue()

    def fail(self, error: BaseException) -> None:
        """Fail for good: what is queued or in flight is lost, and `error` is raised at the next submit."""
        self.failure = self.failure or error
        if self._sealed is not None:
            self._put_aside(self._lost)
        self._drop_queue()

    def abandon(self) -> list[Step]:
        """End at once, whatever is in flight; returns the segments to spool (tell `lose` of those that cannot be).

        What is queued before there ever was a header cannot become a segment: it is lost.
        """
        steps = []
        while self._sealed is not None or (self._queue and self._header is not None):
            if self._sealed is None:
                assert self._header is not None
                self._sealed = self._seal(self._header)
            steps.append(Step("spool", self._sealed.key, self._sealed.data))
            self._put_aside(self._spooled)
        self._drop_queue()
        self._closing = self._ended = True
        return steps

    def _drop_queue(self) -> None:
        if self._queue:
            receipts = [receipt for _, receipt in self._queue]
            self._lost[""] = [*self._lost.get("", []), *receipts]
            self._aside += receipts
            self._queue.clear()

    def lose(self, key: str) -> None:
        """Take note that a segment of `abandon` could not be spooled."""
        self._lost[key] = self._spooled.pop(key)


def perform(step: Step, store: Store, spool: Spool | None, header: Callable[[], Header]) -> Header | None:
    """Do one step; its result or exception is for `Writer.succeeded` or `Writer.failed`."""
    if step.do == "header":
        return header()
    if step.do == "store":
        store.create(step.key, step.data)
        return None
    if spool is None:
        raise _SpoolError("there is no spool")
    if step.do == "spool":
        spool.create(step.key, step.data)
        return None
    try:
        data = spool.get(step.key)
        decode_segment(step.key, data)
    except (OSError, StoreError, CorruptObjectError) as error:
        raise _SpoolError(step.key) from error
    store.create(step.key, data)
    with suppress(OSError, StoreError):  # it stays in the spool and is uploaded once more, which changes nothing
        spool.remove(step.key)
    return None
