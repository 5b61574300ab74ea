"""What can be asked of a run in its store, from any machine: its status, its numbers, its tables, its spool.

Each function takes OUT and, as `store_option`, the `key=value` options of its store.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from everplex.conclude import Merge, conclude, demand_complete, publish_report
from everplex.exporting import ExportFormat, encode_export
from everplex.opening import open_out, open_started
from everplex.progress import Progress
from everplex.run_status import Status, StatusReader
from everplex.settings import Settings, make_settings
from everplex.stages.export import TableName
from everplex.stages.spool import Uploaded, upload_spool
from everplex.stages.summary import Summary


def status(out: str, *, store_option: Sequence[str] | None = None) -> Status:
    """Return how far a run is. Raises UsageError where OUT holds neither a run nor a plan."""
    return next(statuses(out, store_option=store_option))


def statuses(out: str, *, store_option: Sequence[str] | None = None) -> Iterator[Status]:
    """Yield the status of a run each time it is asked for, reading only what is new."""
    settings = _settings(out, store_option)
    reader = StatusReader(open_out(settings), lambda url: open_out(settings, url))
    while True:
        yield reader.read()


def report(out: str, *, store_option: Sequence[str] | None = None) -> Summary:
    """Write `report.html` of a run, complete or not, and return its numbers."""
    merge = open_merge(out, store_option)
    summary = _conclude(merge)
    publish_report(merge.store, summary)
    return summary


def read_summary(out: str, *, partial: bool = False, store_option: Sequence[str] | None = None) -> Summary:
    """Return the numbers of a run. Raises IncompleteError where chunks are missing, unless `partial`."""
    summary = _conclude(open_merge(out, store_option))
    if not partial:
        demand_complete(summary, out)
    return summary


def export(
    out: str,
    *,
    format: ExportFormat,  # noqa: A002 - the option's name
    table: TableName = "groups",
    partial: bool = False,
    store_option: Sequence[str] | None = None,
) -> bytes:
    """Return a table of a run, or its results in the layout of lm-eval, as the bytes of a file.

    Raises IncompleteError where chunks are missing, unless `partial`.
    """
    merge = open_merge(out, store_option)
    summary = _conclude(merge)
    if not partial:
        demand_complete(summary, out)
    return encode_export(merge, summary, format, table)


class Sent(NamedTuple):
    """What became of the segments that had waited on this machine."""

    uploaded: int
    refused: list[str]


def send_waiting(out: str, *, store_option: Sequence[str] | None = None) -> Sent:
    """Upload what a vanished store left on this machine."""
    merge = open_merge(out, store_option)
    sent: Uploaded = upload_spool(merge.store, merge.run.id(), merge.run.plan)
    return Sent(len(sent.keys), sent.refused)


def open_merge(out: str, store_option: Sequence[str] | None = None) -> Merge:
    """Open a run that has started. Raises UsageError where there is none."""
    return open_started(_settings(out, store_option))


def _conclude(merge: Merge) -> Summary:
    with closing(Progress()) as progress:
        return conclude(merge, progress)


def _settings(out: str, store_option: Sequence[str] | None) -> Settings:
    return make_settings({"out": out, "store_option": None if store_option is None else list(store_option)})
