"""Windows of every protocol against written-out index lists, and laws that hold for any length."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everplex.stages.cuts import Window, cut_packed
from everplex.stages.plan_options import PlanOptions
from everplex.stages.protocols import PROTOCOLS, Protocol, TokenizerFacts, choose_protocol
from everplex.storage.errors import UsageError

BOS = -1


def protocol(name: str, context: int, *, adds_bos: bool = False, **options: Any) -> Protocol:
    """Return a protocol as the command line would choose it."""
    chosen = PlanOptions(data=[], tokenizer="", protocol=name, context=context, **options)
    return choose_protocol(chosen, TokenizerFacts(adds_bos=adds_bos))


def show(window: Window) -> tuple[list[int], list[str]]:
    """Return a window's inputs and its scored targets as "input position -> source token"."""
    tokens = list(range(window.start, window.stop))
    if window.prefix == "before":
        tokens = [BOS, *tokens]
    elif window.prefix == "over":
        tokens[0] = BOS
    shift = len(tokens) - window.stop
    return tokens[:-1], [f"{index + shift - 1}->{index}" for index in range(window.first_scored, window.stop)]


def scored(windows: list[Window]) -> list[int]:
    """Return the source tokens that are scored, in order."""
    return [index for window in windows for index in range(window.first_scored, window.stop)]


def test_lm_eval_windows_written_out() -> None:
    """Ten tokens at a context of four: the last window is filled up to the left and scores what is left."""
    assert [show(window) for window in protocol("lm-eval", 4).cut(10)] == [
        ([BOS, 0, 1, 2], ["0->0", "1->1", "2->2", "3->3"]),
        ([3, 4, 5, 6], ["0->4", "1->5", "2->6", "3->7"]),
        ([5, 6, 7, 8], ["2->8", "3->9"]),
    ]


@pytest.mark.parametrize(("n", "expected"), [
    (0, []),
    (1, [([BOS], ["0->0"])]),
    (3, [([BOS, 0, 1], ["0->0", "1->1", "2->2"])]),
    (4, [([BOS, 0, 1, 2], ["0->0", "1->1", "2->2", "3->3"])]),
    (5, [([BOS, 0, 1, 2], ["0->0", "1->1", "2->2", "3->3"]), ([0, 1, 2, 3], ["3->4"])]),
])  # fmt: skip
def test_lm_eval_windows_around_the_context(n: int, expected: list[tuple[list[int], list[str]]]) -> None:
    """Lengths below, at and just above the context."""
    assert [show(window) for window in protocol("lm-eval", 4).cut(n)] == expected


@given(n=st.integers(0, 200), context=st.integers(2, 40))
def test_lm_eval_scores_every_target_exactly_once(n: int, context: int) -> None:
    """Every source token is a target of exactly one window, in order, and no window is longer than the context."""
    windows = list(protocol("lm-eval", context).cut(n))
    assert scored(windows) == list(range(n))
    assert all(len(show(window)[0]) <= context for window in windows)


@settings(deadline=None)
@given(n=st.integers(1, 100), context=st.integers(2, 20))
def test_lm_eval_equals_the_tool(n: int, context: int) -> None:
    """The windows are those of lm-eval's own function."""
    from lm_eval.utils import get_rolling_token_windows

    theirs = [
        (inputs, targets)
        for inputs, targets in get_rolling_token_windows(
            list(range(n)), prefix_token=BOS, max_seq_len=context, context_len=1
        )
    ]
    ours = []
    for window in protocol("lm-eval", context).cut(n):
        inputs, targets = show(window)
        assert [int(target.split("->")[0]) for target in targets] == list(range(len(inputs)))[-len(targets) :]
        ours.append((inputs, [int(target.split("->")[1]) for target in targets]))
    assert ours == theirs


def parse(windows: str) -> list[tuple[list[int], list[str]]]:
    """Read the windows of a line of windows.txt; inputs that no scored target needs are left out."""
    parsed = []
    for window in filter(None, windows.split("; ")):
        *inputs, targets = window.split()
        if targets == "-":
            continue
        position, index, count = map(int, re.fullmatch(r"(\d+)->(\d+)x(\d+)", targets).groups())  # type: ignore[union-attr]
        listed = [BOS] * (inputs[:1] == ["B"])
        if inputs[-1:] not in ([], ["B"]):
            first, last = map(int, inputs[-1].split(".."))
            listed += range(first, last + 1)
        parsed.append((listed[: position + count], [f"{position + k}->{index + k}" for k in range(count)]))
    return parsed


