"""The local spool: private, durable, uploaded once and only then forgotten."""

import stat
from pathlib import Path

import pytest
from support.faulty import FaultyStore
from support.segments import DictStore, Fabric, worker_id

from everplex.stages.spool import LocalSpool, spool_folder, upload_spool
from everplex.storage.errors import ObjectNotFoundError, StoreRefusedError, StoreUnavailableError, UsageError

FABRIC = Fabric({"a": [64] * 6})
PLAN = FABRIC.plan.digest()


def fill(num_segments: int = 4) -> dict[str, bytes]:
    """Spool some segments; returns them."""
    spool = LocalSpool(FABRIC.run_id)
    segments = dict(
        FABRIC.segment(FABRIC.header(worker_id(1), seq), [FABRIC.record(seq)]) for seq in range(num_segments)
    )
    for key, data in segments.items():
        spool.create(key, data)
    return segments


def test_what_is_spooled_comes_back_in_another_process_life() -> None:
    """The same bytes under the same keys, for a spool that is opened anew."""
    segments = fill()
    spool = LocalSpool(FABRIC.run_id)
    assert {key: spool.get(key) for key in spool.keys()} == segments  # noqa: SIM118 - a spool is no dictionary


def test_nobody_else_may_read_it(user_cache: Path) -> None:
    """Folders have mode 0700 and files 0600, whatever the umask says; nothing is made before the first segment."""
    LocalSpool(FABRIC.run_id)
    assert not (user_cache / "spool").exists()
    fill()
    root = user_cache / "spool" / FABRIC.run_id
    assert root == spool_folder(FABRIC.run_id)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root.parent)] == [0o700, 0o700]
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_upload_moves_everything_and_may_be_repeated() -> None:
    """The store has all of it, the spool nothing; a second upload does nothing."""
    segments, store = fill(), DictStore()
    assert upload_spool(store, FABRIC.run_id, PLAN).keys == sorted(segments)
    assert store.objects == segments
    again = upload_spool(store, FABRIC.run_id, PLAN)
    assert (again.keys, again.refused) == ([], [])


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_fault_at_any_segment_loses_nothing(when: str) -> None:
    """After a failure at PUT N, each segment is in the store or still in the spool; the next try finishes."""
    for number in range(1, 5):
        segments, inner = fill(), DictStore()
        store = FaultyStore(inner, fail_at=number, when=when)  # type: ignore[arg-type]
        with pytest.raises(StoreUnavailableError):
            upload_spool(store, FABRIC.run_id, PLAN)
        waiting = set(LocalSpool(FABRIC.run_id).keys())
        assert waiting | set(inner.objects) == set(segments)
        upload_spool(inner, FABRIC.run_id, PLAN)
        assert inner.objects == segments
        assert not list(LocalSpool(FABRIC.run_id).keys())


def test_what_is_already_stored_is_forgotten() -> None:
    """A PUT whose answer was lost had succeeded: uploading it again is success."""
    segments, store = fill(), DictStore()
    store.objects |= segments
    assert len(upload_spool(store, FABRIC.run_id, PLAN).keys) == len(segments)
    assert not list(LocalSpool(FABRIC.run_id).keys())


def test_damaged_and_foreign_segments_stay_and_are_named() -> None:
    """A torn file, a segment of another run and one of another plan are not uploaded; the rest is."""
    segments, store = fill(1), DictStore()
    spool = LocalSpool(FABRIC.run_id)
    other = Fabric({"b": [64] * 2})
    foreign_key, foreign = other.segment(other.header(worker_id(2), 0), [other.record(0)])
    spool.create(foreign_key, foreign)
    torn_key, torn = FABRIC.segment(FABRIC.header(worker_id(3), 0), [FABRIC.record(1)])
    spool.create(torn_key, torn[:-3])
    result = upload_spool(store, FABRIC.run_id, PLAN)
    assert store.objects == segments
    assert len(result.refused) == 2
    assert "expected a segment of run" in "\n".join(result.refused)
    assert set(spool.keys()) == {foreign_key, torn_key}
    fill(1)
    assert "expected plan" in "\n".join(upload_spool(store, FABRIC.run_id, "0" * 64).refused)


def test_upload_stops_when_asked() -> None:
    """A preempted upload ends between two segments."""
    fill()
    store = DictStore()
    upload_spool(store, FABRIC.run_id, PLAN, stop=lambda: len(store.objects) == 2)
    assert len(store.objects) == 2
    assert len(list(LocalSpool(FABRIC.run_id).keys())) == 2


def test_a_disk_that_refuses_is_a_store_error(user_cache: Path) -> None:
    """Where no folder can be made, the error names it and is one that the writer understands."""
    (user_cache / "spool").write_text("in the way")
    with pytest.raises(StoreRefusedError, match="spool"):
        LocalSpool(FABRIC.run_id).create("segments/x", b"data")


def test_absent_segments_and_bad_names() -> None:
    """What is not there is not found; a run id that is no run id is a usage error."""
    with pytest.raises(ObjectNotFoundError):
        LocalSpool(FABRIC.run_id).get("segments/none")
    with pytest.raises(UsageError, match="16 hexadecimal"):
        spool_folder("../elsewhere")
