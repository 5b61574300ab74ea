"""The merge by all ranks together: each reads a share of the segments, and exact sums meet in a CPU process group.

All that decides is the offline merge's: the same ledger, judge, totals and `derive`, so every number is the same.
Chunks that were evaluated once need no judge; the rows of all others are gathered, and every rank judges them alike.
Whatever fails, every rank leaves in time with CollectiveFailed, and the offline merge gives the same numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.copies import COPY, SENTINEL, Copies, Source
from everplex.stages.coverage import whole_counts
from everplex.stages.exact import NUM_LIMBS, Tally, from_limbs, to_limbs
from everplex.stages.gathering import CollectiveFailed, Gathering, Meeting, gather
from everplex.stages.health import examine
from everplex.stages.judge import MISSING, Policy, Verdict, judge
from everplex.stages.layout import SEGMENTS_PREFIX, parse_segment_key
from everplex.stages.ledger import Ledger
from everplex.stages.records import SCHEMA, SEMANTICS, Plan, Run
from everplex.stages.summarise import summarise, tell_coverage, worker_facts
from everplex.stages.summary import Summary
from everplex.stages.totals import Parts, Scope, Totals, concatenate
from everplex.storage.store import Store

__all__ = ["CollectiveFailed", "Meeting", "collective_reduce", "share"]


class _Share(NamedTuple):
    """What one rank read."""

    copies: Copies
    sources: list[Source]
    """Of all ranks."""
    first: int
    """Where the rank's own sources stand among them."""


class _Judged(NamedTuple):
    """The verdict on all chunks, and which of this rank's copies count.

    Copies that needed no judge have no row in the verdict; they are told as the number of rows that were gathered.
    """

    verdict: Verdict
    winners: NDArray[np.int64]
    gathered: Copies


def collective_reduce(plan: Plan, run: Run, store: Store, meeting: Meeting, *, policy: Policy | None = None) -> Summary:
    """Merge a complete run with all ranks of the meeting; every rank returns the same summary.

    Raises CollectiveFailed, on every rank that is still there, for anything that goes wrong.
    """
    policy = policy or Policy()
    schema = repr((SCHEMA, SEMANTICS, COPY.descr, NUM_LIMBS, Summary.__struct_fields__))
    with gather(meeting, [schema, run.id(), plan.digest(), repr(policy)]) as group:
        return _merge(plan, run, store, group, policy)


def _merge(plan: Plan, run: Run, store: Store, group: Gathering, policy: Policy) -> Summary:
    listed = b""
    with group.together("listing segments"):
        if group.rank == 0:
            listed = "\n".join(sorted(entry.key for entry in store.list(SEGMENTS_PREFIX))).encode()
    keys = group.gather_bytes(listed)[0].decode().splitlines()
    ledger = Ledger(store, plan, run.id())
    with group.together("reading segments"):
        ledger.read_keys(share(keys, group.rank, group.world_size))
    mine = (ledger.copies.sources, ledger.set_aside, [source.key for source in ledger.copies.current])
    facts = group.gather_json(mine, tuple[list[Source], dict[str, str], list[str]])
    sources = [source for of_rank, _, _ in facts for source in of_rank]
    first = sum(len(of_rank) for of_rank, _, _ in facts[: group.rank])
    verdict, winners, judged = _judge_together(_Share(ledger.copies, sources, first), len(plan.chunks), group, policy)
    coverage = tell_coverage(verdict, {key: text for _, aside, _ in facts for key, text in aside.items()})
    if coverage.accepted < coverage.chunks:
        raise CollectiveFailed(f"{coverage.chunks - coverage.accepted} of {coverage.chunks} chunks do not count")
    totals = Totals(plan)
    counted: list[str] = []
    with group.together("adding up"):
        counted = totals.add_copies(ledger, winners)
    edges = concatenate([_unpack(part) for part in group.gather_bytes(_pack(totals.flush()))])
    totals.tallies = _add_tallies(totals.tallies, group)
    all_counted = {key for of_rank in group.gather_json(counted, list[str]) for key in of_rank}
    return summarise(
        plan,
        run,
        totals.finish(edges),
        whole_counts(plan),
        coverage=coverage,
        workers=worker_facts(sources),
        health=examine(verdict, judged),
        segments={key for _, _, current in facts for key in current} if verdict.mismatches else all_counted,
        reduced_by="collective",
    )


