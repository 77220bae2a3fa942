"""Tools of a service that describes itself by OpenAPI: one for each operation."""

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
from carrel.library.tools.http_request import ApiOperation, Place, RequestParameter
from carrel.library.tools.openapi_schema import OpenApiDocument, a_list, an_object, words
from carrel.library.tools.schema_types import truncate
from carrel.library.tools.secrets import Secrets
from carrel.library.tools.tool import Tool
from carrel.processes import OnOutput, run_in_thread
from carrel.text import did_you_mean

METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "query")
_NEVER = frozenset(("accept", "content-type", "authorization"))
"""Header parameters that OpenAPI itself says to ignore."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What a header may be called; nobody can be sent another."""
_BODIES = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
_PLAIN_OBJECT = frozenset(("type", "properties", "required", "title", "description", "additionalProperties"))
_STYLES: Mapping[str, str] = {"path": "simple", "query": "form", "header": "simple", "cookie": "form"}


@dataclass(frozen=True)
class OpenApiOperation:
    """One operation of a service."""

    name: str
    """As the document has it; code writes it as Python can."""
    description: str
    operation: ApiOperation
    parameters: Mapping[str, Any]
    returns: Mapping[str, Any] | None
    tags: tuple[str, ...]
    base_url: str


@dataclass
class Read:
    """What a document has, and which of its operations cannot be used, and why."""

    operations: list[OpenApiOperation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(
    content: Any,
    *,
    fixed: frozenset[str],
    base_url: str | None = None,
    spec_url: str | None = None,
    private: bool = False,
) -> Read:
    """All operations; `ConfigurationError` when it is no OpenAPI 3 document, or none of them can be used.

    `fixed`: names of headers (in small letters) and query parameters that the definition sends itself;
    `spec_url`: what a relative server is relative to; `private`: what is sent is for one host only, which is the one
    that `base_url` names, or `spec_url`, or else the first that a document beside the definition does."""
    if not isinstance(content, Mapping):
        raise ConfigurationError("it is no OpenAPI document: an object with openapi and paths is expected")
    version = str(content.get("openapi", ""))
    if "swagger" in content:
        raise ConfigurationError(f"it is Swagger {content['swagger']}; convert it to OpenAPI 3")
    if not re.match(r"3\.[012](\.|$)", version):
        raise ConfigurationError(f"openapi: 3.0, 3.1 or 3.2 is expected, not {version or 'nothing'!r}")
    document, found, own = OpenApiDocument(content), Read(), spec_url
    for path, method, item, given in _operations(document, found.problems):
        name = str(given.get("operationId") or f"{method}_{path.strip('/') or 'root'}")
        try:
            address = base_url or _server(content, item, given, spec_url)
            own = own or address
            if private and base_url is None and not _same_host(own, address):
                raise ConfigurationError(
                    f"servers: it is at {urlsplit(address).netloc}, and the definition's secrets are for "
                    f"{urlsplit(own).netloc} only; set base_url in the definition if they are to go there"
                )
            found.operations.append(_described(document, name, path, method, item, given, fixed, address))
        except ConfigurationError as problem:
            found.problems.append(f"{method.upper()} {path}: {problem}")
    if found.problems and not found.operations:
        raise ConfigurationError(found.problems[0])
    return found


def _operations(
    document: OpenApiDocument, problems: list[str]
) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    for path, given in an_object(document.content.get("paths")).items():
        try:
            item = document.resolved(given)
        except ConfigurationError as problem:
            problems.append(f"{path}: {problem}")
            continue
        for method in METHODS:
            if isinstance(item.get(method), Mapping):
                yield str(path), method, item, item[method]


def _described(
    document: OpenApiDocument,
    name: str,
    path: str,
    method: str,
    item: Mapping[str, Any],
    given: Mapping[str, Any],
    fixed: frozenset[str],
    address: str,
) -> OpenApiOperation:
    gathered = ParameterCollector(document, path, fixed)
    for parameter in _parameters(document, item, given):
        gathered.add(parameter)
    gathered.add_missing()
    content_type = gathered.add_body(given.get("requestBody"))
    parts, schema = gathered.made()
    summary, longer = str(given.get("summary") or "").strip(), str(given.get("description") or "").strip()
    told = summary if longer in summary else (longer if longer.startswith(summary) else f"{summary}\n\n{longer}")
    return OpenApiOperation(
        name=name,
        description=truncate(f"Deprecated. {told}".strip() if given.get("deprecated") is True else told),
        operation=ApiOperation(method.upper(), path, tuple(parts), content_type, gathered.written),
        parameters=document.with_definitions(schema, "readOnly"),
        returns=_returns(document, given.get("responses")),
        tags=tuple(words(given.get("tags"))),
        base_url=address,
    )


def _parameters(document: OpenApiDocument, item: Mapping[str, Any], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The path's and the operation's own, which win."""
    both = [*a_list(item.get("parameters")), *a_list(given.get("parameters"))]
    resolved = [document.resolved(parameter) for parameter in both]
    return list({(str(parameter.get("in")), str(parameter.get("name"))): parameter for parameter in resolved}.values())


@dataclass
class ParameterCollector:
    """The parameters of one operation on their way to a schema."""

    document: OpenApiDocument
    path: str
    fixed: frozenset[str]
    found: list[tuple[RequestParameter, dict[str, Any], bool]] = field(default_factory=list)
    """Where each goes (its Python name is not known yet), its schema, and whether it is required."""
    written: dict[str, RequestParameter] = field(default_factory=dict)
    """How fields of a form are written, where the document says so."""

    def add(self, parameter: Mapping[str, Any]) -> None:
        wire, place = str(parameter.get("name")), str(parameter.get("in"))
        if place not in _STYLES:
            raise ConfigurationError(f"parameter {wire}, in: path, query, header or cookie is expected, not {place!r}")
        if place == "header" and (wire.lower() in _NEVER or not _TOKEN.fullmatch(wire)):
            return
        if f"{place} {wire.lower()}" in self.fixed:
            return
        style = str(parameter.get("style") or _STYLES[place])
        content = an_object(parameter.get("content"))
        holder = an_object(next(iter(content.values()))) if content else parameter
        schema = self.document.schema(holder.get("schema") or {}, "readOnly")
        if parameter.get("description"):
            schema = {**schema, "description": truncate(str(parameter["description"]))}
        if parameter.get("deprecated") is True:
            schema = {**schema, "deprecated": True}
        explode = parameter.get("explode")
        part = RequestParameter(
            name=wire,
            wire=wire,
            place=_place(place),
            style=style,
            explode=explode if isinstance(explode, bool) else style in ("form", "deepObject"),
            as_json=bool(content),
            # Azure's word for it, in hundreds of descriptions; OpenAPI itself has none.
            whole_path=place == "path" and parameter.get("x-ms-skip-url-encoding") is True,
        )
        self.found.append((part, schema, place == "path" or parameter.get("required") is True))

    def add_missing(self) -> None:
        """What stands in the path and is described nowhere."""
        known = {part.wire for part, _, _ in self.found if part.place == "path"}
        for wire in re.findall(r"{([^{}]+)}", self.path):
            if wire not in known:
                part = RequestParameter(wire, wire, "path", style="simple", explode=False)
                self.found.append((part, {"type": ["string", "integer"]}, True))

    def add_body(self, body: Any) -> str:
        """The body's fields as parameters where it is a plain object, else all of it as `body`; its type of content."""
        if body is None:
            return "application/json"
        body = self.document.resolved(body)
        content = an_object(body.get("content"))
        if not content:
            return "application/json"
        by_kind = {str(kind).partition(";")[0].strip().lower(): str(kind) for kind in content}
        chosen = next((kind for kind in by_kind if kind.endswith("+json")), next(iter(by_kind)))
        kind = next((kind for kind in _BODIES if kind in by_kind), chosen)
        schema = self._whole(an_object(content[by_kind[kind]]).get("schema"))
        required = body.get("required") is True
        for wire, encoding in an_object(an_object(content[by_kind[kind]]).get("encoding")).items():
            self.written[str(wire)] = _written(str(wire), an_object(encoding))
        fields = self._fields(schema) if kind in _BODIES else None
        if fields is None:
            if body.get("description") and "description" not in schema:
                schema = {**schema, "description": str(body["description"])}
            self.found.append((RequestParameter("body", "body", "payload"), schema, required))
        else:
            wanted = words(schema.get("required"))
            for wire, value in fields.items():
                self.found.append((RequestParameter(wire, wire, "body"), value, required and wire in wanted))
        return kind if "*" not in kind else "application/octet-stream"

    def _whole(self, schema: Any) -> dict[str, Any]:
        """The body's schema, with the one it refers to in its place, and `allOf` of plain objects as one object."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = self.document.resolved(schema)
        made = self.document.schema(schema or {}, "readOnly")
        if set(made) <= {"allOf", "description", "title", "type"} and isinstance(schema, Mapping) and "allOf" in schema:
            several = [self._whole(part) for part in a_list(schema["allOf"])]
            if several and all(_is_plain(part) for part in several):
                properties = {name: value for part in several for name, value in part["properties"].items()}
                required = list(dict.fromkeys(name for part in several for name in words(part.get("required"))))
                return {"type": "object", "properties": properties, "required": required}
        return made

    def _fields(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        taken = {part.wire for part, _, _ in self.found}
        if not _is_plain(schema) or taken & set(schema["properties"]):
            return None
        fields: Mapping[str, Any] = schema["properties"]
        return fields

    def made(self) -> tuple[list[RequestParameter], dict[str, Any]]:
        """Each under its Python name, the required ones first, and the schema of all."""
        ordered = sorted(self.found, key=lambda entry: not entry[2])
        parts, properties, required = [], {}, []
        names = python_names(part.wire for part, _, _ in ordered)
        for word, (part, schema, wanted) in zip(names, ordered, strict=True):
            parts.append(replace(part, name=word))
            properties[word] = schema
            if wanted:
                required.append(word)
        return parts, {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


def _written(wire: str, encoding: Mapping[str, Any]) -> RequestParameter:
    """How a field of a form is written."""
    styled = "style" in encoding or "explode" in encoding
    style, explode = str(encoding.get("style") or "form"), encoding.get("explode")
    # Several that would do, or a pattern of them, say nothing.
    kind = str(encoding.get("contentType") or "").strip().lower()
    kind = kind if re.fullmatch(r"[a-z0-9.+-]+/[a-z0-9.+-]+", kind) else ""
    return RequestParameter(
        name=wire,
        wire=wire,
        place="body",
        style=style,
        explode=explode if isinstance(explode, bool) else style in ("form", "deepObject"),
        as_json=not styled and (kind == "application/json" or kind.endswith("+json")),
        kind=kind,
    )


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether it is an object whose fields are all named."""
    properties = schema.get("properties")
    return (
        isinstance(properties, Mapping)
        and bool(properties)
        and schema.get("type", "object") == "object"
        and set(schema) <= _PLAIN_OBJECT
        and not isinstance(schema.get("additionalProperties"), Mapping)
    )


def _place(word: str) -> Place:
    places: Mapping[str, Place] = {"path": "path", "query": "query", "header": "header", "cookie": "cookie"}
    return places[word]


def _returns(document: OpenApiDocument, responses: Any) -> Mapping[str, Any] | None:
    """The schema of what a success answers with, where that is JSON."""
    by_code = {str(code).upper(): response for code, response in an_object(responses).items()}
    codes = [*sorted(code for code in by_code if code.startswith("2")), "DEFAULT"]
    for code in codes:
        if code not in by_code:
            continue
        for kind, given in an_object(document.resolved(by_code[code]).get("content")).items():
            schema = an_object(given).get("schema")
            if "json" in str(kind).lower() and schema:
                return document.with_definitions(document.schema(schema, "writeOnly"), "writeOnly")
        return None
    return None


def _server(content: Mapping[str, Any], item: Mapping[str, Any], given: Mapping[str, Any], spec_url: str | None) -> str:
    """Where the operation is: its own server, its path's, or the document's first."""
    several = a_list(given.get("servers")) or a_list(item.get("servers")) or a_list(content.get("servers"))
    first = an_object(several[0]) if several else {}
    url = str(first.get("url") or "/")
    for name, variable in an_object(first.get("variables")).items():
        url = url.replace(f"{{{name}}}", str(an_object(variable).get("default", "")))
    try:
        if spec_url is not None:
            url = urljoin(spec_url, url)
        elif url.startswith("//"):
            url = f"https:{url}"
        known = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname) and "{" not in url
    except ValueError:
        known = False
    if not known:
        raise ConfigurationError(f"servers: {url!r} does not say where the service is; set base_url in the definition")
    return url


def _same_host(one: str, other: str) -> bool:
    """Whether what is meant for the first may go to the other: the same service, or the same by https."""
    before, after = urlsplit(one), urlsplit(other)
    ports = {"http": 80, "https": 443}
    try:
        was, now = ((url.scheme, url.hostname, url.port or ports.get(url.scheme)) for url in (before, after))
    except ValueError:
        return False  # a port that is none
    return was == now or (was == ("http", before.hostname, 80) and now == ("https", before.hostname, 443))


SECONDS_TO_FETCH = 30.0
_URL = ("http://", "https://")
_PUBLIC_HEADERS = frozenset(
    ("accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent")
)
"""Nobody writes a key into these."""
_KEY_LIKE = re.compile(r"key|token|secret|auth|passw|signature", re.IGNORECASE)

logger = logging.getLogger(__name__)


class OpenApiProvider:
    """A service and its operations, known once its description has been read."""

    def __init__(
        self, definition: OpenApiDefinition, secrets: Secrets, *, read: Callable[[str], Awaitable[bytes]]
    ) -> None:
        """`read` gives the bytes of a file beside the definition; FileNotFoundError when there is none."""
        self.name = definition.name
        self.description = definition.description
        self._definition = definition
        self._caller = HttpClient(secrets, definition.headers, definition.query)
        self._read = read
        self._reading = asyncio.Lock()
        self._tools: list[Tool] | None = None
        self._operations: dict[str, OpenApiOperation] = {}

    async def definitions(self) -> Sequence[Tool]:
        """Read once; `ConfigurationError` when there is no description, or it is none."""
        async with self._reading:
            if self._tools is None:
                self._tools = self._learned(await self._described())
            return self._tools

    async def _described(self) -> Read:
        given = self._definition
        spec_url = given.spec if given.spec.startswith(_URL) else None
        try:
            data = await (self._caller.fetch(spec_url, SECONDS_TO_FETCH) if spec_url else self._read(given.spec))
        except FileNotFoundError as problem:
            raise ConfigurationError(f"{self.name}, spec: {problem}") from None
        fixed = {f"header {name.lower()}" for name in given.headers} | {f"query {name.lower()}" for name in given.query}
        try:
            # Large ones take a while, in which others go on.
            return await run_in_thread(
                lambda: read(
                    parsed(data),
                    fixed=frozenset(fixed),
                    base_url=given.base_url,
                    spec_url=spec_url,
                    private=_has_secrets(given),
                )
            )
        except ConfigurationError as problem:
            raise ConfigurationError(f"{self.name}, spec {given.spec}: {problem}") from None

    def _learned(self, found: Read) -> list[Tool]:
        given = self._definition
        for problem in found.problems:
            logger.warning("an operation of %s was left out: %s", self.name, problem)
        wanted = _wanted(self.name, found.operations, given.only)
        tools = []
        for word, operation in zip(python_names(operation.name for operation in wanted), wanted, strict=True):
            tool = Tool(
                name=f"{self.name}.{word}",
                description=operation.description,
                parameters=operation.parameters,
                returns=operation.returns,
                positional=tuple(operation.parameters["properties"]),
                tags=tuple(dict.fromkeys((*given.tags, *operation.tags))),
                approval=given.approval,
                timeout=given.timeout,
                stream=given.stream,
            )
            self._operations[tool.name] = operation
            tools.append(tool)
        return tools

    async def call(self, tool: Tool, arguments: Mapping[str, Any], stream: OnOutput | None = None) -> Any:
        """The service's answer: JSON as data, text as text, anything else as bytes."""
        await self.definitions()
        described = self._operations[tool.name]
        return await self._caller.call(tool, described.base_url, described.operation, arguments, stream)

    async def close(self) -> None:
        await self._caller.close()


def _has_secrets(given: OpenApiDefinition) -> bool:
    """Whether it sends what not every server may see: a key may be written in any header, whatever its name."""
    filled = any("${" in text for text in (*given.headers.values(), *given.query.values()))
    return (
        filled
        or any(name.lower() not in _PUBLIC_HEADERS for name in given.headers)
        or any(_KEY_LIKE.search(name) for name in given.query)
    )


def _wanted(name: str, operations: Sequence[OpenApiOperation], only: Sequence[str]) -> list[OpenApiOperation]:
    """Those that `only` names, or whose tag it names; `ConfigurationError` for a word that names nothing."""
    known = {word for operation in operations for word in (operation.name, *operation.tags)}
    for word in only:
        if word not in known and word not in set(map(python_name, known)):
            raise ConfigurationError(f"{name}, only: there is no operation or tag {word}{did_you_mean(word, known)}")
    return [
        operation
        for operation in operations
        if not only or {operation.name, python_name(operation.name), *operation.tags} & set(only)
    ]


def parsed(data: bytes) -> Any:
    """A document in JSON or YAML; `ConfigurationError` when it is neither."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        if data.lstrip()[:1] == b"{":
            raise ConfigurationError(f"it is no JSON: {problem}") from None
    import yaml  # noqa: PLC0415 -- only where there is YAML to read

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(data, loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as problem:
        raise ConfigurationError(f"it is neither JSON nor YAML: {problem}") from None
