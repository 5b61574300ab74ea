"""Planning: stable chunks, whole plans or none, exact denominators."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.corpora import make_documents, write_jsonl
from support.faulty import FaultyStore

from everplex.stages.chunk import Chunk
from everplex.stages.encode import count_text
from everplex.stages.layout import PLAN_KEY
from everplex.stages.plan import PlanOptions, PlanProgress, check_plan, make_plan
from everplex.stages.records import Counts, DocumentRow, Plan
from everplex.stages.stored import load_chunk, load_plan
from everplex.storage.codec import decompress
from everplex.storage.errors import (
    EverplexError,
    IdentityMismatch,
    IncompleteError,
    ObjectNotFoundError,
    StoreUnavailableError,
    UsageError,
)
from everplex.storage.local import LocalStore

BOS = 256


def options(tokenizer: Path, *data: Path, **more: Any) -> PlanOptions:
    """Return small plan options over the byte tokenizer."""
    chosen: dict[str, Any] = {"context": 16, "chunk_tokens": 64} | more
    return PlanOptions(data=[str(path) for path in data], tokenizer=str(tokenizer), **chosen)


def chunks_of(store: LocalStore, plan: Plan) -> list[Chunk]:
    """Return every chunk of a plan as it is stored."""
    return [load_chunk(store, *pair) for pair in zip(plan.chunk_ids(), plan.chunks.content, strict=True)]


def documents_of(store: LocalStore, plan: Plan, group: int = 0) -> list[DocumentRow]:
    """Return the document table of a group."""
    lines = b"".join(decompress(store.get(key), key) for key in plan.groups[group].document_tables).splitlines()
    return [msgspec.json.decode(line, type=DocumentRow) for line in lines]


def write_texts(path: Path, texts: Sequence[str], group: str = "a") -> Path:
    """Write a corpus of one group."""
    return write_jsonl(path, [{"text": text, "topic": group} for text in texts])


def test_every_token_of_every_document_is_scored_once(tmp_path: Path, tiny_model: Path) -> None:
    """The scored targets of a group, row after row, are its documents' bytes, each with its document's ordinal."""
    documents = make_documents(40)
    store = LocalStore(tmp_path / "out")
    plan = make_plan(options(tiny_model, write_jsonl(tmp_path / "c.jsonl", documents), group_by="topic"), store)
    alphabet = _alphabet()
    for index, group in enumerate(plan.groups):
        texts = [document["text"] for document in documents if document["topic"] == group.name]
        found: dict[int, list[int]] = {}
        for chunk, owner in zip(chunks_of(store, plan), plan.chunks.group, strict=True):
            if owner == index:
                for row in chunk.rows():
                    found.setdefault(row.document, []).extend(row.tokens[1:][row.scored].tolist())
        assert {
            ordinal: [alphabet[byte] for byte in text.encode()] for ordinal, text in enumerate(texts) if text
        } == found


def _alphabet() -> dict[int, int]:
    """Return byte -> token id of the byte tokenizer, from the definition of the byte-level alphabet."""
    from tokenizers import pre_tokenizers

    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(256 + index) for index, byte in enumerate(byte for byte in range(256) if byte not in printable)}
    assert sorted(chars.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {char: index for index, char in enumerate(sorted(chars.values()))}
    return {byte: order[char] for byte, char in chars.items()}


def test_rows_are_the_protocols_windows(tmp_path: Path, tiny_model: Path) -> None:
    """A document of ten bytes at a context of four gives the three rows of the definition."""
    store = LocalStore(tmp_path / "out")
    plan = make_plan(options(tiny_model, write_texts(tmp_path / "c.jsonl", ["abcdefghij"]), context=4), store)
    (chunk,) = chunks_of(store, plan)
    a = chunk.tokens_N[1]
    shown = [([int(token - a) for token in row.tokens], row.scored.tolist()) for row in chunk.rows()]
    assert shown == [
        ([int(BOS - a), 0, 1, 2, 3], [True, True, True, True]),
        ([3, 4, 5, 6, 7], [True, True, True, True]),
        ([5, 6, 7, 8, 9], [False, False, True, True]),
    ]


words = st.text(alphabet="ab \n", max_size=60)
corpora = st.lists(st.tuples(words, st.sampled_from("xyz")), min_size=1, max_size=12)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=corpora, after=corpora, chunk_tokens=st.integers(1, 80))
def test_appended_documents_change_only_the_last_chunk_of_their_groups(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    before: list[tuple[str, str]],
    after: list[tuple[str, str]],
    chunk_tokens: int,
) -> None:
    """Every chunk but the last of a group is there again, and groups without new documents are untouched."""
    before = [*before, ("never empty", "x")]
    folder = tmp_path_factory.mktemp("append")
    tables = []
    for name, pairs in (("one", before), ("two", before + after)):
        data = write_jsonl(folder / f"{name}.jsonl", [{"text": text, "topic": topic} for text, topic in pairs])
        plan = make_plan(
            options(tiny_model, data, group_by="topic", chunk_tokens=chunk_tokens), LocalStore(folder / name)
        )
        contents: dict[str, list[str]] = {group.name: [] for group in plan.groups}
        for group, content in zip(plan.chunks.group, plan.chunks.content, strict=True):
            contents[plan.groups[group].name].append(content)
        tables.append(contents)
    touched = {topic for _, topic in after}
    for topic, chunks in tables[0].items():
        kept = chunks[:-1] if topic in touched else chunks
        assert tables[1][topic][: len(kept)] == kept
        assert topic in touched or tables[1][topic] == chunks


def test_chunks_are_full_and_a_long_document_is_cut_at_window_borders(tmp_path: Path, tiny_model: Path) -> None:
    """No chunk has more inputs than asked for, and no two neighbours would fit into one."""
    store = LocalStore(tmp_path / "out")
    data = write_texts(tmp_path / "c.jsonl", ["x" * 1000, "y" * 3, "z" * 50])
    plan = make_plan(options(tiny_model, data), store)
    sizes = plan.chunks.input_tokens
    assert all(size <= 64 for size in sizes)
    firsts = [next(chunk.rows()) for chunk in chunks_of(store, plan)]
    assert all(size + len(row.scored) > 64 for size, row in zip(sizes[:-1], firsts[1:], strict=True))
    assert (plan.chunks.documents[0], sum(plan.chunks.documents[-2:]), sum(plan.chunks.documents)) == (1, 2, 3)


def test_denominators_count_each_document_once(tmp_path: Path, tiny_model: Path) -> None:
    """Bytes, characters and words of the chunks and the windowless tally are those of the texts."""
    texts = ["", "ab", " naïve  δοκιμή\n", "", "x" * 300, "\n"]
    plan = make_plan(options(tiny_model, write_texts(tmp_path / "c.jsonl", texts)), LocalStore(tmp_path / "out"))
    table, windowless = plan.chunks, plan.groups[0].windowless
    assert windowless == Counts(documents=2, bytes=0, characters=0, words=2)
    assert sum(table.documents) + windowless.documents == plan.groups[0].documents == len(texts)
    assert sum(table.bytes) == sum(len(text.encode()) for text in texts)
    assert sum(table.characters) == sum(map(len, texts))
    assert sum(table.words) + windowless.words == sum(len(re.split(r"\s+", text)) for text in texts)


@given(st.text(alphabet=st.sampled_from("ab \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u200b\u3000é")))
def test_words_are_counted_as_the_regular_expression_counts_them(text: str) -> None:
    r"""The quick count equals `re.split(r"\s+")` for every kind of space."""
    assert count_text(text).words == len(re.split(r"\s+", text))


def test_document_table_has_one_line_per_document_in_order(tmp_path: Path, tiny_model: Path) -> None:
    """Ids, scored tokens and denominators; the ordinal is the line."""
    store = LocalStore(tmp_path / "out")
    data = write_jsonl(tmp_path / "c.jsonl", [{"id": "one", "text": "ab c"}, {"id": "2", "text": ""}])
    plan = make_plan(options(tiny_model, data, id_field="id"), store)
    assert documents_of(store, plan) == [
        DocumentRow(id="one", tokens=4, bytes=4, characters=4, words=2),
        DocumentRow(id="2", tokens=0, bytes=0, characters=0, words=1),
    ]


def test_hashed_ids_hide_the_ids(tmp_path: Path, tiny_model: Path) -> None:
    """With --hash-ids no document id is in the store."""
    store = LocalStore(tmp_path / "out")
    data = write_jsonl(tmp_path / "c.jsonl", [{"id": "secret-name", "text": "ab"}])
    plan = make_plan(options(tiny_model, data, id_field="id", hash_ids=True), store)
    (row,) = documents_of(store, plan)
    assert re.fullmatch("[0-9a-f]{32}", row.id)


def test_long_document_tables_are_cut(tmp_path: Path, tiny_model: Path) -> None:
    """Ten thousand documents a table."""
    store = LocalStore(tmp_path / "out")
    data = write_texts(tmp_path / "c.jsonl", ["a"] * 10_001)
    plan = make_plan(options(tiny_model, data, chunk_tokens=8192), store)
    assert len(plan.groups[0].document_tables) == 2
    assert len(documents_of(store, plan)) == 10_001


def test_odd_group_names_stay_apart(tmp_path: Path, tiny_model: Path) -> None:
    """Two names that look the same as file names are two groups."""
    names = ["a/b", "a?b", "a b", "", "../x", "A/b"]
    data = write_jsonl(tmp_path / "c.jsonl", [{"text": "abc", "topic": name} for name in names])
    plan = make_plan(options(tiny_model, data, group_by="topic"), LocalStore(tmp_path / "out"))
    assert [group.name for group in plan.groups] == names
    assert len({group.key for group in plan.groups}) == len(names)


def test_only_the_wanted_groups_are_planned(tmp_path: Path, tiny_model: Path) -> None:
    """With --groups the others are read past."""
    data = write_jsonl(tmp_path / "c.jsonl", make_documents(20, groups=("a", "b", "c")))
    plan = make_plan(options(tiny_model, data, group_by="topic", groups=["c", "a"]), LocalStore(tmp_path / "out"))
    assert {group.name for group in plan.groups} == {"a", "c"}


def test_planning_again_gives_the_same_plan(tmp_path: Path, tiny_model: Path) -> None:
    """A second planner creates nothing new and agrees with the first."""
    store = LocalStore(tmp_path / "out")
    chosen = options(tiny_model, write_jsonl(tmp_path / "c.jsonl", make_documents(20)), group_by="topic")
    first = make_plan(chosen, store)
    before = sorted(entry.key for entry in store.list())
    assert make_plan(chosen, store) == first == load_plan(store)
    assert sorted(entry.key for entry in store.list()) == before


def test_a_moved_corpus_gives_the_same_plan(tmp_path: Path, tiny_model: Path) -> None:
    """Paths and times are no part of a plan's identity."""
    documents = make_documents(20)
    digests = set()
    for name in ("here.jsonl", "there.jsonl"):
        data = write_jsonl(tmp_path / name, documents)
        digests.add(make_plan(options(tiny_model, data), LocalStore(tmp_path / name.split(".")[0])).digest())
    assert len(digests) == 1


