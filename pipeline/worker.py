"""The worker: pumps schedule, loader, evaluator and writer until every chunk is recorded or it is asked to stop.

Three threads share one lock around the schedule: the loading thread decides what is next and fetches it, the main
thread evaluates, the writer's thread acknowledges. All decisions are made by state machines (`everplex.schedule`,
`everplex.stages.writer`); the threads only carry events.
"""

import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from everplex.opening import Identity, OpenRun
from everplex.progress import EvaluationProgress
from everplex.schedule import Busy, Done, Refresh, Schedule, Take, Wait
from everplex.stages.chunk import Chunk
from everplex.stages.ledger import Ledger
from everplex.stages.records import Header, Run
from everplex.stages.spool import LocalSpool, upload_spool
from everplex.stages.stored import load_chunk
from everplex.stages.write import Outcome, Receipt, Writer, WriterThread
from everplex.storage.errors import IncompleteError, StoreError, UsageError

if TYPE_CHECKING:
    from everplex.stages.evaluate import Evaluator
    from everplex.stages.model import LoadedModel

LOOKAHEAD = 2
"""Chunks that are held ahead of their evaluation."""
_LEAVE_SECONDS = 60.0
"""How long a worker that is done waits for its last acknowledgements."""


class Worker:
    """One process incarnation that evaluates chunks of a run."""

    def __init__(self, run: OpenRun, identity: Identity, ledger: Ledger) -> None:
        self.id = uuid.uuid4().hex
        self.evaluated = 0
        self._run = run
        self._identity = identity
        self._ledger = ledger
        self._contents = dict(zip(run.plan.chunk_ids(), run.plan.chunks.content, strict=True))
        selected = run.selected
        tokens = zip(self._contents, run.plan.chunks.tokens, strict=True)
        self._progress = EvaluationProgress(
            run.progress, {chunk: number for chunk, number in tokens if selected is None or chunk in selected}
        )
        self._changed = threading.Condition()
        self._complete = False

    def work(self) -> Outcome:
        """Evaluate until there is nothing left for this worker; returns where its records are.

        Raises IncompleteError after a stop, and the writer's failure.
        """
        run = self._run
        loaded, evaluator = self._load()
        self._schedule = Schedule(
            run.plan.digest(),
            run.plan.chunk_ids(),
            worker=self.id,
            device=loaded.device_id,
            rank=run.rank.rank,
            world_size=run.rank.world_size,
            only=run.selected,
            refresh_seconds=run.settings.refresh_seconds,
            lookahead=LOOKAHEAD,
        )
        spool = LocalSpool(self._identity.early().id())
        writer = WriterThread(
            Writer(),
            open_store=lambda: run.store,
            header=lambda: self._header(self._identity.result(), loaded),
            spool=spool,
            on_durable=self._tell(lambda receipts: self._schedule.durable(receipts, time.monotonic())),
            on_aside=self._tell(self._schedule.aside),
            stopping=lambda: bool(run.stop),
        )
        run.stop.on_last_resort(writer.close)
        with writer:
            with closing(self._evaluations(evaluator, writer)) as evaluations:
                for _ in evaluations:
                    pass
            outcome = writer.close(run.stop.seconds_left() if run.stop else _LEAVE_SECONDS)
        return self._leave(outcome)

    def _load(self) -> "tuple[LoadedModel, Evaluator]":
        import torch

        from everplex.stages.evaluate import Evaluator
        from everplex.stages.model import ModelOptions, load_model
        from everplex.stages.threads import default_threads

        settings = self._run.settings
        torch.set_num_threads(settings.threads or default_threads(self._run.rank.local_world_size))
        loaded = load_model(
            ModelOptions(
                model=str(self._identity.folder),
                dtype=settings.dtype,
                device=settings.device,
                attention=settings.attention,
                compile=settings.compile,
                trust_remote_code=settings.trust_remote_code,
            )
        )
        check_fit(self._run, loaded)
        evaluator = Evaluator(loaded, batch_tokens=batch_tokens(settings.batch_tokens), profile=settings.profile)
        for note in evaluator.notes:
            self._run.progress.say(note)
        return loaded, evaluator

    def _header(self, run: Run, loaded: "LoadedModel") -> Header:
        return Header(
            run=run.id(),
            plan=run.plan,
            worker=self.id,
            seq=0,
            first=0,
            rank=self._run.rank.rank,
            world_size=self._run.rank.world_size,
            device=loaded.device_id,
            environment=loaded.environment,
            store_requests=dict(self._run.store.requests),
            created=time.time(),
        )

    def _tell(self, event: Callable[[Sequence[Receipt]], None]) -> Callable[[Sequence[Receipt]], None]:
        def told(receipts: Sequence[Receipt]) -> None:
            with self._changed:
                event(receipts)
                self._changed.notify_all()

        return told

    def _evaluations(self, evaluator: "Evaluator", writer: WriterThread) -> Generator[None]:
        """Evaluate what the loading thread brings; yields after each chunk."""
        from everplex.stages.loader import prefetch
        from everplex.stages.tally import make_record

        run = self._run
        with closing(prefetch(self._takes(), self._fetch, depth=LOOKAHEAD)) as held:
            for take, chunk in held:
                if run.stop:
                    return
                if isinstance(chunk, Exception):
                    raise chunk
                with self._changed:
                    wanted = self._schedule.wanted(take)
                    if not wanted:
                        self._schedule.released(take)
                        self._changed.notify_all()
                if not wanted:
                    continue
                losses = evaluator.evaluate(chunk)
                record = make_record(
                    take.chunk, self._contents[take.chunk], chunk, losses, kind=take.kind, rank=run.rank.rank
                )
                writer.submit(record)
                with self._changed:
                    self._schedule.ended(take, losses.seconds)
                    self._changed.notify_all()
                self.evaluated += 1
                self._progress.evaluated(take.chunk, record.nll)
                yield

    def _fetch(self, take: Take) -> Chunk:
        return load_chunk(self._run.plan_store, take.chunk, self._contents[take.chunk])

    def _takes(self) -> Iterator[Take]:
        """Ask the schedule, in the loading thread, and do what it says until there is nothing left."""
        while not self._run.stop:
            with self._changed:
                match self._schedule.take(time.monotonic()):
                    case Take() as take:
                        action: Any = take
                    case Busy():
                        self._changed.wait(0.5)
                        continue
                    case Wait(seconds):
                        self._changed.wait(min(seconds, 0.5))
                        continue
                    case other:
                        action = other
            match action:
                case Take():
                    yield action
                case Refresh():
                    self._refresh()
                case Done(complete):
                    self._complete = complete
                    return

    def _refresh(self) -> None:
        try:
            self._ledger.refresh()
        except StoreError as error:
            self._run.progress.say(f"{error}; going on with what is known")
            with self._changed:
                self._schedule.refresh_failed(time.monotonic())
            return
        recorded = self._ledger.recorded
        self._progress.recorded(recorded)
        with self._changed:
            self._schedule.refreshed(recorded, time.monotonic())
            self._changed.notify_all()

    def _leave(self, outcome: Outcome) -> Outcome:
        if outcome.spooled:
            self._run.progress.say(
                f"{len(outcome.spooled)} evaluated chunks wait in the spool of this machine; the next run here or "
                f"`everplex upload-spool {self._run.settings.out}` uploads them"
            )
        if outcome.lost:
            self._run.progress.say(f"{len(outcome.lost)} evaluated chunks could not be saved and stay missing")
        if self._run.stop:
            raise IncompleteError(
                f"stopped ({self._run.stop.reason}) with {outcome.stored} of {self.evaluated} evaluated chunks stored; "
                "run the same command again to continue"
            )
        return outcome


