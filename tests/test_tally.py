"""Records against exact rational sums."""

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everplex.stages.chunk import Chunk
from everplex.stages.tally import Losses, make_record

Case = tuple[Chunk, Losses]


def losses_of(values: list[float]) -> Losses:
    """Return losses as the evaluator gives them."""
    return Losses(nll_S=np.asarray(values, dtype=np.float64), batch_shape=[(1, 2)], batch_tokens=8, seconds=0.5)


@st.composite
def cases(draw: st.DrawFn, *, weights: bool = False) -> Case:
    """Draw a chunk of rows of any documents, with any mask, and its losses."""
    lengths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=8))
    targets = sum(lengths) - len(lengths)
    scored = draw(st.lists(st.booleans(), min_size=targets, max_size=targets))
    documents = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    chunk = Chunk(
        tokens_N=np.zeros(sum(lengths), dtype=np.int32),
        row_lengths_R=np.asarray(lengths, dtype=np.int32),
        scored_M=np.asarray(scored, dtype=np.bool_),
        row_documents_R=np.asarray(documents, dtype=np.int64),
        row_weights_R=np.linspace(1, 2, len(lengths)) if weights else None,
    )
    values = draw(st.lists(st.floats(0, 1e6), min_size=sum(scored), max_size=sum(scored)))
    return chunk, losses_of(values)


def exact(values: list[float]) -> float:
    """Return the correctly rounded sum."""
    return float(sum(map(Fraction, values), Fraction(0)))


def listing(chunk: Chunk, losses: Losses) -> list[tuple[int, int, int, float]]:
    """Return row, document, position and loss of every scored target, by a plain loop."""
    values = iter(losses.nll_S.tolist())
    return [
        (index, row.document, position, next(values))
        for index, row in enumerate(chunk.rows())
        for position in range(len(row.scored))
        if row.scored[position]
    ]


@given(cases())
def test_every_sum_is_correctly_rounded(case: Case) -> None:
    """Sums of a chunk, of each document and of each range of positions are exact sums, rounded once."""
    chunk, losses = case
    record = make_record("c", "d", chunk, losses, kind="audit", rank=3)
    rows = listing(chunk, losses)
    assert (record.chunk, record.content, record.kind, record.rank) == ("c", "d", "audit", 3)
    assert record.tokens == len(rows)
    assert record.nonfinite == 0
    assert record.nll == exact([nll for *_, nll in rows])
    assert record.nll_sq == exact([nll * nll for *_, nll in rows])
    assert record.nll_max == max((nll for *_, nll in rows), default=None)
    assert record.doc_ordinals == sorted({document for _, document, _, _ in rows})
    assert record.doc_nll == [
        exact([nll for _, d, _, nll in rows if d == document]) for document in record.doc_ordinals
    ]
    assert record.doc_tokens == [sum(d == document for _, d, _, _ in rows) for document in record.doc_ordinals]
    buckets = [0 if position == 0 else int(math.log2(position)) + 1 for _, _, position, _ in rows]
    count = max(buckets, default=-1) + 1
    assert record.position_tokens == [buckets.count(bucket) for bucket in range(count)]
    assert record.position_nll == [
        exact([row[3] for row, b in zip(rows, buckets, strict=True) if b == bucket]) for bucket in range(count)
    ]
    assert record.token_digest == hashlib.sha256(losses.nll_S.astype("<f4").tobytes()).hexdigest()


@given(cases(weights=True))
def test_weighted_rows(case: Case) -> None:
    """Where rows have weights, the sums of weight times the row's mean loss and of the weights are there as well."""
    chunk, losses = case
    assert chunk.row_weights_R is not None
    rows = listing(chunk, losses)
    expected = Fraction(0)
    for index in {row for row, *_ in rows}:
        values = [Fraction(nll) for row, _, _, nll in rows if row == index]
        expected += Fraction(float(chunk.row_weights_R[index])) * sum(values) / len(values)
    sums = make_record("c", "d", chunk, losses).sums
    assert sums["weighted_nll"] == pytest.approx(float(expected), rel=1e-15)
    assert sums["weights"] == math.fsum(chunk.row_weights_R[sorted({row for row, *_ in rows})])


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, -math.inf], [1.0, math.inf]])
def test_losses_that_are_not_finite_are_counted(bad: list[float]) -> None:
    """A loss that is not finite leaves every sum null and is counted; the counts of tokens stay."""
    chunk = Chunk(
        tokens_N=np.zeros(3, dtype=np.int32),
        row_lengths_R=np.asarray([3], dtype=np.int32),
        scored_M=np.ones(2, dtype=np.bool_),
        row_documents_R=np.asarray([5], dtype=np.int64),
        row_weights_R=np.ones(1),
    )
    record = make_record("c", "d", chunk, losses_of(bad))
    assert record.nonfinite == sum(not math.isfinite(value) for value in bad)
    assert (record.nll, record.nll_sq, record.doc_nll, record.position_nll, record.nll_max) == (None,) * 5
    assert (record.tokens, record.doc_tokens, record.position_tokens, record.sums) == (2, [2], [1, 1], {})
