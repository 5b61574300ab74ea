"""Corpora in columns and arrays: Parquet, Arrow folders, token arrays; whole, odd and damaged."""

from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from everplex.stages import arrays
from everplex.stages.corpus import Corpus
from everplex.stages.documents import Conversation
from everplex.stages.plan import PlanOptions, make_plan
from everplex.stages.stored import load_chunk
from everplex.storage.errors import UsageError
from everplex.storage.local import LocalStore

ROWS = {"text": ["one", "", "naïve 🐕"] * 200, "n": list(range(600)), "topic": ["a", "b", "a"] * 200}


def read(*data: Path | str, **more: Any) -> list[tuple[str, str, Any]]:
    """Return id, group and content of every document."""
    corpus = Corpus(PlanOptions(data=[str(path) for path in data], tokenizer="", **more))
    found = [(document.id, document.group, document.content) for document in corpus.documents()]
    assert corpus.read_bytes == corpus.total_bytes
    return found


def expected() -> list[tuple[str, str, str]]:
    """Return what every format gives of ROWS."""
    return [(str(n), topic, text) for text, n, topic in zip(*ROWS.values(), strict=True)]


def test_parquet_with_several_row_groups(tmp_path: Path) -> None:
    """Rows in order; only the columns that are named are needed."""
    table = pa.table(ROWS | {"junk": [b"\xff"] * 600})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=70)
    assert read(tmp_path / "c.parquet", id_field="n", group_by="topic") == expected()


def test_parquet_behind_a_url(tmp_path: Path) -> None:
    """A column file is read by position from any store."""
    pq.write_table(pa.table(ROWS), tmp_path / "c.parquet")
    fsspec.filesystem("memory").pipe_file("/columns/c.parquet", (tmp_path / "c.parquet").read_bytes())
    assert read("memory://columns/*.parquet", id_field="n", group_by="topic") == expected()


def test_arrow_folder_saved_by_datasets(tmp_path: Path) -> None:
    """All files of the folder, in the order of its state, however many there are."""
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert read(tmp_path / "saved", id_field="n", group_by="topic") == expected()
    assert len(Corpus(PlanOptions(data=[str(tmp_path / "saved")], tokenizer=""))._stats) == 3


