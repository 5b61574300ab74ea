"""Which documents are wholly counted where only a part of the chunks is: only they have numbers per byte and word.

Shape legend: D documents of a group, C its chunks.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everplex.stages.records import Counts, DocumentRow, Plan
from everplex.storage.codec import decompress
from everplex.storage.errors import CorruptObjectError
from everplex.storage.store import Store

_decoder = msgspec.json.Decoder(DocumentRow)


class Covered(NamedTuple):
    """Per group of the plan, its fully covered documents and their sizes."""

    documents: dict[int, NDArray[np.bool_]]
    counts: dict[int, Counts]


def whole_counts(plan: Plan) -> dict[int, Counts]:
    """Sizes of all documents, per group of the plan."""
    counts = {index: group.windowless for index, group in enumerate(plan.groups)}
    chunks = plan.chunks
    columns = zip(chunks.group, chunks.documents, chunks.bytes, chunks.characters, chunks.words, strict=True)
    sums = {index: [0, 0, 0, 0] for index in counts}
    for group, *sizes in columns:
        sums[group] = [sum(pair) for pair in zip(sums[group], sizes, strict=True)]
    for group, (documents, size, characters, words) in sums.items():
        counts[group] += Counts(documents=documents, bytes=size, characters=characters, words=words)
    return counts


def nothing_covered(plan: Plan) -> Covered:
    """Return what is said of documents where nothing is known of them."""
    groups = range(len(plan.groups))
    return Covered(
        {index: np.zeros(plan.groups[index].documents, np.bool_) for index in groups},
        {index: Counts() for index in groups},
    )


def covered_documents(plan: Plan, accepted_C: NDArray[np.bool_], store: Store) -> Covered:
    """Find the documents of which every chunk is accepted, from the plan's tables of documents in its `store`.

    Chunks hold the documents' scored tokens in corpus order, so both can be laid along one line of tokens. Where a
    protocol joins documents they have no tokens of their own, and none is covered.
    """
    covered = nothing_covered(plan)
    if plan.protocol.unit != "document":
        return covered
    groups, tokens = np.array(plan.chunks.group), np.array(plan.chunks.tokens, np.int64)
    for index, group in enumerate(plan.groups):
        members = groups == index
        rows = [row for key in group.document_tables for row in read_table(store, key)]
        whole = _covered(np.array([row.tokens for row in rows], np.int64), tokens[members], accepted_C[members])
        covered.documents[index] = whole
        counts = Counts()
        for row, is_whole in zip(rows, whole.tolist(), strict=True):
            if is_whole:
                counts += Counts(documents=1, bytes=row.bytes, characters=row.characters, words=row.words)
        covered.counts[index] = counts
    return covered


def _covered(
    tokens_D: NDArray[np.int64], tokens_C: NDArray[np.int64], accepted_C: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    ends_D, ends_C = np.cumsum(tokens_D), np.cumsum(tokens_C)
    if tokens_D.sum() != tokens_C.sum():
        return np.zeros(len(tokens_D), np.bool_)
    lost = np.concatenate([[0], np.cumsum(~accepted_C)])
    first = np.searchsorted(ends_C, ends_D - tokens_D, side="right")
    last = np.searchsorted(ends_C, ends_D, side="left")
    last = np.minimum(last + 1, len(tokens_C))
    covered: NDArray[np.bool_] = (tokens_D == 0) | (lost[last] == lost[np.minimum(first, len(tokens_C))])
    return covered


def read_table(store: Store, key: str) -> list[DocumentRow]:
    """Read one of a plan's tables of documents. Raises CorruptObjectError."""
    try:
        return [_decoder.decode(line) for line in decompress(store.get(key), key).split(b"\n") if line]
    except msgspec.DecodeError as error:
        raise CorruptObjectError(f"{key}: not a table of documents ({error})") from error
