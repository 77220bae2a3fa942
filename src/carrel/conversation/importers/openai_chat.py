"""Reads files of OpenAI Chat messages, one a line, as Mistral Vibe and some Grok programs write `messages.jsonl`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from carrel.conversation.formats.openai_chat import NAME as PROVIDER
from carrel.conversation.formats.openai_chat import from_openai_chat
from carrel.conversation.importers.draft import Draft, iso, text_of
from carrel.conversation.importers.lines import records
from carrel.conversation.importers.report import Imported, ImportReport
from carrel.conversation.messages import blocks_of, meta_of

KIND = "openai-chat"
LOG = "messages.jsonl"

_ROLES = ("system", "developer", "user", "assistant", "tool")
_WIRE = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "refusal")
"""The keys of the wire format. What else a line has is the program's own and must never be sent to a provider."""


def recognizes(record: dict[str, Any]) -> bool:
    """Whether a line can only be of this format: it has a call or a result beside its content, or marks of Vibe."""
    if record.get("role") not in _ROLES or "type" in record:
        return False
    calls = record.get("tool_calls")
    return bool(
        (isinstance(calls, list) and calls)
        or isinstance(record.get("tool_call_id"), str)
        or {"injected", "message_id"} <= record.keys()
    )


def read(path: Path, *, all_branches: bool = False) -> Iterator[Imported]:
    """The one session of a file; there are no branches in it."""
    report = ImportReport(str(path), KIND)
    about = _metadata(path.parent) if path.name == LOG else {}
    report.source_id = text_of(about.get("session_id")) or (path.parent.name if path.name == LOG else path.stem)
    draft = Draft(KIND, report)
    for number, record in records(path, report):
        _take(draft, number, record)
    environment = about.get("environment")
    yield draft.finish(
        Imported(
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


def _take(draft: Draft, number: int, record: dict[str, Any]) -> None:
    if record.get("role") not in _ROLES:
        draft.report.not_known(f"role {record['role']!r:.40}" if "role" in record else "no role")
        return
    try:
        [message] = from_openai_chat([_wire(record)])
    except (KeyError, TypeError, ValueError, AttributeError):
        draft.report.not_known("a message in a shape that is not known")
        return
    injected = record.get("injected") is True
    source = draft.source(number, record.get("message_id"), injected=injected)
    own = {key: value for key, value in record.items() if key not in (*_WIRE, "message_id", "injected")}
    if own:
        source["more"] = own
    created_at = iso(record.get("timestamp")) or iso(record.get("created_at"))
    draft.say(message["role"], blocks_of(message), source, created_at, meta_of(message))


def _wire(record: dict[str, Any]) -> dict[str, Any]:
    """The message of a line, with each call in the form of the API; some programs write its name beside its id."""
    wire = {key: value for key, value in record.items() if key in _WIRE}
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
    """What Vibe keeps beside the messages; {} when there is nothing of the kind."""
    try:
        about = orjson.loads((folder / "meta.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and "session_id" in about else {}
