"""What a folder does as a store when disks, permissions and processes fail."""

import ctypes
import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everplex.stages.checkpoint import locate
from everplex.storage import local
from everplex.storage.errors import ObjectExistsError, StoreRefusedError, StoreUnavailableError, UsageError
from everplex.storage.local import LocalStore, cache_folder
from everplex.storage.store import open_store


def names(folder: Path) -> set[str]:
    """Return every file below a folder, those being written too."""
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_out_that_is_a_file(tmp_path: Path) -> None:
    """It is refused before anything is done."""
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file; expected a folder"):
        open_store(str(tmp_path / "out"))
    with pytest.raises(UsageError, match="is a file; expected a folder"):
        open_store(f"file://{tmp_path}/out")
    assert (tmp_path / "out").read_text() == "mine"


def test_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    """A file on the way to OUT, or to a key, is named with what to do."""
    (tmp_path / "file").write_text("x")
    for store, key in ((LocalStore(tmp_path / "file" / "out"), "a"), (LocalStore(tmp_path), "file/a")):
        with pytest.raises(StoreRefusedError, match="a file stands where a folder is needed") as caught:
            store.create(key, b"x")
        assert caught.value.exit_code == 2


def test_unwritable_out() -> None:
    """A place that nobody can write to, not even root, is refused with exit code 2 and a way out."""
    with pytest.raises(StoreRefusedError) as caught:
        LocalStore("/proc/self/out").create("a", b"x")
    assert caught.value.exit_code == 2
    assert "/proc/self/out" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, (StoreRefusedError, "no space left on device; free some space")),
        (errno.EDQUOT, (StoreRefusedError, "quota")),
        (errno.EROFS, (StoreRefusedError, "read-only file system")),
        (errno.EACCES, (StoreRefusedError, "permission denied")),
        (errno.EIO, (StoreUnavailableError, "input/output error")),
    ],
)
@pytest.mark.parametrize("verb", ["create", "publish"])
def test_failed_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int, expected: tuple[type[Exception], str]
) -> None:
    """Whatever the disk says comes out as a sentence; no object and no temporary file is left."""

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    store = LocalStore(tmp_path)
    store.publish("old", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    kind, words = expected
    with pytest.raises(kind, match=f"(?i){words}"):
        getattr(store, verb)("old" if verb == "publish" else "new", b"x" * 1000)
    assert names(tmp_path) == {"old"}
    assert store.get("old") == b"old"


def run_limited(code: str, folder: Path) -> str:
    """Run a program that ends by printing the error of a store; returns what it printed."""
    program = (
        f"import resource, os\nfrom everplex.storage.local import LocalStore\nstore = LocalStore({str(folder)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_too_many_open_files(tmp_path: Path) -> None:
    """With no descriptor left, really, the error names the limit; afterwards it works."""
    code = (
        "from everplex.storage.errors import StoreUnavailableError\n"
        "store.create('before', b'x')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "held = []\n"
        "try:\n    while True: held.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError: pass\n"
        "try: store.create('new', b'x')\n"
        "except StoreUnavailableError as error: message = str(error)\n"
        "for one in held: os.close(one)\n"
        "store.create('after', b'x')\n"
        "print(message)\n"
    )
    printed = run_limited(code, tmp_path)
    assert "too many open files" in printed
    assert "ulimit -n" in printed
    assert names(tmp_path) == {"before", "after"}


def test_file_size_limit(tmp_path: Path) -> None:
    """A write that the system cuts short, really, leaves nothing."""
    code = (
        "import signal\n"
        "from everplex.storage.errors import StoreRefusedError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: store.create('big', bytes(100_000))\n"
        "except StoreRefusedError as error: print(error)\n"
    )
    assert "file too large" in run_limited(code, tmp_path)
    assert names(tmp_path) == set()


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    """Every object that a killed writer acknowledged is there; every object that can be seen is whole."""
    program = (
        "import hashlib, os, sys\n"
        "from everplex.storage.local import LocalStore\n"
        "store = LocalStore(sys.argv[1])\n"
        "for index in range(10_000):\n"
        "    data = os.urandom(1 << 20)\n"
        "    store.create(f'k/{index}', hashlib.sha256(data).digest() + data)\n"
        "    print(index, flush=True)\n"
    )
    for round_number in range(5):
        folder = tmp_path / str(round_number)
        process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(round_number + 2):
            last = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(last), *map(int, process.communicate()[0].split())]
        store = LocalStore(folder)
        found = {entry.key: store.get(entry.key) for entry in store.list()}
        assert found.keys() >= {f"k/{index}" for index in range(max(acknowledged) + 1)}
        assert all(data[:32] == hashlib.sha256(data[32:]).digest() for data in found.values())


def test_order_that_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is synced before the name exists, and every new name's folder after, up to the folder above OUT."""
    log: list[str] = []
    sync, link = os.fsync, os.link

    def logged_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        log.append("data" if path.is_file() else str(path.relative_to(tmp_path)))
        sync(descriptor)

    def logged_link(source: Path, target: Path) -> None:
        log.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(os, "link", logged_link)
    store = LocalStore(tmp_path / "above" / "out")
    store.create("a/b/c", b"x")
    assert log == [".", "above", "above/out", "above/out/a", "data", "link", "above/out/a/b"]
    log.clear()
    store.create("a/b/d", b"x")
    assert log == ["data", "link", "above/out/a/b"]
    log.clear()
    LocalStore(tmp_path / "above" / "out").create("a/b/d", b"x")
    assert log[-1] == "above/out/a/b"  # an equal object of another writer is made to last, too


def test_readers_ignore_what_is_being_written(tmp_path: Path) -> None:
    """Temporary files are in no listing, and have no key."""
    store = LocalStore(tmp_path)
    store.create("a/x", b"x")
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
    assert [entry.key for entry in store.list()] == ["a/x"]
    with pytest.raises(UsageError, match="being written"):
        store.get("a/.tmp-0123")


def test_files_are_private(tmp_path: Path) -> None:
    """Objects and views can be read by their owner alone."""
    store = LocalStore(tmp_path)
    store.create("a", b"x")
    store.publish("b", b"x")
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o600}


