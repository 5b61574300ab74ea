"""Adds up the records that count: exact tallies per group and worker, whatever the number of chunks and documents.

Records are buffered and added as arrays. A document inside one chunk goes straight into the products that the error
bar needs; the first and last document of a chunk may go on in its neighbours, so their parts are kept until the end.

Shape legend: V values, D documents.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from everplex.stages.copies import Source
from everplex.stages.exact import UNIT_EXPONENT, Tally, from_units, products, sum_by_key
from everplex.stages.ledger import Ledger
from everplex.stages.records import Plan, Record

BUFFERED_VALUES = 1 << 17

_Number = TypeVar("_Number", np.float64, np.int64)

Scope = tuple[str, int | str]
"""Whose tally: ("group", index in the plan) or ("worker", name)."""


class Parts(NamedTuple):
    """What chunks add to documents."""

    group_D: NDArray[np.int64]
    ordinal_D: NDArray[np.int64]
    nll_D: NDArray[np.float64]
    tokens_D: NDArray[np.int64]

    def take(self, where: NDArray[np.bool_] | NDArray[np.int64]) -> "Parts":
        """Return the parts at which `where` is true, or in the order that indices give."""
        return Parts(self.group_D[where], self.ordinal_D[where], self.nll_D[where], self.tokens_D[where])


def concatenate(several: Sequence[Parts]) -> Parts:
    """Return all parts of several lots."""
    several = [NO_PARTS, *several]
    return Parts(
        np.concatenate([parts.group_D for parts in several]),
        np.concatenate([parts.ordinal_D for parts in several]),
        np.concatenate([parts.nll_D for parts in several]),
        np.concatenate([parts.tokens_D for parts in several]),
    )


NO_PARTS = Parts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))


def document_parts(groups: Sequence[int], records: Sequence[Record]) -> Parts:
    """Return what finite records of chunks in these groups add to documents."""
    counts = np.array([len(record.doc_tokens) for record in records], np.int64)
    return Parts(
        np.repeat(np.array(groups, np.int64), counts),
        _flat((record.doc_ordinals for record in records), np.int64),
        _flat((record.doc_nll or () for record in records), np.float64),
        _flat((record.doc_tokens for record in records), np.int64),
    )


def read_copies(ledger: Ledger, copies: NDArray[np.int64]) -> Iterator[tuple[Source, list[int], list[Record]]]:
    """Read these rows of the ledger's table back: by source, the rows of the plan and the records."""
    table = ledger.copies.table
    copies = copies[np.lexsort((table["line"][copies], table["source"][copies]))]
    sources, starts = np.unique(table["source"][copies], return_index=True)
    lines = dict(zip(sources.tolist(), np.split(table["line"][copies], starts[1:]), strict=False))
    chunks = np.split(table["chunk"][copies], starts[1:])  # of nothing, one empty piece
    for of_source, (source, records) in zip(chunks, ledger.records(lines), strict=False):
        yield source, of_source.tolist(), records


