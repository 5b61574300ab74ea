"""Runs against the first of them: read from their stores, compared, worded."""

from collections.abc import Sequence
from functools import cache

from everplex.conclude import Merge
from everplex.reading import open_merge, read_summary
from everplex.stages.compare import (
    Comparison,
    Difference,
    Side,
    Trials,
    compare_sides,
    compare_summaries,
    compare_trials,
    read_side,
)
from everplex.stages.report import shown_name, table
from everplex.stages.stored import compare_plans
from everplex.storage.errors import IdentityMismatch, UsageError

_HEAD = ("", "A", "B", "B - A", "95 % interval", "ratio", "95 % interval", "documents")


def compare(*outs: str, anyway: bool = False, store_option: Sequence[str] | None = None) -> list[Comparison]:
    """Compare each run with the first, document by document.

    Raises UsageError, naming the field, for runs whose plans differ; with `anyway` those are compared by group, which
    says much less, because what makes a document hard does not cancel. Raises IncompleteError for an unfinished run.
    """
    _need_two(outs)
    first, *others = [open_merge(out, store_option) for out in outs]
    side = cache(lambda: _side(first))
    comparisons = []
    for out, other in zip(outs[1:], others, strict=True):
        try:
            compare_plans(first.plan, other.plan)
        except IdentityMismatch as mismatch:
            if not anyway:
                raise UsageError(
                    f"{outs[0]} and {out} are not of one plan: {mismatch.field} is {mismatch.expected} and "
                    f"{mismatch.found}; compare runs of one plan, or use --anyway for a much weaker comparison by group"
                ) from mismatch
            summaries = [read_summary(one, store_option=store_option) for one in (outs[0], out)]
            comparisons.append(compare_summaries(*summaries))
        else:
            comparisons.append(compare_sides(first.plan, first.plan_store, side(), _side(other)))
    return comparisons


def trials(*outs: str, store_option: Sequence[str] | None = None) -> Trials:
    """Say how far repeated runs of one model over one plan are apart, and whether rounding explains it.

    Raises UsageError for runs of several plans, IncompleteError for an unfinished one.
    """
    _need_two(outs)
    return compare_trials([read_summary(out, store_option=store_option) for out in outs])


def comparison_report(comparison: Comparison, out_a: str, out_b: str) -> str:
    """Return a comparison as plain text, ending in a line break; losses are in nats per token."""
    rows = [_cells("all", comparison.total)]
    if len(comparison.groups) > 1 or not comparison.paired:
        rows += [_cells(f"  {shown_name(name)}", difference) for name, difference in sorted(comparison.groups.items())]
    names = [f"A: {out_a} ({comparison.a})", f"B: {out_b} ({comparison.b})"]
    lines = [*names, *_warning(comparison), "", *table(_HEAD, rows)]
    if comparison.movers:
        movers = [
            (f"{mover.group}, {mover.document}", f"{mover.difference:+.4f}", f"{mover.tokens:,}")
            for mover in comparison.movers
        ]
        lines += ["", *table(("documents that changed most", "nats", "tokens"), movers)]
    return "\n".join(lines) + "\n"


def comparisons_report(comparisons: Sequence[Comparison], outs: Sequence[str]) -> str:
    """Return one comparison in full, several as a table against the first run."""
    if len(comparisons) == 1:
        return comparison_report(comparisons[0], *outs)
    rows = [_cells(out, comparison.total) for out, comparison in zip(outs[1:], comparisons, strict=True)]
    lines = [f"A: {outs[0]} ({comparisons[0].a})", "", *table(("B", *_HEAD[1:]), rows)]
    lines += [f"{out}: {line}" for out, c in zip(outs[1:], comparisons, strict=True) for line in _warning(c)]
    return "\n".join(lines) + "\n"


def trials_report(result: Trials) -> str:
    """Return what repeated runs have in common as plain text, ending in a line break."""
    verdict = "explains it" if result.explained else "does not explain it: look at their devices and environments"
    return (
        f"{result.runs} runs: mean loss {result.mean:.6f} nats/token, standard deviation {result.spread:.3g}\n"
        f"largest difference {result.largest:.3g} nats/token; rounding (up to {result.rounding:.3g}) {verdict}\n"
    )


def _need_two(outs: Sequence[str]) -> None:
    if len(outs) < 2:
        raise UsageError(f"expected two runs or more to compare, found {len(outs)}; give the --out of each")


def _side(merge: Merge) -> Side:
    return read_side(merge.plan, merge.run, merge.store)


def _warning(comparison: Comparison) -> list[str]:
    if not comparison.paired:
        return ["the plans differ, so nothing is paired: what makes a text hard does not cancel, nor need tokens agree"]
    if not comparison.conditions:
        return []
    found = "; ".join(
        f"{name.replace('_', ' ')} {', '.join(a) or 'none'} and {', '.join(b) or 'none'}"
        for name, (a, b) in comparison.conditions.items()
    )
    return [f"the runs were not computed alike, which is part of the difference: {found}"]


def _cells(name: str, difference: Difference) -> tuple[str, ...]:
    return (
        name,
        f"{difference.mean_a:.6f}",
        f"{difference.mean_b:.6f}",
        f"{difference.difference:+.6f}",
        _interval(difference.low, difference.high, "+.6f"),
        "-" if difference.ratio is None else f"{difference.ratio:.5f}",
        _interval(difference.ratio_low, difference.ratio_high, ".5f"),
        f"{difference.units:,}",
    )


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "-" if low is None or high is None else f"{low:{form}} .. {high:{form}}"
