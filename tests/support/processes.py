"""Real everplex processes that a test starts, watches, paces, signals and kills.

Each is a process group of its own. Those of `start` are forked from a server that has imported torch, so they begin in
a fraction of a second; those of `command` are started as a user starts them.
"""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from support import paced

DEADLINE_SECONDS = 90.0
"""After this long, what a test waits for will not happen."""
_TESTS = Path(__file__).parent.parent


class Pipes:
    """What paced processes tell, and the leave that they are given."""

    def __init__(self, folder: Path, *, gated: bool) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.counts: Counter[str] = Counter()
        """How often each event was seen."""
        self.pids: set[int] = set()
        """Processes that told something."""
        os.mkfifo(folder / "events")
        # Both ends are held open here, so that neither side ever waits for the other to come.
        self._events = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self._gate: int | None = None
        self._rest = b""
        if gated:
            os.mkfifo(folder / "gate")
            self._gate = os.open(folder / "gate", os.O_RDWR)

    def fileno(self) -> int:
        """Return what can be read once something was told."""
        return self._events

    def allow(self, evaluations: int) -> None:
        """Let so many more evaluations begin."""
        assert self._gate is not None
        os.write(self._gate, b"." * evaluations)

    def read(self, timeout: float = 0.0) -> bool:
        """Take in what was told; waits for the first so long, and says whether there was something."""
        if not select.select([self._events], [], [], timeout)[0]:
            return False
        *lines, self._rest = (self._rest + os.read(self._events, 1 << 16)).split(b"\n")
        for line in lines:
            what, pid, _ = line.decode().split(" ", 2)
            self.counts[what] += 1
            self.pids.add(int(pid))
        return True

    def wait_for(self, what: str, count: int) -> None:
        """Wait until an event was told so often."""
        end = time.monotonic() + DEADLINE_SECONDS
        while self.counts[what] < count:
            assert self.read(max(0.0, end - time.monotonic())), f"{what}: {self.counts[what]} times, not {count}"

    def close(self) -> None:
        """Forget the pipes."""
        os.close(self._events)
        if self._gate is not None:
            os.close(self._gate)


@dataclass
class Running:
    """One process group; `output` and `errors` are the files of its stdout and stderr."""

    process: BaseProcess | subprocess.Popen[bytes]
    output: Path
    errors: Path
    pipes: Pipes

    @property
    def pid(self) -> int:
        """Process id, and that of the group."""
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float = DEADLINE_SECONDS) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait(timeout)
        self.process.join(timeout)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout} s: {self.errors.read_text()}"
        return code

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long for its end; says whether it came."""
        try:
            self.wait(seconds)
        except (AssertionError, subprocess.TimeoutExpired):
            return False
        return True

    def text(self) -> str:
        """Return what it said on stderr."""
        return self.errors.read_text()


@dataclass
class Processes:
    """Starts processes; all of them are gone when the test ends."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    """Added to that of the test."""
    started: list[Running] = field(default_factory=list)

    def start(self, *arguments: object, gated: bool = False, environment: dict[str, str] | None = None) -> Running:
        """Fork a process that runs an `everplex` command line."""
        pipes, output, errors = self._prepare(gated)
        process = _context().Process(
            target=_run, args=([str(one) for one in arguments], self._variables(pipes, environment), output, errors)
        )
        process.start()
        return self._keep(Running(process, output, errors, pipes))

    def command(self, *arguments: object, gated: bool = False, launcher: Sequence[str] = ()) -> Running:
        """Start a command line as a user does, in a new interpreter; `launcher` are the interpreter's own arguments."""
        pipes, output, errors = self._prepare(gated)
        script = [*launcher, str(Path(paced.__file__))]
        with output.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *script, *map(str, arguments)],
                stdout=stdout,
                stderr=stderr,
                env=self._variables(pipes, None),
                start_new_session=True,
            )
        return self._keep(Running(process, output, errors, pipes))

    def run(self, *arguments: object, environment: dict[str, str] | None = None) -> Running:
        """Fork a process and wait for its end."""
        running = self.start(*arguments, environment=environment)
        running.wait()
        return running

    def stop(self) -> None:
        """Kill what is left."""
        for running in self.started:
            with suppress(ProcessLookupError):
                running.send_group(signal.SIGKILL)
            running.wait()
            running.pipes.close()

    def _prepare(self, gated: bool) -> tuple[Pipes, Path, Path]:
        folder = self.folder / f"process-{len(self.started)}"
        return Pipes(folder, gated=gated), folder / "stdout", folder / "stderr"

    def _variables(self, pipes: Pipes, more: dict[str, str] | None) -> dict[str, str]:
        ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": _python_path()}
        return {**os.environ, **ours, paced.VARIABLE: str(pipes.folder), **self.environment, **(more or {})}

    def _keep(self, running: Running) -> Running:
        self.started.append(running)
        return running


@contextmanager
def processes(folder: Path, environment: dict[str, str] | None = None) -> Iterator[Processes]:
    """Start processes in the block; whatever still runs at its end is killed."""
    made = Processes(folder, environment or {})
    try:
        yield made
    finally:
        made.stop()


def wait_until_gone(pids: Sequence[int]) -> None:
    """Wait until none of these processes, which need be no children of this one, runs any more."""
    end = time.monotonic() + DEADLINE_SECONDS
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        gone = select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]
        os.close(handle)
        assert gone, f"process {pid} still runs"


def _python_path() -> str:
    return os.pathsep.join([str(_TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preloaded"])
    # The server learns where the tests are from its environment alone.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _python_path()
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _run(arguments: list[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    """Be the process."""
    os.setsid()
    for path, number in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from everplex.cli import main

    torch.set_num_threads(1)
    paced.pace(Path(environment[paced.VARIABLE]))
    sys.argv[1:] = arguments
    main()
