"""Evaluation of a run by this process: what others left is collected first, then a worker does the rest."""

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from everplex.loading import load_evaluator
from everplex.opening import Identity, OpenRun, open_started
from everplex.stages.audit import requests
from everplex.stages.collector import collector_paused
from everplex.stages.judge import Policy, judge
from everplex.stages.ledger import Ledger
from everplex.stages.records import Run
from everplex.stages.reuse import Reusable, reuse
from everplex.stages.spool import upload_spool
from everplex.stages.stored import compare_runs, is_sealed, load_chunk
from everplex.worker import Worker

if TYPE_CHECKING:
    from everplex.stages.evaluate import Evaluator
    from everplex.stages.model import LoadedModel


def work_on(run: OpenRun) -> tuple[Run, Ledger]:
    """Evaluate all that is missing and selected; returns the identity of the run and its ledger, refreshed.

    A run in which nothing is missing and nothing has to be evaluated again needs no model, only its digest.
    """
    identity = Identity(run)
    is_new = identity.stored is None and not run.settings.reuse_from
    model = _load(run, identity) if is_new else None  # while the weights are hashed, in a thread
    early = identity.early()
    ledger = Ledger(run.store, run.plan, early.id())
    send_spool(run, early)
    began = time.monotonic()
    ledger.refresh()
    listed = began, time.monotonic()
    if run.settings.reuse_from and run.rank.is_first:
        take_over(run, identity.result(), ledger)
    if not ledger.recorded.issuperset(run.wanted) or _more_is_asked_for(run, ledger):
        with collector_paused():
            worker = Worker(run, identity, ledger, *(model or _load(run, identity)), listed=listed)
        worker.work()
        ledger.refresh()
    return identity.result(), ledger


def _load(run: OpenRun, identity: Identity) -> "tuple[LoadedModel, Evaluator]":
    with collector_paused():
        return load_evaluator(run.settings, identity.folder, run.plan, run.rank.local_world_size)


def _more_is_asked_for(run: OpenRun, ledger: Ledger) -> bool:
    """Whether a run that is not sealed has conflicts, what a convicted device did, or audits to evaluate again."""
    policy = Policy(audit_fraction=run.settings.audit)
    verdict = judge(len(run.plan.chunks), ledger.copies, policy)
    wanted = set(run.wanted)
    asked = any(request.chunk in wanted for request in requests(run.plan, ledger.copies, verdict, policy).wanted)
    return asked and not is_sealed(run.store)


def take_over(run: OpenRun, identity: Run, ledger: Ledger) -> None:
    """Record missing chunks by the results of the runs that `--reuse-from` names; says how many.

    Raises UsageError where one of them is no run, IdentityMismatch where it is of another model or dtype.
    """
    for url in run.settings.reuse_from or []:
        other = open_started(run.settings, url, run.stop)
        compare_runs(other.run, msgspec.structs.replace(identity, plan=other.run.plan, plan_url=other.run.plan_url))
        other_ledger = Ledger(other.store, other.plan, other.run.id())
        other_ledger.refresh()
        source = Reusable(other.run, other.plan, other_ledger, judge(len(other.plan.chunks), other_ledger.copies))
        missing = set(run.wanted) - ledger.recorded
        taken = 0
        for key, data, number in reuse(identity, run.plan, missing, source, partial(load_chunk, run.plan_store)):
            run.store.create(key, data)
            taken += number
        run.progress.say(f"took over {taken} of {len(missing)} missing chunks from {url}")
        ledger.refresh()


def send_spool(run: OpenRun, identity: Run) -> None:
    """Upload what an earlier process left on this machine; says what it did."""
    sent = upload_spool(run.store, identity.id(), run.plan.digest(), stop=lambda: bool(run.stop))
    if sent.keys:
        run.progress.say(f"uploaded {len(sent.keys)} segments that an earlier process had left on this machine")
    for sentence in sent.refused:
        run.progress.say(sentence)
