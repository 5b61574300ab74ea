"""How a worker of a pool finds work: workers that join and leave at random, know nothing of each other, seldom collide.

All share one order of the chunks, seen as a circle, and each goes on from chunk to chunk. So what others are doing can
be read off the records: the front of every gap, the first missing chunk after a recorded one, belongs to whoever
recorded that. A worker that joins, runs into recorded chunks or is overtaken jumps to the inside of a large gap. A gap
whose front has not moved for the time of some chunks has lost its worker: it is taken over, by each worker after
another wait, so that one does; a worker that sees no sign of others waits little. Nothing is written for this: a record
is the claim to the next few chunks.
"""

import hashlib
import random
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from everplex.actions import Action, Busy, Done, Extra, Take, Wait

if TYPE_CHECKING:  # it imports this module
    from everplex.schedule import Schedule

MIN_WAIT_SECONDS = 0.05

SPLIT_LENGTH = 12
"""Missing chunks in a gap that are enough for two workers."""
STALE = 3.0
"""Mean chunk times after which a front that has not moved is taken for deserted: two are held, one is under way."""
STALE_SPREAD = 16.0
"""Over how many mean chunk times the workers spread before they take over a deserted gap."""
PATIENCE = 30.0
"""Mean chunk times that a worker waits for others to do what it may not."""


class Gap(NamedTuple):
    """A stretch of missing chunks on the circle."""

    start: int
    length: int


class Pool:
    """The policy of a worker without rank and world size."""

    def __init__(self, schedule: "Schedule", worker: str) -> None:
        self._schedule = schedule
        self._worker = worker
        self._random = random.Random(worker)  # noqa: S311 - spreads work, guards nothing
        self._position: int | None = None
        self._joined_at = float("inf")
        self._idle_since: float | None = None
        self._gaps: list[Gap] = []
        self._gaps_at = float("-inf")
        self._seen_at: dict[int | Extra, float] = {}
        """Since when each front, and each piece of extra work, is where it is."""

    def overtaken(self) -> None:
        """Jump before the next chunk."""
        self._position = None

    def choose(self, now: float) -> Action:
        """Return the next chunk of the stretch, or of another gap, or a wait."""
        schedule = self._schedule
        if now - schedule.refreshed_at > schedule.contested_seconds:
            return schedule.request_refresh(now)
        self._watch_gaps(now)
        if self._advance() or self._jump() or self._take_over(now):
            assert self._position is not None
            self._idle_since = None
            return schedule.hold(Take(schedule.order[self._position], why="pool"))
        if not schedule.idle:
            return Busy()
        return schedule.end(now) or self._wait(now)

    def _advance(self) -> bool:
        """Go on to the next chunk, if it is missing."""
        if self._position is None:
            return False
        return self._go_to((self._position + 1) % len(self._schedule.order))

    def _go_to(self, position: int) -> bool:
        if not self._schedule.eligible(self._schedule.order[position]):
            return False
        self._position = position
        return True

    def _jump(self) -> bool:
        """Go to the inside of a large gap, the larger the likelier; anywhere where nothing is recorded yet."""
        size = len(self._schedule.order)
        gaps = [gap for gap in self._gaps if gap.length >= min(size, SPLIT_LENGTH)]
        if not gaps:
            return False
        gap = self._random.choices(gaps, [gap.length for gap in gaps])[0]
        inside = self._random.random() if gap.length == size else self._random.uniform(0.4, 0.7)
        return self._go_to((gap.start + int(gap.length * inside)) % size)

    def _take_over(self, now: float) -> bool:
        """Go into a deserted gap; anywhere in it, so that two who do so at the same time seldom go side by side."""
        if self._idle_since is None:
            self._idle_since = now
        due, gap = min(((self._due(gap.start, now), gap) for gap in self._gaps), default=(now, None))
        if gap is None or due > now:
            return False
        return self._go_to((gap.start + int(gap.length * self._random.random())) % len(self._schedule.order))

    def _wait(self, now: float) -> Action:
        """Do extra work whose turn has come; else wait for the next turn, or for what others have to do."""
        schedule = self._schedule
        turns = [self._due(gap.start, now) for gap in self._gaps]
        for extra in schedule.open_extras():
            turns.append(self._due(extra, now))
            if turns[-1] <= now:
                return schedule.hold_extra(extra)
        if turns:
            return Wait(min(schedule.wait_seconds, max(MIN_WAIT_SECONDS, min(turns) - now)))
        if (waiting := schedule.settle(now)) is not None:
            return waiting
        if any(now < since + PATIENCE * schedule.wait_seconds for since in self._seen_at.values()):
            return schedule.retry_later(now)
        return Done(complete=False)

    def _due(self, item: int | Extra, now: float) -> float:
        """Return when this worker takes over a gap by its front, or extra work that is anyone's."""
        seconds = self._schedule.chunk_seconds
        alone_at = max(self._joined_at + STALE * seconds, self._schedule.others_at + (STALE + STALE_SPREAD) * seconds)
        if now >= alone_at:
            return alone_at
        if isinstance(item, int):
            name, since = self._schedule.order[item], self._seen_at[item] + STALE * seconds
        else:
            name, since = f"{item.kind}:{item.chunk}", self._seen_at[item]
        digest = hashlib.sha256(f"{self._worker}:{name}".encode()).digest()
        turn = int.from_bytes(digest[:8], "little") / 2**64
        return min(alone_at, max(since, self._idle_since or since) + STALE_SPREAD * turn * seconds)

    def _watch_gaps(self, now: float) -> None:
        """Find the gaps of a new listing, and since when their fronts are where they are."""
        schedule = self._schedule
        if self._gaps_at == schedule.refreshed_at:
            return
        self._joined_at = min(self._joined_at, now)
        self._gaps_at = schedule.refreshed_at
        self._gaps = self._find_gaps()
        items: list[int | Extra] = [gap.start for gap in self._gaps]
        self._seen_at = {item: self._seen_at.get(item, now) for item in [*items, *schedule.extras]}

    def _find_gaps(self) -> list[Gap]:
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
