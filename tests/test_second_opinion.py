"""A real worker among records of made-up hosts: conflicts it settles or cannot, losses it cures, its own conviction."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.runs import QuietRun, numbers
from support.segments import worker_id

import everplex
from everplex.stages.evaluate import Evaluator
from everplex.stages.records import Record
from everplex.stages.segments import Segment, decode_segment, encode_record, encode_segment
from everplex.storage.errors import EverplexError, IntegrityError
from everplex.storage.local import LocalStore


def evaluate(quiet: QuietRun, out: Path, **more: Any) -> everplex.Summary:
    """Be the only worker of this machine."""
    options: dict[str, Any] = {"threads": 1, "batch_tokens": "256", "audit": 0.0, "refresh_seconds": 0.2}
    return everplex.evaluate(model=str(quiet.model), out=str(out), **options | more)


def segments(out: Path) -> list[Segment]:
    """Return all segments of a run."""
    store = LocalStore(out)
    return [decode_segment(entry.key, store.get(entry.key)) for entry in store.list("segments/")]


@pytest.fixture(scope="module")
def honest(quiet: QuietRun, tmp_path_factory: pytest.TempPathFactory) -> list[Segment]:
    """Return what this machine's device gives."""
    out = quiet.copy(tmp_path_factory.mktemp("honest") / "out")
    evaluate(quiet, out)
    return segments(out)


def put(out: Path, host: str | None, like: Segment, records: Iterable[Record]) -> None:
    """Write records as a worker on a host of that name; None is a worker on the device of this machine."""
    device = like.header.device if host is None else f"{host}/cpu"
    header = msgspec.structs.replace(like.header, worker=worker_id(hash(host) % 1000), seq=1, first=1, device=device)
    LocalStore(out).create(*encode_segment(header, [encode_record(record) for record in records]))


def wrong(record: Record, nats: float = 0.5) -> Record:
    """Return the record of a device whose loss of every token is too high."""
    assert record.nll is not None
    assert record.nll_sq is not None
    assert record.nll_max is not None
    return msgspec.structs.replace(
        record,
        nll=record.nll + nats * record.tokens,
        nll_sq=record.nll_sq + 2 * nats * record.nll + nats * nats * record.tokens,
        nll_max=record.nll_max + nats,
        doc_nll=_raised(record.doc_nll, record.doc_tokens, nats),
        position_nll=_raised(record.position_nll, record.position_tokens, nats),
        token_digest=f"{int(8 * nats):064x}",
    )


def _raised(nll: list[float] | None, tokens: list[int], nats: float) -> list[float]:
    assert nll is not None
    return [loss + nats * count for loss, count in zip(nll, tokens, strict=True)]


def all_records(honest: list[Segment]) -> list[Record]:
    """Return the records of all segments."""
    return [record for segment in honest for record in segment.records]


def test_a_conflict_is_settled_by_a_third_evaluation(quiet: QuietRun, honest: list[Segment], tmp_path: Path) -> None:
    """Two hosts disagree on one chunk: this worker evaluates it too, and the sums are the honest ones."""
    out = quiet.copy(tmp_path / "out")
    first = all_records(honest)[0]
    put(out, "right", honest[0], [first])
    put(out, "wrong", honest[0], [wrong(first)])
    summary = evaluate(quiet, out)
    assert (summary.complete, summary.coverage.conflicts) == (True, 0)
    kinds = [record.kind for segment in segments(out) for record in segment.records if record.chunk == first.chunk]
    assert sorted(kinds) == ["audit", "work", "work"]
    assert numbers(out) == quiet.numbers


def test_an_audit_finds_a_wrong_host_but_two_devices_cannot_say_which(
    quiet: QuietRun, honest: list[Segment], tmp_path: Path
) -> None:
    """One voice against one stays a conflict, exit code 4; with one host more it is settled."""
    out = quiet.copy(tmp_path / "out")
    records = all_records(honest)
    put(out, "wrong", honest[0], [wrong(records[0])])
    with pytest.raises(IntegrityError, match="1 chunks have evaluations that disagree"):
        evaluate(quiet, out, audit=1.0, rank=0, world_size=1)
    put(out, "right", honest[0], records)
    summary = evaluate(quiet, out)
    assert (summary.complete, summary.coverage.conflicts) == (True, 0)
    assert numbers(out) == quiet.numbers


