"""Kills real worker processes at random moments, over and over, against a store that fails now and then."""

import random
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.cloud import Cloud, cloud
from support.faultproxy import Fault, Rule
from support.processes import Processes, Running, processes
from support.runs import QuietRun, numbers, records

FAULTS = (Fault.REPLY, Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.LATENCY, Fault.TRUNCATE)
LONGEST_START_SECONDS = 20.0
LONGEST_LIFE_SECONDS = 1.5


@dataclass
class Tally:
    """What a campaign did."""

    kills: int = 0
    """Processes that SIGKILL ended."""
    runs: int = 0
    """Runs that came to their end, each with the bits of the quiet one."""
    incarnations: int = 0
    evaluations: int = 0
    lost: int = 0
    """Evaluations that are in no record."""
    requests: int = 0
    faults: int = 0
    seconds: float = 0.0


def campaign(folder: Path, quiet: QuietRun, *, kills: int, seed: int, share: float = 0.05) -> Tally:
    """Kill until so many processes were killed; finish the run at hand, check it against the quiet one, begin the next.

    `share` of all requests fail, in five ways. Raises AssertionError where numbers differ or too much was lost.
    """
    began = time.monotonic()
    environment = {"EVERPLEX_CACHE": str(folder / "cache")}
    with cloud(seed) as store, processes(folder / "processes", environment) as started:
        started.environment |= store.environment
        store.proxy.rules += [Rule(fault, share=share / len(FAULTS), seconds=0.2) for fault in FAULTS]
        played = _Campaign(quiet, store, started, kills, random.Random(seed))
        while played.tally.kills < kills:
            played.play_run()
        played.tally.requests = len(store.proxy.requests)
        played.tally.faults = sum(request.fault is not None for request in store.proxy.requests)
    played.tally.seconds = time.monotonic() - began
    return played.tally


class _Campaign:
    def __init__(self, quiet: QuietRun, store: Cloud, started: Processes, kills: int, rng: random.Random) -> None:
        self.tally = Tally()
        self._quiet = quiet
        self._store = store
        self._started = started
        self._kills = kills
        self._rng = rng

    def play_run(self) -> None:
        """Take one run from nothing to its end, killing on the way, and check what is left of it."""
        bucket = f"run-{self.tally.runs}"
        url = self._store.make_run(bucket)
        before = self.tally.kills, self.tally.evaluations
        while any(self._play_world(url)):
            pass
        killed, evaluations = self.tally.kills - before[0], self.tally.evaluations - before[1]
        copy = self._store.download(bucket, self._started.folder / bucket)
        assert numbers(copy) == self._quiet.numbers
        lost = evaluations - len(records(copy, "work", "sentinel"))
        assert lost <= 2 * killed, f"{lost} evaluations lost by {killed} kills"
        self.tally.runs += 1
        self.tally.lost += lost

    def _play_world(self, url: str) -> list[int]:
        """Start some ranks, kill some of them, wait for all; returns their exit codes."""
        size = self._rng.choice([1, 2, 3])
        common = ("--plan-wait-seconds", 1, "--world-size", size)  # the rank that plans may be dead
        ranks = [self._started.start(*self._quiet.run(url, *common, "--rank", rank)) for rank in range(size)]
        if self.tally.kills < self._kills:
            spared = self._rng.randint(0, size - 1) if self._rng.random() < 0.2 else 0
            for rank in ranks[spared:]:
                self._kill(rank)
        codes = [rank.wait() for rank in ranks]
        for rank in ranks:
            rank.pipes.read()
            self.tally.evaluations += rank.pipes.counts["evaluating"]
        assert set(codes) <= {0, 75, -signal.SIGKILL}, "".join(rank.text() for rank in ranks)
        self.tally.kills += codes.count(-signal.SIGKILL)
        self.tally.incarnations += size
        return codes

    def _kill(self, rank: Running) -> None:
        """Kill a process at a random moment of its life, unless it ends before."""
        assert isinstance(rank.process, BaseProcess)
        if self._rng.random() < 0.7:
            # Until it evaluates, as most of its life is the start, or ends.
            connection.wait([rank.pipes.fileno(), rank.process.sentinel], LONGEST_START_SECONDS)
        if not rank.ends_within(self._rng.uniform(0.0, LONGEST_LIFE_SECONDS)):
            rank.send(signal.SIGKILL)
