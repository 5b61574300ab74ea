"""A status in words and columns."""

import time
from collections.abc import Mapping

from everplex.progress import format_seconds
from everplex.run_status import Status, WorkerStatus
from everplex.stages.report import shown_name, table

_SENTENCES_SHOWN = 10


def status_line(status: Status) -> str:
    """Return the one line that `--watch` prints where there is no terminal."""
    if status.state == "planning":
        return f"planning: {status.chunks:,} chunks so far"
    parts = [f"{status.state}: {status.done:,}/{status.chunks:,} chunks"]
    if status.perplexity is not None:
        parts.append(f"perplexity {status.perplexity:.4f} so far" if status.missing else f"{status.perplexity:.4f}")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.seconds_left:
        parts.append(f"{format_seconds(status.seconds_left)} left")
    return ", ".join(parts)


def status_report(status: Status, now: float | None = None) -> str:
    """Return the status as plain text, ending in a line break; `now` is the wall clock in seconds."""
    if status.state == "planning":
        return f"{status.out}: {status_line(status)}\n"
    blocks = [
        [f"{status.out}: {_headline(status)}", *_plan_lines(status)],
        _coverage(status),
        _groups(status),
        _workers(status.workers, time.time() if now is None else now),
        [f"device {device.device}: {device.health}" for device in status.devices],
        [f"store requests: {_counts(status.store_requests)}"] if status.store_requests else [],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _headline(status: Status) -> str:
    if status.state == "planned":
        return "planned, no result yet; start `everplex evaluate` or run the same `everplex run` command again"
    share = 100 * status.done_tokens / status.tokens if status.tokens else 100.0
    words = [f"{status.state}, {share:.1f} % of {status.tokens:,} tokens"]
    if status.perplexity is not None:
        words.append(f"perplexity {status.perplexity:.4f}" + ("" if status.state == "complete" else " so far"))
    if status.state == "complete":
        words.append("sealed" if status.sealed else "not sealed yet: `everplex reduce` does it")
    elif status.tokens_per_second is None:
        words.append("no worker is active: run the same command again to continue")
    else:
        words.append(f"{status.tokens_per_second:,.0f} tokens/s")
        words.append(
            "unknown time left" if status.seconds_left is None else format_seconds(status.seconds_left) + " left"
        )
    return ", ".join(words)


def _plan_lines(status: Status) -> list[str]:
    plan = status.plan
    sizes = (
        f"plan: {plan['documents']:,} documents in {plan['groups']:,} groups, {plan['tokens']:,} scored tokens, "
        f"{plan['windows']:,} windows of {plan['protocol']} with a context of {plan['context']}"
    )
    return [sizes] if status.model is None else [sizes, f"model: {status.model.name} ({status.dtype})"]


def _coverage(status: Status) -> list[str]:
    counts = [
        (status.missing, "missing"),
        (status.duplicates, "evaluated more than once in agreement"),
        (status.conflicts, "in conflict"),
        (status.nonfinite, "with a non-finite loss"),
        (len(status.set_aside), "objects set aside"),
    ]
    found = ", ".join(f"{number:,} {what}" for number, what in counts if number)
    more = len(status.set_aside) - _SENTENCES_SHOWN
    return [
        f"chunks: {status.done:,} of {status.chunks:,} done" + (f"; {found}" if found else ""),
        *(f"  {sentence}" for sentence in status.set_aside[:_SENTENCES_SHOWN]),
        *([f"  and {more:,} more; see --json"] if more > 0 else []),
    ]


def _groups(status: Status) -> list[str]:
    behind = [
        (shown_name(name), f"{row.done:,}/{row.chunks:,}", f"{row.done_tokens:,}/{row.tokens:,}")
        for name, row in sorted(status.groups.items())
        if row.done < row.chunks
    ]
    return table(("group", "chunks", "tokens"), behind) if behind and len(status.groups) > 1 else []


def _workers(workers: list[WorkerStatus], now: float) -> list[str]:
    rows = [
        (
            row.worker[:8], row.device, "-" if row.rank is None else str(row.rank), f"{row.chunks:,}",
            "-" if row.perplexity is None else f"{row.perplexity:.4f}",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            f"{format_seconds(max(now - row.last_activity, 0.0))} ago", "active" if row.active else "idle",
        )
        for row in workers
    ]  # fmt: skip
    head = ("worker", "device", "rank", "chunks", "perplexity", "tokens/s", "last activity", "")
    return table(head, rows) if rows else []


def _counts(requests: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(requests.items()))
