"""Readers of token ids without text: `.npy` arrays and flat binary files. The ids stay in the file until they are cut.

Shape legend: N tokens of a document.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from everplex.stages.plan_options import PlanOptions
from everplex.storage.errors import UsageError
from everplex.storage.inputs import InputStream, open_input, stat_input

__all__ = ["BLOCK_TOKENS", "FileTokens", "Tokens", "blocks", "read_bin", "read_npy"]

BLOCK_TOKENS = 1 << 20
"""So many tokens are held in memory at once."""


class FileTokens:
    """Token ids of one document that lie in an open file; a slice reads what it covers."""

    def __init__(self, source: BinaryIO, offset: int, num_tokens: int, dtype: np.dtype[Any]) -> None:
        self._source = source
        self._offset = offset
        self._num_tokens = num_tokens
        self._dtype = dtype

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, part: slice) -> NDArray[np.int32]:
        start, stop, _ = part.indices(self._num_tokens)
        self._source.seek(self._offset + start * self._dtype.itemsize)
        data = self._source.read((stop - start) * self._dtype.itemsize)
        return _as_ids(np.frombuffer(data, dtype=self._dtype))


def _as_ids(tokens: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """Token ids as int32; what does not fit becomes -1, which no vocabulary has."""
    wide = tokens.astype(np.int64)
    return np.where((wide < 0) | (wide > np.iinfo(np.int32).max), -1, wide).astype(np.int32)


Tokens = NDArray[np.int32] | FileTokens
"""Token ids of one document: in memory, or so many that they are read where they are cut."""


def blocks(tokens: Tokens) -> Iterator[NDArray[np.int32]]:
    """Yield the token ids of a document, so many at a time that memory stays small."""
    for start in range(0, len(tokens), BLOCK_TOKENS):
        yield tokens[start : start + BLOCK_TOKENS]


def read_npy(stream: InputStream, options: PlanOptions) -> Iterator[tuple[int, Tokens]]:  # noqa: ARG001 - as in formats
    """Yield the documents of an array file: the whole of a vector, or each row of a matrix."""
    with open_input(stream.url) as source:
        try:
            version = np.lib.format.read_magic(source)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(source)
        except ValueError as error:
            raise UsageError(f"{stream.url}: expected a .npy array, found something else ({error})") from error
        if dtype.kind not in "iu" or len(shape) not in (1, 2) or (fortran_order and len(shape) == 2):
            raise UsageError(
                f"{stream.url}: expected a vector or a C-ordered matrix of integers, found {dtype} of shape {shape}"
            )
        offset = source.tell()
        _check_size(stream.url, offset + int(np.prod(shape)) * dtype.itemsize)
        num_rows, num_tokens = (1, shape[0]) if len(shape) == 1 else shape
        for row in range(num_rows):
            yield row + 1, _document(source, offset + row * num_tokens * dtype.itemsize, num_tokens, dtype)


def read_bin(stream: InputStream, options: PlanOptions) -> Iterator[tuple[int, Tokens]]:
    """Yield the one document of a flat file of token ids."""
    dtype = _token_dtype(options, stream.url)
    num_tokens, rest = divmod(stat_input(stream.url).stored_bytes, dtype.itemsize)
    if rest:
        raise UsageError(f"{stream.url}: {rest} bytes are left over after the last {dtype}; check --token-dtype")
    with open_input(stream.url) as source:
        yield 1, _document(source, 0, num_tokens, dtype)


def _document(source: BinaryIO, offset: int, num_tokens: int, dtype: np.dtype[Any]) -> Tokens:
    tokens = FileTokens(source, offset, num_tokens, dtype)
    return tokens if num_tokens > BLOCK_TOKENS else tokens[:]


def _token_dtype(options: PlanOptions, url: str) -> np.dtype[Any]:
    if options.token_dtype is None:
        raise UsageError(f"{url}: a flat file does not say what its elements are; give --token-dtype, such as uint16")
    try:
        dtype = np.dtype(options.token_dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "iu":
        raise UsageError(f"--token-dtype: expected an integer type such as uint16, found {options.token_dtype!r}")
    return dtype


def _check_size(url: str, expected: int) -> None:
    found = stat_input(url).stored_bytes
    if found != expected:
        raise UsageError(f"{url}: expected {expected} bytes by its header, found {found}; fetch the file again")
