"""The command line: its commands and options, exit codes, what goes to stdout and what to stderr."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.corpora import make_documents, write_jsonl
from support.segments import ENVIRONMENT, DictStore, Fabric, worker_id
from support.stored import begin, complete, put_rows, save

import everplex
from everplex.cli import run_command_line
from everplex.settings import Settings, load_toml
from everplex.stages.compare import Comparison, Trials
from everplex.stages.spool import LocalSpool
from everplex.stages.summary import Summary

COMMANDS = ("run", "plan", "evaluate", "reduce", "status", "report", "export", "compare", "upload-spool", "doctor")
FABRIC = Fabric({"a": [5, 40, 300], "b": [30] * 4})
ROWS = range(len(FABRIC.plan.chunks))
SMALL = ("--context", "64", "--chunk-tokens", "256", "--threads", "1")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a small corpus of two groups."""
    return write_jsonl(tmp_path / "corpus.jsonl", make_documents(8))


def _everplex(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("everplex"))
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60, **more)


def test_the_installed_command_tells_its_version() -> None:
    """`everplex --version`, and the same as a module."""
    done = _everplex("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"everplex {version('everplex')}\n", "")
    module = subprocess.run([sys.executable, "-m", "everplex", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == done.stdout


def test_an_unfinished_command_ends_although_a_thread_hangs() -> None:
    """A call that a store never answers holds no process beyond its last words; exit code 75."""
    code = """if True:
        import threading
        from everplex import cli
        from everplex.storage.errors import IncompleteError

        def run_command_line(arguments):
            threading.Thread(target=threading.Event().wait).start()
            return IncompleteError.exit_code

        cli.run_command_line = run_command_line
        cli.main()"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 75


def test_local_ranks_are_numbered_by_their_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank given to all of them would be that of each."""
    evaluate = ["evaluate", "--model", "m", "--out", "o", "--nproc", "2"]
    for position in (["--rank", "0", "--world-size", "2"], ["--world-size", "2"]):
        assert run_command_line([*evaluate, *position]) == 2
        assert "leave out --rank and --world-size" in capsys.readouterr().err


def test_an_error_is_a_plain_line_in_a_terminal_too() -> None:
    """No box, no colour, no traceback, also where colours are forced; exit code 2."""
    done = _everplex("status", "/nowhere/at/all", env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("everplex: /nowhere/at/all holds neither a run nor a plan")
    assert done.stderr.count("\n") == 1
    assert not set(done.stderr) & set("\x1b╭│╰─")


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """`everplex export … | head -1` ends without a word."""
    fabric = Fabric({"all": [16] * 4000}, windows_per_chunk=200)
    store = begin(fabric, DictStore())
    put_rows(fabric, store, 0, range(20))
    out = save(store, tmp_path / "run")
    program = Path(sys.executable).with_name("everplex")
    command = f"{program} export {out} --format jsonl --table documents | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ordinal"] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help tells what it does and names its options."""
    assert run_command_line([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: everplex {command} ")
    assert "--json" in text or command == "export"


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """And only those that are tested here."""
    assert run_command_line(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert {line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "} == set(COMMANDS)
    assert run_command_line([]) == 2
    assert capsys.readouterr().err.startswith("Usage: everplex")


def test_every_option_belongs_to_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """No option of the settings is out of reach of the command line."""
    text = ""
    for command in ("run", "evaluate"):
        assert run_command_line([command, "--help"]) == 0
        text += capsys.readouterr().out
    for name in Settings.__struct_fields__:
        assert name == "data" or f"--{name.replace('_', '-')}" in text


def test_a_run_prints_its_numbers_and_is_resumed(
    corpus: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result alone is on stdout, as text or as JSON; again, nothing is evaluated and the numbers are the same."""
    out = tmp_path / "out"
    run = ["run", str(corpus), "--model", str(tiny_model), "--out", str(out), *SMALL]
    assert run_command_line(run) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("perplexity ")
    assert captured.out.endswith(f"results: {out}/summary.json\n")
    assert all(line.startswith("everplex: ") for line in captured.err.splitlines())
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    segments = sorted(out.glob("segments/*/*"))
    assert run_command_line([*run, "--json"]) == 0
    summary = msgspec.json.decode(capsys.readouterr().out, type=Summary)
    assert summary.complete
    assert summary == msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
    assert sorted(out.glob("segments/*/*")) == segments
    assert run_command_line([*run, "--context", "32"]) == 2
    assert "context differs" in capsys.readouterr().err


def test_stages_one_by_one_give_what_a_run_gives(
    corpus: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, evaluate, reduce; a merge of a part is refused with 75, and given with --partial."""
    out, threads = str(tmp_path / "out"), ("--threads", "1")
    plan = ["plan", str(corpus), "--tokenizer", str(tiny_model), "--out", out, *SMALL[:4], "--group-by", "topic"]
    assert run_command_line([*plan, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert run_command_line(["reduce", out]) == 2
    capsys.readouterr()
    evaluate = ["evaluate", "--model", str(tiny_model), "--out", out, *threads]
    assert run_command_line([*evaluate, "--groups", "a", "--json"]) == 0
    part = msgspec.json.decode(capsys.readouterr().out, type=Summary)
    assert not part.complete
    assert part.groups["b"].tokens == 0
    assert run_command_line(["reduce", out, "--json"]) == 75
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "are missing" in captured.err
    assert run_command_line(["reduce", out, "--partial", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Summary).nll == part.nll
    assert run_command_line(evaluate) == 0
    capsys.readouterr()
    assert run_command_line(["reduce", out, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Summary).tokens == facts["tokens"]


def test_the_command_line_wins_over_the_file(
    corpus: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A TOML file gives options under their names, with dashes or without; what is typed replaces it."""
    config = tmp_path / "run.toml"
    paths = f'data = ["{corpus}"]\ntokenizer = "{tiny_model}"\nout = "{tmp_path / "out"}"\n'
    config.write_text(f"{paths}context = 32\nchunk-tokens = 64\n")
    assert load_toml(str(config))["chunk_tokens"] == 64
    assert run_command_line(["plan", "--config", str(config), "--context", "48", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 48
    plan = everplex.plan(str(corpus), tokenizer=str(tiny_model), out=str(tmp_path / "out"), context=48, chunk_tokens=64)
    assert plan.chunk_tokens == 64


def test_integrity_ends_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conflict is told by `reduce` in one line."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS)
    put_rows(FABRIC, store, 1, ROWS[:1], bias=1.0)
    assert run_command_line(["reduce", str(save(store, tmp_path / "run"))]) == 4
    assert "disagree" in capsys.readouterr().err


def test_report_gives_the_numbers_of_a_part_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text says that it is partial; the JSON is the typed summary; the page is replaced by what is known then."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS[:3])
    out = str(save(store, tmp_path / "run"))
    assert run_command_line(["report", out]) == 0
    assert capsys.readouterr().out.startswith("PARTIAL")
    assert run_command_line(["report", out, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Summary).coverage.accepted == 3
    page = tmp_path / "run" / "report.html"
    assert "PARTIAL" in page.read_text()
    put_rows(FABRIC, store, 1, ROWS[3:])
    assert run_command_line(["report", str(save(store, tmp_path / "run"))]) == 0
    assert "PARTIAL" not in page.read_text()


def test_what_waits_on_this_machine_is_uploaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once; then nothing waits. A damaged segment stays, is named, and ends with 4."""
    out = save(begin(FABRIC, DictStore()), tmp_path / "run")
    spool = LocalSpool(FABRIC.run_id)
    key, data = FABRIC.segment(FABRIC.header(worker_id(0), 1), [FABRIC.record(row) for row in ROWS])
    spool.create(key, data)
    assert run_command_line(["upload-spool", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"uploaded": 1, "refused": []}
    assert (out / key).read_bytes() == data
    assert run_command_line(["upload-spool", str(out)]) == 0
    assert capsys.readouterr().out == f"uploaded 0 segments to {out}\n"
    damaged, _ = FABRIC.segment(FABRIC.header(worker_id(1), 1), [FABRIC.record(0)])
    spool.create(damaged, data)
    assert run_command_line(["upload-spool", str(out)]) == 4
    assert damaged in capsys.readouterr().err


def test_runs_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A paired difference per further run; trials say how far repeated runs are apart."""
    outs = []
    for number, bias in enumerate((0.0, 0.25, 0.0)):
        store = begin(FABRIC, DictStore())
        put_rows(FABRIC, store, number, ROWS, bias=bias)
        outs.append(str(save(store, tmp_path / str(number))))
    assert run_command_line(["compare", *outs, "--json"]) == 0
    other, same = msgspec.json.decode(capsys.readouterr().out, type=list[Comparison])
    assert other.total.difference == pytest.approx(0.25, abs=1e-6)
    assert (same.total.difference, same.total.stderr, same.paired) == (0.0, 0.0, True)
    assert run_command_line(["compare", *outs]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[-2:]] == outs[1:]
    assert run_command_line(["compare", *outs[:2]]) == 0
    alike = capsys.readouterr().out
    assert f"B: {outs[1]}" in alike
    assert "not computed alike" not in alike
    assert run_command_line(["compare", outs[0], outs[2], "--trials", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Trials).largest == 0.0
    assert run_command_line(["compare", *outs, "--trials"]) == 0
    assert "does not explain it" in capsys.readouterr().out


def test_runs_in_other_environments_are_compared_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside one run or in a table, what the environments have not in common is named with both values."""
    outs = []
    for name in ("sdpa", "eager"):
        store = begin(FABRIC, DictStore())
        environment = msgspec.structs.replace(ENVIRONMENT, attention=name)
        FABRIC.put(store, worker_id(0), 1, [FABRIC.record(row) for row in ROWS], environment=environment)
        outs.append(str(save(store, tmp_path / name)))
    assert run_command_line(["compare", *outs]) == 0
    assert "not computed alike, which is part of the difference: attention sdpa and eager" in capsys.readouterr().out
    assert run_command_line(["compare", *outs, outs[0]]) == 0
    assert f"{outs[1]}: the runs were not computed alike" in capsys.readouterr().out


def test_runs_of_different_plans_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The field that differs is named; with --anyway groups are compared, and the text says why that is weak."""
    one = str(save(complete(FABRIC), tmp_path / "one"))
    two = str(save(complete(Fabric({"a": [5, 41, 300], "b": [30] * 5})), tmp_path / "two"))
    assert run_command_line(["compare", one, two]) == 2
    sentence = capsys.readouterr().err
    assert "corpus is" in sentence
    assert "--anyway" in sentence
    assert run_command_line(["compare", one, two, "--anyway"]) == 0
    assert "nothing is paired" in capsys.readouterr().out
    assert run_command_line(["compare", one]) == 2


def test_an_unfinished_run_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 75, and the run is named."""
    store = begin(FABRIC, DictStore())
    put_rows(FABRIC, store, 0, ROWS[:2])
    whole, part = str(save(complete(FABRIC), tmp_path / "whole")), str(save(store, tmp_path / "part"))
    assert run_command_line(["compare", whole, part]) == 75
    assert part in capsys.readouterr().err


def test_the_python_functions_refuse_unknown_options(corpus: Path, tiny_model: Path) -> None:
    """A slip in a keyword is told with the nearest option."""
    with pytest.raises(everplex.UsageError, match="'contxt'; the nearest is 'context'"):
        everplex.plan(str(corpus), tokenizer=str(tiny_model), out="x", contxt=3)


def test_the_python_functions_take_paths(corpus: Path, tiny_model: Path, tmp_path: Path) -> None:
    """One path or several, as strings or not, are the same corpus."""
    options: dict[str, Any] = {"tokenizer": str(tiny_model), "context": 64}
    one = everplex.plan(corpus, out=str(tmp_path / "one"), **options)
    several = everplex.plan([str(corpus)], out=str(tmp_path / "several"), **options)
    assert one.digest() == several.digest()


def test_a_rehearsal_is_never_taken_for_a_run(corpus: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Only `run --dry-run` and `everplex.dry_run` rehearse; others refuse the option instead of doing the work."""
    with pytest.raises(everplex.UsageError, match="dry_run"):
        everplex.run(corpus, model=str(tiny_model), out=str(tmp_path / "out"), dry_run=True)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C outside of an evaluation: one line, and the code that asks for the same command again."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("everplex.reading.report", interrupt)
    assert run_command_line(["report", str(tmp_path)]) == 75
    assert capsys.readouterr().err == "everplex: interrupted; run the same command again\n"
