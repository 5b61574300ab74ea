"""Ten thousand runs under drawn faults: what is acknowledged stays, nothing counts twice, it ends, sums are right."""

import pytest
from simulation.search import search
from simulation.world import FAULTS, Broken, World, simulate

NUM_SCHEDULES = 10_000
LEDGER_EVERY = 20

REGRESSIONS = {
    0: "a wait that rounded to nothing, so that time stood still",
    4: "a roll-up without the records it claims to repeat",
    8: "a failed PUT taken for an acknowledgement",
    77: "a spooled segment forgotten before the store had it",
}
"""Seeds that fail where that mistake is made: the first as it was found, the others with one made on purpose."""


def test_ten_thousand_schedules_keep_every_promise() -> None:
    """Crashes, outages, lost answers, torn and flipped bytes, pauses, preemption, other world sizes, full disks."""
    batches = list(search(0, NUM_SCHEDULES, ledger_every=LEDGER_EVERY))
    assert not [failure for batch in batches for failure in batch.failures]
    assert set().union(*(batch.faults for batch in batches)) == set(FAULTS)


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_once_failed(seed: int) -> None:
    """Each keeps every promise, by the real ledger, judge and merge too."""
    simulate(seed, with_ledger=True)


def test_a_seed_gives_the_same_run_every_time() -> None:
    """A failing seed can be looked at: the same objects, byte for byte, at the same times."""
    one, other = World(1234).run(), World(1234).run()
    assert one.store.objects == other.store.objects
    assert one.store.born == other.store.born
    assert one.now == other.now


def test_a_broken_promise_is_found_and_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search can fail: a writer that acknowledges what it only spooled is caught within a few seeds."""
    from everplex.stages.writer import Writer

    def too_early(self: Writer, where: dict[str, list[object]]) -> None:
        segment = self._sealed
        put_aside(self, where)  # type: ignore[arg-type]
        if segment is not None:
            self._durable += segment.receipts

    put_aside = Writer._put_aside
    monkeypatch.setattr(Writer, "_put_aside", too_early)

    def search_some() -> None:
        for seed in range(300):
            simulate(seed)

    with pytest.raises(Broken, match="acknowledged and gone") as raised:
        search_some()
    assert any("seed" in note for note in raised.value.__notes__)