def test_interrupted_planning_is_resumed(tmp_path: Path, tiny_model: Path) -> None:
    """A planner that was stopped leaves no plan; the next one ends with the plan of an undisturbed one."""
    store = LocalStore(tmp_path / "out")
    chosen = options(tiny_model, write_jsonl(tmp_path / "c.jsonl", make_documents(3000)), chunk_tokens=8192)
    calls = iter([False, True])
    with pytest.raises(IncompleteError):
        make_plan(chosen, store, stop=lambda: next(calls))
    with pytest.raises(ObjectNotFoundError):
        store.get(PLAN_KEY)
    assert make_plan(chosen, store) == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_planning_that_fails_at_any_create_leaves_no_part_of_a_plan(
    tmp_path: Path, tiny_model: Path, when: Literal["before", "after", "torn"]
) -> None:
    """Fail at create 1, 2, 3, … until nothing fails: no plan or the whole one, and the next run completes it."""
    data = write_jsonl(tmp_path / "c.jsonl", make_documents(8))
    chosen = options(tiny_model, data, group_by="topic", chunk_tokens=256)
    expected = make_plan(chosen, LocalStore(tmp_path / "undisturbed"))
    last = 1 + len(expected.chunks) + len(expected.groups) + 1
    for number in range(2, last + 1):  # the first operation asks for the state of an interrupted planner
        inner = LocalStore(tmp_path / f"out-{number}")
        with pytest.raises(StoreUnavailableError):
            make_plan(chosen, FaultyStore(inner, fail_at=number, when=when, verbs=["create"]))
        if PLAN_KEY in [entry.key for entry in inner.list()]:
            assert (number, when) == (last, "after")
            assert load_plan(inner) == expected
        assert make_plan(chosen, inner) == expected
    undisturbed = FaultyStore(LocalStore(tmp_path / "out"), fail_at=last + 1, verbs=["create"])
    assert make_plan(chosen, undisturbed) == expected
    assert undisturbed.fired == 0


