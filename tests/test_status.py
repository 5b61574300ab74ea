"""The status of a run, read from its store alone."""

import json
import math
from pathlib import Path

import msgspec
import pytest
from support.segments import DictStore, Fabric, fill, worker_id
from support.stored import TimedStore, begin, complete, put_rows, save

from everplex.cli import run_command_line
from everplex.run_status import IDLE_SECONDS, Status, StatusReader
from everplex.stages.layout import chunk_key, segment_key
from everplex.stages.stored import save_plan
from everplex.status_text import status_line, status_report
from everplex.storage.errors import UsageError
from everplex.storage.store import Store

FABRIC = Fabric({"a": [5, 40, 0, 300, 1, 64], "b/c": [30] * 9})
ROWS = range(len(FABRIC.plan.chunks))


def _read(store: Store, now: float = 1000.0) -> Status:
    return StatusReader(store, lambda url: store, lambda: now).read()  # noqa: ARG005


def test_nothing_to_tell_of_an_empty_place() -> None:
    """A store without plan and chunks is a mistyped OUT, most likely."""
    with pytest.raises(UsageError, match="neither a run nor a plan"):
        _read(DictStore())


def test_chunks_without_a_plan_are_a_plan_being_made() -> None:
    """While planning, the chunks that are there are counted."""
    store = DictStore()
    for chunk, content in list(zip(FABRIC.chunk_ids, FABRIC.plan.chunks.content, strict=True))[:3]:
        store.create(chunk_key(chunk, content), b"")
    status = _read(store)
    assert (status.state, status.chunks, status.done) == ("planning", 3, 0)
    assert status_report(status).count("\n") == 1


def test_a_plan_alone_tells_what_is_to_be_done() -> None:
    """Before the first result: the plan's size, all of it missing."""
    store = DictStore()
    save_plan(store, FABRIC.plan)
    status = _read(store)
    assert status.state == "planned"
    assert (status.chunks, status.missing, status.done) == (len(ROWS), len(ROWS), 0)
    assert status.tokens == status.plan["tokens"] == 5 + 40 + 300 + 1 + 64 + 270
    assert status.groups["b/c"].tokens == 270
    assert status.run is None
    assert "planned" in status_report(status)


def test_a_run_under_way_is_counted_chunk_by_chunk() -> None:
    """Done, missing, duplicates, tokens per group and the perplexity so far are those of the records."""
    store = begin(FABRIC, TimedStore())
    put_rows(FABRIC, store, 0, ROWS[:4])
    put_rows(FABRIC, store, 1, ROWS[3:6])
    status = _read(store)
    assert status.state == "started"
    assert (status.done, status.missing, status.duplicates) == (6, len(ROWS) - 6, 1)
    losses = [float(loss) for row in ROWS[:6] for loss in FABRIC.losses(row)]
    assert status.done_tokens == len(losses) == sum(group.done_tokens for group in status.groups.values())
    assert status.perplexity == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-12)
    assert [(worker.rank, worker.chunks, worker.device) for worker in status.workers] == [
        (0, 4, "host-0/cpu"),
        (1, 3, "host-1/cpu"),
    ]
    assert status.store_requests == {"create": 2}
    assert {device.device for device in status.devices} == {"host-0/cpu", "host-1/cpu"}


def test_the_stores_clock_tells_who_is_active_and_how_long_it_takes() -> None:
    """Speed and time left are those of workers whose newest segment is recent by the store's own times."""
    store = TimedStore(now=1000.0)
    begin(FABRIC, store)
    put_rows(FABRIC, store, 0, ROWS[:3], seconds=2.0)
    store.now = 2000.0
    put_rows(FABRIC, store, 1, ROWS[3:5], seconds=2.0)
    status = _read(store, now=2000.0 + IDLE_SECONDS)
    gone, active = status.workers
    assert (gone.last_activity, gone.active) == (1000.0, False)
    assert (active.last_activity, active.active) == (2000.0, True)
    assert active.tokens_per_second == pytest.approx(active.tokens / 4.0)
    assert status.tokens_per_second == active.tokens_per_second
    assert active.tokens_per_second is not None
    assert status.seconds_left == pytest.approx((status.tokens - status.done_tokens) / active.tokens_per_second)
    later = _read(store, now=2000.0 + IDLE_SECONDS + 1)
    assert (later.tokens_per_second, later.seconds_left) == (None, None)
    assert "no worker is active" in status_report(later)


