"""Convert messages to Gemini `generateContent` requests and back. Pure."""

import json
import mimetypes
import re
from collections.abc import Sequence
from typing import Any

from carrel.conversation.formats.turns import (
    OPENING,
    ArrangedTurn,
    Converted,
    IdMapper,
    Media,
    WireBlock,
    WireTurn,
    arguments_object,
    arrange_turns,
    as_json,
    as_text,
    keep_native,
    keep_request_form,
    media_of,
    merge_turns,
    native_block,
    remove_opening,
    rest,
    result_blocks,
    start_with_user,
    unwrap_arguments,
)
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    build_message,
    text_block,
    thinking_block,
    tool_result_block,
    tool_result_text,
    tool_use_block,
)
from carrel.conversation.usage import token_counts

NAME = "gemini"
UNSIGNED = "skip_thought_signature_validator"
"""The signature that Google documents for calls by other models; Gemini 3 refuses calls without a signature."""
_OF_THE_CLIENT = ("automaticFunctionCallingHistory", "parsed", "sdkHttpResponse")
"""Fields that Google's client adds to a response, such as the previous messages."""
_DOCUMENTS = ("application/pdf", "text/")
_CALL_HINTS = ("no_id", "no_args", "functionCall", "part")
_RESULT_HINTS = ("no_id", "json", "name", "functionResponse", "part")


def to_gemini(messages: Sequence[ConversationMessage], *, system: str | None = None) -> Converted:
    """Convert messages to `contents`, and `systemInstruction` if there are instructions."""
    report = Converted({})
    turns = arrange_turns(messages, NAME, IdMapper(ids=256, names=128, bad_in_name=r"[^a-zA-Z0-9_.:-]"), report)
    heads = [turn for turn in turns if turn.role == "system"]
    for turn in heads:
        if not turn.leading:
            report.change((turn.index, None), "system", "moved to the system instruction, before everything else")
    parts = [{"text": system}] if system else []
    parts += [part for turn in heads for piece in turn.pieces for part in _part(piece, report)]
    if parts:
        shape = heads[0].native if len(heads) == 1 else {}
        report.payload["systemInstruction"] = {"parts": parts, **rest(shape, "no_role")}
    wire_turns = [_to_wire(turn, report) for turn in turns if turn.role != "system"]
    report.payload["contents"] = [
        _content(turn) for turn in start_with_user(merge_turns(wire_turns), {"text": OPENING}, report)
    ]
    return report


def _content(turn: WireTurn) -> dict[str, Any]:
    role = {} if turn.native.get("no_role") else {"role": turn.role}
    return {**role, "parts": turn.content, **rest(turn.native, "no_role")}


def _to_wire(turn: ArrangedTurn, report: Converted) -> WireTurn:
    parts = [part for piece in turn.pieces for part in _part(piece, report)]
    if turn.role != "assistant":
        return WireTurn("user", parts, turn.native, turn.index)
    first = next((place for place, part in enumerate(parts) if "functionCall" in part), None)
    piece = next((piece for piece in turn.pieces if piece.kind == "tool_use"), None)
    if first is not None and piece is not None and not _made_here(piece):
        parts[first] = {**parts[first], "thoughtSignature": UNSIGNED}
        report.change(
            piece.at,
            "signature",
            "a call by another provider's model gets Google's placeholder signature",
        )
    return WireTurn("model", parts, turn.native, turn.index)


def _made_here(piece: WireBlock) -> bool:
    return piece.maker in ("gemini", "google")


def _part(piece: WireBlock, report: Converted) -> list[dict[str, Any]]:
    extra = _extra(piece)
    match piece.kind:
        case "text" if piece.text or extra:
            return [{"text": piece.text, **extra}]
        case "text":
            report.drop(piece.at, "text", "Gemini refuses an empty text")
            return []
        case "thinking":
            return [{"text": piece.text, "thought": True, **extra}]
        case "tool_use":
            return [_call(piece, extra, report)]
        case "tool_result":
            return [_response_part(piece, extra, report)]
        case "native":
            return [dict(piece.block["value"])]
        case _:
            media = _media(piece, report)
            return [{**media, **extra}] if media else []


