"""Exact sums, with fractions as the oracle."""

import math
import random
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everplex.stages.exact import (
    NUM_LIMBS,
    SAFE_ADDITIONS,
    Tally,
    check_additions,
    from_limbs,
    from_units,
    products,
    sum_by_key,
    to_limbs,
    to_units,
)
from everplex.storage.errors import IntegrityError

finite = st.floats(allow_nan=False, allow_infinity=False)
EXTREMES = [5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, -1.7976931348623157e308, 0.0, -0.0, 1.0]


def sum_units(values: Iterable[float]) -> int:
    """Add up one by one."""
    return sum(map(to_units, values))


def _exact(units: int) -> Fraction:
    return Fraction(units, 2**1074)


@given(finite)
def test_a_float_survives(value: float) -> None:
    """Every finite float is a whole number of units and comes back unchanged."""
    assert _exact(to_units(value)) == Fraction(value)
    assert from_units(to_units(value)) == value


@given(st.lists(finite | st.sampled_from(EXTREMES), max_size=30))
def test_sums_are_exact_over_the_whole_range(values: list[float]) -> None:
    """The sum is the exact one, and it is rounded as a fraction is."""
    units = sum_units(values)
    exact = sum(map(Fraction, values), Fraction(0))
    assert _exact(units) == exact
    try:
        expected = float(exact)
    except OverflowError:
        with pytest.raises(OverflowError):
            from_units(units)
    else:
        assert from_units(units) == expected


def test_partial_sums_may_overflow() -> None:
    """A sum whose partial sums exceed every float is found where `math.fsum` gives up."""
    values = [1.7e308, 1.7e308, -1.7e308, -1.7e308, 1.0]
    with pytest.raises(OverflowError):
        math.fsum(values)
    assert from_units(sum_units(values)) == 1.0


def test_rounds_half_to_even() -> None:
    """A sum half-way between two floats goes to the even one, however it was reached."""
    assert from_units(sum_units([1.0, 2.0**-53])) == 1.0
    assert from_units(sum_units([1.0, 2.0**-53, 5e-324])) == 1.0 + 2.0**-52


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_refuses_what_is_not_finite(value: float) -> None:
    """Infinity and NaN are no numbers of units."""
    with pytest.raises((OverflowError, ValueError)):
        to_units(value)
    with pytest.raises(ValueError, match="finite"):
        sum_by_key([0], [value], 1)


@given(st.lists(st.tuples(st.integers(0, 3), finite | st.sampled_from(EXTREMES)), max_size=40))
def test_arrays_add_as_single_values_do(pairs: list[tuple[int, float]]) -> None:
    """Adding whole arrays by key equals adding one value after another."""
    sums = sum_by_key([key for key, _ in pairs], [value for _, value in pairs], 4)
    assert sums == [sum_units(value for key, value in pairs if key == wanted) for wanted in range(4)]


losses = st.floats(0, 2.0**150).map(lambda value: math.ldexp(round(math.ldexp(value, 149)), -149))


@given(losses, losses)
def test_products_lose_nothing(one: float, other: float) -> None:
    """What rounding took from a product of losses is handed over beside it."""
    rounded, lost = products([one], [other])
    assert rounded[0] == one * other
    assert Fraction(rounded[0]) + Fraction(lost[0]) == Fraction(one) * Fraction(other)


@given(st.lists(st.lists(finite, max_size=8), min_size=1, max_size=6))
def test_limbs_add_to_the_same_sum(parts: list[list[float]]) -> None:
    """Limbs of parts, added limb by limb, are the limbs of the whole."""
    total = np.sum([to_limbs([sum_units(part)]) for part in parts], axis=0)
    assert from_limbs(total) == [sum_units(value for part in parts for value in part)]


def test_limbs_leave_room_for_the_stated_number_of_additions() -> None:
    """The largest normalised limbs can be added as often as stated without wrapping, and no more is accepted."""
    largest = (1 << 32 * NUM_LIMBS) - 1
    limbs = to_limbs([largest, -largest])
    assert from_limbs(limbs * SAFE_ADDITIONS) == [largest * SAFE_ADDITIONS, -largest * SAFE_ADDITIONS]
    check_additions(SAFE_ADDITIONS)
    with pytest.raises(IntegrityError, match="add in parts"):
        check_additions(SAFE_ADDITIONS + 1)
    with pytest.raises(OverflowError):
        to_limbs([largest + 1])


@given(st.randoms(use_true_random=False), st.lists(finite, min_size=1, max_size=30))
def test_tallies_do_not_depend_on_order_or_split(rng: random.Random, values: list[float]) -> None:
    """However values are shuffled and split among tallies, the sum of the tallies is equal."""
    whole = Tally()
    parts = [Tally(), Tally(), Tally()]
    for value in values:
        whole.add("nll", value)
        whole.count("tokens", 1)
    for value in rng.sample(values, len(values)):
        part = rng.choice(parts)
        part.add("nll", value)
        part.count("tokens", 1)
    assert parts[2] + parts[0] + parts[1] == whole
    assert (parts[2] + parts[0] + parts[1]).units("nll") == sum_units(values)


def test_a_tally_is_zero_where_nothing_was_added() -> None:
    """Names that were never used, or whose sum is zero, make no difference."""
    tally = Tally()
    assert (tally.value("nll"), tally.number("tokens")) == (0.0, 0)
    tally.add("nll", 1.5)
    tally.add("nll", -1.5)
    assert tally == Tally()
    assert tally != Tally(counts={"tokens": 2**70})
    assert "tokens" in repr(Tally(counts={"tokens": 1}))
