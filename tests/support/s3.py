"""An S3 server for tests: moto in a process of its own, reached over HTTP, and a client that bypasses everplex.

Bare moto checks a write condition and then writes without a lock, so that two racing creates can both win. Here one
lock serialises its S3 requests. Run as a script, this file is that server; it prints its port once it listens.
"""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FILL = "/_fill"
CREDENTIALS = {"key": "testing", "secret": "testing"}


class S3Server:
    """A running server. `endpoint` is its URL; the other methods talk to it directly, with botocore."""

    def __init__(self, port: int) -> None:
        import botocore.config
        import botocore.session

        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self._client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=CREDENTIALS["key"],
            aws_secret_access_key=CREDENTIALS["secret"],
            region_name="us-east-1",
            config=botocore.config.Config(max_pool_connections=32),
        )

    def options(self, port: int | None = None) -> dict[str, str]:
        """Return `--store-option` values for this server, or for a proxy in front of it on another port."""
        return {**CREDENTIALS, "endpoint_url": f"http://127.0.0.1:{port or self.port}"}

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return the environment variables that say the same."""
        return {
            "AWS_ACCESS_KEY_ID": CREDENTIALS["key"],
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def make_bucket(self, name: str) -> str:
        """Create a bucket and return its URL."""
        self._client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def fill(self, bucket: str, keys: list[str]) -> None:
        """Make many objects of one byte without a request for each."""
        body = json.dumps({"bucket": bucket, "keys": keys}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}{_FILL}", body)).close()  # noqa: S310

    def get(self, bucket: str, key: str) -> bytes | None:
        """Read an object; None if there is none."""
        try:
            data: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None
        return data

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return every key below a prefix."""
        pages: Any = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]


@contextmanager
def serve_s3(*, ignore_conditions: bool = False) -> Iterator[S3Server]:
    """Start a server, wait until it listens, and end it afterwards.

    With `ignore_conditions` it is one of those that accept `If-None-Match` and overwrite all the same.
    """
    arguments = ["--ignore-conditions"] if ignore_conditions else []
    # Signing needs some region even where the endpoint has none.
    environment = {**os.environ, "AWS_DEFAULT_REGION": "us-east-1", "MOTO_S3_CUSTOM_ENDPOINTS": ""}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("port "), "the S3 server ended before it listened"
        yield S3Server(int(line.split()[1]))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _serialise(ignore_conditions: bool) -> None:
    from moto.s3.responses import S3Response

    lock = threading.RLock()

    def locked(handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(self: Any, request: Any, *args: Any, **named: Any) -> Any:
            if ignore_conditions:
                request.environ.pop("HTTP_IF_NONE_MATCH", None)
            with lock:
                return handler(self, request, *args, **named)

        return handle

    for name in ("key_response", "bucket_response"):
        setattr(S3Response, name, locked(getattr(S3Response, name)))


def _filling(application: Callable[..., Any]) -> Callable[..., Any]:
    """Add the path that S3Server.fill asks."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] != _FILL:
            return application(environ, start_response)
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        wanted = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        for key in wanted["keys"]:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(wanted["bucket"], key, b"x")
        start_response("200 OK", [("Content-Length", "0")])
        return [b""]

    return serve


def _main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    _serialise("--ignore-conditions" in sys.argv)
    server = make_server("127.0.0.1", 0, _filling(DomainDispatcherApplication(create_backend_app)), threaded=True)
    print(f"port {server.server_port}", flush=True)  # noqa: T201 - how the parent learns it
    server.serve_forever()


if __name__ == "__main__":
    _main()
