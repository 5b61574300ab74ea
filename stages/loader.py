"""Load chunks ahead of the evaluator in a thread, through torchdata.nodes.

Its nodes hand an exception on as a new one that they build from the old one's text, and lose its attributes; so what a
load gave or raised travels as a value. Its parallel mapper sets torch's threads to one for the whole process; so there
is one loading thread, and the mapping is done inside the prefetcher's.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

from torchdata.nodes import IterableWrapper, Mapper, Prefetcher

T = TypeVar("T")
R = TypeVar("R")


def prefetch(items: Iterable[T], load: Callable[[T], R], *, depth: int) -> Generator[tuple[T, R | Exception]]:
    """Yield each item, in order, with what `load` gave for it or the exception it raised, up to `depth` ahead.

    `items` is advanced in the loading thread, at most `depth` items ahead; an exception that it raises is raised here.
    Closing the generator stops the thread: it ends once the load at hand does.
    """

    def attempt(item: T) -> tuple[T, R | Exception]:
        try:
            return item, load(item)
        except Exception as error:  # noqa: BLE001 - handed over whole, to be judged by who asked for the item
            return item, error

    failures: list[Exception] = []
    node = Prefetcher(Mapper(IterableWrapper(_until_failure(items, failures)), attempt), depth, snapshot_frequency=0)
    node.reset()
    try:
        yield from node
        if failures:
            raise failures[0]
    finally:
        node._it._shutdown()  # noqa: SLF001 - the nodes have no public way to stop their thread


def _until_failure(items: Iterable[T], failures: list[Exception]) -> Iterator[T]:
    try:
        yield from items
    except Exception as error:  # noqa: BLE001 - raised again by the consumer, with its attributes
        failures.append(error)
