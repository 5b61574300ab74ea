"""What is tried again, how often, and what ends it."""

import errno
import os
import threading
from collections.abc import Iterator

import pytest
from support.faulty import FaultyStore, When

from everplex.storage.classify import BY_CODE, BY_ERRNO, BY_STATUS, Verdict, classify, store_error
from everplex.storage.errors import (
    ExpiredCredentialsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from everplex.storage.local import LocalStore
from everplex.storage.retry import RetryingStore, RetryPolicy
from everplex.storage.store import Entry, Page, Store

QUICK = RetryPolicy(max_attempts=6, first_wait_seconds=0.001, longest_wait_seconds=0.01)


class Scripted:
    """A store whose reads raise what the script says, then give b"read"; pages too."""

    url = "script://"

    def __init__(self, *script: StoreError) -> None:
        self.script = list(script)
        self.num_calls = 0
        self.num_renewals = 0

    def get(self, key: str) -> bytes:
        """Play the next line."""
        del key
        self._play()
        return b"read"

    def create(self, key: str, data: bytes) -> None:
        """Play the next line."""
        del key, data
        self._play()

    def publish(self, key: str, data: bytes) -> None:
        """Play the next line."""
        self.create(key, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Not used: the retrying store asks page by page."""
        raise NotImplementedError(prefix)

    def list_page(self, prefix: str, token: str | None) -> Page:
        """Three pages of two; each call plays a line."""
        self._play()
        number = int(token or 0)
        entries = [Entry(f"{prefix}{number}{letter}") for letter in "ab"]
        return Page(entries, str(number + 1) if number < 2 else None)

    def renew(self) -> None:
        """Count."""
        self.num_renewals += 1

    def _play(self) -> None:
        self.num_calls += 1
        if self.script:
            raise self.script.pop(0)


def transient() -> StoreUnavailableError:
    """Return a failure that passes."""
    return StoreUnavailableError("read", "script://k", "slow down")


def expired() -> ExpiredCredentialsError:
    """Return the failure of old credentials."""
    return ExpiredCredentialsError("read", "script://k", "the token expired")


def test_what_passes_is_tried_again() -> None:
    """Transient failures are tried until it works, and counted."""
    inner = Scripted(transient(), transient(), transient())
    store = RetryingStore(inner, QUICK)
    assert isinstance(inner, Store)
    assert store.get("k") == b"read"
    assert store.requests == {"get": 4, "retries": 3}


def test_requests_are_bounded() -> None:
    """A failure that does not pass ends as itself, after as many calls as the policy allows."""
    inner = Scripted(*(transient() for _ in range(100)))
    store = RetryingStore(inner, QUICK)
    with pytest.raises(StoreUnavailableError, match="slow down"):
        store.get("k")
    assert inner.num_calls == QUICK.max_attempts
    assert store.requests == {"get": 6, "retries": 5}


def test_budget_bounds_time() -> None:
    """A wait that would end past the budget is not begun: with none left there is one call."""
    inner = Scripted(*(transient() for _ in range(100)))
    with pytest.raises(StoreUnavailableError):
        RetryingStore(inner, RetryPolicy(budget_seconds=0.0)).get("k")
    assert inner.num_calls == 1


@pytest.mark.parametrize("kind", [StoreRefusedError, ObjectNotFoundError, ObjectExistsError])
def test_what_stays_is_not(kind: type[StoreError]) -> None:
    """Permanent failures are one call."""
    inner = Scripted(kind("read", "script://k", "no"), transient())
    with pytest.raises(kind):
        RetryingStore(inner, QUICK).get("k")
    assert inner.num_calls == 1


def test_expired_credentials_rebuild_the_client_once() -> None:
    """The client is rebuilt and the call made again; credentials that are still old end it."""
    inner = Scripted(expired())
    store = RetryingStore(inner, QUICK)
    assert store.get("k") == b"read"
    assert inner.num_renewals == 1
    assert store.requests == {"get": 2, "retries": 1, "renewals": 1}

    inner = Scripted(expired(), expired(), expired())
    with pytest.raises(ExpiredCredentialsError):
        RetryingStore(inner, QUICK).get("k")
    assert (inner.num_calls, inner.num_renewals) == (2, 1)

    inner = Scripted(transient(), expired(), transient(), expired())
    with pytest.raises(ExpiredCredentialsError):
        RetryingStore(inner, QUICK).get("k")
    assert (inner.num_calls, inner.num_renewals) == (4, 1)


def test_a_failed_page_costs_one_page() -> None:
    """A listing goes on at the page that failed; nothing is listed twice."""
    inner = Scripted()
    store = RetryingStore(inner, QUICK)
    listing = store.list("p/")
    first = next(listing)
    inner.script = [transient(), transient()]
    assert [first.key, *(entry.key for entry in listing)] == ["p/0a", "p/0b", "p/1a", "p/1b", "p/2a", "p/2b"]
    assert store.requests == {"list": 5, "retries": 2}


def test_stop_ends_a_long_wait() -> None:
    """Setting the stop event wakes a sleeping retry, whose failure then comes out."""
    stop = threading.Event()
    called = threading.Event()

    class Down(Scripted):
        def _play(self) -> None:
            super()._play()
            called.set()
            raise transient()

    inner = Down()
    hours = RetryPolicy(budget_seconds=1e6, first_wait_seconds=1e4, longest_wait_seconds=1e4)
    outcome: list[BaseException] = []

    def read() -> None:
        try:
            RetryingStore(inner, hours, stop).get("k")
        except StoreUnavailableError as error:
            outcome.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert called.wait(60)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(outcome) == 1
    assert inner.num_calls <= 2


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_fail_at_each_operation(tmp_path_factory: pytest.TempPathFactory, when: When) -> None:
    """Whichever operation fails, and however, the outcome is that of no failure."""
    number = 0
    while True:
        number += 1
        folder = tmp_path_factory.mktemp("at")
        faulty = FaultyStore(LocalStore(folder), fail_at=number, when=when)
        store = RetryingStore(faulty, QUICK)
        store.create("a/1", b"one")
        store.publish("view", b"old")
        store.create("a/2", b"two")
        store.publish("view", b"new")
        assert {entry.key for entry in store.list()} == {"a/1", "a/2", "view"}
        assert [store.get(key) for key in ("a/1", "a/2", "view")] == [b"one", b"two", b"new"]
        if not faulty.fired:
            break
    assert number == 9  # eight operations, then one that does not come


def failure(status: int, code: str = "") -> Exception:
    """Return an exception as botocore raises it."""
    error = Exception(f"{status} {code}")
    error.response = {  # type: ignore[attr-defined]
        "Error": {"Code": code or str(status)},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {"date": "Tue, 01 Dec 2026 10:00:00 GMT"}},
    }
    return error


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_transient_statuses(status: int) -> None:
    """These pass, whatever the code says that nobody knows."""
    assert classify(failure(status)).verdict is Verdict.TRANSIENT
    assert classify(failure(status, "Whatever")).verdict is Verdict.TRANSIENT


@pytest.mark.parametrize("status", [400, 401, 403, 405, 411, 501, 505])
def test_permanent_statuses(status: int) -> None:
    """These do not."""
    assert classify(failure(status)).verdict is Verdict.REFUSED


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (503, "SlowDown", Verdict.TRANSIENT),
        (400, "RequestTimeout", Verdict.TRANSIENT),
        (409, "ConditionalRequestConflict", Verdict.TRANSIENT),
        (409, "BlobAlreadyExists", Verdict.EXISTS),
        (412, "PreconditionFailed", Verdict.EXISTS),
        (404, "NoSuchKey", Verdict.MISSING),
        (404, "NoSuchBucket", Verdict.REFUSED),
        (400, "ExpiredToken", Verdict.EXPIRED),
        (403, "RequestTimeTooSkewed", Verdict.REFUSED),
        (403, "SignatureDoesNotMatch", Verdict.REFUSED),
    ],
)
def test_codes_say_more_than_statuses(status: int, code: str, verdict: Verdict) -> None:
    """The service's code decides before the status does."""
    assert classify(failure(status, code)).verdict is verdict


def test_cause_decides_over_wrapping() -> None:
    """What a library made of an answer does not hide it: s3fs gives PermissionError for an expired token."""
    wrapped = PermissionError("The provided token has expired.")
    wrapped.__cause__ = failure(400, "ExpiredToken")
    assert classify(wrapped).verdict is Verdict.EXPIRED
    invalid = OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")
    invalid.__cause__ = failure(412, "PreconditionFailed")
    assert classify(invalid).verdict is Verdict.EXISTS


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (TimeoutError(), Verdict.TRANSIENT),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Verdict.TRANSIENT),
        (OSError(errno.EMFILE, "Too many open files", "/x"), Verdict.TRANSIENT),
        (OSError(errno.ESTALE, "Stale file handle", "/x"), Verdict.TRANSIENT),
        (OSError(errno.ENOSPC, "No space left on device"), Verdict.REFUSED),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), Verdict.REFUSED),
        (OSError(errno.EROFS, "Read-only file system", "/x"), Verdict.REFUSED),
        (OSError(errno.EACCES, "Permission denied", "/x"), Verdict.REFUSED),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), Verdict.MISSING),
        (RuntimeError("a bug"), Verdict.REFUSED),
    ],
)
def test_errors_without_an_answer(error: Exception, verdict: Verdict) -> None:
    """Connections, time-outs and the system's own errors; what nobody knows is not tried again."""
    assert classify(error).verdict is verdict


def test_clock_skew_has_its_own_sentence() -> None:
    """It names the clock, the store's time and what to do."""
    error = store_error(failure(403, "RequestTimeTooSkewed"), "create", "s3://b/k")
    assert isinstance(error, StoreRefusedError)
    assert "clock" in error.reason
    assert "2026-12-01T10:00:00" in error.reason
    assert "set this machine's clock" in error.hint


def test_denied_reads_name_the_way_out() -> None:
    """Who may read some groups only is told of --groups."""
    assert "--groups" in str(store_error(failure(403, "AccessDenied"), "list", "s3://b/run"))


def test_every_row_that_refuses_says_what_to_do() -> None:
    """A permanent verdict of the tables comes with a hint; a transient one means the same in every table."""
    rows = [*BY_CODE.values(), *BY_STATUS.values(), *BY_ERRNO.values()]
    assert all(row.hint for row in rows if row.verdict is Verdict.REFUSED)
    assert {os.strerror(number) for number, row in BY_ERRNO.items() if row.verdict is Verdict.MISSING} == set()
