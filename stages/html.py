"""A summary as one HTML file without anything to load: tables, and losses by position and by length of document."""

from collections.abc import Iterable, Sequence
from html import escape

from everplex.stages.report import (
    NUMBER_COLUMNS,
    WHY_NOT_LEFT_OUT,
    WORKER_COLUMNS,
    coverage_lines,
    device_lines,
    headline,
    number_rows,
    worker_rows,
)
from everplex.stages.summary import PositionRow, Summary

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } caption { text-align: left; opacity: .7; padding-bottom: .3rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; white-space: pre; }
.partial { border: 2px solid #c60; padding: .5rem 1rem; } .scroll { overflow-x: auto; }
svg text { font: 11px sans-serif; fill: currentColor; } svg rect { fill: #47a; }
"""
BAR, GAP, HEIGHT = 46, 6, 160


def html_report(summary: Summary) -> str:
    """Return the report as a whole HTML document."""
    label = f"{summary.protocol.label}; {summary.model.name} ({summary.dtype})"
    lead = "" if summary.complete else ' class="partial"'
    sections = [
        f"<h1{lead}>{escape(headline(summary))}</h1>",
        _table("Numbers", label, ("", *NUMBER_COLUMNS), number_rows(summary)),
        _bars("Loss by position in the window", label, summary.positions),
        _bars("Loss by tokens of the document", label, summary.document_lengths),
        _lines("Coverage", coverage_lines(summary)),
        _table("Workers", WHY_NOT_LEFT_OUT, WORKER_COLUMNS, worker_rows(summary)) if summary.workers else "",
        _lines("Devices", device_lines(summary)),
        _lines("Identity", [f"run {summary.run}", f"plan {summary.plan}", f"model {summary.model.digest}"]),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(headline(summary))}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(title: str, caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<h2>{title}</h2><div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{names}</tr></thead><tbody>\n{cells}\n</tbody></table></div>"
    )


def _lines(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def _bars(title: str, label: str, rows: Sequence[PositionRow]) -> str:
    """Draw mean losses in nats per token, a bar for each power of two."""
    means = [row.nll / row.tokens for row in rows]
    if not rows or max(means) <= 0:
        return ""
    parts = []
    for index, (row, mean) in enumerate(zip(rows, means, strict=True)):
        left, height = index * (BAR + GAP), HEIGHT * max(mean, 0.0) / max(means)
        span = str(row.start) if row.start == row.end else f"{row.start}-{row.end}"
        parts.append(
            f'<rect x="{left}" y="{HEIGHT - height + 16:.1f}" width="{BAR}" height="{height:.1f}">'
            f"<title>{span}: {mean:.4f} nats/token over {row.tokens:,} tokens</title></rect>"
            f'<text x="{left}" y="{HEIGHT - height + 12:.1f}">{mean:.2f}</text>'
            f'<text x="{left}" y="{HEIGHT + 30}">{span}</text>'
        )
    size = f'width="{len(rows) * (BAR + GAP) + 40}" height="{HEIGHT + 40}"'
    return (
        f"<h2>{title}</h2><p>nats per token; {escape(label)}</p>"
        f'<div class="scroll"><svg role="img" aria-label="{title}" {size}>{"".join(parts)}</svg></div>'
    )