def test_progress_ends_at_the_whole_corpus(tmp_path: Path, tiny_model: Path) -> None:
    """The last report has every document and every byte."""
    data = write_jsonl(tmp_path / "c.jsonl", make_documents(2500))
    seen: list[PlanProgress] = []
    make_plan(options(tiny_model, data, chunk_tokens=4096), LocalStore(tmp_path / "out"), progress=seen.append)
    assert [report.documents for report in seen] == sorted(report.documents for report in seen)
    assert seen[-1].documents == 2500
    assert seen[-1].read_bytes == seen[-1].total_bytes == data.stat().st_size


@pytest.mark.parametrize(("change", "field"), [
    ({"context": 32}, "context"),
    ({"chunk_tokens": 32}, "chunk_tokens"),
    ({"text_field": "id"}, "corpus option text_field"),
    ({"limit_documents": 3}, "corpus option limit_documents"),
    ({"prefix_id": 257}, "prefix token"),
])  # fmt: skip
def test_other_options_are_refused_by_name(
    tmp_path: Path, tiny_model: Path, change: dict[str, Any], field: str
) -> None:
    """A resume with another choice names the field that differs."""
    data = write_jsonl(tmp_path / "c.jsonl", make_documents(20))
    plan = make_plan(options(tiny_model, data), LocalStore(tmp_path / "out"))
    check_plan(plan, options(tiny_model, data))
    with pytest.raises(IdentityMismatch) as caught:
        check_plan(plan, options(tiny_model, data, **change))
    assert caught.value.field == field


