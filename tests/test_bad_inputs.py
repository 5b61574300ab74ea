"""What a user can get wrong: each ends in exit code 2 and one clear sentence, and leaves no plan behind."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import zstandard
from support.corpora import make_documents, write_jsonl
from support.models import save_tiny_model

from everplex.cli import run_command_line
from everplex.stages.layout import PLAN_KEY


class Place(NamedTuple):
    """What a case may use: a folder of its own, a good corpus, a good model, an OUT that does not exist yet."""

    folder: Path
    data: Path
    model: Path
    out: Path

    def run(self, *more: object, data: object = None, model: object = None, out: object = None) -> list[str]:
        """Return the arguments of a run that would succeed but for what is given."""
        words = ["run", data or self.data, "--model", model or self.model, "--out", out or self.out, "--context", 32]
        return [str(word) for word in [*words, *more]]

    def file(self, name: str, content: bytes | str) -> Path:
        """Write a file in the folder."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def lines(self, *values: object) -> Path:
        """Write a corpus of these JSON values."""
        return self.file("corpus.jsonl", "".join(json.dumps(value) + "\n" for value in values))

    def copy_model(self, **config: object) -> Path:
        """Copy the model's folder, with changes to its configuration."""
        folder = Path(shutil.copytree(self.model, self.folder / "model"))
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(document | config))
        return folder


GOOD = {"text": "some words"}
LONG = "".join(json.dumps({"text": f"document {number} has words"}) + "\n" for number in range(300)).encode()


def _without_weights(place: Place) -> list[str]:
    folder = place.copy_model()
    (folder / "model.safetensors").unlink()
    return place.run(model=folder)


def _without_configuration(place: Place) -> list[str]:
    folder = place.copy_model()
    (folder / "config.json").unlink()
    return place.run(model=folder)


def _small_vocabulary(place: Place) -> list[str]:
    return place.run(model=save_tiny_model(place.folder / "small", vocab_size=200, bos_token_id=0, eos_token_id=1,
                                           pad_token_id=2))  # fmt: skip


def _config(text: str) -> Callable[[Place], list[str]]:
    return lambda place: place.run("--config", place.file("run.toml", text))


def _file_as_out(place: Place) -> list[str]:
    return place.run(out=place.file("file", "here"))


def _below_a_file(place: Place) -> list[str]:
    return place.run(out=place.file("file", "here") / "run")


