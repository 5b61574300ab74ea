"""Check-up of a run: identity, coverage, the seal, what was set aside, devices, and ranks that stand out."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import numpy as np
from numpy.typing import NDArray

from everplex.findings import Finding, Severity
from everplex.run_status import Status, StatusReader
from everplex.stages.judge import MISSING, judge
from everplex.stages.layout import CHUNKS_PREFIX, chunk_key
from everplex.stages.ledger import Ledger
from everplex.stages.records import Plan, Run
from everplex.stages.reduce import recheck
from everplex.stages.tolerance import MAD_TO_SD
from everplex.storage.errors import EverplexError, IntegrityError
from everplex.storage.store import Store

_UNUSUAL = 4.0
"""Standard errors from which a rank's mean loss stands out."""
_SMALL_SHARE = 0.5
"""Part of the median rank's tokens below which a rank is far behind."""
_SENTENCES_SHOWN = 10


def check_run(reader: StatusReader) -> Iterator[Finding]:
    """Yield what there is to say of a run, or of what there is of it so far."""
    try:
        status = reader.read()
        yield from _coverage(status)
        plan, run, ledger = reader.plan, reader.run, reader.ledger
        if plan is not None:
            yield from _inputs(status, plan, reader.plan_store())
        if plan is not None and run is not None and ledger is not None:
            yield from _identity(plan, run)
            if status.sealed:
                yield _seal(reader.store, plan, run)
            yield from _devices(status)
            yield from _shares(status)
            yield from _losses(plan, ledger)
    except IntegrityError as error:
        yield _finding("integrity", str(error), "do not trust what is there; restore it from a copy, or start anew")
    except EverplexError as error:
        yield _finding("problem", str(error))


def _finding(severity: Severity, what: str, todo: str = "") -> Finding:
    return Finding(area="run", severity=severity, what=what, todo=todo)


def _identity(plan: Plan, run: Run) -> Iterator[Finding]:
    if run.plan != plan.digest():
        yield _finding(
            "integrity",
            f"run.json is of plan {run.plan[:16]}, and the plan here is {plan.digest()[:16]}",
            "restore the plan of this run; its results belong to no other",
        )
    else:
        yield _finding("good", f"run {run.id()}: {run.model.name} ({run.dtype}) on plan {run.plan[:16]}")


def _coverage(status: Status) -> Iterator[Finding]:
    if status.state == "planning":
        yield _finding("note", f"no plan yet, {status.chunks} chunks so far", "wait, or run the same command again")
        return
    left = status.chunks - status.done
    if not left:
        sealed = "sealed" if status.sealed else "not sealed"
        yield _finding("good", f"complete: all {status.chunks} chunks count, {sealed}")
        if not status.sealed:
            yield _finding("note", "complete and not sealed", "seal it with `everplex reduce`")
    elif status.missing:
        active = sum(worker.active for worker in status.workers)
        todo = "" if active else "run the same `everplex run` or `everplex evaluate` command again"
        yield _finding("note", f"{status.missing} of {status.chunks} chunks are missing, {active} workers active", todo)
    if status.conflicts:
        yield _finding(
            "integrity",
            f"{status.conflicts} chunks have evaluations that disagree",
            "run the same command again on another device: a further evaluation settles it",
        )
    if status.nonfinite:
        yield _finding(
            "integrity",
            f"{status.nonfinite} chunks gave a loss that is not finite each time",
            "look for a dtype that is too narrow (--dtype bfloat16 or float32) or a damaged checkpoint",
        )
    yield from _set_aside(status)


def _set_aside(status: Status) -> Iterator[Finding]:
    cured = status.done == status.chunks
    todo = "its chunks were evaluated again" if cured else "run the same command again: its chunks count as missing"
    for sentence in status.set_aside[:_SENTENCES_SHOWN]:
        yield _finding("note", f"set aside: {sentence}", todo)
    if len(status.set_aside) > _SENTENCES_SHOWN:
        yield _finding("note", f"set aside: {len(status.set_aside) - _SENTENCES_SHOWN} more; see `everplex status`")


def _inputs(status: Status, plan: Plan, plan_store: Store) -> Iterator[Finding]:
    """Look for chunk inputs that a run still needs and that are not there."""
    if status.state == "complete":
        return
    present = {entry.key for entry in plan_store.list(CHUNKS_PREFIX)}
    expected = [chunk_key(chunk, text) for chunk, text in zip(plan.chunk_ids(), plan.chunks.content, strict=True)]
    lost = [key for key in expected if key not in present]
    if lost:
        yield _finding(
            "problem",
            f"{len(lost)} of {len(expected)} chunk inputs are not in {plan_store.url}, the first {lost[0]}",
            "copy the whole plan folder again, or plan into another OUT",
        )


