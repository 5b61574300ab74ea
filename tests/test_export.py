"""Tables of a run and its lm-eval file: what they say equals the records and the summary."""

import csv
import io
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.segments import DictStore, Fabric
from support.stored import begin, complete, put_rows, save

from everplex import export
from everplex.cli import run_command_line
from everplex.reading import read_summary

FABRIC = Fabric({"a": [5, 40, 0, 300, 1, 64], "b/c": [30] * 9})
ROWS = range(len(FABRIC.plan.chunks))
TABLES = ("chunks", "documents", "groups", "workers")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a sealed run of two workers."""
    return str(save(complete(FABRIC), tmp_path_factory.mktemp("export") / "run"))


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a run of which the first four chunks are recorded."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS[:4])
    return str(save(store, tmp_path_factory.mktemp("export") / "part"))


def _rows(out: str, table: Any, **more: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in export(out, format="jsonl", table=table, **more).splitlines()]


def test_chunks_tell_what_was_recorded(out: str) -> None:
    """A row per chunk in the order of the plan, with the loss of its record and who computed it."""
    rows = _rows(out, "chunks")
    assert [row["chunk"] for row in rows] == FABRIC.chunk_ids
    for index, row in enumerate(rows):
        record = FABRIC.record(index)
        assert (row["nll"], row["tokens"], row["content"]) == (record.nll, record.tokens, record.content)
        assert row["counted"] is True
        assert row["device"] == f"host-{index % 2}/cpu"
        assert row["group"] == ("a" if row["chunk"].startswith("a-") else "b/c")


def test_documents_add_up_what_several_chunks_hold(out: str) -> None:
    """Each document's loss is the exact sum over its tokens, rounded once; an empty one has none."""
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    for chunk in ROWS:
        name = FABRIC.plan.groups[FABRIC.plan.chunks.group[chunk]].name
        values = iter(FABRIC.losses(chunk).tolist())
        for document, count in FABRIC.chunk_layout[chunk]:
            losses[name, document] += [next(values) for _ in range(count)]
    rows = _rows(out, "documents")
    assert [row["id"] for row in rows] == [f"a-{i}" for i in range(6)] + [f"b/c-{i}" for i in range(9)]
    for row in rows:
        expected = losses[row["group"], row["ordinal"]]
        assert row["tokens"] == len(expected)
        assert row["nll"] == pytest.approx(math.fsum(expected), rel=1e-15)
        assert (row["perplexity"] is None) is (not expected)
        assert row["bytes"] == 4 * len(expected)


def test_groups_and_workers_are_those_of_the_summary(out: str) -> None:
    """The numbers are the very ones that the summary has."""
    summary = read_summary(out)
    for row in _rows(out, "groups"):
        numbers = summary.groups[row["group"]]
        assert (row["nll"], row["perplexity"], row["stderr"]) == (numbers.nll, numbers.perplexity, numbers.stderr)
    rows = _rows(out, "workers")
    assert [(row["worker"], row["nll"], row["chunks"]) for row in rows] == [
        (worker.worker, worker.nll, worker.chunks) for worker in summary.workers
    ]
    assert math.fsum(row["tokens"] for row in rows) == summary.tokens


@pytest.mark.parametrize("table", TABLES)
def test_every_form_says_the_same(table: Any, out: str) -> None:
    """CSV, JSON Lines and Parquet hold equal values, floats to the last bit."""
    import pyarrow.parquet

    rows = _rows(out, table)
    parquet = pyarrow.parquet.read_table(io.BytesIO(export(out, format="parquet", table=table))).to_pylist()
    assert parquet == rows
    cells = list(csv.DictReader(io.StringIO(export(out, format="csv", table=table).decode())))
    assert len(cells) == len(rows)
    for cell, row in zip(cells, rows, strict=True):
        for name, value in row.items():
            assert cell[name] == ("" if value is None else json.dumps(value) if isinstance(value, bool) else str(value))


