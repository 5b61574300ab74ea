"""Readers of text formats: JSON Lines and plain text. A reader yields numbered values and leaves meaning to others."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from everplex.stages.arrays import read_bin, read_npy
from everplex.stages.columns import read_arrow, read_parquet
from everplex.stages.documents import Place, Value
from everplex.stages.plan_options import PlanOptions
from everplex.storage.errors import UsageError
from everplex.storage.inputs import InputStream

__all__ = ["FORMATS", "Reader", "find_reader", "has_known_suffix"]

_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"[ \t\r]*\n?")


class Reader(NamedTuple):
    """How a format is read."""

    unit: str
    """What its numbers count: `line`, `row` or `document`."""
    read: Callable[[InputStream, PlanOptions], Iterator[tuple[int, Value]]]
    suffixes: tuple[str, ...]
    compressed: bool = False
    """Whether it may lie in a .gz or .zst file."""


def read_jsonl(stream: InputStream, options: PlanOptions) -> Iterator[tuple[int, Value]]:  # noqa: ARG001 - one signature for all readers
    """Yield line number and object of every line; blank lines and a byte order mark are no documents."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in _lines(stream):
        if line.isspace():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield number, _decode_slowly(line, Place(stream.url, "line", number))


def _decode_slowly(line: bytes, place: Place) -> dict[str, Any]:
    """Decode what the fast decoder refused: it may only hold a NaN; if not, say exactly what is wrong with it."""
    try:
        value = json.loads(decode_text(line.rstrip(b"\r\n"), place))
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{place}: expected a JSON object, found invalid JSON ({error.msg} at column {error.colno}); mend this line"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
        raise UsageError(f"{place}: expected a JSON object that can be read ({error}); mend this line") from error
    if not isinstance(value, dict):
        raise UsageError(f"{place}: expected a JSON object, found {type(value).__name__}; write one object per line")
    return value


def read_text(stream: InputStream, options: PlanOptions) -> Iterator[tuple[int, Value]]:
    """Yield the texts of a plain text file, verbatim: the whole file, its lines, or its blocks between blank lines.

    Line ends (LF or CRLF) belong to no line and to no block's end; inside a block or a whole file they stay.
    """
    match options.text_documents:
        case "file":
            data = stream.content.read().removeprefix(_BOM)
            yield 1, decode_text(data, Place(stream.url, "line", 1))
        case "line":
            for number, line in _lines(stream):
                yield (
                    number,
                    decode_text(line.removesuffix(b"\n").removesuffix(b"\r"), Place(stream.url, "line", number)),
                )
        case "block":
            yield from _blocks(stream)


def _blocks(stream: InputStream) -> Iterator[tuple[int, str]]:
    block: list[bytes] = []
    first = 1
    for number, line in _lines(stream):
        if not _BLANK_LINE.fullmatch(line):
            first = first if block else number
            block.append(line)
        elif block:
            yield first, _join(block, stream.url, first)
            block = []
    if block:
        yield first, _join(block, stream.url, first)


def _join(block: list[bytes], url: str, first: int) -> str:
    return decode_text(b"".join(block).removesuffix(b"\n").removesuffix(b"\r"), Place(url, "line", first))


def _lines(stream: InputStream) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream.content, 1):
        yield number, line.removeprefix(_BOM) if number == 1 else line


def decode_text(data: bytes, place: Place) -> str:
    """Decode UTF-8. Raises UsageError naming the line of the first byte that is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = place._replace(number=place.number + data.count(b"\n", 0, error.start))
        raise UsageError(
            f"{line}: expected UTF-8, found the byte 0x{data[error.start]:02x} at byte {error.start} of the document; "
            "convert the file to UTF-8"
        ) from error


FORMATS: dict[str, Reader] = {
    "jsonl": Reader("line", read_jsonl, (".jsonl", ".ndjson", ".json"), compressed=True),
    "text": Reader("line", read_text, (".txt", ".text", ".md", ".rst", ".raw"), compressed=True),
    "parquet": Reader("row", read_parquet, (".parquet",)),
    "arrow": Reader("row", read_arrow, (".arrow",)),
    "npy": Reader("document", read_npy, (".npy",)),
    "bin": Reader("document", read_bin, (".bin",)),
}


def has_known_suffix(url: str) -> bool:
    """Whether the name alone tells the format."""
    return _uncompressed(url).endswith(tuple(suffix for reader in FORMATS.values() for suffix in reader.suffixes))


def _uncompressed(url: str) -> str:
    return re.sub(r"\.(gz|zst|zstd)$", "", url)


def find_reader(url: str, options: PlanOptions) -> Reader:
    """Return the reader of a file: the one asked for, or else by the file's name. Raises UsageError."""
    name = _uncompressed(url)
    reader = FORMATS.get(options.format) or next((r for r in FORMATS.values() if name.endswith(r.suffixes)), None)
    if reader is None:
        known = ", ".join(suffix for reader in FORMATS.values() for suffix in reader.suffixes)
        raise UsageError(f"{url}: the format is not clear from the name; expected one of {known}, or give --format")
    if name != url and not reader.compressed:
        raise UsageError(f"{url}: a compressed file of this format cannot be read; unpack it first")
    return reader
