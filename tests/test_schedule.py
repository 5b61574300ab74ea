"""What a worker does next: shards, backup passes, pools, extra work, and that it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.pool import PoolRun

from everplex.actions import Action, Busy, Done, Extra, Refresh, Take, Wait
from everplex.schedule import MAX_ATTEMPTS, VISIBLE_SECONDS, Schedule
from everplex.stages.assign import assign, fixed_order, owner
from everplex.stages.writer import Receipt

CHUNKS = [f"g/{index:08d}" for index in range(24)]


class Driver:
    """Pumps one schedule by hand over a set of recorded chunks; each evaluation takes a second."""

    def __init__(self, schedule: Schedule, recorded: set[str] | None = None) -> None:
        self.schedule = schedule
        self.recorded: set[str] = set() if recorded is None else recorded
        self.extras: list[Extra] = []
        self.now = 0.0
        self.held: list[Take] = []
        self.done: list[Take] = []
        self.is_storing = True

    def until(self, *, evaluations: int = 1_000, seconds: float = 10_000) -> Action | None:
        """Go on until the end, or so many evaluations or seconds later; returns the last action."""
        limit, end = len(self.done) + evaluations, self.now + seconds
        action: Action | None = None
        while len(self.done) < limit and self.now < end:
            match action := self.schedule.take(self.now):
                case Take() as take:
                    self.held.append(take)
                case Refresh():
                    self.schedule.refreshed(set(self.recorded), self.now, extras=self.extras)
                case Wait(seconds_to_wait):
                    self.now += seconds_to_wait
                case Busy():
                    self._evaluate(self.held.pop(0))
                case Done():
                    return action
        return action

    def _evaluate(self, take: Take) -> None:
        if not self.schedule.wanted(take):
            self.schedule.released(take)
            return
        self.now += 1.0
        self.done.append(take)
        self.schedule.ended(take, 1.0)
        if self.is_storing:
            self.recorded.add(take.chunk)
            self.schedule.durable([Receipt(take.chunk, take.kind)], self.now)

    @property
    def chunks(self) -> list[str]:
        """Chunks in the order of their evaluation."""
        return [take.chunk for take in self.done]


def ranked(rank: int = 0, world_size: int = 1, *, device: str = "here", only: set[str] | None = None) -> Schedule:
    """Return the schedule of a rank."""
    return Schedule("plan", CHUNKS, worker="w", device=device, rank=rank, world_size=world_size, only=only)


def pooled(worker: str = "w") -> Schedule:
    """Return the schedule of a worker of a pool."""
    return Schedule("plan", CHUNKS, worker=worker)


def test_the_first_thing_is_to_look() -> None:
    """Nothing is evaluated before the store was listed once."""
    assert isinstance(ranked().take(0.0), Refresh)
    assert isinstance(pooled().take(0.0), Refresh)


@given(st.sets(st.sampled_from(CHUNKS)), st.integers(1, 5), st.data())
def test_a_rank_does_its_shard_in_order_and_skips_what_is_recorded(
    recorded: set[str], world_size: int, data: st.DataObject
) -> None:
    """What is pending never moves a chunk to another rank."""
    rank = data.draw(st.integers(0, world_size - 1))
    mine = [chunk for chunk in assign(fixed_order("plan", CHUNKS), world_size)[rank] if chunk not in recorded]
    driver = Driver(ranked(rank, world_size), set(recorded))
    driver.until(evaluations=len(mine))
    assert driver.chunks == mine
    assert {take.why for take in driver.done} <= {"shard"}


def test_at_most_two_chunks_are_held() -> None:
    """Prefetching looks two chunks ahead; then the pump has to evaluate."""
    for schedule in (ranked(), pooled()):
        schedule.take(0.0)
        schedule.refreshed(set(), 0.0)
        actions = [schedule.take(0.0) for _ in range(3)]
        assert [type(action) for action in actions] == [Take, Take, Busy]


def test_a_listing_is_due_every_refresh_seconds_and_shows_what_others_did() -> None:
    """A rank looks again after 30 s, and a prefetched chunk that a backup recorded is not evaluated."""
    driver = Driver(ranked())
    driver.until(evaluations=20)
    other = driver.held[0].chunk
    driver.recorded.add(other)
    driver.now += 30
    driver.until()
    assert other not in driver.chunks
    assert driver.recorded == set(CHUNKS)


def test_a_run_of_one_rank_ends_complete() -> None:
    """Every chunk once, then Done."""
    driver = Driver(ranked())
    assert driver.until() == Done(complete=True)
    assert sorted(driver.chunks) == CHUNKS


def test_a_finished_run_needs_no_evaluation() -> None:
    """A resume of a complete run is done after one look, without a wait."""
    for schedule in (ranked(1, 3), pooled()):
        driver = Driver(schedule, set(CHUNKS))
        assert driver.until() == Done(complete=True)
        assert (driver.chunks, driver.now) == ([], 0.0)


def test_backup_passes_belong_to_one_rank_after_a_wait() -> None:
    """Pass 1 begins one mean chunk time after the shard; its chunks are those of this rank, from the end."""
    driver = Driver(ranked(0, 3))
    shard = assign(fixed_order("plan", CHUNKS), 3)[0]
    driver.until(evaluations=len(shard))
    ended = driver.now
    missing = [chunk for chunk in _order() if chunk not in shard]
    owned = [chunk for chunk in reversed(missing) if owner(chunk, 1, 3) == 0]
    driver.until(evaluations=len(owned))
    assert driver.chunks[len(shard) :] == owned
    assert driver.now >= ended + 1.0 + len(owned)
    assert {take.why for take in driver.done[len(shard) :]} == {"backup"}


def test_a_living_rank_takes_over_everything_from_dead_ones() -> None:
    """One of four ranks alone completes the run, every chunk once."""
    driver = Driver(ranked(2, 4))
    assert driver.until() == Done(complete=True)
    assert sorted(driver.chunks) == CHUNKS


def test_straggling_work_is_left_alone_when_it_arrives_in_time() -> None:
    """A chunk that appears during the wait before a pass is not evaluated again."""
    driver = Driver(ranked(0, 2))
    shard, others = assign(fixed_order("plan", CHUNKS), 2)
    driver.recorded |= set(others[:-1])
    driver.until(evaluations=len(shard))
    driver.until(seconds=0.5)
    driver.recorded.add(others[-1])
    assert driver.until() == Done(complete=True)
    assert driver.chunks == shard


def _order() -> list[str]:
    return fixed_order("plan", CHUNKS)


def test_a_worker_may_be_limited_to_some_groups() -> None:
    """What it may not read it never takes, and it is done when the rest is."""
    only = set(CHUNKS[::3])
    driver = Driver(ranked(0, 2, only=only))
    assert driver.until() == Done(complete=True)
    assert sorted(driver.chunks) == sorted(only)


def test_stop_hands_out_nothing_more() -> None:
    """After stop the only answer is Done, and it does not claim to be complete."""
    for schedule in (ranked(), pooled()):
        driver = Driver(schedule)
        driver.until(evaluations=3)
        schedule.stop()
        assert schedule.take(driver.now) == Done(complete=False)


def test_a_worker_waits_for_its_last_acknowledgement() -> None:
    """Evaluated is not recorded: it waits, and is done as soon as the store has acknowledged and shows it."""
    for schedule in (ranked(), pooled()):
        driver = Driver(schedule)
        driver.until(evaluations=len(CHUNKS) - 1)
        driver.is_storing = False
        assert isinstance(driver.until(seconds=40), Wait | Refresh)
        assert len(driver.done) == len(CHUNKS)
        last = driver.chunks[-1]
        driver.recorded.add(last)
        schedule.durable([Receipt(last, "work")], driver.now)
        assert driver.until() == Done(complete=True)


def test_an_acknowledgement_may_come_before_the_evaluator_says_that_it_ended() -> None:
    """The writer's thread may be faster than the evaluator's next line."""
    schedule = ranked()
    schedule.take(0.0)
    schedule.refreshed(set(CHUNKS) - {CHUNKS[0]}, 0.0)
    take = schedule.take(0.0)
    assert isinstance(take, Take)
    schedule.durable([Receipt(take.chunk, "work")], 1.0)
    schedule.ended(take, 1.0)
    assert isinstance(schedule.take(1.0), Refresh)
    schedule.refreshed(set(CHUNKS), 1.0)
    assert schedule.take(1.0) == Done(complete=True)


def test_what_is_in_the_spool_is_not_evaluated_again() -> None:
    """With the store gone the worker does each chunk once, sees nothing appear, and ends without claiming more."""
    for schedule in (ranked(), pooled()):
        driver = Driver(schedule)
        driver.is_storing = False
        while not isinstance(driver.until(evaluations=1), Done):
            schedule.aside([Receipt(take.chunk, "work") for take in driver.done])
        assert sorted(driver.chunks) == CHUNKS


def test_an_acknowledged_record_that_is_not_accepted_is_tried_once_more() -> None:
    """A listing may be late; after a minute the chunk counts as missing, and the number of tries is bounded."""
    for schedule in (ranked(), pooled()):
        bad = CHUNKS[5]
        driver = Driver(schedule)
        driver.recorded = _WithoutOne(bad)
        assert driver.until() == Done(complete=False)
        assert driver.chunks.count(bad) == MAX_ATTEMPTS
        assert driver.now > VISIBLE_SECONDS


class _WithoutOne(set[str]):
    """A set that never takes one element: its segment is set aside."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self._bad = bad

    def add(self, element: str) -> None:
        if element != self._bad:
            super().add(element)


