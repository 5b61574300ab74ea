"""How far honest devices may differ: calibrated from sentinels, the same few chunks evaluated by every worker."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from everplex.stages.copies import SENTINEL, Copies
from everplex.stages.records import Environment

MAD_TO_SD = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""
WIDTH = 6
"""Standard deviations above the median difference that still are usual."""
ENOUGH = 3
"""Differences below which nothing is calibrated."""

Pair = frozenset[Environment]


@dataclass(frozen=True)
class Tolerances:
    """Largest usual difference of the loss between two evaluations, in nats per token, by pair of environments."""

    default: float
    calibrated: dict[Pair, float]

    def between(self, one: Environment, other: Environment) -> float:
        """Tolerance between two environments."""
        return self.calibrated.get(frozenset((one, other)), self.default)


def _sentinels(copies: Copies) -> dict[int, dict[str, tuple[float, int, Environment, int]]]:
    """Per sentinel chunk and device its last finite evaluation: mean loss, token digest, environment, batch shape."""
    found: dict[int, dict[str, tuple[float, int, Environment, int]]] = defaultdict(dict)
    table = copies.table[(copies.table["kind"] == SENTINEL) & copies.table["finite"] & (copies.table["tokens"] > 0)]
    order = np.lexsort((table["digest_low"], table["digest_high"]))
    for row in table[order]:
        source = copies.sources[int(row["source"])]
        mean = float(row["nll"]) / int(row["tokens"])
        found[int(row["chunk"])][source.device] = (
            mean, int(row["token_digest"]), source.environment, int(row["batch_shape"])
        )  # fmt: skip
    return found


def calibrate(copies: Copies, default: float, floor: float, ceiling: float) -> Tolerances:
    """Median and six robust standard deviations of the differences between sentinels, within floor and ceiling.

    Sentinels of one environment agree to the bit, other batch shapes of it do not: that is what the floor is for.
    """
    differences: dict[Pair, list[float]] = defaultdict(list)
    for devices in _sentinels(copies).values():
        environments: dict[Environment, list[float]] = defaultdict(list)
        for mean, _, environment, _ in devices.values():
            environments[environment].append(mean)
        for one, other in combinations_with_replacement(environments, 2):
            center = float(np.median(environments[one]))
            differences[frozenset((one, other))] += [abs(mean - center) for mean in environments[other]]
    calibrated = {}
    for pair, values in differences.items():
        if len(values) >= ENOUGH:
            median = float(np.median(values))
            spread = MAD_TO_SD * float(np.median(np.abs(np.array(values) - median)))
            least = floor if all(environment.dtype == "float32" for environment in pair) else 10 * floor
            calibrated[pair] = min(max(median + WIDTH * spread, least), ceiling)
    return Tolerances(default, calibrated)


def deviating_sentinels(copies: Copies, tolerances: Tolerances) -> dict[str, set[int]]:
    """Per device the sentinels in which it left what two devices or more of its environment agree upon."""
    deviating: dict[str, set[int]] = defaultdict(set)
    for chunk, devices in _sentinels(copies).items():
        by_environment: dict[Environment, dict[str, float]] = defaultdict(dict)
        for device, (mean, _, environment, _) in devices.items():
            by_environment[environment][device] = mean
        for environment, means in by_environment.items():
            if len(means) <= 2:
                continue
            center, tolerance = float(np.median(list(means.values()))), tolerances.between(environment, environment)
            outside = {device for device, mean in means.items() if abs(mean - center) > tolerance}
            if 2 * len(outside) < len(means):
                for device in outside:
                    deviating[device].add(chunk)
    return deviating
