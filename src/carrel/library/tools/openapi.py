"""Tools of a service with an OpenAPI document: one for each operation."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urljoin, urlsplit

from carrel.errors import ConfigurationError
from carrel.library.names import python_name, python_names
from carrel.library.tools.definitions import OpenApiDefinition
from carrel.library.tools.http import HttpClient
from carrel.library.tools.http_request import ApiOperation, Location, RequestParameter
from carrel.library.tools.openapi_schema import OpenApiDocument, list_or_empty, mapping_or_empty, strings
from carrel.library.tools.schema_types import truncate
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, run_in_thread
from carrel.text import did_you_mean
from carrel.yaml_files import YamlFault, read_yaml

METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "query")
_NEVER = frozenset(("accept", "content-type", "authorization"))
"""Header parameters that OpenAPI says to ignore."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Matches valid names of headers."""
_BODIES = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
_PLAIN_OBJECT = frozenset(("type", "properties", "required", "title", "description", "additionalProperties"))
_STYLES: Mapping[str, str] = {"path": "simple", "query": "form", "header": "simple", "cookie": "form"}


@dataclass(frozen=True)
class OpenApiOperation:
    """An operation of a service."""

    name: str
    """As in the document."""
    description: str
    operation: ApiOperation
    parameters: Mapping[str, Any]
    returns: Mapping[str, Any] | None
    tags: tuple[str, ...]
    base_url: str


@dataclass
class ParseResult:
    """The operations of a document, and why others cannot be used."""

    operations: list[OpenApiOperation] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def parse_document(
    content: Any,
    *,
    fixed: frozenset[str],
    base_url: str | None = None,
    spec_url: str | None = None,
    private: bool = False,
) -> ParseResult:
    """Return all operations; `ConfigurationError` when it is no OpenAPI 3 document, or none of them can be used.

    `fixed`: headers (in lower case) and query parameters that the definition sends itself; `spec_url`: base of relative
    servers; `private`: whether secrets are sent, which then go to one host only: that of `base_url`, else of
    `spec_url`, else of the first server in a document beside the definition."""
    if not isinstance(content, Mapping):
        raise ConfigurationError("it is not an OpenAPI document: expected an object with openapi and paths")
    version = str(content.get("openapi", ""))
    if "swagger" in content:
        raise ConfigurationError(f"it is Swagger {content['swagger']}; convert it to OpenAPI 3")
    if not re.match(r"3\.[012](\.|$)", version):
        raise ConfigurationError(f"openapi: expected 3.0, 3.1 or 3.2, not {version or 'nothing'!r}")
    document, found, own = OpenApiDocument(content), ParseResult(), spec_url
    for path, method, item, operation in _operations(document, found.errors):
        name = str(operation.get("operationId") or f"{method}_{path.strip('/') or 'root'}")
        try:
            address = base_url or _server(content, item, operation, spec_url)
            own = own or address
            if private and base_url is None and not _same_host(own, address):
                raise ConfigurationError(
                    f"servers: it is at {urlsplit(address).netloc}, and the definition's secrets are sent to "
                    f"{urlsplit(own).netloc} only; set base_url in the definition to send them there"
                )
            found.operations.append(_make_operation(document, name, path, method, item, operation, fixed, address))
        except ConfigurationError as error:
            found.errors.append(f"{method.upper()} {path}: {error}")
    if found.errors and not found.operations:
        raise ConfigurationError(found.errors[0])
    return found


def _operations(
    document: OpenApiDocument, errors: list[str]
) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    for path, value in mapping_or_empty(document.content.get("paths")).items():
        try:
            item = document.resolved(value)
        except ConfigurationError as error:
            errors.append(f"{path}: {error}")
            continue
        for method in METHODS:
            if isinstance(item.get(method), Mapping):
                yield str(path), method, item, item[method]


def _make_operation(
    document: OpenApiDocument,
    name: str,
    path: str,
    method: str,
    item: Mapping[str, Any],
    given: Mapping[str, Any],
    fixed: frozenset[str],
    address: str,
) -> OpenApiOperation:
    collector = ParameterCollector(document, path, fixed)
    for parameter in _parameters(document, item, given):
        collector.add(parameter)
    collector.add_missing()
    content_type = collector.add_body(given.get("requestBody"))
    parts, schema = collector.result()
    summary, longer = str(given.get("summary") or "").strip(), str(given.get("description") or "").strip()
    text = summary if longer in summary else (longer if longer.startswith(summary) else f"{summary}\n\n{longer}")
    return OpenApiOperation(
        name=name,
        description=truncate(f"Deprecated. {text}".strip() if given.get("deprecated") is True else text),
        operation=ApiOperation(method.upper(), path, tuple(parts), content_type, collector.encodings),
        parameters=document.with_definitions(schema, "readOnly"),
        returns=_returns(document, given.get("responses")),
        tags=tuple(strings(given.get("tags"))),
        base_url=address,
    )