def test_an_unfinished_run_is_exported_only_when_asked(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 75 without --partial and no file; with it, only what is wholly counted has a loss."""
    target = tmp_path / "groups.csv"
    assert run_command_line(["export", part, "--format", "csv", "--output", str(target)]) == 75
    assert "missing" in capsys.readouterr().err
    assert not target.exists()
    chunks = _rows(part, "chunks", partial=True)
    assert [row["counted"] for row in chunks] == [True] * 4 + [False] * (len(ROWS) - 4)
    assert all((row["nll"] is None) is (not row["counted"]) for row in chunks)
    documents = _rows(part, "documents", partial=True)
    whole = [row for row in documents if row["counted"]]
    assert 0 < len(whole) < len(documents)
    complete_rows = _rows(str(save(complete(FABRIC), tmp_path / "whole")), "documents")
    assert whole == [row for row in complete_rows if row["id"] in {row["id"] for row in whole}]


def test_a_file_is_whole_or_absent(out: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """--output writes what stdout would get, replaces what was there and leaves nothing beside it."""
    target = tmp_path / "table.jsonl"
    target.write_text("old")
    assert run_command_line(["export", out, "--format", "jsonl", "--table", "chunks", "--output", str(target)]) == 0
    assert run_command_line(["export", out, "--format", "jsonl", "--table", "chunks"]) == 0
    assert capsysbinary.readouterr().out == target.read_bytes()
    assert list(tmp_path.iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_told(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a sentence naming the option."""
    (tmp_path / "file").touch()
    for folder, words in (("none", "No such file"), ("file", "Not a directory")):
        target = tmp_path / folder / "x.csv"
        assert run_command_line(["export", out, "--format", "csv", "--output", str(target)]) == 2
        assert capsys.readouterr().err.startswith(f"everplex: --output {target}: {words}")


def test_parquet_without_its_package_says_which(
    out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra to install is named."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run_command_line(["export", out, "--format", "parquet"]) == 2
    assert "pip install 'everplex[parquet]'" in capsys.readouterr().err


def test_lm_eval_reads_its_file(out: str) -> None:
    """lm-eval's own table is made from the file; its keys are those that lm-eval declares."""
    from lm_eval.result_schema import EvalResults
    from lm_eval.utils import make_table

    results = json.loads(export(out, format="lm-eval"))
    assert set(results) <= set(EvalResults.__annotations__)
    summary = read_summary(out)
    assert set(results["results"]) == {"a", "b/c", "everplex"}
    whole = results["results"]["everplex"]
    assert whole["word_perplexity,none"] == summary.word_perplexity
    assert whole["byte_perplexity,none"] == summary.byte_perplexity
    assert whole["bits_per_byte,none"] == summary.bits_per_byte
    assert whole["sample_len"] == summary.documents
    tables = make_table(results) + make_table(results, "groups")
    assert f"{summary.groups['a'].word_perplexity:.4f}" in tables
    assert "everplex" in tables


def test_a_group_may_have_the_name_of_the_whole(tmp_path: Path) -> None:
    """Then the whole takes another one, and neither hides the other."""
    fabric = Fabric({"everplex": [5, 40], "b": [30]})
    results = json.loads(export(str(save(complete(fabric), tmp_path / "run")), format="lm-eval"))
    assert {name: found["sample_len"] for name, found in results["results"].items()} == {
        "b": 1, "everplex": 2, "everplex_": 3,
    }  # fmt: skip
    assert results["group_subtasks"] == {"everplex_": ["b", "everplex"]}


def test_a_run_of_one_group_is_one_task(tmp_path: Path) -> None:
    """Without groups there is no group of tasks."""
    results = json.loads(export(str(save(complete(Fabric({"all": [5, 40]})), tmp_path / "run")), format="lm-eval"))
    assert set(results["results"]) == {"all"}
    assert "groups" not in results
