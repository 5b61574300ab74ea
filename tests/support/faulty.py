"""A store that fails on demand: at the N-th operation, at random from a seed, or for as long as it is gone."""

import random
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Literal, TypeVar

from everplex.storage.errors import StoreUnavailableError
from everplex.storage.keys import TEMPORARY
from everplex.storage.local import LocalStore
from everplex.storage.store import Entry, Store

T = TypeVar("T")

When = Literal["before", "after", "torn"]
ALWAYS: tuple[When, ...] = ("before", "after", "torn")


def unavailable(operation: str, location: str) -> Exception:
    """Return the error of a failure that passes; the default."""
    return StoreUnavailableError(operation, location, "injected fault")


class FaultyStore:
    """Wraps a store and counts its operations from 1. Implements Store.

    `before`: nothing is done. `after`: it is done and the answer is lost. `torn`: it stopped half-way, so a local
    folder keeps half a temporary file, a listing ends early and no object is visible; then the error is raised.

    `fail_at` names one operation, so a loop can try N = 1, 2, 3 … until `fired` stays 0. `rate` fails that share of
    operations, with kinds and places drawn from `seed`. `verbs` limits both to some verbs. While `gone` is set, every
    operation fails before it starts. `error` makes what is raised; it may be a BaseException, to play a crash.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int | None = None,
        when: When = "before",
        rate: float = 0.0,
        seed: int = 0,
        verbs: Collection[str] = ("get", "create", "list", "publish"),
        error: Callable[[str, str], BaseException] = unavailable,
    ) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.when = when
        self.rate = rate
        self.verbs = verbs
        self.error = error
        self.gone = threading.Event()
        self.num_operations = 0
        self.fired = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where the inner store is."""
        return self.inner.url

    @property
    def conditional_create(self) -> bool:
        """Whether the inner store claims to refuse a second create of a name."""
        return bool(getattr(self.inner, "conditional_create", True))

    def get(self, key: str) -> bytes:
        """Read through the fault."""
        return self._run("get", key, lambda: self.inner.get(key), lambda: None)

    def create(self, key: str, data: bytes) -> None:
        """Create through the fault."""
        self._run("create", key, lambda: self.inner.create(key, data), lambda: self._tear(key, data))

    def publish(self, key: str, data: bytes) -> None:
        """Publish through the fault."""
        self._run("publish", key, lambda: self.inner.publish(key, data), lambda: self._tear(key, data))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List through the fault; a torn listing yields its first half, then fails."""
        fault = self._draw("list")
        if fault == "before":
            raise self.error("list", self._where(prefix))
        entries = list(self.inner.list(prefix))
        yield from entries[: len(entries) // 2] if fault == "torn" else entries
        if fault:
            raise self.error("list", self._where(prefix))

    def _run(self, verb: str, key: str, work: Callable[[], T], tear: Callable[[], None]) -> T:
        fault = self._draw(verb)
        if fault is None:
            return work()
        if fault == "after":
            work()
        elif fault == "torn":
            tear()
        raise self.error(verb, self._where(key))

    def _draw(self, verb: str) -> When | None:
        with self._lock:
            self.num_operations += 1
            fault: When | None = None
            if self.gone.is_set():
                fault = "before"
            elif verb in self.verbs and self.num_operations == self.fail_at:
                fault = self.when
            elif verb in self.verbs and self._random.random() < self.rate:
                fault = self._random.choice(ALWAYS)
            self.fired += fault is not None
            return fault

    def _tear(self, key: str, data: bytes) -> None:
        if isinstance(self.inner, LocalStore):
            path = self.inner.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f"{TEMPORARY}torn-{self.num_operations}").write_bytes(data[: len(data) // 2])

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"
