"""Which evaluation of each chunk counts, and which devices are suspect. Pure: the same copies give the same verdict.

Copies of a chunk agree where their losses differ by no more than the tolerance, in nats per token. All agree: they
count once, and the one with the lowest digest does, whoever wrote it and whenever. They do not: one vote a device, and
the copies of two devices or more that outvote the rest are believed; without such a majority the chunk is a conflict
and does not count. Nothing is ever averaged. Copies that agree but differ in a bit although environment and batch shape
are the same say something about a device and nothing about the result: they are evidence for its row, no more.

Sentinels never count. An evaluation with a non-finite loss gives way to any finite one; two of them and no finite one
are final. A device that was outvoted twice is convicted: its evaluations neither count nor vote, so that what only it
evaluated is missing until it is evaluated again elsewhere.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from everplex.stages.copies import SENTINEL, WORK, Copies
from everplex.stages.tolerance import Tolerances, calibrate, deviating_sentinels

MISSING = -1
"""In `Verdict.winners`: no evaluation of this chunk counts."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to agree, to be checked, to be convicted."""

    tolerance: float = 1e-3
    """Nats per token, where no sentinels tell what is usual."""
    floor: float = 1e-4
    ceiling: float = 2e-3
    """Bounds of what sentinels may calibrate, in nats per token; other dtypes than float32 have ten times the floor."""
    on_outlier: Literal["recompute", "flag"] = "recompute"
    audit_fraction: float = 0.01
    audits_after_mismatch: int = 8
    mismatches_to_convict: int = 2


@dataclass(frozen=True, eq=False)
class Verdict:
    """What counts. Chunks are rows of the plan, copies are rows of `Copies.table`."""

    winners: NDArray[np.int64]
    """Per chunk the copy that counts, or MISSING."""
    winners_before: NDArray[np.int64]
    """The same, but what a convicted device evaluated counts as it gave it."""
    duplicates: int
    """Copies of counted chunks beyond the first."""
    conflicts: dict[int, frozenset[str]]
    """Chunks whose copies disagree without a majority, and the devices that evaluated them."""
    nonfinite: frozenset[int]
    """Chunks that two evaluations or more gave a non-finite loss, and none a finite one."""
    nonfinite_once: dict[int, str]
    """Chunks whose one evaluation was not finite, and its device."""
    mismatches: dict[str, list[int]] = field(default_factory=dict)
    """Per device the chunks (sentinels among them) in which it was outvoted."""
    convicted: frozenset[str] = frozenset()
    bit_differences: dict[str, int] = field(default_factory=dict)
    """Per device the chunks in which it agrees, but not to the bit, with an equal environment and batch shape."""
    audited: dict[str, int] = field(default_factory=dict)
    """Per device its chunks that another device evaluated too."""
    tolerances: Tolerances = field(default_factory=lambda: Tolerances(0.0, {}, {}))

    @property
    def accepted(self) -> int:
        """Number of chunks that count."""
        return int(np.count_nonzero(self.winners != MISSING))

    @property
    def missing(self) -> list[int]:
        """Chunks that nothing is known of, or only what does not count; conflicts and non-finite ones are not."""
        rows = np.flatnonzero(self.winners == MISSING).tolist()
        return [row for row in rows if row not in self.conflicts and row not in self.nonfinite]


@dataclass
class _Round:
    """One pass over all chunks with a given set of convicted devices."""

    winners: NDArray[np.int64]
    conflicts: dict[int, frozenset[str]] = field(default_factory=dict)
    nonfinite: set[int] = field(default_factory=set)
    nonfinite_once: dict[int, str] = field(default_factory=dict)
    mismatches: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    bit_differences: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    duplicates: int = 0


def judge(num_chunks: int, copies: Copies, policy: Policy | None = None) -> Verdict:
    """Say which copy of each chunk counts, what is missing or in conflict, and which devices are convicted."""
    policy = policy or Policy()
    tolerances = calibrate(copies, policy.tolerance, policy.floor, policy.ceiling)
    order = _distinct_evaluations(copies)
    bench = _Bench(copies, order, tolerances)
    first = current = bench.decide(num_chunks, frozenset())
    outvoted: dict[str, set[int]] = defaultdict(set)
    for device, chunks in deviating_sentinels(copies, tolerances).items():
        outvoted[device] |= chunks
    convicted: frozenset[str] = frozenset()
    while True:
        for device, chunks in current.mismatches.items():
            outvoted[device] |= chunks
        guilty = {device for device, chunks in outvoted.items() if len(chunks) >= policy.mismatches_to_convict}
        if guilty <= convicted:
            break
        convicted |= guilty
        if policy.on_outlier == "recompute":
            current = bench.decide(num_chunks, convicted)
    return Verdict(
        winners=current.winners,
        winners_before=bench.before(current.winners, convicted),
        duplicates=current.duplicates,
        conflicts=current.conflicts,
        nonfinite=frozenset(current.nonfinite),
        nonfinite_once=current.nonfinite_once,
        mismatches={device: sorted(chunks) for device, chunks in sorted(outvoted.items())},
        convicted=convicted,
        bit_differences={device: len(chunks) for device, chunks in sorted(first.bit_differences.items())},
        audited=bench.audited(),
        tolerances=tolerances,
    )


def _distinct_evaluations(copies: Copies) -> NDArray[np.int64]:
    """Rows by chunk, lowest digest first, with ties broken by worker: the same evaluation, read twice, is one."""
    table = copies.table
    rows = np.flatnonzero(table["kind"] != SENTINEL)
    workers, keys = copies.ranks("worker")[rows], copies.ranks("key")[rows]
    columns = [
        keys, table["seconds"][rows], table["kind"][rows], workers, table["digest_low"][rows],
        table["digest_high"][rows], table["chunk"][rows],
    ]  # fmt: skip
    order = np.lexsort(columns)
    if not len(order):
        return rows
    changes = np.zeros(len(order), np.bool_)
    changes[0] = True
    for column in columns[1:]:
        changes[1:] |= column[order][1:] != column[order][:-1]
    return rows[order[changes]]


