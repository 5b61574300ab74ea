"""The rehearsal: the plan that a run would make, one timed batch, and nothing written."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.corpora import make_documents, write_jsonl
from support.evaluation import make_chunk

import everplex
from everplex.cli import run_command_line
from everplex.rehearsal import DryRun, first_rows
from everplex.stages.report import plan_facts


def test_it_plans_what_a_run_would_and_writes_nothing(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's facts are those of the plan that is made afterwards; OUT does not come to be."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(20))
    out = tmp_path / "out"
    options = ["--out", str(out), "--context", "64", "--chunk-tokens", "256", "--group-by", "topic"]
    run = ["run", str(corpus), "--model", str(tiny_model), *options, "--dry-run"]
    assert run_command_line([*run, "--json"]) == 0
    dry = msgspec.json.decode(capsys.readouterr().out, type=DryRun)
    assert not out.exists()
    planned = everplex.plan(
        str(corpus), tokenizer=str(tiny_model), out=str(out), context=64, chunk_tokens=256, group_by="topic"
    )
    assert dry.plan == plan_facts(planned)
    assert 0 < dry.timed_tokens <= 256
    assert dry.tokens_per_second == pytest.approx(dry.timed_tokens / dry.timed_seconds)
    assert dry.estimated_seconds == pytest.approx(int(dry.plan["input_tokens"]) / dry.tokens_per_second)
    assert run_command_line(run) == 0
    assert f"nothing was written to {out}" in capsys.readouterr().out


def test_ranks_share_the_work(tmp_path: Path, tiny_model: Path) -> None:
    """The estimate is that of all ranks together."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(3))
    dry = everplex.dry_run(str(corpus), model=str(tiny_model), context=64, rank=0, world_size=4)
    assert dry.ranks == 4
    assert dry.estimated_seconds == pytest.approx(int(dry.plan["input_tokens"]) / dry.tokens_per_second / 4)


def test_it_fails_as_a_run_would(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A corpus that cannot be planned is refused here already."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": 1}\n')
    assert run_command_line(["run", str(corpus), "--model", str(tiny_model), "--context", "64", "--dry-run"]) == 2
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "rows"), [(1, 1), (4, 1), (8, 2), (9, 2), (100, 4)])
def test_a_batch_is_the_first_rows_that_fit(limit: int, rows: int) -> None:
    """Whole rows within the limit, and never none."""
    chunk = make_chunk([[1] * 5, [2] * 5, [3] * 5, [4] * 5])
    part = first_rows(chunk, limit)
    assert part.num_rows == rows
    assert part.num_inputs == len(part.scored_M) == 4 * rows
    assert np.array_equal(part.tokens_N, chunk.tokens_N[: 5 * rows])
