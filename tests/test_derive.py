"""Numbers from sums: the formulas against plain ones, the error bar's coverage, what has no value."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everplex.stages.derive import clustered_error, derive, iid_error, macro, perplexity, positions
from everplex.stages.exact import Tally, products
from everplex.stages.records import Counts, ProtocolSpec

PROTOCOL = ProtocolSpec(name="made-up", version=1, context=8, label="made up")
COUNTS = Counts(documents=2, bytes=100, characters=80, words=20)


def _tally(units: Sequence[Sequence[float]]) -> Tally:
    """Tally of sampling units given as their tokens' losses."""
    tally = Tally()
    for losses in units:
        loss = math.fsum(losses)
        for token in losses:
            tally.add("nll", token)
            tally.add("covered_nll", token)
            tally.add("nll_sq", token * token)
        tally.add("unit_nll", loss)
        for part in products([loss], [loss]):
            tally.add("unit_nll_sq", float(part[0]))
        for part in products([loss], [len(losses)]):
            tally.add("unit_nll_tokens", float(part[0]))
        for name, number in {
            "tokens": len(losses), "units": 1, "unit_tokens": len(losses), "unit_tokens_sq": len(losses) ** 2,
        }.items():  # fmt: skip
            tally.count(name, number)
    return tally


def test_numbers_are_ratios_of_sums() -> None:
    """Every number is the exponential of the loss over its own denominator."""
    numbers = derive(_tally([[1.0, 2.0], [3.0]]), COUNTS, PROTOCOL)
    assert (numbers.nll, numbers.tokens, numbers.documents, numbers.units) == (6.0, 3, 2, 2)
    assert numbers.perplexity == math.exp(2.0)
    assert numbers.byte_perplexity == math.exp(0.06)
    assert numbers.character_perplexity == math.exp(6 / 80)
    assert numbers.word_perplexity == math.exp(0.3)
    assert numbers.bits_per_byte == pytest.approx(0.06 / math.log(2))


def test_an_unscored_source_token_leaves_no_number_per_byte_or_word() -> None:
    """A protocol that leaves source tokens unscored has no numbers per byte, character or word."""
    protocol = ProtocolSpec(name="made-up", version=1, context=8, label="made up", complete=False)
    numbers = derive(_tally([[1.0, 2.0], [3.0]]), COUNTS, protocol)
    assert numbers.perplexity == math.exp(2.0)
    assert [numbers.byte_perplexity, numbers.bits_per_byte, numbers.word_perplexity] == [None, None, None]
    assert numbers.bytes == 100


def test_nothing_scored_gives_nothing() -> None:
    """Without a token there is no mean, and without two units or tokens no error."""
    numbers = derive(Tally(), Counts(), PROTOCOL)
    assert [numbers.perplexity, numbers.stderr, numbers.stderr_iid, numbers.bits_per_byte] == [None] * 4
    assert macro([numbers]) is None
    one = derive(_tally([[1.0, 2.0]]), COUNTS, PROTOCOL)
    assert one.stderr is None
    assert one.perplexity_low is None
    assert one.stderr_iid is not None


def test_a_perplexity_beyond_every_float_is_none() -> None:
    """JSON has no infinity."""
    assert perplexity(1e9, 2) is None
    assert perplexity(709.0, 1) == math.exp(709.0)


@pytest.mark.parametrize("units", [[[1.25] * 3] * 7, [[math.log(49152)] * 5] * 3, [[0.1] * 8] * 9, [[0.0], [0.0]]])
def test_equal_documents_have_no_error(units: list[list[float]]) -> None:
    """A uniform model or equal documents give an error of zero, not a negative root or a NaN."""
    assert clustered_error(_tally(units)) == 0.0
    assert iid_error(_tally(units)) == pytest.approx(0.0, abs=1e-7)


@given(st.lists(st.lists(st.floats(0, 50, width=32), min_size=1, max_size=6), min_size=2, max_size=12))
def test_the_error_equals_the_two_pass_one(units: list[list[float]]) -> None:
    """The expanded residual sum equals the sum of squared residuals."""
    tokens = sum(map(len, units))
    ratio = math.fsum(loss for unit in units for loss in unit) / tokens
    residuals = math.fsum((math.fsum(unit) - ratio * len(unit)) ** 2 for unit in units)
    expected = math.sqrt(residuals * len(units) / (len(units) - 1)) / tokens
    assert clustered_error(_tally(units)) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_tiny_spread_on_a_large_mean_does_not_cancel() -> None:
    """Where one pass in floats would lose every digit, the error keeps them."""
    units = [[1e9 + 1e-3 * (-1) ** index] for index in range(100)]
    expected = float(np.std([unit[0] for unit in units], ddof=1)) / 10
    assert clustered_error(_tally(units)) == pytest.approx(expected, rel=1e-3)


def test_the_interval_covers_the_truth_where_tokens_are_correlated() -> None:
    """The 95 % interval holds its promise over documents; the one over tokens does not."""
    rng = np.random.default_rng(1)
    clustered = iid = 0
    draws = 400
    for _ in range(draws):
        lengths = rng.integers(5, 30, 60)
        units = [(3.0 + rng.normal(0, 0.5) + rng.normal(0, 0.7, length)).tolist() for length in lengths]
        numbers = derive(_tally(units), COUNTS, PROTOCOL)
        assert numbers.stderr is not None
        assert numbers.stderr_iid is not None
        distance = abs(numbers.nll / numbers.tokens - 3.0)
        clustered += distance < 1.96 * numbers.stderr
        iid += distance < 1.96 * numbers.stderr_iid
    assert 0.91 < clustered / draws < 0.98
    assert iid / draws < 0.75


def test_macro_is_the_mean_of_the_groups() -> None:
    """Each group counts once, whatever its size."""
    one, other = (derive(_tally(units), COUNTS, PROTOCOL) for units in ([[1.0] * 9], [[3.0]]))
    assert macro([one, other]) == pytest.approx(math.exp(2.0))


def test_positions_are_powers_of_two() -> None:
    """Buckets cover 0, 1, 2-3, 4-7 and so on; empty ones are left out."""
    tally = Tally()
    for bucket, tokens in enumerate([1, 1, 0, 4]):
        tally.add(f"position_nll/{bucket}", float(bucket))
        tally.count(f"position_tokens/{bucket}", tokens)
    assert [(row.start, row.end, row.nll, row.tokens) for row in positions(tally, "position")] == [
        (0, 0, 0.0, 1),
        (1, 1, 1.0, 1),
        (4, 7, 3.0, 4),
    ]
