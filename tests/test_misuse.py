"""What people do to a run folder, a shell or the Python functions, and the sentence that they get for it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_documents, write_jsonl

import everplex
from everplex.cli import run_command_line
from everplex.settings import make_settings
from everplex.storage.errors import CorruptObjectError, IntegrityError, StoreUnavailableError, UsageError

SMALL: dict[str, Any] = {"context": 64, "chunk_tokens": 256, "threads": 1}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus of a few chunks."""
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", make_documents(12))


@pytest.fixture
def sealed(documents: Path, tiny_model: Path, tmp_path: Path) -> Path:
    """Return the folder of a complete run."""
    everplex.run(documents, model=str(tiny_model), out=str(tmp_path / "out"), **SMALL)
    return tmp_path / "out"


def _edit(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value}), encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "value"), [("perplexity", 1.0), ("macro", 2.0), ("workers", []), ("dtype", "float64"), ("digest", "0")]
)
def test_no_number_of_a_damaged_seal_is_printed(
    sealed: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums that are right do not vouch for what was derived from them."""
    _edit(sealed / "summary.json", key, value)
    assert run_command_line(["report", str(sealed)]) == 4
    captured = capsys.readouterr()
    assert (captured.out, "not what was sealed, by its digest; restore it" in captured.err) == ("", True)


def test_a_seal_without_its_digest_is_refused(sealed: Path) -> None:
    """Numbers that nothing vouches for are not printed."""
    path = sealed / "summary.json"
    fields = json.loads(path.read_bytes())
    del fields["digest"]
    path.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(IntegrityError, match="not what was sealed"):
        everplex.reduce(str(sealed))


def test_a_seal_whose_segment_is_gone_can_be_made_again(sealed: Path, documents: Path, tiny_model: Path) -> None:
    """The sentence says how, and doing it gives the same numbers."""
    before = everplex.reduce(str(sealed))
    next(sealed.glob("segments/*/*")).unlink()
    with pytest.raises(IntegrityError, match=r"delete summary\.json and run the same `everplex run` command again"):
        everplex.reduce(str(sealed))
    (sealed / "summary.json").unlink()
    after = everplex.run(documents, model=str(tiny_model), out=str(sealed), **SMALL)
    assert (after.nll, after.tokens, after.groups) == (before.nll, before.tokens, before.groups)


@pytest.mark.parametrize("name", ["plan/plan.json.zst", "plan/chunks/*/*"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_plan_in_pieces_is_no_reason_to_try_again(sealed: Path, tiny_model: Path, name: str, *, gone: bool) -> None:
    """Neither a missing nor a torn part of a plan heals by itself: it ends with 4 and says what to do."""
    (sealed / "summary.json").unlink()
    for path in sealed.glob("segments/*/*"):
        path.unlink()
    path = next(sealed.glob(name))
    data = path.read_bytes()
    path.unlink()
    if not gone:
        path.write_bytes(data[: len(data) // 2])
    command = partial(everplex.evaluate, model=str(tiny_model), threads=1) if "chunks" in name else everplex.reduce
    with pytest.raises(CorruptObjectError, match="copy the whole plan folder again"):
        command(out=str(sealed))


def test_a_run_that_is_not_there_cannot_be_reused(documents: Path, tiny_model: Path, tmp_path: Path) -> None:
    """A slip of the pen in --reuse-from is refused; the same command again would not help."""
    with pytest.raises(UsageError, match="nowhere holds no run that has started"):
        everplex.run(
            documents, model=str(tiny_model), out=str(tmp_path / "o"), reuse_from=tmp_path / "nowhere", **SMALL
        )


def test_a_server_that_is_not_reached_is_not_a_missing_file(tiny_model: Path, tmp_path: Path) -> None:
    """It may be back for the same command."""
    with pytest.raises(StoreUnavailableError, match=r"could not read http://127\.0\.0\.1:1/x\.jsonl"):
        everplex.run("http://127.0.0.1:1/x.jsonl", model=str(tiny_model), out=str(tmp_path / "out"), **SMALL)


def test_a_shared_plan_is_found_from_any_folder(
    documents: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative --plan is about the folder in which it was said."""
    monkeypatch.chdir(tmp_path)
    everplex.plan(documents, tokenizer=str(tiny_model), out="plans", context=64)
    summary = everplex.evaluate(model=str(tiny_model), out="out", plan="plans", threads=1)
    monkeypatch.chdir("/")
    assert everplex.reduce(str(tmp_path / "out")) == summary


def test_a_full_disk_behind_stdout_is_a_sentence(sealed: Path) -> None:
    """No traceback, and exit code 2."""
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    program = Path(sys.executable).with_name("everplex")
    command = f"{program} report {sealed} > /dev/full"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == "everplex: standard output: No space left on device; nothing else is lost, print it elsewhere\n"
    )


