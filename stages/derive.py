"""The one way from exact sums to the numbers that are printed anywhere.

A group's tally holds these names. Sums: `nll`, `nll_sq` (of squares over tokens), `unit_nll` with its products
`unit_nll_sq`, `unit_nll_tokens` (over sampling units: the loss s and the scored tokens n of each), `covered_nll` (over
fully covered documents; equal to `nll` where everything is), `position_nll/<bucket>`, `length_nll/<bucket>` and
`sums/<name>` for what a protocol adds. Counts: `tokens`, `units`, `unit_tokens`, `unit_tokens_sq`,
`position_tokens/<bucket>`, `length_tokens/<bucket>`.
"""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from everplex.stages.exact import UNIT_EXPONENT, Tally
from everplex.stages.records import Counts, ProtocolSpec
from everplex.stages.summary import Numbers, PositionRow

Z_95 = 1.959963984540054
"""Half the width of a 95 % interval of a normal distribution, in standard deviations."""


def exp(value: float) -> float | None:
    """Return e to the `value`, None where that exceeds every float."""
    try:
        return math.exp(value)
    except OverflowError:
        return None


def perplexity(nll: float, count: float) -> float | None:
    """Exponential of the mean loss; None where there is nothing to divide by."""
    return exp(nll / count) if count else None


def published_perplexity(numbers: Numbers) -> float | None:
    """Exponential of the mean over windows by a protocol's published weights; None where it has none."""
    weights = numbers.sums.get("weights")
    return perplexity(numbers.sums["weighted_nll"], weights) if weights else None


def derive(tally: Tally, counts: Counts, protocol: ProtocolSpec) -> Numbers:
    """Numbers of one set of documents. `counts` are those of its fully covered documents."""
    nll, tokens = tally.value("nll"), tally.number("tokens")
    covered = tally.value("covered_nll")
    sizes = counts if protocol.complete else Counts()
    stderr = clustered_error(tally)
    mean = nll / tokens if tokens else None
    return Numbers(
        nll=nll,
        tokens=tokens,
        documents=counts.documents,
        bytes=counts.bytes,
        characters=counts.characters,
        words=counts.words,
        perplexity=perplexity(nll, tokens),
        bits_per_byte=covered / sizes.bytes / math.log(2) if sizes.bytes else None,
        byte_perplexity=perplexity(covered, sizes.bytes),
        character_perplexity=perplexity(covered, sizes.characters),
        word_perplexity=perplexity(covered, sizes.words),
        stderr=stderr,
        perplexity_low=None if mean is None or stderr is None else exp(mean - Z_95 * stderr),
        perplexity_high=None if mean is None or stderr is None else exp(mean + Z_95 * stderr),
        stderr_iid=iid_error(tally),
        units=tally.number("units"),
        sums={name: tally.value(f"sums/{name}") for name in _suffixes(tally.sums, "sums")},
    )


def clustered_error(tally: Tally) -> float | None:
    """Return the standard error of the mean loss per token, with sampling units (documents) drawn and not tokens.

    The linearised ratio estimator: sqrt(G/(G-1) * sum((s - r n)^2)) / N over G units of loss s and tokens n, with
    r = sum(s)/sum(n). The residual sum is expanded into exact products, so it is the two-pass one without its rounding:
    it cannot cancel or be negative. None below two units.
    """
    units, tokens = tally.number("units"), tally.number("unit_tokens")
    if units < 2 or not tokens:
        return None
    ratio = Fraction(tally.units("unit_nll"), tokens)
    residuals = (
        tally.units("unit_nll_sq") * 2**UNIT_EXPONENT
        - 2 * ratio * tally.units("unit_nll_tokens")
        + ratio * ratio * tally.number("unit_tokens_sq")
    )
    return _root(residuals / 4**UNIT_EXPONENT * Fraction(units, units - 1)) / tokens


def iid_error(tally: Tally) -> float | None:
    """Return the standard error of the mean loss as if tokens were independent, as llama.cpp computes it.

    None below two tokens.
    """
    tokens = tally.number("tokens")
    if tokens < 2:
        return None
    mean = Fraction(tally.units("nll"), tokens)
    variance = Fraction(tally.units("nll_sq") * 2**UNIT_EXPONENT, tokens) - mean * mean
    return _root(variance / 4**UNIT_EXPONENT / (tokens - 1))


def macro(groups: Iterable[Numbers]) -> float | None:
    """Perplexity of the mean of the groups' mean losses; groups without a scored token have none."""
    means = [group.nll / group.tokens for group in groups if group.tokens]
    return exp(math.fsum(means) / len(means)) if means else None


def positions(tally: Tally, kind: str) -> list[PositionRow]:
    """Rows of the buckets 0, 1, 2-3, 4-7, … of `kind` (`position` or `length`) that hold a token."""
    return [
        PositionRow(
            start=2**bucket // 2,
            end=2**bucket - 1,
            nll=tally.value(f"{kind}_nll/{bucket}"),
            tokens=tally.number(f"{kind}_tokens/{bucket}"),
        )
        for bucket in sorted(int(name) for name in _suffixes(tally.counts, f"{kind}_tokens"))
        if tally.number(f"{kind}_tokens/{bucket}")
    ]


def _suffixes(names: Mapping[str, int], prefix: str) -> list[str]:
    return sorted(name.removeprefix(f"{prefix}/") for name in names if name.startswith(f"{prefix}/"))


def _root(square: Fraction) -> float:
    """Square root of an exact number; what is below zero comes from squares rounded to units, so it is zero."""
    return math.sqrt(max(square, Fraction(0)))
