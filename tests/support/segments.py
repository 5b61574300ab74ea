"""Plans, records and segments made up on the spot: what the reducer reads, without a model or a corpus."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from everplex.stages.layout import documents_key, group_key
from everplex.stages.records import (
    ChunkTable,
    CorpusSpec,
    Counts,
    DocumentRow,
    Environment,
    GroupSpec,
    Header,
    Kind,
    ModelSpec,
    Plan,
    ProtocolSpec,
    Record,
    Run,
    TokenizerSpec,
)
from everplex.stages.segments import encode_record, encode_segment
from everplex.storage.codec import canonical_json, compress, same_content, sha256_hex
from everplex.storage.errors import ObjectExistsError, ObjectNotFoundError
from everplex.storage.store import Entry, Store

WINDOW = 16
"""Scored tokens of a full window in a made-up plan."""

ENVIRONMENT = Environment(
    everplex="0", torch="0", transformers="0", device_type="cpu", device_name="made up", dtype="float32", threads=1,
    attention="eager",
)  # fmt: skip


class DictStore:
    """A store in a dictionary. `failures` maps a key to the errors that its next `get` calls raise, in order."""

    def __init__(self, url: str = "memory://made-up") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self.failures: dict[str, list[Exception]] = {}
        self.gets: list[str] = []

    def get(self, key: str) -> bytes:
        """Return the bytes of an object."""
        self.gets.append(key)
        if self.failures.get(key):
            raise self.failures[key].pop(0)
        if key not in self.objects:
            raise ObjectNotFoundError("get", f"{self.url}/{key}", "no such object")
        return self.objects[key]

    def create(self, key: str, data: bytes) -> None:
        """Make an object that did not exist."""
        if not same_content(key, self.objects.setdefault(key, data), data):
            raise ObjectExistsError("create", f"{self.url}/{key}", "it holds something else")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`."""
        for key in list(self.objects):
            if key.startswith(prefix):
                yield Entry(key)

    def publish(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        self.objects[key] = data


@dataclass
class Fabric:
    """A made-up corpus: per group the scored tokens of each document, cut into windows and chunks as a plan would.

    Losses depend on the chunk alone, so that any worker gives the same ones; `bias` and `noise_seed` of `record`
    stand for a device that computes something else.
    """

    groups: Mapping[str, Sequence[int]]
    windows_per_chunk: int = 4
    chunk_layout: list[list[tuple[int, int]]] = field(init=False, default_factory=list)
    """Per chunk: (document ordinal, tokens) of each window."""
    plan: Plan = field(init=False)
    run: Run = field(init=False)

    def __post_init__(self) -> None:
        columns: dict[str, list[int]] = {
            name: []
            for name in (
                "group", "ordinal", "windows", "input_tokens", "tokens", "documents", "bytes", "characters", "words",
            )
        }  # fmt: skip
        content: list[str] = []
        specs: list[GroupSpec] = []
        self.tables: dict[str, bytes] = {}
        for index, (name, lengths) in enumerate(self.groups.items()):
            windows = [
                (doc, min(WINDOW, length - start))
                for doc, length in enumerate(lengths)
                for start in range(0, length, WINDOW)
            ]
            started: set[int] = set()
            for ordinal, start in enumerate(range(0, len(windows), self.windows_per_chunk)):
                layout = windows[start : start + self.windows_per_chunk]
                new = {doc for doc, _ in layout} - started
                started |= new
                tokens = sum(count for _, count in layout)
                size = sum(lengths[doc] * 4 for doc in new)
                row = (index, ordinal, len(layout), tokens, tokens, len(new), size, size, sum(lengths[d] for d in new))
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
                content.append(sha256_hex(f"{name}/{ordinal}".encode()))
                self.chunk_layout.append(layout)
            specs.append(self._group(name, lengths))
        self.plan = Plan(
            protocol=ProtocolSpec(name="made-up", version=1, context=WINDOW, label="made up"),
            corpus=CorpusSpec(digest=sha256_hex(repr(sorted(self.groups.items())).encode())),
            tokenizer=TokenizerSpec(name="made-up", digest="0" * 64, vocab_size=16, prefix_id=None),
            chunk_tokens=WINDOW * self.windows_per_chunk,
            groups=specs,
            chunks=ChunkTable(content=content, **columns),
        )
        self.run = Run(plan=self.plan.digest(), model=ModelSpec(name="made-up", digest="1" * 64), dtype="float32")
        self.run_id = self.run.id()
        self.chunk_ids = self.plan.chunk_ids()

    def _group(self, name: str, lengths: Sequence[int]) -> GroupSpec:
        rows = [
            DocumentRow(id=f"{name}-{doc}", tokens=n, bytes=n * 4, characters=n * 4, words=n)
            for doc, n in enumerate(lengths)
        ]
        lines = b"".join(canonical_json(row) + b"\n" for row in rows)
        key = documents_key(group_key(name), 0, sha256_hex(lines))
        self.tables[key] = compress(lines)
        empty = sum(1 for length in lengths if length == 0)
        return GroupSpec(
            name=name,
            key=group_key(name),
            documents=len(lengths),
            windowless=Counts(documents=empty),
            document_tables=[key],
        )

    def save_tables(self, store: Store) -> None:
        """Put the tables of documents where the plan says they are."""
        for key, data in self.tables.items():
            store.create(key, data)

    def losses(self, row: int) -> NDArray[np.float32]:
        """Return the losses of a chunk in plan order, the same for every healthy worker."""
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(self.chunk_ids[row].encode()).digest()[:8], "big"))
        return rng.gamma(2.0, 1.5, sum(count for _, count in self.chunk_layout[row])).astype(np.float32)

    def record(
        self,
        row: int,
        *,
        kind: Kind = "work",
        rank: int | None = 0,
        bias: float = 0.0,
        seconds: float = 0.5,
        nonfinite: bool = False,
        batch_tokens: int = 64,
    ) -> Record:
        """Return the record of evaluating the `row`-th chunk once."""
        losses = (self.losses(row) + np.float32(bias)).astype(np.float32)
        exact = losses.astype(np.float64)
        positions = np.concatenate([np.arange(count) for _, count in self.chunk_layout[row]] or [np.zeros(0, int)])
        buckets = np.frexp(positions.astype(np.float64))[1]  # 0, 1, 2-3, 4-7, …
        documents = np.repeat(
            np.array([doc for doc, _ in self.chunk_layout[row]], int), [count for _, count in self.chunk_layout[row]]
        )
        ordinals = np.unique(documents).tolist()
        ways = range(int(buckets.max(initial=0)) + 1)
        return Record(
            chunk=self.chunk_ids[row],
            content=self.plan.chunks.content[row],
            kind=kind,
            rank=rank,
            nll=None if nonfinite else math.fsum(exact),
            nll_sq=None if nonfinite else math.fsum(exact * exact),
            tokens=len(losses),
            doc_ordinals=ordinals,
            doc_nll=None if nonfinite else [math.fsum(exact[documents == doc]) for doc in ordinals],
            doc_tokens=[int((documents == doc).sum()) for doc in ordinals],
            position_nll=None if nonfinite else [math.fsum(exact[buckets == way]) for way in ways],
            position_tokens=[int((buckets == way).sum()) for way in ways],
            nll_max=None if nonfinite else float(exact.max(initial=0.0)),
            nonfinite=1 if nonfinite else 0,
            token_digest=sha256_hex(losses.astype("<f4").tobytes()),
            batch_tokens=batch_tokens,
            batch_shape=[(len(self.chunk_layout[row]), WINDOW)],
            seconds=seconds,
        )

    def header(
        self,
        worker: str,
        seq: int,
        *,
        first: int | None = None,
        device: str = "host-0/cpu",
        rank: int | None = 0,
        environment: Environment = ENVIRONMENT,
    ) -> Header:
        """Return the header of a worker's `seq`-th segment."""
        return Header(
            run=self.run_id, plan=self.plan.digest(), worker=worker, seq=seq, first=seq if first is None else first,
            rank=rank, world_size=1, device=device, environment=environment, store_requests={"create": seq},
        )  # fmt: skip

    def segment(self, header: Header, records: Iterable[Record]) -> tuple[str, bytes]:
        """Key and bytes of a segment."""
        return encode_segment(header, [encode_record(record) for record in records])

    def put(
        self, store: Store, worker: str, seq: int, records: Iterable[Record], *, device: str = "host-0/cpu",
        first: int | None = None, environment: Environment = ENVIRONMENT,
    ) -> str:  # fmt: skip
        """Write a segment; returns its key."""
        header = self.header(worker, seq, first=first, device=device, environment=environment)
        key, data = self.segment(header, records)
        store.create(key, data)
        return key


def worker_id(number: int) -> str:
    """Return a made-up worker's name: 32 hexadecimal digits."""
    return hashlib.md5(f"worker {number}".encode(), usedforsecurity=False).hexdigest()


def fill(fabric: Fabric, store: Store, *, workers: int = 1, per_segment: int = 1) -> None:
    """Let `workers` workers, each with a device of its own, record the whole plan once."""
    for number in range(workers):
        rows = range(number, len(fabric.plan.chunks), workers)
        for seq, start in enumerate(range(0, len(rows), per_segment), 1):
            records = [fabric.record(row, rank=number) for row in rows[start : start + per_segment]]
            fabric.put(store, worker_id(number), seq, records, device=f"host-{number}/cpu")
