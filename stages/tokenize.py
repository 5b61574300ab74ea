"""The tokenizer: token ids as transformers gives them, on all cores, and a digest of its content."""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from everplex.stages.memo import remembered
from everplex.stages.pieces import LONG_CHARACTERS, PlacedTokens, encode_in_pieces
from everplex.stages.records import TokenizerSpec
from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import UsageError
from everplex.storage.local import cache_folder, expand_home

__all__ = ["ChatTemplateError", "Tokenizer", "TokenizerCard", "load_card", "load_tokenizer"]

_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "additional_chat_templates/*")
"""Files of a folder that a tokenizer may be made of."""
_NO_LENGTH = 1_000_000
"""Tokenizers that know no length say a huge one."""


class ChatTemplateError(Exception):
    """A chat that the template cannot render, or not in a way that tells its turns apart."""


class TokenizerCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan says of a tokenizer depends on this alone, so that comparing plans need not load one."""

    spec: TokenizerSpec
    chat_digest: str
    """Of the tokenizer and its chat template."""
    max_length: int | None
    """Context length in tokens, where the tokenizer says one."""
    adds_bos: bool
    """Whether it puts a BOS in front of a text by itself."""
    eos_id: int | None
    names: dict[int, str]
    """Text of the tokens that may stand in front of a document."""


class Tokenizer:
    """A Hugging Face tokenizer behind the few calls that planning needs."""

    def __init__(self, name: str, hf: Any) -> None:
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary: dict[str, int] = hf.get_vocab()
        prefix_id = hf.eos_token_id if hf.bos_token_id is None else hf.bos_token_id
        self._prefix_text: str = "" if prefix_id is None else hf.decode(prefix_id)
        self.spec = TokenizerSpec(
            name=name,
            digest=self._digest(),
            vocab_size=max(len(hf), 1 + max(vocabulary.values(), default=-1)),
            prefix_id=prefix_id,
            prefix="" if prefix_id is None else hf.convert_ids_to_tokens(prefix_id),
        )

    @property
    def adds_bos(self) -> bool:
        """Whether it puts a BOS in front of a text by itself."""
        (ids,) = self.encode_batch([""], add_special_tokens=True)
        return self.bos_id is not None and ids[:1].tolist() == [self.bos_id]

    @property
    def bos_id(self) -> int | None:
        """Begin-of-text token, if there is one."""
        bos_id: int | None = self._hf.bos_token_id
        return bos_id

    def card(self, prefix_id: int | None = None) -> TokenizerCard:
        """Return what plans say of it; `prefix_id` may stand in front of a document. Raises UsageError for no token."""
        length: int = self._hf.model_max_length
        eos_id: int | None = self._hf.eos_token_id
        names = {token: self._name(token) for token in (prefix_id, eos_id, self.spec.prefix_id) if token is not None}
        return TokenizerCard(
            spec=self.spec,
            chat_digest=sha256_hex(canonical_json([self.spec.digest, self.chat_template])),
            max_length=length if length < _NO_LENGTH else None,
            adds_bos=self.adds_bos,
            eos_id=eos_id,
            names=names,
        )

    def _name(self, token_id: int) -> str:
        if not 0 <= token_id < self.spec.vocab_size:
            raise UsageError(
                f"token id {token_id} is beyond the vocabulary of {self.spec.vocab_size} tokens; name another"
            )
        return str(self._hf.convert_ids_to_tokens(token_id))

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, parse_special: bool = True
    ) -> list[NDArray[np.int32]]:
        """Token ids of every text, computed on all cores.

        `parse_special` makes the literal text of a special token that token, as transformers does by default.
        """
        self._parse_special(parse_special)
        encodings = iter(
            self._backend.encode_batch_fast(
                [text for text in texts if len(text) <= LONG_CHARACTERS], add_special_tokens=add_special_tokens
            )
        )
        return [
            np.array(next(encodings).ids, dtype=np.int32)
            if len(text) <= LONG_CHARACTERS
            else self._encode_long(text, add_special_tokens, parse_special)
            for text in texts
        ]

    def _encode_long(self, text: str, add_special_tokens: bool, parse_special: bool) -> NDArray[np.int32]:
        encode = partial(self.encode_with_starts, parse_special=parse_special)
        ends = self._added_ends(add_special_tokens)
        inner = None if ends is None else encode_in_pieces(text, encode)
        if ends is None or inner is None:
            (whole,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return np.array(whole.ids, dtype=np.int32)
        before, after = ends
        return np.concatenate((np.array(before, np.int32), inner, np.array(after, np.int32)))

    def _added_ends(self, add_special_tokens: bool) -> tuple[list[int], list[int]] | None:
        """Return the special tokens that go before and behind a text; None where a short text does not tell them."""
        plain, whole = (self._backend.encode("a", add_special_tokens=add).ids for add in (False, add_special_tokens))
        starts = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
        if not plain or len(starts) != 1:
            return None
        return whole[: starts[0]], whole[starts[0] + len(plain) :]

    def encode_by_default(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids with the special tokens that the tokenizer adds by itself.

        Nothing is added to a text that begins with the text of the prefix token, as in lm-eval.
        """
        encoded = self.encode_batch(texts, add_special_tokens=True)
        if self._prefix_text:
            for index, text in enumerate(texts):
                if text.startswith(self._prefix_text):
                    (encoded[index],) = self.encode_batch([text])
        return encoded

    def encode_with_starts(self, texts: Sequence[str], *, parse_special: bool = True) -> list[PlacedTokens]:
        """Token ids of every text, and at which character each token begins; nothing is added."""
        self._parse_special(parse_special)
        return [
            PlacedTokens(
                np.array(encoding.ids, dtype=np.int32),
                np.array([start for start, _ in encoding.offsets], dtype=np.int64),
            )
            for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)
        ]

    def _parse_special(self, parse_special: bool) -> None:
        self._backend.encode_special_tokens = self._hf.split_special_tokens or not parse_special

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """Text of a chat by the tokenizer's template. Raises ChatTemplateError where it fails."""
        if not self.chat_template:
            raise ChatTemplateError(f"the tokenizer {self.spec.name} has no chat template; use another --tokenizer")
        try:
            text: str = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"the chat template of {self.spec.name} fails on this chat ({reason})") from error
        return text

    @property
    def chat_template(self) -> Any:
        """Source of the chat template, if there is one."""
        return self._hf.chat_template

    def _digest(self) -> str:
        identity = [self._backend.to_str(), self._hf.bos_token_id, self._hf.eos_token_id, self._hf.split_special_tokens]
        return sha256_hex(canonical_json(identity))


