"""The ranks of one launcher meet for the collective merge."""

import os
from datetime import timedelta

from everplex.conclude import Merge
from everplex.opening import OpenRun
from everplex.rank import Rank
from everplex.stages.summary import Summary

ARRIVAL_SECONDS = 30.0


def can_meet(rank: Rank) -> bool:
    """Whether torchrun or the local launcher started this rank and others."""
    return rank.rank is not None and (rank.world_size or 1) > 1 and bool(os.environ.get("MASTER_ADDR"))


def merge_together(run: OpenRun, merge: Merge) -> Summary:
    """Merge a complete run with all ranks of the launcher.

    Raises CollectiveFailed, an IncompleteError, where a rank or the launcher's key-value store cannot be reached.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from everplex.stages.collective import CollectiveFailed, Meeting, collective_reduce

    rank = run.rank
    try:
        store, number, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=ARRIVAL_SECONDS))))
    except (RuntimeError, ValueError) as error:
        raise CollectiveFailed(f"the launcher's key-value store cannot be reached: {error}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = Meeting(
        rendezvous=PrefixStore(f"everplex-merge-{attempt}", store),
        rank=number,
        world_size=world_size,
        group_size=run.settings.reduce_group_size or rank.local_world_size,
        arrival_seconds=ARRIVAL_SECONDS,
    )
    return collective_reduce(merge.plan, merge.run, merge.store, meeting)
