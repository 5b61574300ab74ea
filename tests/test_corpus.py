"""Corpora: every format gives its documents, every malformed input ends in one sentence with its place."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard
from support.s3 import serve_s3

from everplex.stages.corpus import Corpus
from everplex.stages.plan import make_plan
from everplex.stages.plan_options import PlanOptions
from everplex.storage.errors import UsageError
from everplex.storage.local import LocalStore

LINES = b'{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n'


def read(*data: Path | str, **more: Any) -> list[tuple[str, str, Any]]:
    """Return id, group and content of every document."""
    corpus = Corpus(PlanOptions(data=[str(path) for path in data], tokenizer="", **more))
    return [(document.id, document.group, document.content) for document in corpus.documents()]


def texts(*data: Path | str, **more: Any) -> list[Any]:
    """Return the content of every document."""
    return [content for _, _, content in read(*data, **more)]


def zstd(data: bytes) -> bytes:
    """Compress into one frame."""
    frame: bytes = zstandard.ZstdCompressor().compress(data)
    return frame


@pytest.mark.parametrize(("name", "pack"), [
    ("c.jsonl", bytes),
    ("c.jsonl.gz", gzip.compress),
    ("c.jsonl.zst", zstd),
    ("c.jsonl.gz", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]) + b"\0" * 100),
    ("c.jsonl.zst", lambda data: zstd(data[:20]) + zstd(b"") + zstd(data[20:])),
])  # fmt: skip
def test_json_lines_whole_compressed_and_in_several_frames(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    """Compression changes nothing about the documents; concatenated frames are one file."""
    (tmp_path / name).write_bytes(pack(LINES))
    assert texts(tmp_path / name) == ["one", "two", "three"]


@pytest.mark.parametrize(("name", "pack"), [("c.jsonl.gz", gzip.compress), ("c.jsonl.zst", zstd)])
def test_compressed_input_cut_anywhere_is_refused(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    """No prefix of a compressed file passes for a whole one."""
    whole = pack(LINES * 50)
    for size in range(1, len(whole)):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"c\.jsonl\.\w+: the compressed data is (cut short|damaged)"):
            texts(tmp_path / name)


def test_globs_urls_and_order(tmp_path: Path) -> None:
    """Matches of a pattern are sorted, patterns keep their order, and a URL is read like a path."""
    filesystem = fsspec.filesystem("memory")
    for name in ("b", "a", "c"):
        line = json.dumps({"text": name}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line)
        filesystem.pipe_file(f"/corpus/{name}.jsonl", line.encode())
    assert texts(tmp_path / "[bc].jsonl", tmp_path / "a.jsonl") == ["b", "c", "a"]
    assert texts("memory://corpus/*.jsonl") == ["a", "b", "c"]
    assert texts(f"file://{tmp_path}/a.jsonl") == ["a"]


def test_ids_groups_and_nested_fields(tmp_path: Path) -> None:
    """Ids and groups come from fields, into nested objects too; without an id it is file and line."""
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"text": "x", "meta": {"source": "web", "id": 7}}\n\n{"text": "y", "meta": {"source": "b", "id": "k"}}\n'
    )
    assert read(path, group_by="meta.source", id_field="meta.id") == [("7", "web", "x"), ("k", "b", "y")]
    assert read(path) == [("0:1", "all", "x"), ("0:3", "all", "y")]


def test_crlf_and_byte_order_mark_are_no_text(tmp_path: Path) -> None:
    """JSON Lines written on Windows give the same documents."""
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"))
    assert texts(path) == ["one", "two", "three"]


def test_nan_in_an_unused_field_is_no_error(tmp_path: Path) -> None:
    """What common writers put into other fields does not matter."""
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a", "score": NaN}\n')
    assert texts(path) == ["a"]


@pytest.mark.parametrize(("per", "expected"), [
    ("file", ["one\r\ntwo\n\n  \nthree\n"]),
    ("line", ["one", "two", "", "  ", "three"]),
    ("block", ["one\r\ntwo", "three"]),
])  # fmt: skip
def test_plain_text_per_file_line_and_block(tmp_path: Path, per: str, expected: list[str]) -> None:
    """Text is verbatim but for the line ends that separate documents."""
    path = tmp_path / "c.txt"
    path.write_bytes(b"one\r\ntwo\n\n  \nthree\n")
    assert texts(path, text_documents=per) == expected


def test_plain_text_grouped_by_file_and_folder(tmp_path: Path) -> None:
    """Files without fields are grouped by where they lie."""
    for name in ("x/a.txt", "y/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    assert [group for _, group, _ in read(tmp_path / "*/a.txt", group_by="folder")] == ["x", "y"]
    assert [group for _, group, _ in read(tmp_path / "*/a.txt", group_by="file")] == ["a.txt", "a.txt"]


def test_limit_takes_the_first_documents_and_no_further_file(tmp_path: Path) -> None:
    """The limit is part of what was read; the file in which it falls is digested whole."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(LINES)
    (tmp_path / "c.jsonl").write_text("never read")
    corpus = Corpus(PlanOptions(data=[f"{tmp_path}/*.jsonl"], tokenizer="", limit_documents=4))
    assert [document.content for document in corpus.documents()] == ["one", "two", "three", "one"]
    assert len(corpus.spec().files) == 2
    assert corpus.spec().options == {"limit_documents": 4}


def test_sample_is_a_deterministic_subset_in_corpus_order(tmp_path: Path) -> None:
    """The same seed takes the same documents, another seed others; order is the corpus's."""
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": f"{index:03}"}) + "\n" for index in range(200)))
    one = texts(path, sample_documents=20, seed=1)
    assert len(one) == 20
    assert one == sorted(one) == texts(path, sample_documents=20, seed=1)
    assert one != texts(path, sample_documents=20, seed=2)
    assert texts(path, sample_documents=500) == texts(path)


