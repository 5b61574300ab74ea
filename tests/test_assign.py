"""Who evaluates what: partitions that depend on the plan and the world size alone."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from everplex.stages.assign import assign, fixed_order, owner

chunk_sets = st.sets(st.text("abc/0123", min_size=1, max_size=12), max_size=60).map(sorted)
world_sizes = st.integers(1, 9)

PINNED_ORDER = ["2", "3", "5", "1", "4", "0"]
PINNED_OWNERS = [0, 3, 4, 3, 0, 1]


@given(chunk_sets, world_sizes)
def test_shards_partition_the_plan(chunks: list[str], world_size: int) -> None:
    """Every chunk is in exactly one shard, and shards differ in size by one at most."""
    shards = assign(fixed_order("plan", chunks), world_size)
    assert sorted(chunk for shard in shards for chunk in shard) == chunks
    assert len(shards) == world_size
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(chunk_sets, st.randoms())
def test_the_order_of_the_table_does_not_matter(chunks: list[str], random: Random) -> None:
    """A plan read back in another order gives the same shards."""
    shuffled = sorted(chunks, key=lambda _: random.random())
    assert assign(fixed_order("plan", shuffled), 3) == assign(fixed_order("plan", chunks), 3)


@given(st.text(min_size=1, max_size=20), world_sizes)
def test_every_rank_has_its_turn_in_backup_passes(chunk: str, world_size: int) -> None:
    """In as many passes as there are ranks, a chunk belongs to each of them once; then it starts again."""
    owners = [owner(chunk, number, world_size) for number in range(1, world_size + 1)]
    assert sorted(owners) == list(range(world_size))
    assert owner(chunk, world_size + 1, world_size) == owners[0]


@given(st.text(min_size=1, max_size=20), st.integers(1, 8))
def test_another_rank_takes_only_what_becomes_its_own(chunk: str, world_size: int) -> None:
    """Rendezvous hashing: with one more rank, a chunk stays where it was or goes to the new one."""
    before, after = owner(chunk, 1, world_size), owner(chunk, 1, world_size + 1)
    assert after in {before, world_size}


def test_backup_work_is_spread_evenly() -> None:
    """Each of 8 ranks gets about an eighth of 4,000 missing chunks in each pass."""
    for number in (1, 2, 5):
        counts = Counter(owner(f"g/{index:08d}", number, 8) for index in range(4000))
        assert min(counts.values()) > 400
        assert max(counts.values()) < 600


def test_the_order_is_of_the_plan() -> None:
    """Two plans with the same chunk ids have different orders, so that no chunk is always the last."""
    chunks = [f"g/{index:08d}" for index in range(50)]
    assert fixed_order("one", chunks) != fixed_order("two", chunks)
    assert fixed_order("one", chunks) != chunks


def test_the_order_is_pinned() -> None:
    """Ranks of different releases share a run: the order is part of the protocol."""
    chunks = [f"g/{index:08d}" for index in range(6)]
    assert [chunk[-1] for chunk in fixed_order("plan", chunks)] == PINNED_ORDER
    assert [owner(chunk, 1, 5) for chunk in chunks] == PINNED_OWNERS