class Totals:
    """Sums of the records that count: `add` them in any order, then `flush` and `finish` once."""

    def __init__(self, plan: Plan, covered: Mapping[int, NDArray[np.bool_]] | None = None) -> None:
        """`covered` says per group which documents are wholly counted; None where all are."""
        self._groups = plan.chunks.group
        self._by_document = plan.protocol.unit == "document"
        self._covered = covered
        self.tallies: dict[Scope, Tally] = {("group", index): Tally() for index in range(len(plan.groups))}
        self._edges: list[Parts] = []
        self._rows: list[tuple[int, str, Record]] = []
        self._num_buffered = 0

    def add(self, row: int, worker: str, record: Record) -> None:
        """Count the finite record of the plan's `row`-th chunk."""
        self._rows.append((self._groups[row], worker, record))
        self._num_buffered += len(record.doc_tokens) + len(record.position_tokens)
        if self._num_buffered >= BUFFERED_VALUES:
            self._add_rows()

    def add_copies(self, ledger: Ledger, copies: NDArray[np.int64]) -> list[str]:
        """Count these rows of the ledger's table; returns the keys of their segments."""
        keys = []
        for source, chunks, records in read_copies(ledger, copies):
            keys.append(source.key)
            for chunk, record in zip(chunks, records, strict=True):
                self.add(chunk, source.worker, record)
        return keys

    def flush(self) -> Parts:
        """Add what is buffered; returns the parts of documents that may go on in other chunks."""
        self._add_rows()
        edges = concatenate(self._edges)
        self._edges = []
        return edges

    def finish(self, edges: Parts) -> dict[Scope, Tally]:
        """Put documents together from their parts, given all of them, and return the tallies."""
        for slab in _slabs(edges):
            self._add_units(join(slab))
        if self._covered is None:
            for (kind, _), tally in self.tallies.items():
                if kind == "group":
                    tally.sums["covered_nll"] = tally.units("nll")
        return self.tallies

    def _add_rows(self) -> None:
        rows, self._rows, self._num_buffered = self._rows, [], 0
        records = [record for _, _, record in rows]
        groups, group_index = _scopes("group", [group for group, _, _ in rows])
        workers, worker_index = _scopes("worker", [worker for _, worker, _ in rows])
        nll = np.array([record.nll for record in records], np.float64)
        tokens = np.array([record.tokens for record in records], np.float64)
        self._sum(groups, group_index, "nll", [nll])
        self._sum(groups, group_index, "nll_sq", [np.array([record.nll_sq for record in records], np.float64)])
        self._count(groups, group_index, "tokens", [tokens])
        self._sum(workers, worker_index, "nll", [nll])
        self._sum(workers, worker_index, "seconds", [np.array([record.seconds for record in records], np.float64)])
        self._count(workers, worker_index, "tokens", [tokens])
        self._count(workers, worker_index, "chunks", [np.ones_like(tokens)])
        for group, _, record in rows:
            for name, value in record.sums.items():
                self._tally(("group", group)).add(f"sums/{name}", value)
        self._add_positions(groups, group_index, records)
        self._add_documents([group for group, _, _ in rows], records)

    def _add_positions(self, groups: list[Scope], group_index: NDArray[np.int64], records: list[Record]) -> None:
        counts = np.array([len(record.position_tokens) for record in records], np.int64)
        index = np.repeat(group_index, counts)
        buckets = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        nll = _flat((record.position_nll or () for record in records), np.float64)
        tokens = _flat((record.position_tokens for record in records), np.float64)
        for bucket in range(counts.max(initial=0)):
            mine = buckets == bucket
            self._sum(groups, index[mine], f"position_nll/{bucket}", [nll[mine]])
            self._count(groups, index[mine], f"position_tokens/{bucket}", [tokens[mine]])

    def _add_documents(self, groups: list[int], records: list[Record]) -> None:
        parts = document_parts(groups, records)
        inner = np.ones(len(parts.nll_D), np.bool_)
        if self._by_document:
            counts = np.array([len(record.doc_tokens) for record in records], np.int64)
            ends = np.cumsum(counts)[counts > 0]
            inner[ends - 1] = False
            inner[ends - counts[counts > 0]] = False
        self._edges.append(parts.take(~inner))
        self._add_units(parts.take(inner))

    def _tally(self, scope: Scope) -> Tally:
        return self.tallies.setdefault(scope, Tally())

    def _add_units(self, parts: Parts) -> None:
        """Add whole sampling units of loss s and n tokens: s, s*s, s*n, n, n*n, each exact."""
        group, ordinal, nll, tokens = parts.take(parts.tokens_D > 0)
        scopes, index = _scopes("group", group.tolist())
        n = tokens.astype(np.float64)
        self._sum(scopes, index, "unit_nll", [nll])
        self._sum(scopes, index, "unit_nll_sq", products(nll, nll))
        self._sum(scopes, index, "unit_nll_tokens", products(nll, n))
        self._count(scopes, index, "units", [np.ones_like(n)])
        self._count(scopes, index, "unit_tokens", [n])
        self._count(scopes, index, "unit_tokens_sq", products(n, n))
        if not self._by_document:
            return
        if self._covered is not None:
            pairs = zip(group.tolist(), ordinal.tolist(), strict=True)
            whole = np.array([self._covered[key][document] for key, document in pairs], np.bool_)
            group, index, nll, n = group[whole], index[whole], nll[whole], n[whole]
            self._sum(scopes, index, "covered_nll", [nll])
        buckets = np.frexp(n)[1]
        for bucket in np.unique(buckets).tolist():
            mine = buckets == bucket
            self._sum(scopes, index[mine], f"length_nll/{bucket}", [nll[mine]])
            self._count(scopes, index[mine], f"length_tokens/{bucket}", [n[mine]])

    def _sum(
        self, scopes: list[Scope], index: NDArray[np.int64], name: str, parts: Iterable[NDArray[np.float64]]
    ) -> None:
        for part in parts:
            for scope, units in zip(scopes, sum_by_key(index, part, len(scopes)), strict=True):
                self._tally(scope).add_units(name, units)

    def _count(
        self, scopes: list[Scope], index: NDArray[np.int64], name: str, parts: Iterable[NDArray[np.float64]]
    ) -> None:
        """Count as sums are added, so that nothing can wrap."""
        for part in parts:
            for scope, units in zip(scopes, sum_by_key(index, part, len(scopes)), strict=True):
                self._tally(scope).count(name, units >> UNIT_EXPONENT)


def _scopes(kind: str, keys: Sequence[int | str]) -> tuple[list[Scope], NDArray[np.int64]]:
    """Return the distinct scopes and, per key, which of them it is."""
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [(kind, key) for key in places], np.array([places[key] for key in keys], np.int64)


def _flat(lists: Iterable[Sequence[float]], kind: type[_Number]) -> NDArray[_Number]:
    return np.array(list(chain.from_iterable(lists)), kind)


def _slabs(edges: Parts) -> Iterator[Parts]:
    """Cut parts, sorted by document, between documents into lots of bounded size."""
    order = np.lexsort((edges.ordinal_D, edges.group_D))
    group, ordinal = edges.group_D[order], edges.ordinal_D[order]
    ends = np.flatnonzero((np.diff(group, append=-1) != 0) | (np.diff(ordinal, append=-1) != 0)) + 1
    start = 0
    while start < len(order):
        end = int(ends[np.searchsorted(ends, min(start + BUFFERED_VALUES, len(order)))])
        yield edges.take(order[start:end])
        start = end


def join(edges: Parts) -> Parts:
    """Return whole documents, sorted, from their parts in several chunks, their losses rounded once."""
    if not len(edges.nll_D):
        return edges
    group, ordinal, nll, tokens = edges.take(np.lexsort((edges.ordinal_D, edges.group_D)))
    new = np.ones(len(nll), np.bool_)
    new[1:] = (np.diff(group) != 0) | (np.diff(ordinal) != 0)
    starts = np.flatnonzero(new)
    whole = np.add.reduceat(nll, starts)  # one rounding for one part or two
    long = np.diff(np.append(starts, len(nll))) > 2
    of_long = long[np.cumsum(new) - 1]
    keys = (np.cumsum(long) - 1)[np.cumsum(new) - 1][of_long]
    whole[long] = [from_units(units) for units in sum_by_key(keys, nll[of_long], int(long.sum()))]
    return Parts(group[starts], ordinal[starts], whole, np.add.reduceat(tokens, starts))
