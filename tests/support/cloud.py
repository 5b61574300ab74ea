"""A run in an S3 bucket behind a proxy that injects faults, and ways to its objects that do not go through everplex."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.faultproxy import FaultProxy, fault_proxy
from support.s3 import S3Server, serve_s3

PREFIX = "runs/a"


@dataclass(frozen=True)
class Cloud:
    """A server, and a proxy in front of it that everplex is sent to."""

    server: S3Server
    proxy: FaultProxy

    @property
    def environment(self) -> dict[str, str]:
        """Return what tells everplex where to go."""
        return self.server.environment(self.proxy.port)

    def make_run(self, bucket: str) -> str:
        """Make a bucket; returns the URL of a run in it, where there is nothing yet."""
        return f"{self.server.make_bucket(bucket)}/{PREFIX}"

    def upload(self, folder: Path, bucket: str) -> str:
        """Copy a run into a new bucket; returns its URL."""
        url = self.make_run(bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.server.put(bucket, f"{PREFIX}/{path.relative_to(folder)}", path.read_bytes())
        return url

    def download(self, bucket: str, folder: Path) -> Path:
        """Copy a run from a bucket into a folder."""
        for key in self.server.keys(bucket, f"{PREFIX}/"):
            path = folder / key.removeprefix(f"{PREFIX}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.server.get(bucket, key) or b"")
        return folder


@contextmanager
def behind_proxy(server: S3Server, seed: int = 0) -> Iterator[Cloud]:
    """Put a proxy in front of a server that runs."""
    with fault_proxy(server.port, seed) as proxy:
        yield Cloud(server, proxy)


@contextmanager
def cloud(seed: int = 0) -> Iterator[Cloud]:
    """Run a server and a proxy in front of it."""
    with serve_s3() as server, behind_proxy(server, seed) as made:
        yield made
