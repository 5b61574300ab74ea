"""Results of another run for chunks of equal content."""

from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_documents, write_jsonl
from support.models import save_tiny_model

import everplex
from everplex.stages.report import text_report
from everplex.stages.stored import load_plan, load_run
from everplex.storage.errors import IdentityMismatch
from everplex.storage.store import open_store

OPTIONS: dict[str, Any] = {"group_by": "topic", "context": 64, "chunk_tokens": 256, "threads": 1}


def test_a_grown_corpus_pays_only_for_what_is_new(tmp_path: Path, tiny_model: Path) -> None:
    """Most chunks are taken over, the numbers are those of a run without reuse, and doing it again changes nothing."""
    documents = make_documents(60)
    old = write_jsonl(tmp_path / "old.jsonl", documents[:50])
    new = write_jsonl(tmp_path / "new.jsonl", documents)
    everplex.run(str(old), model=str(tiny_model), out=str(tmp_path / "old"), **OPTIONS)
    fresh = everplex.run(str(new), model=str(tiny_model), out=str(tmp_path / "fresh"), **OPTIONS)
    reusing: dict[str, Any] = {"out": str(tmp_path / "new"), "reuse_from": [str(tmp_path / "old")], **OPTIONS}
    summary = everplex.run(str(new), model=str(tiny_model), **reusing)
    assert (summary.nll, summary.tokens, summary.groups) == (fresh.nll, fresh.tokens, fresh.groups)
    # the last chunk of each of the two groups has changed
    old_plan = load_plan(open_store(str(tmp_path / "old")))
    assert max(worker.chunks for worker in summary.workers) == len(old_plan.chunks) - 2
    assert everplex.run(str(new), model=str(tiny_model), **reusing) == summary
    (taken,) = (worker for worker in summary.workers if worker.reused_from is not None)
    assert taken.reused_from == load_run(open_store(str(tmp_path / "old"))).id()
    assert taken.chunks == len(old_plan.chunks) - 2
    assert f"in run {taken.reused_from[:8]}" in text_report(summary)


def test_another_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """One model's results are never served for another's."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(10))
    everplex.run(str(corpus), model=str(tiny_model), out=str(tmp_path / "a"), **OPTIONS)
    other = save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(IdentityMismatch, match="model differs"):
        everplex.run(
            str(corpus), model=str(other), out=str(tmp_path / "b"), reuse_from=[str(tmp_path / "a")], **OPTIONS
        )
