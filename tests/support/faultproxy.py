"""A TCP proxy that injects faults into HTTP requests, scripted by the test that runs it."""

import asyncio
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

_MAX_HEAD = 1 << 20


class Fault(Enum):
    """What happens to a request."""

    REPLY = "answered by the proxy with an S3 error; the server never sees it"
    RESET_BEFORE = "the connection is reset in the middle of its body; the server never sees it"
    RESET_AFTER = "carried out, then the connection is reset in place of the answer: the lost acknowledgement"
    LATENCY = "carried out after a delay"
    TRUNCATE = "half of the answer's body, then a reset"
    BLACKHOLE = "no answer ever, not even to `Expect: 100-continue`"


@dataclass
class Rule:
    """Inject `fault` into requests of this method (any if empty) whose path and query match the pattern `path`.

    `times` ends the rule after so many; `share` lets a part of the requests through, drawn from the proxy's seed.
    """

    fault: Fault
    method: str = ""
    path: str = ""
    times: float = float("inf")
    share: float = 1.0
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    message: str = "injected"
    date: str = ""


def reply(status: int, code: str, *, method: str = "", path: str = "", times: float = float("inf")) -> Rule:
    """Return the rule of an S3 error answer."""
    return Rule(Fault.REPLY, method, path, times, status=status, code=code)


class Request(NamedTuple):
    """One request as the proxy saw it, and the fault it met."""

    method: str
    path: str
    fault: Fault | None


class FaultProxy:
    """Forwards HTTP on a free local port to `target_port`, one upstream connection per request.

    `rules` may be changed at any time; the first that matches applies. `requests` is the log.
    """

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.target_port = target_port
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self.port = 0
        self._random = random.Random(seed)
        self._connections: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fault-proxy", daemon=True)

    def start(self) -> None:
        """Listen; returns once connections are accepted."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Drop every connection, the black-holed ones too, and end."""
        self._loop.call_soon_threadsafe(self._halt.set)
        self._thread.join()

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests of this method and path pattern came."""
        return sum(method in {"", seen.method} and bool(re.search(path, seen.path)) for seen in self.requests)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._halt = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_MAX_HEAD)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._halt.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on; False where the connection is gone afterwards."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.decode("latin1").split(" ", 2)
        rule = self._pick(method, path)
        fault = rule.fault if rule else None
        self.requests.append(Request(method, path, fault))
        if fault is Fault.BLACKHOLE:
            await asyncio.Event().wait()
        if _header(head, b"expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is Fault.RESET_BEFORE:
            if _header(head, b"content-length") not in {b"", b"0"}:
                await reader.read(16)
            return _reset(writer)
        body = await _body(reader, head)
        if rule and fault is Fault.REPLY:
            writer.write(_error(rule, method))
            await writer.drain()
            return True
        if rule and fault is Fault.LATENCY:
            await asyncio.sleep(rule.seconds)
        answer = await self._forward(head, body)
        if fault is Fault.RESET_AFTER:
            return _reset(writer)
        if fault is Fault.TRUNCATE:
            start = answer.index(b"\r\n\r\n") + 4
            writer.write(answer[: (start + len(answer)) // 2])
            await writer.drain()
            return _reset(writer)
        writer.write(answer)
        await writer.drain()
        return True

    def _pick(self, method: str, path: str) -> Rule | None:
        for rule in self.rules:
            matches = rule.method in {"", method} and re.search(rule.path, path)
            if matches and rule.times > 0 and self._random.random() < rule.share:
                rule.times -= 1
                return rule
        return None

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """Return the server's whole answer; its end is the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        try:
            head = re.sub(rb"(?i)\r\n(connection|expect):[^\r]*", b"", head)
            writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await reader.read()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        top, blank, rest = answer.partition(b"\r\n\r\n")
        # The client's connection lives on. The head comes as HTTP/1.0 or 1.1, with a length either way.
        top = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", re.sub(rb"^HTTP/1\.0", b"HTTP/1.1", top))
        return top + blank + rest


@contextmanager
def fault_proxy(target_port: int, seed: int = 0) -> Iterator[FaultProxy]:
    """Run a proxy in front of a local port."""
    proxy = FaultProxy(target_port, seed)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def _header(head: bytes, name: bytes) -> bytes:
    match = re.search(rb"(?i)\r\n" + name + rb":\s*([^\r]*)", head)
    return match[1] if match else b""


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if _header(head, b"transfer-encoding").lower() != b"chunked":
        return await reader.readexactly(int(_header(head, b"content-length") or 0))
    body = b""
    while True:
        line = await reader.readline()
        body += line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)
        if int(line.split(b";")[0], 16) == 0:
            return body


def _error(rule: Rule, method: str) -> bytes:
    xml = f"<?xml version='1.0'?><Error><Code>{rule.code}</Code><Message>{rule.message}</Message></Error>".encode()
    date = f"Date: {rule.date}\r\n" if rule.date else ""
    head = (
        f"HTTP/1.1 {rule.status} Injected\r\n{date}Content-Type: application/xml\r\nContent-Length: {len(xml)}\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else xml)


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Send RST rather than FIN, as a host that vanished does."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
