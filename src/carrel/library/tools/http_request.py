"""HTTP requests from operations and the arguments of calls; pure functions."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode

from carrel.errors import ToolCallError

Location = Literal["path", "query", "header", "cookie", "body", "payload"]
UNSET: Any = object()
"""The parameter has no default: it is sent only if the caller passes it."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DELIMITERS = {"spaceDelimited": " ", "pipeDelimited": "|"}


@dataclass(frozen=True)
class RequestParameter:
    """Where an argument is sent, and how it is encoded."""

    name: str
    """Its name in Python."""
    wire: str
    """Its name in the request."""
    location: Location
    default: Any = UNSET
    style: str = "form"
    """One of OpenAPI's styles: form, simple, label, matrix, spaceDelimited, pipeDelimited, deepObject."""
    explode: bool = True
    as_json: bool = False
    whole_path: bool = False
    """Whether its slashes are slashes of the path: `subscriptions/7/groups/a`."""
    content_type: str = ""
    """Content type of a part of a multipart body, if it has one."""


@dataclass(frozen=True)
class ApiOperation:
    """A kind of request, to be made with different arguments."""

    method: str
    path: str
    parts: tuple[RequestParameter, ...] = ()
    content_type: str = "application/json"
    """Content type of the body, if there is one."""
    fields: Mapping[str, RequestParameter] = field(default_factory=dict)
    """Encoding of fields of a form that differ from the default, by their names in the request."""


@dataclass
class HttpRequest:
    """A request, without the service's address and what is sent with every request."""

    method: str
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None


def build_request(operation: ApiOperation, arguments: Mapping[str, Any]) -> HttpRequest:
    """Return the request for these arguments; `ToolCallError` for a value that cannot be sent in its location."""
    path, _, in_path = operation.path.partition("?")
    request = HttpRequest(operation.method, path)
    fields: dict[str, Any] = {}
    payload: Any = UNSET
    cookies: list[str] = []
    for part in operation.parts:
        value = arguments.get(part.name, part.default)
        if value is UNSET or (value is None and part.location not in ("body", "payload")):
            continue
        match part.location:
            case "path":
                encoded = _in_path(part, value)
                request.path = request.path.replace(f"{{{part.wire}}}", encoded)
                in_path = in_path.replace(f"{{{part.wire}}}", encoded)
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
    request.query = [*parse_qsl(in_path.partition("#")[0], keep_blank_values=True), *request.query]
    if cookies:
        request.headers["Cookie"] = "; ".join(cookies)
    body = fields if payload is UNSET and fields else payload
    if body is not UNSET:
        request.headers["Content-Type"], request.content = _body(operation.content_type, body, operation.fields)
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


def _in_path(part: RequestParameter, value: Any) -> str:
    def safe(text: str) -> str:
        return quote(text, safe="")

    if part.whole_path and isinstance(value, str):
        steps = value.strip("/").split("/")
        return "/".join(_in_path(replace(part, whole_path=False), step) for step in steps)
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
    if part.style == "matrix":
        named = isinstance(value, Mapping) and part.explode
        if part.explode:
            return "".join(f";{text}" if named else f";{part.wire}={text}" for text in texts)
        return f";{part.wire}={','.join(texts)}"
    word = "." + ("." if part.explode else ",").join(texts) if part.style == "label" else ",".join(texts)
    # Each of these would change the path.
    if word in ("", ".", ".."):
        raise ToolCallError(f"{part.name} cannot be {_text(value)!r}, because it would change the path")
    return word


def _in_query(part: RequestParameter, value: Any) -> list[tuple[str, str]]:
    if part.as_json:
        return [(part.wire, _text(value))]
    if part.style == "deepObject":
        # OpenAPI does not define lists here; services that number items do so in forms, and if the value is a list.
        return _deep(part.wire, value, numbered=part.location == "body" or not isinstance(value, Mapping))
    if isinstance(value, Mapping):
        pairs = _pairs(value)
        return pairs if part.explode else [(part.wire, ",".join(word for pair in pairs for word in pair))]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        texts = [_text(item) for item in value]
        if part.style in _DELIMITERS and not part.explode:
            return [(part.wire, _DELIMITERS[part.style].join(texts))]
        return [(part.wire, text) for text in texts] if part.explode else [(part.wire, ",".join(texts))]
    return [(part.wire, _text(value))]


