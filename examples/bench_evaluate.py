"""Measure the evaluator beside the bare model and beside lm-eval, on the same windows, in turns.

usage: bench_evaluate.py PARTS [--tokens N] [--rounds R] [--dtype D] [--threads T] [--context L] [--json] [CASE...]

PARTS is a folder made by fetch_parts.py. Cases: `short` (introductions of Wikipedia articles), `long` (the same, joined
to documents of several windows), `mixed` (both). Contenders, each in a process of its own that works only in its turn:

- bare: the model's forward and a plain cross-entropy over batches of a fixed number of windows in corpus order, padded
  and masked, built beforehand; nothing else
- everplex: chunks loaded ahead from a store, evaluated, and summed to records
- lm-eval: HFLM.loglikelihood_rolling

The bare loop and lm-eval use whichever of the batch sizes 1, 2, 4, 8 and 16 was fastest in a first, shorter turn.
Prints scored tokens per second (the fastest round), peak memory, and ratios (the median over the rounds, each of which
lets all contenders work one after the other).
"""

import argparse
import contextlib
import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

CONTENDERS = ("bare", "everplex", "lm-eval")
CASES = ("short", "long", "mixed")
BATCH_SIZES = (1, 2, 4, 8, 16)
LONG_CHARACTERS = 12_000
Turn = Callable[[], tuple[float, int]]
"""One timed turn: gives the sum of the losses and the scored tokens."""
Prepare = Callable[[list[str], int], Turn]
"""What comes before the clock starts: from texts and a batch size to a turn."""


def main() -> None:
    """Run the cases, or be a contender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--tokens", type=int, default=16_000, help="scored tokens of a round, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=0, help="of everplex; 0 is auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options)
        return
    results = {}
    for case in options.cases or CASES:
        results[case] = measure(case, options)
        if not options.json:
            show(case, results[case])
    if options.json:
        print(json.dumps(results, indent=2))


def show(case: str, result: dict[str, Any]) -> None:
    """Print one case as a table."""
    print(f"\n{case}: {result['documents']} documents, {result['tokens']} scored tokens, {result['dtype']}")
    for name in CONTENDERS:
        found = result[name]
        print(
            f"  {name:9} {found['tokens_per_second']:8.1f} tokens/s {found['peak_mib']:6} MiB  {found['settings']}"
            f"  nll {found['nll']:.6f}"
        )
    print(f"  everplex / bare {result['to_bare']:.3f}   everplex / lm-eval {result['to_lm_eval']:.3f}")


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the contenders work in turns on one corpus."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        texts = make_texts(case, options)
        write_lines(work / "corpus.jsonl", texts)
        write_lines(work / "calibration.jsonl", texts[: max(1, len(texts) // 5)])
        with contextlib.ExitStack() as stack:
            runs = {name: stack.enter_context(Contender(name, work, options)) for name in CONTENDERS}
            settings = {name: run.calibrate() for name, run in runs.items()}
            rounds = [
                {name: run.turn("corpus", settings[name]) for name, run in runs.items()} for _ in range(options.rounds)
            ]
            peaks = {name: run.peak_mib() for name, run in runs.items()}
    seconds = {name: [turn[name]["seconds"] for turn in rounds] for name in CONTENDERS}
    result: dict[str, Any] = {"documents": len(texts), "tokens": rounds[0]["bare"]["tokens"], "dtype": options.dtype}
    for name in CONTENDERS:
        last = rounds[-1][name]
        result[name] = {
            "tokens_per_second": last["tokens"] / min(seconds[name]),
            "peak_mib": peaks[name],
            "nll": last["nll"],
            "cpu_seconds": [turn[name]["cpu_seconds"] for turn in rounds],
            "tokens": last["tokens"],
            "settings": settings[name],
        }
    for key, other in (("to_bare", "bare"), ("to_lm_eval", "lm-eval")):
        pairs = zip(seconds[other], seconds["everplex"], strict=True)
        result[key] = statistics.median(theirs / ours for theirs, ours in pairs)
        result[f"nll_{key}"] = rounds[-1]["everplex"]["nll"] / rounds[-1][other]["nll"] - 1
    return result


def make_texts(case: str, options: argparse.Namespace) -> list[str]:
    """Return about as many documents as make the tokens of a round, taken from all over the corpus."""
    with (options.parts / "wikipedia.jsonl").open(encoding="utf-8") as lines:
        short = [json.loads(line)["text"] for line in lines][::7]
    joined: list[str] = [""]
    for text in short:
        joined[-1] += text + "\n\n"
        if len(joined[-1]) > LONG_CHARACTERS:
            joined.append("")
    if case == "long":
        pool = joined
    elif case == "short":
        pool = short
    else:  # half of the characters in documents of either kind
        pool = [text for index, text in enumerate(joined) for text in (text, *short[-25 * (index + 1) :][:25])]
    budget = options.tokens * 4.4
    texts: list[str] = []
    while pool and budget > 0:
        texts.append(pool.pop(0))
        budget -= len(texts[-1])
    return texts


def write_lines(file: Path, texts: list[str]) -> None:
    """Write a corpus."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


