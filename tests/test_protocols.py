"""Windows of every protocol against written-out index lists, and laws that hold for any length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everplex.stages.plan_options import PlanOptions
from everplex.stages.protocols import PROTOCOLS, Protocol, Window, choose_protocol
from everplex.storage.errors import UsageError

BOS = -1


def protocol(name: str, context: int, **options: object) -> Protocol:
    """Return a protocol as the command line would choose it."""
    return choose_protocol(PlanOptions(data=[], tokenizer="", protocol=name, context=context, **options), None)  # type: ignore[arg-type]


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
        choose_protocol(PlanOptions(data=[], tokenizer=""), None)
