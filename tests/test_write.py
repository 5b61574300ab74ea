"""The writer: group commit, roll-ups, outages, the spool, failures and deadlines."""

import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest
from support.faulty import ALWAYS, FaultyStore, When
from support.memory import DictSpool
from support.segments import DictStore, Fabric, worker_id

from everplex.stages.layout import ROLLUP_EVERY, parse_segment_key
from everplex.stages.ledger import Ledger
from everplex.stages.records import Header, Record
from everplex.stages.reduce import exit_code, reduce
from everplex.stages.segments import decode_segment
from everplex.stages.spool import upload
from everplex.stages.write import Outcome, WriterThread
from everplex.stages.writer import QueueFullError, Receipt, Writer, perform
from everplex.storage.errors import (
    IdentityMismatch,
    ObjectExistsError,
    StoreRefusedError,
    StoreUnavailableError,
)

FABRIC = Fabric({"a": [64] * 200})
WORKER = worker_id(1)
LONG = 20.0
"""Seconds after which a thread that should have ended has hung."""


def header(worker: str = WORKER) -> Header:
    """Return the header of a worker."""
    return FABRIC.header(worker, 0)


def record(row: int) -> Record:
    """Return the record of a chunk."""
    return FABRIC.record(row)


def chunks(store: DictStore) -> list[list[str]]:
    """Return what each segment of a store holds, in the order of their sequence numbers."""
    return [[found.chunk for found in decode_segment(key, data).records] for key, data in sorted(store.objects.items())]


def ids(*rows: int) -> list[str]:
    """Return ids of chunks."""
    return [FABRIC.chunk_ids[row] for row in rows]


class Pump:
    """A pump without a thread: steps a writer by hand, with a clock that only it moves."""

    def __init__(
        self, writer: Writer, store: DictStore | FaultyStore, spool: DictSpool | None = None, *, worker: str = WORKER
    ) -> None:
        self.writer = writer
        self.worker = worker
        self.store = store
        self.spool = spool
        self.now = 0.0
        self.durable: list[Receipt] = []
        self.aside: list[Receipt] = []

    def step(self) -> bool:
        """Do one step; False where there is nothing to do."""
        step = self.writer.next(self.now)
        if step is None:
            return False
        try:
            made = perform(step, self.store, self.spool, lambda: header(self.worker))
        except Exception as error:  # noqa: BLE001 - as the thread does
            self.writer.failed(error, self.now)
        else:
            self.writer.succeeded(made)
        change = self.writer.changes()
        self.durable += change.durable
        self.aside += change.aside
        return True

    def run(self) -> None:
        """Step until there is nothing to do."""
        while self.step():
            pass


def test_a_chunk_is_done_only_when_the_store_has_said_so() -> None:
    """Submitted is not durable, sealed is not durable; the acknowledged PUT is."""
    pump = Pump(Writer(), DictStore())
    pump.writer.submit(record(0))
    pump.step()  # the header
    assert (pump.durable, pump.writer.unacknowledged) == ([], 1)
    pump.step()  # the PUT
    assert pump.durable == [Receipt(ids(0)[0], "work")]
    assert pump.writer.unacknowledged == 0


def test_what_queues_during_a_put_goes_into_the_next_segment() -> None:
    """With 1 s per PUT and 4 records meanwhile, the next segment holds those 4; one PUT is in flight at a time."""
    store = DictStore()
    pump = Pump(Writer(capacity=8), store)
    pump.writer.submit(record(0))
    pump.step()
    step = pump.writer.next(0.0)
    assert step is not None
    for row in range(1, 5):
        pump.writer.submit(record(row))
    with pytest.raises(RuntimeError, match="store has not ended"):
        pump.writer.next(0.5)
    store.create(step.key, step.data)
    pump.writer.succeeded()
    pump.run()
    assert chunks(store) == [ids(0), ids(1, 2, 3, 4)]


def test_a_full_queue_refuses() -> None:
    """At most `capacity` records are without an acknowledgement, so at most so many are lost by a kill."""
    writer = Writer(capacity=2)
    writer.submit(record(0))
    writer.submit(record(1))
    with pytest.raises(QueueFullError):
        writer.submit(record(2))
    assert writer.unacknowledged == 2