class _Bench:
    """Decides chunk by chunk; only chunks whose copies differ cost more than array operations."""

    def __init__(self, copies: Copies, order: NDArray[np.int64], tolerances: Tolerances) -> None:
        self._copies = copies
        self._table = copies.table
        self._order = order
        self._tolerances = tolerances
        self._devices = [source.device for source in copies.sources]

    def decide(self, num_chunks: int, convicted: frozenset[str]) -> _Round:
        """Judge every chunk by the copies of devices that are not convicted."""
        order = self._order
        if convicted:
            guilty = self._copies.of_sources([device in convicted for device in self._devices]).astype(np.bool_)
            order = order[~guilty[order]]
        result = _Round(np.full(num_chunks, MISSING, np.int64))
        if not len(order):
            return result
        chunks = self._table["chunk"][order]
        starts = np.flatnonzero(np.diff(chunks, prepend=-1))
        counts = np.diff(np.append(starts, len(order)))
        alike = np.logical_and.reduceat(self._table["finite"][order], starts)
        for column in ("digest_high", "digest_low"):
            digests = self._table[column][order]
            alike &= np.minimum.reduceat(digests, starts) == np.maximum.reduceat(digests, starts)
        result.winners[chunks[starts[alike]]] = order[starts[alike]]
        result.duplicates = int((counts[alike] - 1).sum())
        for start, count in zip(starts[~alike].tolist(), counts[~alike].tolist(), strict=True):
            self._settle(order[start : start + count].tolist(), result)
        return result

    def before(self, winners: NDArray[np.int64], convicted: frozenset[str]) -> NDArray[np.int64]:
        """Return the winners with the convicted devices' own evaluations in their places."""
        guilty = self._copies.of_sources([device in convicted for device in self._devices]).astype(np.bool_)
        theirs = self._order[::-1][(guilty & self._table["finite"] & (self._table["kind"] == WORK))[self._order[::-1]]]
        before = winners.copy()
        before[self._table["chunk"][theirs]] = theirs  # in reverse order, so that the lowest digest stays
        return before

    def audited(self) -> dict[str, int]:
        """Count per device its chunks that another device evaluated too."""
        names = sorted(set(self._devices))
        pairs = np.unique(
            self._table["chunk"][self._order].astype(np.int64) * len(names) + self._copies.ranks("device")[self._order]
        )
        chunks, devices = np.divmod(pairs, max(1, len(names)))
        _, index, num_devices = np.unique(chunks, return_inverse=True, return_counts=True)
        counts = np.bincount(devices[num_devices[index] > 1], minlength=len(names))
        return {name: count for name, count in zip(names, counts.tolist(), strict=True) if count}

    def _device(self, copy: int) -> str:
        return self._devices[int(self._table["source"][copy])]

    def _settle(self, copies: list[int], result: _Round) -> None:
        """Decide one chunk; `copies` come with the lowest digest first."""
        chunk = int(self._table["chunk"][copies[0]])
        devices = {copy: self._device(copy) for copy in copies}
        finite = [copy for copy in copies if self._table["finite"][copy]]
        if not finite:
            if len(copies) > 1:
                result.nonfinite.add(chunk)
            else:
                result.nonfinite_once[chunk] = devices[copies[0]]
            return
        believed = self._majority(finite, devices)
        if not believed:
            result.conflicts[chunk] = frozenset(devices.values())
            return
        result.winners[chunk] = believed[0]
        result.duplicates += len(believed) - 1
        self._note_differences(chunk, believed, devices, result)
        witnesses = {devices[copy] for copy in believed}
        for copy in copies:
            if copy not in believed and (len(witnesses) > 1 or (copy not in finite and devices[copy] not in witnesses)):
                result.mismatches[devices[copy]].add(chunk)

    def _majority(self, finite: list[int], devices: Mapping[int, str]) -> list[int]:
        """Return the copies that agree and outvote the others; empty where there are none."""
        alone = len(set(devices.values())) == 1  # a device alone votes with every evaluation
        best: list[int] = []
        for copy in finite:
            friends = [other for other in finite if self._agree(copy, other)]
            best = max(best, friends, key=lambda group: len(group) if alone else len({devices[one] for one in group}))
        if len(best) == len(finite):
            return best
        if alone:
            return best if 2 * len(best) > len(finite) else []
        voters = {devices[copy] for copy in best}
        others = {devices[copy] for copy in finite if copy not in best} - voters
        return best if len(voters) > max(1, len(others)) else []

    def _agree(self, one: int, other: int) -> bool:
        table, sources = self._table, self._copies.sources
        tolerance = self._tolerances.between(
            sources[int(table["source"][one])].environment, sources[int(table["source"][other])].environment
        )
        return bool(abs(table["nll"][one] - table["nll"][other]) <= tolerance * table["tokens"][one])

    def _note_differences(self, chunk: int, believed: list[int], devices: Mapping[int, str], result: _Round) -> None:
        """Blame both sides where copies of one environment and batch shape differ in a bit."""
        seen: dict[object, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for copy in believed:
            environment = self._copies.sources[int(self._table["source"][copy])].environment
            conditions = environment, int(self._table["batch_shape"][copy])
            seen[conditions][int(self._table["token_digest"][copy])].add(devices[copy])
        for digests in seen.values():
            if len(digests) > 1:
                for device in set().union(*digests.values()):
                    result.bit_differences[device].add(chunk)