def test_a_store_that_cannot_be_listed_ends_the_worker() -> None:
    """The shard goes on meanwhile; in the end it gives up after some tries, not complete."""
    schedule = ranked(0, 2)
    driver = Driver(schedule)
    driver.until(evaluations=1)
    failures = 0
    while not isinstance(action := schedule.take(driver.now), Done):
        if isinstance(action, Refresh):
            failures += 1
            driver.now += 1.0
            schedule.refresh_failed(driver.now)
        elif isinstance(action, Wait):
            driver.now += action.seconds
        elif isinstance(action, Busy):
            driver._evaluate(driver.held.pop(0))
        else:
            driver.held.append(action)
    assert set(assign(fixed_order("plan", CHUNKS), 2)[0]) <= set(driver.chunks)
    assert failures <= 4
    assert not action.complete


def test_extra_work_is_done_once_by_a_device_that_may() -> None:
    """An audit for another device is left alone; one for this device is done once, and then the worker is done."""
    for schedule in (ranked(0, 2, device="here"), Schedule("plan", CHUNKS, worker="w", device="here")):
        mine, other = Extra(CHUNKS[3], "audit", frozenset({"there"})), Extra(CHUNKS[4], "audit", frozenset({"here"}))
        driver = Driver(schedule, set(CHUNKS))
        driver.extras = [mine, other]
        assert driver.until() == Done(complete=False)
        assert driver.done == [Take(CHUNKS[3], "audit", "extra")]