def _parameters(document: OpenApiDocument, item: Mapping[str, Any], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of the path and those of the operation, which take precedence."""
    both = [*list_or_empty(item.get("parameters")), *list_or_empty(given.get("parameters"))]
    resolved = [document.resolved(parameter) for parameter in both]
    return list({(str(parameter.get("in")), str(parameter.get("name"))): parameter for parameter in resolved}.values())


@dataclass
class ParameterCollector:
    """Collects the parameters of one operation and builds their schema."""

    document: OpenApiDocument
    path: str
    fixed: frozenset[str]
    found: list[tuple[RequestParameter, dict[str, Any], bool]] = field(default_factory=list)
    """Each parameter (its Python name is not known yet), its schema, and whether it is required."""
    encodings: dict[str, RequestParameter] = field(default_factory=dict)
    """Encodings of the fields of a form that the document defines."""

    def add(self, parameter: Mapping[str, Any]) -> None:
        wire, location = str(parameter.get("name")), str(parameter.get("in"))
        if location not in _STYLES:
            raise ConfigurationError(f"parameter {wire}, in: expected path, query, header or cookie, not {location!r}")
        if location == "header" and (wire.lower() in _NEVER or not _TOKEN.fullmatch(wire)):
            return
        if f"{location} {wire.lower()}" in self.fixed:
            return
        style = str(parameter.get("style") or _STYLES[location])
        content = mapping_or_empty(parameter.get("content"))
        holder = mapping_or_empty(next(iter(content.values()))) if content else parameter
        schema = self.document.schema(holder.get("schema") or {}, "readOnly")
        if parameter.get("description"):
            schema = {**schema, "description": truncate(str(parameter["description"]))}
        if parameter.get("deprecated") is True:
            schema = {**schema, "deprecated": True}
        explode = parameter.get("explode")
        part = RequestParameter(
            name=wire,
            wire=wire,
            location=_location(location),
            style=style,
            explode=explode if isinstance(explode, bool) else style in ("form", "deepObject"),
            as_json=bool(content),
            # Azure's extension, used in hundreds of documents; OpenAPI itself has none.
            whole_path=location == "path" and parameter.get("x-ms-skip-url-encoding") is True,
        )
        self.found.append((part, schema, location == "path" or parameter.get("required") is True))

    def add_missing(self) -> None:
        """Add the parameters of the path that are not described."""
        known = {part.wire for part, _, _ in self.found if part.location == "path"}
        for wire in re.findall(r"{([^{}]+)}", self.path):
            if wire not in known:
                part = RequestParameter(wire, wire, "path", style="simple", explode=False)
                self.found.append((part, {"type": ["string", "integer"]}, True))

    def add_body(self, body: Any) -> str:
        """Add the fields of the body if it is a plain object, else all of it as `body`; return its content type."""
        if body is None:
            return "application/json"
        body = self.document.resolved(body)
        content = mapping_or_empty(body.get("content"))
        if not content:
            return "application/json"
        by_type = {str(kind).partition(";")[0].strip().lower(): str(kind) for kind in content}
        chosen = next((kind for kind in by_type if kind.endswith("+json")), next(iter(by_type)))
        kind = next((kind for kind in _BODIES if kind in by_type), chosen)
        schema = self._body_schema(mapping_or_empty(content[by_type[kind]]).get("schema"))
        required = body.get("required") is True
        for wire, encoding in mapping_or_empty(mapping_or_empty(content[by_type[kind]]).get("encoding")).items():
            self.encodings[str(wire)] = _encoding(str(wire), mapping_or_empty(encoding))
        fields = self._fields(schema) if kind in _BODIES else None
        if fields is None:
            if body.get("description") and "description" not in schema:
                schema = {**schema, "description": str(body["description"])}
            self.found.append((RequestParameter("body", "body", "payload"), schema, required))
        else:
            names = strings(schema.get("required"))
            for wire, value in fields.items():
                self.found.append((RequestParameter(wire, wire, "body"), value, required and wire in names))
        return kind if "*" not in kind else "application/octet-stream"

    def _body_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of a body with its reference resolved, and `allOf` of plain objects as one object."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = self.document.resolved(schema)
        body = self.document.schema(schema or {}, "readOnly")
        if set(body) <= {"allOf", "description", "title", "type"} and isinstance(schema, Mapping) and "allOf" in schema:
            parts = [self._body_schema(part) for part in list_or_empty(schema["allOf"])]
            if parts and all(_is_plain(part) for part in parts):
                properties = {name: value for part in parts for name, value in part["properties"].items()}
                required = list(dict.fromkeys(name for part in parts for name in strings(part.get("required"))))
                return {"type": "object", "properties": properties, "required": required}
        return body

    def _fields(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        known = {part.wire for part, _, _ in self.found}
        if not _is_plain(schema) or known & set(schema["properties"]):
            return None
        fields: Mapping[str, Any] = schema["properties"]
        return fields

    def result(self) -> tuple[list[RequestParameter], dict[str, Any]]:
        """Return all parameters with their Python names, the required ones first, and their schema."""
        ordered = sorted(self.found, key=lambda entry: not entry[2])
        parts, properties, required = [], {}, []
        names = python_names(part.wire for part, _, _ in ordered)
        for word, (part, schema, is_required) in zip(names, ordered, strict=True):
            parts.append(replace(part, name=word))
            properties[word] = schema
            if is_required:
                required.append(word)
        return parts, {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


def _encoding(wire: str, encoding: Mapping[str, Any]) -> RequestParameter:
    """Return the encoding of a field of a form."""
    has_style = "style" in encoding or "explode" in encoding
    style, explode = str(encoding.get("style") or "form"), encoding.get("explode")
    # A list of content types, or a pattern, is ignored.
    kind = str(encoding.get("contentType") or "").strip().lower()
    kind = kind if re.fullmatch(r"[a-z0-9.+-]+/[a-z0-9.+-]+", kind) else ""
    return RequestParameter(
        name=wire,
        wire=wire,
        location="body",
        style=style,
        explode=explode if isinstance(explode, bool) else style in ("form", "deepObject"),
        as_json=not has_style and (kind == "application/json" or kind.endswith("+json")),
        content_type=kind,
    )


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is an object with named fields only."""
    properties = schema.get("properties")
    return (
        isinstance(properties, Mapping)
        and bool(properties)
        and schema.get("type", "object") == "object"
        and set(schema) <= _PLAIN_OBJECT
        and not isinstance(schema.get("additionalProperties"), Mapping)
    )


def _location(name: str) -> Location:
    locations: Mapping[str, Location] = {"path": "path", "query": "query", "header": "header", "cookie": "cookie"}
    return locations[name]


def _returns(document: OpenApiDocument, responses: Any) -> Mapping[str, Any] | None:
    """Return the schema of the answer to a successful request, if that is JSON."""
    by_code = {str(code).upper(): response for code, response in mapping_or_empty(responses).items()}
    codes = [*sorted(code for code in by_code if code.startswith("2")), "DEFAULT"]
    for code in codes:
        if code not in by_code:
            continue
        for kind, given in mapping_or_empty(document.resolved(by_code[code]).get("content")).items():
            schema = mapping_or_empty(given).get("schema")
            if "json" in str(kind).lower() and schema:
                return document.with_definitions(document.schema(schema, "writeOnly"), "writeOnly")
        return None
    return None


def _server(content: Mapping[str, Any], item: Mapping[str, Any], given: Mapping[str, Any], spec_url: str | None) -> str:
    """Return the URL of the operation: its own server, its path's, or the document's first."""
    servers = (
        list_or_empty(given.get("servers"))
        or list_or_empty(item.get("servers"))
        or list_or_empty(content.get("servers"))
    )
    first = mapping_or_empty(servers[0]) if servers else {}
    url = str(first.get("url") or "/")
    for name, variable in mapping_or_empty(first.get("variables")).items():
        url = url.replace(f"{{{name}}}", str(mapping_or_empty(variable).get("default", "")))
    try:
        if spec_url is not None:
            url = urljoin(spec_url, url)
        elif url.startswith("//"):
            url = f"https:{url}"
        is_complete = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname) and "{" not in url
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ConfigurationError(f"servers: {url!r} is not the address of a service; set base_url in the definition")
    return url


