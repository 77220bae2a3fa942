"""An HTTP server that answers as a test says, and a relay whose connections can be broken."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class ReceivedRequest:
    """A request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes] | None
"""Status, headers and body; None drops the connection."""


@dataclass
class FaultyServer:
    """An HTTP server that answers each request with the next of its answers, and all further ones with the last."""

    answers: Iterable[Answer | Callable[[ReceivedRequest], Answer]]
    seen: list[ReceivedRequest] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Self:
        ours, answers = self, list(self.answers)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                seen = ReceivedRequest(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                ours.seen.append(seen)
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                answer = answer(seen) if callable(answer) else answer
                if answer is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in ({"content-type": "application/json"} | headers).items():
                    self.send_header(name, value)
                if "content-length" not in headers:
                    self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                if int(headers.get("content-length", len(content))) != len(content):
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/api/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def reply(data: Any, status: int = 200, **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(data).encode()


class Relay:
    """Connections to a server that can be broken; new ones work again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.answered = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/api/v1"

    def __enter__(self) -> Self:
        self._begin(self._accept)
        return self

    def _begin(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                self._open += [near, far]
            self._begin(self._pass_on, near, far)
            self._begin(self._pass_back, far, near)

    def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        self._pass_on(far, near, answers=True)

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool = False) -> None:
        try:
            while piece := source.recv(65536):
                target.sendall(piece)
                if answers:
                    with self._lock:
                        self.answered += piece
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    async def cut_after(self, answer: bytes) -> None:
        """Break the connections when this was answered."""
        async with asyncio.timeout(60):
            while answer not in self.answered:  # noqa: ASYNC110 -- it is answered in other threads
                await asyncio.sleep(0.01)
        self.cut()

    def cut(self) -> None:
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)
        for connection in self._open:
            connection.close()
