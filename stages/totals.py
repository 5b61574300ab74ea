"""Adds up the records that count: exact tallies per group and worker, whatever the number of chunks and documents.

Records are buffered and added as arrays. A document inside one chunk goes straight into the products that the error
bar needs; the first and last document of a chunk may go on in its neighbours, so their parts are kept until the end.

Shape legend: V values, D documents.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everplex.stages.exact import UNIT_EXPONENT, Tally, from_units, products, sum_by_key
from everplex.stages.records import Plan, Record
from everplex.storage.errors import CorruptObjectError

BUFFERED_VALUES = 1 << 17

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


class Totals:
    """Sums of the records that count. `add` in any order, then `finish` once."""

    def __init__(self, plan: Plan, covered: Mapping[int, NDArray[np.bool_]] | None = None) -> None:
        """`covered` says per group which documents are wholly counted; None where all are."""
        self._groups = plan.chunks.group
        self._by_document = plan.protocol.unit == "document"
        self._covered = covered
        self.tallies: dict[Scope, Tally] = {("group", index): Tally() for index in range(len(plan.groups))}
        self._edges: list[Parts] = []
        self._clear()

    def add(self, row: int, worker: str, record: Record) -> None:
        """Count the record of the plan's `row`-th chunk."""
        nll, nll_sq, doc_nll, position_nll = record.nll, record.nll_sq, record.doc_nll, record.position_nll
        if nll is None or nll_sq is None or doc_nll is None or position_nll is None:
            raise CorruptObjectError(f"chunk {record.chunk}: expected finite losses, found none")
        group = self._groups[row]
        scope: Scope = ("group", group)
        by_worker: Scope = ("worker", worker)
        self._sum(scope, "nll", nll)
        self._sum(scope, "nll_sq", nll_sq)
        self._sum(by_worker, "nll", nll)
        self._sum(by_worker, "seconds", record.seconds)
        for name, value in record.sums.items():
            self._sum(scope, f"sums/{name}", value)
        for bucket, value in enumerate(position_nll):
            self._sum(scope, f"position_nll/{bucket}", value)
        tally, worker_tally = self._tally(scope), self._tally(by_worker)
        tally.count("tokens", record.tokens)
        worker_tally.count("tokens", record.tokens)
        worker_tally.count("chunks", 1)
        for bucket, number in enumerate(record.position_tokens):
            tally.count(f"position_tokens/{bucket}", number)
        self._doc_groups += [group] * len(doc_nll)
        self._doc_ordinals += record.doc_ordinals
        self._doc_nll += doc_nll
        self._doc_tokens += record.doc_tokens
        self._doc_counts.append(len(doc_nll))
        if len(self._values) + len(self._doc_nll) >= BUFFERED_VALUES:
            self._flush()

    def flush(self) -> Parts:
        """Add what is buffered; returns the parts of documents that may go on in other chunks."""
        self._flush()
        edges = concatenate(self._edges)
        self._edges = []
        return edges

    def finish(self, edges: Parts) -> dict[Scope, Tally]:
        """Put documents together from their parts, given all of them, and return the tallies."""
        self._add_units(_join(edges))
        if self._covered is None:
            for (kind, _), tally in self.tallies.items():
                if kind == "group":
                    tally.sums["covered_nll"] = tally.units("nll")
        return self.tallies

    def _tally(self, scope: Scope) -> Tally:
        return self.tallies.setdefault(scope, Tally())

    def _sum(self, scope: Scope, name: str, value: float) -> None:
        self._keys.append(self._names.setdefault((scope, name), len(self._names)))
        self._values.append(value)

    def _clear(self) -> None:
        self._names: dict[tuple[Scope, str], int] = {}
        self._keys: list[int] = []
        self._values: list[float] = []
        self._doc_groups: list[int] = []
        self._doc_ordinals: list[int] = []
        self._doc_nll: list[float] = []
        self._doc_tokens: list[int] = []
        self._doc_counts: list[int] = []

    def _flush(self) -> None:
        sums = sum_by_key(self._keys, self._values, len(self._names))
        for (scope, name), key in self._names.items():
            self._tally(scope).add_units(name, sums[key])
        parts = Parts(
            np.array(self._doc_groups, np.int64), np.array(self._doc_ordinals, np.int64),
            np.array(self._doc_nll, np.float64), np.array(self._doc_tokens, np.int64),
        )  # fmt: skip
        inner = np.ones(len(parts.nll_D), np.bool_)
        if self._by_document:
            counts = np.array(self._doc_counts, np.int64)
            ends = np.cumsum(counts)[counts > 0]
            inner[ends - 1] = False
            inner[ends - counts[counts > 0]] = False
        self._edges.append(parts.take(~inner))
        self._add_units(parts.take(inner))
        self._clear()

    def _add_units(self, parts: Parts) -> None:
        """Add whole sampling units of loss s and n tokens: s, s*s, s*n, n, n*n, each exact."""
        group, ordinal, nll, tokens = parts.take(parts.tokens_D > 0)
        groups, index = np.unique(group, return_inverse=True)
        scopes: list[Scope] = [("group", int(key)) for key in groups]
        n = tokens.astype(np.float64)
        self._sum_units(scopes, index, "unit_nll", [nll])
        self._sum_units(scopes, index, "unit_nll_sq", products(nll, nll))
        self._sum_units(scopes, index, "unit_nll_tokens", products(nll, n))
        self._count_units(scopes, index, "units", [np.ones_like(n)])
        self._count_units(scopes, index, "unit_tokens", [n])
        self._count_units(scopes, index, "unit_tokens_sq", products(n, n))
        if not self._by_document:
            return
        if self._covered is not None:
            pairs = zip(group.tolist(), ordinal.tolist(), strict=True)
            whole = np.array([self._covered[key][document] for key, document in pairs], np.bool_)
            group, index, nll, n = group[whole], index[whole], nll[whole], n[whole]
            self._sum_units(scopes, index, "covered_nll", [nll])
        buckets = np.frexp(n)[1]
        for bucket in np.unique(buckets).tolist():
            mine = buckets == bucket
            self._sum_units(scopes, index[mine], f"length_nll/{bucket}", [nll[mine]])
            self._count_units(scopes, index[mine], f"length_tokens/{bucket}", [n[mine]])

    def _sum_units(
        self, scopes: list[Scope], index: NDArray[np.int64], name: str, parts: Iterable[NDArray[np.float64]]
    ) -> None:
        for part in parts:
            for scope, units in zip(scopes, sum_by_key(index, part, len(scopes)), strict=True):
                self._tally(scope).add_units(name, units)

    def _count_units(
        self, scopes: list[Scope], index: NDArray[np.int64], name: str, parts: Iterable[NDArray[np.float64]]
    ) -> None:
        """Count as sums are added, so that nothing can wrap."""
        for part in parts:
            for scope, units in zip(scopes, sum_by_key(index, part, len(scopes)), strict=True):
                self._tally(scope).count(name, units >> UNIT_EXPONENT)


def _join(edges: Parts) -> Parts:
    """Whole documents from their parts in several chunks, their losses rounded once."""
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
