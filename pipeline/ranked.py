"""How a rank finds work: its shard, then backup passes over what is missing."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everplex.actions import Action, Busy, Done, Extra, Take, Wait
from everplex.stages.assign import owner

if TYPE_CHECKING:  # it imports this module
    from everplex.schedule import Schedule


class Ranked:
    """A shard, then backup passes: in pass k a missing chunk belongs to one rank, after the time of one chunk."""

    def __init__(self, schedule: "Schedule", shard: Sequence[str], rank: int, world_size: int) -> None:
        self._schedule = schedule
        self._shard = deque(shard)
        self._rank = rank
        self._world_size = world_size
        self._pass = 1
        self._begins_at: float | None = None
        self._queue: deque[str | Extra] | None = None

    def overtaken(self) -> None:
        """Nothing: a shard is skipped as it comes."""

    def choose(self, now: float) -> Action:
        """Return the next of the shard, or of the present pass."""
        schedule = self._schedule
        while self._shard:
            chunk = self._shard.popleft()
            if schedule.eligible(chunk):
                return schedule.hold(Take(chunk))
        if not schedule.idle:
            return Busy()
        return schedule.end(now) or self._backup(now)

    def _backup(self, now: float) -> Action:
        schedule = self._schedule
        if self._queue is None:
            if self._begins_at is None:
                self._begins_at = now + schedule.wait_seconds
            if now < self._begins_at:
                return Wait(self._begins_at - now)
            if schedule.refreshed_at < self._begins_at:
                return schedule.request_refresh(now)
            self._queue = deque(self._owned())
        if self._queue and now - schedule.refreshed_at > schedule.contested_seconds:
            return schedule.request_refresh(now)
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Extra):
                if item in schedule.open_extras():
                    return schedule.hold_extra(item)
            elif schedule.eligible(item):
                return schedule.hold(Take(item, why="backup"))
        return self._next_pass(now)

    def _owned(self) -> list[str | Extra]:
        """Return what is this rank's in the present pass; from the end, as the first owner comes from the front."""
        chunks = [chunk for chunk in reversed(self._schedule.missing()) if self._owns(chunk)]
        extras = [extra for extra in self._schedule.open_extras() if self._owns(f"{extra.kind}:{extra.chunk}")]
        return [*chunks, *extras]

    def _owns(self, name: str) -> bool:
        return owner(name, self._pass, self._world_size) == self._rank

    def _next_pass(self, now: float) -> Action:
        schedule = self._schedule
        if (waiting := schedule.settle(now)) is not None:
            return waiting
        if self._pass > self._world_size + 1:
            return Done(complete=False)
        self._pass += 1
        self._queue = None
        self._begins_at = now + schedule.wait_seconds
        return Wait(schedule.wait_seconds)
