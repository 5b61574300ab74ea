"""Plan: from a corpus to a table of chunks, streaming, so that memory holds a few chunks and no corpus.

The chunk objects and document tables are created as they become full, the plan last: a plan that is there is whole.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, Self

import msgspec

from everplex.stages.arrays import FileTokens
from everplex.stages.collector import collector_paused
from everplex.stages.corpus import Corpus, current_spec
from everplex.stages.documents import Document
from everplex.stages.encode import Encoder, choose
from everplex.stages.grouping import ChunkRow, GroupPlan, Output, make_group, restore_group
from everplex.stages.plan_options import PlanOptions, check_options
from everplex.stages.plan_state import DigestedDocuments, load_state, planning_identity, save_state
from everplex.stages.records import ChunkTable, Plan
from everplex.stages.stored import compare_plans, save_plan
from everplex.stages.tokenize import load_card
from everplex.storage.errors import CorruptObjectError, IncompleteError, ObjectExistsError, UsageError
from everplex.storage.store import Store

__all__ = ["PlanOptions", "PlanProgress", "check_plan", "make_plan"]

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1 << 20
_UPLOADS = 4
STATE_SECONDS = 30.0


class PlanProgress(NamedTuple):
    """How far planning is."""

    documents: int
    kept: int
    """Documents, of those, that an interrupted planner had planned."""
    tokens: int
    """Scored tokens."""
    chunks: int
    read_bytes: int
    total_bytes: int


def make_plan(
    options: PlanOptions,
    store: Store,
    *,
    progress: Callable[[PlanProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    state_seconds: float = STATE_SECONDS,
) -> Plan:
    """Read the corpus, create every chunk object and document table, and then the plan; returns the stored plan.

    Every `state_seconds`, and when `stop` says so, what is planned so far is saved for the planner that comes after an
    interruption: it reads those documents again, and tokenises the others alone.

    Raises UsageError for what cannot be read or planned, IdentityMismatch where the store has the plan of something
    else, and IncompleteError when `stop` says so; none of them leaves a plan behind.
    """
    _check(options)
    encoder = Encoder(options)
    corpus = Corpus(options)
    with _Uploads(store) as uploads:
        planner = _Planner(options, store, encoder, corpus, uploads, progress=progress, stop=stop)
        planner.run(state_seconds)
    groups = list(planner.groups.values())
    plan = Plan(
        protocol=encoder.protocol.spec,
        corpus=corpus.spec(),
        tokenizer=encoder.tokenizer_spec,
        chunk_tokens=options.chunk_tokens,
        groups=[group.spec() for group in groups],
        chunks=_chunk_table([group.chunks for group in groups]),
    )
    if not plan.chunks.content:
        num_documents = sum(group.documents for group in plan.groups)
        raise UsageError(
            f"nothing to score: {num_documents} documents in {', '.join(options.data)} give no scored token "
            f"with the protocol {plan.protocol.name} and a context of {plan.protocol.context}"
        )
    return save_plan(store, plan)


class _Planner:
    """Streams the corpus through the plans of its groups, in order of appearance, and their objects to the store."""

    def __init__(
        self,
        options: PlanOptions,
        store: Store,
        encoder: Encoder,
        corpus: Corpus,
        uploads: "_Uploads",
        *,
        progress: Callable[[PlanProgress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.groups: dict[str, GroupPlan] = {}
        self._options = options
        self._store = store
        self._encoder = encoder
        self._corpus = corpus
        self._uploads = uploads
        self._tell = progress or (lambda _: None)
        self._stop = stop or (lambda: False)
        self._identity = planning_identity(options, encoder)
        self._documents = DigestedDocuments(corpus.documents(self._tick))
        self._num_kept = 0

    def run(self, state_seconds: float) -> None:
        """Plan the whole corpus. Raises IncompleteError when `stop` says so."""
        self._resume()
        saved = time.monotonic()
        for batch in _batches(self._documents):
            self._add(batch)
            self._tell(self._progress())
            if self._stop():
                self._save()
                raise IncompleteError(
                    f"planning stopped after {self._documents.count} documents; run the same command again"
                )
            if time.monotonic() - saved >= state_seconds:
                self._save()
                saved = time.monotonic()
        for group in self.groups.values():
            for output in group.finish():
                self._uploads.submit(output)
        self._tell(self._progress())

    def _tick(self) -> None:
        if self._stop():
            raise IncompleteError("planning stopped before there was anything new; run the same command again")

    def _resume(self) -> None:
        """Take over the state of an interrupted planner if the corpus begins with the documents that it planned."""
        state = load_state(self._store, self._identity)
        if state is None:
            return
        for _ in islice(self._documents, state.documents):
            self._tick()
            self._num_kept = self._documents.count
            if self._num_kept % _BATCH_DOCUMENTS == 0:
                self._tell(self._progress())
        if (self._documents.count, self._documents.digest()) == (state.documents, state.digest):
            with suppress(CorruptObjectError):  # of damaged rows: then all of it is planned again
                self.groups = {
                    group.spec.name: restore_group(group, self._options, self._encoder) for group in state.groups
                }
                return
        self._documents, self._num_kept = DigestedDocuments(self._corpus.documents(self._tick)), 0

    def _add(self, batch: list[Document]) -> None:
        for document, encoded in zip(batch, self._encoder.encode(batch), strict=True):
            if document.group not in self.groups:
                self.groups[document.group] = make_group(document.group, self._options, self._encoder)
            for output in self.groups[document.group].add(document, encoded):
                self._uploads.submit(output)

    def _save(self) -> None:
        states = [group.state() for group in self.groups.values()]
        whole = [state for state in states if state is not None]
        if len(whole) == len(states):
            self._uploads.wait()
            save_state(self._store, self._identity, self._documents, whole)

    def _progress(self) -> PlanProgress:
        groups = self.groups.values()
        return PlanProgress(
            documents=self._documents.count,
            kept=self._num_kept,
            tokens=sum(group.num_tokens for group in groups),
            chunks=sum(len(group.chunks) for group in groups),
            read_bytes=self._corpus.read_bytes,
            total_bytes=self._corpus.total_bytes,
        )


def check_plan(stored: Plan, options: PlanOptions, *, verify_data: bool = False) -> None:
    """Raise IdentityMismatch, naming the field, unless `options` would give the `stored` plan again.

    Files of the same place, size and time as before are taken to be the same; `verify_data` reads them all.
    """
    _check(options)
    with collector_paused():  # a tokenizer brings large libraries
        card = load_card(
            options.tokenizer,
            options.revision,
            trust_remote_code=options.trust_remote_code,
            prefix_id=options.prefix_id,
        )
    protocol, tokenizer = choose(options, card)
    given = msgspec.structs.replace(
        stored,
        protocol=protocol.spec,
        corpus=current_spec(options, stored.corpus, verify_data=verify_data),
        tokenizer=tokenizer,
        chunk_tokens=options.chunk_tokens,
    )
    compare_plans(stored, given)


def _check(options: PlanOptions) -> None:
    check_options(options)
    if options.chunk_tokens < 1:
        raise UsageError(f"--chunk-tokens: expected at least 1, found {options.chunk_tokens}")


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Cut into batches that keep all cores busy and memory small; tokens still in their file wait for no others."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS or isinstance(document.content, FileTokens):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _chunk_table(groups: list[list[ChunkRow]]) -> ChunkTable:
    rows = [row for chunks in groups for row in chunks]
    return ChunkTable(
        group=[index for index, chunks in enumerate(groups) for _ in chunks],
        ordinal=[ordinal for chunks in groups for ordinal in range(len(chunks))],
        content=[row.content for row in rows],
        windows=[row.windows for row in rows],
        input_tokens=[row.input_tokens for row in rows],
        tokens=[row.tokens for row in rows],
        documents=[row.counts.documents for row in rows],
        bytes=[row.counts.bytes for row in rows],
        characters=[row.counts.characters for row in rows],
        words=[row.counts.words for row in rows],
    )


class _Uploads:
    """A few creates at a time, so that a slow store does not stop the tokenizer; leaving waits for all of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="plan")
        self._pending: deque[Future[None]] = deque()

    def submit(self, output: Output) -> None:
        """Create an object soon. Raises what an earlier create raised."""
        while len(self._pending) >= 2 * _UPLOADS:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._create, output))

    def _create(self, output: Output) -> None:
        try:
            self._store.create(output.key, output.encode())
        except ObjectExistsError as error:
            raise UsageError(
                f"{error.location} was planned from another corpus; give another --out, or the same inputs as before"
            ) from error

    def wait(self) -> None:
        """Wait until all of them are in the store. Raises what a create raised."""
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
