"""How much a pool of workers does twice: real schedules, made-up evaluations, joins and leaves at random."""

import heapq
import random
from collections import Counter
from collections.abc import Iterator

from everplex.actions import Busy, Done, Refresh, Take, Wait
from everplex.schedule import Schedule
from everplex.stages.writer import Receipt

STORE_SECONDS = 0.1
LIST_SECONDS = 0.02


class PoolRun:
    """One run of a pool with `num_workers` places: in each a worker leaves at random and after a while another joins.

    `churn` is the mean number of leaves per place in the time of a run. Half of them are kills: what is held is gone.
    Workers differ in speed by a factor of two, chunks too.
    """

    def __init__(self, seed: int, *, num_workers: int = 8, num_chunks: int = 400, churn: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._chunks = [f"g/{index:08d}" for index in range(num_chunks)]
        self._num_workers = num_workers
        self._lifetime = num_chunks / num_workers / churn if churn else float("inf")
        self._num_started = 0
        self.evaluations: Counter[str] = Counter()
        """Per chunk, how often an evaluation of it reached the store."""
        self.now = 0.0

    @property
    def wasted(self) -> float:
        """Evaluations that reached the store beyond the first of their chunk, by chunks."""
        return (self.evaluations.total() - len(self.evaluations)) / len(self._chunks)

    def run(self) -> "PoolRun":
        """Run until every chunk is recorded and all have left."""
        first_join = 0.3 * self._lifetime if self._lifetime < float("inf") else 1.5
        events = [(self._rng.expovariate(1 / first_join), place) for place in range(self._num_workers)]
        heapq.heapify(events)
        lives: dict[int, Iterator[float]] = {}
        while events:
            self.now, place = heapq.heappop(events)
            if place not in lives:
                lives[place] = self._live()
            delay = next(lives[place], None)
            if delay is not None:
                heapq.heappush(events, (self.now + delay, place))
                continue
            del lives[place]
            if len(self.evaluations) < len(self._chunks):
                heapq.heappush(events, (self.now + self._rng.expovariate(1 / 5), place))
        return self

    def _live(self) -> Iterator[float]:
        """Be one worker; yields how long each step takes."""
        rng = self._rng
        self._num_started += 1
        schedule = Schedule("p", self._chunks, worker=f"worker {self._num_started} {rng.random()}")
        leaves_at = self.now + rng.expovariate(1 / self._lifetime) if self._lifetime < float("inf") else float("inf")
        is_killed = rng.random() < 0.5
        speed = rng.uniform(0.7, 1.5)
        held: list[Take] = []
        while self.now < leaves_at:
            match schedule.take(self.now):
                case Take() as take:
                    held.append(take)
                case Refresh():
                    recorded = set(self.evaluations)
                    twice = {chunk for chunk, times in self.evaluations.items() if times > 1}
                    yield LIST_SECONDS
                    schedule.refreshed(recorded, self.now, duplicated=twice)
                case Wait(seconds):
                    yield seconds
                case Done():
                    return
                case Busy():
                    take = held.pop(0)
                    if not schedule.wanted(take):
                        schedule.released(take)
                        continue
                    seconds = speed * rng.uniform(0.7, 1.3)
                    yield seconds
                    if is_killed and self.now >= leaves_at:
                        return
                    schedule.ended(take, seconds)
                    yield STORE_SECONDS
                    self.evaluations[take.chunk] += 1
                    schedule.durable([Receipt(take.chunk, "work")], self.now)