def test_extra_work_that_is_settled_ends_complete() -> None:
    """When the judge asks for nothing more, the worker is done and says complete."""
    driver = Driver(ranked(0, 1), set(CHUNKS))
    driver.extras = [Extra(CHUNKS[3], "work")]
    driver.until(evaluations=1)
    driver.extras = []
    assert driver.until() == Done(complete=True)


@pytest.mark.parametrize("churn", [0.0, 1.0, 4.0])
def test_a_pool_shares_a_run_with_little_duplicate_work(churn: float) -> None:
    """Eight workers on 400 chunks, joining and leaving at random: under 5 % is done twice, and every chunk once."""
    runs = [PoolRun(seed, churn=churn).run() for seed in range(8)]
    assert all(len(run.evaluations) == 400 for run in runs)
    assert max(run.wasted for run in runs) < 0.05


def test_a_lone_worker_of_a_pool_hardly_waits() -> None:
    """One process without a rank, in a run that another left behind, does all that is missing without idling."""
    for seed in range(20):
        driver = Driver(pooled(f"worker {seed}"), set(CHUNKS[::3]))
        assert driver.until() == Done(complete=True)
        assert sorted(driver.chunks) == sorted(set(CHUNKS) - set(CHUNKS[::3]))
        assert driver.now < len(driver.done) + 6.0
