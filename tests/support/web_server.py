"""A real HTTP server on loopback whose answers a test writes; it records the requests."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class WebRequest:
    """One request."""

    method: str
    path: str
    query: list[tuple[str, str]]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """A body may be data (sent as JSON), text, bytes, or pieces that are sent one by one."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class WebServer:
    """`WebServer(lambda request: Answer({"x": 1}))`; `url` is where it is."""

    def __init__(self, answer: Callable[[WebRequest], Answer]) -> None:
        self.requests: list[WebRequest] = []
        self._open: list[socket.socket] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                web._open.append(self.connection)

            def handle_any(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = WebRequest(self.command, parts.path, parse_qsl(parts.query, True), headers, body)
                web.requests.append(request)
                try:
                    web.respond(self, answer(request))
                except ConnectionResetError:
                    # Raised by a function that sends no answer.
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = do_QUERY = handle_any

            def log_message(self, *_: object) -> None:
                """Log nothing: tests read `requests`."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @staticmethod
    def respond(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        body, headers = answer.body, dict(answer.headers)
        if isinstance(body, bytes | str):
            pieces: Iterable[bytes] = [body.encode() if isinstance(body, str) else body]
            headers.setdefault("content-type", "text/plain; charset=utf-8")
        elif body is None:
            pieces = [b""]
        elif isinstance(body, dict | list | int | float):
            pieces = [json.dumps(body).encode()]
            headers.setdefault("content-type", "application/json")
        else:
            pieces = body
        handler.send_response(answer.status)
        if isinstance(pieces, list):
            headers["content-length"] = str(sum(map(len, pieces)))
        else:
            headers["connection"] = "close"
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        try:
            for piece in pieces:
                handler.wfile.write(piece)
                handler.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            return  # the client has closed the connection
        if "connection" in headers:
            handler.close_connection = True

    def close(self) -> None:
        """Stop the server; closing twice has no effect."""
        self._server.shutdown()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()
