"""The plan of one group while its documents stream by: its chunks, its document tables, its tallies."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from everplex.stages.bundle import Bundle, Bundler, make_row
from everplex.stages.chunk import encode_chunk
from everplex.stages.encode import Encoded
from everplex.stages.layout import chunk_id, chunk_key, documents_key, group_key
from everplex.stages.plan_options import PlanOptions
from everplex.stages.protocols import Protocol
from everplex.stages.records import Counts, DocumentRow, GroupSpec, TokenizerSpec
from everplex.storage.codec import compress, sha256_hex

__all__ = ["TABLE_DOCUMENTS", "ChunkRow", "GroupPlan", "Output"]

TABLE_DOCUMENTS = 10_000


class Output(NamedTuple):
    """An object to create."""

    key: str
    encode: Callable[[], bytes]


class ChunkRow(NamedTuple):
    """One line of the chunk table."""

    content: str
    windows: int
    input_tokens: int
    tokens: int
    counts: Counts


class GroupPlan:
    """Takes the documents of one group in corpus order and gives the objects that are ready to be created."""

    def __init__(self, name: str, options: PlanOptions, protocol: Protocol, tokenizer: TokenizerSpec) -> None:
        self.chunks: list[ChunkRow] = []
        self._name = name
        self._key = group_key(name)
        self._protocol = protocol
        self._prefix_id = tokenizer.prefix_id
        self._hash_ids = options.hash_ids
        self._bundler = Bundler(options.chunk_tokens)
        self._num_documents = 0
        self._windowless = Counts()
        self._table: list[bytes] = []
        self._tables: list[str] = []

    def add(self, document_id: str, encoded: Encoded) -> Iterator[Output]:
        """Take the next document; yields the chunks and tables that are complete."""
        num_scored = 0
        for window in self._protocol.cut(len(encoded.tokens_N)):
            row = make_row(window, encoded.tokens_N, encoded.scored_N, self._prefix_id)
            if row is None:
                continue
            yield from self._chunk(self._bundler.add(row, self._num_documents))
            if num_scored == 0:
                self._bundler.count(encoded.counts)
            num_scored += int(np.count_nonzero(row.scored))
        if num_scored == 0:
            self._windowless += encoded.counts
        self._num_documents += 1
        yield from self._document(document_id, num_scored, encoded.counts)

    def finish(self) -> Iterator[Output]:
        """Yield what is left after the last document."""
        yield from self._chunk(self._bundler.take())
        yield from self._take_table()

    def spec(self) -> GroupSpec:
        """Return what the plan says about the group."""
        return GroupSpec(
            name=self._name,
            key=self._key,
            documents=self._num_documents,
            windowless=self._windowless,
            document_tables=self._tables,
        )

    def _chunk(self, bundle: Bundle | None) -> Iterator[Output]:
        if bundle is None:
            return
        chunk, counts = bundle
        content = chunk.content()
        key = chunk_key(chunk_id(self._key, len(self.chunks)), content)
        self.chunks.append(ChunkRow(content, chunk.num_rows, chunk.num_inputs, chunk.num_scored, counts))
        yield Output(key, partial(encode_chunk, chunk))

    def _document(self, document_id: str, num_scored: int, counts: Counts) -> Iterator[Output]:
        shown = sha256_hex(document_id.encode())[:32] if self._hash_ids else document_id
        row = DocumentRow(
            id=shown, tokens=num_scored, bytes=counts.bytes, characters=counts.characters, words=counts.words
        )
        self._table.append(msgspec.json.encode(row) + b"\n")
        if len(self._table) == TABLE_DOCUMENTS:
            yield from self._take_table()

    def _take_table(self) -> Iterator[Output]:
        if self._table:
            data = b"".join(self._table)
            key = documents_key(self._key, len(self._tables), sha256_hex(data))
            self._table = []
            self._tables.append(key)
            yield Output(key, partial(compress, data))
