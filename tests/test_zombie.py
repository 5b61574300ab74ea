"""Ranks that stand still and go on later, die, or have nothing to do: every chunk counts once, same numbers."""

import signal
from pathlib import Path

import pytest
from support.corpora import make_documents, write_jsonl
from support.processes import Processes, Running
from support.runs import QuietRun, numbers, records

from everplex import api


def _stop_in_flight(started: Processes, quiet: QuietRun, out: Path) -> tuple[Running, Running]:
    """Start two ranks; the first has stored two chunks and stands still in its third."""
    ranks = [
        started.start(*quiet.evaluate(out, "--rank", rank, "--world-size", 2, "--refresh-seconds", 0), gated=True)
        for rank in range(2)
    ]
    ranks[0].pipes.allow(2)
    ranks[0].pipes.wait_for("stored", 2)
    ranks[0].pipes.wait_for("evaluating", 3)
    ranks[0].send(signal.SIGSTOP)
    return ranks[0], ranks[1]


def test_a_rank_that_wakes_up_after_the_end(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """The others take over its chunks and seal; what it writes then is told as late and changes nothing."""
    out = quiet.copy(tmp_path / "out")
    zombie, other = _stop_in_flight(started, quiet, out)
    other.pipes.allow(quiet.num_chunks)
    assert other.wait() == 0, other.text()
    assert numbers(out) == quiet.numbers
    sealed = (out / "summary.json").read_bytes()
    zombie.send(signal.SIGCONT)
    zombie.pipes.allow(quiet.num_chunks)
    assert zombie.wait() == 0, zombie.text()
    assert len(records(out)) > quiet.num_chunks
    assert "the seal does not count" in zombie.text()
    assert (out / "summary.json").read_bytes() == sealed
    assert api.reduce(str(out)).nll == quiet.numbers["nll"]


@pytest.mark.parametrize("signals", [[signal.SIGCONT], [signal.SIGCONT, signal.SIGTERM]], ids=["goes on", "is ended"])
def test_a_rank_that_wakes_up_before_the_end(
    quiet: QuietRun, started: Processes, tmp_path: Path, signals: list[signal.Signals]
) -> None:
    """Both evaluations of its chunk are stored, one counts."""
    out = quiet.copy(tmp_path / "out")
    zombie, other = _stop_in_flight(started, quiet, out)
    left = quiet.num_chunks - 2
    other.pipes.allow(left - 1)
    other.pipes.wait_for("evaluating", left)  # the last one, beyond the gate
    for number in signals:
        zombie.send(number)
    zombie.pipes.allow(quiet.num_chunks)
    if len(signals) == 1:
        zombie.pipes.wait_for("stored", 3)
    other.pipes.allow(quiet.num_chunks)
    assert other.wait() == 0, other.text()
    assert zombie.wait() == (0 if len(signals) == 1 else 75), zombie.text()
    assert numbers(out) == quiet.numbers
    assert len(records(out)) >= quiet.num_chunks + (len(signals) == 1)
    assert set(records(out)) == set(records(quiet.planned.parent / "whole"))


def test_a_rank_that_dies(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """The others finish its chunks and the run, without a restart."""
    out = quiet.copy(tmp_path / "out")
    dead, other = _stop_in_flight(started, quiet, out)
    dead.send(signal.SIGKILL)
    other.pipes.allow(quiet.num_chunks)
    assert other.wait() == 0, other.text()
    assert numbers(out) == quiet.numbers
    assert len(records(out)) == quiet.num_chunks


def test_ranks_without_chunks(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """In a world larger than the plan some ranks have nothing of their own; all end well, with the same numbers."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(3))
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert started.run(*quiet.run(alone, corpus=corpus)).wait() == 0
    assert len(records(alone)) < 4
    ranks = [started.start(*quiet.run(out, "--rank", rank, "--world-size", 4, corpus=corpus)) for rank in range(4)]
    assert [rank.wait() for rank in ranks] == [0] * 4, "".join(rank.text() for rank in ranks)
    assert numbers(out) == numbers(alone)
