"""An object store from end to end: plan, evaluate, stop, resume, look, merge, share a plan; from several machines."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cloud import Cloud, cloud
from support.faultproxy import Fault, Rule
from support.processes import Processes, Running
from support.runs import CORPUS_OPTIONS, MACHINE_OPTIONS, QuietRun, numbers, records


@pytest.fixture(scope="module")
def cloudy() -> Iterator[Cloud]:
    """Run a store whose requests fail now and then: refused, reset, answered late, cut off, unacknowledged."""
    faults = (Fault.REPLY, Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.LATENCY, Fault.TRUNCATE)
    with cloud(seed=1) as made:
        made.proxy.rules += [Rule(fault, share=0.01, seconds=0.1) for fault in faults]
        yield made


def _done(running: Running) -> str:
    """Wait for a good end; returns what was printed."""
    assert running.wait() == 0, running.text()
    return running.output.read_text()


def test_a_run_in_a_bucket(quiet: QuietRun, started: Processes, cloudy: Cloud, tmp_path: Path) -> None:
    """Corpus and plan in S3, two ranks stopped and resumed as one, and a merge on a machine that saw none of it."""
    started.environment |= cloudy.environment
    url = cloudy.make_run("whole")
    cloudy.server.put("whole", "corpus/part-0.jsonl", quiet.corpus.read_bytes())
    corpus = "s3://whole/corpus/*.jsonl"

    _done(started.run("plan", corpus, "--tokenizer", quiet.model, "--out", url, *CORPUS_OPTIONS))
    ranks = [started.start(*quiet.evaluate(url, "--rank", rank, "--world-size", 2), gated=True) for rank in range(2)]
    for rank in ranks:
        rank.pipes.allow(2)
        rank.pipes.wait_for("stored", 2)
        rank.pipes.wait_for("evaluating", 3)
        rank.send(signal.SIGTERM)
        rank.pipes.allow(1)
    assert [rank.wait() for rank in ranks] == [75, 75]

    status = json.loads(_done(started.run("status", url, "--json")))
    done = len(records(cloudy.download("whole", tmp_path / "half")))
    assert (status["chunks"], status["done"], status["state"]) == (quiet.num_chunks, done, "started")

    last = started.run(*quiet.run(url, corpus=corpus))
    _done(last)
    for running in (*ranks, last):
        running.pipes.read()
    assert sum(running.pipes.counts["evaluated"] for running in (*ranks, last)) == quiet.num_chunks
    elsewhere = {"EVERPLEX_CACHE": str(tmp_path / "elsewhere")}
    merged = json.loads(_done(started.run("reduce", url, "--json", environment=elsewhere)))
    whole = cloudy.download("whole", tmp_path / "whole")
    assert numbers(whole) == quiet.numbers
    assert merged["nll"] == quiet.numbers["nll"]


def test_a_plan_that_two_runs_share(quiet: QuietRun, started: Processes, cloudy: Cloud, tmp_path: Path) -> None:
    """`--plan` takes the chunks from one bucket for a run in another, and for one in a folder: same numbers."""
    started.environment |= cloudy.environment
    plan = cloudy.upload(quiet.planned, "plans")
    in_bucket = cloudy.make_run("shared")
    for out in (in_bucket, tmp_path / "folder"):
        _done(started.run("evaluate", "--model", quiet.model, "--plan", plan, "--out", out, *MACHINE_OPTIONS))
    _done(started.run("reduce", in_bucket))
    assert numbers(cloudy.download("shared", tmp_path / "copy")) == numbers(tmp_path / "folder") == quiet.numbers
    assert not any("/plan/" in key for key in cloudy.server.keys("shared"))
