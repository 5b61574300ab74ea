"""Exact sums: one integer in units of 2^-1074, the smallest float64, rounded once at the end.

Every finite float64 is a whole number of these units, so sums do not depend on order, split or world size, partial sums
cannot overflow, and a sum can be taken back. `math.fsum` rounds as well but neither merges nor survives overflow.

Arrays of int64 limbs (32 bits each, signed) are how sums travel between processes and how arrays are added quickly.
A limb of a normalised sum is below 2^32 in magnitude, so `SAFE_ADDITIONS` normalised sums can be added limb by limb
before an int64 could wrap; whoever adds them says how many, and more are refused.

Shape legend: V values, S sums, L limbs.
"""

from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from everplex.storage.errors import IntegrityError

UNIT_EXPONENT = 1074
LIMB_BITS = 32
NUM_LIMBS = 68
"""2,098 bits of the largest float64 in units, and room for 2^78 of them; the last limb keeps the rest."""
SAFE_ADDITIONS = 2**31 - 1

_LIMB_MASK = (1 << LIMB_BITS) - 1


def to_units(value: float) -> int:
    """Return a finite float as a whole number of units. Raises OverflowError or ValueError for inf or NaN."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (UNIT_EXPONENT + 1 - denominator.bit_length())


def from_units(units: int) -> float:
    """Round to the nearest float64, ties to even. Raises OverflowError where that would be infinite."""
    return units / (1 << UNIT_EXPONENT)


def products(x_V: ArrayLike, y_V: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Products of floats as two floats each, the rounded one and what rounding lost (Dekker 1971).

    Their sum is the product itself while the inputs are zero or between 2^-480 and 2^480; sums of float32 losses are.
    """
    x, y = np.asarray(x_V, np.float64), np.asarray(y_V, np.float64)
    rounded = x * y
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    lost = ((x_high * y_high - rounded) + x_high * y_low + x_low * y_high) + x_low * y_low
    return rounded, lost


def _halves(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split 53 bits into 26 and 26, so that products of halves are exact."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def check_additions(count: int) -> None:
    """Raise IntegrityError where adding `count` normalised sums limb by limb could wrap an int64."""
    if count > SAFE_ADDITIONS:
        raise IntegrityError(f"expected at most {SAFE_ADDITIONS} sums to add limb by limb, found {count}; add in parts")


def sum_by_key(keys_V: ArrayLike, values_V: ArrayLike, num_keys: int) -> list[int]:
    """Exact sums, in units, of the finite `values_V` that share a key in 0 … `num_keys` - 1."""
    keys = np.asarray(keys_V, np.int64)
    values = np.asarray(values_V, np.float64)
    check_additions(len(values))
    if not len(values):
        return [0] * num_keys
    if not np.isfinite(values).all():
        raise ValueError("expected finite values")
    bits = values.view(np.int64)
    exponents = (bits >> 52) & 0x7FF
    shifts = np.maximum(exponents, 1) - 1  # the value is mantissa * 2^shift units
    mantissas = (bits & ((1 << 52) - 1)) | (exponents > 0).astype(np.int64) << 52
    limbs = shifts >> 5
    base = int(limbs.min())
    width = int(limbs.max()) - base + 3  # 53 bits shifted by up to 31 touch three limbs
    inner = shifts & 31
    low = ((mantissas & _LIMB_MASK) << inner).view(np.uint64)
    high = ((mantissas >> LIMB_BITS) << inner).view(np.uint64) + (low >> np.uint64(LIMB_BITS))
    signs = np.where(bits < 0, -1, 1)
    sums_SL = np.zeros(num_keys * width, np.int64)
    places = keys * width + (limbs - base)
    for offset, part in enumerate((low & np.uint64(_LIMB_MASK), high & np.uint64(_LIMB_MASK), high >> np.uint64(32))):
        np.add.at(sums_SL, places + offset, part.view(np.int64) * signs)
    return [units << (base * LIMB_BITS) for units in from_limbs(sums_SL.reshape(num_keys, width))]


def to_limbs(sums: Iterable[int]) -> NDArray[np.int64]:
    """Normalised limbs of each sum, least significant first, shape (S, NUM_LIMBS)."""
    rows = []
    for units in sums:
        sign, rest = (-1, -units) if units < 0 else (1, units)
        row = []
        for _ in range(NUM_LIMBS):
            row.append(sign * (rest & _LIMB_MASK))
            rest >>= LIMB_BITS
        if rest:
            raise OverflowError(f"expected a sum below 2^{LIMB_BITS * NUM_LIMBS} units")
        rows.append(row)
    return np.array(rows, np.int64).reshape(-1, NUM_LIMBS)


def from_limbs(limbs_SL: NDArray[np.int64]) -> list[int]:
    """Return the sums that rows of limbs stand for, normalised or added up."""
    sums = []
    for row in limbs_SL.tolist():
        units = 0
        for limb in reversed(row):
            units = (units << LIMB_BITS) + limb
        sums.append(units)
    return sums


class Tally:
    """Named exact sums and counts that can be added and taken away; a name that was never added to is zero."""

    __slots__ = ("counts", "sums")

    def __init__(self, sums: Mapping[str, int] | None = None, counts: Mapping[str, int] | None = None) -> None:
        self.sums: dict[str, int] = dict(sums or {})
        """Units by name."""
        self.counts: dict[str, int] = dict(counts or {})

    def add(self, name: str, value: float) -> None:
        """Add one finite float to a sum."""
        self.add_units(name, to_units(value))

    def add_units(self, name: str, units: int) -> None:
        """Add an exact sum to a sum."""
        self.sums[name] = self.sums.get(name, 0) + units

    def count(self, name: str, number: int) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + number

    def units(self, name: str) -> int:
        """Return a sum, exact."""
        return self.sums.get(name, 0)

    def value(self, name: str) -> float:
        """Return a sum, rounded once."""
        return from_units(self.units(name))

    def number(self, name: str) -> int:
        """Return a count."""
        return self.counts.get(name, 0)

    def __iadd__(self, other: "Tally") -> Self:
        for name, units in other.sums.items():
            self.add_units(name, units)
        for name, number in other.counts.items():
            self.count(name, number)
        return self

    def __add__(self, other: "Tally") -> "Tally":
        result = Tally(self.sums, self.counts)
        result += other
        return result

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return _without_zeros(self.sums) == _without_zeros(other.sums) and _without_zeros(
            self.counts
        ) == _without_zeros(other.counts)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        sums = {name: self.value(name) for name in sorted(self.sums)}
        return f"Tally({sums}, {dict(sorted(self.counts.items()))})"


def _without_zeros(numbers: Mapping[str, int]) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number}