def test_chats_from_columns(tmp_path: Path) -> None:
    """Nested columns give the messages of a chat."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    pq.write_table(pa.table({"messages": [chat]}), tmp_path / "c.parquet")
    ((_, _, content),) = read(tmp_path / "c.parquet", content="messages")
    assert content == Conversation(chat)


def test_random_access_arrow_file(tmp_path: Path) -> None:
    """The other form of Arrow files is told by its first bytes."""
    table = pa.table(ROWS)
    with pa.ipc.new_file(tmp_path / "c.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    assert read(tmp_path / "c.arrow", id_field="n", group_by="topic") == expected()


@pytest.mark.parametrize(("columns", "more", "sentence"), [
    ({"body": ["a"]}, {}, r"c\.parquet: expected a column 'text', found the columns body"),
    ({"text": ["a", None]}, {}, r"c\.parquet, row 2: expected a string in field 'text', found null"),
    ({"text": [1]}, {}, r"c\.parquet, row 1: expected a string in field 'text', found a number"),
    ({"text": ["a", "b\0"]}, {}, r"c\.parquet, row 2: field 'text' has a NUL character at position 1"),
    ({"text": ["a"]}, {"group_by": "topic"}, r"c\.parquet: expected a column 'topic'"),
    ({"text": pa.array([b"a", b"\xff"]).view(pa.string())}, {}, r"c\.parquet, row 2: expected UTF-8"),
])  # fmt: skip
def test_malformed_columns_are_refused_with_their_row(
    tmp_path: Path, columns: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    """Exit code 2, with file and row."""
    pq.write_table(pa.table(columns), tmp_path / "c.parquet")
    with pytest.raises(UsageError, match=sentence):
        read(tmp_path / "c.parquet", **more)


@pytest.mark.parametrize("name", ["c.parquet", "c.arrow", "file.arrow"])
def test_column_files_cut_short_are_refused(tmp_path: Path, name: str) -> None:
    """No prefix of a column file passes for a whole one, not even one that ends between two batches."""
    table = pa.table({"text": ["abc", "def"]})
    if name == "c.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        new = pa.ipc.new_stream if name == "c.arrow" else pa.ipc.new_file
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    whole = (tmp_path / name).read_bytes()
    assert len(read(tmp_path / name)) == 2
    for size in range(0, len(whole), 4):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(UsageError, match="cut short"):
            read(tmp_path / name)


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """A folder with several splits or with other files is no corpus by itself."""
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict(ROWS)})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UsageError, match=r"without a state\.json; .* name one"):
        read(tmp_path / "splits")
    assert len(read(tmp_path / "splits" / "train")) == 600
    (tmp_path / "splits" / "state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"state\.json: not what datasets"):
        read(tmp_path / "splits")


def scored_of(tmp_path: Path, tokenizer: Path, data: Path, **more: Any) -> list[list[int]]:
    """Return the scored tokens of every document in a plan of token arrays."""
    store = LocalStore(tmp_path / "out")
    chosen: dict[str, Any] = {"context": 8, "chunk_tokens": 64} | more
    plan = make_plan(PlanOptions(data=[str(data)], tokenizer=str(tokenizer), **chosen), store)
    assert sum(plan.chunks.bytes) == sum(plan.chunks.words) == 0
    found: dict[int, list[int]] = {}
    for pair in zip(plan.chunk_ids(), plan.chunks.content, strict=True):
        for row in load_chunk(store, *pair).rows():
            found.setdefault(row.document, []).extend(row.tokens[1:][row.scored].tolist())
    return list(found.values())


TOKENS = np.arange(100) % 250


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", ">u2"])
@pytest.mark.parametrize("block", [1 << 20, 7])
def test_token_arrays_of_every_type(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, block: int
) -> None:
    """A vector is one document, in memory or so long that it is read where it is cut."""
    monkeypatch.setattr(arrays, "BLOCK_TOKENS", block)
    np.save(tmp_path / "c.npy", TOKENS.astype(dtype))
    TOKENS.astype(dtype).tofile(tmp_path / "c.bin")
    assert scored_of(tmp_path / "1", tiny_model, tmp_path / "c.npy") == [TOKENS.tolist()]
    assert scored_of(tmp_path / "2", tiny_model, tmp_path / "c.bin", token_dtype=dtype) == [TOKENS.tolist()]
    packed = scored_of(tmp_path / "3", tiny_model, tmp_path / "c.npy", protocol="packed")
    assert [token for window in packed for token in window] == TOKENS.tolist()


def test_each_row_of_a_matrix_is_a_document(tmp_path: Path, tiny_model: Path) -> None:
    """Rows of equal length, as pretraining data is stored."""
    matrix = np.arange(60, dtype=np.uint16).reshape(4, 15)
    np.save(tmp_path / "c.npy", matrix)
    assert scored_of(tmp_path, tiny_model, tmp_path / "c.npy") == matrix.tolist()


@pytest.mark.parametrize(("array", "sentence"), [
    (np.array([0, 1, 259, 3]), r"c\.npy, document 1: the id of token 2 is beyond the vocabulary of 259 tokens"),
    (np.array([0, -1]), "the id of token 1 is beyond"),
    (np.array([2**32 + 1]), "the id of token 0 is beyond"),
    (np.array([2**63 + 1], dtype=np.uint64), "the id of token 0 is beyond"),
    (np.array([0.5]), "expected a vector or a C-ordered matrix of integers, found float64"),
    (np.zeros((2, 2, 2), dtype=np.int32), "expected a vector or a C-ordered matrix"),
    (np.asfortranarray(np.zeros((2, 3), dtype=np.int32)), "expected a vector or a C-ordered matrix"),
    (np.zeros(0, dtype=np.int32), "nothing to score"),
])  # fmt: skip
def test_malformed_token_arrays_are_refused(
    tmp_path: Path, tiny_model: Path, array: np.ndarray[Any, Any], sentence: str
) -> None:
    """What is no token of this vocabulary is not scored."""
    np.save(tmp_path / "c.npy", array)
    with pytest.raises(UsageError, match=sentence):
        scored_of(tmp_path, tiny_model, tmp_path / "c.npy")


def test_pickled_and_torn_arrays_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    """A file that holds less than its header says, or Python objects, is not read."""
    path = tmp_path / "c.npy"
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for size in (0, 5, 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"c\.npy: expected"):
            scored_of(tmp_path, tiny_model, path)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match=r"c\.npy: expected"):
        scored_of(tmp_path, tiny_model, path)


@pytest.mark.parametrize(("name", "more", "sentence"), [
    ("c.bin", {}, "give --token-dtype"),
    ("c.bin", {"token_dtype": "float32"}, "expected an integer type such as uint16, found 'float32'"),
    ("c.bin", {"token_dtype": "u17"}, "expected an integer type such as uint16, found 'u17'"),
    ("c.bin", {"token_dtype": "uint16"}, "1 bytes are left over"),
    ("c.bin", {"token_dtype": "uint8", "group_by": "topic"}, "no field 'topic' to group by"),
    ("c.npy.gz", {}, "unpack it first"),
])  # fmt: skip
def test_unusable_token_files_are_refused(tmp_path: Path, name: str, more: dict[str, Any], sentence: str) -> None:
    """What cannot be read is named with what to do."""
    (tmp_path / name).write_bytes(b"abc")
    with pytest.raises(UsageError, match=sentence):
        read(tmp_path / name, **more)
