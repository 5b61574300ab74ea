"""Tables of a run: its chunks, documents, groups and workers as rows, and its results as lm-eval writes them.

Shape legend: D documents of a group, P parts of them (what one chunk adds to one document).
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from everplex.stages.copies import Source
from everplex.stages.coverage import read_table
from everplex.stages.derive import perplexity
from everplex.stages.exact import from_units, sum_by_key
from everplex.stages.judge import MISSING, Verdict
from everplex.stages.ledger import Ledger
from everplex.stages.records import Plan, Record
from everplex.stages.summary import Numbers, Summary
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

    def records(self) -> Iterator[tuple[int, Source, Record]]:
        """Yield the records that count, with the plan's row of their chunk and the segment they come from."""
        table = self.ledger.copies.table
        copies = self.verdict.winners[self.verdict.winners != MISSING]
        copies = copies[np.lexsort((table["line"][copies], table["source"][copies]))]
        sources, starts = np.unique(table["source"][copies], return_index=True)
        lines = np.split(table["line"][copies], starts[1:])
        chunks = np.split(table["chunk"][copies], starts[1:])  # of nothing, one empty piece
        read = self.ledger.records(dict(zip(sources.tolist(), lines, strict=False)))
        for of_source, (source, records) in zip(chunks, read, strict=False):
            yield from zip(of_source.tolist(), [source] * len(of_source), records, strict=True)


def chunk_rows(counted: Counted) -> Iterator[Row]:
    """Yield a row per chunk of the plan, in its order; one that does not count has no loss."""
    plan = counted.plan
    columns = msgspec.structs.asdict(plan.chunks)
    known = {row: (source, record) for row, source, record in counted.records()}
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
    parts = _document_parts(counted)
    by_document = counted.plan.protocol.unit == "document"
    for index, group in enumerate(counted.plan.groups):
        documents = [row for key in group.document_tables for row in read_table(counted.plan_store, key)]
        nll_D, tokens_D = _join(parts[index], len(documents)) if by_document else ([], [])
        for ordinal, document in enumerate(documents):
            whole = by_document and tokens_D[ordinal] == document.tokens
            yield {
                "group": group.name,
                "ordinal": ordinal,
                **msgspec.structs.asdict(document),
                **_losses(nll_D[ordinal] if whole else None, document.tokens),
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
        yield {**row, "store_requests": sum(count for name, count in requests.items() if name != "retries")}


def lm_eval_results(summary: Summary, date: float) -> dict[str, Any]:
    """Return the results in the layout of lm-eval 0.4.13's results files; `date` is in seconds since the epoch.

    Every group is a task. Where there are several, the whole is a group of tasks named `everplex`.
    """
    several = len(summary.groups) > 1
    tasks = {name: _metrics(name, numbers) for name, numbers in sorted(summary.groups.items())}
    whole = {"everplex": _metrics("everplex", summary)} if several else {}
    everything = {**tasks, **whole}
    return {
        "results": everything,
        **({"groups": whole} if several else {}),
        "group_subtasks": {"everplex": list(tasks)} if several else {},
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
            "limit": None,
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


class _Parts(NamedTuple):
    ordinal_P: list[int]
    nll_P: list[float]
    tokens_P: list[int]


def _document_parts(counted: Counted) -> dict[int, _Parts]:
    """Return what the counted chunks add to documents, per group of the plan."""
    parts: dict[int, _Parts] = defaultdict(lambda: _Parts([], [], []))
    for row, _, record in counted.records():
        mine = parts[counted.plan.chunks.group[row]]
        mine.ordinal_P.extend(record.doc_ordinals)
        mine.nll_P.extend(record.doc_nll or ())
        mine.tokens_P.extend(record.doc_tokens)
    return parts


def _join(parts: _Parts, num_documents: int) -> tuple[list[float], list[int]]:
    """Return each document's loss, rounded once, and how many of its tokens are counted."""
    ordinal_P = np.array(parts.ordinal_P, np.int64)
    nll_D = [from_units(units) for units in sum_by_key(ordinal_P, parts.nll_P, num_documents)]
    tokens_D = np.zeros(num_documents, np.int64)
    np.add.at(tokens_D, ordinal_P, np.array(parts.tokens_P, np.int64))
    return nll_D, tokens_D.tolist()


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
