"""Preempted workers: signals, time limits and vanished stores in real processes, and what the next run makes of it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cloud import Cloud, behind_proxy
from support.faultproxy import Fault, Rule, reply
from support.processes import Processes, Running
from support.runs import QuietRun, numbers, records
from support.s3 import S3Server, serve_s3

SEGMENTS = "/segments/"


def _start(started: Processes, quiet: QuietRun, out: object, allowed: int, *more: object) -> Running:
    """Start one rank, and wait until it is about to evaluate the chunk after the last allowed."""
    rank = started.start(*quiet.evaluate(out, "--rank", 0, "--world-size", 1, *more), gated=True)
    rank.pipes.allow(allowed)
    rank.pipes.wait_for("evaluating", allowed + 1)
    return rank


def _finish(started: Processes, quiet: QuietRun, out: object, *more: object) -> int:
    """Run to the end; returns the number of evaluations."""
    last = started.run(*quiet.evaluate(out, "--rank", 0, "--world-size", 1, *more))
    assert last.wait() == 0, last.text()
    last.pipes.read()
    return last.pipes.counts["evaluated"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_in_the_middle_of_a_chunk(
    quiet: QuietRun, started: Processes, tmp_path: Path, number: signal.Signals
) -> None:
    """Twice in a row, to the whole group: what was finished is stored, one line says what to do, exit code 75."""
    out = quiet.copy(tmp_path / "out")
    rank = _start(started, quiet, out, 3)
    rank.send_group(number)
    rank.send_group(number)
    rank.pipes.allow(1)
    assert rank.wait() == 75
    rank.pipes.read()
    finished = rank.pipes.counts["evaluated"]
    assert len(records(out)) == finished in {3, 4}
    last_line = rank.text().splitlines()[-1]
    assert number.name in last_line
    assert "run the same command again" in last_line
    assert _finish(started, quiet, out) == quiet.num_chunks - finished
    assert numbers(out) == quiet.numbers


def test_an_evaluation_that_does_not_end(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """A worker stuck in one evaluation is gone within the grace budget, and what it had finished is stored."""
    out = quiet.copy(tmp_path / "out")
    rank = _start(started, quiet, out, 4, "--grace-seconds", 2)
    rank.send(signal.SIGTERM)
    assert rank.wait() == 75
    assert len(records(out)) == 4
    assert "run the same command again" in rank.text()


def test_a_time_limit(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """`--max-seconds` ends like a signal does."""
    out = quiet.copy(tmp_path / "out")
    rank = started.run(*quiet.evaluate(out, "--max-seconds", 0.01))
    assert rank.wait() == 75
    assert "--max-seconds" in rank.text()
    assert "run the same command again" in rank.text()
    rank.pipes.read()
    assert len(records(out)) == rank.pipes.counts["evaluated"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """Run an S3 server."""
    with serve_s3() as running:
        yield running


@pytest.fixture
def cloud(server: S3Server, started: Processes) -> Iterator[Cloud]:
    """Send the processes that are started to a proxy in front of it."""
    with behind_proxy(server) as made:
        started.environment |= made.environment
        yield made


def _spooled() -> list[Path]:
    return list((Path(os.environ["EVERPLEX_CACHE"]) / "spool").rglob("*.zst"))


@pytest.mark.parametrize(
    "rule",
    [Rule(Fault.BLACKHOLE, "PUT", SEGMENTS), reply(503, "SlowDown", method="PUT", path=SEGMENTS)],
    ids=["black hole", "retries"],
)
def test_a_signal_while_the_store_does_not_answer(
    quiet: QuietRun, started: Processes, cloud: Cloud, tmp_path: Path, rule: Rule
) -> None:
    """In a call that never returns, and between retries: the rest goes to the spool, and the next run uploads it."""
    bucket = f"signal-{rule.fault.name.lower()}"
    url = cloud.upload(quiet.planned, bucket)
    rank = _start(started, quiet, url, 2, "--grace-seconds", 4)
    rank.pipes.wait_for("stored", 2)
    cloud.proxy.rules.append(rule)
    rank.pipes.allow(1)
    rank.pipes.wait_for("evaluated", 3)
    while not any(request.fault is rule.fault for request in cloud.proxy.requests):
        rank.pipes.read(0.05)
    rank.send_group(signal.SIGTERM)
    rank.pipes.allow(1)
    assert rank.wait() == 75
    assert "run the same command again" in rank.text()
    rank.pipes.read()
    waiting = _spooled()
    assert waiting
    cloud.proxy.rules.clear()
    evaluated = rank.pipes.counts["evaluated"] + _finish(started, quiet, url)
    assert evaluated == quiet.num_chunks
    assert f"uploaded {len(waiting)} segments" in started.started[-1].text()
    assert numbers(cloud.download(bucket, tmp_path / "copy")) == quiet.numbers


@pytest.mark.parametrize("path", [SEGMENTS, ""], ids=["writes", "everything"])
def test_a_store_that_is_gone_for_good(
    quiet: QuietRun, started: Processes, cloud: Cloud, tmp_path: Path, path: str
) -> None:
    """As long as there are inputs, evaluation goes on into the spool; exit code 75, and `upload-spool` uploads it."""
    bucket = f"gone-{'writes' if path else 'everything'}"
    url = cloud.upload(quiet.planned, bucket)
    rank = _start(started, quiet, url, 2, "--store-retry-seconds", 0)
    rank.pipes.wait_for("stored", 2)
    cloud.proxy.rules.append(reply(503, "ServiceUnavailable", method="PUT" if path else "", path=path))
    rank.pipes.allow(quiet.num_chunks)
    assert rank.wait() == 75
    rank.pipes.read()
    evaluated = rank.pipes.counts["evaluated"]
    assert evaluated == len(_spooled()) + 2
    assert evaluated == quiet.num_chunks or not path
    assert "upload-spool" in rank.text()
    cloud.proxy.rules.clear()
    upload = started.run("upload-spool", url)
    assert upload.wait() == 0, upload.text()
    assert not _spooled()
    assert evaluated + _finish(started, quiet, url) == quiet.num_chunks
    assert numbers(cloud.download(bucket, tmp_path / "copy")) == quiet.numbers
