"""Getting the plan of a run: made here, found in the store, or waited for."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from everplex.loading import check_tokenizer
from everplex.preempt import Stop
from everplex.progress import Progress
from everplex.rank import Rank
from everplex.settings import Settings
from everplex.stages.checkpoint import CONFIG, max_context, read_config
from everplex.stages.collector import collector_paused
from everplex.stages.layout import CHUNKS_PREFIX
from everplex.stages.plan_options import PlanOptions
from everplex.stages.records import Plan
from everplex.stages.stored import load_plan
from everplex.storage.errors import IncompleteError, ObjectNotFoundError, UsageError
from everplex.storage.store import Store

_POLL_SECONDS = 1.0


def plan_options(settings: Settings) -> PlanOptions:
    """Return what the planner needs of the settings. Raises UsageError for a value that it does not know."""
    settings.need("data")
    if not (settings.tokenizer or settings.model):
        raise UsageError("--tokenizer is missing: give the folder of a tokenizer or model")
    names = PlanOptions.__struct_fields__
    options = {name: value for name, value in msgspec.structs.asdict(settings).items() if name in names}
    options |= {
        "tokenizer": settings.tokenizer or settings.model,
        "groups": settings.group_names(),
        "model_context": _model_context(settings),
    }
    try:
        return msgspec.convert(options, PlanOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"planning option: {error}") from error


def _model_context(settings: Settings) -> int | None:
    """Return the length that the model's configuration allows, where a local folder has one."""
    for folder in (settings.model, settings.tokenizer):
        if folder and (Path(folder) / CONFIG).is_file():
            return max_context(read_config(Path(folder)))
    return None


def obtain_plan(settings: Settings, rank: Rank, store: Store, stop: Stop, progress: Progress) -> Plan:
    """Load the plan, or make it, or wait for another rank to make it.

    The first rank plans at once; others wait until nothing new has appeared for `plan_wait_seconds`, then take over.
    Raises IdentityMismatch where the stored plan is of something else.
    """
    plan: Plan | None
    try:
        with collector_paused():
            plan = load_plan(store)
    except ObjectNotFoundError:
        waits = not settings.data or not rank.is_first
        plan = _wait_for_plan(settings, store, stop, progress) if waits else None
    if plan is None:
        if not settings.data:
            raise UsageError(
                f"{store.url} holds no plan: make one with `everplex plan DATA --tokenizer T --out {store.url}`, "
                "or use `everplex run`"
            )
        if settings.model:
            check_tokenizer(settings, plan_options(settings))
        return make_stored_plan(settings, store, stop, progress)
    if settings.data:
        from everplex.stages.plan import check_plan

        options = plan_options(settings)
        if options.groups is not None:  # a part of what is planned may be evaluated alone
            options = msgspec.structs.replace(options, groups=_planned_groups(plan))
        check_plan(plan, options, verify_data=settings.verify_data)
    return plan


def _planned_groups(plan: Plan) -> list[str] | None:
    return msgspec.convert(plan.corpus.options.get("groups"), list[str] | None)


def make_stored_plan(settings: Settings, store: Store, stop: Stop, progress: Progress) -> Plan:
    """Read the corpus and write the plan into the store."""
    progress.say(f"planning into {store.url}; chunk inputs there hold the corpus's tokens, results never hold text")
    return plan_into(settings, store, stop, progress)


def plan_into(settings: Settings, store: Store, stop: Stop, progress: Progress) -> Plan:
    """Make the plan and show how far it is."""
    from everplex.stages.plan import PlanProgress, make_plan

    def show(state: PlanProgress) -> None:
        kept = f" ({state.kept:,} of them before)" if state.kept else ""
        progress.show(
            f"planning: {state.documents:,} documents{kept}, {state.chunks:,} chunks, {state.tokens:,} tokens"
        )

    plan = make_plan(plan_options(settings), store, progress=show, stop=lambda: bool(stop))
    documents = sum(group.documents for group in plan.groups)
    progress.say(f"planned {documents:,} documents: {len(plan.chunks):,} chunks, {sum(plan.chunks.tokens):,} tokens")
    return plan


def _wait_for_plan(
    settings: Settings,
    store: Store,
    stop: Stop,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Plan | None:
    progress.say(f"waiting for another rank to plan {store.url}")
    newest, seen = clock(), -1
    while not stop:
        try:
            return load_plan(store)
        except ObjectNotFoundError:
            present = sum(1 for _ in store.list(CHUNKS_PREFIX))
        if present > seen:
            newest, seen = clock(), present
            progress.show(f"waiting for the plan: {present:,} chunks so far")
        if clock() - newest >= settings.plan_wait_seconds:
            return None
        stop.event.wait(_POLL_SECONDS)
    raise IncompleteError(f"stopped while waiting for the plan ({stop.reason}); run the same command again to continue")
