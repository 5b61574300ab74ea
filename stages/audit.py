"""Which chunks to evaluate once more, and on which devices not: conflicts to settle, losses to cure, devices to check.

Pure, like the verdict it starts from: every worker that sees the same store asks for the same. The set of audits does
not depend on which of them are done. Half of them are random, half are the chunks whose loss is furthest from the
median of their group, which is where sparse errors show; a large loss proves nothing, a second evaluation does.
"""

import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.copies import SENTINEL, WORK, Copies
from everplex.stages.judge import MISSING, Policy, Verdict
from everplex.stages.records import Kind, Plan

MAX_EVALUATIONS = 5
"""Of one chunk, before a conflict is left as it is."""


class Request(NamedTuple):
    """An evaluation that is wanted beyond the first one of a chunk."""

    chunk: str
    kind: Kind
    exclude: frozenset[str]
    """Devices that must not do it."""


class Requests(NamedTuple):
    """What is wanted now, and how far the audits are."""

    wanted: list[Request]
    due: int
    done: int
    impossible: int
    """Audits that no device is left for."""


def sentinel_chunks(plan: Plan, count: int = 2) -> list[str]:
    """Return the chunks that every worker evaluates at its start and every so often."""
    rng = random.Random(plan.digest())  # noqa: S311 - the same on every machine
    rows = rng.sample(range(len(plan.chunks)), min(count, len(plan.chunks)))
    return [plan.chunk_id(row) for row in sorted(rows)]


def requests(plan: Plan, copies: Copies, verdict: Verdict, policy: Policy | None = None) -> Requests:
    """Say which evaluations are wanted. Audits are asked for once every chunk was evaluated."""
    policy = policy or Policy()
    fleet = {source.device for source in copies.sources} - verdict.convicted
    wanted = [
        Request(plan.chunk_id(row), "work", _unless_all(fleet, {device}))
        for row, device in verdict.nonfinite_once.items()
    ]
    wanted += _settle(plan, copies, verdict, fleet)
    covered = np.zeros(len(plan.chunks), np.bool_)
    covered[copies.table["chunk"][copies.table["kind"] != SENTINEL]] = True
    asked = {*verdict.conflicts, *verdict.nonfinite, *verdict.nonfinite_once}
    lost = np.flatnonzero(covered & (verdict.winners == MISSING)).tolist()  # what only convicted devices evaluated
    wanted += [Request(plan.chunk_id(row), "work", verdict.convicted) for row in lost if row not in asked]
    audits = _audits(plan, copies, verdict, policy) if covered.all() else []
    evaluated = _devices_by_chunk(copies, audits)
    done = impossible = 0
    for row in audits:
        seen = evaluated[row]
        able = fleet - seen
        if len(seen) > 1:
            done += 1
        elif not able:
            impossible += 1
        else:
            wanted.append(Request(plan.chunk_id(row), "audit", _other_hosts(able, seen) | verdict.convicted))
    return Requests(wanted, len(audits), done, impossible)


def _unless_all(fleet: set[str], seen: Iterable[str]) -> frozenset[str]:
    """Keep the devices `seen` out, unless there are no others."""
    return frozenset(seen) if fleet.difference(seen) else frozenset()


def _other_hosts(able: set[str], seen: set[str]) -> frozenset[str]:
    """Keep out the devices seen, and the others of their hosts where further hosts are able."""
    hosts = {device.rpartition("/")[0] for device in seen}
    same = {device for device in able if device.rpartition("/")[0] in hosts}
    return frozenset(seen | same) if same != able else frozenset(seen)


def _settle(plan: Plan, copies: Copies, verdict: Verdict, fleet: set[str]) -> list[Request]:
    if not verdict.conflicts:
        return []
    rows = copies.table["chunk"][copies.table["kind"] != SENTINEL]
    evaluations = np.bincount(rows, minlength=len(plan.chunks))
    return [
        Request(plan.chunk_id(row), "audit", _unless_all(fleet, devices) | verdict.convicted)
        for row, devices in verdict.conflicts.items()
        if evaluations[row] < MAX_EVALUATIONS
    ]


def _audits(plan: Plan, copies: Copies, verdict: Verdict, policy: Policy) -> list[int]:
    """Chunks to audit: a share of all, and more of each device that was outvoted."""
    num_chunks = len(plan.chunks)
    budget = min(num_chunks, math.ceil(policy.audit_fraction * num_chunks))
    if not budget:
        return []
    residuals = _residuals(plan, copies)
    chosen = _pick(np.arange(num_chunks), residuals, budget, plan.digest())
    for device in sorted(verdict.mismatches):
        if device in verdict.convicted:
            continue
        mine = copies.of_sources([source.device == device for source in copies.sources]).astype(np.bool_)
        rows = np.unique(copies.table["chunk"][mine & (copies.table["kind"] == WORK)])
        rows = rows[~np.isin(rows, list(chosen))]
        more = policy.audits_after_mismatch * len(verdict.mismatches[device])
        chosen |= _pick(rows, residuals, more, plan.digest() + device)
    return sorted(chosen)


def _pick(rows: NDArray[np.int64], residuals: NDArray[np.float64], count: int, seed: str) -> set[int]:
    """Pick half of `count` at random, then those of the largest residuals."""
    count = min(count, len(rows))
    rng = random.Random(seed)  # noqa: S311 - the same on every machine
    at_random = set(rng.sample(rows.tolist(), (count + 1) // 2))
    by_residual = rows[np.argsort(-residuals[rows], kind="stable")].tolist()
    rest = [row for row in by_residual[:count] if row not in at_random]
    return at_random | set(rest[: count - len(at_random)])


def _residuals(plan: Plan, copies: Copies) -> NDArray[np.float64]:
    """Per chunk the largest distance of an evaluation from the group's median, in robust standard deviations.

    Each chunk has one vote in the median, so that audits of honest devices do not move it.
    """
    table = copies.table[(copies.table["kind"] != SENTINEL) & copies.table["finite"] & (copies.table["tokens"] > 0)]
    means = table["nll"] / table["tokens"]
    lowest = np.full(len(plan.chunks), np.inf)
    np.minimum.at(lowest, table["chunk"], means)
    groups = np.array(plan.chunks.group, np.int64)
    medians, deviations = np.zeros(len(plan.groups)), np.ones(len(plan.groups))
    for group in np.unique(groups[table["chunk"]]):
        of_group = lowest[(groups == group) & np.isfinite(lowest)]
        medians[group] = np.median(of_group)
        deviations[group] = max(float(np.median(np.abs(of_group - medians[group]))), np.finfo(np.float64).tiny)
    of_row = groups[table["chunk"]]
    residuals = np.zeros(len(plan.chunks))
    with np.errstate(over="ignore"):  # where all but one are equal, that one is infinitely far from them
        np.maximum.at(residuals, table["chunk"], np.abs(means - medians[of_row]) / deviations[of_row])
    return residuals


def _devices_by_chunk(copies: Copies, audits: list[int]) -> dict[int, set[str]]:
    evaluated: dict[int, set[str]] = {row: set() for row in audits}
    rows = np.flatnonzero(np.isin(copies.table["chunk"], audits) & (copies.table["kind"] != SENTINEL))
    for chunk, source in zip(copies.table["chunk"][rows].tolist(), copies.table["source"][rows].tolist(), strict=True):
        evaluated[chunk].add(copies.sources[source].device)
    return evaluated
