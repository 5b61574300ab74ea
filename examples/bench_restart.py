"""What a restart reads: objects and bytes that one reader fetches of a run of 64 ranks and a million chunks.

The names are those that real writers give (one segment per chunk, every 64th a roll-up); the sizes are measured on real
segments of each kind. A reader fetches a roll-up in place of the 64 segments that it covers. Nothing is stored, so
`--chunks 1000000` takes seconds; `--restarts` says how many incarnations each rank has had, as each starts anew and
leaves a tail without a roll-up.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.segments import DictStore, Fabric, worker_id

from everplex.stages.layout import ROLLUP_EVERY, parse_segment_key
from everplex.stages.ledger import Ledger
from everplex.stages.writer import Writer, perform

FABRIC = Fabric({"a": [64] * ROLLUP_EVERY * 3})


def write(store: DictStore, num_chunks: int) -> None:
    """Let a real writer store some chunks, one segment each."""
    writer = Writer()
    for row in range(num_chunks):
        writer.submit(FABRIC.record(row))
        while (step := writer.next(0.0)) is not None:
            writer.succeeded(perform(step, store, None, lambda: FABRIC.header(worker_id(0), 0)))


def main() -> int:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--restarts", type=int, default=4, help="incarnations of each rank so far")
    options = parser.parse_args()

    store = DictStore()
    tail = ROLLUP_EVERY // 2
    write(store, 2 * ROLLUP_EVERY + tail)
    sizes = {True: 0, False: 0}
    counts = {True: 0, False: 0}
    for key, data in store.objects.items():
        name = parse_segment_key(key)
        if name is not None:
            sizes[name.is_rollup] += len(data)
            counts[name.is_rollup] += 1
    store.gets.clear()
    Ledger(store, FABRIC.plan, FABRIC.run_id).refresh()
    if len(store.gets) != 2 + tail:
        print(f"the reader fetched {len(store.gets)} objects, expected {2 + tail}")
        return 1

    single, rollup = sizes[False] / counts[False], sizes[True] / counts[True]
    workers = options.ranks * options.restarts
    per_worker = options.chunks // workers
    rollups, rest = divmod(per_worker, ROLLUP_EVERY)
    fetched = workers * (rollups + rest)
    fetched_bytes = workers * (rollups * rollup + rest * single)
    print(f"{options.chunks:,} chunks by {options.ranks} ranks in {options.restarts} incarnations each")
    print(f"a segment of one record has {single:.0f} bytes, a roll-up of {ROLLUP_EVERY} records {rollup:.0f}")
    print(f"objects listed: {options.chunks:,} ({-(-options.chunks // 1000):,} pages of 1,000)")
    print(f"without roll-ups a reader fetches {options.chunks:,} objects, {options.chunks * single / 1e6:.0f} MB")
    print(f"with roll-ups    a reader fetches {fetched:,} objects, {fetched_bytes / 1e6:.0f} MB")
    print(f"all {options.ranks} ranks: {options.ranks * fetched:,} in place of {options.ranks * options.chunks:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