def test_every_64th_segment_repeats_the_63_before() -> None:
    """The name says so, each record is there once, and the next roll-up starts after it."""
    store = DictStore()
    pump = Pump(Writer(), store)
    for row in range(2 * ROLLUP_EVERY):
        pump.writer.submit(record(row % 50))
        pump.run()
    names = [parse_segment_key(key) for key in sorted(store.objects)]
    rollups = [(name.first, name.seq) for name in names if name is not None and name.is_rollup]
    assert rollups == [(0, 63), (64, 127)]
    found = chunks(store)
    assert found[63] == [chunk for segment in found[:63] for chunk in segment] + ids(63 % 50)
    assert found[127] == [chunk for segment in found[64:127] for chunk in segment] + ids(127 % 50)


def test_bytes_are_made_at_submit() -> None:
    """What happens to a record's lists afterwards changes nothing."""
    store = DictStore()
    pump = Pump(Writer(), store)
    given = record(0)
    before = given.digest()
    pump.writer.submit(given)
    given.doc_tokens[0] += 1
    pump.run()
    ((key, data),) = store.objects.items()
    assert decode_segment(key, data).records[0].digest() == before


def test_an_encoding_error_is_loud_and_spares_the_rest() -> None:
    """A record that cannot be encoded raises at once; nothing of it reaches the store, the next one does."""
    store = DictStore()
    with WriterThread(Writer(), open_store=lambda: store, header=header) as thread:
        broken = record(0)
        broken.doc_tokens[0] = object()  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            thread.submit(broken)
        thread.submit(record(1))
    assert chunks(store) == [ids(1)]


def test_nothing_is_written_before_the_header_and_a_mismatch_fails() -> None:
    """While the model's digest is unknown the store stays empty; another digest ends the writer with its field."""
    store = DictStore()
    compared, waiting = threading.Event(), threading.Event()

    def mismatch() -> Header:
        waiting.set()
        assert compared.wait(LONG)
        raise IdentityMismatch("model", "one", "another", "give another --out")

    thread = WriterThread(Writer(), open_store=lambda: store, header=mismatch)
    thread.submit(record(0))
    assert waiting.wait(LONG)
    assert not store.objects
    compared.set()
    with pytest.raises(IdentityMismatch, match="model differs"):
        thread.submit(record(1))
    with pytest.raises(IdentityMismatch):
        thread.close()
    assert not store.objects
    assert thread.outcome().lost == [Receipt(ids(0)[0], "work")]


def test_a_store_gone_for_a_minute() -> None:
    """Segments go to the spool, evaluation goes on, and all is in the store soon after its return, under one name."""
    store = FaultyStore(DictStore())
    spool = DictSpool()
    pump = Pump(Writer(cooldown_seconds=10), store, spool)
    store.gone.set()
    for row in range(12):
        pump.now += 5.0
        pump.writer.submit(record(row))
        pump.run()
    assert len(pump.aside) == 12
    attempts = store.num_operations
    assert attempts <= 7  # once per cool-down, not once per chunk
    spooled = dict(spool.objects)
    store.gone.clear()
    pump.now += 10.0
    pump.run()
    assert store.inner.objects == spooled  # type: ignore[attr-defined]
    assert not spool.objects
    assert sorted(receipt.chunk for receipt in pump.durable) == sorted(ids(*range(12)))
    assert pump.writer.outcome().spooled == []


def test_a_store_gone_for_good() -> None:
    """The writer goes on up to its cap, then fails with exit code 75; every chunk is in the spool, none is lost."""
    store = FaultyStore(DictStore())
    store.gone.set()
    spool = DictSpool()
    pump = Pump(Writer(spool_cap=5), store, spool)
    for row in range(5):
        pump.writer.submit(record(row))
        pump.run()
    with pytest.raises(StoreUnavailableError, match="5 chunks") as raised:
        pump.writer.submit(record(5))
    assert raised.value.exit_code == 75
    assert pump.writer.finished
    assert [receipt.chunk for receipt in pump.writer.outcome().spooled] == ids(*range(5))
    assert len(spool.objects) == 5
    assert sorted(spool.objects) == sorted(
        upload(spool, target := DictStore(), FABRIC.run_id, FABRIC.plan.digest()).keys
    )
    assert sorted(chunks(target)) == [[chunk] for chunk in ids(*range(5))]


