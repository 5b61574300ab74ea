"""Local ranks through torch's elastic launcher, without its traps.

A function is the entry point (command entry points outlive a killed launcher), nothing is restarted (a usage error
would be tried three times), and ranks return their exit code instead of raising (one rank's failure would end its
peers). A rank that returned would wait for the launcher's answer, even one that is gone or is itself waiting for its
ranks to end; so ranks that were asked to stop end at once, and the others watch the launcher.
"""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from everplex.preempt import SIGNALS, Stop
from everplex.settings import Settings, make_settings
from everplex.stages.threads import default_threads
from everplex.storage.errors import EverplexError, IncompleteError, last_words

_ORPHAN_POLL_SECONDS = 0.2
_UNEXPECTED = 1
_WORST_FIRST = (4, 2, _UNEXPECTED, 75, 0)


def worst_exit_code(codes: list[int]) -> int:
    """Return the exit code that speaks for all ranks; one that is unknown counts as an unexpected failure."""
    return min(
        (code if code in _WORST_FIRST else _UNEXPECTED for code in codes), key=_WORST_FIRST.index, default=_UNEXPECTED
    )


def launch_ranks(settings: Settings) -> int:
    """Evaluate a planned run with `settings.nproc` local ranks; returns the worst of their exit codes.

    Raises IncompleteError after a signal, which the ranks have got as well.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = settings.threads or default_threads(settings.nproc)
    for name in list(logging.root.manager.loggerDict):  # each module there has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
        shutdown_timeout=int(settings.grace_seconds) + 5,
    )
    per_rank = msgspec.structs.asdict(settings) | {"data": None, "nproc": 1, "threads": threads}
    try:
        with _handlers_kept():
            codes = elastic_launch(config, rank_main)(per_rank, os.getpid())
    except SignalException as stopped:
        name = signal.Signals(stopped.sigval).name
        raise IncompleteError(f"stopped (received {name}); run the same command again to continue") from None
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0:
                by = signal.Signals(-failure.exitcode).name
                sys.stderr.write(f"everplex: rank {rank} was ended by {by}; run the same command again to continue\n")
        ends = (failure.exitcode for failure in error.failures.values())
        return worst_exit_code([IncompleteError.exit_code if end < 0 else end for end in ends])
    return worst_exit_code(list(codes.values()))


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Give signals back to whom they belonged: the launcher takes them from a main thread and keeps them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def rank_main(options: dict[str, Any], launcher: int) -> int:
    """Be one local rank, in a fresh process; returns the exit code."""
    from everplex.api import evaluate_settings

    settings = make_settings(options)
    stop = Stop(settings.grace_seconds)
    code = 0
    try:
        evaluate_settings(settings, launcher=launcher, stop=stop)
    except EverplexError as error:
        sys.stderr.write(f"everplex: rank {os.environ['RANK']}: {last_words(error)}\n")
        code = error.exit_code
    if stop:
        _end(code)
    threading.Thread(target=_end_after, args=(launcher, code), name="everplex-orphan", daemon=True).start()
    return code


def _end_after(launcher: int, code: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_ORPHAN_POLL_SECONDS)
    _end(code)


def _end(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)
