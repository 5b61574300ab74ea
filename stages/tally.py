"""From the losses of a chunk's targets to its record: sums on the host, each correctly rounded. No torch.

Shape legend: S scored targets of a chunk in plan order, M all targets, R rows.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everplex.stages.chunk import Chunk
from everplex.stages.records import Kind, Record


@dataclass(frozen=True, eq=False)
class Losses:
    """What the evaluator gives for a chunk, and how it was computed."""

    nll_S: NDArray[np.floating]
    """Loss in nats of each scored target, in plan order."""
    batch_shape: list[tuple[int, int]]
    """Rows and padded length of each batch."""
    batch_tokens: int
    seconds: float


def make_record(
    chunk_id: str, content: str, chunk: Chunk, losses: Losses, *, kind: Kind = "work", rank: int | None = None
) -> Record:
    """Sum a chunk's losses per document, per position and in all.

    Sums are rounded once (`math.fsum`), so the order of the batches cannot matter. A loss that is not finite is
    counted, and leaves every sum null.
    """
    given_S = losses.nll_S.astype(np.float64)
    finite_S = np.isfinite(given_S)
    finite = bool(finite_S.all())
    nll_S = np.where(finite_S, given_S, 0.0)
    row_S, position_S = _where(chunk)
    documents = _sum_by(chunk.row_documents_R[row_S], nll_S)
    positions = _sum_by(np.frexp(position_S)[1].astype(np.int64), nll_S)
    buckets = range(max(positions, default=-1) + 1)
    return Record(
        chunk=chunk_id,
        content=content,
        kind=kind,
        rank=rank,
        nll=math.fsum(nll_S.tolist()) if finite else None,
        nll_sq=math.fsum((nll_S * nll_S).tolist()) if finite else None,
        tokens=len(nll_S),
        doc_ordinals=list(documents),
        doc_nll=[nll for nll, _ in documents.values()] if finite else None,
        doc_tokens=[tokens for _, tokens in documents.values()],
        position_nll=[positions.get(bucket, (0.0, 0))[0] for bucket in buckets] if finite else None,
        position_tokens=[positions.get(bucket, (0.0, 0))[1] for bucket in buckets],
        nll_max=float(nll_S.max()) if finite and len(nll_S) else None,
        nonfinite=int(np.count_nonzero(~finite_S)),
        token_digest=hashlib.sha256(given_S.astype("<f4").tobytes()).hexdigest(),
        batch_tokens=losses.batch_tokens,
        batch_shape=losses.batch_shape,
        seconds=losses.seconds,
        sums=_weighted(chunk, row_S, nll_S) if finite else {},
    )


def _where(chunk: Chunk) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each scored target, and its position among its row's targets."""
    targets_R = chunk.row_lengths_R.astype(np.int64) - 1
    row_M = np.repeat(np.arange(chunk.num_rows), targets_R)
    position_M = np.arange(len(row_M)) - np.repeat(np.cumsum(targets_R) - targets_R, targets_R)
    return row_M[chunk.scored_M], position_M[chunk.scored_M]


def _sum_by(key_S: NDArray[np.int64], nll_S: NDArray[np.float64]) -> dict[int, tuple[float, int]]:
    """Return the sum and the number of the losses under each key, in the order of the keys."""
    if not len(key_S):
        return {}
    order_S = np.argsort(key_S, kind="stable")
    sorted_S = key_S[order_S]
    starts = np.flatnonzero(np.diff(sorted_S, prepend=sorted_S[0] - 1))
    parts = np.split(nll_S[order_S], starts[1:])
    return {
        int(sorted_S[start]): (math.fsum(part.tolist()), len(part)) for start, part in zip(starts, parts, strict=True)
    }


def _weighted(chunk: Chunk, row_S: NDArray[np.int64], nll_S: NDArray[np.float64]) -> dict[str, float]:
    if chunk.row_weights_R is None:
        return {}
    rows = _sum_by(row_S, nll_S)
    return {
        "weighted_nll": math.fsum(chunk.row_weights_R[row] * (nll / tokens) for row, (nll, tokens) in rows.items()),
        "weights": math.fsum(chunk.row_weights_R[list(rows)]),
    }