BAD_LINES = {
    "invalid JSON": (b'{"text": "a"', "invalid JSON"),
    "no object": (b'["text"]', "expected a JSON object, found list"),
    "absent field": (b'{"body": "a"}', "expected a field 'text', found the fields body"),
    "null": (b'{"text": null}', "expected a string in field 'text', found null"),
    "number": (b'{"text": 7}', "expected a string in field 'text', found a number"),
    "invalid UTF-8": (b'{"text": "\xff"}', "expected UTF-8, found the byte 0xff"),
    "lone surrogate": (rb'{"text": "a\ud800"}', "lone surrogate at position 1"),
    "NUL": (rb'{"text": "ab\u0000"}', "NUL character at position 2"),
    "NUL byte": (b'{"text": "ab\x00"}', "invalid JSON"),
}


@pytest.mark.parametrize(("line", "sentence"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_malformed_line_is_refused_with_file_line_and_reason(
    tmp_path: Path, tiny_model: Path, line: bytes, sentence: str
) -> None:
    """One sentence, exit code 2, and no plan that a later run would take for whole."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' * 2 + line + b"\n")
    store = LocalStore(tmp_path / "out")
    with pytest.raises(UsageError) as caught:
        make_plan(PlanOptions(data=[str(path)], tokenizer=str(tiny_model), context=16, chunk_tokens=4), store)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert sentence in message
    assert "\n" not in message
    assert not any("plan.json" in entry.key for entry in store.list())


@pytest.mark.parametrize(("line", "sentence"), [
    (b'{"text": "a"}', "expected a field 'topic'"),
    (b'{"text": "a", "topic": null}', "expected a string or an integer in field 'topic', found null"),
    (b'{"text": "a", "topic": ["x"]}', "expected a string or an integer in field 'topic', found a list"),
])  # fmt: skip
def test_document_without_its_group_is_refused(tmp_path: Path, line: bytes, sentence: str) -> None:
    """No document lands in a group by accident."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line)
    with pytest.raises(UsageError, match=sentence):
        texts(path, group_by="topic")


@pytest.mark.parametrize(("content", "per", "sentence"), [
    (b"fine\n\xff\n", "file", r"c\.txt, line 2: expected UTF-8, found the byte 0xff"),
    (b"fine\nna\xefve\n", "line", r"c\.txt, line 2: expected UTF-8"),
    (b"fine\n\nx\nb\x00\n", "block", r"c\.txt, line 3: text has a NUL character at position 3"),
])  # fmt: skip
def test_malformed_plain_text_is_refused_with_its_line(tmp_path: Path, content: bytes, per: str, sentence: str) -> None:
    """What is no UTF-8 text is not scored."""
    path = tmp_path / "c.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        texts(path, text_documents=per)


@pytest.mark.parametrize(("data", "more", "sentence"), [
    ("missing.jsonl", {}, "no such file"),
    ("*.nothing", {}, "no file matches"),
    ("memory://nowhere/x.jsonl", {}, "no such file"),
    ("memory://nowhere/*.jsonl", {}, "no object matches"),
    ("nosuch://x.jsonl", {}, "nosuch"),
    ("c.unknown", {}, "give --format"),
    ("folder.jsonl", {}, "is a folder"),
    ("c.jsonl", {"groups": ["zz"]}, "in the group 'zz'"),
    ("c.jsonl", {"limit_documents": 0}, "--limit-documents: expected at least 1"),
    ("c.jsonl", {"limit_documents": 1, "sample_documents": 1}, "exclude each other"),
])  # fmt: skip
def test_unusable_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, more: dict[str, Any], sentence: str
) -> None:
    """What cannot be read is named with what to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.unknown").write_text("x")
    (tmp_path / "c.jsonl").write_bytes(LINES)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match=sentence):
        texts(data, **more)


def test_file_named_twice_is_refused(tmp_path: Path) -> None:
    """Overlapping patterns would count documents twice."""
    (tmp_path / "c.jsonl").write_bytes(LINES)
    with pytest.raises(UsageError, match="named twice"):
        texts(tmp_path / "c.jsonl", tmp_path / "*.jsonl")
    with pytest.raises(UsageError, match="named twice"):
        texts(tmp_path / "c.jsonl", f"{tmp_path}/../{tmp_path.name}/c.jsonl")


def test_corpus_on_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Globs and single objects of a bucket; what is not there, and a server that is gone, are told apart."""
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        url = server.make_bucket("corpus")
        server.put("corpus", "a/1.jsonl.zst", zstd(LINES))
        server.put("corpus", "a/2.jsonl", b'{"text": "four"}')
        assert texts(f"{url}/a/*.jsonl*") == ["one", "two", "three", "four"]
        server.put("corpus", "a/3.jsonl", b'{"text": "five"}')
        assert texts(f"{url}/a/*.jsonl") == ["four", "five"]
        assert texts(f"{url}/a/3.jsonl") == ["five"]
        with pytest.raises(UsageError, match="no such file"):
            texts(f"{url}/a/9.jsonl")


@pytest.mark.parametrize(("option", "value"), [
    ("format", "csv"), ("content", "texts"), ("text_documents", "page"), ("loss_on", "user"), ("context", "long"),
])  # fmt: skip
def test_value_that_an_option_does_not_take_is_refused(tmp_path: Path, option: str, value: str) -> None:
    """A misspelt choice never falls back to another one."""
    chosen: dict[str, Any] = {option: value}
    with pytest.raises(UsageError, match=option):
        make_plan(PlanOptions(data=["c.jsonl"], tokenizer="t", **chosen), LocalStore(tmp_path / "out"))
