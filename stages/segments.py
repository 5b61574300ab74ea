"""Segments: immutable objects holding the records of one worker, as zstd of JSON lines, a header line first."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from everplex.stages.layout import parse_segment_key, segment_key
from everplex.stages.records import SCHEMA, Header, Record
from everplex.storage.codec import compress, decompress, sha256_hex
from everplex.storage.errors import CorruptObjectError

_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(Header)
_record_decoder = msgspec.json.Decoder(Record)


class Segment(NamedTuple):
    """A segment as it was read: proved whole, and to be the object that its name says."""

    header: Header
    records: list[Record]


def encode_record(record: Record) -> bytes:
    """One JSON line, without its end."""
    return _encoder.encode(record)


def encode_segment(header: Header, lines: Sequence[bytes]) -> tuple[str, bytes]:
    """Key and bytes of a segment; `lines` are encoded records."""
    data = compress(b"\n".join([_encoder.encode(header), *lines, b""]))
    return segment_key(header.worker, header.seq, sha256_hex(data), header.first), data


def decode_segment(key: str, data: bytes) -> Segment:
    """Read a segment back. Raises CorruptObjectError where name, bytes and header do not belong together."""
    name = parse_segment_key(key)
    if name is None:
        raise CorruptObjectError(f"{key}: not the name of a segment")
    found = sha256_hex(data)[:16]
    if found != name.sha16:
        raise CorruptObjectError(f"{key}: expected bytes with digest {name.sha16}, found {found}")
    first, *lines = decompress(data, key).split(b"\n")
    try:
        header = _header_decoder.decode(first)
        records = [_record_decoder.decode(line) for line in lines if line]
    except msgspec.DecodeError as error:
        raise CorruptObjectError(f"{key}: not a header line and record lines ({error})") from error
    if header.schema != SCHEMA:
        raise CorruptObjectError(f"{key}: expected schema {SCHEMA}, found {header.schema}")
    if (header.worker, header.seq, header.first) != (name.worker, name.seq, name.first):
        raise CorruptObjectError(f"{key}: the header is of worker {header.worker}, sequence {header.seq}")
    return Segment(header, records)
