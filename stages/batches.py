"""Pack the windows of a chunk into batches with little padding. No torch.

Shape legend: R rows (windows) of a chunk, M targets of all rows, B rows of a batch, T its padded length, S scored
targets.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.chunk import Chunk


class HostBatch(NamedTuple):
    """Some windows of a chunk, padded on the right, on the host."""

    ids_BT: NDArray[np.int64]
    mask_BT: NDArray[np.int64] | None
    """1 for a token, 0 for padding; None where there is no padding."""
    positions_S: NDArray[np.int64]
    """Where, in the flattened batch, the scored targets are predicted."""
    targets_S: NDArray[np.int64]
    order_S: NDArray[np.int64]
    """Which of the chunk's scored targets they are, in plan order."""


def make_batches(chunk: Chunk, batch_tokens: int, overhead_tokens: int) -> Iterator[HostBatch]:
    """Yield the batches of a chunk, longest windows first, at most `batch_tokens` padded tokens each.

    A window longer than that is a batch of its own. Inputs behind a window's last scored target are left out, and so
    are windows without one. The same chunk and the same two numbers give the same batches.
    """
    targets_R = chunk.row_lengths_R.astype(np.int64) - 1
    starts_R = np.cumsum(targets_R) - targets_R
    rank_M = np.cumsum(chunk.scored_M) - 1
    row_M = np.repeat(np.arange(chunk.num_rows), targets_R)
    inputs_R = np.zeros(chunk.num_rows, dtype=np.int64)
    scored_at = np.flatnonzero(chunk.scored_M)
    np.maximum.at(inputs_R, row_M[scored_at], scored_at - starts_R[row_M[scored_at]] + 1)
    rows_R = np.argsort(-inputs_R, kind="stable")[: np.count_nonzero(inputs_R)]
    for first, last in split(inputs_R[rows_R], batch_tokens, overhead_tokens):
        rows_B = rows_R[first:last]
        length = int(inputs_R[rows_B[0]])
        column_1T = np.arange(length)[None]
        valid_BT = column_1T < inputs_R[rows_B, None]
        target_BT = np.where(valid_BT, starts_R[rows_B, None] + column_1T, 0)
        token_BT = np.where(valid_BT, target_BT + rows_B[:, None], 0)
        scored_BT = valid_BT & chunk.scored_M[target_BT]
        yield HostBatch(
            ids_BT=np.where(valid_BT, chunk.tokens_N[token_BT], 0).astype(np.int64),
            mask_BT=None if valid_BT.all() else valid_BT.astype(np.int64),
            positions_S=np.flatnonzero(scored_BT),
            targets_S=chunk.tokens_N[token_BT[scored_BT] + 1].astype(np.int64),
            order_S=rank_M[target_BT[scored_BT]],
        )


def split(lengths_R: NDArray[np.int64], batch_tokens: int, overhead_tokens: int) -> list[tuple[int, int]]:
    """Split rows, sorted by falling length, into runs that cost least: padded tokens plus an overhead per batch.

    Dynamic programming over the end of the last run; returns the first row of each run and the one behind its last.
    """
    count = len(lengths_R)
    cost = np.full(count + 1, np.inf)
    cost[0] = 0
    came_from = np.zeros(count + 1, dtype=np.int64)
    for first, length in enumerate(lengths_R.tolist()):
        sizes = np.arange(1, min(count - first, max(1, batch_tokens // length)) + 1)
        offered = cost[first] + length * sizes + overhead_tokens
        ends = slice(first + 1, first + 1 + len(sizes))
        better = offered < cost[ends]
        cost[ends][better] = offered[better]
        came_from[ends][better] = first
    runs: list[tuple[int, int]] = []
    end = count
    while end:
        runs.append((int(came_from[end]), end))
        end = runs[-1][0]
    return runs[::-1]
