"""Long texts are tokenised in pieces, and nobody can tell by the tokens."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from everplex.stages.encode import count_text
from everplex.stages.pieces import LONG_CHARACTERS, PlacedTokens, encode_in_pieces
from everplex.stages.tokenize import Tokenizer, load_tokenizer

UNKNOWN = "<unk>"
SPECIAL = ["<s>", "</s>", UNKNOWN]
WORDS = ["the", "of", "naïve", "δοκιμή", "語", "言葉", "🙂", "x", "1234", "don't", "</s>", "é", "-", "Straße"]
SPACES = [" "] * 12 + ["\n", "\n\n", "\t", "   ", ""]


def make_text(num_characters: int, seed: int = 0) -> str:
    """Return words of several scripts, with special tokens, odd spaces and some runs among them."""
    rng = random.Random(seed)
    parts: list[str] = []
    size = 0
    while size < num_characters:
        word = rng.choice(WORDS) * (rng.randrange(1, 60) if rng.random() < 0.01 else 1)
        parts.append(word + rng.choice(SPACES))
        size += len(parts[-1])
    return "".join(parts)


def byte_level() -> tokenizers.Tokenizer:
    """Return a tokenizer as those of GPT-2 and Llama 3: bytes, a regular expression, merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([make_text(20_000, 1)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def merges_alone() -> tokenizers.Tokenizer:
    """Return a tokenizer as that of Llama 2: nothing splits the text, a space stands in front of it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN, fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [word for word in make_text(20_000, 1).split() if word not in SPECIAL]
    tokenizer.train_from_iterator([f" {word}" for word in words if word != "語"], trainer)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """Return a tokenizer as that of T5: likeliest pieces of words, compatibility forms made equal."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token=UNKNOWN, show_progress=False)
    tokenizer.train_from_iterator([make_text(20_000, 1)], trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """Return a tokenizer as that of BERT: words cut from the left, case and accents dropped."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([make_text(20_000, 1)], trainer)
    return tokenizer


def load(tokenizer: tokenizers.Tokenizer, folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Return it as planning loads it, and by itself from the same file (saving may move a likelihood's last digit)."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=UNKNOWN
    ).save_pretrained(folder)
    return load_tokenizer(str(folder)), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", [byte_level, merges_alone, unigram, word_piece])
def test_a_long_text_has_the_tokens_of_the_whole(kind: Callable[[], tokenizers.Tokenizer], tmp_path: Path) -> None:
    """Among short texts or alone, with special tokens added or not, it is as if it had been tokenised at once."""
    tokenizer, backend = load(kind(), tmp_path)
    text = make_text(3 * LONG_CHARACTERS)
    pieces = encode_in_pieces(text, tokenizer.encode_with_starts)
    assert pieces is not None, "the pieces did not agree, so nothing is tested"
    for add in (False, True):
        expected = backend.encode(text, add_special_tokens=add).ids
        short, found, _ = tokenizer.encode_batch(["the", text, "of"], add_special_tokens=add)
        assert np.array_equal(found, expected)
        assert short.tolist() == backend.encode("the", add_special_tokens=add).ids


def letters(unknown: str | None) -> tokenizers.Tokenizer:
    """Return a tokenizer of four letters that puts tokens around a text and does not know the letter a."""
    vocabulary = {"<s>": 0, "</s>": 1, "A": 2, "C": 3, "G": 4, "T": 5, "U": 6}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("unknown", [None, "<s>", "U"])
def test_tokens_around_a_long_text_are_where_they_belong(unknown: str | None, tmp_path: Path) -> None:
    """Even where a probe is no token, or looks like the token in front."""
    made = letters(unknown)
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1]).save_pretrained(tmp_path)
    text = "".join(random.Random(0).choices("ACGT", k=LONG_CHARACTERS + 5))
    (found,) = load_tokenizer(str(tmp_path)).encode_batch([text], add_special_tokens=True)
    assert np.array_equal(found, made.encode(text).ids)


def test_special_tokens_in_a_long_text_are_text_where_they_are_to_be(tmp_path: Path) -> None:
    """The literal text of a special token is tokenised as text in every piece."""
    tokenizer, _ = load(byte_level(), tmp_path)
    text = make_text(2 * LONG_CHARACTERS)
    (found,) = tokenizer.encode_batch([text], parse_special=False)
    assert "</s>" in text
    assert not np.isin(found, [0, 1, 2]).any()


def test_pieces_that_do_not_agree_are_not_joined(tmp_path: Path) -> None:
    """A run of letters beyond any overlap may be cut elsewhere in each piece: then the text is tokenised whole."""
    merges = [("a", "a"), ("aa", "a")]
    made = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "aa": 1, "aaa": 2, "b": 3}, merges=merges))
    tokenizer, backend = load(made, tmp_path)
    text = "b" * 10_001 + "a" * (LONG_CHARACTERS + 1)
    assert encode_in_pieces(text, tokenizer.encode_with_starts) is None
    (found,) = tokenizer.encode_batch([text])
    assert np.array_equal(found, backend.encode(text).ids)


def test_tokens_that_nothing_begins_with_are_no_agreement() -> None:
    """Two pieces without a token in the middle of their overlap have nothing to agree on."""
    one = PlacedTokens(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64))
    assert encode_in_pieces("a" * (LONG_CHARACTERS + 1), lambda texts: [one for _ in texts]) is None


@pytest.mark.parametrize("space", ["x", " ", "\n", "\u3000"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_words_and_bytes_of_a_long_text_are_counted_in_parts(space: str, shift: int) -> None:
    """Wherever a word lies on the edge of two parts, it is one word."""
    edge = 1 << 20
    text = "ab " * (edge // 3)
    text = text[: edge + shift] + " " * max(0, edge + shift - len(text)) + space + "é word\n" * 5
    found = count_text(text)
    assert (found.bytes, found.characters) == (len(text.encode()), len(text))
    assert found.words == len(re.split(r"\s+", text))