def test_a_slow_worker_is_given_the_time_of_several_chunks() -> None:
    """A worker whose chunks take long is not taken to be gone between two of them."""
    store = begin(FABRIC, TimedStore(now=0.0))
    put_rows(FABRIC, store, 0, ROWS[:1], seconds=1000.0)
    assert _read(store, now=4000.0).workers[0].active
    assert not _read(store, now=6000.0).workers[0].active


def test_the_workers_clock_counts_where_the_store_has_none() -> None:
    """Without times in the listing, the header's time is the last activity."""
    store = begin(FABRIC, DictStore())
    header = msgspec.structs.replace(FABRIC.header(worker_id(0), 1), created=900.0)
    key, data = FABRIC.segment(header, [FABRIC.record(0)])
    store.create(key, data)
    assert _read(store).workers[0].last_activity == 900.0


def test_what_cannot_count_is_named() -> None:
    """A torn segment is set aside with a sentence; evaluations that disagree are a conflict; nothing raises."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS[:2])
    put_rows(FABRIC, store, 1, ROWS[1:2], bias=1.0)
    torn = segment_key(worker_id(2), 1, "0" * 64)
    store.create(torn, b"torn")
    status = _read(store)
    assert (status.done, status.conflicts, status.missing) == (1, 1, len(ROWS) - 2)
    assert [sentence.startswith(torn) for sentence in status.set_aside] == [True]
    text = status_report(status)
    assert "1 in conflict" in text
    assert torn in text


def test_a_second_look_reads_only_what_is_new() -> None:
    """A reader that is kept fetches every segment once."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS[:2])
    reader = StatusReader(store, lambda url: store)  # noqa: ARG005
    assert reader.read().done == 2
    store.gets.clear()
    new = put_rows(FABRIC, store, 1, ROWS[2:5])
    assert reader.read().done == 5
    assert [key for key in store.gets if key.startswith("segments/")] == [new]


def test_a_shared_plan_is_read_from_where_it_lies() -> None:
    """A run that names a plan elsewhere has that plan's chunks."""
    plans, store = DictStore("memory://plans"), DictStore()
    save_plan(plans, FABRIC.plan)
    run = msgspec.structs.replace(FABRIC.run, plan_url="memory://plans")
    store.create("run.json", msgspec.json.encode(run))
    put_rows(FABRIC, store, 0, ROWS[:2])
    stores = {"memory://plans": plans}
    assert StatusReader(store, stores.__getitem__).read().done == 2


@pytest.mark.parametrize("sealed", [True, False])
def test_a_complete_run_says_whether_it_is_sealed(*, sealed: bool) -> None:
    """Nothing is missing, no time is left; the seal is looked for."""
    status = _read(complete(FABRIC, sealed=sealed))
    assert (status.state, status.sealed, status.seconds_left) == ("complete", sealed, 0.0)
    assert ("not sealed" in status_report(status)) is not sealed


def test_the_command_answers_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 for an unfinished run, typed JSON, text, and no file is made."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS[:2])
    out = save(store, tmp_path / "run")
    before = sorted(out.rglob("*"))
    assert run_command_line(["status", str(out), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Status).done == 2
    assert run_command_line(["status", str(out)]) == 0
    assert f"2 of {len(ROWS)} done" in capsys.readouterr().out
    assert sorted(out.rglob("*")) == before


def test_watching_ends_when_the_run_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each look where there is no terminal; the last one says complete."""
    store = begin(FABRIC, DictStore())
    out = save(store, tmp_path / "run")

    def finish(_seconds: float) -> None:
        fill(FABRIC, store)
        save(store, out)

    monkeypatch.setattr("everplex.commands.time.sleep", finish)
    assert run_command_line(["status", str(out), "--watch"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"started: 0/{len(ROWS)} chunks"
    assert last.startswith(f"complete: {len(ROWS)}/{len(ROWS)} chunks")
    assert run_command_line(["status", str(out), "--watch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "complete"


def test_an_interrupted_watch_was_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends watching with exit code 0."""
    out = save(begin(FABRIC, DictStore()), tmp_path / "run")

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("everplex.commands.time.sleep", interrupt)
    assert run_command_line(["status", str(out), "--watch"]) == 0


def test_the_line_tells_speed_and_time_left() -> None:
    """What a log shows while a run is under way."""
    status = Status(out="x", state="started", chunks=10, done=4, missing=6, perplexity=12.5, tokens_per_second=1500.0,
                    seconds_left=75.0)  # fmt: skip
    assert status_line(status) == "started: 4/10 chunks, perplexity 12.5000 so far, 1,500 tokens/s, 1 min 15 s left"
