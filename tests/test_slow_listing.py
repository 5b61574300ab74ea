"""A store that lists slowly costs time, never the work itself."""

import pytest

from everplex.schedule import Busy, Done, Refresh, Schedule, Take, Wait

CHUNKS = [f"a/{ordinal:08d}" for ordinal in range(20)]


@pytest.mark.parametrize("rank", [0, None], ids=["rank", "pool"])
@pytest.mark.parametrize("refresh_seconds", [0.0, 30.0])
@pytest.mark.parametrize("listing_seconds", [1.0, 100.0])
def test_work_goes_on_though_listing_takes_longer_than_its_interval(
    rank: int | None, refresh_seconds: float, listing_seconds: float
) -> None:
    """Whatever the interval, listings never crowd out the work: in shards, backup passes and pools."""
    world_size = None if rank is None else 2
    schedule = Schedule("p", CHUNKS, worker="w", rank=rank, world_size=world_size, refresh_seconds=refresh_seconds)
    recorded: set[str] = set()
    now = 0.0
    num_listings = 0
    held: list[Take] = []
    while not isinstance(action := schedule.take(now), Done):
        match action:
            case Refresh():
                now += listing_seconds
                num_listings += 1
                schedule.refreshed(frozenset(recorded), now)
            case Take():
                held.append(action)
            case Wait(seconds):
                now += seconds
            case Busy():
                take = held.pop(0)
                now += 1.0
                recorded.add(take.chunk)
                schedule.ended(take, 1.0)
                schedule.durable([(take.chunk, "work")], now)  # type: ignore[list-item]
        assert num_listings <= 2 * len(CHUNKS)
    assert recorded == set(CHUNKS)
