"""Measure how soon a run that is nearly or wholly done begins: seconds to its first new batch, or to its end.

usage: bench_start.py [--chunks N] [--left N] [--work FOLDER]

Plans N tiny documents, a chunk each, for a tiny model, and records all but the last ones with made-up losses, by a real
writer: a segment per chunk, every 64th a roll-up. Then real processes resume: they tell when they began, when the model
was loaded, and when the first batch was due. Two times: what came before the first batch but for loading the model, and
a whole `everplex run` once everything is recorded and once it is sealed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.models import save_tiny_model
from support.segments import ENVIRONMENT

import everplex
from everplex.stages.records import Header, Plan, Run
from everplex.stages.stored import load_chunk, load_run
from everplex.stages.tally import Losses, make_record
from everplex.stages.writer import Writer, perform
from everplex.storage.store import open_store

_RESUME = """
import json, os, sys, time
began = time.perf_counter()
from everplex import cli, worker
from everplex.stages import evaluate
times = {}
load = worker.load_evaluator
def timed_load(*given):
    start = time.perf_counter()
    found = load(*given)
    times["loading"] = time.perf_counter() - start
    return found
def first_batch(*given, **options):
    times["all"] = time.perf_counter() - began
    print(json.dumps(times), flush=True)
    os._exit(0)
worker.load_evaluator, evaluate.Evaluator.evaluate = timed_load, first_batch
sys.exit(cli.main(sys.argv[1:]))
"""


def record_all_but(work: Path, plan: Plan, left: int) -> None:
    """Record the chunks but the last ones as a worker would."""
    store = open_store(str(work / "out"))
    run: Run = load_run(store)
    worker = uuid.uuid4().hex

    def header() -> Header:
        return Header(
            run=run.id(), plan=run.plan, worker=worker, seq=0, first=0, rank=0, world_size=1, device="made-up/cpu",
            environment=ENVIRONMENT,
        )  # fmt: skip

    writer = Writer()
    for chunk_id, content in list(zip(plan.chunk_ids(), plan.chunks.content, strict=True))[: len(plan.chunks) - left]:
        chunk = load_chunk(store, chunk_id, content)
        losses = Losses(np.full(chunk.num_scored, 2.5, np.float32), [(1, chunk.num_inputs)], 64, 0.01)
        writer.submit(make_record(chunk_id, content, chunk, losses, rank=0))
        while (step := writer.next(0.0)) is not None:
            writer.succeeded(perform(step, store, None, header))


def main() -> None:
    """Build the run once, then time what resumes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--left", type=int, default=1_000)
    parser.add_argument("--work", type=Path, help="where the run is kept for another time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        arguments = ["run", str(work / "c.jsonl"), "--model", str(work / "model"), "--out", str(work / "out")]
        arguments += ["--context", "16", "--chunk-tokens", "16", "--threads", "2"]
        if not (work / "built").exists():
            build(work, arguments, options)
        for _ in range(3):
            print(first_batch(arguments))
        print(f"a run of which {options.left:,} chunks are left, to its end: {timed(arguments):.1f} s")
        print(f"the same command again, sealed: {timed(arguments):.1f} s")


def build(work: Path, arguments: list[str], options: argparse.Namespace) -> None:
    """Make the model, the corpus, the plan, the run's identity and its records."""
    work.mkdir(exist_ok=True)
    save_tiny_model(work / "model")
    lines = (json.dumps({"text": f"document {index:>7}"[-16:]}) + "\n" for index in range(options.chunks))
    (work / "c.jsonl").write_text("".join(lines))
    start = time.perf_counter()
    plan = everplex.plan(
        str(work / "c.jsonl"), tokenizer=str(work / "model"), out=str(work / "out"), context=16, chunk_tokens=16
    )
    print(f"planned {len(plan.chunks):,} chunks in {time.perf_counter() - start:.0f} s")
    subprocess.run([sys.executable, "-m", "everplex", *arguments, "--max-seconds", "8"], check=False)
    record_all_but(work, plan, options.left)
    (work / "built").touch()


def first_batch(arguments: list[str]) -> str:
    """Resume until the first batch is due."""
    found = subprocess.run(
        [sys.executable, "-c", _RESUME, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()[-1]
    times = json.loads(found)
    return (
        f"first new batch after {times['all']:.2f} s, of which loading the model took {times['loading']:.2f} s: "
        f"{times['all'] - times['loading']:.2f} s besides"
    )


def timed(arguments: list[str]) -> float:
    """Seconds of a whole command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "everplex", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
