"""Every command against S3 over HTTP: run, status, doctor, reduce, report, export, compare."""

import json
from pathlib import Path

import msgspec
import pytest
from support.corpora import make_documents, write_jsonl
from support.s3 import serve_s3

from everplex.cli import run_command_line
from everplex.findings import Diagnosis
from everplex.run_status import Status


def test_a_run_in_a_bucket_is_read_by_every_command(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The corpus is read from the bucket too; the same options reach the store from every command."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_documents(6))
    with serve_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        bucket = server.make_bucket("runs")
        server.put("runs", "corpus.jsonl", corpus.read_bytes())
        out = f"{bucket}/a"
        run = ["run", f"{bucket}/corpus.jsonl", "--model", str(tiny_model), "--out", out, "--context", "64"]
        assert run_command_line([*run, "--chunk-tokens", "256", "--threads", "1", "--json"]) == 0
        nll = json.loads(capsys.readouterr().out)["nll"]
        assert run_command_line(["status", out, "--json"]) == 0
        status = msgspec.json.decode(capsys.readouterr().out, type=Status)
        assert (status.state, status.sealed, status.missing) == ("complete", True, 0)
        assert status.store_requests["create"] > 0
        assert status.workers[0].active
        assert run_command_line(["doctor", out, "--json"]) == 0
        findings = msgspec.json.decode(capsys.readouterr().out, type=Diagnosis).findings
        assert {finding.severity for finding in findings if finding.area == "store"} <= {"good", "note"}  # slow
        options = [word for pair in server.options().items() for word in ("--store-option", "=".join(pair))]
        for name in server.environment():
            patch.delenv(name)
        assert run_command_line(["reduce", out, "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["nll"] == nll
        assert run_command_line(["report", out, *options]) == 0
        assert run_command_line(["export", out, "--format", "csv", *options]) == 0
        assert run_command_line(["compare", out, out, *options]) == 0
        assert run_command_line(["upload-spool", out, *options]) == 0
