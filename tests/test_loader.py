"""Chunks are loaded ahead, in order, with what went wrong, and the loading thread ends."""

import threading
from collections.abc import Iterator

import pytest
import torch

from everplex.stages.loader import prefetch
from everplex.storage.errors import ObjectNotFoundError, UsageError


def extra_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that were not there before."""
    return [thread for thread in threading.enumerate() if thread not in before]


def test_items_come_in_order_with_what_was_loaded() -> None:
    """Every item comes once, in order."""
    assert list(prefetch(range(50), lambda item: item * item, depth=3)) == [(item, item * item) for item in range(50)]


def test_nothing_to_load() -> None:
    """No items, no results, no hang."""
    assert list(prefetch([], str, depth=2)) == []


def test_an_error_keeps_its_attributes_and_the_rest_is_loaded() -> None:
    """What a load raised comes in place of its result: the same object; later items still come."""
    error = ObjectNotFoundError("get", "s3://bucket/key", "no such object", "look there")

    def load(item: int) -> int:
        if item == 1:
            raise error
        return item

    assert list(prefetch(range(3), load, depth=2)) == [(0, 0), (1, error), (2, 2)]


def test_an_error_of_the_items_is_raised() -> None:
    """What the items raise reaches the consumer as it is, after the items before it."""

    def items() -> Iterator[int]:
        yield 1
        raise UsageError("the items ended badly")

    results = prefetch(items(), str, depth=2)
    assert next(results) == (1, "1")
    with pytest.raises(UsageError, match="the items ended badly"):
        next(results)


def test_loads_ahead_and_no_further_than_the_depth() -> None:
    """While the consumer holds an item, the next `depth` are loaded, and no more are asked for."""
    asked: list[int] = []
    reached = threading.Event()

    def items() -> Iterator[int]:
        for item in range(100):
            asked.append(item)
            if len(asked) == 4:
                reached.set()
            yield item

    results = prefetch(items(), str, depth=3)
    assert next(results) == (0, "0")
    assert reached.wait(30)
    results.close()
    assert len(asked) <= 4


def test_closing_ends_the_thread_though_a_load_is_at_hand() -> None:
    """Closing returns while a load still blocks, and the thread is gone once the load is."""
    before = set(threading.enumerate())
    release, blocked = threading.Event(), threading.Event()

    def load(item: int) -> int:
        if item == 1:
            blocked.set()
            release.wait(60)
        return item

    results = prefetch(range(10), load, depth=2)
    assert next(results) == (0, 0)
    assert blocked.wait(30)
    results.close()
    release.set()
    for thread in extra_threads(before):
        thread.join(30)
    assert extra_threads(before) == []


def test_threads_of_torch_are_left_alone() -> None:
    """Loading ahead does not take the evaluator's threads away."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(prefetch(range(5), str, depth=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
