"""Whole runs as steps of one scheduler: real writers, schedules, segments and spools; time and faults from a seed.

A worker is two generators, as it is two threads in earnest: one evaluates, one pumps the writer. Every `yield` is a
place where it may be killed, paused, or overtaken by anything else. Faults happen until `heal_at`; after that the run
has to reach its end, and all the time it has to keep its promises (`Broken` says which one it did not).
"""

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache

from support.memory import DictSpool
from support.segments import DictStore, Fabric, worker_id

from everplex.actions import Busy, Done, Refresh, Take, Wait
from everplex.schedule import Schedule
from everplex.stages.layout import SEGMENTS_PREFIX
from everplex.stages.ledger import Ledger
from everplex.stages.records import Header, Record
from everplex.stages.reduce import exit_code, reduce, seal
from everplex.stages.segments import Segment, decode_segment
from everplex.stages.spool import upload
from everplex.stages.writer import Writer, perform
from everplex.storage.errors import CorruptObjectError, StoreError, StoreRefusedError, StoreUnavailableError

FAULTS = (
    "crash", "before", "lost", "torn", "outage", "disk", "stale", "pause", "preempt", "resize", "flip", "slow",
)  # fmt: skip
MAX_SECONDS = 50_000.0
GRACE_SECONDS = 10.0
SHAPES = ({"a": [40] * 2}, {"a": [40] * 6, "b": [70, 0, 3]}, {"a": [64] * 5, "b": [16] * 20, "c": [1]})


class Broken(AssertionError):  # noqa: N818 - what the search is for
    """A promise that a run did not keep."""


@cache
def fabric(shape: int) -> Fabric:
    """Return a made-up plan."""
    return Fabric(SHAPES[shape])


@cache
def record_of(shape: int, row: int) -> Record:
    """Return the record of a chunk; cached, as making one takes longer than all else."""
    return fabric(shape).record(row)


class FaultyStore(DictStore):
    """The run's store, as the workers see it: with what the seed does to it."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world
        self.born: dict[str, float] = {}
        self.torn: set[str] = set()
        self.flipped: set[str] = set()

    def create(self, key: str, data: bytes) -> None:
        """Create, unless the seed has it otherwise."""
        world = self._world
        world.check_reachable("create", key)
        if world.happens("before", 0.1):
            raise StoreUnavailableError("create", key, "drawn")
        if world.happens("torn", 0.05) and key not in self.objects:
            self.objects[key] = data[: world.rng.randrange(len(data))]
            self.born[key] = world.now
            self.torn.add(key)
            raise StoreUnavailableError("create", key, "drawn: torn")
        super().create(key, data)
        self.born.setdefault(key, world.now)
        if world.happens("lost", 0.1):
            raise StoreUnavailableError("create", key, "drawn: the answer was lost")

    def visible(self) -> list[str]:
        """Return the keys that a listing shows; those of the last seconds may be missing."""
        world = self._world
        world.check_reachable("list", SEGMENTS_PREFIX)
        lag = world.rng.uniform(0, 50) if world.happens("stale", 0.3) else 0.0
        return [key for key in self.objects if self.born.get(key, 0.0) <= world.now - lag]


class Disk(DictSpool):
    """A machine's spool; the disk may be full."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def create(self, key: str, data: bytes) -> None:
        """Keep a segment, unless the disk is full."""
        if self._world.happens("disk", 0.4):
            raise StoreRefusedError("create", key, "no space left on device")
        super().create(key, data)


class Reader:
    """The simplest reader there is: what a worker knows of the store. Reads what is new and keeps all of it."""

    def __init__(self, store: DictStore) -> None:
        self._store = store
        self._seen: set[str] = set()
        self.by_chunk: dict[str, set[str]] = defaultdict(set)
        """Per chunk the workers that recorded it."""
        self.values: dict[str, set[tuple[float | None, int]]] = defaultdict(set)

    def read(self, keys: list[str]) -> None:
        """Read those of the segments that are new."""
        for key in keys:
            if key in self._seen or not key.startswith(SEGMENTS_PREFIX):
                continue
            self._seen.add(key)
            segment = _decode(key, self._store.objects[key])
            for record in segment.records if segment is not None else ():
                self.by_chunk[record.chunk].add(segment.header.worker if segment else "")
                self.values[record.chunk].add((record.nll, record.tokens))

    @property
    def recorded(self) -> set[str]:
        """Chunks that have a record."""
        return set(self.by_chunk)

    @property
    def twice(self) -> set[str]:
        """Chunks that several workers recorded."""
        return {chunk for chunk, workers in self.by_chunk.items() if len(workers) > 1}


