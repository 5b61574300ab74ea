"""How long the offline merge takes, and how much memory: `python examples/bench_reduce.py [CHUNKS...]`.

Makes a run of made-up records for each number of chunks (by default 10,000, 100,000 and 1,000,000), in roll-ups of 64,
on the local file system, and merges it in a process of its own.
"""

import hashlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from everplex.stages.layout import ROLLUP_EVERY, group_key
from everplex.stages.ledger import Ledger
from everplex.stages.records import (
    ChunkTable,
    CorpusSpec,
    Environment,
    GroupSpec,
    Header,
    ModelSpec,
    Plan,
    ProtocolSpec,
    Record,
    Run,
    TokenizerSpec,
)
from everplex.stages.reduce import reduce
from everplex.stages.segments import encode_record, encode_segment
from everplex.stages.stored import load_plan, load_run, save_plan, save_run
from everplex.storage.codec import sha256_hex
from everplex.storage.store import Store, open_store

NUM_GROUPS = 10
NUM_WORKERS = 64
DOCUMENTS = 4
"""Documents in a chunk; the last goes on in the next one."""
TOKENS = 8192
BUCKETS = 11
"""Of positions: a context of 1,024 tokens."""


def make_plan(num_chunks: int) -> Plan:
    """Return a plan of equal groups."""
    per_group = num_chunks // NUM_GROUPS
    rows = NUM_GROUPS * per_group
    return Plan(
        protocol=ProtocolSpec(name="bench", version=1, context=1024, label="made-up records"),
        corpus=CorpusSpec(digest="0" * 64),
        tokenizer=TokenizerSpec(name="bench", digest="0" * 64, vocab_size=49152, prefix_id=0),
        chunk_tokens=TOKENS,
        groups=[
            GroupSpec(name=f"g{g}", key=group_key(f"g{g}"), documents=per_group * (DOCUMENTS - 1) + 1)
            for g in range(NUM_GROUPS)
        ],
        chunks=ChunkTable(
            group=[g for g in range(NUM_GROUPS) for _ in range(per_group)],
            ordinal=[ordinal for _ in range(NUM_GROUPS) for ordinal in range(per_group)],
            content=[sha256_hex(row.to_bytes(8, "big")) for row in range(rows)],
            windows=[8] * rows,
            input_tokens=[TOKENS] * rows,
            tokens=[TOKENS] * rows,
            documents=[DOCUMENTS - 1] * rows,
            bytes=[4 * TOKENS] * rows,
            characters=[4 * TOKENS] * rows,
            words=[TOKENS // 2] * rows,
        ),
    )


def make_record(plan: Plan, row: int, chunk: str, rng: np.random.Generator) -> Record:
    """Return a record whose sums are possible."""
    doc_nll = (rng.uniform(2.0, 4.0, DOCUMENTS) * (TOKENS // DOCUMENTS)).tolist()
    nll = sum(doc_nll)
    first = plan.chunks.ordinal[row] * (DOCUMENTS - 1)
    return Record(
        chunk=chunk,
        content=plan.chunks.content[row],
        rank=row % NUM_WORKERS,
        nll=nll,
        nll_sq=1.5 * nll * nll / TOKENS,
        tokens=TOKENS,
        doc_ordinals=list(range(first, first + DOCUMENTS)),
        doc_nll=doc_nll,
        doc_tokens=[TOKENS // DOCUMENTS] * DOCUMENTS,
        position_nll=(rng.dirichlet(np.ones(BUCKETS)) * nll).tolist(),
        position_tokens=[8] + [8 << bucket for bucket in range(BUCKETS - 1)],
        nll_max=20.0,
        token_digest=sha256_hex(chunk.encode()),
        batch_tokens=TOKENS,
        batch_shape=[(8, 1024)],
        seconds=float(rng.uniform(0.1, 0.2)),
    )


def generate(store: Store, num_chunks: int) -> None:
    """Write plan, run, and all records, in roll-ups of 64."""
    plan = save_plan(store, make_plan(num_chunks))
    run = save_run(store, Run(plan=plan.digest(), model=ModelSpec(name="bench", digest="1" * 64), dtype="float32"))
    environment = Environment(
        everplex="0", torch="0", transformers="0", device_type="cpu", device_name="bench", dtype="float32", threads=1,
        attention="sdpa",
    )  # fmt: skip
    chunk_ids, run_id, digest = plan.chunk_ids(), run.id(), plan.digest()
    rng = np.random.default_rng(0)
    for number in range(NUM_WORKERS):
        rows = range(number, len(chunk_ids), NUM_WORKERS)
        worker = hashlib.sha256(str(number).encode()).hexdigest()[:32]
        for start in range(0, len(rows), ROLLUP_EVERY):
            lines = [
                encode_record(make_record(plan, row, chunk_ids[row], rng)) for row in rows[start : start + ROLLUP_EVERY]
            ]
            header = Header(
                run=run_id, plan=digest, worker=worker, seq=start + len(lines), first=start + 1, rank=number,
                world_size=NUM_WORKERS, device=f"host-{number}/cpu", environment=environment,
            )  # fmt: skip
            store.create(*encode_segment(header, lines))


def merge(url: str) -> None:
    """Merge the run at `url`; prints chunks, seconds of reading and of adding up, and peak memory."""
    store = open_store(url)
    started = time.perf_counter()
    plan, run = load_plan(store), load_run(store)
    ledger = Ledger(store, plan, run.id())
    ledger.refresh()
    read = time.perf_counter()
    summary = reduce(plan, run, ledger)
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not summary.complete:
        raise SystemExit(f"not complete: {summary.coverage}")
    print(
        f"{summary.coverage.accepted:>9,} chunks  read {read - started:6.1f} s  add up {ended - read:6.1f} s  "
        f"total {ended - started:6.1f} s  peak {peak:6.0f} MiB  perplexity {summary.perplexity}",
        flush=True,
    )


def main() -> None:
    """Generate and merge each size; a folder as argument is merged as it is."""
    if len(sys.argv) > 1 and not sys.argv[1].isdecimal():
        merge(sys.argv[1])
        return
    sizes = [int(argument) for argument in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            generate(open_store(folder), size)
            print(f"{size:>9,} chunks  generated in {time.perf_counter() - started:.1f} s", flush=True)
            subprocess.run([sys.executable, Path(__file__), folder], check=True)


if __name__ == "__main__":
    main()