def work_on(run: OpenRun) -> tuple[Run, Ledger]:
    """Evaluate all that is missing and selected; returns the identity of the run and its ledger, refreshed.

    A run in which nothing is missing needs no model, only its digest.
    """
    identity = Identity(run)
    early = identity.early()
    ledger = Ledger(run.store, run.plan, early.id())
    send_spool(run, early)
    ledger.refresh()
    wanted = run.selected if run.selected is not None else run.plan.chunk_ids()
    if not ledger.recorded.issuperset(wanted):
        Worker(run, identity, ledger).work()
        ledger.refresh()
    return identity.result(), ledger


def send_spool(run: OpenRun, identity: Run) -> None:
    """Upload what an earlier process left on this machine; says what it did."""
    sent = upload_spool(run.store, identity.id(), run.plan.digest(), stop=lambda: bool(run.stop))
    if sent.keys:
        run.progress.say(f"uploaded {len(sent.keys)} segments that an earlier process had left on this machine")
    for sentence in sent.refused:
        run.progress.say(sentence)


def batch_tokens(option: str) -> Any:
    """Read `--batch-tokens`. Raises UsageError for anything but a number or `auto`."""
    if option == "auto":
        return option
    if not option.isdecimal() or int(option) < 1:
        raise UsageError(f"--batch-tokens: expected a number of tokens or auto, found {option!r}")
    return int(option)


def check_fit(run: OpenRun, loaded: "LoadedModel") -> None:
    """Raise UsageError where the model cannot evaluate the plan."""
    plan = run.plan
    if plan.tokenizer.vocab_size > loaded.vocab_size:
        raise UsageError(
            f"the tokenizer {plan.tokenizer.name} has {plan.tokenizer.vocab_size} tokens and the model "
            f"{run.settings.model} knows {loaded.vocab_size}; give the tokenizer that belongs to the model"
        )
    if loaded.max_context is not None and plan.protocol.context > loaded.max_context:
        raise UsageError(
            f"--context {plan.protocol.context} is more than the {loaded.max_context} tokens that "
            f"{run.settings.model} allows; give a smaller --context and another --out"
        )
