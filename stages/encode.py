"""Documents as token ids, the mask of what is scored in them, and the denominators of their text.

Shape legend: N source tokens of a document.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.documents import Document
from everplex.stages.protocols import Protocol
from everplex.stages.records import Counts
from everplex.stages.tokenize import Tokenizer

__all__ = ["Encoded", "count_text", "encode_documents"]


class Encoded(NamedTuple):
    """A document as the cut sees it."""

    tokens_N: NDArray[np.int32]
    scored_N: NDArray[np.bool_] | None
    """Which source tokens may be scored; None for all."""
    counts: Counts


def count_text(text: str) -> Counts:
    r"""Denominators of one document; its words are the pieces of `re.split(r"\s+", text)`, as lm-eval counts them."""
    words = len(text.split())  # splits at the same characters but gives no empty piece at an end
    edges = text[:1].isspace() + text[-1:].isspace()
    return Counts(documents=1, bytes=len(text.encode()), characters=len(text), words=words + edges or 1)


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer, protocol: Protocol) -> list[Encoded]:
    """Tokenise documents by the protocol's policy. Raises UsageError naming the document that cannot be."""
    texts = [document.content for document in documents if isinstance(document.content, str)]
    encoded = iter(encode_texts(texts, tokenizer, protocol))
    return [
        Encoded(next(encoded), None, count_text(document.content))
        for document in documents
        if isinstance(document.content, str)
    ]


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, protocol: Protocol) -> list[NDArray[np.int32]]:
    """Token ids of whole texts."""
    batch = tokenizer.encode_batch(texts, add_special_tokens=False, parse_special=protocol.parse_special)
    return [np.array(ids, dtype=np.int32) for ids in batch]