def _extra(piece: WireBlock) -> dict[str, Any]:
    """Other fields of the part; other programs that write this log format store the whole part."""
    hints = (
        _CALL_HINTS if piece.kind == "tool_use" else _RESULT_HINTS if piece.kind == "tool_result" else ("part", "inner")
    )
    extra = rest(piece.native, *hints)
    whole = piece.native.get("part")
    if isinstance(whole, dict) and whole.get("thought_signature"):
        extra["thoughtSignature"] = whole["thought_signature"]
    return extra


def _inner(piece: WireBlock, key: str) -> dict[str, Any]:
    inner = piece.native.get(key)
    return inner if isinstance(inner, dict) else {}


def _media(piece: WireBlock, report: Converted) -> dict[str, Any] | None:
    media = media_of(piece, NAME, report)
    if media is None:
        return None
    mime_type = _guessed_kind(media)
    if piece.kind == "document" and media.data and not mime_type.startswith(_DOCUMENTS):
        if not media.is_text:
            report.drop(piece.at, "document", f"Gemini does not accept documents of type {mime_type}")
            return None
        report.change(piece.at, "document", f"{mime_type} is sent as text/plain")
        mime_type = "text/plain"
    kind = {"mimeType": mime_type} if mime_type else {}
    inner = _inner(piece, "inner")
    if media.name and "displayName" not in inner:
        report.drop(piece.at, "name", "Gemini accepts file names only with its own server-side tools")
    if media.url:
        return {"fileData": {**kind, "fileUri": media.url, **inner}}
    return {"inlineData": {**kind, "data": media.data, **inner}}


def _guessed_kind(media: Media) -> str:
    """The MIME type; for a URL without one, guessed from its ending."""
    return media.mime_type or mimetypes.guess_type(media.url.partition("?")[0])[0] or ""


def _call(piece: WireBlock, extra: dict[str, Any], report: Converted) -> dict[str, Any]:
    call: dict[str, Any] = {} if piece.native.get("no_id") else {"id": piece.call_id}
    call["name"] = piece.name
    value = arguments_object(piece, report)
    if value or not piece.native.get("no_args"):
        call["args"] = value
    return {"functionCall": {**call, **_inner(piece, "functionCall")}, **extra}


def _response_part(piece: WireBlock, extra: dict[str, Any], report: Converted) -> dict[str, Any]:
    has_no_id = piece.native.get("no_id") or (piece.call is not None and piece.call.native.get("no_id"))
    answer: dict[str, Any] = {} if has_no_id else {"id": piece.call_id}
    answer["name"] = as_text(piece.native.get("name")) or piece.name
    answer["response"] = _response_object(piece)
    parts: list[dict[str, Any]] = []
    inner = result_blocks(piece, NAME, report)
    if sum(part.kind == "text" for part in inner) > 1:
        report.change(piece.at, "tool_result", "its texts are joined into one")
    for part in inner:
        if part.kind in ("image", "document"):
            media = _media(part, report)
            parts += [{**media, **_extra(part)}] if media else []
        elif part.kind == "native":
            parts.append(dict(part.block["value"]))
        elif part.kind != "text":
            report.drop(part.at, part.kind, "a function response cannot contain it")
    if parts:
        answer["parts"] = parts
    return {"functionResponse": {**answer, **_inner(piece, "functionResponse")}, **extra}


def _response_object(piece: WireBlock) -> dict[str, Any]:
    """The text under the key that Google documents, or the JSON object that it was read from."""
    text = tool_result_text(piece.block)
    if piece.native.get("json"):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
    return {"error" if piece.block.get("is_error") else "output": text}


