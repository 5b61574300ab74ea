"""The command line: results on stdout, progress and errors as plain lines on stderr, exit codes 0, 2, 75 and 4."""

import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
import typer
from typer.exceptions import TyperException

from everplex import api
from everplex.commands import Json, Out, Partial, StoreOption, drop_output, print_json, print_text, register
from everplex.rehearsal import DryRun, dry_run_report, rehearse_settings
from everplex.settings import CORPUS, MACHINE, MODEL, RUN, Settings, load_toml, make_settings, option_hints
from everplex.stages.report import plan_facts, plan_report, text_report
from everplex.stages.summary import Summary
from everplex.storage.errors import EverplexError, IncompleteError, last_words

_INTERRUPTED = 130
"""What typer returns for a Ctrl-C that no command handles."""

app = typer.Typer(
    name="everplex",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

Config = Annotated[str | None, typer.Option(help="TOML file of the same options; the command line wins.")]


def main() -> None:
    """Run the command line and exit with its code."""
    code = run_command_line(sys.argv[1:])
    if code == IncompleteError.exit_code:
        # A thread may be inside a call that a store does not answer: an orderly exit would wait for it.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command_line(arguments: list[str]) -> int:
    """Run one command; returns the exit code. What a user can cause ends in one line on stderr."""
    try:
        code = app(arguments, prog_name="everplex", standalone_mode=False)
    except TyperException as error:
        message = error.format_message()
        typer.echo(message if message.startswith("Usage") else f"everplex: {message}", err=True)
        return error.exit_code
    except EverplexError as error:
        typer.echo(f"everplex: {last_words(error)}", err=True)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has seen enough
        drop_output()
        return 0
    if code == _INTERRUPTED:
        typer.echo("everplex: interrupted; run the same command again", err=True)
        return IncompleteError.exit_code
    return code or 0


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"everplex {version('everplex')}")
        raise typer.Exit


@app.callback()
def everplex(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Perplexity of a language model over a large corpus: exact, and on machines that may vanish at any moment."""


def _command(name: str, panels: set[str], *more: str) -> Callable[[Callable[[Settings, bool], None]], None]:
    """Register a command that takes the options of these panels and `more`, merged with the TOML file of `--config`."""

    def register(function: Callable[[Settings, bool], None]) -> None:
        hints = {
            option: hint
            for option, hint in option_hints().items()
            if option in more or hint.__metadata__[0].rich_help_panel in panels
        }

        def command(ctx: typer.Context, **values: Any) -> None:
            config, as_json = values.pop("config"), values.pop("as_json")
            given = {name: value for name, value in values.items() if _on_command_line(ctx, name)}
            function(make_settings((load_toml(config) if config else {}) | given), as_json)

        defaults = msgspec.structs.asdict(Settings())
        annotations = {"ctx": typer.Context, **hints, "config": Config, "as_json": Json}
        parameters = [
            inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(
                inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=defaults[option])
                for option, hint in hints.items()
            ),
            inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, annotation=Config, default=None),
            inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, annotation=Json, default=False),
        ]
        command.__doc__ = function.__doc__
        command.__annotations__ = annotations
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        app.command(name)(command)

    return register


def _on_command_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@_command("run", {CORPUS, MODEL, MACHINE, RUN}, "data", "dry_run")
def _run(settings: Settings, as_json: bool) -> None:
    """Plan, evaluate, reduce and report. Run the same command again to resume."""
    if settings.dry_run:
        _print_dry_run(rehearse_settings(settings), settings.out, as_json)
        return
    _print_summary(api.run_settings(settings), str(settings.out), as_json)


def _print_dry_run(dry: DryRun, out: str | None, as_json: bool) -> None:
    if as_json:
        print_json(dry)
    else:
        print_text(dry_run_report(dry, out))


@_command("plan", {CORPUS}, "data", "out", "model", "revision", "trust_remote_code", "store_option", "grace_seconds")
def _plan(settings: Settings, as_json: bool) -> None:
    """Read the corpus and write the plan: windows in chunks. Needs no model."""
    plan = api.plan_settings(settings)
    if as_json:
        print_json(plan_facts(plan))
    else:
        print_text(plan_report(plan, str(settings.out)))


@_command("evaluate", {MODEL, MACHINE, RUN}, "plan", "groups")
def _evaluate(settings: Settings, as_json: bool) -> None:
    """Evaluate what is missing of a planned run, as one rank or one worker of a pool."""
    _print_summary(api.evaluate_settings(settings), str(settings.out), as_json)


@app.command("reduce")
def _reduce(
    out: Out,
    partial: Partial = False,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Merge what all machines recorded, from anywhere, without a model."""
    summary = api.reduce(out, partial=partial, store_option=store_option)
    _print_summary(summary, out, as_json)


def _print_summary(summary: Summary, out: str, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        print_text(f"{text_report(summary)}\nresults: {out}/summary.json\n")


register(app)
