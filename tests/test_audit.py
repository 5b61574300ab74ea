"""Which evaluations are asked for, by pure rules; and whether a faulty device in a made-up fleet is found."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.segments import ENVIRONMENT, DictStore, Fabric, worker_id

from everplex.stages.audit import Request, Requests, requests, sentinel_chunks
from everplex.stages.judge import Policy, Verdict, judge
from everplex.stages.ledger import Ledger
from everplex.stages.records import Environment, Record

FABRIC = Fabric({"a": [64] * 40, "b": [64] * 60})
CHUNKS = len(FABRIC.plan.chunks)
POLICY = Policy(audit_fraction=0.1)
SIMULATION: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "simulate_fleet.py"))

Copy = tuple[int, Record]


def _device(number: int) -> str:
    return f"host-{number // 2}/gpu-{number % 2}"


def _ask(copies: Sequence[Copy], environments: dict[int, Environment] | None = None) -> tuple[Requests, Verdict]:
    store = DictStore()
    for seq, (number, record) in enumerate(copies, 1):
        environment = (environments or {}).get(number, ENVIRONMENT)
        FABRIC.put(store, worker_id(number), seq, [record], device=_device(number), environment=environment)
    ledger = Ledger(store, FABRIC.plan, FABRIC.run_id)
    ledger.refresh()
    verdict = judge(CHUNKS, ledger.copies, POLICY)
    return requests(FABRIC.plan, ledger.copies, verdict, POLICY), verdict


def _covered(num_devices: int, **faults: dict[str, Any]) -> list[Copy]:
    return [
        (row % num_devices, FABRIC.record(row, **faults.get(f"device_{row % num_devices}", {})))
        for row in range(CHUNKS)
    ]


def test_audits_wait_for_coverage() -> None:
    """While a chunk was never evaluated nothing is audited."""
    asked, _ = _ask(_covered(4)[1:])
    assert (asked.wanted, asked.due) == ([], 0)


def test_a_share_of_the_chunks_is_audited_elsewhere() -> None:
    """A tenth is due, each on a device of another host than the one that did it."""
    asked, _ = _ask(_covered(4))
    assert (asked.due, asked.done, asked.impossible, len(asked.wanted)) == (10, 0, 0, 10)
    rows = {chunk: row for row, chunk in enumerate(FABRIC.chunk_ids)}
    for request in asked.wanted:
        host = rows[request.chunk] % 4 // 2
        assert request.kind == "audit"
        assert request.exclude == {f"host-{host}/gpu-0", f"host-{host}/gpu-1"}


def test_the_same_audits_are_due_while_they_are_done() -> None:
    """Doing audits makes them done and asks for no others; in the end nothing is wanted."""
    copies = _covered(4)
    first, _ = _ask(copies)
    rows = {chunk: row for row, chunk in enumerate(FABRIC.chunk_ids)}
    for number, request in enumerate(first.wanted):
        copies.append(((rows[request.chunk] + 2) % 4, FABRIC.record(rows[request.chunk], kind="audit")))
        asked, _ = _ask(copies)
        assert (asked.due, asked.done) == (10, number + 1)
        assert set(asked.wanted) == set(first.wanted[number + 1 :])


def test_the_largest_residuals_are_among_the_audits() -> None:
    """A chunk far off its group's median is audited."""
    copies = _covered(4)
    copies[17] = (17 % 4, FABRIC.record(17, bias=3.0))
    asked, _ = _ask(copies)
    assert FABRIC.chunk_ids[17] in {request.chunk for request in asked.wanted}


def test_one_device_cannot_be_audited() -> None:
    """With one device all audits are impossible, and none is asked for."""
    asked, _ = _ask(_covered(1))
    assert (asked.wanted, asked.due, asked.impossible) == ([], 10, 10)


def test_a_conflict_asks_for_a_device_that_has_not_voted() -> None:
    """The third evaluation is not for the two that disagree; where there are only two, any may try again."""
    three = [(0, FABRIC.record(0)), (1, FABRIC.record(0, bias=0.5)), (2, FABRIC.record(1))]
    asked, _ = _ask(three)
    assert asked.wanted == [Request(FABRIC.chunk_ids[0], "audit", frozenset({_device(0), _device(1)}))]
    asked, _ = _ask(three[:2])
    assert asked.wanted == [Request(FABRIC.chunk_ids[0], "audit", frozenset())]
    stubborn = [(number, FABRIC.record(0, bias=0.5 * number)) for number in range(5)]
    assert _ask(stubborn)[0].wanted == []


def test_a_lost_loss_asks_for_one_more_evaluation_elsewhere() -> None:
    """NaN once is evaluated again by another device; NaN twice is not."""
    asked, _ = _ask([(0, FABRIC.record(0, nonfinite=True)), (1, FABRIC.record(1))])
    assert asked.wanted == [Request(FABRIC.chunk_ids[0], "work", frozenset({_device(0)}))]
    twice, _ = _ask([(0, FABRIC.record(0, nonfinite=True)), (1, FABRIC.record(0, nonfinite=True))])
    assert twice.wanted == []