def test_an_export_replaces_no_pipe_and_no_link(sealed: Path, tmp_path: Path) -> None:
    """What is no file stays what it is, and so does a link; a file behind it is written."""
    export = ["export", str(sealed), "--format", "csv", "--output"]
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "table.csv")
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert run_command_line([*export, str(pipe)]) == 0
        table = reader.communicate()[0]
    assert run_command_line([*export, str(link)]) == 0
    assert (pipe.is_fifo(), link.is_symlink(), (tmp_path / "table.csv").read_bytes()) == (True, True, table)
    assert table.startswith(b"group,")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seconds": -1}, "max_seconds: expected at least 0"),
        ({"max_seconds": float("nan")}, "max_seconds: expected at least 0"),
        ({"batch_tokens": True}, "batch_tokens"),
        ({"data": 5}, "option data"),
        ({"reuse_from": 5}, "option reuse_from"),
    ],
)
def test_a_value_that_means_nothing_is_refused(options: dict[str, Any], words: str) -> None:
    """In Python and TOML as on the command line."""
    with pytest.raises(UsageError, match=words):
        make_settings(options)


def test_values_are_taken_in_the_form_in_which_they_come() -> None:
    """Numbers as numbers, paths as paths, and one of several alone."""
    settings = make_settings({"batch_tokens": 512, "data": "a", "reuse_from": [Path("b")], "store_option": "k=v"})
    assert (settings.batch_tokens, settings.data, settings.reuse_from) == ("512", ["a"], ["b"])
    assert settings.store_options() == {"k": "v"}


@pytest.mark.parametrize("groups", ["", ",", ",,"])
def test_no_group_is_not_every_group(groups: str) -> None:
    """An empty --groups, as of an unset variable, does not evaluate everything."""
    with pytest.raises(UsageError, match="--groups: expected names"):
        make_settings({"groups": groups}).group_names()


def test_ranks_give_the_signal_handlers_back(documents: Path, tiny_model: Path, tmp_path: Path) -> None:
    """A Python program that ran local ranks still gets its own Ctrl-C."""
    code = f"""if __name__ == "__main__":
        import signal, everplex
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        everplex.run({str(documents)!r}, model={str(tiny_model)!r}, out={str(tmp_path / "out")!r}, nproc=2, **{SMALL!r})
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before"""
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_names_keep_to_their_cells(tiny_model: Path, tmp_path: Path) -> None:
    """Line breaks, colours and long names of groups neither break the table nor reach the terminal."""
    names = ["a\nb", "\x1b[31mred", "\u202ereversed", "x" * 300]
    rows = [{"text": "hello", "topic": name} for name in names]
    corpus = write_jsonl(tmp_path / "names.jsonl", rows)
    everplex.run(corpus, model=str(tiny_model), out=str(tmp_path / "out"), group_by="topic", **SMALL)
    program = Path(sys.executable).with_name("everplex")
    text = subprocess.run([program, "report", tmp_path / "out"], capture_output=True, text=True, check=True).stdout
    assert all(char.isprintable() for line in text.split("\n") for char in line)
    assert max(map(len, text.splitlines())) < 200
    assert r"a\nb" in text