LINES = [
    line.split(":", 1)
    for line in Path(__file__).with_name("windows.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("name", ["lm-eval", "llama.cpp", "hf-stride", "gptq"])
def test_windows_equal_the_written_out_lists(name: str) -> None:
    """Every length from 0 to 40 at several contexts and strides: inputs, positions and targets."""
    num_lines = 0
    for head, windows in LINES:
        which, *choices = head.split()
        if which != name:
            continue
        values = {key: int(value) for key, value in (choice.split("=") for choice in choices)}
        n, adds_bos = values.pop("n"), bool(values.pop("bos", 0))
        assert [show(window) for window in protocol(name, adds_bos=adds_bos, **values).cut(n)] == parse(windows), head
        num_lines += 1
    assert num_lines > 100


def test_bos_every_window_written_out() -> None:
    """Every input begins with BOS and three real tokens; all ten are scored once."""
    assert [show(window) for window in protocol("bos-every-window", 4).cut(10)] == [
        ([BOS, 0, 1, 2], ["0->0", "1->1", "2->2", "3->3"]),
        ([BOS, 4, 5, 6], ["0->4", "1->5", "2->6", "3->7"]),
        ([BOS, 6, 7, 8], ["2->8", "3->9"]),
    ]


def test_packed_pieces_written_out() -> None:
    """A document that begins at the seventh token of a stream is cut where the stream's windows of four are."""
    assert [show(window) for window in cut_packed(7, 4, 6)] == [
        ([BOS, 0], ["0->0", "1->1"]),
        ([1, 2, 3, 4], ["0->2", "1->3", "2->4", "3->5"]),
        ([5], ["0->6"]),
    ]


@pytest.mark.parametrize(("name", "unscored"), [
    ("lm-eval", 0),
    ("lm-eval-bos", 0),
    ("paloma", 0),
    ("bos-every-window", 0),
    ("packed", 0),
    ("llama.cpp", None),
    ("hf-stride", 1),
    ("gptq", None),
])  # fmt: skip
@given(n=st.integers(0, 120), context=st.integers(2, 24))
def test_no_target_is_scored_twice(name: str, unscored: int | None, n: int, context: int) -> None:
    """Scored targets are a rising set; a protocol that says so leaves out nothing but the first token."""
    chosen = protocol(name, context)
    targets = scored(list(chosen.cut(n)))
    assert targets == sorted(set(targets))
    assert all(len(show(window)[0]) <= context for window in chosen.cut(n))
    if unscored is not None:
        assert targets == list(range(min(unscored, n), n))


def test_published_weights_of_the_hf_guide() -> None:
    """A window weighs one label less than it has, as in the published snippet; 9 of 10 tokens weigh 7 in sum."""
    windows = protocol("hf-stride", 4, stride=2, hf_published_weights=True).cut(10)
    assert [window.weight for window in windows] == [3.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("name", "facts"), [
    ("lm-eval", ("0.4.13", "every token scored")),
    ("llama.cpp", ("llama-perplexity -c 8", "first half of every window", "tail")),
    ("hf-stride", ("stride=4", "first token of the text unscored")),
    ("gptq", ("seqlen=8", "tail unscored")),
    ("paloma", ("OLMo-Eval", "every token scored")),
    ("packed", ("attention across documents", "joining tokens not")),
])  # fmt: skip
def test_label_says_the_tool_and_what_is_unscored(name: str, facts: tuple[str, ...]) -> None:
    """The line beside every number begins with the protocol's name."""
    label = protocol(name, 8).spec.label
    assert label.startswith(f"{name} (")
    assert all(fact in label for fact in facts)


@pytest.mark.parametrize(("name", "options", "complete", "unit"), [
    ("lm-eval", {}, True, "document"),
    ("llama.cpp", {}, False, "window"),
    ("gptq", {}, False, "window"),
    ("hf-stride", {}, False, "window"),
    ("hf-stride", {"adds_bos": True}, True, "window"),
    ("hf-stride", {"adds_bos": True, "stride": 8}, False, "window"),
    ("packed", {}, True, "window"),
    ("packed", {"document_mask": True}, True, "document"),
])  # fmt: skip
def test_completeness_and_sampling_unit(name: str, options: dict[str, Any], *, complete: bool, unit: str) -> None:
    """Numbers per byte need every source token; joined texts have no document to cluster by."""
    spec = protocol(name, 8, **options).spec
    assert (spec.complete, spec.unit) == (complete, unit)


@pytest.mark.parametrize(("name", "max_length", "context"), [
    ("lm-eval", 1000, 1000), ("llama.cpp", 1000, 512), ("gptq", 1000, 2048), ("paloma", 1000, 1000),
    ("paloma", 4096, 2048), ("paloma", None, 2048),
])  # fmt: skip
def test_default_context_is_the_tools(name: str, max_length: int | None, context: int) -> None:
    """Without --context a protocol takes its tool's length."""
    chosen = choose_protocol(PlanOptions(data=[], tokenizer="", protocol=name), TokenizerFacts(max_length))
    assert chosen.spec.context == context


@pytest.mark.parametrize(("name", "options", "sentence"), [
    ("lm-eval", {"stride": 2}, "--stride means nothing to the protocol lm-eval"),
    ("gptq", {"hf_published_weights": True}, "--hf-published-weights means nothing"),
    ("lm-eval", {"document_mask": True}, "--document-mask means nothing"),
    ("hf-stride", {"stride": 0}, "--stride: expected 1 to 8"),
    ("hf-stride", {"stride": 9}, "--stride: expected 1 to 8"),
    ("llama.cpp", {"stride": 9}, "--stride: expected 1 to 8"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    """An option that would be ignored or that skips tokens is no option."""
    with pytest.raises(UsageError, match=sentence):
        protocol(name, 8, **options)


def test_unknown_protocol_is_refused_with_the_known_ones() -> None:
    """The sentence lists every name that would do."""
    with pytest.raises(UsageError) as caught:
        protocol("lm-evall", 4)
    assert all(name in str(caught.value) for name in PROTOCOLS)


@pytest.mark.parametrize("context", [1, 0, -5])
def test_too_small_a_context_is_refused(context: int) -> None:
    """A context below two has no input and target."""
    with pytest.raises(UsageError, match="--context: expected at least 2"):
        protocol("lm-eval", context)


def test_unknown_length_is_asked_for() -> None:
    """No silent default stands in for a context length that nobody knows."""
    with pytest.raises(UsageError, match="give --context"):
        choose_protocol(PlanOptions(data=[], tokenizer=""), TokenizerFacts())
