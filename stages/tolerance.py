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
    spread: dict[Pair, float]
    """Median difference between the sentinels of the two environments."""

    def between(self, one: Environment, other: Environment) -> float:
        """Return the tolerance between two environments."""
        return self.calibrated.get(frozenset((one, other)), self.default)


def calibrate(copies: Copies, default: float, floor: float, ceiling: float) -> Tolerances:
    """Median and six robust standard deviations of the differences between sentinels, within bounds.

    Sentinels of one environment agree to the bit, other batch shapes of it do not: that is what the floor is for. A few
    sentinel chunks are too few to tell how far two environments may be apart on any chunk, so between two the tolerance
    is only ever widened, up to the ceiling, which keeps a device in an environment of its own from excusing itself.
    """
    differences: dict[Pair, list[float]] = defaultdict(list)
    for environments in _sentinels(copies).values():
        for one, other in combinations_with_replacement(environments, 2):
            center = float(np.median([np.median(means) for means in environments[one].values()]))
            values = [mean for means in environments[other].values() for mean in means]
            differences[frozenset((one, other))] += [abs(mean - center) for mean in values]
    calibrated, spread = {}, {}
    for pair, distances in differences.items():
        spread[pair] = median = float(np.median(distances))
        if len(distances) >= ENOUGH:
            deviation = MAD_TO_SD * float(np.median(np.abs(np.array(distances) - median)))
            within = floor if all(environment.dtype == "float32" for environment in pair) else 10 * floor
            least = within if len(pair) == 1 else default
            calibrated[pair] = max(least, min(median + WIDTH * deviation, ceiling))
    return Tolerances(default, calibrated, spread)


def deviating_sentinels(copies: Copies, tolerances: Tolerances) -> dict[str, set[int]]:
    """Per device the sentinels in which it ever left what most devices of its environment, two or more, agree upon."""
    deviating: dict[str, set[int]] = defaultdict(set)
    for chunk, environments in _sentinels(copies).items():
        for environment, devices in environments.items():
            center = float(np.median([np.median(means) for means in devices.values()]))
            tolerance = tolerances.between(environment, environment)
            outside = {device for device, means in devices.items() if _farthest(means, center) > tolerance}
            if len(devices) - len(outside) >= max(2, len(outside) + 1):
                for device in outside:
                    deviating[device].add(chunk)
    return deviating


def _farthest(means: list[float], center: float) -> float:
    return max(abs(mean - center) for mean in means)


def _sentinels(copies: Copies) -> dict[int, dict[Environment, dict[str, list[float]]]]:
    """Mean losses of the finite sentinels, by chunk, environment and device."""
    found: dict[int, dict[Environment, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    table = copies.table[(copies.table["kind"] == SENTINEL) & copies.table["finite"] & (copies.table["tokens"] > 0)]
    for row in table:
        source = copies.sources[int(row["source"])]
        found[int(row["chunk"])][source.environment][source.device].append(float(row["nll"]) / int(row["tokens"]))
    return found