def test_a_changed_corpus_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """A file with other content, and one more file, both are another corpus."""
    data = write_jsonl(tmp_path / "c.jsonl", make_documents(20))
    plan = make_plan(options(tiny_model, data), LocalStore(tmp_path / "out"))
    more = write_jsonl(tmp_path / "d.jsonl", make_documents(1, seed=3))
    with pytest.raises(IdentityMismatch, match="corpus"):
        check_plan(plan, options(tiny_model, data, more))
    write_jsonl(data, make_documents(20, seed=1))
    with pytest.raises(IdentityMismatch, match="corpus"):
        check_plan(plan, options(tiny_model, data))


def test_verify_data_reads_what_looks_unchanged(tmp_path: Path, tiny_model: Path) -> None:
    """A change that keeps size and time is seen only with --verify-data."""
    import os

    data = write_texts(tmp_path / "c.jsonl", ["abc"])
    plan = make_plan(options(tiny_model, data), LocalStore(tmp_path / "out"))
    status = data.stat()
    write_texts(data, ["abd"])
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    check_plan(plan, options(tiny_model, data))
    with pytest.raises(IdentityMismatch, match="corpus"):
        check_plan(plan, options(tiny_model, data), verify_data=True)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_nothing_to_score_is_refused(tmp_path: Path, tiny_model: Path, texts: list[str]) -> None:
    """A corpus without a token ends in one sentence and without a plan."""
    store = LocalStore(tmp_path / "out")
    with pytest.raises(UsageError, match="nothing to score"):
        make_plan(options(tiny_model, write_texts(tmp_path / "c.jsonl", texts)), store)
    assert PLAN_KEY not in [entry.key for entry in store.list()]


def test_leftover_chunks_of_another_corpus_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    """Chunks of an unfinished plan whose documents were renumbered since do not slip into the new plan."""
    store = LocalStore(tmp_path / "out")
    make_plan(options(tiny_model, write_texts(tmp_path / "c.jsonl", ["abc"])), store)
    (tmp_path / "out" / PLAN_KEY).unlink()
    with pytest.raises(EverplexError, match="another --out") as caught:
        make_plan(options(tiny_model, write_texts(tmp_path / "c.jsonl", ["", "abc"])), store)
    assert caught.value.exit_code == 2


def test_special_token_text_is_counted_as_the_tokenizer_counts_it(tmp_path: Path, tiny_model: Path) -> None:
    """The literal text of a special token is that token, as in lm-eval, and its bytes count as text."""
    store = LocalStore(tmp_path / "out")
    plan = make_plan(options(tiny_model, write_texts(tmp_path / "c.jsonl", ["<s>a</s>"])), store)
    (chunk,) = chunks_of(store, plan)
    assert chunk.tokens_N.tolist()[:2] == [BOS, BOS]
    assert chunk.num_scored == 3
    assert plan.chunks.bytes == [8]
