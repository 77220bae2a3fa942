"""Rendering of pages: a template with its variables for people, the same data as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from carrel.conversation.export import indented_json
from carrel.conversation.export.html_page import templates
from carrel.conversation.redaction import redact_secrets
from carrel.server.web.login import Visitor
from carrel.text import json_bytes, neutralize_control_chars, parse_time, readable_size, readable_time, single_line

if TYPE_CHECKING:
    from jinja2 import Environment

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PACKAGE = "carrel.server.web"
_MAX_DIFF_LINES = 20_000
_MAX_TEXT = 20_000
"""Characters of one text on the page of a conversation."""
_MAX_DATA = 2_000_000
"""Characters of an image or document, as base64, on the page of a conversation."""


@dataclass(frozen=True)
class View:
    """What a page shows: a template with its variables, and the same data for programs."""

    template: str
    view: Mapping[str, Any]
    data: Any


def problem_view(text: str) -> View:
    return View("problem", {"text": text}, {"detail": text})


def number_of(request: Request, name: str, least: int = 1) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) < least:
        raise HTTPException(422, f"{name}: {single_line(text)[:100]!r} is not a number from {least}")
    return int(text)


def download(data: bytes, name: str) -> Response:
    """Return what a session has written, as a download that no browser opens as a page."""
    headers = HEADERS | {
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(data, headers=headers, media_type="application/octet-stream")


def wants_json(request: Request) -> bool:
    return request.headers.get("accept", "").startswith("application/json")


def render(request: Request, answer: View, visitor: Visitor, status: int = 200) -> Response:
    """Return a page, or its data if the request wants JSON. Guests see no secrets."""
    if wants_json(request):
        data = _plain(answer.data)
        body = json_bytes(_redacted(data) if visitor.is_guest else data)
        return Response(body, status, headers=HEADERS, media_type="application/json")
    page = _templates(visitor.is_guest).get_template(f"{answer.template}.html.j2")
    html = page.render(visitor=visitor, **answer.view)
    return HTMLResponse(html.encode("utf-8", "backslashreplace"), status, headers=HEADERS)


def _redacted(data: Any) -> Any:
    match data:
        case str():
            return redact_secrets.text(data)
        case dict():
            return {_redacted(name): _redacted(part) for name, part in data.items()}
        case list():
            return [_redacted(part) for part in data]
        case _:
            return data


def _finalized(value: Any) -> Any:
    """Redact what a template shows; HTML was made from redacted entries."""
    return redact_secrets.text(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _plain(thing: Any) -> Any:
    """Return data for JSON."""
    match thing:
        case BaseModel():
            return thing.model_dump(mode="json")
        case Mapping():
            return {str(name): _plain(part) for name, part in thing.items()}
        case str():
            return thing
        case Sequence():
            return [_plain(part) for part in thing]
        case _ if is_dataclass(thing) and not isinstance(thing, type):
            return _plain(asdict(thing))
        case _:
            return thing if isinstance(thing, bool | int | float | None) else str(thing)


@lru_cache(maxsize=2)
def _templates(is_guest: bool) -> Environment:
    environment = templates(_PACKAGE)
    if is_guest:
        environment = environment.overlay(finalize=_finalized)
    environment.filters.update(
        line=single_line,
        text=neutralize_control_chars,
        when=readable_time,
        age=_age,
        size=readable_size,
        json=indented_json,
    )
    return environment


def _age(value: object) -> str:
    """How long ago a time was, in its largest unit."""
    moment = parse_time(value)
    if moment is None:
        return ""
    seconds = (datetime.now(UTC) - moment).total_seconds()
    return f"{_duration(seconds)} ago" if seconds >= 60 else "just now"


def _duration(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if (count := int(seconds) // length) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "a moment"


def shortened(value: Any) -> Any:
    """Return an entry without the middle of very long texts and without large images, so that a page stays small."""
    match value:
        case str() if len(value) > _MAX_TEXT:
            half, left_out = _MAX_TEXT // 2, len(value) - _MAX_TEXT
            return f"{value[:half]}\n… {left_out:,} characters left out; the saved file has them …\n{value[-half:]}"
        case dict():
            return {name: _short_data(part) if name == "data" else shortened(part) for name, part in value.items()}
        case list():
            return [shortened(part) for part in value]
        case _:
            return value


def _short_data(data: Any) -> Any:
    """Return base64 data as it is, or nothing if it is too large."""
    if not isinstance(data, str):
        return shortened(data)
    return data if len(data) <= _MAX_DATA else ""


def diff_lines(diff: str) -> list[tuple[str, str]]:
    """Return the lines of a diff, each with its kind."""
    kinds = {"+": "added", "-": "removed", "@": "hunk"}
    heads = ("+++", "---", "diff ")
    return [
        ("head" if line.startswith(heads) else kinds.get(line[:1], "same"), line)
        for line in diff.splitlines()[:_MAX_DIFF_LINES]
    ]


_SHOWN_PAUSE = 0.05
"""What part of the time of all steps is shown of a longer pause between them."""


def bars(steps: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Return for each step where it begins on the axis and how long it is, in percent, and the pause before it.

    Long pauses, in which nothing ran, are cut from the axis and named."""
    spans: list[tuple[float, float]] = []
    for step in steps:
        start = parse_time(step.get("started_at"))
        begin = start.timestamp() if start is not None else spans[-1][0] if spans else 0.0
        spans.append((begin, begin + float(step.get("duration") or 0)))
    shown = max(1.0, _SHOWN_PAUSE * sum(end - begin for begin, end in spans))
    cut, reached = 0.0, spans[0][1] if spans else 0.0
    places: list[tuple[float, float, str]] = []
    for begin, end in spans:
        pause = begin - reached
        is_cut = pause > 2 * shown
        cut += pause - shown if is_cut else 0.0
        reached = max(reached, end)
        places.append((begin - cut, end - begin, _duration(pause) if is_cut else ""))
    first = places[0][0] if places else 0.0
    whole = max((begin + length for begin, length, _ in places), default=0.0) - first or 0.001
    return [(100 * (begin - first) / whole, max(0.3, 100 * length / whole), pause) for begin, length, pause in places]


@lru_cache(maxsize=2)
def _asset(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text("utf-8")


async def style(request: Request) -> Response:
    text = _asset("carrel.conversation.export", "page.css") + _asset(_PACKAGE, "page.css")
    return Response(text, headers=HEADERS, media_type="text/css")


async def script(request: Request) -> Response:
    text = _asset(_PACKAGE, "page.js")
    return Response(text, headers=HEADERS, media_type="text/javascript")
