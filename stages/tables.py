"""Rows as CSV, JSON Lines or Parquet. Floats keep every bit; what is unknown is empty or null."""

import csv
import importlib
import io
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec

from everplex.storage.errors import UsageError


def encode_table(rows: Iterable[dict[str, Any]], form: str) -> bytes:
    """Return a table as `csv`, `jsonl` or `parquet`; the columns are the keys of the rows, in their order.

    Raises UsageError where the package for Parquet is not installed.
    """
    match form:
        case "csv":
            return _csv(list(rows))
        case "jsonl":
            return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        case "parquet":
            return _parquet(list(rows))
        case _:
            raise UsageError(f"--format: expected parquet, csv, jsonl or lm-eval, found {form!r}")


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(rows)))


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return what a cell says: lists and truth values as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict | bool) else value


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError("--format parquet needs pyarrow; pip install 'everplex[parquet]'") from error
    names = _columns(rows)
    buffer = io.BytesIO()
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    parquet.write_table(table, buffer)
    return buffer.getvalue()