def _seal(store: Store, plan: Plan, run: Run) -> Finding:
    sealed = recheck(store, plan, run).sealed
    return _finding("good", f"the sealed numbers of {sealed.tokens:,} tokens can be had again from what it lists")


def _devices(status: Status) -> Iterator[Finding]:
    for device in status.devices:
        evidence = "; ".join(device.evidence)
        if device.health == "convicted":
            yield _finding(
                "problem",
                f"device {device.device} is convicted: {evidence}",
                "take it out of service and run the same command again: what only it evaluated is evaluated elsewhere",
            )
        elif device.health == "suspect":
            yield _finding("note", f"device {device.device} is suspect: {evidence}", "watch it in further runs")
        if device.speed == "slow":
            yield _finding(
                "note",
                f"device {device.device} is slow for its kind",
                "look at what else runs there, at its cooling and its power limit",
            )
    healthy = sum(device.health == "healthy" for device in status.devices)
    if healthy:
        yield _finding("good", f"{healthy} of {len(status.devices)} devices were compared with others and agree")
    elif status.devices:
        yield _finding("note", "no device was compared with another, so their health is not known")


def _shares(status: Status) -> Iterator[Finding]:
    """Find ranks that did much less than others."""
    tokens: dict[int, int] = defaultdict(int)
    for worker in status.workers:
        if worker.rank is not None:
            tokens[worker.rank] += worker.tokens
    usual = median(tokens.values()) if tokens else 0
    for rank, count in sorted(tokens.items()):
        if count < _SMALL_SHARE * usual:
            yield _finding(
                "note",
                f"rank {rank} evaluated {count:,} tokens where the median rank evaluated {usual:,.0f}",
                "others take over its chunks; look whether it started late, was stopped or is slow",
            )


def _losses(plan: Plan, ledger: Ledger) -> Iterator[Finding]:
    """Find ranks whose losses stand out, and say whether the groups they hold explain it."""
    means, group, rank = _chunk_means(plan, ledger)
    ranks = np.unique(rank).tolist()
    usual = True
    for number in ranks:
        mine = rank == number
        raw, rest = _deviation(means[mine], means[~mine]), _beyond_groups(means, group, mine)
        if max(abs(raw), abs(rest or 0.0)) <= _UNUSUAL:
            continue
        usual = False
        standing_out = rest if rest is not None and abs(rest) > _UNUSUAL else raw
        what = f"rank {number} has an unusually {'high' if standing_out > 0 else 'low'} loss"
        if rest is None:
            yield _finding("note", f"{what}, and no other rank holds its groups to compare with")
        elif abs(rest) <= _UNUSUAL:
            yield _finding("note", f"{what}, and the groups it holds explain it")
        else:
            yield _finding(
                "note",
                f"{what}, and the groups it holds do not explain it",
                "audits decide whether its device is wrong: see the devices above, or run with a larger --audit",
            )
    if usual and len(ranks) > 1:
        yield _finding("good", "no rank has an unusual loss")


def _chunk_means(plan: Plan, ledger: Ledger) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return mean loss, group and rank of every chunk that counts and was evaluated by a numbered rank."""
    copies = ledger.copies
    winners = judge(len(plan.chunks), copies).winners
    rows = np.flatnonzero(winners != MISSING)
    table = copies.table[winners[rows]]
    ranks = np.array([-1 if source.rank is None else source.rank for source in copies.sources], np.int64)
    rank = ranks[table["source"]] if len(rows) else np.zeros(0, np.int64)
    named = (rank >= 0) & (table["tokens"] > 0)
    group = np.array(plan.chunks.group, np.int64)[rows]
    return table["nll"][named] / table["tokens"][named], group[named], rank[named]


def _beyond_groups(means: NDArray[np.float64], group: NDArray[np.int64], mine: NDArray[np.bool_]) -> float | None:
    """Return by how many standard errors a rank differs from the others in the groups that it shares with them."""
    own, others = [], []
    for shared in np.unique(group[mine]).tolist():
        of_others = means[(group == shared) & ~mine]
        if len(of_others) > 1:
            own.append(means[(group == shared) & mine] - np.median(of_others))
            others.append(of_others - np.median(of_others))
    return _deviation(np.concatenate(own), np.concatenate(others)) if own else None


def _deviation(own: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return by how many standard errors the median of some values differs from that of the others."""
    if len(others) < 2:
        return 0.0
    center = float(np.median(others))
    spread = MAD_TO_SD * float(np.median(np.abs(others - center)))
    error = spread * float(np.sqrt(1 / len(own) + 1 / len(others)))
    return (float(np.median(own)) - center) / error if error else 0.0
