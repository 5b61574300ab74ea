"""Take over the results of another run for chunks of equal content: a corpus that grew pays for what is new.

A record is about tokens, positions and scored mask, which the content digest covers, and so are model and dtype, which
the caller compares. Only the ordinals of documents belong to a plan, so they are written anew; where the same rows are
spread over documents in another way, the record is of no use and the chunk is evaluated.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from everplex.stages.chunk import Chunk
from everplex.stages.copies import Source
from everplex.stages.judge import MISSING, Verdict
from everplex.stages.ledger import Ledger
from everplex.stages.records import Header, Plan, Record, Run
from everplex.stages.segments import encode_record, encode_segment


class Reusable(NamedTuple):
    """Another run: what it is of, and which of its evaluations count."""

    run: Run
    plan: Plan
    ledger: Ledger
    verdict: Verdict


def reuse(
    run: Run, plan: Plan, missing: set[str], other: Reusable, load: Callable[[str, str], Chunk]
) -> Iterator[tuple[str, bytes, int]]:
    """Yield key, bytes and number of records of segments that record `missing` chunks by what another run found.

    `load` gives a chunk of this plan by id and content. The same inputs give the same segments on every machine.
    """
    wanted = _matches(plan, missing, other)
    table = other.ledger.copies.table
    lines: dict[int, list[int]] = defaultdict(list)
    chunks: dict[int, list[str]] = defaultdict(list)
    for copy, chunk in sorted(wanted):
        index = int(table["source"][copy])
        lines[index].append(int(table["line"][copy]))
        chunks[index].append(chunk)
    worker = hashlib.sha256(f"everplex reuse {run.id()} {other.run.id()}".encode()).hexdigest()[:32]
    records = other.ledger.records({index: np.array(found, np.int32) for index, found in lines.items()})
    for seq, (index, (source, found)) in enumerate(zip(sorted(lines), records, strict=True)):
        taken = [
            renamed
            for chunk, record in zip(chunks[index], found, strict=True)
            if (renamed := _rename(record, chunk, load(chunk, record.content))) is not None
        ]
        if taken:
            header = _header(run, worker, seq, source, other.run)
            yield *encode_segment(header, [encode_record(record) for record in taken]), len(taken)


def _matches(plan: Plan, missing: set[str], other: Reusable) -> list[tuple[int, str]]:
    """Return the counted copy of the other run and the id of the chunk here, where the contents are equal."""
    ids = zip(plan.chunk_ids(), plan.chunks.content, strict=True)
    here: dict[str, list[str]] = defaultdict(list)
    for chunk, content in ids:
        if chunk in missing:
            here[content].append(chunk)
    return [
        (int(copy), chunk)
        for content, copy in zip(other.plan.chunks.content, other.verdict.winners.tolist(), strict=True)
        if copy != MISSING
        for chunk in here.pop(content, [])
    ]


def _rename(record: Record, chunk: str, rows: Chunk) -> Record | None:
    """Return the record as one of `chunk`; None where its documents hold other numbers of tokens."""
    targets_R = rows.row_lengths_R - 1
    documents_S = np.repeat(rows.row_documents_R, targets_R)[rows.scored_M]
    ordinals, tokens = np.unique(documents_S, return_counts=True)
    if tokens.tolist() != record.doc_tokens:
        return None
    return msgspec.structs.replace(record, chunk=chunk, kind="work", doc_ordinals=ordinals.tolist())


def _header(run: Run, worker: str, seq: int, source: Source, other: Run) -> Header:
    return Header(
        run=run.id(),
        plan=run.plan,
        worker=worker,
        seq=seq,
        first=seq,
        rank=source.rank,
        device=source.device,
        environment=source.environment,
        created=source.created,
        reused_from=other.id(),
    )
