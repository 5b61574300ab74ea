"""An interrupted planner is continued: what it planned is read again and not tokenised again."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_documents, write_jsonl

from everplex.stages.layout import PLAN_STATE_KEY
from everplex.stages.plan import PlanOptions, PlanProgress, make_plan
from everplex.stages.records import Plan
from everplex.storage.codec import compress, decompress
from everplex.storage.errors import IncompleteError
from everplex.storage.local import LocalStore

DOCUMENTS = make_documents(3000)
CHOICES: dict[str, dict[str, Any]] = {
    "a group": {},
    "two groups": {"group_by": "topic", "id_field": "id"},
    "hashed ids": {"id_field": "id", "hash_ids": True},
    "one text with weights": {"protocol": "hf-stride", "stride": 8, "hf_published_weights": True},
    "a stream": {"protocol": "packed", "group_by": "topic"},
    "a masked stream": {"protocol": "packed", "document_mask": True, "group_by": "topic"},
    "a sample": {"sample_documents": 2500, "seed": 3},
    "completions": {"content": "completion", "prompt_field": "topic", "completion_field": "text"},
    "one text": {"protocol": "llama.cpp"},
}


def options(tokenizer: Path, data: Path, **more: Any) -> PlanOptions:
    """Return small plan options over the byte tokenizer."""
    return PlanOptions(data=[str(data)], tokenizer=str(tokenizer), **({"context": 16, "chunk_tokens": 4096} | more))


def interrupt(chosen: PlanOptions, store: LocalStore, batches: int) -> None:
    """Plan so many batches and stop."""
    seen: list[PlanProgress] = []
    with pytest.raises(IncompleteError):
        make_plan(
            chosen,
            store,
            progress=seen.append,
            stop=lambda: bool(seen) and seen[-1].documents - seen[-1].kept == 1024 * batches,
        )


def resume(chosen: PlanOptions, store: LocalStore) -> tuple[Plan, int]:
    """Plan to the end; returns the plan and how many documents were taken over."""
    seen: list[PlanProgress] = []
    plan = make_plan(chosen, store, progress=seen.append)
    return plan, seen[-1].kept


@pytest.mark.parametrize("choice", CHOICES)
def test_a_plan_that_was_stopped_ends_as_if_it_had_not_been(choice: str, tmp_path: Path, tiny_model: Path) -> None:
    """After one batch or two: the same plan and objects, and only a text that is joined to the end is done again."""
    chosen = options(tiny_model, write_jsonl(tmp_path / "c.jsonl", DOCUMENTS), **CHOICES[choice])
    undisturbed = LocalStore(tmp_path / "undisturbed")
    expected = make_plan(chosen, undisturbed)
    for batches in (1, 2):
        store = LocalStore(tmp_path / str(batches))
        interrupt(chosen, store, batches)
        plan, kept = resume(chosen, store)
        assert plan == expected
        assert kept == (0 if choice.startswith("one text") else 1024 * batches)
        stored = {entry.key for entry in store.list()} - {PLAN_STATE_KEY}
        assert stored == {entry.key for entry in undisturbed.list()}


def test_a_plan_is_stopped_again_and_again(tmp_path: Path, tiny_model: Path) -> None:
    """Each planner adds a batch to what those before it had."""
    chosen = options(tiny_model, write_jsonl(tmp_path / "c.jsonl", DOCUMENTS), group_by="topic")
    store = LocalStore(tmp_path / "out")
    interrupt(chosen, store, 1)
    interrupt(chosen, store, 1)
    plan, kept = resume(chosen, store)
    assert kept == 2048
    assert plan == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))


def _another_text(documents: list[dict[str, str]]) -> None:
    documents[5]["text"] += "!"


def _another_group(documents: list[dict[str, str]]) -> None:
    documents[5]["topic"] = "c"


def _two_made_one(documents: list[dict[str, str]]) -> None:
    documents[5]["text"] += documents.pop(6)["text"]


def _too_short(documents: list[dict[str, str]]) -> None:
    del documents[1000:]


@pytest.mark.parametrize("change", [_another_text, _another_group, _two_made_one, _too_short])
def test_a_corpus_that_begins_otherwise_is_planned_from_the_start(
    change: Callable[[list[dict[str, str]]], None], tmp_path: Path, tiny_model: Path
) -> None:
    """The state of another beginning is not taken."""
    data = write_jsonl(tmp_path / "c.jsonl", DOCUMENTS)
    chosen = options(tiny_model, data, group_by="topic")
    interrupted, store = LocalStore(tmp_path / "interrupted"), LocalStore(tmp_path / "out")
    interrupt(chosen, interrupted, 1)
    store.publish(PLAN_STATE_KEY, interrupted.get(PLAN_STATE_KEY))
    changed = [dict(document) for document in DOCUMENTS]
    change(changed)
    write_jsonl(data, changed)
    plan, kept = resume(chosen, store)
    assert kept == 0
    assert plan == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))


def test_a_corpus_that_ends_otherwise_keeps_its_beginning(tmp_path: Path, tiny_model: Path) -> None:
    """What comes after the documents of the state may be anything."""
    data = write_jsonl(tmp_path / "c.jsonl", DOCUMENTS)
    chosen = options(tiny_model, data)
    store = LocalStore(tmp_path / "out")
    interrupt(chosen, store, 1)
    write_jsonl(data, DOCUMENTS[:2000] + DOCUMENTS[2500:])
    plan, kept = resume(chosen, store)
    assert kept == 1024
    assert plan == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))


@pytest.mark.parametrize("other", [{"context": 24}, {"chunk_tokens": 2048}, {"protocol": "lm-eval-bos"}])
def test_the_state_of_other_planning_is_not_taken(other: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    """Other windows or other chunks begin anew."""
    data = write_jsonl(tmp_path / "c.jsonl", DOCUMENTS)
    store = LocalStore(tmp_path / "out")
    interrupt(options(tiny_model, data), store, 2)
    chosen = options(tiny_model, data, **other)
    plan, kept = resume(chosen, store)
    assert kept == 0
    assert plan == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))


@pytest.mark.parametrize("damage", ["torn", "empty", "text", "rows"])
def test_a_damaged_state_is_not_taken(damage: str, tmp_path: Path, tiny_model: Path) -> None:
    """Then all of it is planned again."""
    chosen = options(tiny_model, write_jsonl(tmp_path / "c.jsonl", DOCUMENTS))
    store = LocalStore(tmp_path / "out")
    interrupt(chosen, store, 1)
    whole = store.get(PLAN_STATE_KEY)
    state = json.loads(decompress(whole, PLAN_STATE_KEY))
    state["groups"][0]["rows"]["content"] = "0" * 64
    rows = compress(json.dumps(state).encode())
    damaged = {"torn": whole[: len(whole) // 2], "empty": b"", "text": b"{}", "rows": rows}
    store.publish(PLAN_STATE_KEY, damaged[damage])
    plan, kept = resume(chosen, store)
    assert kept == 0
    assert plan == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))


_PLANNER = """
import sys
from everplex.stages.plan import PlanOptions, make_plan
from everplex.storage.local import LocalStore
tokenizer, data, out = sys.argv[1:]
chosen = PlanOptions(data=[data], tokenizer=tokenizer, context=16, chunk_tokens=4096)
def wait():
    print("batch", flush=True)
    return sys.stdin.readline() == ""
make_plan(chosen, LocalStore(out), stop=wait, state_seconds=0)
"""


def test_a_planner_that_is_killed_is_continued(tmp_path: Path, tiny_model: Path) -> None:
    """SIGKILL after the second batch, which was begun after the first was saved."""
    data = write_jsonl(tmp_path / "c.jsonl", DOCUMENTS)
    store = LocalStore(tmp_path / "out")
    command = [sys.executable, "-c", _PLANNER, str(tiny_model), str(data), str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as planner:
        assert planner.stdin is not None
        assert planner.stdout is not None
        assert planner.stdout.readline() == "batch\n"
        planner.stdin.write("on\n")
        planner.stdin.flush()
        assert planner.stdout.readline() == "batch\n"
        planner.kill()
        assert planner.wait() == -signal.SIGKILL
    chosen = options(tiny_model, data)
    plan, kept = resume(chosen, store)
    assert kept == 1024
    assert plan == make_plan(chosen, LocalStore(tmp_path / "undisturbed"))
