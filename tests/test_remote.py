"""S3 behind a proxy that injects what networks and services do, and what else is true of URLs as stores."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from support.faultproxy import Fault, FaultProxy, Rule, fault_proxy, reply
from support.s3 import S3Server, serve_s3

from everplex.storage.errors import (
    ExpiredCredentialsError,
    ObjectExistsError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
    UsageError,
)
from everplex.storage.probe import honours_conditional_create
from everplex.storage.remote import FsspecStore, filesystem_options
from everplex.storage.retry import RetryingStore, RetryPolicy
from everplex.storage.store import open_store

BUCKET = "faults"
QUICK = RetryPolicy(max_attempts=6, first_wait_seconds=0.001, longest_wait_seconds=0.01)


class Rig(NamedTuple):
    """A store behind a proxy, and the server behind that."""

    store: RetryingStore
    proxy: FaultProxy
    server: S3Server


@pytest.fixture(scope="module")
def running() -> Iterator[Rig]:
    """Run one server, one proxy and one client for the module."""
    with serve_s3() as server, fault_proxy(server.port) as proxy:
        server.make_bucket(BUCKET)
        inner = FsspecStore(f"s3://{BUCKET}/run", server.options(proxy.port), deadline_seconds=4)
        store = RetryingStore(inner, QUICK)
        yield Rig(store, proxy, server)
        store.close()


@pytest.fixture
def rig(running: Rig) -> Iterator[Rig]:
    """Return the rig without rules, and with its log and counters empty."""
    running.proxy.rules.clear()
    running.proxy.requests.clear()
    running.store.requests.clear()
    yield running
    running.proxy.rules.clear()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Return a key that only this test uses."""
    return f"{request.node.name}.bin"


@pytest.mark.parametrize(
    "rule",
    [
        reply(503, "SlowDown", times=3),
        reply(503, "ServiceUnavailable", times=3),
        reply(500, "InternalError", times=3),
        reply(502, "BadGateway", times=1),
        reply(504, "GatewayTimeout", times=1),
        reply(429, "TooManyRequests", times=2),
        reply(408, "RequestTimeout", times=1),
        reply(409, "ConditionalRequestConflict", times=2),
        reply(400, "ExpiredToken", times=1),
        Rule(Fault.RESET_BEFORE, times=3),
        Rule(Fault.RESET_AFTER, times=1),
        Rule(Fault.RESET_AFTER, times=3),
        Rule(Fault.BLACKHOLE, times=1),
    ],
    ids=lambda rule: f"{rule.fault.name}-{rule.status}-{rule.times}",
)
def test_create_survives(rig: Rig, key: str, rule: Rule) -> None:
    """What passes costs other requests, and the object is there once, whole."""
    rule = Rule(**vars(rule))  # the proxy counts it down
    rig.proxy.rules.append(rule)
    rig.store.create(key, b"content")
    assert rule.times == 0
    assert rig.server.get(BUCKET, f"run/{key}") == b"content"


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (400, "InvalidRequest", "--store-option"),
        (401, "Unauthorized", "access key"),
        (403, "AccessDenied", "--groups"),
        (403, "SignatureDoesNotMatch", "secret"),
        (403, "RequestTimeTooSkewed", "clock"),
        (404, "NoSuchBucket", "never makes a bucket"),
    ],
)
@pytest.mark.parametrize("verb", ["get", "create", "list"])
def test_what_does_not_pass_is_one_request(rig: Rig, verb: str, status: int, code: str, words: str) -> None:
    """Permanent refusals end at once, with the way out."""
    rig.proxy.rules.append(reply(status, code))
    verbs: dict[str, Callable[[], object]] = {
        "get": lambda: rig.store.get("x"),
        "create": lambda: rig.store.create("x", b"x"),
        "list": lambda: list(rig.store.list()),
    }
    with pytest.raises(StoreRefusedError, match=words):
        verbs[verb]()
    assert rig.proxy.count() == 1
    assert rig.store.requests == {verb: 1}


