"""Losses per document equal those of lm-eval on the same model and text, for every length around the context."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.evaluation import make_chunk

from everplex.stages.evaluate import Evaluator
from everplex.stages.model import ModelOptions, load_model
from everplex.stages.tally import make_record

CONTEXT = 16


def rolling_rows(tokens: list[int], prefix: int) -> list[tuple[list[int], list[bool]]]:
    """Return the rows and masks that lm-eval's rolling windows mean, written out by hand."""
    count = len(tokens)
    end = min(CONTEXT, count)
    rows = [([prefix, *tokens[:end]], [True] * end)] if count else []
    while end < count:
        start, end = end, min(end + CONTEXT, count)
        rows.append((tokens[end - 1 - CONTEXT : end], [False] * (CONTEXT - (end - start)) + [True] * (end - start)))
    return rows


@pytest.mark.filterwarnings("ignore")
def test_losses_per_document_equal_those_of_lm_eval(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Documents of no token, of one, and of every length up to four contexts have lm-eval's losses and token counts."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rng = random.Random(7)
    texts = ["".join(rng.choice("abc é\n") for _ in range(length)) for length in range(3 * CONTEXT + 3)]
    texts += [texts[20], "<s> literal </s>", "x" * 4 * CONTEXT]

    loaded = load_model(ModelOptions(model=str(tiny_model), device="cpu"))
    lm: Any = HFLM(pretrained=loaded.model, tokenizer=tokenizer, max_length=CONTEXT, batch_size=4)
    expected = lm.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts], disable_tqdm=True)
    capfd.readouterr()

    rows, documents = [], []
    for index, text in enumerate(texts):
        found = rolling_rows(tokenizer(text, add_special_tokens=False)["input_ids"], lm.prefix_token_id)
        rows += found
        documents += [index] * len(found)
    chunk = make_chunk([row for row, _ in rows], [mask for _, mask in rows])
    chunk.row_documents_R[:] = np.asarray(documents)
    record = make_record("c", "d", chunk, Evaluator(loaded, batch_tokens=256).evaluate(chunk))

    assert record.doc_nll is not None
    found_nll = dict(zip(record.doc_ordinals, record.doc_nll, strict=True))
    for index, loglikelihood in enumerate(expected):
        tolerance = max(1e-4, 5e-6 * abs(loglikelihood))
        assert found_nll.get(index, 0.0) == pytest.approx(-loglikelihood, abs=tolerance)
    assert record.tokens == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert set(range(len(texts))) - set(found_nll) == {0}
