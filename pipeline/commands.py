"""The commands that read a run: status, report, export, upload-spool, doctor."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from everplex import reading
from everplex.checkup import doctor
from everplex.comparing import compare, comparisons_report, trials, trials_report
from everplex.exporting import ExportFormat, write_file
from everplex.run_status import Status
from everplex.stages.export import TableName
from everplex.stages.report import text_report
from everplex.status_text import status_line, status_report
from everplex.storage.errors import IntegrityError, UsageError

Out = Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL of a run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Partial = Annotated[bool, typer.Option("--partial", help="Take what is recorded so far.")]
StoreOption = Annotated[list[str] | None, typer.Option(help="key=value for the store; repeatable.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("status")(_status)
    app.command("report")(_report)
    app.command("export")(_export)
    app.command("compare")(_compare)
    app.command("upload-spool")(_upload_spool)
    app.command("doctor")(_doctor)


def print_json(value: object) -> None:
    """Print a typed value as JSON on stdout."""
    print_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_text(text: str) -> None:
    """Print on stdout, at once. Raises UsageError where it takes nothing, as on a full disk."""
    print_bytes(text.encode(errors="backslashreplace"))


def print_bytes(data: bytes) -> None:
    """Write to stdout, at once. Raises UsageError where it takes nothing."""
    try:
        typer.echo(data, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise UsageError(f"standard output: {error.strerror}; nothing else is lost, print it elsewhere") from error


def drop_output() -> None:
    """Let what is still buffered for stdout go nowhere, so that the end of the process does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _status(
    out: Out,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until the run is complete.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks with --watch.", min=0.1)] = 5.0,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Show how far a run is, how fast, which workers, what is missing. Changes nothing."""
    statuses = reading.statuses(out, store_option=store_option)
    if not watch:
        status = next(statuses)
        if as_json:
            print_json(status)
        else:
            print_text(status_report(status))
        return
    with suppress(KeyboardInterrupt):
        _watch(statuses, every, as_json=as_json)


def _watch(statuses: Iterator[Status], every: float, *, as_json: bool) -> None:
    """Show each status until one is complete: a live page on a terminal, else a line each."""
    console = Console()
    if as_json or not console.is_terminal:
        for status in _until_complete(statuses, every):
            print_text((msgspec.json.encode(status).decode() if as_json else status_line(status)) + "\n")
        return
    with Live(console=console, auto_refresh=False) as live:
        for status in _until_complete(statuses, every):
            live.update(Text(status_report(status)), refresh=True)


def _until_complete(statuses: Iterator[Status], every: float) -> Iterator[Status]:
    for status in statuses:
        yield status
        if status.state == "complete":
            return
        time.sleep(every)


def _report(out: Out, as_json: Json = False, store_option: StoreOption = None) -> None:
    """Print the numbers of a run, complete or not, and write report.html."""
    summary = reading.report(out, store_option=store_option)
    if as_json:
        print_json(summary)
    else:
        print_text(f"{text_report(summary)}\nreport: {out}/report.html\n")


def _export(  # noqa: PLR0917 - the command's options
    out: Out,
    form: Annotated[ExportFormat, typer.Option("--format", help="Form of the file.")],
    table: Annotated[TableName, typer.Option(help="Which table; lm-eval has its own layout.")] = "groups",
    output: Annotated[str | None, typer.Option(help="File to write [default: standard output].")] = None,
    partial: Partial = False,
    store_option: StoreOption = None,
) -> None:
    """Write a table of chunks, documents, groups or workers, or a results file as lm-eval does."""
    data = reading.export(out, format=form, table=table, partial=partial, store_option=store_option)
    if output is None:
        print_bytes(data)
    else:
        write_file(output, data)


def _compare(
    outs: Annotated[list[str], typer.Argument(metavar="OUT...", help="Folders or URLs of runs; the first is A.")],
    as_trials: Annotated[bool, typer.Option("--trials", help="They are repeated runs: how far apart?")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Compare groups of runs whose plans differ.")] = False,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Compare runs with the first, document by document, with error bars."""
    if as_trials:
        result = trials(*outs, store_option=store_option)
        if as_json:
            print_json(result)
        else:
            print_text(trials_report(result))
        return
    comparisons = compare(*outs, anyway=anyway, store_option=store_option)
    if as_json:
        print_json(comparisons)
    else:
        print_text(comparisons_report(comparisons, outs))


def _upload_spool(out: Out, as_json: Json = False, store_option: StoreOption = None) -> None:
    """Upload what a vanished store left on this machine."""
    sent = reading.send_waiting(out, store_option=store_option)
    if as_json:
        print_json(sent._asdict())
    else:
        print_text(f"uploaded {sent.uploaded} segments to {out}\n")
    if sent.refused:
        raise IntegrityError("; ".join(sent.refused))


def _doctor(
    out: Annotated[str | None, typer.Argument(metavar="[OUT]", help="Folder or URL of a run.")] = None,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Check the environment and, given OUT, the store and the run; say what to do. Exit code 0, 2 or 4."""
    diagnosis = doctor(out, store_option=store_option)
    if as_json:
        print_json(diagnosis)
    else:
        print_text(diagnosis.text())
    raise typer.Exit(diagnosis.exit_code)