def test_requests_below_are_bounded(rig: Rig, key: str) -> None:
    """A service that is down sees at most two requests per attempt of ours."""
    rig.proxy.rules.append(reply(503, "SlowDown"))
    rig.store.policy, usual = RetryPolicy(max_attempts=3, first_wait_seconds=0.001), rig.store.policy
    try:
        with pytest.raises(StoreUnavailableError):
            rig.store.create(key, b"x")
    finally:
        rig.store.policy = usual
    assert rig.store.requests == {"create": 3, "retries": 2}
    assert 3 <= rig.proxy.count() <= 6
    assert rig.server.get(BUCKET, f"run/{key}") is None


def test_credentials_that_stay_expired(rig: Rig, key: str) -> None:
    """The client is rebuilt once, then the error says what to do."""
    rig.proxy.rules.append(reply(400, "ExpiredToken"))
    with pytest.raises(ExpiredCredentialsError, match="fresh credentials"):
        rig.store.create(key, b"x")
    assert rig.store.requests["renewals"] == 1
    assert rig.proxy.count() == 2


@pytest.mark.parametrize("verb", ["get", "create", "publish", "list"])
def test_black_hole_ends_at_the_deadline(rig: Rig, key: str, verb: str) -> None:
    """A call that is never answered, not even with `100 Continue`, ends as unavailable."""
    rig.proxy.rules.append(Rule(Fault.BLACKHOLE))
    store = FsspecStore(f"s3://{BUCKET}/run", rig.server.options(rig.proxy.port), deadline_seconds=0.5)
    verbs: dict[str, Callable[[], object]] = {
        "get": lambda: store.get(key),
        "create": lambda: store.create(key, b"x"),
        "publish": lambda: store.publish(key, b"x"),
        "list": lambda: list(store.list()),
    }
    with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.5 s"):
        verbs[verb]()
    store.close()


def test_torn_answer_is_read_again(rig: Rig, key: str) -> None:
    """Half an answer is not taken for the object."""
    rig.server.put(BUCKET, f"run/{key}", b"0123456789" * 1000)
    rig.proxy.rules.append(Rule(Fault.TRUNCATE, method="GET", times=1))
    assert rig.store.get(key) == b"0123456789" * 1000
    assert rig.store.requests["get"] == 2


def test_lost_answer_of_anothers_object(rig: Rig, key: str) -> None:
    """Read-back tells our own lost write from an object of another's."""
    rig.server.put(BUCKET, f"run/{key}", b"theirs")
    rig.proxy.rules.append(Rule(Fault.RESET_AFTER, method="PUT", times=1))
    with pytest.raises(ObjectExistsError):
        rig.store.create(key, b"ours")
    assert rig.server.get(BUCKET, f"run/{key}") == b"theirs"


def test_exists_but_cannot_be_read(rig: Rig, key: str) -> None:
    """A 412 for an object that is not there is tried again, rather than believed."""
    rig.proxy.rules.append(reply(412, "PreconditionFailed", times=1))
    rig.store.create(key, b"x")
    assert rig.server.get(BUCKET, f"run/{key}") == b"x"


def test_listing_survives_a_page_that_fails(rig: Rig) -> None:
    """2,500 objects are listed once each though pages fail on the way."""
    expected = {f"paged/{index:05d}" for index in range(2500)}
    rig.server.fill(BUCKET, [f"run/{key}" for key in expected])
    rig.proxy.rules.append(reply(503, "SlowDown", path="continuation-token", times=2))
    found = [entry.key for entry in rig.store.list("paged/")]
    assert sorted(found) == sorted(expected)
    assert rig.store.requests == {"list": 4, "retries": 1}


def test_faults_everywhere(rig: Rig) -> None:
    """With a third of all requests failing in five ways, every object is made once and read whole."""
    share = 0.08
    for fault in (Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.TRUNCATE):
        rig.proxy.rules.append(Rule(fault, share=share))
    rig.proxy.rules += [
        Rule(Fault.REPLY, share=share),
        Rule(Fault.REPLY, share=share, status=500, code="InternalError"),
    ]
    store = RetryingStore(rig.store.inner, RetryPolicy(max_attempts=30, first_wait_seconds=0.001))
    objects = {f"storm/{index}": b"%d" % index * 1000 for index in range(8)}
    for key, data in objects.items():
        store.create(key, data)
    assert {entry.key for entry in store.list("storm/")} == set(objects)
    assert {key: store.get(key) for key in objects} == objects
    rig.proxy.rules.clear()
    assert {key: rig.server.get(BUCKET, f"run/{key}") for key in objects} == objects