def test_without_a_disk_chunks_are_reported_lost() -> None:
    """Store and spool gone: the chunks are named, nothing blocks, and a store that returns takes the next."""

    def full(operation: str, location: str) -> BaseException:
        return StoreRefusedError(operation, location, "no space left on device")

    store = FaultyStore(DictStore())
    store.gone.set()
    disk = FaultyStore(DictSpool(), fail_at=1, error=full)
    pump = Pump(Writer(cooldown_seconds=10), store, disk)  # type: ignore[arg-type]
    pump.writer.submit(record(0))
    pump.run()
    assert pump.writer.outcome().lost == pump.aside == [Receipt(ids(0)[0], "work")]
    store.gone.clear()
    pump.now = 10.0
    pump.writer.submit(record(1))
    pump.run()
    assert pump.durable == [Receipt(ids(1)[0], "work")]


def test_a_roll_up_brings_back_what_was_lost() -> None:
    """Records that neither store nor spool took are still in memory for the next roll-up."""
    store = FaultyStore(DictStore())
    pump = Pump(Writer(spooling=False, rollup_every=4, cooldown_seconds=1), store)
    for row in range(4):
        store.gone.set() if row == 1 else store.gone.clear()
        pump.now += 5
        pump.writer.submit(record(row))
        pump.run()
    assert pump.aside == [Receipt(ids(1)[0], "work")]
    assert sorted(receipt.chunk for receipt in pump.durable) == sorted(ids(0, 1, 2, 3))
    assert pump.writer.outcome().lost == []


def test_a_refusal_saves_the_work_and_fails() -> None:
    """No permission, clock skew: what is finished goes to the spool and the refusal is raised, with its exit code."""

    def refused(operation: str, location: str) -> BaseException:
        return StoreRefusedError(operation, location, "access denied")

    store = FaultyStore(DictStore(), fail_at=1, error=refused)
    spool = DictSpool()
    pump = Pump(Writer(capacity=2), store, spool)
    pump.writer.submit(record(0))
    pump.step()
    pump.writer.submit(record(1))
    pump.run()
    assert store.num_operations == 1
    assert chunks(spool) == [ids(0), ids(1)]
    with pytest.raises(StoreRefusedError, match="access denied"):
        pump.writer.submit(record(2))


def test_a_failure_without_a_spool_names_everything() -> None:
    """In flight and queued alike are reported, so that no worker waits for an acknowledgement that never comes."""

    def refused(operation: str, location: str) -> BaseException:
        return StoreRefusedError(operation, location, "access denied")

    pump = Pump(Writer(capacity=2, spooling=False), FaultyStore(DictStore(), fail_at=1, error=refused))
    pump.writer.submit(record(0))
    pump.step()
    pump.writer.submit(record(1))
    pump.run()
    assert sorted(receipt.chunk for receipt in pump.aside) == ids(0, 1)
    assert sorted(pump.writer.outcome().lost) == sorted(pump.aside)
    assert pump.writer.finished


def test_a_torn_object_under_our_name_costs_a_sequence_number() -> None:
    """On a store without atomic writes half an object stays under our key: the same records go under the next one."""

    class Torn(DictStore):
        def create(self, key: str, data: bytes) -> None:
            if not self.objects:
                self.objects[key] = data[:50]
                raise ObjectExistsError("create", key, "it holds something else")
            super().create(key, data)

    store = Torn()
    pump = Pump(Writer(), store)
    pump.writer.submit(record(0))
    pump.run()
    assert pump.durable == [Receipt(ids(0)[0], "work")]
    torn, whole = sorted(store.objects)
    assert len(store.objects[torn]) == 50
    assert decode_segment(whole, store.objects[whole]).records[0].chunk == ids(0)[0]