def test_what_a_convicted_device_did_is_asked_for_again() -> None:
    """After a conviction each chunk that only the device did is wanted from another one."""
    copies = _covered(5, device_1={"bias": 0.01})
    copies += [(number, FABRIC.record(row, kind="audit")) for row in (1, 6) for number in (2, 3)]
    asked, verdict = _ask(copies)
    assert verdict.convicted == {_device(1)}
    again = {request.chunk for request in asked.wanted if request.kind == "work"}
    assert again == {FABRIC.chunk_ids[row] for row in range(1, CHUNKS, 5) if row not in (1, 6)}
    assert all(_device(1) in request.exclude for request in asked.wanted)


def test_the_first_mismatch_asks_for_eight_more_audits_of_the_device() -> None:
    """One confirmed mismatch convicts nobody and has the device looked at."""
    copies = _covered(5)
    before = _ask(copies)[0].due
    copies[1] = (1, FABRIC.record(1, bias=0.5))
    copies += [(number, FABRIC.record(1, kind="audit")) for number in (2, 3)]
    asked, verdict = _ask(copies)
    assert verdict.convicted == frozenset()
    assert asked.due >= before + 8
    theirs = {FABRIC.chunk_ids[row] for row in range(1, CHUNKS, 5)}
    assert len([request for request in asked.wanted if request.chunk in theirs]) >= 8


def test_sentinels_alone_convict_a_device_that_is_wrong_everywhere() -> None:
    """A device that leaves its environment's majority in two sentinels is convicted before anything is audited."""
    sentinels = [FABRIC.chunk_ids.index(chunk) for chunk in sentinel_chunks(FABRIC.plan)]
    copies = [
        (number, FABRIC.record(row, kind="sentinel", bias=0.004 if number == 2 else 0.0))
        for row in sentinels
        for number in range(4)
    ]
    _, verdict = _ask(copies)
    assert verdict.convicted == {_device(2)}


def test_two_types_of_devices_that_differ_by_rounding_are_no_outliers() -> None:
    """A spread between environments is told, widens the tolerance, and convicts nobody."""
    other = msgspec.structs.replace(ENVIRONMENT, device_name="another type")
    sentinels = [FABRIC.chunk_ids.index(chunk) for chunk in sentinel_chunks(FABRIC.plan)]
    copies = [
        (number, FABRIC.record(row, kind="sentinel", bias=8e-4 * (number % 2)))
        for row in sentinels
        for number in range(6)
    ]
    copies += [(0, FABRIC.record(5)), (1, FABRIC.record(5, bias=8e-4))]
    _, verdict = _ask(copies, dict.fromkeys((1, 3, 5), other))
    assert (verdict.convicted, verdict.conflicts, verdict.accepted) == (frozenset(), {}, 1)
    assert verdict.tolerances.spread[frozenset((ENVIRONMENT, other))] == pytest.approx(8e-4, rel=0.01)


@pytest.mark.parametrize("fault", ["bias 0.005 nats/token", "wrong dtype (noise 0.01)", "5 % of chunks +-1.0"])
def test_a_faulty_device_is_found_and_its_work_done_again(fault: str) -> None:
    """In a fleet of 16 devices the bad one is convicted, no other is, and the sum is the healthy one."""
    fleet = SIMULATION["Fleet"](16, 100, 3, SIMULATION["FAULTS"][fault]())
    verdict = fleet.play(Policy(audit_fraction=0.02))
    assert verdict.convicted == {fleet.sources[fleet.bad].device}
    assert fleet.healthy_sum(verdict)


@pytest.mark.parametrize("num_types", [1, 2])
def test_healthy_fleets_lose_no_device(num_types: int) -> None:
    """Fleets without a fault, of one type of device or two, end complete and without a suspect."""
    for seed in range(5):
        verdict = SIMULATION["Fleet"](16, 100, seed, num_types=num_types).play(Policy(audit_fraction=0.02))
        assert (verdict.convicted, verdict.mismatches) == (frozenset(), {})
        assert verdict.accepted == 1600


def test_a_loss_that_is_never_finite_ends_the_search() -> None:
    """NaN once is cured; NaN always is final after two evaluations, and everything else counts."""
    once = SIMULATION["Fleet"](8, 50, 1, SIMULATION["FAULTS"]["NaN once"]())
    assert once.healthy_sum(once.play(Policy()))
    always = SIMULATION["Fleet"](8, 50, 1, None, 1, frozenset({7}))
    verdict = always.play(Policy())
    assert (verdict.nonfinite, verdict.accepted, verdict.convicted) == ({7}, 399, frozenset())
