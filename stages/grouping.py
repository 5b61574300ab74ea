"""The plan of one group while its documents stream by: its chunks, its document tables, its tallies."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from everplex.stages.arrays import blocks
from everplex.stages.bundle import Bundle, Bundler, WindowRow, cut_row, make_row
from everplex.stages.chunk import decode_chunk, encode_chunk
from everplex.stages.cuts import Window, cut_packed
from everplex.stages.documents import Document
from everplex.stages.encode import Encoded, Encoder
from everplex.stages.layout import chunk_id, chunk_key, documents_key, group_key
from everplex.stages.plan_options import PlanOptions
from everplex.stages.records import Counts, DocumentRow, GroupSpec
from everplex.storage.codec import compress, sha256_hex
from everplex.storage.errors import UsageError

__all__ = ["TABLE_DOCUMENTS", "ChunkRow", "GroupPlan", "GroupState", "Output", "make_group", "restore_group"]

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


class WaitingRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that fill no chunk as yet, as the chunk that they would make."""

    content: str
    chunk: bytes
    counts: Counts


class WaitingStream(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a stream of tokens that fills no row as yet."""

    tokens: bytes
    scored: bytes
    """One byte a token."""
    begun: list[tuple[int, Counts]]
    num_windows: int


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the plan of a group needs to go on after the documents that `spec` counts."""

    spec: GroupSpec
    chunks: list[ChunkRow]
    table: bytes
    """Lines of the document table that is not full as yet."""
    rows: WaitingRows | None
    offset: int = 0
    """Tokens of a packed stream so far."""
    stream: WaitingStream | None = None


class GroupPlan(ABC):
    """Takes the documents of one group in corpus order and gives the objects that are ready to be created."""

    def __init__(self, name: str, options: PlanOptions, encoder: Encoder) -> None:
        self.chunks: list[ChunkRow] = []
        self.num_tokens = 0
        """Scored tokens of the chunks so far."""
        self._name = name
        self._key = group_key(name)
        self._protocol = encoder.protocol
        self._prefix_id = encoder.prefix_id
        self._hash_ids = options.hash_ids
        self._bundler = Bundler(options.chunk_tokens)
        self._num_documents = 0
        self._windowless = Counts()
        self._table: list[bytes] = []
        self._tables: list[str] = []

    @abstractmethod
    def add(self, document: Document, encoded: Encoded) -> Iterator[Output]:
        """Take the next document; yields the chunks and tables that are complete."""

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

    def state(self) -> GroupState | None:
        """Return what `restore_group` needs to go on from here; None where nothing is done before the last document."""
        waiting = self._bundler.waiting()
        return GroupState(
            spec=self.spec(),
            chunks=self.chunks,
            table=b"".join(self._table),
            rows=None
            if waiting is None
            else WaitingRows(content=waiting.chunk.content(), chunk=encode_chunk(waiting.chunk), counts=waiting.counts),
        )

    def restore(self, state: GroupState) -> None:
        """Go on from a state of the same group. Raises CorruptObjectError where its rows are damaged."""
        self.chunks = list(state.chunks)
        self.num_tokens = sum(row.tokens for row in state.chunks)
        self._num_documents = state.spec.documents
        self._windowless = state.spec.windowless
        self._tables = list(state.spec.document_tables)
        self._table = state.table.splitlines(keepends=True)
        if state.rows is not None:
            chunk = decode_chunk(state.rows.chunk, f"state of group {self._name!r}", state.rows.content)
            self._bundler.restore(Bundle(chunk, state.rows.counts))

    def _chunk(self, bundle: Bundle | None) -> Iterator[Output]:
        if bundle is None:
            return
        chunk, counts = bundle
        content = chunk.content()
        key = chunk_key(chunk_id(self._key, len(self.chunks)), content)
        self.num_tokens += chunk.num_scored
        self.chunks.append(ChunkRow(content, chunk.num_rows, chunk.num_inputs, chunk.num_scored, counts))
        yield Output(key, partial(encode_chunk, chunk))

    def _document_row(self, document_id: str, num_scored: int, counts: Counts) -> Iterator[Output]:
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


class _DocumentGroup(GroupPlan):
    """Every document is cut by itself and is the sampling unit; in a packed stream it is cut where the stream is."""

    _offset = 0

    def state(self) -> GroupState | None:
        """Return what is there so far, with the length of a packed stream."""
        state = super().state()
        return state and msgspec.structs.replace(state, offset=self._offset)

    def restore(self, state: GroupState) -> None:
        """Go on from a state."""
        super().restore(state)
        self._offset = state.offset

    def add(self, document: Document, encoded: Encoded) -> Iterator[Output]:
        num_scored = 0
        for window in self._cut(len(encoded.tokens_N)):
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
        yield from self._document_row(document.id, num_scored, encoded.counts)

    def _cut(self, num_tokens: int) -> Iterator[Window]:
        if self._protocol.join != "tokens":
            return self._protocol.cut(num_tokens)
        offset = self._offset
        self._offset += num_tokens + 1 if num_tokens else 0  # with its prefix token
        return cut_packed(num_tokens, self._protocol.spec.context, offset)


class _PackedGroup(GroupPlan):
    """Documents after their prefix tokens are one stream of tokens; the window is the sampling unit."""

    def __init__(self, name: str, options: PlanOptions, encoder: Encoder) -> None:
        super().__init__(name, options, encoder)
        self._tokens = [np.zeros(0, dtype=np.int32)]
        self._scored = [np.zeros(0, dtype=np.bool_)]
        self._num_waiting = 0
        """Tokens in the two lists: the end of the stream, from the last token of the last row on."""
        self._begun: deque[tuple[int, Counts]] = deque()
        """First waiting position, and denominators, of documents without a row as yet."""
        self._num_windows = 0

    def add(self, document: Document, encoded: Encoded) -> Iterator[Output]:  # noqa: ARG002 - ids are of no use here
        num_tokens = len(encoded.tokens_N)
        self._num_documents += 1
        if num_tokens == 0:
            self._windowless += encoded.counts
            return
        self._begun.append((self._num_waiting + 1, encoded.counts))
        self._extend(np.array([self._prefix_id], dtype=np.int32), np.zeros(1, dtype=np.bool_))
        start = 0
        for tokens in blocks(encoded.tokens_N):
            every = np.ones(len(tokens), dtype=np.bool_)
            self._extend(tokens, every if encoded.scored_N is None else encoded.scored_N[start : start + len(tokens)])
            start += len(tokens)
            if self._num_waiting > self._protocol.spec.context:
                yield from self._take_rows(at_end=False)

    def finish(self) -> Iterator[Output]:
        """Yield the last row and what is left; documents that no scored row follows have no window."""
        yield from self._take_rows(at_end=True)
        self._windowless += sum((counts for _, counts in self._begun), Counts())
        yield from super().finish()

    def state(self) -> GroupState | None:
        """Return what is there so far, with the end of the stream."""
        state = super().state()
        stream = WaitingStream(
            tokens=np.concatenate(self._tokens).astype("<i4").tobytes(),
            scored=np.concatenate(self._scored).tobytes(),
            begun=list(self._begun),
            num_windows=self._num_windows,
        )
        return state and msgspec.structs.replace(state, stream=stream)

    def restore(self, state: GroupState) -> None:
        """Go on from a state."""
        super().restore(state)
        if state.stream is not None:
            self._tokens = [np.frombuffer(state.stream.tokens, dtype="<i4").astype(np.int32)]
            self._scored = [np.frombuffer(state.stream.scored, dtype=np.bool_)]
            self._num_waiting = len(self._tokens[0])
            self._begun = deque(state.stream.begun)
            self._num_windows = state.stream.num_windows

    def _extend(self, tokens: NDArray[np.int32], scored: NDArray[np.bool_]) -> None:
        self._tokens.append(tokens)
        self._scored.append(scored)
        self._num_waiting += len(tokens)

    def _take_rows(self, *, at_end: bool) -> Iterator[Output]:
        """Turn what waits into rows of `context` inputs, each beginning with the last token of the one before."""
        tokens, scored, context = (
            np.concatenate(self._tokens),
            np.concatenate(self._scored),
            self._protocol.spec.context,
        )
        start = 0
        while start + context < len(tokens) or (at_end and start + 1 < len(tokens)):
            stop = start + context + 1
            yield from self._take_row(WindowRow(tokens[start:stop], scored[start + 1 : stop], None), stop)
            start += context
        self._tokens, self._scored, self._num_waiting = [tokens[start:]], [scored[start:]], len(tokens) - start
        self._begun = deque((position - start, counts) for position, counts in self._begun)

    def _take_row(self, row: WindowRow, stop: int) -> Iterator[Output]:
        if not row.scored.any():
            return
        yield from self._chunk(self._bundler.add(row, self._num_windows))
        self._num_windows += 1
        while self._begun and self._begun[0][0] < stop:
            self._bundler.count(self._begun.popleft()[1])


class _TextGroup(GroupPlan):
    """The texts of the group are one text, tokenised as a whole, so held in memory; the window is the sampling unit."""

    def __init__(self, name: str, options: PlanOptions, encoder: Encoder) -> None:
        super().__init__(name, options, encoder)
        self._encoder = encoder
        self._counts = Counts()
        self._texts: list[str] = []

    def add(self, document: Document, encoded: Encoded) -> Iterator[Output]:
        if not isinstance(document.content, str):
            raise UsageError(
                f"{document.place}: the protocol {self._protocol.spec.name} joins plain texts; use another"
            )
        self._num_documents += 1
        self._texts.append(document.content)
        self._counts += encoded.counts
        yield from ()

    def state(self) -> None:
        """Return nothing: the text is tokenised at the end."""

    def finish(self) -> Iterator[Output]:
        """Tokenise and cut the whole text; its denominators go with its last chunk, if it has one."""
        tokens_N = self._tokenize()
        num_windows = 0
        for window in self._protocol.cut(len(tokens_N)):
            row = cut_row(window, tokens_N, None, self._prefix_id)
            yield from self._chunk(self._bundler.add(row, num_windows))
            num_windows += 1
        if num_windows:
            self._bundler.count(self._counts)
        else:
            self._windowless += self._counts
        yield from super().finish()

    def _tokenize(self) -> NDArray[np.int32]:
        text = self._protocol.separator.join(self._texts)
        self._texts = []
        if self._protocol.drop_final_newline:
            text = text.removesuffix("\n")
        (tokens_N,) = self._encoder.encode_texts([text])
        spec, least = self._protocol.spec, self._protocol.min_tokens
        if len(tokens_N) < least:
            raise UsageError(
                f"group {self._name!r}: {spec.name} needs a text of at least {least} tokens, found {len(tokens_N)}; "
                "give a smaller --context or a longer text"
            )
        return tokens_N


def make_group(name: str, options: PlanOptions, encoder: Encoder) -> GroupPlan:
    """Return the plan of a group, empty as yet, that joins documents as the protocol says."""
    if encoder.protocol.join == "text":
        return _TextGroup(name, options, encoder)
    if encoder.protocol.spec.unit == "window":
        return _PackedGroup(name, options, encoder)
    return _DocumentGroup(name, options, encoder)


def restore_group(state: GroupState, options: PlanOptions, encoder: Encoder) -> GroupPlan:
    """Return the plan of a group as it was when its state was taken."""
    group = make_group(state.spec.name, options, encoder)
    group.restore(state)
    return group
