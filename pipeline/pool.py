"""How a worker of a pool finds work: workers that join and leave at random, know nothing of each other, seldom collide.

All share one order of the chunks, seen as a circle. A worker starts at a random place and goes on from there, so what
others are evaluating now can be read off the records: it is what follows the last record of a stretch. A worker that
runs into recorded chunks, or finds that someone overtook it, jumps into the inside of another gap. What is left
between records that lie close is probably in flight: it is taken only after a wait whose length differs from worker to
worker. Nothing is written for this; a record itself is the claim to the next few chunks.
"""

from __future__ import annotations

import hashlib
import random
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from everplex.actions import Action, Busy, Done, Extra, Take, Wait

if TYPE_CHECKING:
    from everplex.schedule import Schedule

IN_FLIGHT = 3
"""Chunks after a record that its worker is likely to hold: two are held, one more is on its way into the listing."""
TAIL_WAIT = 2.0
"""Mean chunk times after which a chunk in flight is overdue."""
TAIL_SPREAD = 6.0
"""Over how many mean chunk times the workers spread before they take over an overdue chunk."""
PATIENCE = 30.0
"""Mean chunk times that a worker waits for others to do what it may not."""


class Gap(NamedTuple):
    """A stretch of missing chunks on the circle."""

    start: int
    length: int


class Pool:
    """The policy of a worker without rank and world size."""

    def __init__(self, schedule: Schedule, worker: str) -> None:
        self._schedule = schedule
        self._worker = worker
        self._random = random.Random(worker)  # noqa: S311 - spreads work, guards nothing
        self._position: int | None = None
        self._seen_at: dict[str | Extra, float] = {}

    def overtaken(self) -> None:
        """Jump before the next chunk."""
        self._position = None

    def choose(self, now: float) -> Action:
        """Return the next chunk of the stretch, or of another gap, or a wait."""
        schedule = self._schedule
        if now - schedule.refreshed_at > schedule.contested_seconds:
            return schedule.request_refresh(now)
        if self._advance() or self._jump():
            assert self._position is not None
            return schedule.hold(Take(schedule.order[self._position], why="pool"))
        if not schedule.idle:
            return Busy()
        return schedule.end(now) or self._tail(now)

    def _advance(self) -> bool:
        """Go on to the next chunk, if it is missing."""
        if self._position is None:
            return False
        following = (self._position + 1) % len(self._schedule.order)
        if not self._schedule.eligible(self._schedule.order[following]):
            return False
        self._position = following
        return True

    def _jump(self) -> bool:
        """Go to the inside of a gap, the larger the likelier, or anywhere where nothing is recorded yet."""
        gaps = self._gaps()
        size = len(self._schedule.order)
        rooms = [gap.length - IN_FLIGHT * (gap.length < size) for gap in gaps]
        if not any(room > 0 for room in rooms):
            return False
        gap, room = self._random.choices([*zip(gaps, rooms, strict=True)], [max(0, room) for room in rooms])[0]
        inside = self._random.random() if gap.length == size else self._random.uniform(0.25, 0.75)
        self._position = (gap.start + gap.length - room + int(room * inside)) % size
        return True

    def _gaps(self) -> list[Gap]:
        gaps: list[Gap] = []
        position = 0
        for is_missing, stretch in groupby(map(self._schedule.eligible, self._schedule.order)):
            length = sum(1 for _ in stretch)
            if is_missing:
                gaps.append(Gap(position, length))
            position += length
        if len(gaps) > 1 and gaps[0].start == 0 and gaps[-1].start + gaps[-1].length == position:  # closes the circle
            last = gaps.pop()
            gaps[0] = Gap(last.start, last.length + gaps[0].length)
        return gaps

    def _tail(self, now: float) -> Action:
        """Take over what is overdue; each worker at another time, so that one does."""
        schedule = self._schedule
        extras = schedule.open_extras()
        items: list[str | Extra] = [*schedule.missing(), *extras]
        self._seen_at = {item: self._seen_at.get(item, now) for item in [*items, *schedule.extras]}
        if items:
            due, item = min(((self._due(item), item) for item in items), key=lambda pair: pair[0])
            if due > now:
                return Wait(min(due - now, schedule.wait_seconds))
            if isinstance(item, Extra):
                return schedule.hold_extra(item)
            return schedule.hold(Take(item, why="pool"))
        if (waiting := schedule.settle(now)) is not None:
            return waiting
        if any(now < since + PATIENCE * schedule.wait_seconds for since in self._seen_at.values()):
            return schedule.retry_later(now)
        return Done(complete=False)

    def _due(self, item: str | Extra) -> float:
        """Return when this worker takes over a chunk that others may hold, or extra work that is anyone's."""
        name, wait = (f"{item.kind}:{item.chunk}", 0.0) if isinstance(item, Extra) else (item, TAIL_WAIT)
        digest = hashlib.sha256(f"{self._worker}:{name}".encode()).digest()
        share = int.from_bytes(digest[:8], "little") / 2**64
        return self._seen_at[item] + self._schedule.chunk_seconds * (wait + TAIL_SPREAD * share)