def from_gemini(payload: Any) -> list[ConversationMessage]:
    """Read messages from a response, the chunks of a stream, a request, a list of contents, or one content."""
    if isinstance(payload, list):
        pieces = [_to_camel_case(piece) for piece in payload]
        if any("candidates" in piece or "usageMetadata" in piece for piece in pieces):
            return [_response(_join_stream(pieces))]
        return remove_opening(_messages(payload))
    payload = _to_camel_case(payload)
    if "candidates" in payload or "promptFeedback" in payload:
        return [_response(payload)]
    if "contents" not in payload:
        return _messages([payload])
    system = payload.get("systemInstruction")
    head: list[ConversationMessage] = []
    if isinstance(system, dict):
        blocks = [_read(part, "", {}) for part in system.get("parts") or []]
        head = [keep_request_form(build_message("system", blocks), NAME, rest(_to_camel_case(system), "parts"))]
    return remove_opening(head + _messages(payload["contents"]))


_SNAKE = re.compile(r"_([a-z])")
_UNTOUCHED = ("args", "response", "partMetadata")
"""Fields with data of the model or the user, in which keys are not renamed."""


def _to_camel_case(wire: Any) -> dict[str, Any]:
    """Rename keys from snake_case, as in dumps of the SDK, to camelCase, as in the API."""
    return {_SNAKE.sub(lambda match: match[1].upper(), key): value for key, value in wire.items()}


