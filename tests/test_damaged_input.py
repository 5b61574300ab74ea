"""A chunk whose input is damaged stops nothing but itself."""

from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_documents, write_jsonl

import everplex
from everplex.storage.errors import CorruptObjectError


def test_all_other_chunks_are_evaluated_and_the_damage_is_named(tmp_path: Path, tiny_model: Path) -> None:
    """Once the input is whole again, the same command evaluates the one chunk that is missing."""
    corpus = str(write_jsonl(tmp_path / "corpus.jsonl", make_documents(20)))
    out = tmp_path / "out"
    options: dict[str, Any] = {"model": str(tiny_model), "context": 64, "chunk_tokens": 256, "threads": 1}
    whole = everplex.run(corpus, out=str(tmp_path / "whole"), **options)
    everplex.plan(corpus, tokenizer=str(tiny_model), out=str(out), context=64, chunk_tokens=256)
    damaged = min(out.glob("plan/chunks/*/*"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1])
    with pytest.raises(CorruptObjectError, match=damaged.name):
        everplex.run(corpus, out=str(out), **options)
    assert everplex.reduce(str(out), partial=True).coverage.missing == 1
    damaged.write_bytes(data)
    assert everplex.run(corpus, out=str(out), **options).nll == whole.nll
