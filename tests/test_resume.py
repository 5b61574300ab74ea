"""Killed, torn, changed and finished runs: what the next run makes of them."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import make_documents, write_jsonl
from support.models import save_tiny_model
from support.processes import Processes, Running, wait_until_gone
from support.runs import CORPUS_OPTIONS, QuietRun, numbers, records

from everplex import api
from everplex.cli import run_command_line
from everplex.stages.evaluate import Evaluator
from everplex.stages.summary import Summary


def _start_ranks(started: Processes, quiet: QuietRun, out: Path, world_size: int, allowed: int) -> list[Running]:
    ranks = [
        started.start(*quiet.evaluate(out, "--rank", rank, "--world-size", world_size), gated=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.pipes.allow(allowed)
    return ranks


def test_killed_again_and_again_and_continued_at_other_world_sizes(
    quiet: QuietRun, started: Processes, tmp_path: Path
) -> None:
    """SIGKILL of everything, four times, in worlds of 2, 3, 1 and 2: at most two chunks a rank and kill are lost."""
    out = quiet.copy(tmp_path / "out")
    begun = kills = 0
    for world_size, allowed in ((2, 2), (3, 1), (1, 3), (2, 1)):
        ranks = _start_ranks(started, quiet, out, world_size, allowed)
        for rank in ranks:
            rank.pipes.wait_for("evaluating", allowed + 1)
        for rank in ranks:
            rank.send_group(signal.SIGKILL)
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * world_size
        wait_until_gone([rank.pid for rank in ranks])
        begun += sum(rank.pipes.counts["evaluating"] for rank in ranks)
        kills += world_size
        assert begun - len(records(out)) <= 2 * kills
    last = started.run(*quiet.evaluate(out))
    assert last.wait() == 0, last.text()
    last.pipes.read()
    assert numbers(out) == quiet.numbers
    assert begun + last.pipes.counts["evaluating"] <= quiet.num_chunks + 2 * kills
    assert set(records(out)) == set(records(quiet.planned.parent / "whole"))


class _Stopped(Exception):  # noqa: N818 - it is no error
    """What ends an evaluation in this process."""


@contextmanager
def _evaluations(monkeypatch: pytest.MonkeyPatch, allowed: int = 1 << 30) -> Iterator[list[int]]:
    """Count the evaluations of this process, and stop before the one after the last allowed."""
    seen: list[int] = []
    evaluate: Callable[..., Any] = Evaluator.evaluate

    def counting(self: Evaluator, chunk: Any, **more: Any) -> Any:
        if len(seen) == allowed:
            raise _Stopped
        seen.append(1)
        return evaluate(self, chunk, **more)

    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", counting)
        yield seen
    torch.set_num_threads(threads)


def _evaluate(quiet: QuietRun, out: Path, **more: Any) -> Summary:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "threads": 1, "batch_tokens": "256", "audit": 0.0}
    return api.evaluate(model=str(quiet.model), out=str(out), **options | more)


def _evaluate_some(quiet: QuietRun, out: Path, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    with _evaluations(monkeypatch, allowed), pytest.raises(_Stopped):
        _evaluate(quiet, out)
    assert len(records(out)) == allowed


def test_stopped_after_every_number_of_chunks(quiet: QuietRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of chunks at which a run was stopped, the next one evaluates the others, with equal bits."""
    for done in range(quiet.num_chunks):
        out = quiet.copy(tmp_path / f"{done}")
        _evaluate_some(quiet, out, monkeypatch, done)
        with _evaluations(monkeypatch) as seen:
            _evaluate(quiet, out)
        assert len(seen) == quiet.num_chunks - done
        assert numbers(out) == quiet.numbers


def test_nothing_is_evaluated_again_on_a_finished_run(
    quiet: QuietRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run answers with its sealed numbers, as any world's rank, without loading the model."""
    out = quiet.copy(tmp_path / "out")
    whole = _evaluate(quiet, out)
    with _evaluations(monkeypatch, 0):
        assert _evaluate(quiet, out).nll == whole.nll
        assert _evaluate(quiet, out, rank=2, world_size=3).nll == whole.nll


@pytest.mark.parametrize("spoil", ["deleted", "torn", "flipped", "renamed", "foreign"])
def test_a_spoilt_segment_is_evaluated_again(
    quiet: QuietRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """A segment in the middle that is gone, damaged or of something else costs its chunk's time and nothing else."""
    out = quiet.copy(tmp_path / "out")
    _evaluate_some(quiet, out, monkeypatch, 5)
    victim = sorted(out.glob("segments/*/*.zst"))[2]
    data = victim.read_bytes()
    if spoil == "foreign":
        other = quiet.copy(tmp_path / "other")
        _evaluate(quiet, other, dtype="bfloat16")
        shutil.copytree(other / "segments", out / "segments", dirs_exist_ok=True)
    victim.unlink()
    if spoil == "torn":
        victim.write_bytes(data[: len(data) // 2])
    elif spoil == "flipped":
        victim.write_bytes(data[:50] + bytes([data[50] ^ 4]) + data[51:])
    elif spoil == "renamed":
        victim.with_name(victim.name.replace("00000002", "00000009")).write_bytes(data)
    with _evaluations(monkeypatch) as seen:
        summary = _evaluate(quiet, out)
    assert len(seen) == quiet.num_chunks - 4
    assert numbers(out) == quiet.numbers
    aside = {"deleted": 0, "foreign": quiet.num_chunks}.get(spoil, 1)
    assert summary.coverage.corrupt == aside


def _other_weights(model: Path) -> None:
    save_tiny_model(model, seed=1)


def _other_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"</s>"', '"</t>"'))


CHANGES: dict[str, tuple[str, Callable[[Path], object] | None, dict[str, str]]] = {
    "weights": ("model", _other_weights, {}),
    "tokenizer": ("tokenizer", _other_tokenizer, {}),
    "corpus": ("corpus", None, {}),
    "protocol": ("protocol", None, {"--protocol": "bos-every-window"}),
    "context": ("context", None, {"--context": "32"}),
    "chunk size": ("chunk", None, {"--chunk-tokens": "512"}),
    "dtype": ("dtype", None, {"--dtype": "bfloat16"}),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_input_is_refused_by_name(
    quiet: QuietRun, tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other weights, tokenizer, corpus, protocol, context, chunks or dtype: exit code 2, the field, no new segment."""
    field, spoil, options = CHANGES[change]
    out = Path(shutil.copytree(quiet.planned.parent / "whole", tmp_path / "out"))
    model = Path(shutil.copytree(quiet.model, tmp_path / "model"))
    corpus = Path(shutil.copy(quiet.corpus, tmp_path / "corpus.jsonl"))
    if spoil is not None:
        spoil(model)
    if change == "corpus":
        write_jsonl(corpus, make_documents(24, seed=1))
    given = dict(zip(CORPUS_OPTIONS[::2], map(str, CORPUS_OPTIONS[1::2]), strict=True)) | options
    arguments = ["run", str(corpus), "--model", str(model), "--out", str(out), "--threads", "1"]
    before = sorted(out.rglob("*"))
    assert run_command_line([*arguments, *(word for pair in given.items() for word in pair)]) == 2
    assert sorted(out.rglob("*")) == before
    complaint = capfd.readouterr().err
    assert field in complaint
    assert "differs" in complaint
    assert "Traceback" not in complaint