@pytest.mark.parametrize("when", ALWAYS)
def test_fail_at_every_operation(when: When) -> None:
    """For N = 1, 2, 3 … until nothing fires: after a fault at operation N the store is old or new, never else.

    The next run, on the same machine, finishes with the sums of a quiet one.
    """
    rows = range(9)
    quiet = DictStore()
    _write_run(quiet, DictSpool(), rows)
    expected = _sums(quiet, len(rows))
    fired = -1
    number = 0
    while fired:
        number += 1
        inner, spool = DictStore(), DictSpool()
        store = FaultyStore(inner, fail_at=number, when=when)
        _write_run(store, spool, rows)
        recorded = _recorded(inner)
        fired = store.fired
        upload(spool, inner, FABRIC.run_id, FABRIC.plan.digest())
        assert recorded <= _recorded(inner)
        recorded = _recorded(inner)
        _write_run(inner, spool, [row for row in rows if ids(row)[0] not in recorded], worker_id(2))
        assert _sums(inner, len(rows)) == expected
    assert number > len(rows)


def _write_run(store: DictStore | FaultyStore, spool: DictSpool, rows: Iterable[int], worker: str = WORKER) -> None:
    pump = Pump(Writer(rollup_every=3), store, spool, worker=worker)
    for row in rows:
        pump.writer.submit(record(row))
        pump.now += 1.0
        pump.run()
    assert not pump.writer.outcome().lost


def _recorded(store: DictStore) -> set[str]:
    ledger = Ledger(store, FABRIC.plan, FABRIC.run_id, threads=1)
    ledger.refresh()
    assert not ledger.set_aside
    return ledger.recorded


def _sums(store: DictStore, accepted: int) -> tuple[float, int]:
    ledger = Ledger(store, FABRIC.plan, FABRIC.run_id, threads=1)
    ledger.refresh()
    store.objects |= FABRIC.tables
    summary = reduce(FABRIC.plan, FABRIC.run, ledger)
    assert summary.coverage.accepted == accepted
    assert exit_code(summary) == 75  # the plan is larger than what this test writes
    return summary.nll, summary.tokens


# The thread


class BlackHole(DictStore):
    """A store whose PUT does not return before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def create(self, key: str, data: bytes) -> None:
        """Hang."""
        self.entered.set()
        assert self.release.wait(2 * LONG)
        super().create(key, data)


@pytest.fixture
def black_hole() -> Iterator[BlackHole]:
    """Return a black hole that lets go at the end of the test."""
    store = BlackHole()
    yield store
    store.release.set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Start something that may block."""

    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_submit_waits_while_the_queue_is_full(black_hole: BlackHole) -> None:
    """The evaluator waits for the acknowledgement of its last chunk, and goes on after it."""
    thread = WriterThread(Writer(), open_store=lambda: black_hole, header=header)
    thread.submit(record(0))
    assert black_hole.entered.wait(LONG)
    second = in_thread(lambda: thread.submit(record(1)))
    second.join(0.3)
    assert second.is_alive()
    black_hole.release.set()
    second.join(LONG)
    assert thread.close().stored == 2


def test_a_stopping_worker_is_not_held_by_a_full_queue(black_hole: BlackHole) -> None:
    """A preempted evaluator hands over its finished chunk at once and gets to its close."""
    stop = threading.Event()
    spool = DictSpool()
    thread = WriterThread(Writer(), open_store=lambda: black_hole, header=header, spool=spool, stopping=stop.is_set)
    thread.submit(record(0))
    second = in_thread(lambda: thread.submit(record(1)))
    stop.set()
    second.join(LONG)
    assert not second.is_alive()
    assert [receipt.chunk for receipt in thread.close(0.4).spooled] == ids(0, 1)


