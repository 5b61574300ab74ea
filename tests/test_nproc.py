"""Local ranks under launchers: signals, deaths, usage errors, and races of starters."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from support.processes import Processes, Running, wait_until_gone
from support.runs import MACHINE_OPTIONS, QuietRun, numbers, records

from everplex.launch import worst_exit_code

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def _start_two(
    started: Processes, quiet: QuietRun, out: Path, *more: object, launcher: tuple[str, ...] = ()
) -> Running:
    """Start two ranks, and wait until both are in the middle of a chunk."""
    running = started.command(*quiet.evaluate(out, *more), gated=True, launcher=launcher)
    running.pipes.allow(1)
    running.pipes.wait_for("evaluating", 3)
    assert len(running.pipes.pids) == 2
    return running


def _assert_stored(running: Running, out: Path, before: int) -> int:
    """Assert that all that was evaluated is stored; returns how much that is by now."""
    running.pipes.read()
    stored = len(records(out))
    assert stored == before + running.pipes.counts["evaluated"]
    return stored


def test_launchers_that_are_stopped_killed_and_lose_a_rank(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """Every end of a launcher keeps what its ranks finished and leaves no process; the last run gives the same bits."""
    out = quiet.copy(tmp_path / "out")

    stopped = _start_two(started, quiet, out, "--nproc", 2)
    stopped.send_group(signal.SIGTERM)
    stopped.pipes.allow(2)
    assert stopped.wait() == 75
    assert stopped.text().count("run the same command again") >= 1
    wait_until_gone([*stopped.pipes.pids])
    stored = _assert_stored(stopped, out, 0)

    orphaned = _start_two(started, quiet, out, "--nproc", 2)
    orphaned.send(signal.SIGKILL)
    orphaned.pipes.allow(2)
    wait_until_gone([*orphaned.pipes.pids])
    stored = _assert_stored(orphaned, out, stored)

    by_torchrun = _start_two(started, quiet, out, launcher=TORCHRUN)
    by_torchrun.send(signal.SIGTERM)
    by_torchrun.pipes.allow(2)
    assert by_torchrun.wait() != 0
    wait_until_gone([*by_torchrun.pipes.pids])
    assert by_torchrun.text().count("received SIGTERM") == 2
    _assert_stored(by_torchrun, out, stored)

    maimed = _start_two(started, quiet, out, "--nproc", 2)
    os.kill(min(maimed.pipes.pids), signal.SIGKILL)
    maimed.pipes.allow(2)
    assert maimed.wait() == 75
    wait_until_gone([*maimed.pipes.pids])
    assert re.search(r"rank \d was ended by SIGKILL; run the same command again", maimed.text())
    assert not re.search(r"Traceback|W\d{4} ", maimed.text())

    last = started.command(*quiet.evaluate(out, "--nproc", 2))
    assert last.wait() == 0, last.text()
    assert numbers(out) == quiet.numbers


def test_a_usage_error_of_ranks_is_told_once_a_rank(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """What no rank can do is tried once, and ends with exit code 2."""
    model = Path(shutil.copytree(quiet.model, tmp_path / "model"))
    (model / "model.safetensors").write_bytes(b"not weights")
    out = quiet.copy(tmp_path / "out")
    running = started.command("evaluate", "--model", model, "--out", out, *MACHINE_OPTIONS, "--nproc", 2)
    assert running.wait() == 2, running.text()
    assert running.text().count("rank 0") == 1
    assert "Traceback" not in running.text()
    assert not records(out)


def test_eight_starters_make_one_run(quiet: QuietRun, started: Processes, tmp_path: Path) -> None:
    """Eight first starts at once, two of them of something else: one plan, one identity; who differs is refused."""
    out = tmp_path / "out"
    same = [started.start(*quiet.run(out)) for _ in range(6)]
    other = [started.start(*quiet.run(out, "--context", 32)) for _ in range(2)]
    codes = [{running.wait() for running in group} for group in (same, other)]
    assert codes in ([{0}, {2}], [{2}, {0}])
    refused = (other if codes[1] == {2} else same)[0]
    assert "context" in refused.text()
    if codes[0] == {0}:
        assert numbers(out) == quiet.numbers


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([0, 0], 0), ([0, 75], 75), ([75, 2, 0], 2), ([2, 4, 75], 4), ([0, 75, 1], 1), ([0, 139], 1), ([], 1)],
)
def test_the_worst_exit_code_speaks(codes: list[int], worst: int) -> None:
    """4 before 2 before what nobody expected before 75 before 0."""
    assert worst_exit_code(codes) == worst
