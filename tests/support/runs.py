"""A small run: planned once, evaluated once in quiet, so that tests can copy it, disturb it and compare the numbers."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from support.corpora import make_documents, write_jsonl
from support.processes import processes

CORPUS_OPTIONS = ("--context", 64, "--chunk-tokens", 256, "--group-by", "topic", "--id-field", "id")
MACHINE_OPTIONS = ("--threads", 1, "--batch-tokens", 256, "--audit", 0)
NUMBERS = ("nll", "tokens", "documents", "bytes", "characters", "words", "perplexity", "stderr", "groups", "macro")


@dataclass(frozen=True)
class QuietRun:
    """A corpus, a model, a run that is planned only, and the numbers of one that nothing disturbed."""

    corpus: Path
    model: Path
    planned: Path
    num_chunks: int
    numbers: dict[str, Any]

    def copy(self, out: Path) -> Path:
        """Return a new run that is planned and nothing else."""
        return Path(shutil.copytree(self.planned, out))

    def evaluate(self, out: object, *more: object) -> list[object]:
        """Return the command that evaluates."""
        return ["evaluate", "--model", self.model, "--out", out, *MACHINE_OPTIONS, *more]

    def run(self, out: object, *more: object, corpus: object = None) -> list[object]:
        """Return the command that does everything."""
        options = ("--model", self.model, "--out", out, *CORPUS_OPTIONS, *MACHINE_OPTIONS)
        return ["run", corpus or self.corpus, *options, *more]


def make_quiet_run(folder: Path, model: Path, num_documents: int = 24) -> QuietRun:
    """Plan, then evaluate a copy."""
    corpus = write_jsonl(folder / "corpus.jsonl", make_documents(num_documents))
    planned, whole = folder / "planned", folder / "whole"
    made = QuietRun(corpus, model, planned, 0, {})
    with processes(folder / "processes", {"EVERPLEX_CACHE": str(folder / "cache")}) as started:
        plan = started.run("plan", corpus, "--tokenizer", model, "--out", planned, *CORPUS_OPTIONS)
        assert plan.wait() == 0, plan.text()
        evaluation = started.run(*made.evaluate(made.copy(whole)))
        assert evaluation.wait() == 0, evaluation.text()
    return QuietRun(corpus, model, planned, len(records(whole)), numbers(whole))


def numbers(out: Path) -> dict[str, Any]:
    """Return the sealed numbers; floats in JSON are exact."""
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["complete"]
    return {name: summary[name] for name in NUMBERS}


def records(out: Path, *kinds: str) -> list[str]:
    """Return the chunk of every record of these kinds (`work`), read with zstd and JSON; roll-ups repeat nothing."""
    found: dict[tuple[str, bytes], str] = {}
    for path in sorted(out.glob("segments/*/*.zst")):
        header, *lines = zstandard.ZstdDecompressor().decompress(path.read_bytes()).splitlines()
        worker = json.loads(header)["worker"]
        for line in lines:
            record = json.loads(line)
            if record["kind"] in (kinds or ("work",)):
                found[worker, line] = record["chunk"]
    return list(found.values())
