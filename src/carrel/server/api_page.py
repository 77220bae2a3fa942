"""From the schema of the API to a page that a person reads: no script, and nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; } small, span { opacity: .7; font-weight: normal; }
nav a { margin-right: 1rem; }
details { border: 1px solid #8885; border-radius: .4rem; margin: .4rem 0; padding: .3rem .7rem; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4.5rem; font-size: .85rem; }
.get { color: #2a7; } .post { color: #37c; } .put, .patch { color: #a70; } .delete { color: #c43; }
table { border-collapse: collapse; margin: .6rem 0; } td, th { padding: .15rem .8rem .15rem 0; text-align: left;
vertical-align: top; } pre { overflow-x: auto; background: #8882; padding: .5rem; border-radius: .3rem; }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_TEMPLATE = Path(__file__).with_name("api_page.html.j2")


@dataclass(frozen=True)
class Field:
    """One thing that is sent or answered."""

    name: str
    kind: str
    about: str = ""
    required: bool = False
    place: str = "body"


@dataclass(frozen=True)
class Call:
    """One route."""

    method: str
    path: str
    about: str
    fields: list[Field]
    answers: list[tuple[str, str]]
    example: str


def api_page(schema: dict[str, Any], address: str = "http://127.0.0.1:8765") -> str:
    """The whole page; `address` is where the examples ask."""
    groups: dict[str, list[Call]] = {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            groups.setdefault((operation.get("tags") or ["other"])[0], []).append(
                _call(schema, path, method, operation, address)
            )
    shapes = [
        {"name": name, "about": _first_line(shape), "fields": _fields(shape)}
        for name, shape in schema.get("components", {}).get("schemas", {}).items()
        if shape.get("properties")
    ]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    about = schema["info"]
    return template.render(
        title=about["title"],
        version=about["version"],
        about=about.get("description", ""),
        style=STYLE,
        groups=[{"name": name, "calls": calls} for name, calls in groups.items()],
        shapes=shapes,
    )


def _call(schema: dict[str, Any], path: str, method: str, operation: dict[str, Any], address: str) -> Call:
    fields = [
        Field(
            given["name"],
            _kind(given.get("schema", {})),
            given.get("description", ""),
            given.get("required", False),
            given["in"],
        )
        for given in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    sent = _resolved(schema, body.get("application/json", {}).get("schema", {}))
    fields += _fields(sent)
    answers = [(code, answer.get("description", "")) for code, answer in operation.get("responses", {}).items()]
    return Call(
        method.upper(), path, _first_line(operation), fields, answers, _example(address, path, method, sent, body)
    )


def _example(address: str, path: str, method: str, sent: dict[str, Any], body: dict[str, Any]) -> str:
    words = [f"curl -H 'Authorization: Bearer KEY' -X {method.upper()} {address}{path}"]
    if sent:
        needed = dict.fromkeys(sent.get("required", []), "…")
        words.append(f"-H 'Content-Type: application/json' -d '{json.dumps(needed, ensure_ascii=False)}'")
    elif body:
        words.append("--data-binary @FILE")
    return " \\\n     ".join(words)


def _resolved(schema: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    name = shape.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else shape


def _fields(shape: dict[str, Any]) -> list[Field]:
    needed = shape.get("required", [])
    return [
        Field(name, _kind(field), field.get("description", ""), name in needed)
        for name, field in shape.get("properties", {}).items()
    ]


def _kind(shape: dict[str, Any]) -> str:
    if "$ref" in shape:
        return str(shape["$ref"]).rpartition("/")[2]
    if "enum" in shape:
        return ", ".join(map(str, shape["enum"]))
    if "const" in shape:
        return str(shape["const"])
    if parts := shape.get("anyOf") or shape.get("allOf"):
        return " or ".join(_kind(part) for part in parts)
    kind = str(shape.get("type", "anything"))
    if kind == "array":
        kind = f"list of {_kind(shape.get('items', {}))}"
    if "default" in shape and shape["default"] not in (None, "", [], {}):
        kind += f" ({json.dumps(shape['default'])})"
    return kind


def _first_line(described: dict[str, Any]) -> str:
    return str(described.get("description") or described.get("summary") or "").strip().partition("\n")[0]
