"""A longer search for seeds that break a promise: `python examples/simulate.py --from 10000 --seeds 100000`.

Prints each failing seed with what it broke; run one again with `--from SEED --seeds 1`. Every seed of this program is
checked by the real ledger, judge and merge as well.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulation.search import search


def main() -> int:
    """Search; the exit code is 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    last = options.first + options.seeds
    started = time.monotonic()
    found = 0
    for batch in search(options.first, last, ledger_every=1, processes=options.processes):
        for failure in batch.failures:
            found += 1
            print(failure, flush=True)
    print(f"{options.seeds} schedules in {time.monotonic() - started:.0f} s, {found} broke a promise")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
