"""Measure how soon a run that is nearly or wholly done begins: seconds to its first new batch, or to its end.

usage: bench_start.py [--chunks N] [--left N] [--model FOLDER] [--work FOLDER]

Plans N tiny documents, a chunk each, for a model (a tiny one where none is given), and records all but the last ones
with made-up losses, by a real writer: a segment per chunk, every 64th a roll-up. Then, in turns, a process that does
nothing but load the model with transformers, and one that resumes the run until its first batch is due. Prints both
times and their difference, and at last those of two whole `everplex run`: one that has everything to merge and to seal,
and one that finds the seal.
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
from everplex.stages.assign import fixed_order
from everplex.stages.layout import SUMMARY_KEY
from everplex.stages.ledger import Ledger
from everplex.stages.records import Header, Plan, Run
from everplex.stages.stored import load_chunk, load_run
from everplex.stages.tally import Losses, make_record
from everplex.stages.writer import Writer, perform
from everplex.storage.store import open_store

_LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("ready", flush=True)
"""
_RESUME = """
import os
from everplex import cli, evaluation
load = evaluation.load_evaluator
def first_batch(*_, **__):
    print("ready", flush=True)
    os._exit(0)
def load_and_watch(*given):
    loaded, evaluator = load(*given)
    evaluator.evaluate = first_batch
    return loaded, evaluator
evaluation.load_evaluator = load_and_watch
cli.main()
"""


def record_all_but(work: Path, plan: Plan, left: int) -> None:
    """Record the chunks but the last ones as a worker would."""
    store = open_store(str(work / "out"))
    run: Run = load_run(store)
    ledger = Ledger(store, plan, run.id())
    ledger.refresh()
    (device,) = {source.device for source in ledger.copies.sources}
    contents = dict(zip(plan.chunk_ids(), plan.chunks.content, strict=True))
    order = [chunk for chunk in fixed_order(plan.digest(), list(contents)) if chunk not in ledger.recorded]
    worker = uuid.uuid4().hex

    def header() -> Header:
        return Header(
            run=run.id(), plan=run.plan, worker=worker, seq=0, first=0, rank=0, world_size=1, device=device,
            environment=ENVIRONMENT,
        )  # fmt: skip

    writer = Writer()
    for chunk_id in order[: len(order) - left]:
        chunk = load_chunk(store, chunk_id, contents[chunk_id])
        losses = Losses(np.full(chunk.num_scored, 2.5, np.float32), [(1, chunk.num_inputs)], 64, 0.01)
        writer.submit(make_record(chunk_id, contents[chunk_id], chunk, losses, rank=0))
        while (step := writer.next(0.0)) is not None:
            writer.succeeded(perform(step, store, None, header))


def main() -> None:
    """Build the run once, then time what resumes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--left", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path, help="where the run is kept for another time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        model = options.model or work / "model"
        arguments = ["run", str(work / "c.jsonl"), "--model", str(model), "--out", str(work / "out")]
        arguments += ["--context", "16", "--chunk-tokens", "1", "--threads", "2", "--rank", "0", "--world-size", "1"]
        if not (work / "built").exists():
            build(work, arguments, options)
        for _ in range(options.rounds):
            load, resume = ready(_LOAD, str(model)), ready(_RESUME, *arguments)
            print(f"model loaded in {load:.2f} s; first new batch after {resume:.2f} s: {resume - load:.2f} s more")
        subprocess.run([sys.executable, "-m", "everplex", *arguments], check=True, stdout=subprocess.DEVNULL)
        print(f"the command again, sealed: {timed(arguments):.1f} s")
        (work / "out" / SUMMARY_KEY).unlink()
        print(f"the command again, all to be merged and sealed: {timed(arguments):.1f} s")


def build(work: Path, arguments: list[str], options: argparse.Namespace) -> None:
    """Make the model, the corpus, the plan, the run's identity and its records."""
    work.mkdir(exist_ok=True)
    if options.model is None:
        save_tiny_model(work / "model")
    lines = (json.dumps({"text": f"document {index:>7}"[-16:]}) + "\n" for index in range(options.chunks))
    (work / "c.jsonl").write_text("".join(lines))
    start = time.perf_counter()
    plan = everplex.plan(
        str(work / "c.jsonl"), tokenizer=arguments[3], out=str(work / "out"), context=16, chunk_tokens=1
    )
    print(f"planned {len(plan.chunks):,} chunks in {time.perf_counter() - start:.0f} s")
    with subprocess.Popen([sys.executable, "-m", "everplex", *arguments]) as beginning:
        while beginning.poll() is None and not list((work / "out").glob("segments/*/*")):
            time.sleep(0.1)
        beginning.terminate()
    record_all_but(work, plan, options.left)
    (work / "built").touch()


def ready(script: str, *arguments: str) -> float:
    """Seconds from the start of a process to the line that it prints."""
    start = time.perf_counter()
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            sys.exit(f"{command} failed")
        return time.perf_counter() - start


def timed(arguments: list[str]) -> float:
    """Seconds of a whole command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "everplex", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
