"""One of several processes that try to create the same objects: says "ready", waits for a line, prints what it won.

usage: racer.py NAME NUM_KEYS KIND URL OPTIONS_JSON, where KIND is bare, no-links or faulty.
"""

import errno
import json
import os
import sys
from typing import NoReturn

from everplex.storage.errors import ObjectExistsError
from everplex.storage.local import LocalStore
from everplex.storage.retry import RetryingStore, RetryPolicy
from everplex.storage.store import Store, open_store

QUICK = RetryPolicy(first_wait_seconds=0.001, longest_wait_seconds=0.01, max_attempts=50)


def no_links(*_: object, **__: object) -> NoReturn:
    """Play a mount without hard links."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def open_kind(kind: str, url: str, options: dict[str, str], seed: int) -> Store:
    """Return the store under race."""
    if kind == "faulty":
        from support.faulty import FaultyStore

        return RetryingStore(FaultyStore(LocalStore(url), rate=0.3, seed=seed), QUICK)
    if kind == "no-links":
        os.link = no_links
    return open_store(url, options=options)


def main() -> None:
    """Race once over every key."""
    name, num_keys, kind, url, options = sys.argv[1:]
    store = open_kind(kind, url, json.loads(options), int(name))
    won = []
    print("ready", flush=True)  # noqa: T201 - how the test learns it
    sys.stdin.readline()
    for index in range(int(num_keys)):
        try:
            store.create(f"race/{index}", name.encode())
        except ObjectExistsError:
            continue
        won.append(index)
    print(json.dumps(won), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
