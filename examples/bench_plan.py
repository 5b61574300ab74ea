"""Measure planning: peak memory and speed on a synthetic JSON Lines corpus of a given size.

python examples/bench_plan.py TOKENIZER --megabytes 300 --folder /tmp/bench
"""

import argparse
import json
import random
import resource
import time
from pathlib import Path

from everplex.stages.plan import PlanOptions, make_plan
from everplex.storage.local import LocalStore

GROUPS = 12


def write_corpus(path: Path, megabytes: int) -> None:
    """Write documents of a few hundred bytes to a few hundred kilobytes, in words of a small vocabulary."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 9))) for _ in range(5000)]
    left = megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            text = " ".join(rng.choices(words, k=int(rng.lognormvariate(6, 1.3)) + 1))
            left -= file.write(json.dumps({"topic": f"topic {rng.randrange(GROUPS)}", "text": text}) + "\n")


def main() -> None:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with a tokenizer")
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("bench-plan"))
    parser.add_argument("--context", type=int, default=2048)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    corpus = arguments.folder / f"corpus-{arguments.megabytes}.jsonl"
    if not corpus.exists():
        write_corpus(corpus, arguments.megabytes)
    options = PlanOptions(
        data=[str(corpus)], tokenizer=arguments.tokenizer, context=arguments.context, group_by="topic"
    )
    store = LocalStore(arguments.folder / f"plan-{time.time_ns()}")
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = make_plan(options, store)
    seconds = time.monotonic() - started
    tokens = sum(plan.chunks.tokens)
    figures = {
        "corpus_megabytes": round(corpus.stat().st_size / 1e6),
        "documents": sum(group.documents for group in plan.groups),
        "chunks": len(plan.chunks),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "peak_megabytes_before": before // 1024,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
