"""Readers of column formats: Parquet files, and Arrow files as `datasets.save_to_disk` writes them."""

import importlib
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from everplex.stages.plan_options import PlanOptions
from everplex.storage.errors import UsageError
from everplex.storage.inputs import InputStream, open_input

__all__ = ["arrow_files", "read_arrow", "read_parquet"]

_BATCH_ROWS = 256
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_MAGIC = b"ARROW1"


def read_parquet(stream: InputStream, options: PlanOptions) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield row number and fields of a Parquet file, a few rows in memory at a time."""
    pyarrow, parquet = _import("pyarrow", stream.url), _import("pyarrow.parquet", stream.url)
    with open_input(stream.url) as source:
        try:
            file = parquet.ParquetFile(source)
            columns = _columns(file.schema_arrow.names, options, stream.url)
            yield from _rows(file.iter_batches(batch_size=_BATCH_ROWS, columns=columns), stream.url)
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(stream.url, "Parquet", error) from error


def read_arrow(stream: InputStream, options: PlanOptions) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield row number and fields of an Arrow file in either of its forms, the stream or the random-access one."""
    pyarrow = _import("pyarrow", stream.url)
    with open_input(stream.url) as source:
        try:
            batches, names = _open_arrow(source, stream.url)
            columns = _columns(names, options, stream.url)
            yield from _rows((batch.select(columns) for batch in batches), stream.url)
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(stream.url, "Arrow", error) from error


def arrow_files(folder: str) -> list[str]:
    """Return the files, in order, of a folder that `datasets.save_to_disk` wrote. Raises UsageError for another."""
    base = folder.rstrip("/")
    try:
        with InputStream(f"{base}/state.json") as stream:
            state = json.load(stream.content)
        return [f"{base}/{file['filename']}" for file in state["_data_files"]]
    except UsageError as error:
        raise UsageError(
            f"{folder} is a folder without a state.json; name the files in it ({base}/*.jsonl), or a folder that "
            "datasets.save_to_disk wrote (of several splits, name one)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{base}/state.json: not what datasets.save_to_disk writes; save the folder again") from error


def _open_arrow(source: BinaryIO, url: str) -> tuple[Iterable[Any], list[str]]:
    ipc = _import("pyarrow.ipc", url)
    magic = source.read(len(_FILE_MAGIC))
    source.seek(0)
    if magic == _FILE_MAGIC:
        reader = ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches)), reader.schema.names
    source.seek(max(0, source.seek(0, io.SEEK_END) - len(_END_OF_STREAM)))
    if source.read() != _END_OF_STREAM:  # readers take a stream cut between two batches for a whole one
        raise UsageError(f"{url}: the Arrow stream is cut short; fetch the file again")
    source.seek(0)
    reader = ipc.open_stream(source)
    return reader, reader.schema.names


def _rows(batches: Iterable[Any], url: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for batch in batches:
        for index in range(0, batch.num_rows, _BATCH_ROWS):
            part = batch.slice(index, _BATCH_ROWS)
            try:
                rows = part.to_pylist()
            except UnicodeDecodeError as error:
                raise UsageError(f"{url}, row {number + _first_undecodable(part)}: expected UTF-8 ({error})") from error
            for row in rows:
                number += 1
                yield number, row


def _first_undecodable(batch: Any) -> int:
    """Return the number, from 1, of the first row of a batch that does not decode."""
    for index in range(batch.num_rows):
        try:
            batch.slice(index, 1).to_pylist()
        except UnicodeDecodeError:
            return index + 1
    return int(batch.num_rows)


def _columns(names: list[str], options: PlanOptions, url: str) -> list[str]:
    """Return the columns that the options name; a dotted name may be a field inside a column."""
    content = {
        "text": [options.text_field],
        "messages": [options.messages_field],
        "completion": [options.prompt_field, options.completion_field],
    }[options.content]
    columns = []
    for field in [*content, options.id_field, options.group_by]:
        if field is None:
            continue
        column = field if field in names else field.split(".")[0]
        if column not in names:
            raise UsageError(f"{url}: expected a column {field!r}, found the columns {', '.join(names)}; name another")
        columns.append(column)
    return list(dict.fromkeys(columns))


def _import(module: str, url: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{url}: this format needs pyarrow; pip install 'everplex[parquet]'") from error


def _damaged(url: str, form: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())
    return UsageError(f"{url}: the {form} file is damaged or cut short ({reason}); fetch it again")
