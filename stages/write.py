"""The write stage: one thread that does what a `Writer` says, beside the evaluator."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

from everplex.stages.records import Header, Record
from everplex.stages.writer import Outcome, Receipt, Spool, Step, Writer, perform
from everplex.storage.errors import StoreError
from everplex.storage.store import Store

__all__ = ["Outcome", "Receipt", "Spool", "Writer", "WriterThread"]

POLL_SECONDS = 0.1
"""How often a waiting submit looks whether the process is to stop."""
WATCH_SECONDS = 1.0
"""How often an idle thread looks whether the process has ended without closing it."""
EXCEPTION_CLOSE_SECONDS = 10.0


class WriterThread:
    """The pump: one non-daemon thread with its own store, that does what a `Writer` says.

    `open_store` and `header` are called in the thread; `header` may block until the model's digest has been compared
    with the run's identity, and nothing is written before. `on_durable` is called in the thread after each
    acknowledgement, `on_aside` when records went to the spool or were lost. While `stopping()` is true, a full queue
    takes what is submitted, so that a preempted evaluator can go on to `close`. A thread whose main thread has died
    closes itself.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        open_store: Callable[[], Store],
        header: Callable[[], Header],
        spool: Spool | None = None,
        on_durable: Callable[[Sequence[Receipt]], None] = lambda _: None,
        on_aside: Callable[[Sequence[Receipt]], None] = lambda _: None,
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._open_store = open_store
        self._header = header
        self._spool = spool
        self._on_durable = on_durable
        self._on_aside = on_aside
        self._stopping = stopping
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="everplex-writer", daemon=False)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._closed:  # with a deadline: a thread that still hangs is not waited for again
            return
        if exception[1] is None:
            self.close()
            return
        with suppress(Exception):  # the exception that ends the block is the one to report
            self.close(EXCEPTION_CLOSE_SECONDS)

    def submit(self, record: Record) -> None:
        """Hand over a record; waits while the queue is full. Raises the writer's failure, now or at a later call."""
        with self._changed:
            while self._writer.full and self._writer.failure is None and not self._stopping():
                if not self._thread.is_alive():
                    raise RuntimeError("the writer thread has ended")
                self._changed.wait(POLL_SECONDS)
            self._writer.submit(record, force=True)
            self._changed.notify_all()

    def close(self, deadline_seconds: float = 60.0) -> Outcome:
        """Store what is queued within the deadline, spool the rest; says what became of everything.

        Raises the writer's failure, after that (`outcome` tells then).
        """
        with self._changed:
            self._closed = True
            self._writer.close()
            self._changed.notify_all()
        reserve = min(1.0, deadline_seconds / 4)  # for spooling what is left
        self._thread.join(max(0.0, deadline_seconds - reserve))
        if self._thread.is_alive():
            self._rescue()
            self._thread.join(reserve / 2)
        if self._writer.failure is not None:
            raise self._writer.failure
        return self.outcome()

    def outcome(self) -> Outcome:
        """Return where everything is now."""
        with self._changed:
            return self._writer.outcome(stuck=self._thread.is_alive())

    def _rescue(self) -> None:
        with self._changed:
            for step in self._writer.abandon():
                if not self._spooled(step):
                    self._writer.lose(step.key)
            self._changed.notify_all()

    def _spooled(self, step: Step) -> bool:
        if self._spool is None:
            return False
        try:
            self._spool.create(step.key, step.data)
        except (OSError, StoreError):  # the outcome says what is lost
            return False
        return True

    def _run(self) -> None:
        try:
            self._pump(self._open_store())
        except BaseException as error:  # noqa: BLE001 - it is raised in the evaluator's thread
            self._tell(partial(self._writer.fail, error))

    def _pump(self, store: Store) -> None:
        while (step := self._await_step()) is not None:
            try:
                header = perform(step, store, self._spool, self._header)
            except Exception as error:  # noqa: BLE001 - the writer decides what it means
                self._tell(partial(self._writer.failed, error, self._clock()))
            else:
                self._tell(partial(self._writer.succeeded, header))

    def _tell(self, event: Callable[[], None]) -> None:
        """Tell the writer of an event, and everyone of what it settled."""
        with self._changed:
            event()
            change = self._writer.changes()
            self._changed.notify_all()
        if change.durable:
            self._on_durable(change.durable)
        if change.aside:
            self._on_aside(change.aside)

    def _await_step(self) -> Step | None:
        with self._changed:
            while (step := self._writer.next(self._clock())) is None and not self._writer.finished:
                idle = self._writer.idle_seconds(self._clock())
                self._changed.wait(WATCH_SECONDS if idle is None else min(WATCH_SECONDS, idle + 0.01))
                if not threading.main_thread().is_alive():
                    self._writer.close()
            return step
