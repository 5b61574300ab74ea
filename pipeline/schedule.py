"""What a worker does next: a state machine without threads, clocks or I/O, so that a simulation can step it.

A rank evaluates its shard, then backup passes (`everplex.ranked`); a worker of a pool, without rank and world size,
finds its own way (`everplex.pool`). Nothing here is ever needed for a right result, only for little work done twice.

The pump, in one thread; times are monotonic seconds::

    schedule = Schedule(plan.digest(), plan.chunk_ids(), rank=rank, world_size=world_size, worker=uuid, device=device)
    while True:
        for receipts in durable:  schedule.durable(receipts, clock())     # what WriterThread's callbacks brought
        for receipts in aside:    schedule.aside(receipts)
        match action := schedule.take(clock()):
            case Take():          loader.request(action)                  # prefetched; at most `lookahead` are held
            case Refresh():       ledger.refresh()                        # here, or in a thread while the loop goes on
                                  schedule.refreshed(ledger.recorded, clock(), extras=judge(...).extras)
            case Busy():          item = loader.next()                    # as many are held as there may be
                                  if schedule.wanted(item):
                                      writer.submit(evaluate(item))
                                      schedule.ended(item, seconds)
                                  else:
                                      schedule.released(item)
            case Wait(seconds):   stop.event.wait(seconds)
            case Done():          break                                   # then drop what is held and close the writer

`Done` says that this worker has nothing left to do, `complete` that every chunk is recorded and no extra work is due.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from everplex.actions import Action, Busy, Done, Extra, Refresh, Take, Wait
from everplex.pool import Pool
from everplex.ranked import Ranked
from everplex.stages.assign import assign, fixed_order
from everplex.stages.writer import Receipt

__all__ = ["Action", "Busy", "Done", "Extra", "Refresh", "Schedule", "Take", "Wait"]

MAX_ATTEMPTS = 2
"""How often one worker evaluates one chunk whose record the store acknowledged and the reader then did not accept."""
VISIBLE_SECONDS = 60.0
"""How long a listing may miss what was acknowledged: network file systems remember absence for about a minute."""
MAX_FAILED_REFRESHES = 3
MIN_WAIT_SECONDS = 0.25
SHORTEST_WAIT_SECONDS = 0.01


class Policy(Protocol):
    """How a worker finds its work once the common questions are answered."""

    def choose(self, now: float) -> Action:
        """Return the next action."""
        ...

    def overtaken(self) -> None:
        """Take note that others recorded what this worker holds."""
        ...


class Schedule:
    """What to do next, from what is recorded, held and unsaved; see the module for its use."""

    def __init__(
        self,
        plan_digest: str,
        chunk_ids: Sequence[str],
        *,
        worker: str,
        device: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        only: AbstractSet[str] | None = None,
        refresh_seconds: float = 30.0,
        lookahead: int = 2,
        chunk_seconds: float = 1.0,
    ) -> None:
        """Make the schedule of one worker.

        `chunk_ids` are those of the whole plan, `only` the ones that it may read. `chunk_seconds` is a first guess of
        the mean time of a chunk.
        """
        whole_order = fixed_order(plan_digest, chunk_ids)
        self.order = [chunk for chunk in whole_order if only is None or chunk in only]
        self.extras: list[Extra] = []
        self.refreshed_at = float("-inf")
        """When the newest listing was begun."""
        self.others_at = float("-inf")
        """When a listing last showed new records of other workers."""
        self._device = device
        self._refresh_seconds = refresh_seconds
        self._lookahead = lookahead
        self._seconds = (chunk_seconds, 0)
        self._recorded: Collection[str] = frozenset()
        self._num_recorded = -1
        self._held: dict[Take, Extra | None] = {}
        self._unwanted: set[Take] = set()
        self._mine: dict[str, float | None] = {}  # evaluated here and not yet listed: when it became durable, or None
        self._aside: set[str] = set()
        self._attempts: Counter[str] = Counter()
        self._extras_done: set[Extra] = set()
        self._requested_at: float | None = None
        self._refresh_cost = 0.0
        self._failed_refreshes = 0
        self._scanned = 0
        self._stopped = False
        self._policy: Policy
        if rank is None or world_size is None:
            self._policy = Pool(self, worker)
        else:
            shard = assign(whole_order, world_size)[rank]
            self._policy = Ranked(self, [chunk for chunk in shard if only is None or chunk in only], rank, world_size)

    # Questions

    def take(self, now: float) -> Action:
        """Return what to do next."""
        if self._stopped:
            return Done(complete=False)
        if len(self._held) >= self._lookahead:
            return Busy()
        if self.refreshed_at == float("-inf"):
            return self.request_refresh(now)
        if self._requested_at is None and now - self.refreshed_at >= max(self._refresh_seconds, 2 * self._refresh_cost):
            return self.request_refresh(now)
        action = self._policy.choose(now)
        # A wait that rounds to nothing would never bring its end nearer.
        return Wait(max(action.seconds, SHORTEST_WAIT_SECONDS)) if isinstance(action, Wait) else action

    def wanted(self, take: Take) -> bool:
        """Whether what is held is still worth evaluating."""
        return take.why == "extra" or (take not in self._unwanted and take.chunk not in self._recorded)

    @property
    def chunk_seconds(self) -> float:
        """Mean time of a chunk."""
        return self._seconds[0]

    # Events

    def refreshed(
        self,
        recorded: Collection[str],
        now: float,
        *,
        duplicated: Collection[str] = frozenset(),
        unaccepted: Collection[str] = frozenset(),
        extras: Iterable[Extra] = (),
        chunk_seconds: float | None = None,
    ) -> None:
        """Take note of a listing: the chunks that have an acceptable record, and the extra work that is now due.

        `recorded` is kept, not copied. `duplicated` are the chunks evaluated more than once: two workers of a pool that
        go side by side notice it by them. `unaccepted` are those with records of which none counts, so that there is
        nothing to wait for. `chunk_seconds` is the mean over the records, for a worker that has none.
        """
        self.refreshed_at = now if self._requested_at is None else self._requested_at
        self._refresh_cost = now - self.refreshed_at
        self._requested_at = None
        self._failed_refreshes = 0
        self._recorded = recorded
        self.extras = list(extras)
        if chunk_seconds is not None and self._seconds[1] == 0:
            self._seconds = (chunk_seconds, 0)
        self._scanned = 0
        news = len(recorded) - self._num_recorded
        overtaken = any(extra is None and take.chunk in recorded for take, extra in self._held.items())
        for chunk, since in list(self._mine.items()):
            if chunk in recorded:
                overtaken = overtaken or chunk in duplicated  # on first sight: the other was faster
                del self._mine[chunk]
                news -= 1
            elif chunk in unaccepted or (since is not None and since + VISIBLE_SECONDS < self.refreshed_at):
                del self._mine[chunk]
        if news > 0 and self._num_recorded >= 0:
            self.others_at = now
        self._num_recorded = len(recorded)
        if overtaken:  # whoever was faster is evaluating what comes next as well
            self._unwanted |= {take for take in self._held if take.why == "pool"}
            self._policy.overtaken()

    def refresh_failed(self, now: float) -> None:
        """Take note that the store could not be listed; the next try is due as after a listing."""
        self._requested_at = None
        self._failed_refreshes += 1
        if self.refreshed_at != float("-inf"):
            self.refreshed_at = max(self.refreshed_at, now - self._refresh_seconds + self.contested_seconds)

    def ended(self, take: Take, seconds: float) -> None:
        """Take note that a held chunk was evaluated in so many seconds and its record submitted."""
        extra = self._held.pop(take)
        self._unwanted.discard(take)
        mean, count = self._seconds
        self._seconds = ((mean * count + seconds) / (count + 1), count + 1)
        if take.kind == "work":
            self._attempts[take.chunk] += 1
        if extra is not None:
            self._extras_done.add(extra)
        elif take.chunk not in self._aside:
            self._mine.setdefault(take.chunk, None)  # the writer's thread may have been faster

    def released(self, take: Take) -> None:
        """Take note that a held chunk will not be evaluated now."""
        del self._held[take]
        self._unwanted.discard(take)

    def durable(self, receipts: Iterable[Receipt], now: float) -> None:
        """Take note of acknowledged records."""
        for chunk, _ in receipts:
            self._aside.discard(chunk)
            self._mine[chunk] = now

    def aside(self, receipts: Iterable[Receipt]) -> None:
        """Take note of records in the spool, or lost: evaluating them again here and now would not help."""
        for chunk, _ in receipts:
            self._mine.pop(chunk, None)
            self._aside.add(chunk)

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopped = True

    # What policies ask and do

    def eligible(self, chunk: str) -> bool:
        """Whether a chunk is missing and this worker has no copy of it under way."""
        return not (
            chunk in self._recorded
            or chunk in self._mine
            or chunk in self._aside
            or self._attempts[chunk] >= MAX_ATTEMPTS
            or any(take.chunk == chunk for take in self._held)
        )

    def missing(self) -> list[str]:
        """Return the chunks that this worker could evaluate, in the fixed order."""
        return [chunk for chunk in self.order if self.eligible(chunk)]

    def _covered(self) -> bool:
        """Whether every chunk is listed, or acknowledged to this worker."""
        while self._scanned < len(self.order):
            chunk = self.order[self._scanned]
            if chunk not in self._recorded and self._mine.get(chunk) is None:
                return False
            self._scanned += 1
        return True

    def open_extras(self) -> list[Extra]:
        """Return the extra work that this worker may do and has not done."""
        return [
            extra
            for extra in self.extras
            if extra not in self._extras_done
            and self._device not in extra.exclude
            and not (extra.kind == "work" and self._attempts[extra.chunk] >= MAX_ATTEMPTS)
        ]

    def hold(self, take: Take, extra: Extra | None = None) -> Take:
        """Hand out a chunk."""
        self._held[take] = extra
        return take

    def hold_extra(self, extra: Extra) -> Take:
        """Hand out extra work."""
        return self.hold(Take(extra.chunk, extra.kind, "extra"), extra)

    @property
    def idle(self) -> bool:
        """Whether nothing is held."""
        return not self._held

    @property
    def contested_seconds(self) -> float:
        """How old a listing may be where others take the same chunks: a chunk's time, or 20 times what it takes."""
        wanted = min(self._refresh_seconds, max(self.chunk_seconds, 20 * self._refresh_cost))
        return max(wanted, 2 * self._refresh_cost)  # a listing may take longer than all of that

    def request_refresh(self, now: float) -> Action:
        """Ask for a listing, once; later calls wait for it, and give up where the store keeps failing."""
        if self._failed_refreshes >= MAX_FAILED_REFRESHES:
            return Done(complete=False)
        if self._requested_at is not None:
            return Wait(MIN_WAIT_SECONDS)
        self._requested_at = now
        return Refresh()

    def end(self, now: float) -> Action | None:
        """Return how to go on where no chunk is missing, as far as this worker knows; None where one is."""
        if not self._covered():
            return None
        if any(since is not None and since > self.refreshed_at for since in self._mine.values()):
            return self.request_refresh(now)
        if self._mine:  # acknowledged, and the newest listing does not have it yet
            return self.retry_later(now)
        return None if self.extras else Done(complete=True)

    def settle(self, now: float) -> Action | None:
        """Return a wait while what this worker evaluated is on its way into the store's listings."""
        return self.retry_later(now) if self._mine else None

    def retry_later(self, now: float) -> Action:
        """Wait for the time of a chunk, and list again where the listing is older than that."""
        age = now - self.refreshed_at
        if age >= self.wait_seconds:
            return self.request_refresh(now)
        return Wait(self.wait_seconds - age)

    @property
    def wait_seconds(self) -> float:
        """How long a pass waits: one mean chunk time."""
        return max(MIN_WAIT_SECONDS, self.chunk_seconds)
