"""How far a run is, read from its store alone: from any machine, at any time, changing nothing."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from everplex.stages.copies import SENTINEL, Copies, Source
from everplex.stages.derive import perplexity
from everplex.stages.health import examine, with_speed
from everplex.stages.judge import MISSING, judge
from everplex.stages.layout import CHUNKS_PREFIX, SEGMENTS_PREFIX
from everplex.stages.ledger import Ledger
from everplex.stages.records import SCHEMA, ModelSpec, Plan, Run
from everplex.stages.report import plan_facts
from everplex.stages.stored import is_sealed, load_plan, load_run
from everplex.stages.summary import DeviceRow, WorkerRow
from everplex.storage.errors import ObjectNotFoundError, UsageError
from everplex.storage.store import Store

IDLE_SECONDS = 120.0
"""A worker that stored nothing for so long, and for the time of several chunks, is taken to be gone."""
_IDLE_CHUNKS = 5


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far one group is."""

    chunks: int
    done: int
    tokens: int
    done_tokens: int


class WorkerStatus(WorkerRow, frozen=True, kw_only=True):
    """What one worker has stored so far, whether it counts or not; sentinels are left out."""

    last_activity: float
    """Seconds since the epoch: when its newest segment was stored, by the store's clock where it tells."""
    active: bool


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run: `planning` (no plan yet), `planned` (no result yet), `started`, `complete`.

    `chunks` are the plan's, `done` those that count; the others are `missing`, in conflict or not finite.
    """

    schema: int = SCHEMA
    out: str
    state: Literal["planning", "planned", "started", "complete"]
    sealed: bool = False
    plan: dict[str, int | str] = {}
    run: str | None = None
    model: ModelSpec | None = None
    dtype: str | None = None
    chunks: int = 0
    """While planning, those that are there already."""
    done: int = 0
    missing: int = 0
    duplicates: int = 0
    conflicts: int = 0
    nonfinite: int = 0
    set_aside: list[str] = []
    """One sentence per object that does not count."""
    tokens: int = 0
    done_tokens: int = 0
    perplexity: float | None = None
    """Of the chunks that are done."""
    tokens_per_second: float | None = None
    """Of the workers that are active."""
    seconds_left: float | None = None
    store_requests: dict[str, int] = {}
    """Requests that all workers have made of the store, per verb, and `retries`."""
    groups: dict[str, GroupStatus] = {}
    workers: list[WorkerStatus] = []
    devices: list[DeviceRow] = []


class StatusReader:
    """Reads the status of one run again and again, fetching only what is new each time.

    `open_plan_store` opens the store of a shared plan, given its URL.
    """

    def __init__(
        self, store: Store, open_plan_store: Callable[[str], Store], clock: Callable[[], float] = time.time
    ) -> None:
        self.store = store
        self._open_plan_store = open_plan_store
        self._clock = clock
        self.run: Run | None = None
        self.plan: Plan | None = None
        self.ledger: Ledger | None = None
        self._modified: dict[str, float | None] = {}

    def read(self) -> Status:
        """Return the status of now. Raises UsageError where there is neither a plan nor a beginning of one."""
        self.run = self.run or self._load_run()
        try:
            self.plan = self.plan or load_plan(self.plan_store())
        except ObjectNotFoundError:
            return self._planning()
        if self.run is None:
            return _planned(self.store.url, self.plan)
        self.ledger = self.ledger or Ledger(self.store, self.plan, self.run.id())
        self._modified = {entry.key: entry.modified for entry in self.store.list(SEGMENTS_PREFIX)}
        self.ledger.read_keys(self._modified)
        return self._started(self.run, self.plan, self.ledger)

    def _load_run(self) -> Run | None:
        try:
            return load_run(self.store)
        except ObjectNotFoundError:
            return None

    def plan_store(self) -> Store:
        """Return the store that the plan lies in."""
        if self.run is not None and self.run.plan_url is not None:
            return self._open_plan_store(self.run.plan_url)
        return self.store

    def _planning(self) -> Status:
        present = sum(1 for _ in self.store.list(CHUNKS_PREFIX))
        if not present:
            raise UsageError(
                f"{self.store.url} holds neither a run nor a plan; check OUT, or start with `everplex run --out OUT`"
            )
        return Status(out=self.store.url, state="planning", chunks=present)

    def _started(self, run: Run, plan: Plan, ledger: Ledger) -> Status:
        copies = ledger.copies
        verdict = judge(len(plan.chunks), copies)
        groups = _group_rows(plan, verdict.winners != MISSING)
        workers = self._worker_rows(copies)
        tokens = sum(group.tokens for group in groups.values())
        done_tokens = sum(group.done_tokens for group in groups.values())
        speed = sum(row.tokens_per_second or 0.0 for row in workers if row.active)
        complete = verdict.accepted == len(plan.chunks)
        nll = copies.table["nll"][verdict.winners[verdict.winners != MISSING]]
        return Status(
            out=self.store.url,
            state="complete" if complete else "started",
            sealed=is_sealed(self.store),
            plan=plan_facts(plan),
            run=run.id(),
            model=run.model,
            dtype=run.dtype,
            chunks=len(plan.chunks),
            done=verdict.accepted,
            missing=len(verdict.missing),
            duplicates=verdict.duplicates,
            conflicts=len(verdict.conflicts),
            nonfinite=len(verdict.nonfinite),
            set_aside=[ledger.set_aside[key] for key in sorted(ledger.set_aside)],
            tokens=tokens,
            done_tokens=done_tokens,
            perplexity=perplexity(float(nll.sum()), done_tokens),
            tokens_per_second=speed or None,
            seconds_left=0.0 if complete else (tokens - done_tokens) / speed if speed else None,
            store_requests=dict(sum((Counter(row.store_requests) for row in workers), Counter())),
            groups=groups,
            workers=workers,
            devices=with_speed(examine(verdict, copies).devices, workers),
        )

    def _worker_rows(self, copies: Copies) -> list[WorkerStatus]:
        by_worker: dict[str, list[int]] = defaultdict(list)
        for index, source in enumerate(copies.sources):
            by_worker[source.worker].append(index)
        table = copies.table[copies.table["kind"] != SENTINEL]
        rows = [
            self._worker_row(table[np.isin(table["source"], indices)], [copies.sources[index] for index in indices])
            for _, indices in sorted(by_worker.items())
        ]
        return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.worker))

    def _worker_row(self, table: NDArray[np.void], sources: list[Source]) -> WorkerStatus:
        newest = max(sources, key=lambda source: source.seq)
        last = max(self._modified.get(source.key) or source.created for source in sources)
        finite = table[table["finite"]]
        tokens, seconds, nll = int(table["tokens"].sum()), float(table["seconds"].sum()), float(finite["nll"].sum())
        patience = max(IDLE_SECONDS, _IDLE_CHUNKS * seconds / max(len(table), 1))
        return WorkerStatus(
            worker=newest.worker,
            device=newest.device,
            device_name=newest.environment.device_name,
            rank=newest.rank,
            last_activity=last,
            active=self._clock() - last <= patience,
            chunks=len(table),
            tokens=tokens,
            nll=nll,
            perplexity=perplexity(nll, int(finite["tokens"].sum())),
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds > 0 else None,
            last_seq=newest.seq,
            store_requests=newest.store_requests,
        )


def _planned(url: str, plan: Plan) -> Status:
    return Status(
        out=url,
        state="planned",
        plan=plan_facts(plan),
        chunks=len(plan.chunks),
        missing=len(plan.chunks),
        tokens=sum(plan.chunks.tokens),
        groups=_group_rows(plan, np.zeros(len(plan.chunks), np.bool_)),
    )


def _group_rows(plan: Plan, done: NDArray[np.bool_]) -> dict[str, GroupStatus]:
    group, tokens = np.array(plan.chunks.group), np.array(plan.chunks.tokens, np.int64)
    num_groups = len(plan.groups)
    columns = zip(
        plan.groups,
        np.bincount(group, minlength=num_groups).tolist(),
        np.bincount(group[done], minlength=num_groups).tolist(),
        np.bincount(group, tokens, num_groups).tolist(),
        np.bincount(group[done], tokens[done], num_groups).tolist(),
        strict=True,
    )
    return {
        spec.name: GroupStatus(chunks=chunks, done=ended, tokens=int(scored), done_tokens=int(ended_tokens))
        for spec, chunks, ended, scored, ended_tokens in columns
    }