CASES: dict[str, tuple[Callable[[Place], list[str]], tuple[str, ...]]] = {
    "missing file": (lambda p: p.run(data=p.folder / "none.jsonl"), ("none.jsonl", "no such file")),
    "pattern without a match": (lambda p: p.run(data=p.folder / "*.none"), ("*.none", "no file matches")),
    "empty corpus": (lambda p: p.run(data=p.file("empty.jsonl", "")), ("nothing to score", "empty.jsonl")),
    "nothing to score": (
        lambda p: p.run(data=p.lines({"text": ""}, {"text": ""})),
        ("nothing to score", "2 documents"),
    ),
    "invalid JSON": (
        lambda p: p.run(data=p.file("bad.jsonl", '{"text": "a"}\n{"text": "b"}\n{"text": \n')),
        ("bad.jsonl, line 3", "JSON"),
    ),
    "not an object": (lambda p: p.run(data=p.lines(GOOD, [1])), ("corpus.jsonl, line 2", "object")),
    "absent text": (lambda p: p.run(data=p.lines(GOOD, {"body": "b"})), ("line 2", "'text'", "body")),
    "null text": (lambda p: p.run(data=p.lines(GOOD, {"text": None})), ("line 2", "'text'", "null")),
    "text that is a number": (lambda p: p.run(data=p.lines({"text": 5})), ("line 1", "'text'", "a number")),
    "nested without end": (
        lambda p: p.run(data=p.file("deep.jsonl", '{"text": "a", "b": ' + "[" * 5000 + "]" * 5000 + "}\n")),
        ("deep.jsonl, line 1", "mend this line"),
    ),
    "a number without end": (
        lambda p: p.run(data=p.file("long.jsonl", '{"text": "a", "b": ' + "9" * 5000 + "}\n")),
        ("long.jsonl, line 1", "mend this line"),
    ),
    "line that is cut": (
        lambda p: p.run(data=p.file("cut.jsonl", '{"text": "a"\n')),
        ("cut.jsonl, line 1", "column 13"),
    ),
    "surrogate beside a message": (
        lambda p: p.run(
            "--content", "messages", data=p.lines({"messages": [{"role": "user", "content": "x", "name": "\ud800"}]})
        ),
        ("corpus.jsonl, line 1", "message 1", "lone surrogate"),
    ),
    "NUL in a role": (
        lambda p: p.run("--content", "messages", data=p.lines({"messages": [{"role": "us\0er", "content": "x"}]})),
        ("corpus.jsonl, line 1", "role of message 1", "NUL"),
    ),
    "token type that is none": (
        lambda p: p.run("--token-dtype", "i4,,", data=p.file("t.bin", b"1234")),
        ("--token-dtype", "i4,,"),
    ),
    "folder without a tokenizer": (
        lambda p: p.run("--tokenizer", p.file("parts/readme.md", "none").parent),
        ("parts", "tokenizer.json"),
    ),
    "invalid UTF-8": (
        lambda p: p.run(data=p.file("latin.jsonl", b'{"text": "\xe9t\xe9"}\n')),
        ("latin.jsonl, line 1", "UTF-8"),
    ),
    "invalid UTF-8 in plain text": (lambda p: p.run(data=p.file("latin.txt", b"\xe9t\xe9")), ("latin.txt", "UTF-8")),
    "truncated gzip": (
        lambda p: p.run(data=p.file("cut.jsonl.gz", gzip.compress(LONG)[:-20])),
        ("cut.jsonl.gz", "cut short"),
    ),
    "truncated zstd": (
        lambda p: p.run(data=p.file("cut.jsonl.zst", zstandard.compress(LONG)[:-20])),
        ("cut.jsonl.zst", "cut short"),
    ),
    "damaged gzip": (lambda p: p.run(data=p.file("bad.jsonl.gz", LONG)), ("bad.jsonl.gz", "damaged")),
    "group field that is absent": (lambda p: p.run("--group-by", "topic", data=p.lines(GOOD)), ("line 1", "'topic'")),
    "group that is not there": (lambda p: p.run("--groups", "none", "--group-by", "topic"), ("'none'", "--groups")),
    "unknown option": (lambda p: p.run("--contxt", "3"), ("--contxt", "--context")),
    "unknown option in TOML": (_config("contxt = 3\n"), ("run.toml", "'contxt'", "'context'")),
    "wrong type in TOML": (_config('seed = "many"\n'), ("option seed", "`int`", "`str`")),
    "out of bounds in TOML": (_config("threads = 0\n"), ("option threads", "at least 1", "0")),
    "TOML that is not": (_config("context: 3\n"), ("run.toml", "TOML")),
    "missing TOML": (lambda p: p.run("--config", p.folder / "none.toml"), ("none.toml", "No such file")),
    "unknown choice": (lambda p: p.run("--dtype", "float8"), ("--dtype", "float8", "bfloat16")),
    "unknown protocol": (lambda p: p.run("--protocol", "lm-evil"), ("--protocol", "lm-evil", "lm-eval")),
    "no number": (lambda p: p.run("--chunk-tokens", "many"), ("--chunk-tokens", "integer")),
    "negative number": (lambda p: p.run("--chunk-tokens", "-1"), ("--chunk-tokens", "equal to 1")),
    "missing model": (lambda p: p.run(model=p.folder / "none"), ("none", "no model folder")),
    "model that is a file": (lambda p: p.run(model=p.file("model.bin", "x")), ("model.bin", "is a file")),
    "model without weights": (_without_weights, ("no weights", "model.safetensors")),
    "model without configuration": (_without_configuration, ("no config.json",)),
    "vocabulary too large": (_small_vocabulary, ("259 tokens", "200", "tokenizer")),
    "context too large": (lambda p: p.run("--context", 257), ("--context 257", "256")),
    "context too small": (lambda p: p.run("--context", 1), ("--context", "2")),
    "OUT that is a file": (_file_as_out, ("is a file", "folder")),
    "OUT below a file": (_below_a_file, ("file", "OUT")),
    "OUT that cannot be written": (lambda p: p.run(out="/proc/everplex"), ("/proc/everplex",)),
    "unknown scheme": (lambda p: p.run(out="nope://bucket/x"), ("nope://", "unknown scheme")),
    "unknown scheme of data": (lambda p: p.run(data="nope://bucket/x.jsonl"), ("nope://",)),
    "memory with ranks": (lambda p: p.run("--nproc", 2, out="memory://x"), ("memory://", "one process")),
    "memory in a world": (lambda p: p.run("--rank", 0, "--world-size", 2, out="memory://x"), ("memory://",)),
    "rank outside the world": (lambda p: p.run("--rank", 2, "--world-size", 2), ("rank 2", "world of 2")),
    "rank without a world": (lambda p: p.run("--rank", 2), ("--rank", "--world-size")),
    "device that is not there": (lambda p: p.run("--device", "cuda:77"), ("--device cuda",)),
    "unknown device": (lambda p: p.run("--device", "abacus"), ("--device abacus", "cpu")),
    "unknown attention": (lambda p: p.run("--attention", "none-such"), ("none-such",)),
    "store option without a value": (lambda p: p.run("--store-option", "endpoint"), ("--store-option", "key=value")),
    "batch tokens": (lambda p: p.run("--batch-tokens", "few"), ("--batch-tokens", "few")),
    "no batch tokens": (lambda p: p.run("--batch-tokens", "0"), ("--batch-tokens", "'0'")),
    "no OUT": (lambda p: ["run", str(p.data), "--model", str(p.model)], ("--out is missing",)),
    "no model": (lambda p: ["run", str(p.data), "--out", str(p.out)], ("--model is missing",)),
    "no data": (lambda p: ["run", "--model", str(p.model), "--out", str(p.out)], ("DATA is missing",)),
    "a file named twice": (lambda p: [*p.run(), str(p.data)], ("twice",)),
    "two ways to choose": (
        lambda p: p.run("--limit-documents", 2, "--sample-documents", 2),
        ("--limit-documents", "--sample-documents"),
    ),
    "unknown command": (lambda p: ["rnu", str(p.data)], ("rnu",)),
}  # fmt: skip

