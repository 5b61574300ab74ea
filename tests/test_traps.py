"""What others got wrong in public, each kind once, on a model whose loss of a token is a table of the token before it.

With it the loss of a text is the sum of its pairs, whatever the windows, so every expected number is written out by
hand. The other kinds have their tests beside the part that they concern.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.corpora import write_jsonl
from support.models import VOCAB_SIZE, save_byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import everplex
from everplex.stages.derive import published_perplexity
from everplex.stages.report import text_report
from everplex.stages.tokenize import load_tokenizer

BOS, EOS, PAD = 256, 257, 258
HIDDEN = 264
"""One dimension per token, so that any table of logits can be had."""
TEXT = "it was the best of times, it was the worst of times"


class Bigram:
    """A saved model, and its losses in float64."""

    def __init__(self, folder: Path) -> None:
        before, after = np.ogrid[:VOCAB_SIZE, :VOCAB_SIZE]
        logits = -((7.0 * before + 13 * after) % 32) / 16
        logits[:, PAD] = -100.0  # who scores padding shows
        self.folder = _save(folder, logits)
        self._nll = np.log(np.exp(logits).sum(1, keepdims=True)) - logits
        self._tokenizer = load_tokenizer(str(folder))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        (ids_N,) = self._tokenizer.encode_batch([text])
        ids: list[int] = ids_N.tolist()
        return ids

    def nll(self, text: str, before: int | None = BOS) -> NDArray[np.float64]:
        """Return the loss of each token of a text after the token `before`; with none, that of all but the first."""
        ids = ([] if before is None else [before]) + self.ids(text)
        losses: NDArray[np.float64] = self._nll[ids[:-1], ids[1:]]
        return losses


def _save(folder: Path, logits: NDArray[np.float64]) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=False,
        rms_norm_eps=1e-12,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:  # neither attention nor layer adds anything
                weights.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE, HIDDEN))
        # the norm makes a unit vector as long as the square root of its dimensions
        model.lm_head.weight[:, :VOCAB_SIZE] = torch.tensor(logits.T / math.sqrt(HIDDEN))
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Bigram:
    """Return the model."""
    return Bigram(tmp_path_factory.mktemp("bigram"))


def run(folder: Path, model: Path, rows: list[dict[str, str]], **options: Any) -> everplex.Summary:
    """Evaluate rows in a folder of their own."""
    folder.mkdir(exist_ok=True)
    data = write_jsonl(folder / "corpus.jsonl", rows)
    chosen: dict[str, Any] = {"context": 8, "threads": 1, "audit": 0.0} | options
    return everplex.run(data, model=str(model), out=str(folder / "out"), **chosen)


@pytest.mark.parametrize("batch_tokens", ["8", "4096"])
def test_padding_and_window_borders_cost_nothing(tmp_path: Path, bigram: Bigram, batch_tokens: str) -> None:
    """Texts of every length around the context, one or many a batch: each token once, none shifted, no padding."""
    texts = [TEXT[:length] for length in (1, 3, 7, 8, 9, 15, 16, 17, 24, 25)]
    summary = run(tmp_path, bigram.folder, [{"text": text} for text in texts], batch_tokens=batch_tokens)
    assert summary.tokens == sum(map(len, texts))
    assert summary.nll == pytest.approx(math.fsum(bigram.nll(text).sum() for text in texts), rel=1e-6)


@pytest.mark.parametrize("prefix", [BOS, EOS])
def test_the_prefix_is_seen_and_not_scored(tmp_path: Path, bigram: Bigram, prefix: int) -> None:
    """The first token's loss is that after the prefix, and the prefix has none."""
    options = {} if prefix == BOS else {"prefix_id": prefix}
    summary = run(tmp_path, bigram.folder, [{"text": "abc"}], **options)
    assert summary.tokens == 3
    assert summary.nll == pytest.approx(bigram.nll("abc", prefix).sum(), rel=1e-6)


def test_every_window_begins_with_bos_where_a_model_needs_it(tmp_path: Path, bigram: Bigram) -> None:
    """The first token of a window has the loss after BOS, where the window is full; the last one is filled up."""
    summary = run(tmp_path, bigram.folder, [{"text": TEXT[:20]}], protocol="bos-every-window")
    windows = [bigram.nll(TEXT[:8]), bigram.nll(TEXT[8:16]), bigram.nll(TEXT[16:20], bigram.ids(TEXT[15])[0])]
    assert summary.tokens == 20
    assert summary.nll == pytest.approx(np.concatenate(windows).sum(), rel=1e-6)


