"""Window protocols: how published tools turn text into forward passes. Each is a join, a token policy and a pure cut.

A cut takes the number n of source tokens x[0..n) and yields windows in order. No target is ever scored twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from everplex.stages.plan_options import PlanOptions
from everplex.stages.records import ProtocolSpec
from everplex.storage.errors import UsageError

__all__ = ["PROTOCOLS", "Protocol", "Window", "choose_protocol"]

Prefix = Literal["none", "before", "over"]


class Window(NamedTuple):
    """One row: the source tokens `start` to `stop`, of which the targets from `first_scored` on count."""

    start: int
    stop: int
    first_scored: int
    prefix: Prefix = "none"
    """`before`: the prefix token stands in front of the row; `over`: it replaces the row's first token."""
    weight: float | None = None
    """Weight of the row's mean loss in the weighted sum that a published number is made of."""


Cut = Callable[[int], Iterator[Window]]


@dataclass(frozen=True)
class Protocol:
    """A published way of cutting text, with all its choices made."""

    spec: ProtocolSpec
    cut: Cut
    join: str | None = None
    """What stands between the documents of a group where they are one text; None where each is its own."""
    special_tokens: Literal["none", "default", "bos"] = "none"
    """What tokenising adds: nothing, what the tokenizer adds by itself, or a BOS alone where the tokenizer adds one."""
    parse_special: bool = True
    """Whether the literal text of a special token becomes that token."""
    prefix: Literal["bos", "eos", "none"] = "bos"
    """The prefix token: BOS (else EOS), EOS always, or none that is ever used."""


def cut_lm_eval(n: int, context: int) -> Iterator[Window]:
    """Yield rolling windows: all n targets, at most `context` a window; the last window is filled up to the left."""
    if n > 0:
        yield Window(0, min(context, n), 0, "before")
    for start in range(context, n, context):
        stop = min(start + context, n)
        yield Window(stop - 1 - context, stop, start)


def _lm_eval(options: PlanOptions, context: int) -> Protocol:  # noqa: ARG001 - one signature for all protocols
    label = (
        f"lm-eval (loglikelihood_rolling of lm-eval 0.4.13, max_length={context}, no BOS added by the tokenizer): "
        "every token scored"
    )
    return Protocol(
        spec=ProtocolSpec(name="lm-eval", version=1, context=context, label=label),
        cut=lambda n: cut_lm_eval(n, context),
    )


class Family(NamedTuple):
    """A protocol before its choices: how it is made, and its own context length where it has one."""

    make: Callable[[PlanOptions, int], Protocol]
    default_context: int | None = None


PROTOCOLS: dict[str, Family] = {
    "lm-eval": Family(_lm_eval),
}


def choose_protocol(options: PlanOptions, model_max_length: int | None) -> Protocol:
    """Return the protocol that the options name. Raises UsageError for an unknown one and for a bad length."""
    family = PROTOCOLS.get(options.protocol)
    if family is None:
        raise UsageError(f"--protocol: expected one of {', '.join(PROTOCOLS)}, found {options.protocol!r}")
    defaults = family.default_context or model_max_length
    context = defaults if options.context is None else options.context
    if context is None:
        raise UsageError("the tokenizer does not say how long a context the model takes; give --context")
    if context < 2:
        raise UsageError(f"--context: expected at least 2, found {context}")
    return family.make(options, context)
