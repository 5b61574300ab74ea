"""A chunk's input: self-contained token rows with the mask of scored targets, as zstd of safetensors.

Shape legend: N tokens of all rows, R rows, M = N - R targets (a row of n tokens has n - 1 inputs and n - 1 targets,
its second to last token).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from everplex.storage.codec import compress, decompress
from everplex.storage.errors import CorruptObjectError


class Row(NamedTuple):
    """One window: `tokens[:-1]` are the inputs at positions 0, 1, …, `tokens[1:]` their targets."""

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]
    document: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """The unit of work: windows of one group, without any text or document id."""

    tokens_N: NDArray[np.int32]
    row_lengths_R: NDArray[np.int32]
    scored_M: NDArray[np.bool_]
    """Which targets count; rows one after another."""
    row_documents_R: NDArray[np.int64]
    """Ordinal, in the group, of the sampling unit that each row belongs to."""
    row_weights_R: NDArray[np.float64] | None = None
    """Weight of each row's mean loss in the sum `weighted_nll`, where a protocol asks for one."""

    @property
    def num_rows(self) -> int:
        """Number of windows."""
        return len(self.row_lengths_R)

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model."""
        return len(self.scored_M)

    @property
    def num_scored(self) -> int:
        """Targets that count."""
        return int(np.count_nonzero(self.scored_M))

    def rows(self) -> Iterator[Row]:
        """Yield the windows in plan order."""
        start = 0
        for index, length in enumerate(self.row_lengths_R.tolist()):
            mask = slice(start - index, start - index + length - 1)
            yield Row(self.tokens_N[start : start + length], self.scored_M[mask], int(self.row_documents_R[index]))
            start += length

    def content(self) -> str:
        """Content digest: tokens, rows (so positions) and the scored mask, without the documents' ordinals."""
        digest = hashlib.sha256(b"everplex chunk 1\n")
        for array in (self.row_lengths_R.astype("<i4"), self.tokens_N.astype("<i4"), np.packbits(self.scored_M)):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
        if self.row_weights_R is not None:
            digest.update(self.row_weights_R.astype("<f8").tobytes())
        return digest.hexdigest()


def encode_chunk(chunk: Chunk) -> bytes:
    """Bytes of a chunk object; equal chunks give equal content."""
    tensors: dict[str, NDArray[np.generic]] = {
        "tokens": chunk.tokens_N.astype("<i4"),
        "row_lengths": chunk.row_lengths_R.astype("<i4"),
        "scored": np.packbits(chunk.scored_M),
        "row_documents": chunk.row_documents_R.astype("<i8"),
    }
    if chunk.row_weights_R is not None:
        tensors["row_weights"] = chunk.row_weights_R.astype("<f8")
    return compress(save(tensors))


def decode_chunk(data: bytes, where: str, content: str) -> Chunk:
    """Chunk of a chunk object, proved to be the one the plan names by its content digest.

    Raises CorruptObjectError, naming `where`, for anything else.
    """
    try:
        tensors = load(decompress(data, where))
        row_lengths_R = tensors["row_lengths"]
        num_targets = int(row_lengths_R.sum()) - len(row_lengths_R)
        chunk = Chunk(
            tokens_N=tensors["tokens"],
            row_lengths_R=row_lengths_R,
            scored_M=np.unpackbits(tensors["scored"], count=num_targets).astype(np.bool_),
            row_documents_R=tensors["row_documents"],
            row_weights_R=tensors.get("row_weights"),
        )
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptObjectError(f"{where}: not a chunk ({error})") from error
    found = chunk.content()
    if found != content:
        raise CorruptObjectError(f"{where}: expected content {content[:24]}, found {found[:24]}")
    return chunk
