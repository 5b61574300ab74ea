"""One contract for every store. What it writes and reads to check a store does not go through that store."""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from everplex.storage.codec import compress
from everplex.storage.errors import ObjectExistsError, ObjectNotFoundError, UsageError
from everplex.storage.store import Store
from support.benches import Bench

ODD_KEYS = [
    "plain",
    "deep/er/and/deeper",
    "with space/and  two",
    "per%20cent%/%2F",
    "hash#query?star*[a-z]{b}",
    "plus+equals=amp&semi;colon:at@dollar$comma,",
    "quote'double\"back`tick~bang!(paren)|<>^",
    "ünï-δοκιμή-試験-🎉",
    "dots..in...name/.hidden",
    "-dash/_under",
    "n" * 255,
]


class StoreContract:
    """What every store promises. A subclass gives the bench."""

    @pytest.fixture
    def bench(self) -> Bench:
        """Return the store under test and the ways around it."""
        raise NotImplementedError

    def test_is_a_store(self, bench: Bench) -> None:
        """It has the verbs, and says where it is."""
        store = bench.open()
        assert isinstance(store, Store)
        assert store.url == bench.url

    def test_create_writes_exactly_the_bytes(self, bench: Bench) -> None:
        """What was created is there, byte for byte, and nothing else is."""
        data = bytes(range(256)) * 4
        bench.open().create("a/b.bin", data)
        assert bench.read("a/b.bin") == data
        assert visible(bench) == {"a/b.bin"}

    def test_get_reads_what_others_wrote(self, bench: Bench) -> None:
        """Objects that came by another way are read, those made after the store was first used too."""
        store = bench.open()
        assert list(store.list()) == []
        with pytest.raises(ObjectNotFoundError):
            store.get("late/x")
        bench.write("late/x", b"now")
        assert store.get("late/x") == b"now"
        assert [entry.key for entry in store.list("late/")] == ["late/x"]

    def test_absent_object(self, bench: Bench) -> None:
        """An absent object, and a prefix of objects, are not found; the error names the place."""
        bench.write("some/thing", b"x")
        for key in ("some", "some/other", "none/at/all"):
            with pytest.raises(ObjectNotFoundError, match=key):
                bench.open().get(key)

    def test_create_once(self, bench: Bench) -> None:
        """Other content under a taken name is refused, and the object stays as it was."""
        bench.write("taken", b"first")
        with pytest.raises(ObjectExistsError, match="taken"):
            bench.open().create("taken", b"second")
        assert bench.read("taken") == b"first"

    def test_create_again_is_our_own_write(self, bench: Bench) -> None:
        """An object of equal content is success: the write whose answer was lost."""
        bench.write("mine", b"same")
        bench.open().create("mine", b"same")
        assert bench.read("mine") == b"same"

    def test_equal_content_in_another_encoding(self, bench: Bench) -> None:
        """Frames are compared decoded: another level of compression is the same object."""
        content = random.Random(1).randbytes(3000).hex().encode()
        theirs = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(content)
        assert theirs != compress(content)
        bench.write("frame.zst", theirs)
        bench.open().create("frame.zst", compress(content))
        assert bench.read("frame.zst") == theirs
        with pytest.raises(ObjectExistsError):
            bench.open().create("frame.zst", compress(content + b"more"))

    def test_publish_replaces(self, bench: Bench) -> None:
        """A derived view may be made and rewritten."""
        store = bench.open()
        for data in (b"one", b"two, which is longer", b""):
            store.publish("report.html", data)
            assert bench.read("report.html") == data
        assert visible(bench) == {"report.html"}

    @pytest.mark.parametrize("size", [0, 1, 64 << 20])
    def test_sizes(self, bench: Bench, size: int) -> None:
        """Empty and large objects are objects."""
        data = random.Random(size).randbytes(size)
        store = bench.open()
        store.create("sized", data)
        assert bench.read("sized") == data
        assert store.get("sized") == data
        assert [entry.key for entry in store.list()] == ["sized"]

    def test_odd_keys(self, bench: Bench) -> None:
        """Keys come back as they were given, whatever their characters."""
        store = bench.open()
        for key in ODD_KEYS:
            store.create(key, key.encode())
        assert visible(bench) == set(ODD_KEYS)
        assert {entry.key for entry in store.list()} == set(ODD_KEYS)
        for key in ODD_KEYS:
            assert bench.read(key) == key.encode()
            assert store.get(key) == key.encode()

    @pytest.mark.parametrize(
        "key", ["", "/", "/abs", "a//b", "a/", "../up", "a/../../b", ".", "nul\0", "new\nline", "back\\slash"]
    )
    def test_keys_that_could_leave_the_store(self, bench: Bench, key: str) -> None:
        """No verb takes a key that is not a plain relative name, and nothing is made."""
        store = bench.open()
        with pytest.raises(UsageError, match="key"):
            store.create(key, b"x")
        with pytest.raises(UsageError, match="key"):
            store.get(key)
        assert bench.keys() == set()

    def test_list_by_prefix(self, bench: Bench) -> None:
        """A prefix lists what is below it, not its namesakes."""
        for key in ("seg/a/1", "seg/a/2", "seg/b/1", "segments/x", "seg.txt"):
            bench.write(key, b"x")
        store = bench.open()
        assert {entry.key for entry in store.list("seg/")} == {"seg/a/1", "seg/a/2", "seg/b/1"}
        assert {entry.key for entry in store.list("seg/a/")} == {"seg/a/1", "seg/a/2"}
        assert list(store.list("none/")) == []
        with pytest.raises(UsageError, match="prefix"):
            list(store.list("seg"))

    def test_list_tells_the_stores_time(self, bench: Bench) -> None:
        """Where a listing has dates, they are those of the store's clock, in seconds."""
        bench.write("old", b"x")
        bench.write("new", b"x")
        times = [entry.modified for entry in bench.open().list()]
        assert all(time is None or abs(time - times[0]) < 3600 for time in times if times[0] is not None)

    def test_lists_more_than_two_pages(self, bench: Bench) -> None:
        """2,500 objects are listed once each."""
        expected = {f"many/{index % 7}/{index:05d}" for index in range(2500)}
        bench.fill(expected)
        found = [entry.key for entry in bench.open().list("many/")]
        assert len(found) == 2500
        assert set(found) == expected

    def test_readers_see_whole_objects_only(self, bench: Bench) -> None:
        """While objects are made and replaced, everything that can be listed is complete."""
        done = threading.Event()

        def write() -> None:
            try:
                store = bench.open()
                for index in range(12):
                    store.create(f"whole/{index}", sealed(index))
                    store.publish("whole/view", sealed(index))
            finally:
                done.set()

        reader = bench.open()
        num_seen = 0
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while True:
                last = done.is_set()
                for entry in reader.list("whole/"):
                    data = reader.get(entry.key)
                    assert data[:32] == hashlib.sha256(data[32:]).digest()
                    num_seen += 1
                if last:
                    break
            writing.result()
        assert num_seen >= 13

    def test_race_of_eight(self, bench: Bench) -> None:
        """Of eight writers that create the same names with different contents, one wins each, and its content stays."""
        num_keys = 20
        won = race_processes(bench, num_keys) if bench.race_kind else race_threads(bench, num_keys)
        winners = sorted((index, name) for name, indices in won.items() for index in indices)
        assert [index for index, _ in winners] == list(range(num_keys))
        assert [bench.read(f"race/{index}") for index, _ in winners] == [name.encode() for _, name in winners]


