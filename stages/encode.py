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

__all__ = ["Encoded", "count_text", "encode_documents", "encode_texts"]


_EMPTY = np.zeros(0, dtype=np.int32)


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
    """Tokenise documents by the protocol's policy; texts that it joins are only counted."""
    texts = [document.content for document in documents if isinstance(document.content, str)]
    if protocol.join == "text":
        return [Encoded(_EMPTY, None, count_text(text)) for text in texts]
    encoded = encode_texts(texts, tokenizer, protocol)
    return [Encoded(tokens_N, None, count_text(text)) for tokens_N, text in zip(encoded, texts, strict=True)]


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, protocol: Protocol) -> list[NDArray[np.int32]]:
    """Token ids of whole texts, with the special tokens of the protocol's policy."""
    match protocol.special_tokens:
        case "default":
            batch = tokenizer.encode_by_default(texts)
        case "bos":
            bos = [tokenizer.bos_id] if tokenizer.bos_id is not None and tokenizer.adds_bos else []
            batch = [bos + ids for ids in tokenizer.encode_batch(texts, parse_special=protocol.parse_special)]
        case "none":
            batch = tokenizer.encode_batch(texts, parse_special=protocol.parse_special)
    return [np.array(ids, dtype=np.int32) for ids in batch]
