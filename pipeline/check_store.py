"""Check-up of a store: create, read back, list, how long they take, conditional create, clocks.

Leaves a few objects of some bytes below `probe/`, the same at every check-up, which nothing else reads.
"""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from everplex.findings import Finding, Severity
from everplex.storage.errors import EverplexError
from everplex.storage.probe import honours_conditional_create
from everplex.storage.store import Store

_KEY = "probe/doctor"
_CLOCK_KEY = "probe/clock"
_DATA = b"everplex was here\n"
_SLOW_SECONDS = 2.0
_CLOCK_NOTE_SECONDS, _CLOCK_PROBLEM_SECONDS = 10.0, 300.0
"""Signed requests are refused from some minutes on; nothing else in a run goes by clocks."""

T = TypeVar("T")


def check_store(store: Store, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Yield what there is to say of a store; stops at the first call that fails."""
    try:
        yield from _check(store, clock)
    except EverplexError as error:
        yield _finding("problem", str(error), f"mend access to {store.url} and run `everplex doctor` again")


def _finding(severity: Severity, what: str, todo: str = "") -> Finding:
    return Finding(area="store", severity=severity, what=what, todo=todo)


def _check(store: Store, clock: Callable[[], float]) -> Iterator[Finding]:
    seconds: dict[str, float] = {}
    _timed(seconds, "create", lambda: store.create(_KEY, _DATA))
    data = _timed(seconds, "read", lambda: store.get(_KEY))
    listed = _timed(seconds, "list", lambda: [entry.key for entry in store.list("probe/")])
    if data != _DATA or _KEY not in listed:
        what = "does not list" if data == _DATA else "returns other bytes for"
        yield _finding(
            "integrity", f"{store.url} {what} an object that was just made", "use another store; this one loses data"
        )
        return
    times = ", ".join(f"{verb} {1000 * spent:.0f} ms" for verb, spent in seconds.items())
    if max(seconds.values()) > _SLOW_SECONDS:
        yield _finding("note", f"{store.url} is slow: {times}", "choose a store nearer to the workers")
    else:
        yield _finding("good", f"{store.url} can be written, read and listed: {times}")
    if honours_conditional_create(store):
        yield _finding("good", "it refuses to make an object twice")
    else:
        yield _finding("note", "it does not refuse to make an object twice; results stay right")
    yield from _check_clock(store, clock)


def _timed(seconds: dict[str, float], verb: str, call: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = call()
    seconds[verb] = time.perf_counter() - start
    return result


def _check_clock(store: Store, clock: Callable[[], float]) -> Iterator[Finding]:
    before = clock()
    store.publish(_CLOCK_KEY, repr(before).encode())
    after = clock()
    modified = next((entry.modified for entry in store.list("probe/") if entry.key == _CLOCK_KEY), None)
    if modified is None:
        yield _finding("note", "it does not tell when an object was made")
        return
    difference = modified - after if modified > after else min(modified - before + 1.0, 0.0)  # some tell whole seconds
    if abs(difference) > _CLOCK_NOTE_SECONDS:
        severity: Severity = "problem" if abs(difference) > _CLOCK_PROBLEM_SECONDS else "note"
        how = "ahead of" if difference > 0 else "behind"
        yield _finding(
            severity,
            f"its clock is {abs(difference):.0f} s {how} this machine's",
            "set this machine's clock (chronyc tracking, timedatectl): signed requests are refused when it is far off",
        )
    else:
        yield _finding("good", "its clock and this machine's agree")
