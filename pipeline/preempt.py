"""Stopping politely: signals and time limits become one event, and a watchdog keeps the grace budget.

A Python signal handler does not run during a long call into C, and may interrupt a lock's owner. So the handler does
nothing; the interpreter's C-level handler writes to a wake-up socket at once, and a thread that reads it sets the
event. The same thread ends the process when the grace budget is spent, whatever the main thread is stuck in.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from everplex.storage.errors import IncompleteError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EXIT_INCOMPLETE = IncompleteError.exit_code
_MARGIN_SECONDS = 1.0


class Stop:
    """Whether to stop, why, and until when; shared by the worker's threads."""

    def __init__(self, grace_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.event = threading.Event()
        self.reason = ""
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._deadline = float("inf")
        self._lock = threading.Lock()
        self._last_resort: Callable[[float], object] = lambda _seconds: None

    def __bool__(self) -> bool:
        return self.event.is_set()

    def set(self, reason: str) -> None:
        """Ask to stop; the first reason and its deadline count."""
        with self._lock:
            if not self.event.is_set():
                self.reason = reason
                self._deadline = self._clock() + self._grace_seconds
                self.event.set()

    def seconds_left(self) -> float:
        """Seconds of the grace budget for saving, with two margins left to leave in; without a stop, infinite."""
        return max(0.0, self._deadline - 2 * _MARGIN_SECONDS - self._clock())

    def is_overdue(self) -> bool:
        """Whether the main thread should have left by now."""
        return self._clock() > self._deadline - _MARGIN_SECONDS

    def on_last_resort(self, save: Callable[[float], object]) -> None:
        """Set what a watchdog calls, with the seconds it has, when the main thread did not come back in time."""
        self._last_resort = save

    def last_resort(self) -> None:
        """Save what is finished and end the process."""
        save = self._last_resort
        try:
            save(_MARGIN_SECONDS / 2)
        finally:
            sys.stderr.write(f"everplex: stopped ({self.reason}); run the same command again to continue\n")
            sys.stderr.flush()
            os._exit(EXIT_INCOMPLETE)


@contextlib.contextmanager
def watch(
    stop: Stop, *, max_seconds: float | None = None, launcher: int | None = None, own_process: bool = True
) -> Iterator[None]:
    """Turn signals, `max_seconds` and the death of the process `launcher` into `stop` while the block runs.

    From the stop on, the block has the grace budget; then the process ends with exit code 75. Where the process is not
    `own_process`, as in a notebook, signals are left alone and the process is never ended.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(reader.close)
        watchdog = threading.Thread(
            target=_watchdog,
            args=(stop, reader, left),
            kwargs={"max_seconds": max_seconds, "launcher": launcher, "own_process": own_process},
            name="everplex-watchdog",
            daemon=True,
        )
        stack.callback(watchdog.join)
        stack.callback(writer.close)
        if own_process:
            for number in SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        stack.callback(left.set)
        watchdog.start()
        yield


def _watchdog(
    stop: Stop,
    reader: socket.socket,
    left: threading.Event,
    *,
    max_seconds: float | None,
    launcher: int | None,
    own_process: bool,
) -> None:
    started = time.monotonic()
    reader.settimeout(0.2)
    while not left.is_set():
        received = _receive(reader)
        for number in received or b"":
            if number in SIGNALS:
                stop.set(f"received {signal.Signals(number).name}")
        if max_seconds is not None and time.monotonic() - started >= max_seconds:
            stop.set(f"--max-seconds {max_seconds:g} reached")
        if launcher is not None and os.getppid() != launcher:
            stop.set("the launcher is gone")
        if own_process and stop.is_overdue() and not left.is_set():
            stop.last_resort()
        if received == b"":
            return


def _receive(reader: socket.socket) -> bytes | None:
    try:
        return reader.recv(64)
    except TimeoutError:
        return None
