"""Pure: an operation and the arguments of a call in, the parts of the HTTP request out."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote, urlencode

from carrel.errors import ToolCallError

Place = Literal["path", "query", "header", "cookie", "body", "payload"]
NOTHING: Any = object()
"""No default: what is not given is not sent."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DELIMITERS = {"spaceDelimited": " ", "pipeDelimited": "|"}


@dataclass(frozen=True)
class Part:
    """Where one argument goes, and how it is written there."""

    name: str
    """In Python."""
    wire: str
    place: Place
    default: Any = NOTHING
    style: str = "form"
    """As OpenAPI names them: form, simple, label, matrix, spaceDelimited, pipeDelimited, deepObject."""
    explode: bool = True
    as_json: bool = False


@dataclass(frozen=True)
class Operation:
    """One request that can be made again and again with other arguments."""

    method: str
    path: str
    parts: tuple[Part, ...] = ()
    content_type: str = "application/json"
    """Of the body, when there is one."""


@dataclass
class Prepared:
    """One request, without the service's address and what it sends with every request."""

    method: str
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None


def prepared(operation: Operation, arguments: Mapping[str, Any]) -> Prepared:
    """The request for these arguments; `ToolCallError` for a value that cannot stand where it is to go."""
    request = Prepared(operation.method, operation.path)
    fields: dict[str, Any] = {}
    payload: Any = NOTHING
    cookies: list[str] = []
    for part in operation.parts:
        value = arguments.get(part.name, part.default)
        if value is NOTHING or (value is None and part.place not in ("body", "payload")):
            continue
        match part.place:
            case "path":
                request.path = request.path.replace(f"{{{part.wire}}}", _in_path(part, value))
            case "query":
                request.query += _in_query(part, value)
            case "header":
                request.headers[part.wire] = _in_header(part, value)
            case "cookie":
                cookies += [f"{name}={quote(text, safe='')}" for name, text in _in_query(part, value)]
            case "body":
                fields[part.wire] = value
            case "payload":
                payload = value
    if cookies:
        request.headers["Cookie"] = "; ".join(cookies)
    body = fields if payload is NOTHING and fields else payload
    if body is not NOTHING:
        request.headers["Content-Type"], request.content = _body(operation.content_type, body)
    return request


# --- values as text ---------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case bool() | None | int() | float():
            return json.dumps(value)
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            return json.dumps(value, ensure_ascii=False, default=str)


def _pairs(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name), _text(item)) for name, item in value.items() if item is not None]


def _in_path(part: Part, value: Any) -> str:
    def safe(text: str) -> str:
        return quote(text, safe="")

    if part.as_json:
        texts = [safe(_text(value))]
    elif isinstance(value, Mapping):
        pairs = _pairs(value)
        texts = [f"{safe(name)}={safe(text)}" for name, text in pairs] if part.explode else []
        texts = texts or [safe(word) for pair in pairs for word in pair]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        texts = [safe(_text(item)) for item in value]
    else:
        texts = [safe(_text(value))]
    if part.style == "label":
        return "." + ("." if part.explode else ",").join(texts)
    if part.style == "matrix":
        named = isinstance(value, Mapping) and part.explode
        if part.explode:
            return "".join(f";{text}" if named else f";{part.wire}={text}" for text in texts)
        return f";{part.wire}={','.join(texts)}"
    word = ",".join(texts)
    # Either would lead to another path than the one that was meant.
    if word in ("", ".", ".."):
        raise ToolCallError(f"{part.name} cannot be {_text(value)!r}: as a part of the path it would lead elsewhere")
    return word


def _in_query(part: Part, value: Any) -> list[tuple[str, str]]:
    if part.as_json:
        return [(part.wire, _text(value))]
    if isinstance(value, Mapping):
        if part.style == "deepObject":
            return _deep(part.wire, value)
        pairs = _pairs(value)
        return pairs if part.explode else [(part.wire, ",".join(word for pair in pairs for word in pair))]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        texts = [_text(item) for item in value]
        if part.style in _DELIMITERS and not part.explode:
            return [(part.wire, _DELIMITERS[part.style].join(texts))]
        return [(part.wire, text) for text in texts] if part.explode else [(part.wire, ",".join(texts))]
    return [(part.wire, _text(value))]


def _deep(name: str, value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        items = value if isinstance(value, list | tuple) else [value]
        return [(name, _text(item)) for item in items if item is not None]
    return [pair for key, item in value.items() for pair in _deep(f"{name}[{key}]", item)]


def _in_header(part: Part, value: Any) -> str:
    if isinstance(value, Mapping) and not part.as_json:
        joined = "=" if part.explode else ","
        text = ",".join(f"{name}{joined}{item}" for name, item in _pairs(value))
    elif isinstance(value, list | tuple) and not part.as_json:
        text = ",".join(map(_text, value))
    else:
        text = _text(value)
    if _CONTROL.search(text) or not text.isascii():
        raise ToolCallError(f"{part.name} cannot be {text!r}: a header is plain ASCII on one line")
    return text


# --- bodies -----------------------------------------------------------------------------------------------------------


def _body(content_type: str, value: Any) -> tuple[str, bytes]:
    """The body and what it is called."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded" and isinstance(value, Mapping):
        pairs = [pair for name, item in value.items() for pair in _in_query(Part(name, name, "query"), item)]
        return content_type, urlencode(pairs).encode()
    if kind == "multipart/form-data" and isinstance(value, Mapping):
        return _multipart(value)
    if isinstance(value, bytes):
        return content_type if kind != "application/json" else "application/octet-stream", value
    if kind == "application/json" or kind.endswith("+json") or not isinstance(value, str):
        try:
            return content_type, json.dumps(value, ensure_ascii=False, allow_nan=False, default=_in_json).encode()
        except (TypeError, ValueError) as problem:
            raise ToolCallError(f"the body cannot be written as JSON: {problem}") from None
    return content_type, value.encode()


def _in_json(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is no data")


def _multipart(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    pieces = []
    for name, value in fields.items():
        quoted = re.sub(r'["\r\n]', lambda found: quote(found[0]), name)
        for item in value if isinstance(value, list | tuple) else [value]:
            file = f'; filename="{quoted}"\r\nContent-Type: application/octet-stream' if isinstance(item, bytes) else ""
            content = item if isinstance(item, bytes) else _text(item).encode()
            pieces.append(f'Content-Disposition: form-data; name="{quoted}"{file}\r\n\r\n'.encode() + content + b"\r\n")
    # Made of the content, so it does not stand in it.
    boundary = hashlib.blake2b(b"".join(pieces), digest_size=20).hexdigest()
    mark = f"--{boundary}".encode()
    whole = b"".join(mark + b"\r\n" + piece for piece in pieces) + mark + b"--\r\n"
    return f"multipart/form-data; boundary={boundary}", whole