def test_probe_through_lost_answers(rig: Rig) -> None:
    """Lost answers do not make a good server look bad."""
    rig.proxy.rules.append(Rule(Fault.RESET_AFTER, method="PUT", share=0.5))
    assert honours_conditional_create(rig.store)


def test_environment_names_the_endpoint(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual variables are enough; no option is needed."""
    for name, value in rig.server.environment().items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/env")
    store.create("k", b"x")
    assert rig.server.get(BUCKET, "env/k") == b"x"
    store.close()


def test_bucket_is_never_made(rig: Rig) -> None:
    """Nothing makes a missing bucket; every verb refuses."""
    store = FsspecStore("s3://missing-bucket/run", rig.server.options(rig.proxy.port))
    for call in (lambda: store.create("k", b"x"), lambda: store.get("k"), lambda: list(store.list())):
        with pytest.raises(StoreRefusedError, match="bucket"):
            call()
    assert rig.proxy.count("PUT", "^/missing-bucket/?$") == 0
    store.close()


def test_client_is_made_anew_after_a_fork(rig: Rig) -> None:
    """A store used before a fork works in the child, which makes a client of its own."""
    program = (
        "import os, sys\n"
        "from everplex.storage.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.create('parent', b'p')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    store.create('child', b'c')\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, f"s3://{BUCKET}/fork"],
        env={**os.environ, **rig.server.environment()},
        check=True,
        timeout=60,
    )
    assert rig.server.get(BUCKET, "fork/parent") == b"p"
    assert rig.server.get(BUCKET, "fork/child") == b"c"


class StuckFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A synchronous filesystem whose calls never return."""

    protocol = "stuck"
    never = threading.Event()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        """Wait for ever."""
        del path, start, end
        self.never.wait()
        return b""


def test_synchronous_filesystems_have_a_deadline_too() -> None:
    """A filesystem without coroutines is left behind at the deadline."""
    fsspec.register_implementation("stuck", StuckFileSystem, clobber=True)
    try:
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.1 s"):
            FsspecStore("stuck://host/x", deadline_seconds=0.1).get("k")
    finally:
        StuckFileSystem.never.set()


def test_options() -> None:
    """Values become what they look like, credentials stay text, dots nest."""
    given = {"key": "123", "anon": "true", "max_concurrency": "4", "endpoint_url": "http://h:1"}
    nested = {"client_kwargs.region_name": "eu", "client_kwargs.verify": "false", "config_kwargs": '{"s3": {}}'}
    assert filesystem_options(given | nested) == {
        "key": "123",
        "anon": True,
        "max_concurrency": 4,
        "endpoint_url": "http://h:1",
        "client_kwargs": {"region_name": "eu", "verify": False},
        "config_kwargs": {"s3": {}},
    }
    with pytest.raises(UsageError, match="a value of its own"):
        filesystem_options({"client_kwargs": "x", "client_kwargs.verify": "false"})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://b/x", "unknown scheme nosuch://"),
        ("s3://", "name of a bucket"),
        ("simplecache::s3://b/x", "chained"),
    ],
)
def test_urls_that_are_no_store(url: str, words: str) -> None:
    """A URL that cannot be a store is refused at once, with what was expected."""
    with pytest.raises(UsageError, match=words):
        open_store(url)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a scheme's package is absent, the error says what to install."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(UsageError, match=r"pip install everplex\[s3\]"):
        open_store("s3://b/x")


def test_url_hides_credentials() -> None:
    """User names and passwords of a URL appear in no message."""
    store = FsspecStore("ftp://user:secret@host.invalid/run")
    assert store.url == "ftp://host.invalid/run"
    with pytest.raises(StoreError) as caught:
        store.get("k")
    assert "secret" not in str(caught.value)


def test_importing_is_light() -> None:
    """Importing the seam loads no backend, and no torch."""
    program = (
        "import sys, everplex.storage.store\n"
        "heavy = {'torch', 'fsspec', 's3fs', 'aiobotocore', 'tenacity'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
