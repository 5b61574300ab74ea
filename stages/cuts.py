"""Cuts: pure functions from the number n of source tokens x[0..n) to windows in order. No target is scored twice."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = [
    "Window",
    "cut_bos_every_window",
    "cut_gptq",
    "cut_hf_stride",
    "cut_llama_cpp",
    "cut_llama_cpp_stride",
    "cut_lm_eval",
    "cut_packed",
]


class Window(NamedTuple):
    """One row: the source tokens `start` to `stop`, of which the targets from `first_scored` on count."""

    start: int
    stop: int
    first_scored: int
    prefix: Literal["none", "before", "over"] = "none"
    """`before`: the prefix token stands in front of the row; `over`: it replaces the row's first token."""
    weight: float | None = None
    """Weight of the row's mean loss in the weighted sum that a published number is made of."""


def cut_lm_eval(n: int, context: int) -> Iterator[Window]:
    """Yield rolling windows over all n targets, `context` of them each; the last window is filled up to the left."""
    if n > 0:
        yield Window(0, min(context, n), 0, "before")
    for start in range(context, n, context):
        stop = min(start + context, n)
        yield Window(stop - 1 - context, stop, start)


def cut_bos_every_window(n: int, context: int) -> Iterator[Window]:
    """Yield windows that all begin with the prefix token; the last one is filled up to the left."""
    for start in range(0, n, context):
        stop = min(start + context, n)
        yield Window(max(0, stop - context), stop, start, "before")


def cut_llama_cpp(n: int, context: int, *, overwrite: bool) -> Iterator[Window]:
    """Yield disjoint windows whose second half, less one, is scored; the tail is dropped."""
    if context < 3:  # nothing is left of the half
        return
    for start in range(0, n - context + 1, context):
        yield Window(start, start + context, start + context // 2 + 1, "over" if overwrite else "none")


def cut_llama_cpp_stride(n: int, context: int, stride: int) -> Iterator[Window]:
    """Yield windows every `stride` tokens, each scoring its last `stride` tokens."""
    for start in range(0, n - context, stride):
        yield Window(start, start + context, start + context - stride)


def cut_hf_stride(n: int, context: int, stride: int, *, published_weights: bool) -> Iterator[Window]:
    """Yield windows every `stride` tokens, each scoring what none before scored but for its own first token."""
    previous = 0
    for start in range(0, n, stride):
        stop = min(start + context, n)
        first = max(previous, start + 1)
        if first < stop:
            yield Window(start, stop, first, weight=stop - previous - 1.0 if published_weights else None)
        previous = stop
        if stop == n:
            return


def cut_gptq(n: int, context: int) -> Iterator[Window]:
    """Yield disjoint windows that score all but their first token; the tail is dropped."""
    for start in range(0, n - context + 1, context):
        yield Window(start, start + context, start + 1)


def cut_packed(n: int, context: int, offset: int = 0) -> Iterator[Window]:
    """Yield a document's pieces in a stream cut every `context` inputs, in which `offset` tokens come before it."""
    start = 0
    while start < n:
        stop = min(n, start + context - (offset + start) % context)
        yield Window(max(0, start - 1), stop, start, "none" if start else "before")
        start = stop
