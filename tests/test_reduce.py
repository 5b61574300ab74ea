"""The offline merge: the same number by any path, or not complete with the right exit code; and the seal."""

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.segments import DictStore, Fabric, fill, worker_id

from everplex.stages import totals
from everplex.stages.layout import SUMMARY_KEY, parse_segment_key, segment_key
from everplex.stages.ledger import Ledger
from everplex.stages.reduce import exit_code, recheck, reduce, seal
from everplex.stages.summary import Numbers, Summary
from everplex.storage.codec import MAX_DECODED_BYTES, compress, decompress, sha256_hex
from everplex.storage.errors import IncompleteError, IntegrityError, ObjectNotFoundError, StoreUnavailableError

if TYPE_CHECKING:
    from everplex.stages.records import Record

FABRIC = Fabric({"a": [5, 40, 0, 300, 1, 64], "b/c": [30] * 9})
ROWS = range(len(FABRIC.plan.chunks))


def _reduce(store: DictStore, fabric: Fabric = FABRIC, *, tables: bool = False) -> Summary:
    ledger = Ledger(store, fabric.plan, fabric.run_id)
    ledger.refresh()
    if tables:
        fabric.save_tables(store)
    return reduce(fabric.plan, fabric.run, ledger, plan_store=store if tables else None)


def _numbers(summary: Summary) -> dict[str, object]:
    """Return every number that does not depend on who computed what."""
    names = [*Numbers.__struct_fields__, "complete", "groups", "macro", "positions", "document_lengths"]
    return {name: getattr(summary, name) for name in names}


def _whole(workers: int = 1) -> DictStore:
    store = DictStore()
    fill(FABRIC, store, workers=workers)
    return store


EXPECTED = _numbers(_reduce(_whole()))


def test_sums_and_errors_equal_an_independent_computation() -> None:
    """All numbers equal those of plain Python over the losses themselves."""
    summary = _reduce(_whole())
    tokens = [(row, doc, float(loss)) for row in ROWS for doc, loss in _by_document(row)]
    assert summary.nll == pytest.approx(math.fsum(loss for _, _, loss in tokens), rel=1e-15)
    assert summary.tokens == len(tokens) == 5 + 40 + 300 + 1 + 64 + 270
    assert (summary.documents, summary.bytes, summary.words) == (15, 4 * len(tokens), len(tokens))
    units: dict[tuple[int, int], list[float]] = {}
    for row, doc, loss in tokens:
        units.setdefault((FABRIC.plan.chunks.group[row], doc), []).append(loss)
    mean = summary.nll / summary.tokens
    residuals = math.fsum((math.fsum(unit) - mean * len(unit)) ** 2 for unit in units.values())
    assert summary.units == len(units) == 14
    assert summary.stderr == pytest.approx(math.sqrt(residuals * 14 / 13) / summary.tokens, rel=1e-12)
    squares = math.fsum(loss * loss for _, _, loss in tokens)
    iid = math.sqrt((squares / summary.tokens - mean * mean) / (summary.tokens - 1))
    assert summary.stderr_iid == pytest.approx(iid, rel=1e-12)
    assert summary.perplexity == math.exp(summary.nll / summary.tokens)
    assert sum(row.tokens for row in summary.positions) == summary.tokens
    lengths = {(row.start, row.end): row.tokens for row in summary.document_lengths}
    assert lengths == {(1, 1): 1, (4, 7): 5, (16, 31): 270, (32, 63): 40, (64, 127): 64, (256, 511): 300}


def _by_document(row: int) -> list[tuple[int, float]]:
    documents = [doc for doc, count in FABRIC.chunk_layout[row] for _ in range(count)]
    return list(zip(documents, FABRIC.losses(row).tolist(), strict=True))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_order_split_and_duplication_gives_the_same_numbers(data: st.DataObject) -> None:
    """Records shuffled, duplicated, split over workers and segments, rolled up: the same value in every number."""
    rng = data.draw(st.randoms(use_true_random=False))
    rows = [*ROWS, *rng.choices(ROWS, k=rng.randrange(6))]
    rng.shuffle(rows)
    store = DictStore()
    workers = rng.randrange(1, 5)
    written: dict[int, list[Record]] = {}
    while rows:
        lot, rows = rows[: (size := rng.randrange(1, 5))], rows[size:]
        number = rng.randrange(workers)
        records = [FABRIC.record(row, rank=number, seconds=rng.random()) for row in lot]
        before = written.setdefault(number, [])
        roll = bool(before) and rng.random() < 0.3
        seq = len([key for key in store.objects if worker_id(number) in key]) + 1
        FABRIC.put(
            store, worker_id(number), seq, before + records if roll else records,
            device=f"host-{number}/cpu", first=1 if roll else None,
        )  # fmt: skip
        before += records
    store.objects = dict(rng.sample(sorted(store.objects.items()), len(store.objects)))
    summary = _reduce(store)
    assert _numbers(summary) == EXPECTED
    assert exit_code(summary) == 0