LATE = {"unknown attention"}
"""What only loading the model can tell: the plan is whole by then, and of use to a corrected command."""


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_ends_in_one_sentence(
    name: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2; stderr names what is wrong and has no traceback; stdout is empty; no plan is left."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = write_jsonl(tmp_path / "good.jsonl", make_documents(6))
    place = Place(tmp_path, data, tiny_model, tmp_path / "out")
    arguments, expected = CASES[name]
    code = run_command_line(arguments(place))
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    sentence = captured.err.splitlines()[-1]
    assert sentence.startswith("everplex: "), captured.err
    assert "Traceback" not in captured.err
    for part in expected:
        assert part in sentence
    assert name in LATE or not (place.out / PLAN_KEY).exists()


def test_a_mended_corpus_is_planned_into_the_same_place(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a failed planner left is no plan: the corrected command plans everything."""
    place = Place(tmp_path, tmp_path / "corpus.jsonl", tiny_model, tmp_path / "out")
    documents = [json.dumps({"text": f"document {number}"}) + "\n" for number in range(40)]
    plan = ["plan", str(place.data), "--tokenizer", str(tiny_model), "--out", str(place.out), "--context", "16"]
    plan += ["--chunk-tokens", "32", "--json"]
    place.file("corpus.jsonl", "".join([*documents, "{\n"]))
    assert run_command_line(plan) == 2
    assert not (place.out / PLAN_KEY).exists()
    place.file("corpus.jsonl", "".join(documents))
    capsys.readouterr()
    assert run_command_line(plan) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 40
