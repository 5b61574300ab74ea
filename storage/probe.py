"""What a store can do, found out with two small objects that stay where they are."""

from concurrent.futures import ThreadPoolExecutor

from everplex.storage.errors import ObjectExistsError
from everplex.storage.store import Store

__all__ = ["honours_conditional_create"]

_PREFIX = "probe"
_NUM_RACERS = 4


def honours_conditional_create(store: Store) -> bool:
    """Whether the store refuses to make an object twice, one after the other and for writers at the same instant.

    Nothing may rest on the answer: a race that was won once can be lost later. The keys are the same in every run of a
    store, so asking again adds nothing. Raises the StoreError of a store that cannot be written to.
    """
    if not getattr(store, "conditional_create", True):
        return False
    return _refuses_a_second(store) and _refuses_at_once(store)


def _refuses_a_second(store: Store) -> bool:
    """Whether one of two creates with different content fails; where an earlier run left the object, the first does."""
    return not all([_creates(store, "conditional", b"first"), _creates(store, "conditional", b"second")])


def _refuses_at_once(store: Store) -> bool:
    """Whether at most one of some racing creates with different contents succeeds."""
    with ThreadPoolExecutor(_NUM_RACERS) as pool:
        won = pool.map(lambda racer: _creates(store, "race", b"racer %d" % racer), range(_NUM_RACERS))
        return sum(won) <= 1


def _creates(store: Store, name: str, data: bytes) -> bool:
    try:
        store.create(f"{_PREFIX}/{name}", data)
    except ObjectExistsError:
        return False
    return True
