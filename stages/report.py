"""A summary in words and columns; the protocol's label stands beside every table of numbers."""

from collections.abc import Iterable, Sequence

from everplex.stages.derive import perplexity, published_perplexity
from everplex.stages.records import Plan
from everplex.stages.summary import DeviceRow, Numbers, PositionRow, Summary, WorkerRow

NUMBER_COLUMNS = ("perplexity", "95 % interval", "bits/byte", "word ppl", "nats/token", "tokens", "documents")
NAME_WIDTH = 60
"""Widest name in a table, in characters."""


def text_report(summary: Summary) -> str:
    """Return the report as plain text, ending in a line break."""
    blocks = [
        [headline(summary), f"protocol: {summary.protocol.label}", f"model: {summary.model.name} ({summary.dtype})"],
        table(("", *NUMBER_COLUMNS), number_rows(summary)),
        _published(summary),
        _macro(summary),
        _where_the_loss_is(summary),
        coverage_lines(summary),
        _workers(summary),
        _profile(summary),
        device_lines(summary),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def number_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return a row of cells for the whole and one per group, groups with `/` in their names as a tree."""
    rows = [("all", *number_cells(summary))]
    above: list[str] = []
    for name in sorted(summary.groups, key=lambda name: name.split("/")):
        path = name.split("/")
        for depth, part in enumerate(path[:-1]):
            if above[: depth + 1] != path[: depth + 1]:
                rows.append(("  " * (depth + 1) + shown_name(part) + "/", *[""] * len(NUMBER_COLUMNS)))
        above = path
        rows.append(("  " * len(path) + shown_name(path[-1]), *number_cells(summary.groups[name])))
    return rows


def number_cells(numbers: Numbers) -> tuple[str, ...]:
    """Return the cells of NUMBER_COLUMNS; a dash where there is no such number."""
    interval = "-"
    if numbers.perplexity_low is not None and numbers.perplexity_high is not None:
        interval = f"{numbers.perplexity_low:.4f} - {numbers.perplexity_high:.4f}"
    return (
        _number(numbers.perplexity),
        interval,
        _number(numbers.bits_per_byte),
        _number(numbers.word_perplexity),
        _number(numbers.nll / numbers.tokens if numbers.tokens else None),
        f"{numbers.tokens:,}",
        f"{numbers.documents:,}",
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines with the first column to the left and the others to the right."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def shown_name(name: str) -> str:
    """Return a name that keeps to its cell: without what a terminal would obey, nor the middle of a long one."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)
    return shown if len(shown) <= NAME_WIDTH else f"{shown[: NAME_WIDTH // 2]}…{shown[1 - NAME_WIDTH // 2 :]}"


def headline(summary: Summary) -> str:
    """Return the result in one sentence, which says so where it is a partial one."""
    value = _number(summary.perplexity)
    if summary.complete:
        return f"perplexity {value} over {summary.tokens:,} tokens of {summary.documents:,} documents"
    coverage = summary.coverage
    return (
        f"PARTIAL: perplexity {value} over {summary.tokens:,} tokens so far, "
        f"{coverage.accepted:,} of {coverage.chunks:,} chunks; the interval does not cover what is missing, "
        "and numbers per byte and word are those of fully covered documents"
    )


def _published(summary: Summary) -> list[str]:
    found = {name: published_perplexity(numbers) for name, numbers in [("all", summary), *summary.groups.items()]}
    rows = [(shown_name(name), f"{value:.4f}") for name, value in found.items() if value is not None]
    return table(("by published weights", "perplexity"), rows) if rows else []


def _where_the_loss_is(summary: Summary) -> list[str]:
    """Return losses by position in the window and by length of document, in powers of two, side by side."""
    columns = [{(row.start, row.end): row for row in rows} for rows in (summary.positions, summary.document_lengths)]
    spans = sorted({span for column in columns for span in column})
    cells = [(_span(*span), *(cell for column in columns for cell in _loss(column.get(span)))) for span in spans]
    head = ("tokens", "nats/token at this position", "tokens there", "in documents so long", "tokens in them")
    return table(head, cells) if cells else []


def _span(start: int, end: int) -> str:
    return f"{start:,}" if start == end else f"{start:,} - {end:,}"


def _loss(row: PositionRow | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (_number(row.nll / row.tokens if row.tokens else None), f"{row.tokens:,}")


def _macro(summary: Summary) -> list[str]:
    if len(summary.groups) < 2 or summary.macro is None:
        return []
    return [f"mean over groups (macro): {summary.macro:.4f}"]


def coverage_lines(summary: Summary) -> list[str]:
    """Return which chunks count, what was set aside and why, and which path summed."""
    coverage = summary.coverage
    counts = [
        (coverage.missing, "missing"),
        (coverage.duplicates, "evaluated more than once in agreement"),
        (coverage.conflicts, "in conflict"),
        (coverage.nonfinite, "with a non-finite loss"),
        (coverage.corrupt, "objects set aside"),
    ]
    found = ", ".join(f"{number:,} {what}" for number, what in counts if number)
    lines = [f"chunks: {coverage.accepted:,} of {coverage.chunks:,} count" + (f"; {found}" if found else "")]
    return [*lines, *(f"  {sentence}" for sentence in coverage.set_aside), f"summed by: {summary.reduced_by}"]


WORKER_COLUMNS = ("worker", "device", "rank", "perplexity", "nats", "tokens", "chunks", "tokens/s", "left out")
WHY_NOT_LEFT_OUT = (
    "left out: how the perplexity would move without that worker. Workers have other documents, so a high one is no\n"
    "fault and leaving it out would bias the result; devices are judged by evaluating the same chunk twice."
)


def worker_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return a row of cells per worker, for WORKER_COLUMNS."""
    return [
        (
            worker.worker[:8], _device(worker), "-" if worker.rank is None else str(worker.rank),
            _number(worker.perplexity), f"{worker.nll:.2f}", f"{worker.tokens:,}", f"{worker.chunks:,}",
            "-" if worker.tokens_per_second is None else f"{worker.tokens_per_second:,.0f}",
            _left_out(summary, worker),
        )
        for worker in summary.workers
    ]  # fmt: skip


def _device(worker: WorkerRow) -> str:
    return worker.device if worker.reused_from is None else f"{worker.device} in run {worker.reused_from[:8]}"


def _left_out(summary: Summary, worker: WorkerRow) -> str:
    rest = perplexity(summary.nll - worker.nll, summary.tokens - worker.tokens)
    if rest is None or summary.perplexity is None or not worker.tokens:
        return "-"
    return f"{rest - summary.perplexity:+.4f}"


def _workers(summary: Summary) -> list[str]:
    if not summary.workers:
        return []
    return [*table(WORKER_COLUMNS, worker_rows(summary)), *WHY_NOT_LEFT_OUT.split("\n")]


BESIDE = ("read", "decode", "batching")
"""Steps that run beside the others, in the loading thread."""
MODEL = ("forward", "projection")


def _profile(summary: Summary) -> list[str]:
    """Return where each worker's time went, in percent, and which share of it the bare model takes."""
    profiled = [worker for worker in summary.workers if worker.profile]
    if not profiled:
        return []
    steps = sorted({step for worker in profiled for step in worker.profile} - set(BESIDE))
    rows = []
    for worker in profiled:
        total = sum(worker.profile.get(step, 0.0) for step in steps) or 1.0
        parts = [f"{100 * worker.profile.get(step, 0.0) / total:.1f} %" for step in steps]
        model = sum(worker.profile.get(step, 0.0) for step in MODEL) / total
        beside = [f"{worker.profile.get(step, 0.0):.2f} s" for step in BESIDE]
        rows.append((worker.worker[:8], f"{total:.1f} s", f"{100 * model:.1f} %", *parts, *beside))
    head = ("time of worker", "in all", "bare model", *steps, *(f"({step})" for step in BESIDE))
    return table(head, rows)


def device_lines(summary: Summary) -> list[str]:
    """Return a sentence per device, on what convicting changed, and on how far environments are apart."""
    lines = [f"device {device.device}: {'; '.join([_verdict(device), *device.evidence])}" for device in summary.devices]
    if summary.perplexity_before is not None:
        lines.append(
            f"perplexity {_number(summary.perplexity_before)} with the evaluations of convicted devices, "
            f"{_number(summary.perplexity)} without"
        )
    for row in summary.agreement:
        names = " and ".join(row.environments) if len(row.environments) > 1 else f"devices of {row.environments[0]}"
        lines.append(f"{names}: {row.spread:.2g} nats per token apart, up to {row.tolerance:.2g} counts as agreement")
    return lines


def _verdict(device: DeviceRow) -> str:
    health = "health not checked" if device.health == "not checked" else device.health
    return f"{health}, slow among its kind" if device.speed == "slow" else health


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def plan_facts(plan: Plan) -> dict[str, int | str]:
    """Return the size of a plan and what it is of."""
    chunks = plan.chunks
    return {
        "plan": plan.digest(),
        "protocol": plan.protocol.name,
        "context": plan.protocol.context,
        "groups": len(plan.groups),
        "documents": sum(group.documents for group in plan.groups),
        "chunks": len(chunks),
        "windows": sum(chunks.windows),
        "input_tokens": sum(chunks.input_tokens),
        "tokens": sum(chunks.tokens),
    }


def plan_report(plan: Plan, out: str) -> str:
    """Return a plan's size as plain text, ending in a line break."""
    facts = plan_facts(plan)
    return (
        f"protocol: {plan.protocol.label}\n"
        f"{facts['documents']:,} documents in {facts['groups']:,} groups, {facts['tokens']:,} scored tokens, "
        f"{facts['windows']:,} windows in {facts['chunks']:,} chunks\n"
        f"plan: {out}/plan\n"
    )
