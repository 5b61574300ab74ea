"""The check-up: what it finds in the environment, the store and the run, how bad that is, and what to do."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from support.segments import DictStore, Fabric, worker_id
from support.stored import TimedStore, begin, complete, put_rows, save

from everplex.check_run import check_run
from everplex.check_store import check_store
from everplex.cli import run_command_line
from everplex.findings import Diagnosis, Finding
from everplex.run_status import StatusReader
from everplex.stages.layout import RUN_KEY, chunk_key, segment_key
from everplex.storage.codec import canonical_json
from everplex.storage.errors import ObjectNotFoundError

FABRIC = Fabric({"a": [5, 40, 0, 300, 1, 64], "b/c": [30] * 9})
ROWS = range(len(FABRIC.plan.chunks))


def _check_run(store: DictStore) -> list[Finding]:
    return list(check_run(StatusReader(store, lambda url: store)))  # noqa: ARG005


def _worst(findings: list[Finding]) -> int:
    return Diagnosis(findings=findings).exit_code


def _with_inputs(store: DictStore, fabric: Fabric = FABRIC) -> DictStore:
    for chunk, content in zip(fabric.chunk_ids, fabric.plan.chunks.content, strict=True):
        store.create(chunk_key(chunk, content), b"")
    return store


def test_a_sound_environment_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 here, where everything that everplex asks for is installed; typed JSON."""
    assert run_command_line(["doctor", "--json"]) == 0
    findings = msgspec.json.decode(capsys.readouterr().out, type=Diagnosis).findings
    assert {finding.area for finding in findings} == {"environment"}
    assert {finding.severity for finding in findings} <= {"good", "note"}
    assert any("msgspec" in finding.what for finding in findings)