def visible(bench: Bench) -> set[str]:
    """Keys that a reader could meet: a file being written is not one."""
    found = bench.keys()
    return {key for key in found if not key.rpartition("/")[2].startswith(".tmp-")}


def sealed(seed: int) -> bytes:
    """Two megabytes that start with the digest of the rest."""
    data = random.Random(seed).randbytes(2 << 20)
    return hashlib.sha256(data).digest() + data


def race_threads(bench: Bench, num_keys: int) -> dict[str, list[int]]:
    """Race in this process; returns what each of eight won."""
    start = threading.Barrier(8)

    def race(name: str) -> list[int]:
        store = bench.open()
        won = []
        for index in range(num_keys):
            start.wait()
            try:
                store.create(f"race/{index}", name.encode())
            except ObjectExistsError:
                continue
            won.append(index)
        return won

    names = [str(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(race, names), strict=True))


def race_processes(bench: Bench, num_keys: int) -> dict[str, list[int]]:
    """Race eight processes; returns what each won."""
    program = Path(__file__).with_name("racer.py")
    arguments = [str(num_keys), bench.race_kind, bench.url, json.dumps(bench.options)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    racers = {
        str(index): subprocess.Popen(
            [sys.executable, str(program), str(index), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(8)
    }
    try:
        for racer in racers.values():
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers.values():
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return {name: json.loads(racer.communicate(timeout=60)[0]) for name, racer in racers.items()}
    finally:
        for racer in racers.values():
            racer.kill()
            racer.communicate()