class Contender:
    """One contender's process."""

    def __init__(self, name: str, work: Path, options: argparse.Namespace) -> None:
        self.name = name
        self.sizes = [{}] if name == "everplex" else [{"batch_size": size} for size in BATCH_SIZES]
        command = [sys.executable, __file__, str(options.parts), "--contender", name, "--work", str(work)]
        for option in ("dtype", "threads", "context", "batch_tokens"):
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        self.log = work / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.ask({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Let it answer one question."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the contender has no pipes")
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.log.read_text()}{self.name} ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def calibrate(self) -> dict[str, Any]:
        """Return the fastest settings."""
        if len(self.sizes) == 1:
            return self.sizes[0]
        return min(self.sizes, key=lambda settings: self.turn("calibration", settings)["seconds"])

    def turn(self, corpus: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Let it work through a corpus once."""
        return self.ask({"corpus": corpus, **settings})

    def peak_mib(self) -> int:
        """Return the most memory that its process held."""
        return int(self.ask({})["peak_mib"])


def contend(options: argparse.Namespace) -> None:
    """Answer questions until there are no more; the answers are the only thing on stdout."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with contextlib.redirect_stdout(io.StringIO()):
        import torch

        torch.set_num_threads(options.threads)
        prepare = {"bare": bare, "everplex": everplex, "lm-eval": lm_eval}[options.contender](options)
        prepare(load_texts(options, "calibration")[:1], 1)()
        for line in sys.stdin:
            question = json.loads(line)
            answer: dict[str, Any] = {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
            if question:
                turn = prepare(load_texts(options, question["corpus"]), question.get("batch_size", 1))
                start, cpu_start = time.perf_counter(), time.process_time()
                nll, tokens = turn()
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
                answer |= {"seconds": seconds, "cpu_seconds": cpu_seconds, "nll": nll, "tokens": tokens}
            print(json.dumps(answer), file=answers, flush=True)


def load_texts(options: argparse.Namespace, corpus: str) -> list[str]:
    """Return the texts of a corpus."""
    lines = (options.work / f"{corpus}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def plan(options: argparse.Namespace, texts: list[str], folder: Path) -> tuple[Any, list[tuple[str, str]]]:
    """Plan texts into a store in a folder; returns the store and the ids and contents of the chunks."""
    from everplex.stages.plan import PlanOptions, make_plan
    from everplex.storage.store import open_store

    write_lines(folder / "corpus.jsonl", texts)
    store = open_store(str(folder / "out"))
    planning = PlanOptions(
        data=[str(folder / "corpus.jsonl")], tokenizer=str(options.parts / "smollm2-135m"), context=options.context
    )
    made = make_plan(planning, store)
    return store, list(zip(made.chunk_ids(), made.chunks.content, strict=True))


def load_plain(options: argparse.Namespace) -> Any:
    """Load the model as transformers does by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = options.parts / "smollm2-135m"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()


def bare(options: argparse.Namespace) -> Prepare:
    """Be the bare loop: the windows of everplex's plan in batches built beforehand."""
    import torch

    from everplex.stages.stored import load_chunk

    model = load_plain(options)

    def prepare(texts: list[str], batch_size: int) -> Turn:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            store, chunks = plan(options, texts, Path(folder))
            rows = [row for chunk in chunks for row in load_chunk(store, *chunk).rows()]
        batches = []
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            length = max(len(row.scored) for row in part)
            ids, mask = torch.zeros(2, len(part), length, dtype=torch.int64)
            labels = torch.full((len(part), length), -100)
            for index, row in enumerate(part):
                count = len(row.scored)
                ids[index, :count] = torch.from_numpy(row.tokens[:-1])
                mask[index, :count] = 1
                labels[index, :count] = torch.where(
                    torch.from_numpy(row.scored), torch.from_numpy(row.tokens[1:]).long(), -100
                )
            batches.append((ids, mask, labels))

        @torch.inference_mode()
        def turn() -> tuple[float, int]:
            nll = 0.0
            for ids, mask, labels in batches:
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                losses = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
                )
                nll += float(losses.double().sum())
            return nll, sum(int((labels != -100).sum()) for _, _, labels in batches)

        return turn

    return prepare


def everplex(options: argparse.Namespace) -> Prepare:
    """Be everplex's evaluate: from chunk objects in a store to records."""
    from everplex.stages.evaluate import Evaluator
    from everplex.stages.loader import prefetch
    from everplex.stages.model import ModelOptions, load_model
    from everplex.stages.stored import load_chunk
    from everplex.stages.tally import make_record

    loaded = load_model(ModelOptions(model=str(options.parts / "smollm2-135m"), dtype=options.dtype, device="cpu"))
    evaluator = Evaluator(loaded, batch_tokens=options.batch_tokens or "auto")

    def prepare(texts: list[str], _: int) -> Turn:
        folder = tempfile.mkdtemp(dir=options.work)
        store, chunks = plan(options, texts, Path(folder))

        def load(item: tuple[str, str]) -> tuple[Any, Any]:
            chunk = load_chunk(store, *item)
            return chunk, evaluator.prepare(chunk)

        def turn() -> tuple[float, int]:
            records = [
                make_record(*item, found[0], evaluator.evaluate(found[0], prepared=found[1]))
                for item, found in prefetch(chunks, load, depth=2)
                if not isinstance(found, Exception)
            ]
            return math.fsum(record.nll or math.nan for record in records), sum(record.tokens for record in records)

        return turn

    return prepare


def lm_eval(options: argparse.Namespace) -> Prepare:
    """Be lm-eval."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    model = load_plain(options)
    tokenizer = AutoTokenizer.from_pretrained(options.parts / "smollm2-135m")

    def prepare(texts: list[str], batch_size: int) -> Turn:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=options.context, batch_size=batch_size)
        tokens = sum(len(lm.tok_encode(text)) for text in texts)
        requests: Any = [SimpleNamespace(args=(text,)) for text in texts]
        return lambda: (-sum(lm.loglikelihood_rolling(requests, disable_tqdm=True)), tokens)

    return prepare


if __name__ == "__main__":
    main()
