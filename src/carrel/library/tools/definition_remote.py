"""Definitions of tools that are elsewhere: MCP servers, HTTP endpoints, OpenAPI; and what all definitions share."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Headers = dict[Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")], str]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]

TAKEN = frozenset(("list", "search", "describe", "call_sync", "call_async"))
"""What code finds on `tools` itself."""

_STREAMABLE = frozenset(("streamable-http", "streamable_http", "streamableHttp"))
_IN_PATH = re.compile(r"{([^{}]+)}")


class Closed(BaseModel):
    """A part of a definition; a field nobody knows is a mistake, and said to be one."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, defer_build=True)


class Definition(Closed):
    """What every definition of tools has."""

    name: str
    """The first word of its tools' names: an identifier, so that code can write it."""
    type: str
    description: str = ""
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = 60.0
    """Seconds a call may take; null is no limit."""
    approval: Literal["never", "ask"] = "never"
    """`ask`: somebody says yes to each call before it is made."""
    stream: bool = False
    """What a call says while it works goes to the output of the code that called."""

    @field_validator("name")
    @classmethod
    def _callable(cls, name: str) -> str:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError("a name that Python code can write: letters, digits and _, no digit or _ first")
        if name in TAKEN:
            raise ValueError(f"another name: tools.{name} is something else already")
        return name


class McpDefinition(Definition):
    """An MCP server; each of its tools is one of ours."""

    type: Literal["mcp"]
    transport: Annotated[
        Literal["stdio", "http", "sse"], BeforeValidator(lambda word: "http" if word in _STREAMABLE else word)
    ] = "stdio"
    """stdio: a program that is started here; http: streamable HTTP; sse: its forerunner."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Beside PATH, HOME and the like; nothing else of this process's environment is handed on."""
    cwd: str | None = None
    url: Url | None = None
    headers: Headers = Field(default_factory=dict)
    startup_timeout: Seconds = 10.0
    """Seconds until the server has introduced itself, and again until it has said what it has."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.transport == "stdio":
            wanted, unused = "command", [name for name in ("url", "headers") if getattr(self, name)]
        else:
            wanted, unused = "url", [name for name in ("command", "args", "env", "cwd") if getattr(self, name)]
        if not getattr(self, wanted):
            raise ValueError(f"{wanted} is needed with transport: {self.transport}")
        if unused:
            raise ValueError(f"{unused[0]} says nothing with transport: {self.transport}")
        return self


class EndpointParameter(BaseModel):
    """One parameter of an endpoint: where it goes, and the JSON Schema of its value."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True, defer_build=True)

    place: Literal["path", "query", "header", "cookie", "body", "payload"] | None = Field(default=None, alias="in")
    """`body`: a field of it; `payload`: all of it. Without: the query of GET, HEAD and DELETE, else the body."""
    name: str | None = None
    """Its name on the wire, when that is another than in Python."""
    required: bool = False

    @property
    def value_schema(self) -> dict[str, Any]:
        """All that is not ours is JSON Schema: type, description, default, enum, items …"""
        return dict(self.model_extra or {})


class Endpoint(Closed):
    """One request that can be made."""

    method: Annotated[
        Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
        BeforeValidator(lambda word: word.upper() if isinstance(word, str) else word),
    ] = "GET"
    path: str
    """Below `base_url`; `{owner}` is a parameter."""
    description: str = ""
    params: dict[str, EndpointParameter] = Field(default_factory=dict)
    sends: Literal["json", "form"] = "json"
    """How the fields of a body are written."""
    headers: Headers = Field(default_factory=dict)
    tags: tuple[str, ...] = ()
    timeout: Seconds | None = None
    approval: Literal["never", "ask"] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        on_the_wire = {given.name or name for name, given in self.params.items() if given.place == "path"}
        lost = on_the_wire - set(self.path_names)
        if lost:
            raise ValueError(f"{min(lost)} is to go into the path, which has no {{{min(lost)}}}")
        places = [given.place for given in self.params.values()]
        if places.count("payload") > 1 or ("payload" in places and "body" in places):
            raise ValueError("a payload is the whole body: there is one, and no fields of a body beside it")
        return self

    @property
    def path_names(self) -> list[str]:
        """The parameters that stand in the path, in order."""
        return list(dict.fromkeys(_IN_PATH.findall(self.path)))


class HttpDefinition(Definition):
    """A service by its endpoints; each is a tool."""

    type: Literal["http"]
    base_url: Url
    headers: Headers = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    """Sent with each request."""
    endpoints: dict[str, Endpoint] = Field(min_length=1)


class OpenApiDefinition(Definition):
    """A service that describes itself; each operation is a tool."""

    type: Literal["openapi"]
    spec: str
    """The description, OpenAPI 3.0 to 3.2, JSON or YAML: a file beside this one, or a URL."""
    base_url: Url | None = None
    """In place of the first of the description's `servers`."""
    headers: Headers = Field(default_factory=dict)
    query: dict[str, str] = Field(default_factory=dict)
    only: tuple[str, ...] = ()
    """The operations wanted, by name or tag; all when empty."""
