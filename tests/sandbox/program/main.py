"""Reads lines of JSON, executes the code in them, and answers with the value of `answer` or the error."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


def run(line: int, init: int, settings: dict[str, Any]) -> None:
    """The entry: never returns while the host's end is open."""
    names: dict[str, Any] = {"settings": settings, "init": init, "line": line, "serve": serve}
    serve(socket.socket(fileno=line), names)


def serve(connection: socket.socket, names: dict[str, Any]) -> None:
    names.update(connection=connection, names=names)
    connection.sendall(json.dumps({"ready": os.getpid()}).encode() + b"\n")
    stream = connection.makefile("rb")
    for text in stream:
        reply = execute(json.loads(text)["code"], names)
        connection.sendall(json.dumps(reply, default=repr).encode() + b"\n")
    os._exit(0)


def execute(code: str, names: dict[str, Any]) -> dict[str, Any]:
    names["answer"] = None
    try:
        exec(compile(code, "<test>", "exec"), names)
    except BaseException as error:  # noqa: BLE001 -- what the attempt raises is what the test asks about
        return {"error": type(error).__name__, "errno": getattr(error, "errno", None), "message": str(error)}
    return {"value": names["answer"]}
