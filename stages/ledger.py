"""Reads what the workers wrote, only what is new each time, and keeps a compact row per evaluation.

A verified roll-up stands for the segments it covers, which are then never read; a bad one is set aside and they are
read after all. What is wrong with an object is one sentence in `set_aside`, and never stops the others. An object that
cannot be read is another matter: the store's error is raised, because absence must never be concluded from it.
"""

import gc
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from everplex.stages.check import RecordChecker
from everplex.stages.collector import collector_paused
from everplex.stages.copies import COPY, KINDS, SENTINEL, Copies, Source
from everplex.stages.layout import SEGMENTS_PREFIX, SegmentName, parse_segment_key
from everplex.stages.records import Environment, Header, Plan, Record
from everplex.stages.segments import Segment, decode_segment
from everplex.storage.errors import CorruptObjectError, ObjectNotFoundError
from everplex.storage.store import Store

THREADS = 8
"""Threads that fetch."""
FETCHED_AT_ONCE = 16
"""Objects that a thread fetches before it hands them over; fewer where there are few."""
CACHED_BYTES = 64 << 20
"""Stored bytes up to which a run is kept from indexing to summing, and so read once."""


class Ledger:
    """All evaluations of one run that its store holds, as of the last `refresh`."""

    def __init__(self, store: Store, plan: Plan, run_id: str, *, threads: int = THREADS) -> None:
        self._store = store
        self._plan = plan
        self._plan_digest = plan.digest()
        self._run_id = run_id
        self._threads = threads
        self._checker = RecordChecker(plan)
        self._tables: list[NDArray[np.void]] = []
        self._sources: list[Source] = []
        self._environments: dict[Environment, Environment] = {}
        self._read: set[str] = set()
        self._covered: dict[str, _Coverage] = defaultdict(_Coverage)
        """Per worker, the sequence numbers that verified roll-ups stand for."""
        self._cache: dict[str, bytes] = {}
        self._cached_bytes = 0
        self.set_aside: dict[str, str] = {}
        """Key of each object that does not count, and one sentence why."""

    def refresh(self) -> None:
        """List the store and read the segments that are new. Raises the store's error where it cannot be read."""
        self.read_keys(entry.key for entry in self._store.list(SEGMENTS_PREFIX))

    def read_keys(self, keys: Iterable[str]) -> None:
        """Read those of the segments `keys` that are new, roll-ups first."""
        singles: list[tuple[SegmentName, str]] = []
        rollups: list[tuple[SegmentName, str]] = []
        for derived in ("copies", "recorded"):
            self.__dict__.pop(derived, None)
        with collector_paused():
            for key in keys:
                if key in self._read:
                    continue
                name = parse_segment_key(key)
                if name is None:
                    self.set_aside[key] = f"{key}: not the name of a segment"
                else:
                    (rollups if name.is_rollup else singles).append((name, key))
            for names in (sorted(rollups, key=_widest_first), singles):
                self._read_all(key for name, key in names if not self._is_repeated(name))

    @cached_property
    def copies(self) -> Copies:
        """Every evaluation, once, by the sources that stand for it."""
        table = np.concatenate([np.zeros(0, COPY), *self._tables])
        self._tables = [table]
        current = [not self._covered[source.worker].exceeds(source.first, source.seq) for source in self._sources]
        if not all(current):
            table = table[np.array(current)[table["source"]]]
        return Copies(table, self._sources)

    @cached_property
    def recorded(self) -> set[str]:
        """Ids of the chunks that have an evaluation with a finite loss, sentinels aside."""
        table = self.copies.table
        rows = np.unique(table["chunk"][table["finite"] & (table["kind"] != SENTINEL)])
        return self._ids(rows)

    @property
    def duplicated(self) -> set[str]:
        """Ids of the chunks that more than one worker evaluated, sentinels aside."""
        table = self.copies.table
        works = table["kind"] != SENTINEL
        pairs = np.unique(np.stack([table["chunk"][works], self.copies.ranks("worker")[works]]), axis=1)
        rows, num_workers = np.unique(pairs[0], return_counts=True)
        return self._ids(rows[num_workers > 1])

    @property
    def chunk_seconds(self) -> float | None:
        """Mean time of an evaluation; None before the first."""
        table = self.copies.table
        return float(table["seconds"].mean()) if len(table) else None

    def _ids(self, rows: NDArray[np.int64]) -> set[str]:
        return {self._plan.chunk_id(row) for row in rows.tolist()}

    def records(self, wanted: Mapping[int, NDArray[np.int32]]) -> Iterator[tuple[Source, list[Record]]]:
        """Read back, by source, the records at the `wanted` lines; in the order of their sources.

        Raises the store's error where one is gone, CorruptObjectError where it has changed since.
        """
        order = sorted(wanted)
        with collector_paused():
            for index, segment in zip(order, self._fetch([self._sources[index].key for index in order]), strict=True):
                if not isinstance(segment, Segment):
                    raise segment
                yield self._sources[index], [segment.records[line] for line in wanted[index].tolist()]

    def is_covered(self, key: str) -> bool:
        """Whether a verified roll-up repeats all that this segment holds."""
        name = parse_segment_key(key)
        return name is not None and self._is_repeated(name)

    def _is_repeated(self, name: SegmentName) -> bool:
        return self._covered[name.worker].holds(name.first, name.seq)

    def _read_all(self, keys: Iterable[str]) -> None:
        order = list(keys)
        for key, found in zip(order, self._fetch(order), strict=True):
            if isinstance(found, ObjectNotFoundError):
                self.set_aside[key] = f"{key}: listed, but not there when it was read twice"
                continue
            self._read.add(key)
            self.set_aside.pop(key, None)
            try:
                if isinstance(found, CorruptObjectError):
                    raise found
                self._index(key, found)
            except CorruptObjectError as error:
                sentence = str(error)
                self.set_aside[key] = sentence if sentence.startswith(key) else f"{key}: {sentence}"

    def _index(self, key: str, segment: Segment) -> None:
        header = segment.header
        if header.run != self._run_id:
            raise CorruptObjectError(f"of another run: expected {self._run_id}, found {header.run}")
        if header.plan != self._plan_digest:
            raise CorruptObjectError(f"of another plan: expected {self._plan_digest[:16]}, found {header.plan[:16]}")
        rows = [
            _copy(self._checker.row(record), len(self._sources), line, record)
            for line, record in enumerate(segment.records)
        ]
        self._tables.append(np.array(rows, COPY))
        self._sources.append(self._source(key, header))
        if header.first != header.seq:
            self._covered[header.worker].add(header.first, header.seq)

    def _source(self, key: str, header: Header) -> Source:
        environment = self._environments.setdefault(header.environment, header.environment)
        return Source(
            key, header.worker, header.first, header.seq, header.device, environment, header.rank,
            header.store_requests, header.profile, header.created, header.reused_from,
        )  # fmt: skip

    def _fetch(self, keys: Sequence[str]) -> Iterator[Segment | CorruptObjectError | ObjectNotFoundError]:
        """Segments in the order of `keys`, a bounded number of them ahead; the store's other errors are raised."""
        size = max(1, min(FETCHED_AT_ONCE, len(keys) // (4 * self._threads)))
        waiting: deque[tuple[Sequence[str], Future[list[bytes | ObjectNotFoundError]]]] = deque()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ledger") as pool:
            try:
                for start in range(0, len(keys), size):
                    run = keys[start : start + size]
                    waiting.append((run, pool.submit(self._get_all, run)))
                    if len(waiting) >= 2 * self._threads:
                        yield from _decode_all(*waiting.popleft())
                while waiting:
                    yield from _decode_all(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()

    def _get_all(self, keys: Sequence[str]) -> list[bytes | ObjectNotFoundError]:
        found: list[bytes | ObjectNotFoundError] = []
        for key in keys:
            try:
                found.append(self._get(key))
            except ObjectNotFoundError as error:
                found.append(error)
        return found

    def _get(self, key: str) -> bytes:
        data = self._cache.get(key)
        if data is None:
            try:
                data = self._store.get(key)
            except ObjectNotFoundError:
                data = self._store.get(key)  # a listing may be ahead of the object for a moment
            self._keep(key, data)
        return data

    def _keep(self, key: str, data: bytes) -> None:
        self._cached_bytes += len(data)
        if self._cached_bytes <= CACHED_BYTES:
            self._cache[key] = data
        else:
            self._cache.clear()  # a part of a large run is of little use


def _decode_all(
    keys: Sequence[str], fetched: Future[list[bytes | ObjectNotFoundError]]
) -> Iterator[Segment | CorruptObjectError | ObjectNotFoundError]:
    yield from map(_decode, keys, fetched.result())
    gc.collect(0)  # requests leave cycles, which would pile up while the collector is paused


def _decode(key: str, data: bytes | ObjectNotFoundError) -> Segment | CorruptObjectError | ObjectNotFoundError:
    """Decode what was fetched; not where it is fetched, since threads that compute hold each other up."""
    if isinstance(data, ObjectNotFoundError):
        return data
    try:
        return decode_segment(key, data)
    except CorruptObjectError as error:
        return error


class _Coverage:
    """Ranges of sequence numbers, wider ones before those they hold."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # first, -last
        self._reach: list[int] | None = None

    def add(self, first: int, last: int) -> None:
        insort(self._ranges, (first, -last))
        self._reach = None

    def holds(self, first: int, last: int) -> bool:
        """Whether a range covers this one."""
        return self._reaches(bisect_right(self._ranges, (first, -last)), last)

    def exceeds(self, first: int, last: int) -> bool:
        """Whether a range other than this one covers it."""
        return self._reaches(bisect_left(self._ranges, (first, -last)), last)

    def _reaches(self, position: int, last: int) -> bool:
        if self._reach is None:
            self._reach = list(accumulate((-end for _, end in self._ranges), max))
        return position > 0 and self._reach[position - 1] >= last


def _widest_first(item: tuple[SegmentName, str]) -> tuple[int, str]:
    name, key = item
    return name.first - name.seq, key


def _copy(row: int, source: int, line: int, record: Record) -> tuple[int | float | bool, ...]:
    digest = record.digest()
    return (
        row, source, line, record.tokens, int(digest[:16], 16), int(digest[16:32], 16),
        int(record.token_digest[:16], 16), hash(tuple(record.batch_shape)),
        np.nan if record.nll is None else record.nll, record.seconds, KINDS[record.kind], record.nonfinite == 0,
    )  # fmt: skip
