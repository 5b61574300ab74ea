"""A whole small run on a store that fails at its N-th operation, for N = 1, 2, 3 … until nothing is left to fail."""

from pathlib import Path

import pytest
from support.corpora import make_documents, write_jsonl
from support.faulty import ALWAYS, FaultyStore, When
from support.runs import numbers, records

from everplex import api, opening
from everplex.storage.errors import EverplexError
from everplex.storage.local import LocalStore
from everplex.storage.retry import RetryingStore, RetryPolicy


def _run(corpus: Path, model: Path, out: Path) -> None:
    api.run(
        str(corpus), model=str(model), out=str(out), context=64, chunk_tokens=512, group_by="topic", rank=0,
        world_size=1, threads=1, batch_tokens="512", audit=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("when", ALWAYS)
def test_fail_at_each_operation(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: When) -> None:
    """After any one fault, which nothing retries, the store holds whole objects only and the next run has the bits."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(8))
    quiet = tmp_path / "quiet"
    _run(corpus, tiny_model, quiet)
    fail_at, faulty, survived = 0, None, 0
    while faulty is None or faulty.fired:
        fail_at += 1
        out = tmp_path / f"{fail_at}"
        faulty = FaultyStore(LocalStore(out), fail_at=fail_at, when=when)
        store = RetryingStore(faulty, RetryPolicy(max_attempts=1))
        with monkeypatch.context() as patch:
            patch.setattr(opening, "open_store", lambda *_, store=store, **__: store)
            try:
                _run(corpus, tiny_model, out)
                survived += 1
            except EverplexError as error:
                assert error.exit_code == 75  # noqa: PT017 - most faults end the run, some do not
        assert set(records(out)) <= set(records(quiet))
        _run(corpus, tiny_model, out)
        assert numbers(out) == numbers(quiet)
    assert fail_at > 10
    assert survived < fail_at