def load_tokenizer(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder or a hub id. Raises UsageError where there is none that can be used."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - it imports torch, and a login node compares plans without

    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    folder = expand_home(name)
    if is_path and not folder.is_dir():
        raise UsageError(f"{name}: no such folder; expected one with a tokenizer, or a hub id")
    if folder.is_dir() and not _files_in(folder):
        raise UsageError(f"{name}: expected a folder with a tokenizer (tokenizer.json), found none in it; name another")
    place = str(folder) if folder.is_dir() else name
    try:
        hf = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=trust_remote_code, use_fast=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{name}: no tokenizer could be loaded ({reason}); name a folder with tokenizer.json"
        ) from error
    if not getattr(hf, "is_fast", False):
        raise UsageError(
            f"{name}: expected a tokenizer with a tokenizer.json, found {type(hf).__name__}; convert it first"
        )
    return Tokenizer(name, hf)


def load_card(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False, prefix_id: int | None = None
) -> TokenizerCard:
    """Return what plans say of a tokenizer; that of a folder is remembered. Raises UsageError as loading it does."""

    def read() -> TokenizerCard:
        return load_tokenizer(name, revision, trust_remote_code=trust_remote_code).card(prefix_id)

    folder = expand_home(name)
    if trust_remote_code or not folder.is_dir():
        return read()
    files = _files_in(folder)
    names = [str(file.relative_to(folder)) for file in files]
    question = ["tokenizer 1", name, prefix_id, version("transformers"), version("tokenizers"), names]
    try:
        return remembered(cache_folder() / "tokenizers", question, files, TokenizerCard, read)
    except OSError as error:
        raise UsageError(
            f"{name}: the tokenizer could not be looked up ({error}); its files have to be readable and "
            f"{cache_folder()} writable (EVERPLEX_CACHE names another cache folder)"
        ) from error


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for pattern in _FILES for file in folder.glob(pattern) if file.is_file())
