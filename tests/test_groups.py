"""A part of a planned run, for workers that may read only some groups."""

from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_documents, write_jsonl

import everplex
from everplex.storage.errors import IdentityMismatch, IncompleteError, UsageError


def test_groups_of_a_planned_run_are_evaluated_one_by_one(tmp_path: Path, tiny_model: Path) -> None:
    """Each part ends well, the whole is complete only with the last, and its numbers are those of one run."""
    corpus = str(write_jsonl(tmp_path / "corpus.jsonl", make_documents(20)))
    options: dict[str, Any] = {"group_by": "topic", "chunk_tokens": 256, "threads": 1, "model": str(tiny_model)}
    whole = everplex.run(corpus, out=str(tmp_path / "whole"), **options)
    assert whole.protocol.context == 256  # the model's, since none was asked for
    out = str(tmp_path / "parts")
    everplex.plan(corpus, tokenizer=str(tiny_model), out=out, group_by="topic", chunk_tokens=256)
    part = everplex.evaluate(model=str(tiny_model), out=out, groups="a", threads=1)
    assert not part.complete
    assert (part.groups["a"].nll, part.groups["a"].stderr) == (whole.groups["a"].nll, whole.groups["a"].stderr)
    with pytest.raises(IncompleteError):
        everplex.reduce(out)
    assert everplex.run(corpus, out=out, groups="b", **options).nll == whole.nll
    assert everplex.reduce(out).groups == whole.groups
    with pytest.raises(UsageError, match="the plan has no group 'c'"):
        everplex.evaluate(model=str(tiny_model), out=out, groups="c")


def test_a_run_of_some_groups_is_another_than_that_of_all(tmp_path: Path, tiny_model: Path) -> None:
    """What was planned for some groups is refused when all are asked for."""
    corpus = str(write_jsonl(tmp_path / "corpus.jsonl", make_documents(20)))
    options: dict[str, Any] = {"group_by": "topic", "tokenizer": str(tiny_model), "out": str(tmp_path / "out")}
    everplex.plan(corpus, groups="a", **options)
    with pytest.raises(IdentityMismatch, match="corpus option groups differs"):
        everplex.plan(corpus, **options)