def test_mount_without_links_and_exclusive_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort still makes whole files, and refuses a name that exists."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def no_link(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(local, "_rename_exclusively", refuse)
    store = LocalStore(tmp_path)
    store.create("a", b"first")
    store.create("a", b"first")
    with pytest.raises(ObjectExistsError):
        store.create("a", b"second")
    assert store.get("a") == b"first"
    assert names(tmp_path) == {"a"}


def test_mount_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network mounts refuse to sync a folder; objects are made all the same."""
    sync = os.fsync

    def no_folders(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    LocalStore(tmp_path).create("a/b", b"x")
    assert (tmp_path / "a" / "b").read_bytes() == b"x"


def test_symbolic_links(tmp_path: Path) -> None:
    """Linked folders are listed, loops and dangling links are not followed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"x")
    out = tmp_path / "out"
    out.mkdir()
    (out / "linked").symlink_to(tmp_path / "elsewhere")
    (out / "loop").symlink_to(out)
    (out / "dangling").symlink_to(tmp_path / "nothing")
    assert [entry.key for entry in LocalStore(out).list()] == ["linked/x"]


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable, then XDG's, then the home; made private; one that cannot be made is a sentence."""
    monkeypatch.setenv("EVERPLEX_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"
    assert (tmp_path / "named").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("EVERPLEX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "everplex"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "everplex"
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("EVERPLEX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match="set EVERPLEX_CACHE"):
        cache_folder()


def test_exclusive_rename_is_the_systems(tmp_path: Path) -> None:
    """Where the C library has it, an exclusive rename keeps what is there."""
    if not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("the C library has no renameat2")
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        local._rename_exclusively(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"old"


@pytest.mark.parametrize("open_it", [LocalStore, locate], ids=["store", "model"])
def test_an_unknown_home_is_told(open_it: Callable[[str], object]) -> None:
    """`~` in front of a name that is no user's is refused with a sentence."""
    with pytest.raises(UsageError, match="~no-such-user/a: the home folder"):
        open_it("~no-such-user/a")
