"""Documents as token ids, the mask of what is scored in them, and the denominators of their text.

Shape legend: N source tokens of a document.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everplex.stages.arrays import BLOCK_TOKENS, Tokens, blocks
from everplex.stages.documents import Conversation, Document, Place, Prompted
from everplex.stages.masked import scored_messages, scored_of_chats, split_prompt
from everplex.stages.plan_options import PlanOptions
from everplex.stages.protocols import Protocol, TokenizerFacts, choose_protocol
from everplex.stages.records import Counts, TokenizerSpec
from everplex.stages.tokenize import TokenizerCard, load_tokenizer
from everplex.storage.errors import UsageError

__all__ = ["Encoded", "Encoder", "choose", "count_text"]

_EMPTY = np.zeros(0, dtype=np.int32)
_COUNT_CHARACTERS = 1 << 20


class Encoded(NamedTuple):
    """A document as the cut sees it."""

    tokens_N: Tokens
    scored_N: NDArray[np.bool_] | None
    """Which source tokens may be scored; None for all."""
    counts: Counts


def count_text(text: str) -> Counts:
    r"""Denominators of one document; its words are the pieces of `re.split(r"\s+", text)`, as lm-eval counts them."""
    num_bytes = num_words = 0
    for start in range(0, len(text), _COUNT_CHARACTERS):  # the words of a long text are many objects
        part = text[start : start + _COUNT_CHARACTERS]
        num_bytes += len(part.encode())
        num_words += len(part.split())  # splits at the same characters but gives no empty piece at an end
        num_words -= start > 0 and not (text[start - 1].isspace() or part[0].isspace())  # one word on either side
    edges = text[:1].isspace() + text[-1:].isspace()
    return Counts(documents=1, bytes=num_bytes, characters=len(text), words=num_words + edges or 1)


class Encoder:
    """Tokenizer and protocol, chosen once: gives every document as the cut wants it."""

    def __init__(self, options: PlanOptions) -> None:
        self._tokenizer = load_tokenizer(
            options.tokenizer, options.revision, trust_remote_code=options.trust_remote_code
        )
        self._loss_on = options.loss_on
        self.protocol, self.tokenizer_spec = choose(options, self._tokenizer.card(options.prefix_id))
        self.prefix_id = self.tokenizer_spec.prefix_id

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Tokenise documents by the protocol's policy; texts that it joins are only counted.

        Raises UsageError naming the document that cannot be.
        """
        contents = [document.content for document in documents]
        texts = self._texts([content for content in contents if isinstance(content, str)])
        pairs = self._pairs([content for content in contents if isinstance(content, Prompted)])
        chats = self._chats([document for document in documents if isinstance(document.content, Conversation)])
        encoded = []
        for document in documents:
            match document.content:
                case str():
                    encoded.append(next(texts))
                case Prompted():
                    encoded.append(next(pairs))
                case Conversation():
                    encoded.append(next(chats))
                case tokens:
                    encoded.append(self._check_tokens(tokens, document.place))
        return encoded

    def encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of whole texts, with the special tokens of the protocol's policy."""
        tokenizer, parse_special = self._tokenizer, self.protocol.parse_special
        if self.protocol.special_tokens == "default":
            return tokenizer.encode_by_default(texts)
        batch = tokenizer.encode_batch(texts, parse_special=parse_special)
        if self.protocol.special_tokens == "bos" and tokenizer.bos_id is not None and tokenizer.adds_bos:
            bos = np.array([tokenizer.bos_id], dtype=np.int32)
            return [np.concatenate((bos, ids)) for ids in batch]
        return batch

    def _texts(self, texts: Sequence[str]) -> Iterator[Encoded]:
        if self.protocol.join == "text":
            return (Encoded(_EMPTY, None, count_text(text)) for text in texts)
        encoded = self.encode_texts(texts)
        return (Encoded(tokens_N, None, count_text(text)) for tokens_N, text in zip(encoded, texts, strict=True))

    def _pairs(self, pairs: Sequence[Prompted]) -> Iterator[Encoded]:
        """Yield whole texts, scored behind as many tokens as the prompt alone has, which is lm-eval's way."""
        texts = [split_prompt(pair) for pair in pairs]
        prompts = self.encode_texts([prompt for prompt, _ in texts])
        wholes = self.encode_texts([whole for _, whole in texts])
        for (prompt, whole), prompt_N, whole_N in zip(texts, prompts, wholes, strict=True):
            yield Encoded(whole_N, np.arange(len(whole_N)) >= len(prompt_N), count_text(whole[len(prompt) :]))

    def _chats(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        chats = [
            (document.content, document.place) for document in documents if isinstance(document.content, Conversation)
        ]
        encoded = scored_of_chats(chats, self._tokenizer, self._loss_on, self.prefix_id)
        for (chat, _), (tokens_N, scored_N) in zip(chats, encoded, strict=True):
            texts = [chat.messages[index].get("content") or "" for index in scored_messages(chat, self._loss_on)]
            counts = msgspec.structs.replace(sum(map(count_text, texts), Counts()), documents=1)
            yield Encoded(tokens_N, scored_N, counts)

    def _check_tokens(self, tokens_N: Tokens, place: Place) -> Encoded:
        """Return token ids that came without a text, so without denominators."""
        vocab_size = self.tokenizer_spec.vocab_size
        for index, block in enumerate(blocks(tokens_N)):
            wrong = np.flatnonzero((block < 0) | (block >= vocab_size))
            if len(wrong):
                raise UsageError(
                    f"{place}: the id of token {index * BLOCK_TOKENS + wrong[0]} is beyond the vocabulary of "
                    f"{vocab_size} tokens; check --tokenizer and --token-dtype"
                )
        return Encoded(tokens_N, None, Counts(documents=1))


def choose(options: PlanOptions, card: TokenizerCard) -> tuple[Protocol, TokenizerSpec]:
    """Return the protocol that the options name and what the plan says of the tokenizer. Raises UsageError."""
    protocol = choose_protocol(options, TokenizerFacts(card.max_length, card.adds_bos))
    prefix_id = _choose_prefix(options, protocol, card)
    return protocol, msgspec.structs.replace(
        card.spec,
        digest=card.chat_digest if options.content == "messages" else card.spec.digest,
        prefix_id=prefix_id,
        prefix="" if prefix_id is None else card.names[prefix_id],
    )


def _choose_prefix(options: PlanOptions, protocol: Protocol, card: TokenizerCard) -> int | None:
    if protocol.prefix == "none":
        if options.prefix_id is not None:
            raise UsageError(f"--prefix-id means nothing to the protocol {options.protocol}; leave it out")
        return None
    if options.prefix_id is not None:
        return options.prefix_id
    prefix_id = card.eos_id if protocol.prefix == "eos" else card.spec.prefix_id
    if prefix_id is None:
        raise UsageError(f"{options.tokenizer}: the tokenizer has no token to put in front of a text; give --prefix-id")
    return prefix_id
