"""Importer for files with an OpenAI Chat message in each line, as Mistral Vibe and some Grok programs write them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from carrel.conversation.formats.openai_chat import NAME as PROVIDER
from carrel.conversation.formats.openai_chat import from_openai_chat
from carrel.conversation.importers.base import ImportedSession, ImportReport, LogBuilder, iso, read_records, text_of
from carrel.conversation.messages import blocks_of, meta_of

KIND = "openai-chat"
LOG = "messages.jsonl"

_ROLES = ("system", "developer", "user", "assistant", "tool")
_WIRE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "refusal")
"""The keys of the wire format. Other keys belong to the program that wrote the file; never send them to a provider."""


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line can only be of this format: it has a call or a result beside its content, or Vibe's own keys."""
    if record.get("role") not in _ROLES or "type" in record:
        return False
    calls = record.get("tool_calls")
    return bool(
        (isinstance(calls, list) and calls)
        or isinstance(record.get("tool_call_id"), str)
        or {"injected", "message_id"} <= record.keys()
    )


def read(path: Path, *, all_branches: bool = False) -> Iterator[ImportedSession]:
    """Yield the one session of a file; the format has no branches."""
    report = ImportReport(str(path), KIND)
    about = _metadata(path.parent) if path.name == LOG else {}
    report.source_id = text_of(about.get("session_id")) or (path.parent.name if path.name == LOG else path.stem)
    builder = LogBuilder(KIND, report)
    for number, record in read_records(path, report):
        _add_line(builder, number, record)
    environment = about.get("environment")
    yield builder.finish(
        ImportedSession(
            KIND,
            report.source_id,
            report,
            title=text_of(about.get("title")),
            provider=PROVIDER,
            cwd=text_of(environment.get("working_directory")) if isinstance(environment, dict) else "",
            created_at=iso(about.get("start_time")),
            parent=text_of(about.get("parent_session_id")) or None,
            named_by_file=path.name != LOG,
        )
    )


def _add_line(builder: LogBuilder, number: int, record: dict[str, Any]) -> None:
    if record.get("role") not in _ROLES:
        builder.report.add_unknown(f"role {record['role']!r:.40}" if "role" in record else "no role")
        return
    try:
        [message] = from_openai_chat([_wire_message(record)])
    except (KeyError, TypeError, ValueError, AttributeError):
        builder.report.add_unknown("message of unknown form")
        return
    injected = record.get("injected") is True
    source = builder.source(number, record.get("message_id"), injected=injected)
    own = {key: value for key, value in record.items() if key not in (*_WIRE_KEYS, "message_id", "injected")}
    if own:
        source["more"] = own
    created_at = iso(record.get("timestamp")) or iso(record.get("created_at"))
    builder.add_message(message["role"], blocks_of(message), source, created_at, meta_of(message))


def _wire_message(record: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a line with each call in the API form; some programs write the name beside the id."""
    wire = {key: value for key, value in record.items() if key in _WIRE_KEYS}
    if calls := wire.get("tool_calls"):
        wire["tool_calls"] = [_call(call) for call in calls]
    elif "tool_calls" in wire:
        del wire["tool_calls"]
    if wire["role"] == "assistant" and not wire.get("content"):
        wire.pop("content", None)
    return wire


def _call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call or call.get("type") == "custom":
        return {key: value for key, value in call.items() if key != "index"}
    arguments = call.get("arguments")
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": text}}


def _metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that Vibe writes beside the messages, or an empty dict."""
    try:
        about = orjson.loads((folder / "meta.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and "session_id" in about else {}
