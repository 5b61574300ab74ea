"""The summary for people: what the text and the HTML page say, and what they never leave out."""

import re
from html.parser import HTMLParser

import msgspec
from support.segments import DictStore, Fabric, fill, worker_id

from everplex.stages.html import html_report
from everplex.stages.ledger import Ledger
from everplex.stages.records import ModelSpec
from everplex.stages.reduce import reduce
from everplex.stages.report import device_lines, text_report
from everplex.stages.summary import AgreementRow, DeviceRow, Summary

FABRIC = Fabric({"law/civil": [40, 64], "law/criminal": [30] * 3, "biology": [5, 300]})


def _summary(*, missing: bool = False, workers: int = 2, fabric: Fabric = FABRIC) -> Summary:
    store = DictStore()
    fill(fabric, store, workers=workers)
    if missing:
        del store.objects[next(iter(store.objects))]
    ledger = Ledger(store, fabric.plan, fabric.run_id)
    ledger.refresh()
    return reduce(fabric.plan, fabric.run, ledger)


def test_the_text_has_the_numbers_of_all_and_of_each_group() -> None:
    """Perplexities of the whole and of every group are there, groups with a slash as a tree."""
    summary = _summary()
    text = text_report(summary)
    for numbers in [summary, *summary.groups.values()]:
        assert f"{numbers.perplexity:.4f}" in text
    lines = [line.split()[0] for line in text.splitlines() if line.strip()]
    start = lines.index("all")
    assert lines[start : start + 5] == ["all", "biology", "law/", "civil", "criminal"]


def test_the_text_says_where_the_loss_is() -> None:
    """Losses by position in the window and by length of document each add up to all tokens."""
    summary = _summary()
    lines = text_report(summary).splitlines()
    start = next(index for index, line in enumerate(lines) if "at this position" in line)
    rows = [line.replace(" - ", "-").split() for line in lines[start + 1 : lines.index("", start)]]
    for column in (2, 4):
        counts = [int(row[column].replace(",", "")) for row in rows if row[column] != "-"]
        assert sum(counts) == summary.tokens
    last = summary.positions[-1]
    assert f"{last.nll / last.tokens:.4f}" in rows[len(summary.positions) - 1]


def test_the_protocol_stands_beside_the_numbers() -> None:
    """The label of the protocol is in both reports."""
    summary = _summary()
    assert f"protocol: {summary.protocol.label}" in text_report(summary)
    assert summary.protocol.label in html_report(summary)


def test_a_profile_is_a_table_by_worker() -> None:
    """Steps are shares of what the main thread spent; what runs beside it is in seconds and in no share."""
    summary = _summary(workers=1)
    profile = {"forward": 6.0, "projection": 2.0, "idle": 2.0, "read": 1.5, "decode": 0.5, "batching": 3.0}
    assert "time of worker" not in text_report(summary)
    workers = [msgspec.structs.replace(worker, profile=profile) for worker in summary.workers]
    lines = text_report(msgspec.structs.replace(summary, workers=workers)).splitlines()
    start = next(index for index, line in enumerate(lines) if "time of worker" in line)
    head, row = (re.split(r"  +", line.strip()) for line in lines[start : start + 2])
    assert dict(zip(head, row, strict=True)) == {
        "time of worker": summary.workers[0].worker[:8],
        "in all": "10.0 s",
        "bare model": "80.0 %",
        "forward": "60.0 %",
        "idle": "20.0 %",
        "projection": "20.0 %",
        "(read)": "1.50 s",
        "(decode)": "0.50 s",
        "(batching)": "3.00 s",
    }


def test_a_partial_answer_says_so_first() -> None:
    """The first line of an incomplete summary says that it is one, and how much is there."""
    summary = _summary(missing=True)
    first = text_report(summary).splitlines()[0]
    assert first.startswith("PARTIAL")
    assert f"{summary.coverage.accepted:,} of {summary.coverage.chunks:,} chunks" in first
    assert 'class="partial"' in html_report(summary)
    assert "PARTIAL" not in text_report(_summary())


def test_workers_are_not_left_out_and_it_says_why() -> None:
    """Each worker's row tells how the perplexity would move without it; the reason against it follows."""
    summary = _summary()
    text = text_report(summary)
    worker = summary.workers[0]
    rest = 2.718281828459045 ** ((summary.nll - worker.nll) / (summary.tokens - worker.tokens))
    assert summary.perplexity is not None
    assert f"{rest - summary.perplexity:+.4f}" in text
    assert "would bias the result" in text


def test_a_worker_alone_cannot_be_left_out() -> None:
    """Without the only worker there is no perplexity, and with one device health is not checked."""
    text = text_report(_summary(workers=1))
    assert "health not checked" in text
    row = next(line for line in text.splitlines() if line.startswith(worker_id(0)[:8]))
    assert row.endswith("-")


def test_what_convicting_changed_is_told() -> None:
    """Verdicts, the perplexity before and after, and the spread between environments are sentences."""
    summary = msgspec.structs.replace(
        _summary(),
        devices=[DeviceRow(device="host-1/gpu", health="convicted", evidence=["outvoted"], speed="slow")],
        perplexity_before=99.0,
        agreement=[AgreementRow(environments=["A", "B"], spread=1e-4, tolerance=1e-3)],
    )
    lines = device_lines(summary)
    assert lines[0] == "device host-1/gpu: convicted, slow among its kind; outvoted"
    assert lines[1].startswith("perplexity 99.0000 with the evaluations of convicted devices")
    assert lines[2] == "A and B: 0.0001 nats per token apart, up to 0.001 counts as agreement"


def test_what_was_set_aside_is_listed() -> None:
    """Every object that does not count has its sentence in the report."""
    summary = _summary()
    coverage = msgspec.structs.replace(summary.coverage, corrupt=1, set_aside=["segments/x: torn"])
    assert "segments/x: torn" in text_report(msgspec.structs.replace(summary, coverage=coverage))


def test_nothing_scored_has_a_report() -> None:
    """A summary without any number shows dashes and does not fail."""
    fabric = Fabric({"a": [40]})
    ledger = Ledger(DictStore(), fabric.plan, fabric.run_id)
    ledger.refresh()
    summary = reduce(fabric.plan, fabric.run, ledger)
    assert "-" in text_report(summary)
    assert "<svg" not in html_report(summary)


class _Page(HTMLParser):
    """Collects what a page loads, and checks that its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_loads_nothing() -> None:
    """The HTML is balanced, needs nothing from elsewhere, and shows the numbers and both charts."""
    summary = _summary()
    page = _Page()
    page.feed(html_report(summary))
    assert page.open == []
    assert page.loads == []
    assert f"{summary.perplexity:.4f}" in page.text
    assert html_report(summary).count("<svg") == 2


def test_names_cannot_break_the_page() -> None:
    """Groups and models with markup in their names are shown as text."""
    fabric = Fabric({"<script>alert(1)</script>": [40], "b": [20]})
    summary = _summary(fabric=fabric)
    summary = msgspec.structs.replace(summary, model=ModelSpec(name='"><b>', digest="1" * 64))
    page = html_report(summary)
    assert "<script>" not in page
    assert "<b>" not in page
