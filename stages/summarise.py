"""From exact tallies and a verdict to the summary: what the offline merge and the collective have in common."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from everplex.stages.copies import Source
from everplex.stages.derive import derive, macro, perplexity, positions
from everplex.stages.exact import Tally
from everplex.stages.health import Health, with_speed
from everplex.stages.judge import Verdict
from everplex.stages.records import Counts, Plan, Run
from everplex.stages.summary import Coverage, Numbers, Summary, WorkerRow
from everplex.stages.totals import Scope


class WorkerFacts(NamedTuple):
    """What the headers of a worker's segments say about it."""

    worker: str
    device: str
    device_name: str
    rank: int | None
    last_seq: int
    store_requests: dict[str, int]
    profile: dict[str, float]
    reused_from: str | None


def worker_facts(sources: Iterable[Source]) -> list[WorkerFacts]:
    """Return the facts of each worker's newest segment, sorted by worker."""
    newest: dict[str, Source] = {}
    for source in sources:
        if source.worker not in newest or (newest[source.worker].seq, newest[source.worker].key) < (
            source.seq,
            source.key,
        ):
            newest[source.worker] = source
    return [
        WorkerFacts(
            worker=s.worker,
            device=s.device,
            device_name=s.environment.device_name,
            rank=s.rank,
            last_seq=s.seq,
            store_requests=s.store_requests,
            profile=s.profile,
            reused_from=s.reused_from,
        )
        for _, s in sorted(newest.items())
    ]


def tell_coverage(verdict: Verdict, set_aside: dict[str, str]) -> Coverage:
    """Count what the verdict says of the chunks."""
    return Coverage(
        chunks=len(verdict.winners),
        accepted=verdict.accepted,
        missing=len(verdict.missing),
        duplicates=verdict.duplicates,
        conflicts=len(verdict.conflicts),
        corrupt=len(set_aside),
        nonfinite=len(verdict.nonfinite),
        set_aside=[set_aside[key] for key in sorted(set_aside)],
    )


def summarise(
    plan: Plan,
    run: Run,
    tallies: Mapping[Scope, Tally],
    counts: Mapping[int, Counts],
    *,
    coverage: Coverage,
    workers: Iterable[WorkerFacts],
    health: Health,
    segments: Iterable[str],
    reduced_by: str,
) -> Summary:
    """Build the summary. `counts` are the sizes of the fully covered documents, per group of the plan."""
    groups = {
        group.name: derive(tallies[("group", index)], counts[index], plan.protocol)
        for index, group in enumerate(plan.groups)
    }
    total = sum((tallies[("group", index)] for index in range(len(plan.groups))), start=Tally())
    total_counts = sum(counts.values(), start=Counts())
    numbers = derive(total, total_counts, plan.protocol)
    rows = [_worker_row(facts, tallies.get(("worker", facts.worker), Tally())) for facts in workers]
    before = total + health.withdrawn
    return Summary(
        **{name: getattr(numbers, name) for name in Numbers.__struct_fields__},
        complete=coverage.accepted == coverage.chunks,
        run=run.id(),
        plan=plan.digest(),
        protocol=plan.protocol,
        model=run.model,
        dtype=run.dtype,
        groups=groups,
        macro=macro(groups.values()),
        positions=positions(total, "position"),
        document_lengths=positions(total, "length"),
        workers=rows,
        devices=with_speed(health.devices, rows),
        agreement=health.agreement,
        perplexity_before=perplexity(before.value("nll"), before.number("tokens")) if health.convicted else None,
        coverage=coverage,
        segments=sorted(segments),
        reduced_by=reduced_by,
    )


def _worker_row(facts: WorkerFacts, tally: Tally) -> WorkerRow:
    nll, tokens, seconds = tally.value("nll"), tally.number("tokens"), tally.value("seconds")
    return WorkerRow(
        worker=facts.worker,
        device=facts.device,
        device_name=facts.device_name,
        rank=facts.rank,
        chunks=tally.number("chunks"),
        tokens=tokens,
        nll=nll,
        perplexity=perplexity(nll, tokens),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        last_seq=facts.last_seq,
        store_requests=facts.store_requests,
        profile=facts.profile,
        reused_from=facts.reused_from,
    )
