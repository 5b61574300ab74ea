"""Runs against each other: the paired difference over one plan with its error bar, and repeated runs of one model.

Both runs scored the same documents, so what makes a document hard cancels in the difference; that is why its error bar
is much smaller than that of either number, and why runs of different plans are refused.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everplex.stages.coverage import read_table
from everplex.stages.derive import Z_95, exp
from everplex.stages.judge import MISSING, Policy, judge
from everplex.stages.ledger import Ledger
from everplex.stages.records import Environment, Plan, Run
from everplex.stages.summary import Numbers, Summary
from everplex.stages.totals import Parts, concatenate, document_parts, join, read_copies
from everplex.storage.errors import IncompleteError, UsageError
from everplex.storage.store import Store

NUM_MOVERS = 10
_CONDITIONS = (
    "torch", "transformers", "device_type", "device_name", "driver", "dtype", "attention", "compile",
)  # fmt: skip
"""What of an environment moves a loss by more than the order of additions does."""


class Side(NamedTuple):
    """One of the runs that are compared: what every document lost, and what computed it."""

    run: Run
    parts: Parts
    environments: frozenset[Environment]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Run B minus run A."""

    units: int
    """Documents (or windows) in both."""
    tokens: int
    mean_a: float
    mean_b: float
    """Nats per token."""
    difference: float
    stderr: float | None
    """Of the difference, clustered by document; None below two."""
    low: float | None
    high: float | None
    """95 % interval of the difference."""
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    """Perplexity of B by that of A, with its 95 % interval."""


class Mover(msgspec.Struct, frozen=True, kw_only=True):
    """A document whose loss changed by much."""

    group: str
    document: str
    tokens: int
    difference: float
    """Nats, B minus A."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Run B against run A, whole and by group."""

    a: str
    b: str
    """What the models are called."""
    paired: bool
    """False where only numbers per group could be compared, which have a much larger error."""
    total: Difference
    groups: dict[str, Difference]
    movers: list[Mover] = []
    """Largest changes first."""
    conditions: dict[str, tuple[list[str], list[str]]] = {}
    """What the environments of A and of B have not in common: its part of the difference cannot be told apart."""


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """Repeated runs of one model over one plan; losses are means in nats per token."""

    runs: int
    mean: float
    spread: float
    """Standard deviation between the runs."""
    largest: float
    """Largest difference between two runs."""
    rounding: float
    """What rounding alone explains."""
    explained: bool
    """Whether it explains the largest difference."""


def read_side(plan: Plan, run: Run, store: Store, *, policy: Policy | None = None) -> Side:
    """Read the loss and tokens of every document of a complete run. Raises IncompleteError where chunks are missing."""
    ledger = Ledger(store, plan, run.id())
    ledger.refresh()
    winners = judge(len(plan.chunks), ledger.copies, policy).winners
    missing = int(np.count_nonzero(winners == MISSING))
    if missing:
        raise IncompleteError(
            f"{store.url}: {missing} of {len(plan.chunks)} chunks do not count; finish this run first"
        )
    group = plan.chunks.group
    parts, environments = [], set()
    for source, chunks, records in read_copies(ledger, winners):
        parts.append(document_parts([group[chunk] for chunk in chunks], records))
        environments.add(source.environment)
    return Side(run, join(concatenate(parts)), frozenset(environments))


def compare_sides(plan: Plan, plan_store: Store, a: Side, b: Side) -> Comparison:
    """Compare two runs of one plan, document by document."""
    parts_a, parts_b = a.parts, b.parts
    change = parts_b.nll_D - parts_a.nll_D
    groups = {
        plan.groups[group].name: _paired(parts_a.take(mine), parts_b.take(mine))
        for group in np.unique(parts_a.group_D).tolist()
        for mine in [parts_a.group_D == group]
    }
    largest = np.argsort(-np.abs(change), kind="stable")[:NUM_MOVERS]
    movers = [
        Mover(
            group=plan.groups[int(parts_a.group_D[at])].name,
            document=_document_id(plan, plan_store, int(parts_a.group_D[at]), int(parts_a.ordinal_D[at])),
            tokens=int(parts_a.tokens_D[at]),
            difference=float(change[at]),
        )
        for at in largest.tolist()
        if change[at]
    ]
    return Comparison(
        a=a.run.model.name,
        b=b.run.model.name,
        paired=True,
        total=_paired(parts_a, parts_b),
        groups=groups,
        movers=movers,
        conditions=_other_conditions(a.environments, b.environments),
    )


