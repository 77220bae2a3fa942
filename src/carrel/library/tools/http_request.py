"""Pure: an operation and the arguments of a call in, the parts of the HTTP request out."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode

from carrel.errors import ToolCallError

Place = Literal["path", "query", "header", "cookie", "body", "payload"]
UNSET: Any = object()
"""No default: what is not given is not sent."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DELIMITERS = {"spaceDelimited": " ", "pipeDelimited": "|"}


@dataclass(frozen=True)
class RequestParameter:
    """Where one argument goes, and how it is written there."""

    name: str
    """In Python."""
    wire: str
    place: Place
    default: Any = UNSET
    style: str = "form"
    """As OpenAPI names them: form, simple, label, matrix, spaceDelimited, pipeDelimited, deepObject."""
    explode: bool = True
    as_json: bool = False
    whole_path: bool = False
    """Its slashes are slashes of the path: `subscriptions/7/groups/a`."""
    kind: str = ""
    """Its type of content, where it is a part of a body that has a type of its own."""


@dataclass(frozen=True)
class ApiOperation:
    """One request that can be made again and again with other arguments."""

    method: str
    path: str
    parts: tuple[RequestParameter, ...] = ()
    content_type: str = "application/json"
    """Of the body, when there is one."""
    fields: Mapping[str, RequestParameter] = field(default_factory=dict)
    """How fields of a form are written that are not written as usual, by their names on the wire."""


@dataclass
class HttpRequest:
    """One request, without the service's address and what it sends with every request."""

    method: str
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None


def build_request(operation: ApiOperation, arguments: Mapping[str, Any]) -> HttpRequest:
    """The request for these arguments; `ToolCallError` for a value that cannot stand where it is to go."""
    path, _, in_path = operation.path.partition("?")
    request = HttpRequest(operation.method, path)
    fields: dict[str, Any] = {}
    payload: Any = UNSET
    cookies: list[str] = []
    for part in operation.parts:
        value = arguments.get(part.name, part.default)
        if value is UNSET or (value is None and part.place not in ("body", "payload")):
            continue
        match part.place:
            case "path":
                written = _in_path(part, value)
                request.path = request.path.replace(f"{{{part.wire}}}", written)
                in_path = in_path.replace(f"{{{part.wire}}}", written)
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
    # Each of these would lead to another path than the one that was meant.
    if word in ("", ".", ".."):
        raise ToolCallError(f"{part.name} cannot be {_text(value)!r}: as a part of the path it would lead elsewhere")
    return word


def _in_query(part: RequestParameter, value: Any) -> list[tuple[str, str]]:
    if part.as_json:
        return [(part.wire, _text(value))]
    if part.style == "deepObject":
        # OpenAPI says nothing of lists in it; services that count do so in their forms, and where all of it is a list.
        return _deep(part.wire, value, counted=part.place == "body" or not isinstance(value, Mapping))
    if isinstance(value, Mapping):
        pairs = _pairs(value)
        return pairs if part.explode else [(part.wire, ",".join(word for pair in pairs for word in pair))]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        texts = [_text(item) for item in value]
        if part.style in _DELIMITERS and not part.explode:
            return [(part.wire, _DELIMITERS[part.style].join(texts))]
        return [(part.wire, text) for text in texts] if part.explode else [(part.wire, ",".join(texts))]
    return [(part.wire, _text(value))]


def _deep(name: str, value: Any, *, counted: bool) -> list[tuple[str, str]]:
    """`name[key]=…`, and `name[0]=…` where lists are `counted` or have more in them than texts."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _deep(f"{name}[{key}]", item, counted=counted)]
    if isinstance(value, list | tuple):
        counted = counted or any(isinstance(item, Mapping | list | tuple) for item in value)
        names = [f"{name}[{place}]" if counted else name for place in range(len(value))]
        return [pair for one, item in zip(names, value, strict=True) for pair in _deep(one, item, counted=counted)]
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
        raise ToolCallError(f"{part.name} cannot be {text!r}: a header is plain ASCII on one line")
    return text


# --- bodies -----------------------------------------------------------------------------------------------------------


def _body(content_type: str, value: Any, fields: Mapping[str, RequestParameter]) -> tuple[str, bytes]:
    """The body and what it is called."""
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
        except (TypeError, ValueError) as problem:
            raise ToolCallError(f"the body cannot be written as JSON: {problem}") from None
    return content_type, value.encode()


def _in_json(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is no data")


def _field(name: str, value: Any) -> RequestParameter:
    """A field of a form as usual: an object is JSON, which keeps its name and all that lies in it."""
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
    # Made of the content, so it does not stand in it.
    boundary = hashlib.blake2b(b"".join(pieces), digest_size=20).hexdigest()
    mark = f"--{boundary}".encode()
    whole = b"".join(mark + b"\r\n" + piece for piece in pieces) + mark + b"--\r\n"
    return f"multipart/form-data; boundary={boundary}", whole


def _items(values: Mapping[str, Any], fields: Mapping[str, RequestParameter]) -> Iterator[tuple[str, str, Any]]:
    """Each part of a form with its name and the type of content that it is said to have."""
    for name, value in values.items():
        part = fields.get(name) or RequestParameter(name, name, "body")
        if part.style == "deepObject" and not isinstance(value, bytes):
            yield from ((one, "", text) for one, text in _in_query(part, value))
        else:
            for item in value if isinstance(value, list | tuple) and not part.as_json else [value]:
                yield name, part.kind, item