def test_windows_weigh_what_they_score(tmp_path: Path, bigram: Bigram) -> None:
    """Windows of three, two, two and two tokens: the mean over tokens, and the published snippet's beside it."""
    text = TEXT[:10]
    summary = run(
        tmp_path, bigram.folder, [{"text": text}], protocol="hf-stride", context=4, stride=2, hf_published_weights=True
    )
    nll = bigram.nll(text, None)
    windows = np.split(nll, [3, 5, 7])
    assert summary.tokens == 9
    assert summary.nll == pytest.approx(nll.sum(), rel=1e-6)
    published = sum(weight * window.mean() for weight, window in zip((3, 1, 1, 1), windows, strict=True))
    assert published_perplexity(summary) == pytest.approx(math.exp(published / 6), rel=1e-6)
    assert f"{published_perplexity(summary):.4f}" in text_report(summary)
    assert summary.perplexity != pytest.approx(math.exp(np.mean([window.mean() for window in windows])), rel=1e-3)


def test_a_mean_of_means_has_another_name(tmp_path: Path, bigram: Bigram) -> None:
    """One token beside many: the perplexity is that of all tokens, the macro mean that of the groups."""
    texts = {"short": "z", "long": TEXT}
    summary = run(tmp_path, bigram.folder, [{"text": text, "g": group} for group, text in texts.items()], group_by="g")
    losses = [bigram.nll(text) for text in texts.values()]
    assert summary.perplexity == pytest.approx(math.exp(np.concatenate(losses).mean()), rel=1e-6)
    assert summary.macro == pytest.approx(math.exp(np.mean([nll.mean() for nll in losses])), rel=1e-6)
    assert summary.macro != pytest.approx(summary.perplexity, rel=1e-2)


def test_empty_and_blank_texts_are_documents(tmp_path: Path, bigram: Bigram) -> None:
    """They have words as lm-eval counts them, and no loss of their own."""
    summary = run(tmp_path, bigram.folder, [{"text": text} for text in ("", " ", "a")])
    assert (summary.documents, summary.words, summary.bytes, summary.tokens) == (3, 4, 2, 2)
    assert summary.nll == pytest.approx(bigram.nll(" ").sum() + bigram.nll("a").sum(), rel=1e-6)


def test_nothing_to_score_is_no_nan(tmp_path: Path, bigram: Bigram) -> None:
    """A group whose completions are all empty has no tokens and no perplexity, and spoils no other number."""
    rows = [{"prompt": "ab", "completion": "", "g": "none"}, {"prompt": "ab", "completion": "c", "g": "some"}]
    summary = run(tmp_path, bigram.folder, rows, content="completion", group_by="g")
    none = summary.groups["none"]
    assert (none.documents, none.tokens, none.nll, none.perplexity) == (1, 0, 0.0, None)
    assert summary.nll == summary.groups["some"].nll == pytest.approx(bigram.nll("abc")[2], rel=1e-6)
    assert "NaN" not in (tmp_path / "out" / "summary.json").read_text()


def test_a_stride_gives_a_whole_result(tmp_path: Path, bigram: Bigram) -> None:
    """llama.cpp's strided mode, which prints no estimate there: the scored tokens' perplexity, in the same layout."""
    text = (TEXT * 12)[:600]
    summary = run(tmp_path, bigram.folder, [{"text": text}], protocol="llama.cpp", context=64, stride=32)
    starts = range(0, 600 - 256, 32)
    nll = np.concatenate([bigram.nll(text, None)[start + 223 : start + 255] for start in starts])
    assert (summary.complete, summary.tokens) == (True, 11 * 32)
    assert summary.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert (summary.bits_per_byte, summary.word_perplexity) == (None, None)


def test_texts_with_a_common_beginning_do_not_touch(tmp_path: Path, tiny_model: Path) -> None:
    """In either order, on a model with attention: nothing of the one is kept for the other."""
    rows = [{"text": TEXT[:32] + end, "g": end} for end in ("x", "y")]
    one = run(tmp_path / "one", tiny_model, rows, group_by="g", context=64)
    other = run(tmp_path / "other", tiny_model, rows[::-1], group_by="g", context=64)
    assert one.groups == other.groups
    assert one.groups["x"].nll != one.groups["y"].nll


def test_the_label_stands_beside_the_number(tmp_path: Path, bigram: Bigram) -> None:
    """In the summary and in the page, since one text has as many perplexities as there are protocols."""
    label = run(tmp_path, bigram.folder, [{"text": TEXT}]).protocol.label
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["protocol"]["label"] == label
    assert label in (tmp_path / "out" / "report.html").read_text()
