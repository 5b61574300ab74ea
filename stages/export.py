"""Tables of a run: its chunks, documents, groups and workers as rows, and its results as lm-eval writes them."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from everplex.stages.copies import Source
from everplex.stages.coverage import read_table
from everplex.stages.derive import perplexity
from everplex.stages.judge import MISSING, Verdict
from everplex.stages.ledger import Ledger
from everplex.stages.records import Plan, Record
from everplex.stages.summary import Numbers, Summary
from everplex.stages.totals import concatenate, document_parts, join, read_copies
from everplex.storage.store import Store

TableName = Literal["chunks", "documents", "groups", "workers"]
Row = dict[str, Any]

LM_EVAL_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity")
"""Metrics of a results file; the first three are those of lm-eval's own perplexity tasks."""


class Counted(NamedTuple):
    """A run as it was read: what it is of, what is there, and which of it counts."""

    plan: Plan
    ledger: Ledger
    verdict: Verdict
    plan_store: Store

    def records(self) -> Iterator[tuple[Source, list[int], list[Record]]]:
        """Yield the records that count, by the segment they come from, with the plan's rows of their chunks."""
        winners = self.verdict.winners
        return read_copies(self.ledger, winners[winners != MISSING])


def chunk_rows(counted: Counted) -> Iterator[Row]:
    """Yield a row per chunk of the plan, in its order; one that does not count has no loss."""
    plan = counted.plan
    columns = msgspec.structs.asdict(plan.chunks)
    known = {
        row: (source, record)
        for source, rows, records in counted.records()
        for row, record in zip(rows, records, strict=True)
    }
    for index, chunk in enumerate(plan.chunk_ids()):
        row: Row = {"chunk": chunk, **{name: values[index] for name, values in columns.items()}}
        row["group"] = plan.groups[row["group"]].name
        source, record = known.get(index, (None, None))
        row |= _losses(None if record is None else record.nll, row["tokens"])
        row |= {
            "nll_max": None if record is None else record.nll_max,
            "seconds": None if record is None else record.seconds,
            "worker": None if source is None else source.worker,
            "device": None if source is None else source.device,
            "rank": None if source is None else source.rank,
            "counted": record is not None,
        }
        yield row


def document_rows(counted: Counted) -> Iterator[Row]:
    """Yield a row per document, in the order of the plan.

    One that is not wholly counted has no loss. Nor has any where the protocol joins documents into a stream.
    """
    plan = counted.plan
    by_document = plan.protocol.unit == "document"
    nll, tokens = _documents(counted) if by_document else ({}, {})
    for index, group in enumerate(plan.groups):
        rows = (row for key in group.document_tables for row in read_table(counted.plan_store, key))
        for ordinal, row in enumerate(rows):
            whole = by_document and tokens.get((index, ordinal), 0) == row.tokens
            yield {
                "group": group.name,
                "ordinal": ordinal,
                **msgspec.structs.asdict(row),
                **_losses(nll.get((index, ordinal), 0.0) if whole else None, row.tokens),
                "counted": whole,
            }


def group_rows(summary: Summary) -> Iterator[Row]:
    """Yield the numbers of each group, sorted by name."""
    for name, numbers in sorted(summary.groups.items()):
        row = msgspec.structs.asdict(numbers)
        sums = row.pop("sums")
        yield {"group": name, **row, **{f"sum_{key}": value for key, value in sums.items()}}


def worker_rows(summary: Summary) -> Iterator[Row]:
    """Yield what each worker contributed."""
    for worker in summary.workers:
        row = msgspec.to_builtins(worker)
        requests = row.pop("store_requests")
        row.pop("profile", None)
        yield {**row, "store_requests": sum(count for name, count in requests.items() if name != "retries")}


def lm_eval_results(summary: Summary, date: float, limit: int | None = None) -> dict[str, Any]:
    """Return the results in the layout of lm-eval 0.4.13's results files; `date` is in seconds since the epoch.

    Every group is a task. Where there are several, the whole is a group of tasks named `everplex`, with an underscore
    where a group has that name. `limit` is the number of documents after which no more were read.
    """
    several = len(summary.groups) > 1
    tasks = {name: _metrics(name, numbers) for name, numbers in sorted(summary.groups.items())}
    total = "everplex"
    while total in tasks:
        total += "_"
    whole = {total: _metrics(total, summary)} if several else {}
    everything = {**tasks, **whole}
    return {
        "results": everything,
        **({"groups": whole} if several else {}),
        "group_subtasks": {total: list(tasks)} if several else {},
        "configs": {name: _task_config(name, summary) for name in tasks},
        "versions": dict.fromkeys(everything, summary.protocol.version),
        "n-shot": dict.fromkeys(everything, 0),
        "higher_is_better": {name: dict.fromkeys(LM_EVAL_METRICS, False) for name in everything},
        "n-samples": {
            name: {"original": summary.groups[name].documents, "effective": summary.groups[name].documents}
            for name in tasks
        },
        "config": {
            "model": "everplex",
            "model_args": {"pretrained": summary.model.name, "dtype": summary.dtype},
            "model_dtype": f"torch.{summary.dtype}",
            "model_revision": summary.model.revision or "main",
            "model_sha": summary.model.digest,
            "limit": limit,
        },
        "date": date,
        "max_length": summary.protocol.context,
        "model_source": "everplex",
        "model_name": summary.model.name,
        "model_name_sanitized": summary.model.name.replace("/", "__"),
    }


def _losses(nll: float | None, tokens: int) -> Row:
    return {
        "nll": nll,
        "nll_per_token": None if nll is None or not tokens else nll / tokens,
        "perplexity": None if nll is None else perplexity(nll, tokens),
    }


def _documents(counted: Counted) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], int]]:
    """Return loss and counted tokens of each document, by its group in the plan and its ordinal there."""
    group = counted.plan.chunks.group
    parts = [document_parts([group[row] for row in rows], records) for _, rows, records in counted.records()]
    whole = join(concatenate(parts))
    keys = list(zip(whole.group_D.tolist(), whole.ordinal_D.tolist(), strict=True))
    return dict(zip(keys, whole.nll_D.tolist(), strict=True)), dict(zip(keys, whole.tokens_D.tolist(), strict=True))


def _metrics(name: str, numbers: Numbers) -> dict[str, Any]:
    metrics: dict[str, Any] = {"name": name, "alias": name, "sample_len": numbers.documents}
    for metric in LM_EVAL_METRICS:
        value = getattr(numbers, metric)
        if value is not None:
            metrics |= {f"{metric},none": value, f"{metric}_stderr,none": "N/A"}
    if numbers.perplexity is not None and numbers.stderr is not None:
        metrics["perplexity_stderr,none"] = numbers.perplexity * numbers.stderr
    return metrics


def _task_config(name: str, summary: Summary) -> dict[str, Any]:
    return {
        "task": name,
        "output_type": "loglikelihood_rolling",
        "num_fewshot": 0,
        "metric_list": [{"metric": metric} for metric in LM_EVAL_METRICS],
        "metadata": {"version": summary.protocol.version, "protocol": summary.protocol.label, "plan": summary.plan},
    }
