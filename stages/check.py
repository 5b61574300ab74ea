"""Whether a record can be what evaluating its chunk gave: input, counts and values, against the plan."""

import math
import re

import numpy as np

from everplex.stages.layout import chunk_id
from everplex.stages.records import Plan, Record
from everplex.storage.errors import CorruptObjectError

FLOAT32_MAX = 3.4028234663852886e38
SLACK = 1e-6
"""Nats per token: what float32 rounding may put a loss below zero."""
ROUNDING = 1e-9
"""Relative: far above what correctly rounded sums of the same losses may differ by."""
MAX_UNITS = 1 << 40

_SHA256 = re.compile("[0-9a-f]{64}")


class RecordChecker:
    """Finds the plan's row of a record and proves the record possible."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rows: dict[str, list[int]] = {}
        groups, ordinals = np.array(plan.chunks.group, np.int32), np.array(plan.chunks.ordinal, np.int64)
        for index, group in enumerate(plan.groups):
            members = np.flatnonzero(groups == index)
            rows = np.full(int(ordinals[members].max(initial=-1)) + 1, -1, np.int32)
            rows[ordinals[members]] = members
            self._rows[group.key] = rows.tolist()

    def row(self, record: Record) -> int:
        """Row of the record's chunk in the plan. Raises CorruptObjectError with what is wrong with the record."""
        row = self._find(record.chunk)
        chunks = self._plan.chunks
        if record.content != chunks.content[row]:
            raise _wrong(record, "content", chunks.content[row][:24], record.content[:24])
        if record.tokens != chunks.tokens[row]:
            raise _wrong(record, "scored tokens", chunks.tokens[row], record.tokens)
        if record.tokens != sum(record.doc_tokens) or record.tokens != sum(record.position_tokens):
            raise _wrong(record, "tokens of its documents and positions", record.tokens, sum(record.doc_tokens))
        if not _SHA256.fullmatch(record.token_digest):
            raise _wrong(record, "digest of its losses", "64 hexadecimal digits", record.token_digest[:80])
        self._check_units(record, chunks.group[row])
        if record.nonfinite == 0:
            _check_values(record)
        elif record.nonfinite < 0 or record.nll is not None:
            raise _wrong(record, "no sum beside a non-finite loss", None, record.nll)
        return row

    def _find(self, chunk: str) -> int:
        key, _, tail = chunk.rpartition("/")
        rows = self._rows.get(key)
        if rows is not None and tail.isdecimal() and tail.isascii():
            ordinal = int(tail)
            if ordinal < len(rows) and rows[ordinal] >= 0 and chunk == chunk_id(key, ordinal):
                return rows[ordinal]
        raise CorruptObjectError(f"the plan has no chunk {chunk}")

    def _check_units(self, record: Record, group: int) -> None:
        ordinals = record.doc_ordinals
        if len(ordinals) != len(record.doc_tokens) or ordinals != sorted(set(ordinals)):
            raise _wrong(record, "rising ordinals, one per document", len(record.doc_tokens), len(ordinals))
        if min(record.doc_tokens, default=1) < 0 or min(record.position_tokens, default=1) < 0:
            raise _wrong(record, "counts of tokens", "none below 0", "a negative one")
        if not ordinals:
            return
        limit = self._plan.groups[group].documents if self._plan.protocol.unit == "document" else MAX_UNITS
        if ordinals[0] < 0 or ordinals[-1] >= limit:
            raise _wrong(record, "ordinals of documents", f"0 to {limit - 1}", f"{ordinals[0]} to {ordinals[-1]}")


def _check_values(record: Record) -> None:
    nll, nll_sq, tokens = record.nll, record.nll_sq, record.tokens
    if nll is None or nll_sq is None or record.doc_nll is None or record.position_nll is None:
        raise _wrong(record, "sums of finite losses", "numbers", "null")
    if len(record.doc_nll) != len(record.doc_tokens) or len(record.position_nll) != len(record.position_tokens):
        raise _wrong(record, "sums", "one per count", f"{len(record.doc_nll)} and {len(record.position_nll)}")
    _check_parts(record, nll, "documents", record.doc_nll)
    _check_parts(record, nll, "positions", record.position_nll)
    if not all(map(math.isfinite, (record.seconds, nll_sq, *record.sums.values()))):
        values = {"seconds": record.seconds, "nll_sq": nll_sq, **record.sums}
        name = next(name for name, value in values.items() if not math.isfinite(value))
        raise _wrong(record, name, "a finite number", values[name])
    largest = record.nll_max if tokens else 0.0
    if largest is None or not largest <= FLOAT32_MAX:
        raise _wrong(record, "largest loss", "a float32", largest)
    if not -SLACK * tokens <= nll <= largest * tokens + abs(nll) * ROUNDING:
        raise _wrong(record, "loss in nats", f"0 to {largest * tokens:g}", nll)
    # Cauchy-Schwarz: no losses with this sum have a smaller sum of squares
    if nll_sq * tokens < nll * nll * (1 - ROUNDING):
        raise _wrong(record, "sum of squared losses", f"at least {nll * nll / tokens:g}", nll_sq)


def _check_parts(record: Record, nll: float, name: str, parts: list[float]) -> None:
    if not abs(sum(parts) - nll) <= abs(nll) * ROUNDING + SLACK:
        raise _wrong(record, f"loss over its {name}", nll, sum(parts))


def _wrong(record: Record, what: str, expected: object, found: object) -> CorruptObjectError:
    return CorruptObjectError(f"chunk {record.chunk}: {what}: expected {expected}, found {found}")
