"""Exports: a run's tables and results as one file."""

import os
import time
from contextlib import suppress
from typing import Literal

import msgspec

from everplex.conclude import Merge
from everplex.stages.export import (
    Counted,
    TableName,
    chunk_rows,
    document_rows,
    group_rows,
    lm_eval_results,
    worker_rows,
)
from everplex.stages.judge import judge
from everplex.stages.ledger import Ledger
from everplex.stages.stored import load_summary
from everplex.stages.summary import Summary
from everplex.stages.tables import encode_table
from everplex.storage.errors import ObjectNotFoundError, UsageError
from everplex.storage.local import expand_home

ExportFormat = Literal["parquet", "csv", "jsonl", "lm-eval"]


def encode_export(merge: Merge, summary: Summary, form: ExportFormat, table: TableName) -> bytes:
    """Return a table of the run, or with `lm-eval` its results file."""
    if form == "lm-eval":
        limit = msgspec.convert(merge.plan.corpus.options.get("limit_documents"), int | None)
        return msgspec.json.format(msgspec.json.encode(lm_eval_results(summary, time.time(), limit)), indent=2) + b"\n"
    match table:
        case "chunks":
            rows = chunk_rows(_counted(merge))
        case "documents":
            rows = document_rows(_counted(merge))
        case "groups":
            rows = group_rows(summary)
        case "workers":
            rows = worker_rows(summary)
    return encode_table(rows, form)


def _counted(merge: Merge) -> Counted:
    """Read what counts: of a sealed run, what its seal lists."""
    ledger = Ledger(merge.store, merge.plan, merge.run.id())
    try:
        ledger.read_keys(load_summary(merge.store).segments)
    except ObjectNotFoundError:
        ledger.refresh()
    return Counted(merge.plan, ledger, judge(len(merge.plan.chunks), ledger.copies), merge.plan_store)


def write_file(path: str, data: bytes) -> None:
    """Write a whole file or none; one that is there is replaced, where a link leads too. Raises UsageError.

    A device or a pipe, such as /dev/stdout, is written to and stays what it is.
    """
    target = expand_home(path)
    special = target.exists() and not target.is_file()
    target = target if special else target.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if special:
            target.write_bytes(data)
        else:
            temporary.write_bytes(data)
            temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(f"--output {path}: {error.strerror}; name a file in a folder that may be written") from error
