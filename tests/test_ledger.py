"""Reading segments: what is believed, what is set aside and why, what is never concluded."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.segments import DictStore, Fabric, fill, worker_id

from everplex.stages.ledger import Ledger
from everplex.stages.records import Record
from everplex.storage.errors import ObjectNotFoundError, StoreRefusedError, StoreUnavailableError


@pytest.fixture(name="fabric")
def made_up() -> Fabric:
    """Return a plan of two groups in eight chunks."""
    return Fabric({"a": [5, 40, 0, 100], "b": [30] * 9})


def _ledger(fabric: Fabric, store: DictStore) -> Ledger:
    ledger = Ledger(store, fabric.plan, fabric.run_id)
    ledger.refresh()
    return ledger


def test_records_of_all_workers_are_found(fabric: Fabric) -> None:
    """Every chunk that a segment records is recorded."""
    store = DictStore()
    fill(fabric, store, workers=3)
    ledger = _ledger(fabric, store)
    assert ledger.recorded == set(fabric.chunk_ids)
    assert ledger.set_aside == {}


def test_a_refresh_reads_only_what_is_new(fabric: Fabric) -> None:
    """Segments are read once, however often the store is listed."""
    store = DictStore()
    fabric.put(store, worker_id(0), 1, [fabric.record(0)])
    ledger = _ledger(fabric, store)
    key = fabric.put(store, worker_id(0), 2, [fabric.record(1)])
    store.gets.clear()
    ledger.refresh()
    ledger.refresh()
    assert store.gets == [key]
    assert ledger.recorded == set(fabric.chunk_ids[:2])


def test_sentinels_and_lost_losses_record_nothing(fabric: Fabric) -> None:
    """A chunk is recorded by a finite evaluation that counts, and by no other."""
    store = DictStore()
    fabric.put(store, worker_id(0), 1, [fabric.record(0, kind="sentinel"), fabric.record(1, nonfinite=True)])
    assert _ledger(fabric, store).recorded == set()
    fabric.put(store, worker_id(1), 1, [fabric.record(1, kind="audit")])
    assert _ledger(fabric, store).recorded == {fabric.chunk_ids[1]}


def test_a_chunk_is_duplicated_by_another_worker_alone(fabric: Fabric) -> None:
    """One worker that wrote a chunk twice, and sentinels, are no duplicates."""
    store = DictStore()
    assert _ledger(fabric, store).chunk_seconds is None
    fabric.put(store, worker_id(0), 1, [fabric.record(0), fabric.record(1), fabric.record(2, kind="sentinel")])
    fabric.put(store, worker_id(0), 2, [fabric.record(0)])
    fabric.put(store, worker_id(1), 1, [fabric.record(1), fabric.record(2, kind="sentinel")])
    ledger = _ledger(fabric, store)
    assert ledger.duplicated == {fabric.chunk_ids[1]}
    assert ledger.chunk_seconds == fabric.record(0).seconds


def test_a_rollup_stands_for_what_it_covers(fabric: Fabric) -> None:
    """The segments that a roll-up covers are never fetched, and its records are counted once."""
    store = DictStore()
    records = [fabric.record(row) for row in range(4)]
    singles = [fabric.put(store, worker_id(0), row + 1, [records[row]]) for row in range(3)]
    rollup = fabric.put(store, worker_id(0), 4, records, first=1)
    other = fabric.put(store, worker_id(0), 5, [fabric.record(4)])
    ledger = _ledger(fabric, store)
    assert store.gets == [rollup, other]
    assert len(ledger.copies.table) == 5
    assert not set(singles) & {source.key for source in ledger.copies.current}


def test_a_rollup_that_comes_later_replaces_what_was_read(fabric: Fabric) -> None:
    """Reading singles first and their roll-up later gives the same copies as reading the roll-up alone."""
    store = DictStore()
    records = [fabric.record(row) for row in range(4)]
    for row in range(3):
        fabric.put(store, worker_id(0), row + 1, [records[row]])
    ledger = _ledger(fabric, store)
    fabric.put(store, worker_id(0), 4, records, first=1)
    ledger.refresh()
    fresh = _ledger(fabric, store)
    assert [source.key for source in ledger.copies.current] == [source.key for source in fresh.copies.current]
    assert len(ledger.copies.table) == len(fresh.copies.table) == 4


def test_a_damaged_rollup_falls_back_to_what_it_covers(fabric: Fabric) -> None:
    """Where a roll-up is damaged its segments are read one by one, and only its own record is lost."""
    store = DictStore()
    records = [fabric.record(row) for row in range(4)]
    for row in range(3):
        fabric.put(store, worker_id(0), row + 1, [records[row]])
    rollup = fabric.put(store, worker_id(0), 4, records, first=1)
    store.objects[rollup] = store.objects[rollup][:-1] + b"\x00"
    ledger = _ledger(fabric, store)
    assert ledger.recorded == set(fabric.chunk_ids[:3])
    assert list(ledger.set_aside) == [rollup]


FOREIGN: dict[str, tuple[Callable[[Record], dict[str, Any]], str]] = {
    "a chunk of no plan": (lambda _: {"chunk": "a-ca978112ca/00000099"}, "no chunk"),
    "a chunk id in odd spelling": (lambda r: {"chunk": r.chunk.replace("/0", "/")}, "no chunk"),
    "digits of another script": (lambda r: {"chunk": r.chunk[:-1] + "\u0661"}, "no chunk"),
    "another content": (lambda _: {"content": "0" * 64}, "content"),
    "one token fewer": (lambda r: {"tokens": r.tokens - 1}, "scored tokens"),
    "a document's token lost": (lambda r: {"doc_tokens": [r.doc_tokens[0] - 1, *r.doc_tokens[1:]]}, "tokens"),
    "documents out of order": (lambda r: {"doc_ordinals": r.doc_ordinals[::-1]}, "rising"),
    "a document of no group": (lambda r: {"doc_ordinals": [*r.doc_ordinals[:-1], 10**30]}, "ordinals"),
    "negative counts": (lambda _: {"doc_tokens": [-1, 46], "position_tokens": [46, -1]}, "tokens"),
    "no sum": (lambda _: {"nll": None}, "finite"),
    "a sum beside a non-finite loss": (lambda _: {"nonfinite": 1}, "non-finite"),
    "a negative loss": (
        lambda r: {
            "nll": -5.0,
            "doc_nll": [-5.0, 0.0],
            "position_nll": [-5.0] + [0.0] * (len(r.position_nll or []) - 1),
        },
        "loss in nats",
    ),
    "a largest loss below the mean": (lambda _: {"nll_max": 0.5}, "loss in nats"),
    "a largest loss of no float32": (lambda _: {"nll_max": 1e300}, "float32"),
    "impossible squares": (lambda _: {"nll_sq": 1.0}, "squared"),
    "documents that do not add up": (lambda r: {"doc_nll": [1.0, *(r.doc_nll or [])[1:]]}, "documents"),
    "positions that do not add up": (lambda r: {"position_nll": [1.0, *(r.position_nll or [])[1:]]}, "positions"),
    "a sum too few": (lambda r: {"position_nll": (r.position_nll or [])[1:]}, "one per count"),
    "no digest": (lambda _: {"token_digest": "zz"}, "digest"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_impossible_record_sets_its_segment_aside(fabric: Fabric, name: str) -> None:
    """A record that its chunk cannot have given is refused in one sentence that names object, chunk and reason."""
    change, reason = FOREIGN[name]
    store = DictStore()
    record = fabric.record(0)
    key = fabric.put(store, worker_id(0), 1, [msgspec.structs.replace(record, **change(record))])
    fabric.put(store, worker_id(0), 2, [fabric.record(1)])
    ledger = _ledger(fabric, store)
    assert ledger.recorded == {fabric.chunk_ids[1]}
    assert reason in ledger.set_aside[key]
    assert ledger.set_aside[key].startswith(key)
    assert "\n" not in ledger.set_aside[key]


def test_a_segment_of_another_run_or_plan_is_set_aside(fabric: Fabric) -> None:
    """Results of another run, or of another plan under the same name, are named and not counted."""
    store = DictStore()
    other = Fabric({"a": [5, 40, 0, 100], "b": [30] * 8})
    key = other.put(store, worker_id(0), 1, [other.record(0)])
    header = msgspec.structs.replace(fabric.header(worker_id(1), 1), plan="0" * 64)
    second, data = fabric.segment(header, [fabric.record(0)])
    store.create(second, data)
    ledger = _ledger(fabric, store)
    assert "another run" in ledger.set_aside[key]
    assert "another plan" in ledger.set_aside[second]
    assert ledger.recorded == set()


def test_a_stray_object_is_named(fabric: Fabric) -> None:
    """What is no segment by its name is reported and not read."""
    store = DictStore()
    store.create("segments/notes.txt", b"hello")
    assert "not the name of a segment" in _ledger(fabric, store).set_aside["segments/notes.txt"]
    assert store.gets == []


def test_an_object_that_is_listed_but_gone_is_tried_twice(fabric: Fabric) -> None:
    """One lost answer is forgiven; two are reported, and the next refresh looks again."""
    store = DictStore()
    key = fabric.put(store, worker_id(0), 1, [fabric.record(0)])
    gone = ObjectNotFoundError("get", key, "no such object")
    store.failures[key] = [gone]
    assert _ledger(fabric, store).recorded == {fabric.chunk_ids[0]}
    store.failures[key] = [gone, gone]
    ledger = _ledger(fabric, store)
    assert ledger.recorded == set()
    assert "not there" in ledger.set_aside[key]
    ledger.refresh()
    assert ledger.recorded == {fabric.chunk_ids[0]}
    assert ledger.set_aside == {}


@pytest.mark.parametrize("error", [StoreUnavailableError, StoreRefusedError])
def test_what_cannot_be_read_is_not_taken_for_absent(
    fabric: Fabric, error: type[StoreUnavailableError | StoreRefusedError]
) -> None:
    """A refusal or a server error ends the reading; the same refresh later continues it."""
    store = DictStore()
    fill(fabric, store)
    key = next(iter(store.objects))
    store.failures[key] = [error("get", key, "403 or 503")]
    ledger = Ledger(store, fabric.plan, fabric.run_id)
    with pytest.raises(error):
        ledger.refresh()
    ledger.refresh()
    assert ledger.recorded == set(fabric.chunk_ids)
    assert ledger.set_aside == {}