def share(keys: Sequence[str], rank: int, world_size: int) -> list[str]:
    """Return the rank's share of the sorted segment keys: every `world_size`-th, a roll-up with what it covers."""
    units: dict[tuple[str, int, int], list[str]] = {}
    names = [(name, key) for key in keys if (name := parse_segment_key(key)) is not None]
    strays = [key for key in keys if parse_segment_key(key) is None]
    reach: dict[str, tuple[int, int]] = {}
    for name, key in sorted(names, key=lambda item: (item[0].worker, item[0].first, -item[0].seq, item[1])):
        first, last = reach.get(name.worker, (0, -1))
        if name.seq > last:
            reach[name.worker] = first, last = name.first, name.seq
        units.setdefault((name.worker, first, last), []).append(key)
    lots = [*units.values(), *([key] for key in strays)]
    return [key for lot in lots[rank::world_size] for key in lot]


def _judge_together(share: _Share, num_chunks: int, group: Gathering, policy: Policy) -> _Judged:
    """Judge the chunks that have other than one finite copy, and the sentinels, from the rows of all ranks."""
    copies, sources, first = share
    table = copies.table
    works = table["kind"] != SENTINEL
    num_copies = group.add(np.bincount(table["chunk"][works], minlength=num_chunks))
    num_lost = group.add(np.bincount(table["chunk"][works & ~table["finite"]], minlength=num_chunks))
    lone_chunks = (num_copies == 1) & (num_lost == 0)
    lone = works & lone_chunks[table["chunk"]]
    contested = np.flatnonzero(~lone)
    rows = table[contested].copy()
    rows["source"] += first
    lots = [np.frombuffer(data, COPY) for data in group.gather_bytes(rows.tobytes())]
    start = sum(len(lot) for lot in lots[: group.rank])
    gathered = Copies(np.concatenate(lots), sources)
    verdict = judge(num_chunks, gathered, policy)
    if policy.on_outlier == "recompute":
        lone &= ~copies.of_sources([source.device in verdict.convicted for source in copies.sources]).astype(np.bool_)
    counted = np.zeros(num_chunks, np.int64)
    counted[table["chunk"][lone]] = 1
    counted = group.add(counted)
    judged = verdict.winners[verdict.winners != MISSING] - start
    judged = judged[(judged >= 0) & (judged < len(rows))]
    winners = np.concatenate([np.flatnonzero(lone), contested[judged]])
    unjudged = len(gathered.table)
    verdict = dataclasses.replace(
        verdict,
        winners=np.where(counted > 0, unjudged, verdict.winners),
        winners_before=np.where(lone_chunks, unjudged, verdict.winners_before),
    )
    return _Judged(verdict, winners, gathered)


def _add_tallies(tallies: dict[Scope, Tally], group: Gathering) -> dict[Scope, Tally]:
    """Add up the tallies of all ranks, as limbs in the order of all names."""
    mine = {(*scope, "sum", name): units for scope, tally in tallies.items() for name, units in tally.sums.items()}
    mine |= {(*scope, "count", name): n for scope, tally in tallies.items() for name, n in tally.counts.items()}
    kind = list[tuple[str, int | str, str, str]]
    names = sorted({name for of_rank in group.gather_json(list(mine), kind) for name in of_rank}, key=repr)
    limbs_SL = to_limbs([mine.get(name, 0) for name in names])
    result: dict[Scope, Tally] = {scope: Tally() for scope in tallies}
    for (of, key, sort, name), number in zip(names, from_limbs(group.add(limbs_SL)), strict=True):
        tally = result.setdefault((of, key), Tally())
        if sort == "sum":
            tally.add_units(name, number)
        else:
            tally.count(name, number)
    return result


def _pack(parts: Parts) -> bytes:
    columns = [parts.group_D, parts.ordinal_D, parts.nll_D.view(np.int64), parts.tokens_D]
    return np.stack(columns).astype("<i8").tobytes()


def _unpack(data: bytes) -> Parts:
    group, ordinal, nll, tokens = np.frombuffer(data, "<i8").reshape(4, -1)
    return Parts(group, ordinal, nll.view(np.float64), tokens)
