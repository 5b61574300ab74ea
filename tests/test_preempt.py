"""Stopping politely, against real signals in real processes."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

_CHILD = """
import hashlib, sys
from everplex.preempt import Stop, watch
stop = Stop(grace_seconds={grace})
stop.on_last_resort(lambda seconds: print("saved", flush=True))
with watch(stop, max_seconds={max_seconds}, launcher={launcher}):
    print("ready", flush=True)
    if {stuck}:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # one long call that runs no Python signal handler
    stop.event.wait(60)
    print(stop.reason, flush=True)
sys.exit(75)
"""


@contextlib.contextmanager
def _started(
    *, grace: float = 5, max_seconds: float | None = None, launcher: int | None = None, stuck: bool = False
) -> Iterator[subprocess.Popen[str]]:
    code = _CHILD.format(grace=grace, max_seconds=max_seconds, launcher=launcher, stuck=stuck)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_becomes_a_stop_with_its_name(number: signal.Signals) -> None:
    """SIGTERM, SIGINT and SIGUSR1 stop politely, and a second one changes nothing."""
    with _started() as child:
        child.send_signal(number)
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    assert (out, err, child.returncode) == (f"received {number.name}\n", "", 75)


def test_a_main_thread_stuck_in_one_call_is_ended_within_the_grace_budget() -> None:
    """The watchdog saves what is finished and leaves with 75, though no Python handler can run."""
    with _started(grace=2, stuck=True) as child:
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=30)
    assert (out, child.returncode) == ("saved\n", 75)
    assert "received SIGTERM" in err
    assert "run the same command again" in err


def test_a_time_limit_is_a_stop() -> None:
    """`--max-seconds` stops like a signal does."""
    with _started(max_seconds=0.1) as child:
        out, _ = child.communicate(timeout=30)
    assert out == "--max-seconds 0.1 reached\n"


def test_a_rank_stops_when_its_launcher_is_gone() -> None:
    """A process whose parent is another than its launcher was orphaned."""
    with _started(launcher=os.getpid() + 1) as child:
        out, _ = child.communicate(timeout=30)
    assert out == "the launcher is gone\n"