def test_close_keeps_its_deadline_with_a_black_holed_store(black_hole: BlackHole) -> None:
    """What is in flight and what is queued is in the spool when close returns, and it says that the thread hangs."""
    spool = DictSpool()
    thread = WriterThread(Writer(capacity=3), open_store=lambda: black_hole, header=header, spool=spool)
    thread.submit(record(0))
    assert black_hole.entered.wait(LONG)
    thread.submit(record(1))
    thread.submit(record(2))
    outcome = thread.close(0.4)
    assert outcome.stuck
    assert (outcome.stored, outcome.lost) == (0, [])
    assert chunks(spool) == [ids(0), ids(1, 2)]
    black_hole.release.set()  # the PUT succeeds after all: the same bytes under the same key as in the spool
    assert not thread.close(LONG).stuck
    assert set(black_hole.objects) <= set(spool.objects)


def test_leaving_the_block_does_not_wait_for_a_hanging_thread_again(black_hole: BlackHole) -> None:
    """The deadline that `close` was given is the last one."""
    outcomes: list[Outcome] = []

    def leave() -> None:
        with WriterThread(Writer(), open_store=lambda: black_hole, header=header, spool=DictSpool()) as thread:
            thread.submit(record(0))
            outcomes.append(thread.close(0.4))

    block = in_thread(leave)
    block.join(LONG)
    assert not block.is_alive()
    assert outcomes[0].stuck


def test_close_without_spool_says_what_is_lost(black_hole: BlackHole) -> None:
    """Where nothing can be saved, close still returns and names the chunks."""
    thread = WriterThread(Writer(spooling=False), open_store=lambda: black_hole, header=header)
    thread.submit(record(0))
    assert [receipt.chunk for receipt in thread.close(0.4).lost] == ids(0)


class Killed(BaseException):
    """Ends a thread as nothing that is caught does."""


def test_the_death_of_the_thread_is_raised_at_the_next_submit_and_close() -> None:
    """A producer never waits for a dead writer, and its chunks are named."""

    def killed(operation: str, location: str) -> BaseException:
        return Killed(operation, location)

    store = FaultyStore(DictStore(), fail_at=1, error=killed)
    aside: list[Receipt] = []
    thread = WriterThread(Writer(), open_store=lambda: store, header=header, on_aside=aside.extend)
    thread.submit(record(0))
    with pytest.raises(Killed):
        thread.submit(record(1))
    with pytest.raises(Killed):
        thread.close()
    assert aside == thread.outcome().lost == [Receipt(ids(0)[0], "work")]


def test_a_store_that_cannot_be_opened_is_raised() -> None:
    """The error of the connection reaches the evaluator."""

    def refuse() -> DictStore:
        raise StoreRefusedError("open", "s3://b", "access denied")

    thread = WriterThread(Writer(), open_store=refuse, header=header)
    with pytest.raises(StoreRefusedError, match="access denied"):
        thread.close()


def test_an_exception_ends_the_block_and_closes_the_thread() -> None:
    """The evaluator's own exception passes; what was finished before it is stored."""
    store = DictStore()

    def evaluate() -> None:
        with WriterThread(Writer(), open_store=lambda: store, header=header) as thread:
            thread.submit(record(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert chunks(store) == [ids(0)]


def test_receipts_arrive_after_the_object() -> None:
    """When a chunk is reported durable, the store has it."""
    store = DictStore()
    seen: list[tuple[Receipt, int]] = []
    with WriterThread(
        Writer(),
        open_store=lambda: store,
        header=header,
        on_durable=lambda receipts: seen.extend((receipt, len(store.objects)) for receipt in receipts),
    ) as thread:
        for row in range(5):
            thread.submit(record(row))
    assert [receipt.chunk for receipt, _ in seen] == ids(*range(5))
    assert all(stored >= position for position, (_, stored) in enumerate(seen, 1))


def test_memory_does_not_grow_with_the_number_of_chunks() -> None:
    """Ten times the chunks need no more memory: queue, history and accounts are bounded."""

    class Sink(DictStore):
        def create(self, key: str, data: bytes) -> None:
            del key, data

    def peak(count: int) -> int:
        pump = Pump(Writer(), Sink())
        one = record(0)
        tracemalloc.start()
        for _ in range(count):
            pump.writer.submit(one)
            pump.run()
            pump.durable.clear()
        _, top = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return top

    peak(130)
    assert peak(1500) < 1.2 * peak(150) + 50_000
