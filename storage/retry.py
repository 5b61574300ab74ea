"""The one retry layer: transient failures only, random waits, bounded in time and number, woken by a stop event."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import tenacity

from everplex.storage.errors import ExpiredCredentialsError, StoreUnavailableError
from everplex.storage.store import Entry, Page, Store

__all__ = ["Paged", "Renewable", "RetryPolicy", "RetryingStore"]

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often a transient failure is tried again.

    Waits are uniform between zero and `first_wait_seconds` doubled at each try, at most `longest_wait_seconds`, so
    that many workers do not come back together. A wait that would end past the budget is not begun.
    """

    budget_seconds: float = 120.0
    max_attempts: int = 20
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 20.0


@runtime_checkable
class Paged(Protocol):
    """A store that lists page by page, so that a failure costs one page rather than the whole listing."""

    def list_page(self, prefix: str, token: str | None) -> Page:
        """Return the first page, or the one that `token` stands for."""
        ...


@runtime_checkable
class Renewable(Protocol):
    """A store whose client can be rebuilt with fresh credentials."""

    def renew(self) -> None:
        """Forget the client; the next call makes one."""
        ...


class RetryingStore:
    """A store whose calls survive what passes. Implements Store.

    `requests` counts the calls made to the inner store per verb (`get`, `create`, `list`, `publish`), every attempt
    and every page included, and under `retries` those that were not the first of their operation. Credentials that
    expired rebuild the client once per operation. Once `stop` is set no wait goes on and no other try is made.
    """

    def __init__(self, inner: Store, policy: RetryPolicy | None = None, stop: threading.Event | None = None) -> None:
        self.inner = inner
        self.policy = policy or RetryPolicy()
        self.stop = stop or threading.Event()
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.inner.url

    @property
    def conditional_create(self) -> bool:
        """Whether the inner store claims to refuse a second create of a name."""
        return bool(getattr(self.inner, "conditional_create", True))

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises ObjectNotFoundError."""
        return self._call("get", lambda: self.inner.get(key))

    def create(self, key: str, data: bytes) -> None:
        """Make an object that did not exist; one of equal content is success."""
        self._call("create", lambda: self.inner.create(key, data))

    def publish(self, key: str, data: bytes) -> None:
        """Make or replace a derived view."""
        self._call("publish", lambda: self.inner.publish(key, data))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object below `prefix`; only whole pages are passed on."""
        inner = self.inner
        if not isinstance(inner, Paged):
            yield from self._call("list", lambda: list(inner.list(prefix)))
            return
        page = self._call("list", lambda: inner.list_page(prefix, None))
        yield from page.entries
        while page.next_token is not None:
            page = self._call("list", partial(inner.list_page, prefix, page.next_token))
            yield from page.entries

    def close(self) -> None:
        """Let go of the inner store's connections, where it has any."""
        if hasattr(self.inner, "close"):
            self.inner.close()

    def _call(self, verb: str, call: Callable[[], T]) -> T:
        renewed = False

        def attempt() -> T:
            nonlocal renewed
            self._count(verb)
            try:
                return call()
            except ExpiredCredentialsError:
                if renewed or not isinstance(self.inner, Renewable):
                    raise
            renewed = True
            self.inner.renew()
            self._count(verb, "retries", "renewals")
            return call()

        return self._retrying()(attempt)

    def _retrying(self) -> tenacity.Retrying:
        policy = self.policy
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(_worth_another_try),
            wait=tenacity.wait_random_exponential(policy.first_wait_seconds, policy.longest_wait_seconds),
            stop=tenacity.stop_any(
                tenacity.stop_before_delay(policy.budget_seconds),
                tenacity.stop_after_attempt(policy.max_attempts),
                tenacity.stop_when_event_set(self.stop),
            ),
            sleep=tenacity.sleep_using_event(self.stop),
            before_sleep=lambda _: self._count("retries"),
            reraise=True,
        )

    def _count(self, *names: str) -> None:
        with self._lock:
            self.requests.update(names)


def _worth_another_try(error: BaseException) -> bool:
    return isinstance(error, StoreUnavailableError) and not isinstance(error, ExpiredCredentialsError)
