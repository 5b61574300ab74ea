"""The verdict about each device in words, for the summary."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from everplex.stages.copies import Copies
from everplex.stages.exact import Tally
from everplex.stages.judge import MISSING, Verdict
from everplex.stages.summary import AgreementRow, DeviceRow, WorkerRow
from everplex.stages.tolerance import MAD_TO_SD

SLOW_RATIO = 1.5
"""Times slower than the median device of its name, at least, to be called slow."""
SLOW_DEVIATIONS = 3.5
"""And so many robust standard deviations, of the logarithm."""
MIN_SPREAD = 0.05


class Health(NamedTuple):
    """What the summary says about devices."""

    devices: list[DeviceRow]
    agreement: list[AgreementRow]
    withdrawn: Tally
    """What convicting changed: add it to the sums that count to have those before."""
    convicted: bool


def examine(verdict: Verdict, copies: Copies) -> Health:
    """Put the verdict in words. `copies` hold at least the rows of chunks that were evaluated more than once."""
    names = sorted({source.device for source in copies.sources})
    if len(names) == 1:
        reason = "there is no other device to compare with"
        rows = [DeviceRow(device=names[0], health="not checked", evidence=[reason])]
    else:
        rows = [_row(verdict, name) for name in names]
    return Health(rows, _agreement(verdict), _withdrawn(verdict, copies), bool(verdict.convicted))


def with_speed(devices: Iterable[DeviceRow], workers: Iterable[WorkerRow]) -> list[DeviceRow]:
    """Say which devices are slow among those of the same name, three or more."""
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        if worker.tokens_per_second:
            speeds[worker.device_name][worker.device].append(math.log(worker.tokens_per_second))
    verdicts: dict[str, Literal["usual", "slow", "not compared"]] = {}
    for of_name in speeds.values():
        if len(of_name) < 3:
            continue
        means = {device: statistics.fmean(values) for device, values in of_name.items()}
        median = statistics.median(means.values())
        spread = MAD_TO_SD * statistics.median(abs(value - median) for value in means.values())
        limit = max(math.log(SLOW_RATIO), SLOW_DEVIATIONS * max(spread, MIN_SPREAD))
        verdicts |= {device: "slow" if median - value > limit else "usual" for device, value in means.items()}
    return [msgspec.structs.replace(row, speed=verdicts.get(row.device, "not compared")) for row in devices]


def _agreement(verdict: Verdict) -> list[AgreementRow]:
    rows = [
        AgreementRow(
            environments=sorted(f"{one.device_name}, {one.dtype}, torch {one.torch}" for one in pair),
            spread=spread,
            tolerance=verdict.tolerances.calibrated.get(pair, verdict.tolerances.default),
        )
        for pair, spread in verdict.tolerances.spread.items()
    ]
    return sorted(rows, key=lambda row: (row.environments, row.spread, row.tolerance))


def _withdrawn(verdict: Verdict, copies: Copies) -> Tally:
    tally = Tally()
    for row in np.flatnonzero(verdict.winners != verdict.winners_before).tolist():
        for copy, sign in ((int(verdict.winners_before[row]), 1), (int(verdict.winners[row]), -1)):
            if copy != MISSING:
                tally.add("nll", sign * float(copies.table["nll"][copy]))
                tally.count("tokens", sign * int(copies.table["tokens"][copy]))
    return tally


def _row(verdict: Verdict, device: str) -> DeviceRow:
    mismatches, audited = len(verdict.mismatches.get(device, ())), verdict.audited.get(device, 0)
    differences = verdict.bit_differences.get(device, 0)
    evidence = []
    if mismatches:
        evidence.append(f"outvoted by two other devices or more in {mismatches} chunks")
    if differences:
        evidence.append(f"{differences} chunks differ within the tolerance from an equal environment and batch shape")
    health: Literal["healthy", "suspect", "convicted", "not checked"]
    if device in verdict.convicted:
        health = "convicted"
    elif evidence:
        health = "suspect"
    else:
        health = "healthy" if audited else "not checked"
    return DeviceRow(device=device, health=health, evidence=evidence, audited=audited, mismatches=mismatches)
