"""Opening a run: its stores, its rank, its plan, and its identity, which is established beside everything else."""

import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from everplex.conclude import Merge
from everplex.loading import check_model
from everplex.planning import obtain_plan
from everplex.preempt import Stop
from everplex.progress import Progress
from everplex.rank import Rank, detect_rank
from everplex.settings import Settings
from everplex.stages.checkpoint import locate, saved_dtype
from everplex.stages.records import ModelSpec, Plan, Run
from everplex.stages.stored import MEND_PLAN, compare_runs, load_plan, load_run, save_run
from everplex.stages.weights import digest_model
from everplex.storage.errors import CorruptObjectError, ObjectNotFoundError, StoreRefusedError, UsageError
from everplex.storage.local import LocalStore, cache_folder
from everplex.storage.probe import honours_conditional_create
from everplex.storage.retry import RetryingStore, RetryPolicy
from everplex.storage.store import open_store


@dataclass(frozen=True)
class OpenRun:
    """A run at hand: settings, place in the world, stores and plan."""

    settings: Settings
    rank: Rank
    store: RetryingStore
    plan_store: RetryingStore
    plan: Plan
    stop: Stop
    progress: Progress

    @property
    def selected(self) -> frozenset[str] | None:
        """Ids of the chunks in the groups that were asked for; None for all. Raises UsageError for an unknown group."""
        wanted = self.settings.group_names()
        if wanted is None:
            return None
        names = [group.name for group in self.plan.groups]
        for name in wanted:
            if name not in names:
                raise UsageError(f"--groups: the plan has no group {name!r}; it has {', '.join(map(repr, names))}")
        groups = self.plan.chunks.group
        return frozenset(
            chunk for chunk, group in zip(self.plan.chunk_ids(), groups, strict=True) if names[group] in wanted
        )

    @property
    def wanted(self) -> Collection[str]:
        """Ids of the chunks to evaluate: those selected, or all."""
        selected = self.selected
        return self.plan.chunk_ids() if selected is None else selected

    def stored_run(self) -> Run | None:
        """Return the identity that the store has; None where nothing was evaluated yet."""
        try:
            return load_run(self.store)
        except ObjectNotFoundError:
            return None

    def given_run(self, model_digest: str, folder: Path) -> Run:
        """Return the identity of what this command asks for."""
        settings = self.settings
        return Run(
            plan=self.plan.digest(),
            plan_url=self.plan_store.url if settings.plan else None,
            model=ModelSpec(name=str(settings.model), digest=model_digest, revision=settings.revision),
            dtype=saved_dtype(folder) if settings.dtype == "auto" else settings.dtype,
        )


def open_out(settings: Settings, url: str | None = None, stop: Stop | None = None) -> RetryingStore:
    """Open the store of a run, or another that the command names."""
    settings.need("out")
    return open_store(
        url or str(settings.out),
        options=settings.store_options(),
        retry=RetryPolicy(budget_seconds=settings.store_retry_seconds),
        stop=None if stop is None else stop.event,
    )


def open_started(settings: Settings, url: str | None = None, stop: Stop | None = None) -> Merge:
    """Open a run to read it. Raises UsageError where none has started, CorruptObjectError where its plan is gone."""
    store = open_out(settings, url, stop)
    try:
        run = load_run(store)
    except ObjectNotFoundError as error:
        raise UsageError(f"{store.url} holds no run that has started; give the --out of one") from error
    plan_store = open_out(settings, run.plan_url, stop) if run.plan_url else store
    try:
        return Merge(store, plan_store, load_plan(plan_store), run)
    except ObjectNotFoundError as error:
        raise CorruptObjectError(f"{error}, and the run {store.url} is of that plan; {MEND_PLAN}") from error


def open_run(settings: Settings, stop: Stop, progress: Progress) -> OpenRun:
    """Open a run for evaluation, and plan it where that is still to be done."""
    if settings.nproc > 1 and not (settings.rank is None and settings.world_size is None):
        raise UsageError(
            f"--nproc {settings.nproc} numbers its ranks itself: leave out --rank and --world-size, or start each rank "
            "as a process of its own without --nproc"
        )
    rank = detect_rank(os.environ, settings.rank, settings.world_size)
    if str(settings.out).startswith("memory://") and (rank.world_size or settings.nproc) > 1:
        raise UsageError("memory:// lives in one process and this run has several ranks; give a folder or a URL as OUT")
    check_model(settings)
    store = open_out(settings, stop=stop)
    plan_store = open_out(settings, settings.plan, stop) if settings.plan else store
    if rank.is_first and not isinstance(store.inner, LocalStore):
        _tell_capability(store, progress)
    plan = obtain_plan(settings, rank, plan_store, stop, progress)
    return OpenRun(settings, rank, store, plan_store, plan, stop, progress)


def _tell_capability(store: RetryingStore, progress: Progress) -> None:
    """Say so, once, where the store lets two writers make one object."""
    try:
        honours = honours_conditional_create(store)
    except StoreRefusedError:  # a policy that allows segments alone: nothing rests on the answer
        return
    if not honours:
        progress.say(
            f"{store.url} does not refuse to make an object twice; results stay right, some work may be done twice"
        )


class Identity:
    """What the run is of: the weights are hashed in a thread, then compared with the store's or stored.

    The early comparison covers all that is known without hashing, so that only other weights are found late.
    """

    def __init__(self, run: OpenRun, digest: Callable[[Path], str] | None = None) -> None:
        self._run = run
        self._digest = digest or (lambda folder: digest_model(folder, cache_folder=cache_folder()))
        self.folder = locate(str(run.settings.model), run.settings.revision)
        self.stored = run.stored_run()
        if self.stored is not None:
            compare_runs(self.stored, run.given_run(self.stored.model.digest, self.folder))
        self._future: Future[Run] = Future()
        # A daemon, so that hashing a large model never keeps a preempted process alive.
        threading.Thread(target=self._establish, name="everplex-identity", daemon=True).start()

    def _establish(self) -> None:
        try:
            self._future.set_result(self._compare())
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the result
            self._future.set_exception(error)

    def _compare(self) -> Run:
        return save_run(self._run.store, self._run.given_run(self._digest(self.folder), self.folder))

    def result(self) -> Run:
        """Wait for the identity. Raises IdentityMismatch, or what made hashing or the store fail."""
        return self._future.result()

    def early(self) -> Run:
        """Return the identity that the store has, not yet compared to the last; waits where there is none."""
        return self.stored or self.result()
