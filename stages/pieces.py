"""A long text, tokenised in overlapping pieces: on all cores, in bounded memory, with the tokens of the whole text.

Of two neighbouring pieces, one is cut off behind their overlap and the other before it. Where both give the same tokens
at the same characters all through the middle of it, neither cut was felt there. Where they don't, as in a run of
letters longer than the overlap, there is no joining them.

Shape legend: T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LONG_CHARACTERS", "PlacedTokens", "encode_in_pieces"]

_PIECE = 1 << 18
"""Characters of a piece without its overlaps."""
_OVERLAP = 1 << 12
"""Characters that a piece has beyond a cut; in the nearer half of them it must agree with its neighbour."""
_AT_ONCE = 4
LONG_CHARACTERS = 2 * _PIECE
"""A text that is longer is tokenised in pieces; tokenising takes some 150 bytes of memory a character."""


class PlacedTokens(NamedTuple):
    """Tokens of a text, and the characters at which they begin."""

    ids_T: NDArray[np.int32]
    starts_T: NDArray[np.int64]

    def part(self, start: int, stop: int | None = None) -> "PlacedTokens":
        """Return some of the tokens."""
        return PlacedTokens(self.ids_T[start:stop], self.starts_T[start:stop])

    def equals(self, other: "PlacedTokens") -> bool:
        """Whether these are the same tokens at the same characters."""
        return np.array_equal(self.ids_T, other.ids_T) and np.array_equal(self.starts_T, other.starts_T)


def encode_in_pieces(text: str, encode: Callable[[Sequence[str]], list[PlacedTokens]]) -> NDArray[np.int32] | None:
    """Return the token ids of a text, given what encodes parts of it; None where two pieces do not agree."""
    joined: list[NDArray[np.int32]] = []
    last: PlacedTokens | None = None
    for begin, piece in _pieces(text, encode):
        if last is None:
            last = piece
            continue
        (stop, shared), (start, same) = _middle(last, begin), _middle(piece, begin)
        if not len(shared.ids_T) or not shared.equals(same):
            return None
        joined.append(last.ids_T[:stop])
        last = piece.part(start)
    return np.concatenate([*joined, last.ids_T]) if last else np.zeros(0, dtype=np.int32)


def _pieces(text: str, encode: Callable[[Sequence[str]], list[PlacedTokens]]) -> Iterator[tuple[int, PlacedTokens]]:
    """Yield where each piece begins, without its overlap, and its tokens at the characters of the text."""
    begins = range(0, len(text), _PIECE)
    for first in range(0, len(begins), _AT_ONCE):
        some = begins[first : first + _AT_ONCE]
        parts = [text[max(0, begin - _OVERLAP) : begin + _PIECE + _OVERLAP] for begin in some]
        for begin, piece in zip(some, encode(parts), strict=True):
            yield begin, piece._replace(starts_T=piece.starts_T + max(0, begin - _OVERLAP))


def _middle(piece: PlacedTokens, cut: int) -> tuple[int, PlacedTokens]:
    """Return the tokens that begin in the middle of the overlap around a cut, and how many come before them."""
    start, stop = np.searchsorted(piece.starts_T, (cut - _OVERLAP // 2, cut + _OVERLAP // 2)).tolist()
    return start, piece.part(start, stop)
