"""Many seeds on all cores."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from simulation.world import simulate

BATCH = 100


class Batch(NamedTuple):
    """What some seeds gave."""

    faults: set[str]
    """Drawn by any of them."""
    failures: list[str]
    """A paragraph for each promise that was broken; it names the seed."""


def search(first: int, last: int, *, ledger_every: int, processes: int | None = None) -> Iterator[Batch]:
    """Run the seeds from `first` to before `last`, one in `ledger_every` by the real reader too; a batch at a time."""
    run = partial(run_batch, last, ledger_every)
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, range(first, last, BATCH))


def run_batch(last: int, ledger_every: int, start: int) -> Batch:
    """Run the seeds of one batch."""
    batch = Batch(set(), [])
    for seed in range(start, min(start + BATCH, last)):
        try:
            batch.faults.update(simulate(seed, with_ledger=seed % ledger_every == 0).faults)
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            batch.failures.append("\n".join([f"{type(error).__name__}: {error}", *error.__notes__]))
    return batch