def _deep(name: str, value: Any, *, numbered: bool) -> list[tuple[str, str]]:
    """Return `name[key]=…`, and `name[0]=…` if lists are `numbered` or contain more than texts."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _deep(f"{name}[{key}]", item, numbered=numbered)]
    if isinstance(value, list | tuple):
        numbered = numbered or any(isinstance(item, Mapping | list | tuple) for item in value)
        names = [f"{name}[{place}]" if numbered else name for place in range(len(value))]
        return [pair for one, item in zip(names, value, strict=True) for pair in _deep(one, item, numbered=numbered)]
    return [] if value is None else [(name, _text(value))]


def _in_header(part: RequestParameter, value: Any) -> str:
    if isinstance(value, Mapping) and not part.as_json:
        joined = "=" if part.explode else ","
        text = ",".join(f"{name}{joined}{item}" for name, item in _pairs(value))
    elif isinstance(value, list | tuple) and not part.as_json:
        text = ",".join(map(_text, value))
    else:
        text = _text(value)
    if _CONTROL.search(text) or not text.isascii():
        raise ToolCallError(f"{part.name} cannot be {text!r}, because a header is plain ASCII on one line")
    return text


# --- bodies -----------------------------------------------------------------------------------------------------------


def _body(content_type: str, value: Any, fields: Mapping[str, RequestParameter]) -> tuple[str, bytes]:
    """Return the content type and the body."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded" and isinstance(value, Mapping):
        parts = [(fields.get(name) or _field(name, item), item) for name, item in value.items()]
        return content_type, urlencode([pair for part, item in parts for pair in _in_query(part, item)]).encode()
    if kind == "multipart/form-data" and isinstance(value, Mapping):
        return _multipart(value, fields)
    if isinstance(value, bytes):
        return content_type if kind != "application/json" else "application/octet-stream", value
    if kind == "application/json" or kind.endswith("+json") or not isinstance(value, str):
        try:
            return content_type, json.dumps(value, ensure_ascii=False, allow_nan=False, default=_in_json).encode()
        except (TypeError, ValueError) as error:
            raise ToolCallError(f"the body cannot be written as JSON: {error}") from None
    return content_type, value.encode()


def _in_json(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a {type(value).__name__} is not JSON data")


def _field(name: str, value: Any) -> RequestParameter:
    """Return the default encoding of a field of a form: an object is sent as JSON."""
    return RequestParameter(name, name, "body", as_json=isinstance(value, Mapping))


def _multipart(values: Mapping[str, Any], fields: Mapping[str, RequestParameter]) -> tuple[str, bytes]:
    pieces = []
    for name, kind, item in _items(values, fields):
        quoted = re.sub(r'["\r\n]', lambda found: quote(found[0]), name)
        kind = kind or ("application/json" if isinstance(item, Mapping) else "")
        head = f'Content-Disposition: form-data; name="{quoted}"'
        if isinstance(item, bytes):
            head, kind = f'{head}; filename="{quoted}"', kind or "application/octet-stream"
        content = item if isinstance(item, bytes) else _text(item).encode()
        pieces.append((f"{head}\r\nContent-Type: {kind}" if kind else head).encode() + b"\r\n\r\n" + content + b"\r\n")
    # Derived from the content, so it does not occur in it.
    boundary = hashlib.blake2b(b"".join(pieces), digest_size=20).hexdigest()
    mark = f"--{boundary}".encode()
    body = b"".join(mark + b"\r\n" + piece for piece in pieces) + mark + b"--\r\n"
    return f"multipart/form-data; boundary={boundary}", body


def _items(values: Mapping[str, Any], fields: Mapping[str, RequestParameter]) -> Iterator[tuple[str, str, Any]]:
    """Yield each part of a form with its name and its content type."""
    for name, value in values.items():
        part = fields.get(name) or RequestParameter(name, name, "body")
        if part.style == "deepObject" and not isinstance(value, bytes):
            yield from ((one, "", text) for one, text in _in_query(part, value))
        else:
            for item in value if isinstance(value, list | tuple) and not part.as_json else [value]:
                yield name, part.content_type, item