def _other_conditions(a: Iterable[Environment], b: Iterable[Environment]) -> dict[str, tuple[list[str], list[str]]]:
    found = {}
    for name in _CONDITIONS:
        values = [sorted({str(getattr(environment, name)) for environment in side}) for side in (a, b)]
        if values[0] != values[1]:
            found[name] = (values[0], values[1])
    return found


def compare_summaries(a: Summary, b: Summary) -> Comparison:
    """Compare runs of different plans, in the groups that both have. The errors add up, since nothing is paired.

    Raises UsageError where no group that was scored is in both.
    """
    names = [name for name in a.groups if name in b.groups and a.groups[name].tokens and b.groups[name].tokens]
    if not names:
        raise UsageError("no group is in both runs; expected groups of the same names (see --group-by)")
    groups = {name: _unpaired(a.groups[name], b.groups[name]) for name in names}
    return Comparison(a=a.model.name, b=b.model.name, paired=False, total=_unpaired(a, b), groups=groups)


def compare_trials(summaries: Sequence[Summary], rounding: float | None = None) -> Trials:
    """Say how far repeated runs are apart and whether rounding, in nats per token, explains it.

    Raises UsageError for fewer than two runs, for incomplete ones and for those of several plans, models or dtypes.
    """
    if len(summaries) < 2:
        raise UsageError(f"expected two runs or more to compare as trials, found {len(summaries)}")
    first = summaries[0]
    for other in summaries:
        if other.plan != first.plan or not other.complete or not other.tokens:
            raise UsageError(f"trials are complete runs of one plan that scored something; run {other.run} is not")
        if (other.model.digest, other.dtype) != (first.model.digest, first.dtype):
            raise UsageError(
                "trials are runs of one model: "
                f"expected {first.model.name} ({first.model.digest[:16]}) in {first.dtype}, "
                f"found {other.model.name} ({other.model.digest[:16]}) in {other.dtype}; compare them without --trials"
            )
    means = [summary.nll / summary.tokens for summary in summaries]
    largest = max(means) - min(means)
    allowed = Policy().floor if rounding is None else rounding
    return Trials(
        runs=len(means),
        mean=statistics.fmean(means),
        spread=statistics.stdev(means),
        largest=largest,
        rounding=allowed,
        explained=largest <= allowed,
    )


def _paired(a: Parts, b: Parts) -> Difference:
    scored = a.tokens_D > 0
    tokens = int(a.tokens_D.sum())
    change, size = (b.nll_D - a.nll_D)[scored], a.tokens_D[scored].astype(np.float64)
    return _difference(math.fsum(a.nll_D), math.fsum(b.nll_D), tokens, _paired_error(change, size), len(size))


def _paired_error(change_D: NDArray[np.float64], size_D: NDArray[np.float64]) -> float | None:
    """Return sqrt(G/(G-1) * sum((d - r n)^2)) / N of the change d of G documents of n tokens, r its mean per token."""
    units, total = len(change_D), math.fsum(size_D)
    if units < 2:
        return None
    residuals = change_D - math.fsum(change_D) / total * size_D
    return math.sqrt(math.fsum(residuals * residuals) * units / (units - 1)) / total


def _unpaired(a: Numbers, b: Numbers) -> Difference:
    stderr = None if a.stderr is None or b.stderr is None else math.hypot(a.stderr, b.stderr)
    # per token of either run: there are no common ones
    return _difference(a.nll / a.tokens, b.nll / b.tokens, 1, stderr, min(a.units, b.units))


def _difference(nll_a: float, nll_b: float, tokens: int, stderr: float | None, units: int) -> Difference:
    mean_a, mean_b = (nll_a / tokens, nll_b / tokens) if tokens else (0.0, 0.0)
    difference = mean_b - mean_a
    low = None if stderr is None else difference - Z_95 * stderr
    high = None if stderr is None else difference + Z_95 * stderr
    return Difference(
        units=units,
        tokens=tokens,
        mean_a=mean_a,
        mean_b=mean_b,
        difference=difference,
        stderr=stderr,
        low=low,
        high=high,
        ratio=exp(difference),
        ratio_low=None if low is None else exp(low),
        ratio_high=None if high is None else exp(high),
    )


def _document_id(plan: Plan, plan_store: Store, group: int, ordinal: int) -> str:
    """Return a document's id; its ordinal where windows are the units, or where the plan keeps no table."""
    rest = ordinal
    for key in plan.groups[group].document_tables if plan.protocol.unit == "document" else []:
        rows = read_table(plan_store, key)
        if rest < len(rows):
            return rows[rest].id
        rest -= len(rows)
    return str(ordinal)