@pytest.mark.parametrize("found", ["0.1", "2.5.1+cpu"])
def test_an_old_package_has_to_be_replaced(
    found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions are compared as numbers, and the command that mends it is told."""
    real = __import__("importlib.metadata").metadata.version
    monkeypatch.setattr("everplex.check_environment.version", lambda name: found if name == "torch" else real(name))
    assert run_command_line(["doctor"]) == 2
    text = capsys.readouterr().out
    assert f"torch {found} is older than 2.6" in text
    assert "pip install --upgrade 'torch>=2.6'" in text


def test_an_extra_that_is_missing_is_only_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who needs no S3 needs no s3fs."""
    metadata = __import__("importlib.metadata").metadata

    def version(name: str) -> str:
        if name == "s3fs":
            raise metadata.PackageNotFoundError
        return str(metadata.version(name))

    monkeypatch.setattr("everplex.check_environment.version", version)
    assert run_command_line(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [finding for finding in findings if finding["what"].startswith("s3fs")]
    assert finding == {
        "area": "environment",
        "severity": "note",
        "what": "s3fs is not installed: no s3:// URLs",
        "todo": "pip install 'everplex[s3]'",
    }


def test_a_good_store_passes_again_and_again() -> None:
    """The same few objects are used at every check-up, and all that is looked at is told."""
    store = TimedStore()
    for _ in range(2):
        findings = list(check_store(store, lambda: 1000.0))
        assert [finding.severity for finding in findings] == ["good"] * 3
    assert len(store.objects) <= 4


@pytest.mark.parametrize(
    ("store_time", "severity"),
    [(1000.4, "good"), (999.1, "good"), (1060.0, "note"), (940.0, "note"), (2000.0, "problem"), (None, "note")],
)
def test_clocks_are_compared_by_the_stores_own_dates(store_time: float | None, severity: str) -> None:
    """Some seconds are a note, minutes make a store refuse what is signed; some stores do not tell."""
    store = TimedStore()
    store.now = store_time
    assert list(check_store(store, lambda: 1000.0))[-1].severity == severity


class _Careless(DictStore):
    def create(self, key: str, data: bytes) -> None:
        self.objects[key] = data


class _Lossy(DictStore):
    def get(self, key: str) -> bytes:
        return super().get(key)[:-1]


class _Refusing(DictStore):
    def get(self, key: str) -> bytes:
        raise ObjectNotFoundError("get", key, "it vanished")


def test_a_store_without_conditional_create_is_noted() -> None:
    """Nothing rests on it, so nothing has to be done."""
    findings = list(check_store(_Careless()))
    assert any("twice" in finding.what and finding.severity == "note" for finding in findings)
    assert _worst(findings) == 0


def test_a_store_that_loses_data_is_not_to_be_used() -> None:
    """Other bytes than were written, or none, are told for what they are."""
    assert _worst(list(check_store(_Lossy()))) == 4
    assert _worst(list(check_store(_Refusing()))) == 2


def test_a_place_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the run is not looked at."""
    assert run_command_line(["doctor", "/proc/everplex"]) == 2
    assert "\nrun\n" not in capsys.readouterr().out


def test_an_empty_place_has_no_run_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check-up before the first run is not an error."""
    assert run_command_line(["doctor", str(tmp_path / "out")]) == 0
    assert "holds no run yet" in capsys.readouterr().out


def test_a_sealed_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Identity, coverage and seal are good; the exit code is 0."""
    out = save(complete(FABRIC), tmp_path / "run")
    assert run_command_line(["doctor", str(out), "--json"]) == 0
    findings = msgspec.json.decode(capsys.readouterr().out, type=Diagnosis).findings
    good = [finding.what for finding in findings if finding.area == "run" and finding.severity == "good"]
    assert any(f"all {len(ROWS)} chunks count, sealed" in what for what in good)
    assert any("can be had again" in what for what in good)


def test_missing_chunks_are_noted_with_what_to_do() -> None:
    """An unfinished run is no error; who continues it is told."""
    store = _with_inputs(begin(FABRIC, DictStore()))
    put_rows(FABRIC, store, 0, ROWS[:3])
    findings = _check_run(store)
    assert _worst(findings) == 0
    (finding,) = [finding for finding in findings if "missing" in finding.what]
    assert finding.what == f"{len(ROWS) - 3} of {len(ROWS)} chunks are missing, 0 workers active"
    assert "run the same" in finding.todo


def test_a_damaged_segment_is_noted() -> None:
    """It is set aside, and its chunks are evaluated again."""
    store = _with_inputs(begin(FABRIC, DictStore()))
    store.create(segment_key(worker_id(2), 1, "0" * 64), b"torn")
    findings = _check_run(store)
    assert _worst(findings) == 0
    assert any(finding.what.startswith("set aside: segments/") for finding in findings)


@pytest.mark.parametrize("kind", ["conflict", "nonfinite", "seal", "identity"])
def test_what_cannot_be_trusted_ends_with_4(kind: str) -> None:
    """A conflict, a loss that is never finite, a damaged seal, a plan of something else."""
    store = begin(FABRIC, DictStore())
    if kind == "conflict":
        put_rows(FABRIC, store, 0, ROWS)
        put_rows(FABRIC, store, 1, ROWS[:1], bias=1.0)
    elif kind == "nonfinite":
        for number in (0, 1):
            FABRIC.put(store, worker_id(number), 1, [FABRIC.record(0, nonfinite=True, seconds=number)])
    elif kind == "seal":
        store = complete(FABRIC)
        key = next(key for key in store.objects if key.startswith("segments/"))
        store.objects[key] = store.objects[key][:-1]
    else:
        store.objects[RUN_KEY] = canonical_json(msgspec.structs.replace(FABRIC.run, plan="0" * 64))
    assert _worst(_check_run(store)) == 4


def test_lost_chunk_inputs_have_to_be_restored() -> None:
    """A plan folder that was copied in part is told before a worker finds out."""
    store = _with_inputs(begin(FABRIC, DictStore()))
    lost = next(key for key in store.objects if key.startswith("plan/chunks/"))
    del store.objects[lost]
    findings = _check_run(store)
    assert _worst(findings) == 2
    assert any(lost in finding.what for finding in findings)


def test_a_convicted_device_has_to_go() -> None:
    """Outvoted by two others in two chunks: a problem for its owner."""
    store = begin(FABRIC, DictStore())
    for number in (0, 1):
        put_rows(FABRIC, store, number, ROWS)
    put_rows(FABRIC, store, 2, ROWS[:3], bias=1.0)
    findings = _check_run(store)
    assert _worst(findings) == 2
    assert any("host-2/cpu is convicted" in finding.what for finding in findings)


def test_a_rank_that_did_little_is_noted() -> None:
    """Others take over, so it is a note."""
    store = begin(FABRIC, DictStore())
    for number, rows in enumerate((ROWS[:4], ROWS[4:8], ROWS[8:9])):
        put_rows(FABRIC, store, number, rows)
    assert any(finding.what.startswith("rank 2 evaluated") for finding in _check_run(_with_inputs(store)))


class _Hard(Fabric):
    """Losses of the group `hard` are higher by 2 nats."""

    def losses(self, row: int) -> NDArray[np.float32]:
        harder = self.plan.groups[self.plan.chunks.group[row]].name == "hard"
        return super().losses(row) / np.float32(4) + np.float32(2.0 if harder else 0.0)


HARD = _Hard({"easy": [256] * 40, "hard": [256] * 40}, windows_per_chunk=16)


@pytest.mark.parametrize(("bias", "explained"), [(0.0, True), (1.0, False)])
def test_an_unusual_loss_is_traced_to_its_data_or_not(bias: float, explained: bool) -> None:
    """A rank with harder groups is excused by them; one that gives more on the same groups is not."""
    store = _with_inputs(begin(HARD, DictStore()), HARD)
    rows = list(range(len(HARD.plan.chunks)))
    easy, hard = rows[:40], rows[40:]
    put_rows(HARD, store, 0, easy[:20])
    put_rows(HARD, store, 1, easy[20:] + hard[:5])
    put_rows(HARD, store, 2, hard[5:], bias=bias)
    (finding,) = [finding for finding in _check_run(store) if finding.what.startswith("rank 2 has")]
    assert ("do not explain it" not in finding.what) is explained
    assert "high loss" in finding.what


def test_equal_ranks_are_not_unusual() -> None:
    """Ranks with the same mix of groups and healthy devices give no finding."""
    store = _with_inputs(begin(HARD, DictStore()), HARD)
    rows = range(len(HARD.plan.chunks))
    for number in range(4):
        put_rows(HARD, store, number, rows[number::4])
    findings = _check_run(store)
    assert any(finding.what == "no rank has an unusual loss" for finding in findings)


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines())


def test_the_text_stands_by_area() -> None:
    """Findings come by area, each with its severity, and what to do on the next line."""
    diagnosis = Diagnosis(
        findings=[
            Finding(area="environment", severity="good", what="fine"),
            Finding(area="run", severity="problem", what="bad", todo="mend it"),
        ]
    )
    assert list(_lines(diagnosis.text())) == ["environment", "good       fine", "run", "problem    bad", "mend it"]
