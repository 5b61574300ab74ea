"""What the writer costs the evaluation loop: a chunk every 0.5 s, a store that takes 50 ms more for every PUT.

Prints the loop's time with the writer on and off, and the writer's peak of Python memory for 200 and 2,000 chunks. The
aim is a difference within 1 %, and a peak that does not grow with the number of chunks. Takes about two minutes.
"""

import argparse
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.segments import Fabric, worker_id

from everplex.stages.write import Writer, WriterThread
from everplex.storage.local import LocalStore

FABRIC = Fabric({"a": [64] * 100})


class SlowStore(LocalStore):
    """A local folder whose PUT takes longer."""

    def __init__(self, folder: str, put_seconds: float) -> None:
        super().__init__(folder)
        self._put_seconds = put_seconds
        self.slowest_put_seconds = 0.0

    def create(self, key: str, data: bytes) -> None:
        """Wait, then create."""
        started = time.perf_counter()
        time.sleep(self._put_seconds)
        super().create(key, data)
        self.slowest_put_seconds = max(self.slowest_put_seconds, time.perf_counter() - started)


def evaluate(seconds: float) -> None:
    """Keep a core busy, as the part of an evaluation that holds the interpreter does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


class Timing(NamedTuple):
    """Of one loop, without the drain at its end."""

    loop_seconds: float
    submit_seconds: float
    slowest_put_seconds: float
    peak_bytes: int
    """Of Python memory, where it is traced."""


def loop(num_chunks: int, chunk_seconds: float, put_seconds: float, *, writing: bool) -> Timing:
    """Evaluate some chunks, and submit their records where `writing`."""
    records = [FABRIC.record(row) for row in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        store = SlowStore(folder, put_seconds)
        with WriterThread(Writer(), open_store=lambda: store, header=lambda: FABRIC.header(worker_id(0), 0)) as writer:
            submitting = 0.0
            started = time.perf_counter()
            for number in range(num_chunks):
                evaluate(chunk_seconds)
                if writing:
                    submitted = time.perf_counter()
                    writer.submit(records[number % len(records)])
                    submitting += time.perf_counter() - submitted
            seconds = time.perf_counter() - started
            writer.close()
            return Timing(seconds, submitting, store.slowest_put_seconds, tracemalloc.get_traced_memory()[1])


def peak_bytes(num_chunks: int) -> int:
    """Return the peak of what the writer allocates over so many chunks."""
    tracemalloc.start()
    peak = loop(num_chunks, 0.0, 0.0, writing=True).peak_bytes
    tracemalloc.stop()
    return peak


def main() -> int:
    """Measure; the exit code is 1 where an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--chunk-seconds", type=float, default=0.5)
    parser.add_argument("--put-seconds", type=float, default=0.05)
    options = parser.parse_args()
    off = loop(options.chunks, options.chunk_seconds, options.put_seconds, writing=False)
    on = loop(options.chunks, options.chunk_seconds, options.put_seconds, writing=True)
    ratio = on.loop_seconds / off.loop_seconds
    print(f"writer off {off.loop_seconds:.3f} s, on {on.loop_seconds:.3f} s, difference {100 * (ratio - 1):+.2f} %")
    print(f"inside submit {on.submit_seconds:.4f} s, slowest PUT {on.slowest_put_seconds:.3f} s")
    peak_bytes(200)
    few, many = peak_bytes(200), peak_bytes(2000)
    print(f"peak of the writer's memory: {few / 1e6:.2f} MB for 200 chunks, {many / 1e6:.2f} MB for 2,000")
    return 0 if ratio < 1.01 and many < 1.1 * few + 100_000 else 1


if __name__ == "__main__":
    sys.exit(main())