def _same_host(one: str, other: str) -> bool:
    """Whether secrets for the first URL may be sent to the other: the same host, or the same by https."""
    before, after = urlsplit(one), urlsplit(other)
    ports = {"http": 80, "https": 443}
    try:
        was, now = ((url.scheme, url.hostname, url.port or ports.get(url.scheme)) for url in (before, after))
    except ValueError:
        return False  # an invalid port
    return was == now or (was == ("http", before.hostname, 80) and now == ("https", before.hostname, 443))


SECONDS_TO_FETCH = 30.0
_URL = ("http://", "https://")
_PUBLIC_HEADERS = frozenset(
    ("accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent")
)
"""Headers that contain no keys."""
_KEY_LIKE = re.compile(r"key|token|secret|auth|passw|signature", re.IGNORECASE)

logger = logging.getLogger(__name__)


class OpenApiProvider:
    """The tool provider of a service's operations; its document is read on first use."""

    def __init__(
        self, definition: OpenApiDefinition, secrets: Secrets, *, read: Callable[[str], Awaitable[bytes]]
    ) -> None:
        """`read` returns the bytes of a file beside the definition; FileNotFoundError when there is none."""
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._client = HttpClient(secrets, definition.headers, definition.query)
        self._read = read
        self._reading = asyncio.Lock()
        self._tools: list[Tool] | None = None
        self._operations: dict[str, OpenApiOperation] = {}

    async def definitions(self) -> Sequence[Tool]:
        """Read the document, once; `ConfigurationError` when there is none, or it is no OpenAPI document."""
        async with self._reading:
            if self._tools is None:
                self._tools = self._make_tools(await self._read_document())
            return self._tools

    async def _read_document(self) -> ParseResult:
        definition = self._definition
        spec_url = definition.spec if definition.spec.startswith(_URL) else None
        try:
            data = await (self._client.fetch(spec_url, SECONDS_TO_FETCH) if spec_url else self._read(definition.spec))
        except FileNotFoundError as error:
            raise ConfigurationError(f"{self.name}, spec: {error}") from None
        fixed = {f"header {name.lower()}" for name in definition.headers} | {
            f"query {name.lower()}" for name in definition.query
        }
        try:
            # A large document takes a while; other tasks run meanwhile.
            return await run_in_thread(
                lambda: parse_document(
                    parse_json_or_yaml(data),
                    fixed=frozenset(fixed),
                    base_url=definition.base_url,
                    spec_url=spec_url,
                    private=_has_secrets(definition),
                )
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.name}, spec {definition.spec}: {error}") from None

    def _make_tools(self, found: ParseResult) -> list[Tool]:
        definition = self._definition
        for error in found.errors:
            logger.warning("left out an operation of %s: %s", self.name, error)
        operations = _selected(self.name, found.operations, definition.only)
        tools = []
        for word, operation in zip(python_names(operation.name for operation in operations), operations, strict=True):
            tool = definition.make_tool(
                word,
                operation.parameters,
                description=operation.description,
                returns=operation.returns,
                tags=operation.tags,
            )
            self._operations[tool.name] = operation
            tools.append(tool)
        return tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], on_output: OnOutput | None = None) -> Any:
        """Return the service's answer: JSON as data, text as str, anything else as bytes."""
        await self.definitions()
        operation = self._operations[tool.name]
        return await self._client.call(tool, operation.base_url, operation.operation, arguments, on_output)

    async def close(self) -> None:
        await self._client.close()