@lru_cache(maxsize=256)
def _decode(key: str, data: bytes) -> Segment | None:
    try:
        return decode_segment(key, data)
    except CorruptObjectError:
        return None


@dataclass
class Process:
    """One incarnation of a worker."""

    name: str
    machine: int
    rank: int | None
    world_size: int | None
    writer: Writer
    schedule: Schedule
    dead: bool = False
    paused_until: float = 0.0
    stops_at: float = math.inf
    exit_code: int | None = None
    held: list[Take] = field(default_factory=list)
    evaluations: int = 0


class World:
    """One run under the faults of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        rng = self.rng
        self.shape = rng.randrange(len(SHAPES))
        self.fabric = fabric(self.shape)
        self.rows = {chunk: row for row, chunk in enumerate(self.fabric.chunk_ids)}
        self.faults = {fault for fault in FAULTS if rng.random() < 0.35}
        self.heal_at = rng.uniform(10, 120)
        self.outages = [self._outage() for _ in range(rng.randrange(1, 3))] if "outage" in self.faults else []
        self.store = FaultyStore(self)
        self.disks = [Disk(self) for _ in range(3)]
        self.acknowledged: set[tuple[str, str]] = set()
        """Worker and chunk of every record that a writer reported as durable."""
        self.processes: list[Process] = []
        self.sealed: bytes | None = None
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Process, Iterator[float]]] = []
        self._order = itertools.count()

    def _outage(self) -> tuple[float, float]:
        start = self.rng.uniform(0, self.heal_at)
        return start, min(self.heal_at, start + self.rng.uniform(5, 90))

    # Faults

    def happens(self, fault: str, rate: float) -> bool:
        """Whether a fault strikes now."""
        return fault in self.faults and self.now < self.heal_at and self.rng.random() < rate

    def check_reachable(self, verb: str, key: str) -> None:
        """Raise in an outage."""
        if any(start <= self.now < end for start, end in self.outages):
            raise StoreUnavailableError(verb, key, "outage")

    def _strike(self, process: Process) -> None:
        """Let something happen to a process, or to the data at rest."""
        if self.happens("crash", 0.01):
            process.dead = True
        if self.happens("pause", 0.01):
            process.paused_until = self.now + self.rng.choice([5.0, 60.0, 400.0])
            if process.stops_at < math.inf:  # who is stopped cannot keep a budget
                process.stops_at = process.paused_until + GRACE_SECONDS
        if self.happens("preempt", 0.01) and process.stops_at == math.inf:
            process.stops_at = max(self.now, process.paused_until) + GRACE_SECONDS
            process.schedule.stop()
        if self.happens("flip", 0.005) and self.store.objects:
            key = self.rng.choice(list(self.store.objects))
            data = bytearray(self.store.objects[key])
            if data:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                self.store.objects[key] = bytes(data)
                self.store.flipped.add(key)

    # The life of the run

    def run(self) -> "World":
        """Let generations of workers work until the run is complete and every straggler has ended; check it all."""
        generations = 0
        while not self._complete():
            generations += 1
            healed = self.now >= self.heal_at
            if generations > 400 or self.now > MAX_SECONDS:
                raise Broken("it does not end")
            self._start_generation()
            until = math.inf if healed else self.now + (self.rng.uniform(5, 60) if "resize" in self.faults else 400)
            self._step_until(until)
            for process in self.processes:
                if process.paused_until <= self.now and not process.dead and process.exit_code is None:
                    process.dead = True  # the job is over; only what is stopped outlives it
            self.now += self.rng.uniform(0.1, 5)
        self._seal()
        self._step_until(math.inf)  # zombies come back after the end
        self._seal()
        self.check()
        return self

    def _complete(self) -> bool:
        reader = Reader(self.store)
        reader.read(list(self.store.objects))
        return len(reader.recorded) == len(self.rows)

    def _start_generation(self) -> None:
        pooled = self.rng.random() < 0.3
        world_size = self.rng.randrange(1, 4)
        for rank in range(world_size):
            name = worker_id(next(self._numbers))
            process = Process(
                name=name,
                machine=self.rng.randrange(len(self.disks)),
                rank=None if pooled else rank,
                world_size=None if pooled else world_size,
                writer=Writer(
                    capacity=self.rng.choice([1, 1, 2, 4]),
                    spooling=self.rng.random() < 0.75,
                    spool_cap=self.rng.choice([2, 1024]),
                    rollup_every=self.rng.choice([2, 3, 64]),
                ),
                schedule=Schedule(
                    self.fabric.plan.digest(), self.fabric.chunk_ids, worker=name, device=f"host-{rank}",
                    rank=None if pooled else rank, world_size=None if pooled else world_size,
                    refresh_seconds=self.rng.choice([2.0, 30.0]),
                ),
            )  # fmt: skip
            self.processes.append(process)
            self._later(process, self._evaluate(process), self.rng.uniform(0, 3))

    def _later(self, process: Process, steps: Iterator[float], delay: float) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), process, steps))

    def _step_until(self, until: float) -> None:
        """Run events up to a time, or until only paused processes are left of a generation."""
        while self._events and self._events[0][0] <= until:
            self.now, _, process, steps = heapq.heappop(self._events)
            if self.now > MAX_SECONDS:
                raise Broken(f"it does not end: worker {process.name[:8]}")
            if process.dead:
                continue
            if process.paused_until > self.now:
                self._later(process, steps, process.paused_until - self.now)
                continue
            self._strike(process)
            if self.now >= process.stops_at + 1.0 and process.exit_code is None:
                raise Broken("the grace budget is over")
            if not process.dead and (delay := next(steps, None)) is not None:
                self._later(process, steps, delay)
        self.now = max(self.now, until) if until < math.inf else self.now

    # A worker

    def _evaluate(self, process: Process) -> Iterator[float]:
        """Be the evaluator's thread."""
        schedule, writer, disk = process.schedule, process.writer, self.disks[process.machine]
        reader = Reader(self.store)
        try:
            upload(disk, self.store, self.fabric.run_id, self.fabric.plan.digest())
            reader.read(self.store.visible())
        except StoreError:
            process.exit_code = 75
            return
        self._later(process, self._pump(process), 0.0)
        complete = False
        while True:
            action = schedule.take(self.now)
            if isinstance(action, Take):
                process.held.append(action)
            elif isinstance(action, Refresh):
                yield self.rng.uniform(0.01, 0.5)
                try:
                    reader.read(self.store.visible())
                except StoreError:
                    schedule.refresh_failed(self.now)
                else:
                    schedule.refreshed(reader.recorded, self.now, duplicated=reader.twice)
            elif isinstance(action, Wait):
                yield min(action.seconds, 0.5)
            elif isinstance(action, Done):
                complete = action.complete
                break
            elif isinstance(action, Busy):
                yield from self._evaluate_one(process)
                if writer.failure is not None:
                    break
        yield from self._leave(process)
        if writer.failure is not None and not isinstance(writer.failure, StoreUnavailableError):
            raise Broken(f"a writer failed with {writer.failure!r}")
        process.exit_code = 0 if complete and writer.failure is None else 75
        if complete and not (self._complete() or self.store.flipped):
            raise Broken("a worker said complete and it is not")

    def _evaluate_one(self, process: Process) -> Iterator[float]:
        take = process.held.pop(0)
        schedule, writer = process.schedule, process.writer
        if not schedule.wanted(take):
            schedule.released(take)
            return
        seconds = self.rng.uniform(0.5, 1.5)
        yield seconds
        while writer.full and writer.failure is None and process.stops_at == math.inf:
            yield 0.2
        if writer.failure is not None:
            return
        writer.submit(record_of(self.shape, self.rows[take.chunk]), force=True)
        process.evaluations += 1
        if process.stops_at == math.inf and writer.unacknowledged > 4:
            raise Broken("more is unacknowledged than the queue may hold")
        yield 0.01
        schedule.ended(take, seconds)

    def _leave(self, process: Process) -> Iterator[float]:
        """Drain within the grace budget, then spool the rest."""
        writer = process.writer
        writer.close()
        deadline = min(process.stops_at - 1.0, self.now + 60.0)
        while not writer.finished and self.now < deadline:
            yield min(0.2, max(0.001, deadline - self.now))
            deadline = min(deadline, process.stops_at - 1.0)
        for step in writer.abandon():
            try:
                self.disks[process.machine].create(step.key, step.data)
            except StoreError:
                writer.lose(step.key)

    def _pump(self, process: Process) -> Iterator[float]:
        """Be the writer's thread."""
        writer, disk = process.writer, self.disks[process.machine]
        while process.exit_code is None and not writer.finished:
            step = writer.next(self.now)
            if step is None:
                yield 0.2
                continue
            yield self.rng.uniform(0, 0.05) + (self.rng.uniform(0, 5) if self.happens("slow", 0.3) else 0.0)
            error: Exception | None = None
            header: Header | None = None
            try:
                header = perform(step, self.store, disk, lambda: self._header(process))
            except StoreError as caught:
                error = caught
                yield self.rng.choice([0.1, 20.0])  # the retry budget
            except Exception as caught:  # noqa: BLE001 - as the thread does
                error = caught
            yield self.rng.uniform(0, 0.05)
            if error is None:
                writer.succeeded(header)
            else:
                writer.failed(error, self.now)
            change = writer.changes()
            if change.durable:
                self.acknowledged |= {(process.name, receipt.chunk) for receipt in change.durable}
                self._check_acknowledged({(process.name, receipt.chunk) for receipt in change.durable})
                process.schedule.durable(change.durable, self.now)
            process.schedule.aside(change.aside)

    def _header(self, process: Process) -> Header:
        return self.fabric.header(process.name, 0, device=f"host-{process.machine}", rank=process.rank)

    # Promises

    def _seal(self) -> None:
        """Note the result when it is complete; it must never be another one."""
        reader = Reader(self.store)
        reader.read(list(self.store.objects))
        if len(reader.recorded) < len(self.rows):
            if self.store.flipped:
                return
            raise Broken("a complete run is complete no more")
        total = math.fsum(nll for values in reader.values.values() for nll, _ in values if nll is not None)
        found = repr((total, sum(tokens for values in reader.values.values() for _, tokens in values))).encode()
        if self.sealed is not None and found != self.sealed:
            raise Broken("the result changed after it was sealed")
        self.sealed = found

    def check(self) -> None:
        """Check the promises that hold at every end, by the simplest reader."""
        reader = Reader(self.store)
        reader.read(list(self.store.objects))
        for chunk, row in self.rows.items():
            record = record_of(self.shape, row)
            if chunk in reader.values and reader.values[chunk] != {(record.nll, record.tokens)}:
                raise Broken(f"{chunk} does not count once with its own value")
        self._check_acknowledged(self.acknowledged)

    def _check_acknowledged(self, acknowledged: set[tuple[str, str]]) -> None:
        reader = Reader(self.store)
        reader.read(list(self.store.objects))
        lost = {(worker, chunk) for worker, chunk in acknowledged if worker not in reader.by_chunk[chunk]}
        if lost and not self.store.flipped:
            raise Broken(f"acknowledged and gone: {sorted(lost)}")

    def check_with_ledger(self) -> None:
        """Check the same by the real reader: ledger, judge, reduce, seal, exit code."""
        quiet = DictStore()
        quiet.objects = self.store.objects
        ledger = Ledger(quiet, self.fabric.plan, self.fabric.run_id, threads=1)
        ledger.refresh()
        summary = reduce(self.fabric.plan, self.fabric.run, ledger)
        records = [record_of(self.shape, row) for row in self.rows.values()]
        if not summary.complete:
            if exit_code(summary) != 75 or not self.store.flipped:
                raise Broken(f"not complete, exit code {exit_code(summary)}")
            return
        expected = math.fsum(record.nll or 0.0 for record in records), sum(record.tokens for record in records)
        if (summary.nll, summary.tokens) != expected or exit_code(summary) != 0:
            raise Broken(f"the sums are {summary.nll, summary.tokens}, expected {expected}")
        if (summary.coverage.accepted, summary.coverage.conflicts) != (len(records), 0):
            raise Broken(f"coverage: {summary.coverage}")
        seal(quiet, summary)


def simulate(seed: int, *, with_ledger: bool = False) -> World:
    """Run one seed and check it; a promise that is not kept raises Broken with the seed in it."""
    world = World(seed)
    try:
        world.run()
        if with_ledger:
            world.check_with_ledger()
    except Exception as error:
        error.add_note(f"seed {seed}, faults {sorted(world.faults)}, at {world.now:.2f} s")
        raise
    return world
