"""The merge by all ranks together, in real processes: the same summary in every number, or everybody leaves in time."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ranks
from support.ranks import Outcome, Scene
from support.segments import Fabric, fill, worker_id

from everplex.stages.collective import share
from everplex.stages.layout import SegmentName, parse_segment_key, segment_key
from everplex.stages.ledger import Ledger
from everplex.stages.reduce import reduce
from everplex.stages.stored import save_plan, save_run
from everplex.stages.summary import Summary
from everplex.storage.store import Store, open_store

FABRIC = Fabric({"a": [5, 40, 0, 700, 1, 64], "b/c": [30] * 19})
ROWS = range(len(FABRIC.plan.chunks))

SHAPES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 3), (7, 1), (7, 2), (7, 7)]
SCENES = [
    *(Scene(f"whole-{size}-{group}", size, group) for size, group in SHAPES),
    *(Scene(f"messy-{size}-{group}", size, group, run="messy") for size, group in [(3, 2), (7, 3)]),
    Scene("gap", 3, 2, run="gap"),
    Scene("schema", 3, 2, odd=1, fault="schema"),
    Scene("store", 3, 2, odd=1, fault="store"),
    Scene("late", 3, 2, odd=2, fault="late", seconds=2.0),
    Scene("absent", 4, 2, odd=2, fault="absent", seconds=2.0),
    Scene("absent-first", 4, 2, odd=0, fault="absent", seconds=2.0),
    Scene("killed", 4, 2, odd=3, fault="killed", seconds=5.0),
]


def _start_run(folder: Path, name: str) -> Store:
    store = open_store(str(folder / name))
    save_plan(store, FABRIC.plan)
    save_run(store, FABRIC.run)
    return store


def _messy_run(folder: Path) -> Store:
    """Return a run with duplicates, roll-ups, rounding, audits, sentinels, an outvoted device and a damaged segment."""
    store = _start_run(folder, "messy")
    fill(FABRIC, store, workers=3, per_segment=2)
    records = [FABRIC.record(row, rank=5) for row in ROWS]
    for row in range(4):
        FABRIC.put(store, worker_id(5), row + 1, [records[row]], device="host-5/gpu")
    FABRIC.put(store, worker_id(5), 5, records[:5], first=1, device="host-5/gpu")
    FABRIC.put(store, worker_id(6), 1, [FABRIC.record(row, bias=1e-5) for row in range(6)], device="host-6/gpu")
    FABRIC.put(store, worker_id(7), 1, [FABRIC.record(7, bias=0.5, kind="audit")], device="host-7/gpu")
    FABRIC.put(store, worker_id(8), 1, [FABRIC.record(7, kind="audit")], device="host-8/gpu")
    FABRIC.put(store, worker_id(8), 2, [FABRIC.record(8, nonfinite=True)], device="host-8/gpu")
    wrong = [FABRIC.record(row, bias=0.5) for row in (0, 1, 12)]
    FABRIC.put(store, worker_id(10), 1, wrong, device="host-10/gpu")
    for number in range(3):
        FABRIC.put(store, worker_id(number), 90, [FABRIC.record(0, kind="sentinel")], device=f"host-{number}/cpu")
    store.create(segment_key(worker_id(9), 1, "0" * 64), b"damaged")
    return store


@pytest.fixture(name="played", scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Play all scenes with seven processes; return the folder of what came of them."""
    folder = tmp_path_factory.mktemp("ranks")
    fill(FABRIC, _start_run(folder, "run"), workers=4)
    _messy_run(folder)
    gap = _start_run(folder, "gap")
    FABRIC.put(gap, worker_id(0), 1, [FABRIC.record(row) for row in ROWS[1:]])
    (folder / "scenes.json").write_bytes(msgspec.json.encode(SCENES))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, ranks.__file__, folder, str(rank)], env=environment) for rank in range(7)
    ]
    try:
        codes = [process.wait(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0, 0, -9, 0, 0, 0]
    return folder


def _outcomes(played: Path, name: str) -> dict[int, Outcome]:
    return {
        int(path.stem.rpartition("-")[2]): msgspec.json.decode(path.read_bytes(), type=Outcome)
        for path in played.glob(f"{name}-?.json")
    }


def _offline(played: Path, run: str) -> Summary:
    ledger = Ledger(open_store(str(played / run)), FABRIC.plan, FABRIC.run_id)
    ledger.refresh()
    return reduce(FABRIC.plan, FABRIC.run, ledger)


@pytest.mark.parametrize("scene", [scene for scene in SCENES if not scene.fault and scene.run != "gap"])
def test_every_rank_has_the_offline_merge_in_every_number(played: Path, scene: Scene) -> None:
    """Whatever the world and group size, all ranks return the summary of the offline merge."""
    expected = msgspec.structs.replace(_offline(played, scene.run), reduced_by="collective")
    assert expected.complete
    outcomes = _outcomes(played, scene.name)
    assert sorted(outcomes) == list(range(scene.world_size))
    for outcome in outcomes.values():
        assert outcome.failure == ""
        assert outcome.summary == expected


def test_the_messy_run_is_messy(played: Path) -> None:
    """The run that is merged both ways has whatever there can be to judge."""
    summary = _offline(played, "messy")
    assert summary.coverage.duplicates > 6
    assert summary.coverage.corrupt == 1
    assert [device.device for device in summary.devices if device.mismatches] == [
        "host-10/gpu", "host-7/gpu", "host-8/gpu"
    ]  # fmt: skip
    assert [device.device for device in summary.devices if device.health == "convicted"] == ["host-10/gpu"]
    assert summary.perplexity_before is not None


FAILURES: list[tuple[str, list[int], list[int], str]] = [
    ("gap", [0, 1, 2], [], "1 of"),
    ("schema", [0, 1, 2], [], "1 run another version"),
    ("store", [0, 1, 2], [], "rank 1: could not get"),
    ("absent", [0, 1, 3], [2], "did not come"),
    ("absent-first", [1, 2, 3], [0], "did not come"),
    ("killed", [0, 1, 2], [3], "did not come"),
]


@pytest.mark.parametrize(("name", "there", "missing", "reason"), FAILURES)
def test_the_others_leave_in_time_and_know_who_is_missing(
    played: Path, name: str, there: list[int], missing: list[int], reason: str
) -> None:
    """A rank that is gone, dies inside, cannot read or runs something else ends the meeting for all, with its name."""
    outcomes = _outcomes(played, name)
    assert sorted(outcomes) == there
    assert all(outcome.summary is None for outcome in outcomes.values())
    assert any(reason in outcome.failure for outcome in outcomes.values())
    assert missing in [outcome.missing for outcome in outcomes.values()]
    assert all(outcome.missing in ([], missing) for outcome in outcomes.values())
    assert all("offline merge" in outcome.failure for outcome in outcomes.values())


def test_a_late_rank_does_not_wait(played: Path) -> None:
    """A rank that comes when the others have left leaves at once, and they have named it."""
    outcomes = _outcomes(played, "late")
    assert sorted(outcomes) == [0, 1, 2]
    assert [2] in (outcomes[0].missing, outcomes[1].missing)
    assert "left" in outcomes[2].failure


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 9)), max_size=40), st.integers(1, 7))
def test_shares_are_a_partition_and_keep_rollups_with_what_they_cover(
    names: list[tuple[int, int, int]], world_size: int
) -> None:
    """Every segment is in one share, and with it the widest roll-up that covers it."""
    keys = sorted({segment_key(worker_id(w), last, "0" * 64, max(1, last - width)) for w, last, width in names})
    shares = [share(keys, rank, world_size) for rank in range(world_size)]
    assert sorted(key for of_rank in shares for key in of_rank) == keys
    for of_rank in shares:
        for key in of_rank:
            covering = _covering(key, keys)
            assert not covering or set(covering) & set(of_rank)


def _covering(key: str, keys: list[str]) -> list[str]:
    """Return the other segments whose sequence numbers hold those of this one."""
    mine = _parsed(key)
    return [
        other
        for other in keys
        if other != key and other.split("/")[1] == key.split("/")[1]
        if _parsed(other).first <= mine.first and mine.seq <= _parsed(other).seq
    ]


def _parsed(key: str) -> SegmentName:
    name = parse_segment_key(key)
    assert name is not None
    return name
