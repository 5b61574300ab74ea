"""Objects of every released schema stay readable: `golden/schema-N` holds a whole run as the first release wrote it.

That of schema 1 was made with the model of `support.models` by `everplex run corpus.jsonl --model m --context 16
--chunk-tokens 32 --group-by topic --id-field id --audit 0`. Such a folder is never changed; a new schema brings one of
its own.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard

from everplex.stages.chunk import decode_chunk
from everplex.stages.ledger import Ledger
from everplex.stages.reduce import recheck
from everplex.stages.segments import Segment, decode_segment
from everplex.stages.stored import load_chunk, load_plan, load_run, load_summary
from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import CorruptObjectError
from everplex.storage.local import LocalStore

GOLDEN = Path(__file__).parent / "golden" / "schema-1"
PLAN, RUN, SUMMARY = "plan/plan.json.zst", "run.json", "summary.json"
PLAN_DIGEST = "3bf9144451aa9829228280e8056a85f139c20e359124ffb9642447ee7dc36771"
RUN_ID = "512624d2992279b1"
CODE = "code-5694d08a2e/00000000"
CODE_NLL = 73.9358392696511
CODE_TOKENS = [256, 87, 220, 28, 220, 58, 16, 11, 220, 17, 60]
"""The prefix token, and `x = [1, 2]` as the tokenizer of `support.models` numbers its bytes."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a copy of the golden run."""
    return LocalStore(shutil.copytree(GOLDEN, tmp_path / "run"))


def test_identities(store: LocalStore) -> None:
    """Plan and run are still called what they were called, so their results still belong to them."""
    plan, run = load_plan(store), load_run(store)
    assert plan.digest() == run.plan == PLAN_DIGEST
    assert run.id() == RUN_ID
    assert plan.chunk_ids() == ["prose-8e8cc5a7ec/00000000", "prose-8e8cc5a7ec/00000001", CODE]
    assert plan.chunks.tokens == [32, 23, 10]
    assert [(group.name, group.documents) for group in plan.groups] == [("prose", 3), ("code", 1)]


def test_chunk(store: LocalStore) -> None:
    """A chunk's input has the tokens that it had, and passes its digest."""
    plan = load_plan(store)
    chunk = load_chunk(store, CODE, plan.chunks.content[2])
    assert chunk.tokens_N.tolist() == CODE_TOKENS
    assert chunk.scored_M.all()
    assert chunk.row_documents_R.tolist() == [0]


def test_records(store: LocalStore) -> None:
    """Every segment is read, and its records pass the checks against the plan."""
    ledger = Ledger(store, load_plan(store), RUN_ID)
    ledger.refresh()
    assert not ledger.set_aside
    assert ledger.recorded == set(load_plan(store).chunk_ids())
    found = [record for key in _segments() for record in _read_segment(store, key).records if record.chunk == CODE]
    assert [(record.nll, record.tokens) for record in found] == [(CODE_NLL, 10)]


def test_numbers(store: LocalStore) -> None:
    """The seal is read, and the same numbers can be had again from the segments that it lists."""
    found = recheck(store, load_plan(store), load_run(store))
    assert found.late == []
    assert found.sealed.complete
    assert found.sealed.perplexity == 928.6393091964321
    assert found.sealed.groups["code"].nll == CODE_NLL


def _segments() -> list[str]:
    return sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("segments/*/*.zst"))


def _read_segment(store: LocalStore, key: str) -> Segment:
    return decode_segment(key, store.get(key))


def _rewrite(store: LocalStore, key: str, change: dict[str, Any], lines: slice) -> str:
    """Change some of the JSON lines of an object; returns its key, which for a segment is another one."""
    path = store.folder / key
    data = path.read_bytes()
    text = zstandard.ZstdDecompressor().decompress(data) if key.endswith(".zst") else data
    documents = [json.loads(line) for line in text.splitlines()]
    for document in documents[lines]:
        document.update(change)
        if document.pop("digest", None) is not None:
            document["digest"] = sha256_hex(canonical_json(document))
    text = "\n".join(map(json.dumps, documents)).encode()
    data = zstandard.ZstdCompressor().compress(text) if key.endswith(".zst") else text
    if key.startswith("segments/"):
        key = f"{key[: key.rindex('-')]}-{hashlib.sha256(data).hexdigest()[:16]}.jsonl.zst"
    (store.folder / key).write_bytes(data)
    return key


READERS: dict[str, Callable[[LocalStore, str], Any]] = {
    PLAN: lambda store, _: load_plan(store),
    RUN: lambda store, _: load_run(store),
    SUMMARY: lambda store, _: load_summary(store),
    _segments()[0]: _read_segment,
}


@pytest.mark.parametrize("key", READERS)
def test_unknown_fields_are_ignored(store: LocalStore, key: str) -> None:
    """What a later release adds to a document, a segment's header or a record does not keep an earlier one out."""
    read = READERS[key]
    expected = read(store, key)
    assert read(store, _rewrite(store, key, {"from_the_future": [1]}, slice(None))) == expected


@pytest.mark.parametrize("key", READERS)
def test_an_unknown_schema_is_refused(store: LocalStore, key: str) -> None:
    """A document of another schema is named, with the schema that it has."""
    changed = _rewrite(store, key, {"schema": 2}, slice(1))
    with pytest.raises(CorruptObjectError, match="expected schema 1, found 2") as caught:
        READERS[key](store, changed)
    assert changed in str(caught.value)


def test_unknown_tensors_are_ignored(store: LocalStore) -> None:
    """What a later release adds to a chunk's input does not keep an earlier one out."""
    content = load_plan(store).chunks.content[2]
    data = store.get(f"plan/chunks/{CODE}-{content[:24]}.zst")
    tensors = safetensors.numpy.load(zstandard.ZstdDecompressor().decompress(data))
    more = safetensors.numpy.save(tensors | {"from_the_future": np.zeros(1)})
    assert decode_chunk(zstandard.ZstdCompressor().compress(more), CODE, content).tokens_N.tolist() == CODE_TOKENS
