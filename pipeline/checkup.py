"""`everplex doctor`: looks at the environment, the store and the run, and says for each finding what to do."""

from collections.abc import Iterator, Sequence

from everplex.check_environment import check_environment
from everplex.check_run import check_run
from everplex.check_store import check_store
from everplex.findings import Diagnosis, Finding
from everplex.opening import open_out
from everplex.run_status import StatusReader
from everplex.settings import make_settings
from everplex.stages.layout import RUN_KEY
from everplex.storage.errors import ObjectNotFoundError
from everplex.storage.store import Store

_RETRY_SECONDS = 10.0


def doctor(out: str | None = None, *, store_option: Sequence[str] | None = None) -> Diagnosis:
    """Check this machine and, where OUT is given, its store and the run in it. Raises UsageError for a bad OUT."""
    findings = list(check_environment())
    if out is not None:
        findings += _check_out(out, store_option)
    return Diagnosis(findings=findings)


def _check_out(out: str, store_option: Sequence[str] | None) -> Iterator[Finding]:
    options = None if store_option is None else list(store_option)
    settings = make_settings({"out": out, "store_option": options, "store_retry_seconds": _RETRY_SECONDS})
    store = open_out(settings)
    works = True
    for finding in check_store(store):
        works = works and finding.severity in {"good", "note"}
        yield finding
    if not works:
        return
    if _holds_something(store):
        yield from check_run(StatusReader(store, lambda url: open_out(settings, url)))
    else:
        yield Finding(area="run", severity="note", what=f"{store.url} holds no run yet")


def _holds_something(store: Store) -> bool:
    try:
        store.get(RUN_KEY)
    except ObjectNotFoundError:
        return next(store.list("plan/"), None) is not None
    return True
