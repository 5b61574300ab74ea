"""The offline merge: from everything in the store to a summary, and the seal of a complete one."""

from collections.abc import Sequence
from typing import NamedTuple

from everplex.stages.coverage import covered_documents, nothing_covered, whole_counts
from everplex.stages.health import examine
from everplex.stages.judge import MISSING, Policy, judge
from everplex.stages.layout import SEGMENTS_PREFIX, SUMMARY_KEY
from everplex.stages.ledger import Ledger
from everplex.stages.records import Plan, Run
from everplex.stages.stored import create_summary, load_summary
from everplex.stages.summarise import summarise, tell_coverage, worker_facts
from everplex.stages.summary import Numbers, Summary
from everplex.stages.totals import Totals
from everplex.storage.errors import IncompleteError, IntegrityError, ObjectExistsError
from everplex.storage.store import Store

SUMS = ("nll", "tokens", "documents", "bytes", "characters", "words", "units", "sums")
"""What two summaries of one run must have in common; everything else is derived from it."""


def reduce(
    plan: Plan, run: Run, ledger: Ledger, *, plan_store: Store | None = None, policy: Policy | None = None
) -> Summary:
    """Add up the copies that count, of all that the refreshed `ledger` knows.

    An incomplete summary has numbers per byte and word over its fully covered documents where `plan_store`, which holds
    the plan's tables of documents, is given. Raises the store's error where a segment cannot be read.
    """
    verdict = judge(len(plan.chunks), ledger.copies, policy)
    coverage = tell_coverage(verdict, ledger.set_aside)
    covered = None
    if coverage.accepted < coverage.chunks:
        known = verdict.winners != MISSING
        covered = nothing_covered(plan) if plan_store is None else covered_documents(plan, known, plan_store)
    totals = Totals(plan, None if covered is None else covered.documents)
    counted = totals.add_copies(ledger, verdict.winners[verdict.winners != MISSING])
    copies = ledger.copies
    return summarise(
        plan,
        run,
        totals.finish(totals.flush()),
        whole_counts(plan) if covered is None else covered.counts,
        coverage=coverage,
        workers=worker_facts(copies.sources),
        health=examine(verdict, copies),
        # where evaluations disagreed, those that outvoted them are part of the result
        segments=(source.key for source in copies.current) if verdict.mismatches else counted,
        reduced_by="offline merge",
    )


def exit_code(summary: Summary) -> int:
    """Return 0 for a complete summary, 4 where evaluations disagree or stay non-finite, 75 where chunks are missing."""
    if summary.coverage.conflicts or summary.coverage.nonfinite:
        return 4
    return 0 if summary.complete else 75


def seal(store: Store, summary: Summary) -> Summary:
    """Create `summary.json`, or agree with the one that is there; returns the sealed one.

    Raises IncompleteError where the summary is not complete, IntegrityError where the sealed one has other sums.
    """
    if not summary.complete:
        missing = summary.coverage.chunks - summary.coverage.accepted
        raise IncompleteError(f"{missing} of {summary.coverage.chunks} chunks do not count; only a whole run is sealed")
    try:
        create_summary(store, summary)
    except ObjectExistsError:
        sealed = load_summary(store)
        check_sums(sealed, summary, f"{store.url}/{SUMMARY_KEY}")
        return sealed
    return summary


def check_sums(sealed: Summary, found: Summary, where: str, fields: Sequence[str] = SUMS) -> None:
    """Raise IntegrityError naming the first of the `fields` in which a summary differs from the sealed one.

    With `Numbers.__struct_fields__` as the fields, every number has to be the same.
    """
    pairs: list[tuple[str, object, object]] = [
        ("run", sealed.run, found.run),
        ("plan", sealed.plan, found.plan),
        ("list of groups", sorted(sealed.groups), sorted(found.groups)),
    ]
    numbers: list[tuple[str, Numbers, Numbers]] = [("all", sealed, found)]
    numbers += [(name, sealed.groups[name], found.groups[name]) for name in sealed.groups if name in found.groups]
    pairs += [
        (f"{field} of {name}", getattr(a, field), getattr(b, field)) for name, a, b in numbers for field in fields
    ]
    for what, expected, value in pairs:
        if expected != value:
            raise IntegrityError(
                f"{where}: it is sealed with another {what}: expected {expected}, found {value}; "
                "evaluations of this run differ, so see the report about its devices, or use another --out"
            )


class Recheck(NamedTuple):
    """A sealed summary, and the segments that it does not count: duplicates, and what came too late.

    What a roll-up that it counts repeats is none of them.
    """

    sealed: Summary
    late: list[str]


def recheck(store: Store, plan: Plan, run: Run, *, policy: Policy | None = None) -> Recheck:
    """Add up a sealed run again, from the segments that the seal lists.

    Raises IntegrityError where they do not give the sealed sums, ObjectNotFoundError where the run is not sealed.
    """
    sealed = load_summary(store)
    where = f"{store.url}/{SUMMARY_KEY}"
    ledger = Ledger(store, plan, run.id())
    ledger.read_keys(sealed.segments)
    if ledger.set_aside:
        raise IntegrityError(
            f"{where}: a segment that it counts is damaged: {min(ledger.set_aside.values())}; restore it from "
            f"a copy, or delete {SUMMARY_KEY} and run the same `everplex run` command again"
        )
    check_sums(sealed, reduce(plan, run, ledger, policy=policy), where)
    listed = {entry.key for entry in store.list(SEGMENTS_PREFIX)}
    late = listed.difference(sealed.segments)
    return Recheck(sealed, sorted(key for key in late if not ledger.is_covered(key)))
