"""Local ranks through torch's elastic launcher, without its traps.

A function is the entry point (command entry points outlive a killed launcher), nothing is restarted (a usage error
would be tried three times), and ranks return their exit code instead of raising (one rank's failure would end its
peers). Ranks watch the launcher and stop when it is gone.
"""

import logging
import os
import sys
import uuid
from typing import Any

import msgspec

from everplex.settings import Settings, make_settings
from everplex.stages.threads import default_threads
from everplex.storage.errors import EverplexError, IncompleteError, last_words

_UNEXPECTED = 1
_WORST_FIRST = (4, 2, _UNEXPECTED, 75, 0)


def worst_exit_code(codes: list[int]) -> int:
    """Return the exit code that speaks for all ranks; one that is unknown counts as an unexpected failure."""
    return min(
        (code if code in _WORST_FIRST else _UNEXPECTED for code in codes), key=_WORST_FIRST.index, default=_UNEXPECTED
    )


def launch_ranks(settings: Settings) -> int:
    """Evaluate a planned run with `settings.nproc` local ranks; returns the worst of their exit codes."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = settings.threads or default_threads(settings.nproc)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
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
        codes = elastic_launch(config, rank_main)(per_rank, os.getpid())
    except SignalException:
        return IncompleteError.exit_code
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            sys.stderr.write(f"everplex: rank {rank} ended by {how}; run the same command again to continue\n")
        return worst_exit_code([75 if failure.exitcode < 0 else _UNEXPECTED for failure in error.failures.values()])
    return worst_exit_code(list(codes.values()))


def rank_main(options: dict[str, Any], launcher: int) -> int:
    """Be one local rank, in a fresh process; returns the exit code."""
    from everplex.api import evaluate_settings

    try:
        evaluate_settings(make_settings(options), launcher=launcher)
    except EverplexError as error:
        sys.stderr.write(f"everplex: rank {os.environ['RANK']}: {last_words(error)}\n")
        return error.exit_code
    return 0
