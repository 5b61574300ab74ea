"""The worker: pumps schedule, loader, evaluator and writer until every chunk is recorded or it is asked to stop.

Three threads share one lock around the schedule: the loading thread decides what is next and fetches it, the main
thread evaluates, the writer's thread acknowledges. All decisions are made by state machines (`everplex.schedule`,
`everplex.stages.writer`); the threads only carry events.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from everplex.opening import Identity, OpenRun
from everplex.progress import EvaluationProgress
from everplex.schedule import Busy, Done, Extra, Refresh, Schedule, Take, Wait
from everplex.stages.audit import requests, sentinel_chunks
from everplex.stages.chunk import Chunk
from everplex.stages.judge import Policy, judge
from everplex.stages.ledger import Ledger
from everplex.stages.records import Header, Record, Run
from everplex.stages.spool import LocalSpool
from everplex.stages.stopwatch import Stopwatch
from everplex.stages.stored import load_chunk
from everplex.stages.tally import make_record
from everplex.stages.write import Outcome, Receipt, Writer, WriterThread
from everplex.storage.errors import CorruptObjectError, IncompleteError, IntegrityError, StoreError

if TYPE_CHECKING:
    from everplex.stages.evaluate import Evaluator, Prepared
    from everplex.stages.model import LoadedModel

T = TypeVar("T")

LOOKAHEAD = 2
"""Chunks that are held ahead of their evaluation."""
SENTINELS_EVERY = 200
"""Chunks between two evaluations of the sentinels."""
SENTINEL_SHARE = 50
"""A rank evaluates one sentinel per so many chunks of its own at most, and never more than two."""
_LOOK_SECONDS = 0.5
"""How often a waiting loading thread looks whether to end."""
_LEAVE_SECONDS = 60.0
"""How long a worker that is done waits for its last acknowledgements."""


class Worker:
    """One process incarnation that evaluates chunks of a run."""

    def __init__(
        self,
        run: OpenRun,
        identity: Identity,
        ledger: Ledger,
        loaded: "LoadedModel",
        evaluator: "Evaluator",
        *,
        listed: tuple[float, float],
    ) -> None:
        """Make a worker that knows what the `ledger` read in its last refresh, which began and ended at `listed`."""
        self.id = uuid.uuid4().hex
        self.evaluated = 0
        self._submitted = 0
        self._run = run
        self._identity = identity
        self._ledger = ledger
        self._loaded = loaded
        self._evaluator = evaluator
        self._contents = dict(zip(run.plan.chunk_ids(), run.plan.chunks.content, strict=True))
        selected = run.selected
        tokens = zip(self._contents, run.plan.chunks.tokens, strict=True)
        self._progress = EvaluationProgress(
            run.progress, {chunk: number for chunk, number in tokens if selected is None or chunk in selected}
        )
        self._policy = Policy(audit_fraction=run.settings.audit)
        self._watch = Stopwatch(running=run.settings.profile)
        self._changed = threading.Condition()
        self._ended = False
        self._damaged: CorruptObjectError | None = None
        self._device = loaded.device_id
        self._other_devices: set[str] = set()
        self._schedule = Schedule(
            run.plan.digest(),
            list(self._contents),
            worker=self.id,
            device=self._device,
            rank=run.rank.rank,
            world_size=run.rank.world_size,
            only=selected,
            refresh_seconds=run.settings.refresh_seconds,
            lookahead=LOOKAHEAD,
        )
        began, ended = listed
        self._schedule.request_refresh(began)
        self._learn(ended)

    def work(self) -> Outcome:
        """Evaluate until there is nothing left for this worker; returns where its records are.

        Raises IncompleteError after a stop, CorruptObjectError for a damaged input, and the writer's failure.
        """
        run = self._run
        for note in self._evaluator.notes:
            run.progress.say(note)
        spool = LocalSpool(self._identity.early().id())
        writer = WriterThread(
            Writer(),
            open_store=lambda: run.store,
            header=lambda: self._header(self._identity.result()),
            spool=spool,
            on_durable=self._tell(self._note_durable),
            on_aside=self._tell(self._schedule.aside),
            stopping=lambda: bool(run.stop),
        )
        run.stop.on_last_resort(writer.close)
        try:
            with writer:
                try:
                    self._evaluate_all(writer)
                finally:
                    self._ended = True  # for the loading thread
                writer.close(run.stop.seconds_left() if run.stop else _LEAVE_SECONDS)
        finally:
            self._say_what_is_not_stored(writer.outcome())
        return self._leave(writer.outcome())

    def _header(self, run: Run) -> Header:
        return Header(
            run=run.id(),
            plan=run.plan,
            worker=self.id,
            seq=0,
            first=0,
            rank=self._run.rank.rank,
            world_size=self._run.rank.world_size,
            device=self._device,
            environment=self._loaded.environment,
            store_requests=dict(self._run.store.requests),
            profile=self._watch.seconds | self._evaluator.seconds if self._run.settings.profile else {},
            created=time.time(),
        )

    def _tell(self, event: Callable[[Sequence[Receipt]], None]) -> Callable[[Sequence[Receipt]], None]:
        def told(receipts: Sequence[Receipt]) -> None:
            with self._changed:
                event([receipt for receipt in receipts if receipt.kind != "sentinel"])
                self._changed.notify_all()

        return told

    def _note_durable(self, receipts: Sequence[Receipt]) -> None:
        self._schedule.durable(receipts, time.monotonic())

    def _evaluate_all(self, writer: WriterThread) -> None:
        """Evaluate what the loading thread brings."""
        from everplex.stages.loader import prefetch

        def fetch(take: Take) -> "tuple[Chunk, Prepared | None]":
            chunk = self._fetch(take)
            return chunk, self._evaluator.prepare(chunk)

        with closing(prefetch(self._takes(), fetch, depth=LOOKAHEAD)) as held:
            while (item := self._next(held)) is not None:
                take, found = item
                if self._run.stop:
                    return
                if not self._is_wanted(take):
                    continue
                if isinstance(found, CorruptObjectError):
                    self._set_aside(take, found)
                    continue
                if isinstance(found, Exception):
                    raise found
                try:
                    if self.evaluated % SENTINELS_EVERY == 0:
                        self._evaluate_sentinels(writer)
                    record = self._evaluate(take, *found)
                except IncompleteError:  # asked to stop: the batch in flight is dropped
                    return
                with self._watch("write"):
                    self._submit(writer, record)
                with self._changed:
                    self._schedule.ended(take, record.seconds)
                    self._changed.notify_all()
                self.evaluated += 1
                self._progress.evaluated(take.chunk, record.nll)

    def _next(self, held: Iterator[T]) -> T | None:
        with self._watch("idle"):
            return next(held, None)

    def _is_wanted(self, take: Take) -> bool:
        """Whether nobody has recorded a chunk since it was taken; gives it back if somebody has."""
        with self._changed:
            wanted = self._schedule.wanted(take)
            if not wanted:
                self._schedule.released(take)
                self._changed.notify_all()
            return wanted

    def _set_aside(self, take: Take, error: CorruptObjectError) -> None:
        """Go on without a chunk whose input is damaged; the error is raised when all others are done."""
        self._damaged = self._damaged or error
        self._run.progress.say(f"{error}; going on with the other chunks")
        with self._changed:
            self._schedule.released(take)
            self._schedule.aside([Receipt(take.chunk, take.kind)])
            self._changed.notify_all()

    def _evaluate(self, take: Take, chunk: Chunk, prepared: "Prepared | None" = None) -> Record:
        losses = self._evaluator.evaluate(chunk, prepared=prepared, stop=lambda: bool(self._run.stop))
        content, rank = self._contents[take.chunk], self._run.rank.rank
        with self._watch("tally"):
            return make_record(take.chunk, content, chunk, losses, kind=take.kind, rank=rank)

    def _evaluate_sentinels(self, writer: WriterThread) -> None:
        """Evaluate the same few chunks as every other worker, where there are others to compare with."""
        rank = self._run.rank
        if not self._other_devices and (rank.world_size or 1) <= rank.local_world_size:
            return
        count = min(2, len(self._contents) // (SENTINEL_SHARE * (rank.world_size or 1)))
        for chunk in sentinel_chunks(self._run.plan, count):
            if chunk in self._progress.tokens:
                take = Take(chunk, "sentinel", "extra")
                self._submit(writer, self._evaluate(take, self._fetch(take)))

    def _submit(self, writer: WriterThread, record: Record) -> None:
        writer.submit(record)
        self._submitted += 1

    def _fetch(self, take: Take) -> Chunk:
        return load_chunk(self._run.plan_store, take.chunk, self._contents[take.chunk], self._watch)

    def _takes(self) -> Iterator[Take]:
        """Ask the schedule, in the loading thread, and do what it says until there is nothing left."""
        while not (self._run.stop or self._ended):
            with self._changed:
                action = self._schedule.take(time.monotonic())
                if isinstance(action, Busy | Wait):
                    self._changed.wait(
                        min(action.seconds, _LOOK_SECONDS) if isinstance(action, Wait) else _LOOK_SECONDS
                    )
            match action:
                case Take():
                    yield action
                case Refresh():
                    self._refresh()
                case Done():
                    return

    def _refresh(self) -> None:
        try:
            self._ledger.refresh()
        except StoreError as error:
            self._run.progress.say(f"{error}; going on with what is known")
            with self._changed:
                self._schedule.refresh_failed(time.monotonic())
            return
        self._learn(time.monotonic())

    def _learn(self, now: float) -> None:
        """Take over what the ledger knows. Raises IntegrityError where it convicts the device at hand."""
        recorded, copies = self._ledger.recorded, self._ledger.copies
        duplicated, chunk_seconds = self._ledger.duplicated, self._ledger.chunk_seconds
        verdict = judge(len(self._contents), copies, self._policy)
        if self._device in verdict.convicted:
            raise IntegrityError(
                f"the device {self._device} computes wrong: other devices outvoted it in "
                f"{len(verdict.mismatches[self._device])} chunks; its results are evaluated again elsewhere, so take "
                "it out of service"
            )
        ids = list(self._contents)
        unaccepted = {ids[row] for row in (*verdict.nonfinite, *verdict.nonfinite_once)}
        wanted = requests(self._run.plan, copies, verdict, self._policy).wanted
        self._progress.recorded(recorded)
        self._other_devices = {source.device for source in copies.sources} - {self._device}
        with self._changed:
            extras = [Extra(*request) for request in wanted if request.chunk in self._progress.tokens]
            self._schedule.refreshed(
                recorded,
                now,
                duplicated=duplicated,
                unaccepted=unaccepted,
                extras=extras,
                chunk_seconds=chunk_seconds,
            )
            self._changed.notify_all()

    def _say_what_is_not_stored(self, outcome: Outcome) -> None:
        if outcome.spooled:
            self._run.progress.say(
                f"{len(outcome.spooled)} evaluated chunks wait in the spool of this machine; the next run here or "
                f"`everplex upload-spool {self._run.settings.out}` uploads them"
            )
        if outcome.lost:
            self._run.progress.say(f"{len(outcome.lost)} evaluated chunks could not be saved and stay missing")

    def _leave(self, outcome: Outcome) -> Outcome:
        if self._run.stop:
            raise IncompleteError(
                f"stopped ({self._run.stop.reason}) with {outcome.stored} of {self._submitted} records stored; "
                "run the same command again to continue"
            )
        if self._damaged is not None:
            raise self._damaged
        return outcome