def _has_secrets(definition: OpenApiDefinition) -> bool:
    """Whether a definition sends secrets: any header with an unknown name may contain a key."""
    return (
        any("${" in text for text in (*definition.headers.values(), *definition.query.values()))
        or any(name.lower() not in _PUBLIC_HEADERS for name in definition.headers)
        or any(_KEY_LIKE.search(name) for name in definition.query)
    )


def _selected(name: str, operations: Sequence[OpenApiOperation], only: Sequence[str]) -> list[OpenApiOperation]:
    """Return the operations that `only` names by name or tag; `ConfigurationError` for an unknown name."""
    known = {word for operation in operations for word in (operation.name, *operation.tags)}
    for word in only:
        if word not in known and word not in set(map(python_name, known)):
            raise ConfigurationError(f"{name}, only: there is no operation or tag {word}{did_you_mean(word, known)}")
    return [
        operation
        for operation in operations
        if not only or {operation.name, python_name(operation.name), *operation.tags} & set(only)
    ]


def parse_json_or_yaml(data: bytes) -> Any:
    """Parse a document; `ConfigurationError` when it is neither JSON nor YAML."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        if data.lstrip()[:1] == b"{":
            raise ConfigurationError(f"it is not valid JSON: {error}") from None
    try:
        return read_yaml(data, unique_keys=False)[0]
    except YamlFault as fault:
        raise ConfigurationError(f"it is neither JSON nor YAML: {fault.in_file('document')}") from None
