"""From windows to chunks: rows of one group, bundled greedily in corpus order, so that what is appended comes last.

Shape legend: N source tokens, T tokens of a row.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.arrays import Tokens
from everplex.stages.chunk import Chunk
from everplex.stages.cuts import Window
from everplex.stages.records import Counts

__all__ = ["Bundle", "Bundler", "WindowRow", "cut_row", "make_row"]


class WindowRow(NamedTuple):
    """A window with its tokens: `tokens_T[1:]` are the targets that `scored` masks."""

    tokens_T: NDArray[np.int32]
    scored: NDArray[np.bool_]
    weight: float | None


class Bundle(NamedTuple):
    """A chunk and the denominators of the documents that begin in it."""

    chunk: Chunk
    counts: Counts


def cut_row(window: Window, tokens_N: Tokens, scored_N: NDArray[np.bool_] | None, prefix_id: int | None) -> WindowRow:
    """Return the row of a window."""
    tokens_T = tokens_N[window.start : window.stop]
    if window.prefix != "none":
        kept_T = tokens_T if window.prefix == "before" else tokens_T[1:]
        tokens_T = np.concatenate((np.array([prefix_id], dtype=np.int32), kept_T))
    num_scored = window.stop - window.first_scored
    scored = np.zeros(len(tokens_T) - 1, dtype=np.bool_)
    scored[len(scored) - num_scored :] = True if scored_N is None else scored_N[window.first_scored : window.stop]
    return WindowRow(tokens_T, scored, window.weight)


def make_row(
    window: Window, tokens_N: Tokens, scored_N: NDArray[np.bool_] | None, prefix_id: int | None
) -> WindowRow | None:
    """Return the row of a window; None where nothing in it is scored."""
    if scored_N is not None and not scored_N[window.first_scored : window.stop].any():
        return None
    return cut_row(window, tokens_N, scored_N, prefix_id)


class Bundler:
    """Collects rows until the next one would take a chunk beyond `chunk_tokens` inputs; a longer row is alone."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._clear()

    def add(self, row: WindowRow, unit: int) -> Bundle | None:
        """Take a row of the sampling unit with ordinal `unit`; returns the chunk that is full without it, if any."""
        num_inputs = len(row.scored)
        full = self.take() if self._num_inputs + num_inputs > self._chunk_tokens else None
        self._rows.append(row)
        self._units.append(unit)
        self._num_inputs += num_inputs
        return full

    def count(self, counts: Counts) -> None:
        """Add the denominators of a document whose first row was just taken."""
        self._counts.append(counts)

    def take(self) -> Bundle | None:
        """Return the chunk of the rows that were collected, if any, and begin another."""
        bundle = self.waiting()
        self._clear()
        return bundle

    def restore(self, bundle: Bundle) -> None:
        """Collect the rows of a bundle that waited, at the beginning."""
        weights = bundle.chunk.row_weights_R
        for index, row in enumerate(bundle.chunk.rows()):
            weight = None if weights is None else float(weights[index])
            self.add(WindowRow(row.tokens, row.scored, weight), row.document)
        self.count(bundle.counts)

    def waiting(self) -> Bundle | None:
        """Return the rows that were collected, if any, as a chunk."""
        if not self._rows:
            return None
        weights = [row.weight for row in self._rows if row.weight is not None]
        chunk = Chunk(
            tokens_N=np.concatenate([row.tokens_T for row in self._rows], dtype=np.int32),
            row_lengths_R=np.array([len(row.tokens_T) for row in self._rows], dtype=np.int32),
            scored_M=np.concatenate([row.scored for row in self._rows]),
            row_documents_R=np.array(self._units, dtype=np.int64),
            row_weights_R=np.array(weights, dtype=np.float64) if weights else None,
        )
        return Bundle(chunk, sum(self._counts, Counts()))

    def _clear(self) -> None:
        self._rows: list[WindowRow] = []
        self._units: list[int] = []
        self._counts: list[Counts] = []
        self._num_inputs = 0
