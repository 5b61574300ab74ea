"""The public Python functions: the same stages and options as the command line, with typed results.

Each takes the options of `everplex.settings.Settings` as keyword arguments, raises the errors of
`everplex.storage.errors` and prints nothing but progress, on stderr.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everplex.conclude import Merge, conclude, demand_complete
from everplex.evaluation import work_on
from everplex.launch import launch_ranks
from everplex.meet import can_meet, merge_together
from everplex.opening import OpenRun, open_out, open_run
from everplex.planning import make_stored_plan, plan_options
from everplex.preempt import Stop, watch
from everplex.progress import Progress
from everplex.reading import read_summary
from everplex.settings import Data, Settings, make_settings
from everplex.stages.records import Plan
from everplex.stages.stored import load_plan
from everplex.stages.summary import Summary
from everplex.storage.errors import IncompleteError, IntegrityError, ObjectNotFoundError, UsageError


def run(data: Data, *, model: str, out: str, **options: Any) -> Summary:
    """Plan, evaluate and reduce; the same call again resumes. Returns the sealed summary.

    Raises UsageError, IncompleteError (call again) or IntegrityError.
    """
    settings = make_settings({"data": data, "model": model, "out": out, **options})
    return run_settings(settings, own_process=False)


def plan(data: Data, *, tokenizer: str, out: str, **options: Any) -> Plan:
    """Read a corpus and write the plan of a run. Returns the stored plan."""
    settings = make_settings({"data": data, "tokenizer": tokenizer, "out": out, **options})
    return plan_settings(settings, own_process=False)


def evaluate(*, model: str, out: str, **options: Any) -> Summary:
    """Evaluate what is missing of a planned run. Returns the summary of what is recorded then."""
    settings = make_settings({"model": model, "out": out, **options})
    return evaluate_settings(settings, own_process=False)


def reduce(out: str, *, partial: bool = False, store_option: list[str] | None = None) -> Summary:
    """Merge what all machines recorded.

    Raises IncompleteError where chunks are missing, unless `partial`, and IntegrityError for what evaluating again does
    not cure.
    """
    return read_summary(out, partial=partial, store_option=store_option)


def plan_settings(settings: Settings, *, own_process: bool = True) -> Plan:
    """Do what `plan` does; in its own process, signals stop it politely."""
    settings.need("data", "out")
    stop = Stop(settings.grace_seconds)
    with _progress() as progress, watch(stop, own_process=own_process):
        store = open_out(settings, stop=stop)
        try:
            stored = load_plan(store)
        except ObjectNotFoundError:
            return make_stored_plan(settings, store, stop, progress)
        from everplex.stages.plan import check_plan

        check_plan(stored, plan_options(settings), verify_data=settings.verify_data)
        return stored


def run_settings(settings: Settings, *, own_process: bool = True) -> Summary:
    """Do what `run` does; in its own process, signals stop it politely."""
    settings.need("data", "model", "out")
    return evaluate_settings(settings, own_process=own_process)


def evaluate_settings(
    settings: Settings, *, own_process: bool = True, launcher: int | None = None, stop: Stop | None = None
) -> Summary:
    """Do what `evaluate` does, and plan first where there is data; `launcher` is the process that started this rank."""
    settings.need("model", "out")
    if settings.dry_run:
        raise UsageError("dry_run: a rehearsal is `everplex run --dry-run`, or everplex.dry_run in Python")
    stop = Stop(settings.grace_seconds) if stop is None else stop  # a stop is false until it is set
    with _progress(shown=os.environ.get("LOCAL_RANK", "0") == "0") as progress:
        with watch(stop, max_seconds=settings.max_seconds, launcher=launcher, own_process=own_process):
            run = open_run(settings, stop, progress)
            if settings.nproc == 1:
                return _evaluate(run)
        return _evaluate_by_ranks(run)


def _evaluate(run: OpenRun) -> Summary:
    identity, ledger = work_on(run)
    merge = Merge(run.store, run.plan_store, run.plan, identity)
    complete = len(ledger.recorded) == len(run.plan.chunks)
    together = (lambda: merge_together(run, merge)) if complete and can_meet(run.rank) else None
    summary = conclude(merge, run.progress, ledger=ledger, together=together, verify=run.settings.verify_reduce)
    if run.selected is None or not ledger.recorded.issuperset(run.selected):
        demand_complete(summary, str(run.settings.out))
    return summary


def _evaluate_by_ranks(run: OpenRun) -> Summary:
    """Let local ranks evaluate; the worst of their ends is this one's."""
    code = launch_ranks(run.settings)
    identity = run.stored_run()
    if code == UsageError.exit_code:
        raise UsageError("the ranks could not start; their messages above say why")
    if code == IntegrityError.exit_code:
        raise IntegrityError("a rank found results that cannot be trusted; its message above says which")
    if identity is None:
        raise IncompleteError("the ranks ended before they began; run the same command again")
    summary = conclude(Merge(run.store, run.plan_store, run.plan, identity), run.progress)
    if run.selected is None:
        demand_complete(summary, str(run.settings.out))
    elif code:
        raise IncompleteError("a rank ended before its work; run the same command again to continue")
    return summary


@contextmanager
def _progress(*, shown: bool = True) -> Iterator[Progress]:
    progress = Progress(shown=shown)
    try:
        yield progress
    finally:
        progress.close()
