"""Which copy counts: agreement, conflict, majority, non-finite losses, conviction; whatever the order."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.segments import DictStore, Fabric, worker_id

from everplex.stages.judge import MISSING, Policy, Verdict, judge
from everplex.stages.ledger import Ledger
from everplex.stages.records import Record

FABRIC = Fabric({"a": [64] * 12})
CHUNKS = len(FABRIC.plan.chunks)

Copy = tuple[int, Record]
"""A device and what it gave."""


def _copy(device: int, row: int = 0, **changes: Any) -> Copy:
    return device, FABRIC.record(row, **changes)


def _judge(copies: Sequence[Copy], policy: Policy | None = None) -> tuple[Verdict, dict[int, tuple[str, float]]]:
    """Return the verdict, and per chunk that counts the device and the loss."""
    store = DictStore()
    for seq, (device, record) in enumerate(copies, 1):
        FABRIC.put(store, worker_id(device), seq, [record], device=f"host-{device}/gpu")
    ledger = Ledger(store, FABRIC.plan, FABRIC.run_id)
    ledger.refresh()
    assert ledger.set_aside == {}
    verdict = judge(CHUNKS, ledger.copies, policy)
    counted = {}
    for chunk, copy in enumerate(verdict.winners.tolist()):
        if copy != MISSING:
            row = ledger.copies.table[copy]
            counted[chunk] = ledger.copies.sources[int(row["source"])].device, float(row["nll"])
    return verdict, counted


def test_nothing_recorded_is_missing() -> None:
    """Without a copy every chunk is missing, and there is nobody to suspect."""
    verdict, counted = _judge([])
    assert counted == {}
    assert verdict.missing == list(range(CHUNKS))
    assert verdict.convicted == frozenset()


def test_copies_that_agree_count_once() -> None:
    """Three equal copies count once, and two are duplicates."""
    verdict, counted = _judge([_copy(device) for device in range(3)])
    assert list(counted) == [0]
    assert (verdict.accepted, verdict.duplicates, verdict.conflicts) == (1, 2, {})


def test_the_lowest_digest_counts_whatever_the_order() -> None:
    """Copies that differ by rounding give the same winner in every order of arrival."""
    copies = [_copy(device, bias=1e-5 * device) for device in range(4)]
    expected = min(copies, key=lambda copy: copy[1].digest())[1].nll
    rng = random.Random(1)
    for _ in range(8):
        verdict, counted = _judge(rng.sample(copies, len(copies)))
        assert counted[0][1] == expected
        assert verdict.duplicates == 3


def test_the_same_record_read_twice_is_one() -> None:
    """One evaluation that lies in two segments of its worker is no duplicate."""
    verdict, _ = _judge([_copy(0), _copy(0)])
    assert (verdict.accepted, verdict.duplicates) == (1, 0)


def test_a_copy_that_disagrees_is_a_conflict_and_never_averaged() -> None:
    """Two devices that disagree leave the chunk uncounted until a third decides."""
    verdict, counted = _judge([_copy(0), _copy(1, bias=0.5)])
    assert counted == {}
    assert verdict.conflicts == {0: frozenset({"host-0/gpu", "host-1/gpu"})}
    assert 0 not in verdict.missing


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_third_evaluation_decides(order: list[int]) -> None:
    """Two of three are believed, and the third device is noted."""
    copies = [_copy(0), _copy(1, bias=0.5), _copy(2)]
    verdict, counted = _judge([copies[index] for index in order])
    assert counted[0][1] == FABRIC.record(0).nll
    assert verdict.mismatches == {"host-1/gpu": [0]}
    assert verdict.convicted == frozenset()


def test_a_device_has_one_vote() -> None:
    """A device that repeats itself does not outvote another one."""
    verdict, counted = _judge([_copy(0), _copy(1, bias=0.5), _copy(1, bias=0.5, seconds=0.7)])
    assert counted == {}
    assert list(verdict.conflicts) == [0]


def test_a_device_alone_is_believed_where_it_repeats_itself() -> None:
    """With one device the majority of its own evaluations decides."""
    copies = [_copy(0), _copy(0, bias=0.5), _copy(0, seconds=0.7)]
    assert _judge(copies[:2])[1] == {}
    assert _judge(copies)[1][0][1] == FABRIC.record(0).nll


def test_three_opinions_are_a_conflict() -> None:
    """Without a majority nothing is believed."""
    verdict, counted = _judge([_copy(0), _copy(1, bias=0.5), _copy(2, bias=1.0)])
    assert counted == {}
    assert len(verdict.conflicts[0]) == 3
    assert verdict.mismatches == {}


def test_a_finite_copy_replaces_a_non_finite_one() -> None:
    """NaN once waits for another evaluation, NaN twice is final, a finite one cures both."""
    once, _ = _judge([_copy(0, nonfinite=True)])
    assert once.nonfinite_once == {0: "host-0/gpu"}
    assert once.nonfinite == frozenset()
    twice, _ = _judge([_copy(0, nonfinite=True), _copy(1, nonfinite=True)])
    assert twice.nonfinite == {0}
    assert 0 not in twice.missing
    cured, counted = _judge([_copy(0, nonfinite=True), _copy(1)])
    assert list(counted) == [0]
    assert (cured.nonfinite, cured.nonfinite_once) == (frozenset(), {})


def test_sentinels_never_count() -> None:
    """A sentinel is evidence about a device and no result."""
    verdict, counted = _judge([_copy(0, kind="sentinel")])
    assert counted == {}
    assert 0 in verdict.missing


def test_audits_count_as_copies() -> None:
    """An audit is an evaluation like any other."""
    verdict, counted = _judge([_copy(0), _copy(1, kind="audit")])
    assert list(counted) == [0]
    assert verdict.audited == {"host-0/gpu": 1, "host-1/gpu": 1}


def test_a_bit_in_an_equal_environment_is_evidence_and_no_conflict() -> None:
    """Copies within the tolerance count; that they differ at all is told of both devices."""
    verdict, counted = _judge([_copy(0), _copy(1, bias=1e-5)])
    assert list(counted) == [0]
    assert verdict.bit_differences == {"host-0/gpu": 1, "host-1/gpu": 1}


def _fleet(bad: int, **fault: Any) -> list[Copy]:
    """Four devices with three chunks each, and two audited chunks of the bad one, each by two others."""
    work = [_copy(row % 4, row, **(fault if row % 4 == bad else {})) for row in range(CHUNKS)]
    mine = [row for row in range(CHUNKS) if row % 4 == bad][:2]
    audits = [_copy((bad + step) % 4, row, kind="audit") for row in mine for step in (1, 2)]
    return work + audits


def test_two_confirmed_mismatches_convict_a_device() -> None:
    """What only the convicted device evaluated is set aside; what others evaluated too is theirs."""
    verdict, counted = _judge(_fleet(1, bias=0.01))
    assert verdict.convicted == {"host-1/gpu"}
    assert verdict.missing == [9]
    assert all(device != "host-1/gpu" for device, _ in counted.values())
    assert verdict.winners_before[9] != MISSING


def test_an_outlier_may_be_flagged_and_kept() -> None:
    """With `flag` the device is convicted and its evaluations still count where nothing contradicts them."""
    verdict, counted = _judge(_fleet(1, bias=0.01), Policy(on_outlier="flag"))
    assert verdict.convicted == {"host-1/gpu"}
    assert counted[9][0] == "host-1/gpu"


def test_an_honest_fleet_is_not_convicted() -> None:
    """Devices that differ by rounding are neither in conflict nor outvoted."""
    verdict, counted = _judge(_fleet(1, bias=2e-5))
    assert (verdict.convicted, verdict.mismatches, verdict.conflicts) == (frozenset(), {}, {})
    assert len(counted) == CHUNKS


def test_the_verdict_does_not_depend_on_the_order() -> None:
    """Shuffled copies give the same counted losses and the same convictions."""
    copies = [*_fleet(2, bias=0.02), _copy(3, 5, nonfinite=True), _copy(0, 7, bias=1e-6)]
    first = _judge(copies)
    rng = random.Random(2)
    for _ in range(6):
        verdict, counted = _judge(rng.sample(copies, len(copies)))
        assert counted == first[1]
        assert verdict.convicted == first[0].convicted
        assert verdict.mismatches == first[0].mismatches
