"""Stores that allow less than others: no conditional create, or some groups' objects alone."""

import json
from pathlib import Path

import pytest
from support.corpora import make_documents, write_jsonl

import everplex
from everplex.cli import run_command_line
from everplex.stages.layout import group_key
from everplex.storage.classify import store_error
from everplex.storage.local import LocalStore

OPTIONS = ("--context", "64", "--chunk-tokens", "256", "--threads", "1")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a small corpus of two groups."""
    return write_jsonl(tmp_path / "corpus.jsonl", make_documents(6))


def test_a_store_without_conditional_create_is_told_once(
    corpus: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line at the start of the run, and the run goes on to its end."""
    monkeypatch.setattr("everplex.opening.honours_conditional_create", lambda _store: False)
    run = ["run", str(corpus), "--model", str(tiny_model), "--out", "memory://careless", *OPTIONS]
    assert run_command_line(run) == 0
    assert capsys.readouterr().err.count("does not refuse to make an object twice") == 1


def test_a_folder_is_not_probed(corpus: Path, tiny_model: Path, tmp_path: Path) -> None:
    """A local folder is known to refuse, so no object is made to find out."""
    out = tmp_path / "out"
    assert run_command_line(["run", str(corpus), "--model", str(tiny_model), "--out", str(out), *OPTIONS]) == 0
    assert not (out / "probe").exists()


def test_a_worker_of_some_groups_needs_only_their_objects(
    corpus: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the others' inputs and documents are refused, the message names --groups, and with it the work is done."""
    out, key = str(tmp_path / "out"), group_key("b")
    everplex.plan(str(corpus), tokenizer=str(tiny_model), out=out, context=64, chunk_tokens=256, group_by="topic")
    get = LocalStore.get

    def guarded(self: LocalStore, name: str) -> bytes:
        if f"/{key}/" in name:
            raise store_error(PermissionError("Access Denied"), "read", f"{self.url}/{name}")
        return get(self, name)

    monkeypatch.setattr(LocalStore, "get", guarded)
    evaluate = ["evaluate", "--model", str(tiny_model), "--out", out, "--threads", "1", "--json"]
    assert run_command_line(evaluate) == 2
    assert "--groups" in capsys.readouterr().err
    assert run_command_line([*evaluate, "--groups", "a"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["groups"]["a"]["perplexity"] > 1
    assert "left out" in captured.err