@pytest.mark.parametrize("buffered", [1, 7])
def test_the_size_of_the_buffer_makes_no_difference(monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    """Adding a record at a time gives what adding all at once gives, documents across chunks included."""
    monkeypatch.setattr(totals, "BUFFERED_VALUES", buffered)
    assert _numbers(_reduce(_whole(workers=2))) == EXPECTED


def test_a_missing_segment_is_not_complete() -> None:
    """Without one segment the run is incomplete, exit code 75, and says how much is missing."""
    store = _whole()
    del store.objects[next(iter(store.objects))]
    summary = _reduce(store)
    assert (summary.complete, summary.coverage.missing, exit_code(summary)) == (False, 1, 75)
    with pytest.raises(IncompleteError, match="1 of"):
        seal(store, summary)
    assert SUMMARY_KEY not in store.objects


def test_a_conflicting_copy_is_refused() -> None:
    """Two copies that disagree are a conflict, exit code 4, until a third decides."""
    store = _whole()
    FABRIC.put(store, worker_id(7), 1, [FABRIC.record(2, bias=0.5)], device="host-7/cpu")
    summary = _reduce(store)
    assert (summary.complete, summary.coverage.conflicts, exit_code(summary)) == (False, 1, 4)
    FABRIC.put(store, worker_id(8), 1, [FABRIC.record(2)], device="host-8/cpu")
    settled = _reduce(store)
    assert _numbers(settled) == EXPECTED
    assert exit_code(settled) == 0


def test_a_loss_that_stays_non_finite_is_refused() -> None:
    """NaN once asks for another evaluation, exit code 75; NaN twice is exit code 4."""
    store = DictStore()
    for row in ROWS:
        FABRIC.put(store, worker_id(row), 1, [FABRIC.record(row, nonfinite=row == 3)], device=f"host-{row}/cpu")
    once = _reduce(store)
    assert (once.complete, once.coverage.nonfinite, exit_code(once)) == (False, 0, 75)
    FABRIC.put(store, worker_id(90), 1, [FABRIC.record(3, nonfinite=True)], device="host-90/cpu")
    twice = _reduce(store)
    assert (twice.coverage.nonfinite, exit_code(twice)) == (1, 4)
    FABRIC.put(store, worker_id(91), 1, [FABRIC.record(3)], device="host-91/cpu")
    assert _numbers(_reduce(store)) == EXPECTED


def _foreign(store: DictStore) -> None:
    other = Fabric({"a": [5, 40, 0, 300, 1, 64], "b/c": [30] * 8})
    other.put(store, worker_id(7), 1, [other.record(0)])


def _under_another_name(store: DictStore) -> None:
    key = next(iter(store.objects))
    name = parse_segment_key(key)
    assert name is not None
    store.objects[segment_key(worker_id(7), name.seq, name.sha16)] = store.objects[key]


def _concatenated(store: DictStore) -> None:
    one, two, *_ = store.objects.values()
    store.objects[segment_key(worker_id(7), 1, sha256_hex(one + two))] = one + two


def _bomb(store: DictStore) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj(size=MAX_DECODED_BYTES + 1)
    zeros = bytes(1 << 24)
    lots = [compressor.compress(zeros) for _ in range(MAX_DECODED_BYTES >> 24)]
    data = b"".join([*lots, compressor.compress(b"\n"), compressor.flush()])
    store.objects[segment_key(worker_id(7), 1, sha256_hex(data))] = data


def _two_bodies(store: DictStore) -> None:
    one, two, *_ = store.objects.values()
    data = compress(decompress(one, "") + decompress(two, ""))
    store.objects[segment_key(worker_id(7), 1, sha256_hex(data))] = data


@pytest.mark.parametrize("spoil", [_foreign, _under_another_name, _concatenated, _bomb, _two_bodies])
def test_what_does_not_belong_is_named_and_changes_nothing(spoil: object) -> None:
    """A foreign, renamed, concatenated or monstrous segment is set aside, and the numbers are the same."""
    store = _whole()
    assert callable(spoil)
    spoil(store)
    summary = _reduce(store)
    assert _numbers(summary) == EXPECTED
    assert summary.coverage.corrupt == 1
    assert len(summary.coverage.set_aside) == 1


def test_every_flipped_bit_is_noticed() -> None:
    """Whichever bit of a segment flips, the segment is set aside and its chunk is missing."""
    fabric = Fabric({"a": [3]}, windows_per_chunk=1)
    store = DictStore()
    key = fabric.put(store, worker_id(0), 1, [fabric.record(0)])
    whole = store.objects[key]
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        store.objects[key] = bytes(damaged)
        ledger = Ledger(store, fabric.plan, fabric.run_id, threads=1)
        ledger.refresh()
        assert ledger.recorded == set()
        assert list(ledger.set_aside) == [key]


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_torn_segment_is_noticed(keep: int) -> None:
    """A segment that was cut short is set aside."""
    store = _whole()
    key = next(iter(store.objects))
    store.objects[key] = store.objects[key][:keep]
    summary = _reduce(store)
    assert (summary.coverage.missing, summary.coverage.corrupt, exit_code(summary)) == (1, 1, 75)


def test_a_store_that_fails_while_summing_ends_the_merge() -> None:
    """What cannot be read is an error of the store, never a smaller sum."""
    store = _whole()
    key = next(iter(store.objects))
    store.failures[key] = [StoreUnavailableError("get", key, "503")]
    ledger = Ledger(store, FABRIC.plan, FABRIC.run_id)
    with pytest.raises(StoreUnavailableError):
        ledger.refresh()


def _partial(rows: Sequence[int]) -> Summary:
    store = DictStore()
    for row in rows:
        FABRIC.put(store, worker_id(0), row + 1, [FABRIC.record(row)])
    return _reduce(store, tables=True)


def test_a_partial_answer_counts_bytes_of_fully_covered_documents_only() -> None:
    """While chunks are missing, numbers per byte and word are those of documents all of whose chunks count."""
    rng = random.Random(3)
    for _ in range(12):
        rows = sorted(rng.sample(ROWS, rng.randrange(len(ROWS))))
        summary = _partial(rows)
        lengths = [FABRIC.groups[group.name] for group in FABRIC.plan.groups]
        seen: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            for doc, loss in _by_document(row):
                seen.setdefault((FABRIC.plan.chunks.group[row], doc), []).append(loss)
        whole = {
            (g, d) for g, all_of in enumerate(lengths) for d, n in enumerate(all_of) if len(seen.get((g, d), [])) == n
        }
        size = sum(4 * lengths[group][doc] for group, doc in whole)
        assert not summary.complete
        assert summary.tokens == sum(map(len, seen.values()))
        assert (summary.documents, summary.bytes) == (len(whole), size)
        if size:
            loss = math.fsum(loss for unit in whole for loss in seen.get(unit, []))
            assert summary.bits_per_byte == pytest.approx(loss / size / math.log(2), rel=1e-12)


def test_all_chunks_of_a_partial_way_are_the_whole() -> None:
    """With every chunk there the way of partial answers gives the complete one."""
    assert _numbers(_partial(list(ROWS))) == EXPECTED


def test_a_seal_is_created_once() -> None:
    """An equal summary by another worker is success; the seal of the first stays."""
    store = _whole()
    first = seal(store, _reduce(store))
    fill(FABRIC, store, workers=2)
    again = seal(store, _reduce(store))
    assert again == first
    assert msgspec.json.decode(store.objects[SUMMARY_KEY], type=Summary) == first


def test_other_sums_never_replace_a_seal() -> None:
    """A summary with another sum is refused, and the number that differs is named."""
    store = _whole()
    summary = seal(store, _reduce(store))
    with pytest.raises(IntegrityError, match="nll of all"):
        seal(store, msgspec.structs.replace(summary, nll=summary.nll + 1.0))
    groups = {**summary.groups, "a": msgspec.structs.replace(summary.groups["a"], tokens=1)}
    with pytest.raises(IntegrityError, match="tokens of a"):
        seal(store, msgspec.structs.replace(summary, groups=groups))


def test_a_sealed_run_is_added_up_again_and_late_segments_are_told() -> None:
    """The listed segments give the sealed sums; what came later is named and changes nothing."""
    store = _whole()
    with pytest.raises(ObjectNotFoundError):
        recheck(store, FABRIC.plan, FABRIC.run)
    sealed = seal(store, _reduce(store))
    assert recheck(store, FABRIC.plan, FABRIC.run) == (sealed, [])
    late = FABRIC.put(store, worker_id(9), 1, [FABRIC.record(0, bias=0.5)], device="host-9/cpu")
    assert recheck(store, FABRIC.plan, FABRIC.run) == (sealed, [late])
    del store.objects[sealed.segments[0]]
    with pytest.raises(IntegrityError, match="not there"):
        recheck(store, FABRIC.plan, FABRIC.run)


def test_what_a_roll_up_repeats_is_not_late() -> None:
    """A seal that lists a roll-up counts the segments that it repeats."""
    store = DictStore()
    for seq, row in enumerate(ROWS, 1):
        FABRIC.put(store, worker_id(0), seq, [FABRIC.record(row)])
    records = [FABRIC.record(row) for row in ROWS]
    rollup = FABRIC.put(store, worker_id(0), len(ROWS) + 1, [*records, records[0]], first=1)
    sealed = seal(store, _reduce(store))
    assert sealed.segments == [rollup]
    assert recheck(store, FABRIC.plan, FABRIC.run).late == []


def test_a_seal_lists_what_the_majority_rested_on() -> None:
    """Where evaluations disagreed the seal keeps those that decided, so that it can be checked alone."""
    store = _whole()
    FABRIC.put(store, worker_id(7), 1, [FABRIC.record(2, bias=0.5), FABRIC.record(3)], device="host-7/cpu")
    FABRIC.put(store, worker_id(8), 1, [FABRIC.record(2)], device="host-8/cpu")
    sealed = seal(store, _reduce(store))
    assert recheck(store, FABRIC.plan, FABRIC.run) == (sealed, [])


def test_workers_account_for_what_counts() -> None:
    """Per worker: chunks, tokens, loss and speed of the records that count; together they are the whole."""
    summary = _reduce(_whole(workers=3))
    assert [worker.chunks for worker in summary.workers] != []
    assert sum(worker.chunks for worker in summary.workers) == len(ROWS)
    assert sum(worker.tokens for worker in summary.workers) == summary.tokens
    assert math.fsum(worker.nll for worker in summary.workers) == pytest.approx(summary.nll)
    assert {worker.device for worker in summary.workers} == {f"host-{number}/cpu" for number in range(3)}


def test_a_slow_device_is_told_apart_from_a_bad_one() -> None:
    """A device three times slower than its kind is slow, and that says nothing about its health or the numbers."""
    store = DictStore()
    for row in ROWS:
        number = row % 6
        record = FABRIC.record(row)
        record = msgspec.structs.replace(record, seconds=record.tokens * (3.0 if number == 4 else 1.0))
        FABRIC.put(store, worker_id(number), row + 1, [record], device=f"host-{number}/gpu")
    summary = _reduce(store)
    assert [device.device for device in summary.devices if device.speed == "slow"] == ["host-4/gpu"]
    assert {device.health for device in summary.devices} == {"not checked"}
    assert _numbers(summary) == EXPECTED


def test_a_conviction_is_told_with_the_number_before_and_after() -> None:
    """After what a convicted device did was done again, the numbers are the healthy ones; the one before is told."""
    store = DictStore()
    for row in ROWS:
        number = row % 4
        record = FABRIC.record(row, bias=0.05 if number == 1 else 0.0)
        FABRIC.put(store, worker_id(number), row + 1, [record], device=f"host-{number}/gpu")
    biased = _reduce(store).perplexity
    for row in (1, 5):
        for number in (2, 3):
            audit = FABRIC.record(row, kind="audit")
            FABRIC.put(store, worker_id(number), 100 + row, [audit], device=f"host-{number}/gpu")
    convicted = _reduce(store)
    assert (convicted.complete, exit_code(convicted)) == (False, 75)
    assert [device.device for device in convicted.devices if device.health == "convicted"] == ["host-1/gpu"]
    for row in (row for row in ROWS if row % 4 == 1 and row > 5):
        FABRIC.put(store, worker_id(0), 200 + row, [FABRIC.record(row)], device="host-0/gpu")
    healed = _reduce(store)
    assert _numbers(healed) == EXPECTED
    assert healed.perplexity_before == biased
    sealed = seal(store, healed)
    assert recheck(store, FABRIC.plan, FABRIC.run) == (sealed, [])
