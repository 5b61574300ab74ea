"""The end of every command that gives numbers: merge, check the seal or make it, publish the report."""

from collections.abc import Callable
from typing import NamedTuple

from everplex.progress import Progress
from everplex.stages.html import html_report
from everplex.stages.layout import REPORT_KEY
from everplex.stages.ledger import Ledger
from everplex.stages.records import Plan, Run
from everplex.stages.reduce import exit_code, recheck, reduce, seal
from everplex.stages.summary import Numbers, Summary
from everplex.storage.errors import (
    IncompleteError,
    IntegrityError,
    ObjectNotFoundError,
    StoreError,
    StoreRefusedError,
)
from everplex.storage.store import Store


class Merge(NamedTuple):
    """What a merge needs: the store of the run, that of its plan, and what both say they hold."""

    store: Store
    plan_store: Store
    plan: Plan
    run: Run


def conclude(
    merge: Merge,
    progress: Progress,
    *,
    ledger: Ledger | None = None,
    together: Callable[[], Summary] | None = None,
    verify: bool = False,
) -> Summary:
    """Return the numbers of a run: the sealed ones, checked against the segments they list, or a merge of all there is.

    A complete merge is sealed. Reads the store afresh unless a refreshed `ledger` is given.
    `together` merges with other ranks; where it fails, the offline merge gives the same numbers, and with `verify` both
    have to. Raises IntegrityError where they differ, or where sealed numbers cannot be had again.
    """
    store, _, plan, run = merge
    sealed = _sealed(merge, progress)
    if sealed is not None:
        return sealed
    if ledger is None:
        ledger = Ledger(store, plan, run.id())
        ledger.refresh()
    summary = None if together is None else _try_together(together, progress)
    if summary is None or verify:
        offline = _merge_offline(merge, ledger, progress)
        if summary is not None:
            check_same_numbers(summary, offline)
        summary = summary or offline
    return _seal(merge, summary, progress) if summary.complete else summary


def _merge_offline(merge: Merge, ledger: Ledger, progress: Progress) -> Summary:
    """Merge; who may not read the documents of every group gets the numbers that need none of them."""
    try:
        return reduce(merge.plan, merge.run, ledger, plan_store=merge.plan_store)
    except StoreRefusedError as error:
        progress.say(f"{error}; numbers per byte and per word are left out")
        return reduce(merge.plan, merge.run, ledger)


def check_same_numbers(together: Summary, offline: Summary) -> None:
    """Raise IntegrityError naming the first number in which the two ways of merging differ."""
    for field in (*Numbers.__struct_fields__, "groups", "macro", "positions", "document_lengths"):
        one, other = getattr(together, field), getattr(offline, field)
        if one != other:
            raise IntegrityError(
                f"{field} is {one} by the collective merge and {other} by the offline merge; run `everplex doctor` and "
                "report this with its output"
            )


def _try_together(together: Callable[[], Summary], progress: Progress) -> Summary | None:
    try:
        return together()
    except IncompleteError as error:
        progress.say(str(error))
        return None


def _seal(merge: Merge, summary: Summary, progress: Progress) -> Summary:
    try:
        sealed = seal(merge.store, summary)
    except IntegrityError:
        # Somebody sealed other copies of some chunks meanwhile; their numbers stand if they can be had again.
        found = _sealed(merge, progress)
        if found is None:
            raise
        return found
    try:
        publish_report(merge.store, sealed)
    except StoreError as error:  # the numbers are sealed; a view of them is no reason to fail
        progress.say(f"{error}; `everplex report` makes it later")
    return sealed


def publish_report(store: Store, summary: Summary) -> None:
    """Write or replace `report.html`."""
    store.publish(REPORT_KEY, html_report(summary).encode())


def _sealed(merge: Merge, progress: Progress) -> Summary | None:
    try:
        found = recheck(merge.store, merge.plan, merge.run)
    except ObjectNotFoundError:
        return None
    late = len(found.late)
    if late:
        progress.say(f"the seal does not count {late} segments: their chunks were evaluated twice, or they came later")
    return found.sealed


def demand_complete(summary: Summary, out: str) -> None:
    """Raise IntegrityError or IncompleteError, with what is missing and what to do, unless the summary is complete."""
    coverage = summary.coverage
    if exit_code(summary) == IntegrityError.exit_code:
        raise IntegrityError(
            f"{out}: {coverage.conflicts} chunks have evaluations that disagree and {coverage.nonfinite} gave a loss "
            "that is not finite each time; run the same command again on another device, or look at `everplex status`"
        )
    if not summary.complete:
        raise IncompleteError(
            f"{out}: {coverage.accepted} of {coverage.chunks} chunks are recorded, {coverage.missing} are missing; "
            "run the same `everplex run` command again to continue, or see the numbers so far with "
            f"`everplex reduce {out} --partial`"
        )