def test_a_conflict_without_end(quiet: QuietRun, honest: list[Segment], tmp_path: Path) -> None:
    """After five evaluations that all differ no further one is made; the worker does the rest and ends with 4."""
    out = quiet.copy(tmp_path / "out")
    records = all_records(honest)
    for number in range(1, 6):
        put(out, f"host-{number}", honest[0], [wrong(records[0], number)])
    with pytest.raises(IntegrityError) as caught:
        evaluate(quiet, out)
    assert caught.value.exit_code == 4
    found = [record.chunk for segment in segments(out) for record in segment.records]
    assert found.count(records[0].chunk) == 5
    assert set(found) == {record.chunk for record in records}


def _spoil(monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[int], bool]) -> None:
    """Make a token's loss NaN in the evaluations of the second chunk seen whose number, from 0, is `spoilt`."""
    evaluate: Callable[..., Any] = Evaluator.evaluate
    seen: list[str] = []

    def spoiling(self: Evaluator, chunk: Any, **more: Any) -> Any:
        losses = evaluate(self, chunk, **more)
        seen.append(chunk.content())
        chosen = list(dict.fromkeys(seen))[1:2]
        if seen[-1:] == chosen and spoilt(seen.count(seen[-1]) - 1):
            losses.nll_S[0] = np.nan
        return losses

    monkeypatch.setattr(Evaluator, "evaluate", spoiling)


def test_a_loss_that_is_lost_once_is_cured(quiet: QuietRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN once: the chunk is evaluated again, and the sums are those of a quiet run."""
    out = quiet.copy(tmp_path / "out")
    _spoil(monkeypatch, lambda number: number == 0)
    assert evaluate(quiet, out).complete
    assert numbers(out) == quiet.numbers
    assert [record.nonfinite for record in all_records(segments(out))].count(1) == 1


def test_a_loss_that_is_always_lost(quiet: QuietRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN always: two evaluations, exit code 4, no seal, and every other chunk is recorded."""
    out = quiet.copy(tmp_path / "out")
    _spoil(monkeypatch, lambda _: True)
    with pytest.raises(EverplexError, match="not finite each time") as caught:
        evaluate(quiet, out)
    assert caught.value.exit_code == 4
    assert [record.nonfinite for record in all_records(segments(out))].count(1) == 2
    partial = everplex.reduce(str(out), partial=True)
    assert (partial.complete, partial.coverage.nonfinite) == (False, 1)
    assert partial.coverage.accepted == quiet.num_chunks - 1
    assert not (out / "summary.json").exists()


def test_what_a_convicted_device_did_is_done_again(quiet: QuietRun, honest: list[Segment], tmp_path: Path) -> None:
    """All is recorded, but by a device that two others outvoted: the same command evaluates its chunks once more."""
    out = quiet.copy(tmp_path / "out")
    records = all_records(honest)
    put(out, "wrong", honest[0], map(wrong, records))
    for host in ("one", "other"):
        put(out, host, honest[0], records[:2])
    summary = evaluate(quiet, out)
    assert (summary.complete, [row.device for row in summary.devices if row.health == "convicted"]) == (
        True,
        ["wrong/cpu"],
    )
    assert numbers(out) == quiet.numbers


def test_the_worker_of_a_convicted_device_stops(quiet: QuietRun, honest: list[Segment], tmp_path: Path) -> None:
    """Outvoted in two chunks by two hosts, this machine evaluates nothing more, and says why."""
    out = quiet.copy(tmp_path / "out")
    records = all_records(honest)
    put(out, None, honest[0], [wrong(record) for record in records[:2]])
    for host in ("one", "other"):
        put(out, host, honest[0], records[:2])
    before = len(segments(out))
    with pytest.raises(IntegrityError, match="computes wrong: other devices outvoted it in 2 chunks"):
        evaluate(quiet, out)
    assert len(segments(out)) == before