def _wire(part: Any) -> Any:
    """A part as in the API, from any dump of the SDK: camelCase, no nulls."""
    if isinstance(part, list):
        return [_wire(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    return {
        name: value if name in _UNTOUCHED else _wire(value)
        for name, value in _to_camel_case(part).items()
        if value is not None
    }


def _join_stream(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream into one response, which Google's client does not do."""
    whole: dict[str, Any] = {}
    candidate: dict[str, Any] = {}
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        whole |= {name: value for name, value in piece.items() if value is not None and name != "candidates"}
        first = _to_camel_case(next(iter(piece.get("candidates") or []), {}))
        candidate |= {name: value for name, value in first.items() if value is not None and name != "content"}
        for part in map(_wire, (first.get("content") or {}).get("parts") or []):
            plain = {"text", "thought"} >= part.keys() >= {"text"}
            last = parts[-1] if parts and plain and {"text", "thought"} >= parts[-1].keys() else {}
            if last and "text" in last and last.get("thought") == part.get("thought"):
                parts[-1] = {**last, "text": last["text"] + part["text"]}
            else:
                parts.append(part)
    # Most streams end with an empty text; it matters only if it has a signature.
    spoken = [part for part in parts if part.get("text") != "" or len(part) > 1]
    return {**whole, "candidates": [{**candidate, "content": {"role": "model", "parts": spoken}}]}


def _messages(contents: list[dict[str, Any]]) -> list[ConversationMessage]:
    messages: list[ConversationMessage] = []
    open_calls: dict[str, list[str]] = {}
    for place, content in enumerate(contents):
        role = content.get("role")
        if role is None and "parts" not in content:
            raise ValueError("a content needs `parts` or a `role`")
        ours = "assistant" if role == "model" else "user"
        prefix = f"call_{place}"
        blocks = [_read(part, f"{prefix}_{index}", open_calls) for index, part in enumerate(content.get("parts") or [])]
        shape = rest(content, "parts", "role") | ({"no_role": True} if role is None else {})
        if role not in ("model", "user", None):
            shape["role"] = role
        meta = {"provider": NAME} if ours == "assistant" else None
        messages.append(keep_request_form(build_message(ours, blocks, meta=meta), NAME, shape))
    return messages


def _read(part: dict[str, Any], new_id: str, open_calls: dict[str, list[str]]) -> MessageBlock:
    """Read a part. `open_calls` has the ids of unanswered calls by function name, since a response may lack an id."""
    wire = _wire(part)
    if "functionCall" in wire:
        return _read_call(wire, new_id, open_calls)
    if "functionResponse" in wire:
        return _read_response(wire, new_id, open_calls)
    if isinstance(wire.get("text"), str):
        if wire.get("thought") is True:
            return keep_native(thinking_block(wire["text"]), NAME, rest(wire, "text", "thought"))
        return keep_native(text_block(wire["text"]), NAME, rest(wire, "text"))
    return _read_media(wire)


def _read_media(wire: dict[str, Any]) -> MessageBlock:
    for key, where, ours in (("inlineData", "data", "data"), ("fileData", "fileUri", "url")):
        inner = wire.get(key) or {}
        mime_type = as_text(inner.get("mimeType"))
        kind = "image" if mime_type.startswith("image/") else "document" if mime_type.startswith(_DOCUMENTS) else None
        if kind is None or not inner.get(where):
            continue
        name = {"name": inner["displayName"]} if inner.get("displayName") else {}
        # The SDK dumps bytes as URL-safe base64, which other readers do not accept.
        block = {"type": kind, ours: as_text(inner[where]), "mime_type": mime_type, **name}
        if ours == "data":
            block["data"] = block["data"].replace("-", "+").replace("_", "/")
        extra = rest(inner, "mimeType", where)
        return keep_native(block, NAME, rest(wire, key) | ({"inner": extra} if extra else {}))
    return native_block(NAME, wire)


def _read_call(wire: dict[str, Any], new_id: str, open_calls: dict[str, list[str]]) -> MessageBlock:
    call = wire["functionCall"]
    name = as_text(call.get("name"))
    id_ = as_text(call.get("id")) or new_id
    open_calls.setdefault(name, []).append(id_)
    value, meta = unwrap_arguments(call.get("args") or {})
    native = rest(wire, "functionCall")
    if extra := rest(call, "id", "name", "args"):
        native["functionCall"] = extra
    native |= {hint: True for hint, key in (("no_id", "id"), ("no_args", "args")) if key not in call}
    return keep_native(tool_use_block(tool_id=id_, name=name, input=value, meta=meta), NAME, native)


def _read_response(wire: dict[str, Any], new_id: str, open_calls: dict[str, list[str]]) -> MessageBlock:
    answer = wire["functionResponse"]
    name, response_id = as_text(answer.get("name")), as_text(answer.get("id"))
    waiting = open_calls.get(name, [])
    known = (response_id in waiting) if response_id else bool(waiting)
    id_ = response_id or (waiting[0] if waiting else new_id)
    if known:
        waiting.remove(id_)
    native = rest(wire, "functionResponse")
    if extra := rest(answer, "id", "name", "response", "parts"):
        native["functionResponse"] = extra
    native |= ({} if response_id else {"no_id": True}) | ({} if known else {"name": name})
    text, failed, is_json = _read_object(answer.get("response"))
    if is_json:
        native["json"] = True
    media = [_read(part, "", {}) for part in answer.get("parts") or []]
    words = [text_block(text)] if text else []
    block = tool_result_block(
        tool_use_id=id_, model_text=text, is_error=failed, content=[*words, *media] if media else None
    )
    return keep_native(block, NAME, native)


def _read_object(response: Any) -> tuple[str, bool, bool]:
    """The text for the model, whether it is an error, and whether it is the JSON of the whole object."""
    value = response if isinstance(response, dict) else {}
    for key in ("output", "error"):
        if set(value) == {key} and isinstance(value[key], str):
            return value[key], key == "error", False
    return as_json(value), "error" in value, True


def _response(wire: dict[str, Any]) -> ConversationMessage:
    candidates = [_to_camel_case(candidate) for candidate in wire.get("candidates") or []]
    candidate = candidates[0] if candidates else {}
    response_id = as_text(wire.get("responseId"))
    content = candidate.get("content") or {}
    blocks = [
        _read(part, f"{response_id or 'call'}_{place}", {}) for place, part in enumerate(content.get("parts") or [])
    ]
    native = rest(wire, "candidates", "responseId", "modelVersion", *_OF_THE_CLIENT)
    native |= rest(candidate, "content", "finishReason")
    return assistant_message(
        blocks,
        provider=NAME,
        model=wire.get("modelVersion"),
        provider_message_id=response_id or None,
        stop_reason=candidate.get("finishReason"),
        usage=token_counts(wire.get("usageMetadata")),
        native_meta=native | ({"other_candidates": candidates[1:]} if candidates[1:] else {}),
    )
