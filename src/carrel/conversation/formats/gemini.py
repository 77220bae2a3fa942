"""Pure: our messages as a Gemini generateContent request, and back."""

import json
import re
from collections.abc import Sequence
from typing import Any

from carrel.conversation.formats.arguments import arguments_object, as_json, unwrapped
from carrel.conversation.formats.media import guessed_kind, media_of
from carrel.conversation.formats.turns import (
    OPENING,
    Converted,
    Piece,
    Said,
    Spelling,
    Turn,
    arrange,
    as_text,
    count_of,
    inside,
    keep_native,
    keep_shape,
    merged,
    native_block,
    opened,
    rest,
    without_opening,
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

NAME = "gemini"
UNSIGNED = "skip_thought_signature_validator"
"""The signature Google documents for a call that another model made; Gemini 3 refuses one without any."""
_OF_THE_CLIENT = ("automaticFunctionCallingHistory", "parsed", "sdkHttpResponse")
"""What Google's client puts into a response: all that was said before, among others."""
_DOCUMENTS = ("application/pdf", "text/")
_CALL_HINTS = ("no_id", "no_args", "functionCall", "part")
_RESULT_HINTS = ("no_id", "json", "name", "functionResponse", "part")


def to_gemini(messages: Sequence[ConversationMessage], *, system: str | None = None) -> Converted:
    """`contents`, and `systemInstruction` when there is any."""
    report = Converted({})
    turns = arrange(messages, NAME, Spelling(ids=256, names=128, bad_in_name=r"[^a-zA-Z0-9_.:-]"), report)
    heads = [turn for turn in turns if turn.role == "system"]
    for turn in heads:
        if not turn.leading:
            report.change((turn.index, None), "system", "moved to the system instruction, before everything else")
    parts = [{"text": system}] if system else []
    parts += [part for turn in heads for piece in turn.pieces for part in _part(piece, report)]
    if parts:
        shape = heads[0].native if len(heads) == 1 else {}
        report.payload["systemInstruction"] = {"parts": parts, **rest(shape, "no_role")}
    said = [_said(turn, report) for turn in turns if turn.role != "system"]
    report.payload["contents"] = [_content(turn) for turn in opened(merged(said), {"text": OPENING}, report)]
    return report


def _content(turn: Said) -> dict[str, Any]:
    role = {} if turn.native.get("no_role") else {"role": turn.role}
    return {**role, "parts": turn.content, **rest(turn.native, "no_role")}


def _said(turn: Turn, report: Converted) -> Said:
    parts = [part for piece in turn.pieces for part in _part(piece, report)]
    if turn.role != "assistant":
        return Said("user", parts, turn.native, turn.index)
    first = next((place for place, part in enumerate(parts) if "functionCall" in part), None)
    piece = next((piece for piece in turn.pieces if piece.kind == "tool_use"), None)
    if first is not None and piece is not None and not _made_here(piece):
        parts[first] = {**parts[first], "thoughtSignature": UNSIGNED}
        report.change(piece.at, "signature", "a call of another provider's model gets the signature that says so")
    return Said("model", parts, turn.native, turn.index)


def _made_here(piece: Piece) -> bool:
    return piece.maker in ("gemini", "google")


def _part(piece: Piece, report: Converted) -> list[dict[str, Any]]:
    extra = _extra(piece)
    match piece.kind:
        case "text" if piece.text or extra:
            return [{"text": piece.text, **extra}]
        case "text":
            report.drop(piece.at, "text", "Gemini refuses a text with nothing in it")
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


def _extra(piece: Piece) -> dict[str, Any]:
    """What else the part had; other writers of the log keep the whole part."""
    hints = (
        _CALL_HINTS if piece.kind == "tool_use" else _RESULT_HINTS if piece.kind == "tool_result" else ("part", "inner")
    )
    extra = rest(piece.native, *hints)
    whole = piece.native.get("part")
    if isinstance(whole, dict) and whole.get("thought_signature"):
        extra["thoughtSignature"] = whole["thought_signature"]
    return extra


def _inner(piece: Piece, key: str) -> dict[str, Any]:
    inner = piece.native.get(key)
    return inner if isinstance(inner, dict) else {}


def _media(piece: Piece, report: Converted) -> dict[str, Any] | None:
    media = media_of(piece, NAME, report)
    if media is None:
        return None
    mime_type = guessed_kind(media)
    if piece.kind == "document" and media.data and not mime_type.startswith(_DOCUMENTS):
        if not media.is_text:
            report.drop(piece.at, "document", f"gemini takes no documents of the kind {mime_type}")
            return None
        report.change(piece.at, "document", f"{mime_type} is sent as text/plain")
        mime_type = "text/plain"
    kind = {"mimeType": mime_type} if mime_type else {}
    inner = _inner(piece, "inner")
    if media.name and "displayName" not in inner:
        report.drop(piece.at, "name", "Gemini takes the name of a file only beside its own server-side tools")
    if media.url:
        return {"fileData": {**kind, "fileUri": media.url, **inner}}
    return {"inlineData": {**kind, "data": media.data, **inner}}


def _call(piece: Piece, extra: dict[str, Any], report: Converted) -> dict[str, Any]:
    call: dict[str, Any] = {} if piece.native.get("no_id") else {"id": piece.call_id}
    call["name"] = piece.name
    value = arguments_object(piece, report)
    if value or not piece.native.get("no_args"):
        call["args"] = value
    return {"functionCall": {**call, **_inner(piece, "functionCall")}, **extra}


def _response_part(piece: Piece, extra: dict[str, Any], report: Converted) -> dict[str, Any]:
    unnamed = piece.native.get("no_id") or (piece.call is not None and piece.call.native.get("no_id"))
    answer: dict[str, Any] = {} if unnamed else {"id": piece.call_id}
    answer["name"] = as_text(piece.native.get("name")) or piece.name
    answer["response"] = _response_object(piece)
    parts: list[dict[str, Any]] = []
    given = inside(piece, NAME, report)
    if sum(part.kind == "text" for part in given) > 1:
        report.change(piece.at, "tool_result", "its texts are joined to one")
    for part in given:
        if part.kind in ("image", "document"):
            media = _media(part, report)
            parts += [{**media, **_extra(part)}] if media else []
        elif part.kind == "native":
            parts.append(dict(part.block["value"]))
        elif part.kind != "text":
            report.drop(part.at, part.kind, "a function response cannot have it")
    if parts:
        answer["parts"] = parts
    return {"functionResponse": {**answer, **_inner(piece, "functionResponse")}, **extra}


def _response_object(piece: Piece) -> dict[str, Any]:
    """The text under the key Google documents for it, or the object that the text stands for."""
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
    """A response, also as the pieces of a stream, a request, a list of contents, or one content."""
    if isinstance(payload, list):
        pieces = [_camel(piece) for piece in payload]
        if any("candidates" in piece or "usageMetadata" in piece for piece in pieces):
            return [_response(_put_together(pieces))]
        return without_opening(_messages(payload))
    payload = _camel(payload)
    if "candidates" in payload or "promptFeedback" in payload:
        return [_response(payload)]
    if "contents" not in payload:
        return _messages([payload])
    system = payload.get("systemInstruction")
    head: list[ConversationMessage] = []
    if isinstance(system, dict):
        blocks = [_read(part, "", {}) for part in system.get("parts") or []]
        head = [keep_shape(build_message("system", blocks), NAME, rest(_camel(system), "parts"))]
    return without_opening(head + _messages(payload["contents"]))


_SNAKE = re.compile(r"_([a-z])")
_DATA = ("args", "response", "partMetadata")
"""What these hold is the model's or the user's, whatever it is named inside."""


def _camel(wire: Any) -> dict[str, Any]:
    """The SDK dumps names with underscores; the wire has none."""
    return {_SNAKE.sub(lambda match: match[1].upper(), key): value for key, value in wire.items()}


def _wire(part: Any) -> Any:
    """A part as the wire has it, from any dump of the SDK: no underscores, no nulls."""
    if isinstance(part, list):
        return [_wire(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    return {name: value if name in _DATA else _wire(value) for name, value in _camel(part).items() if value is not None}


def _put_together(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One response of the pieces of a stream: Google's client leaves this to its users."""
    whole: dict[str, Any] = {}
    candidate: dict[str, Any] = {}
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        whole |= {name: value for name, value in piece.items() if value is not None and name != "candidates"}
        first = _camel(next(iter(piece.get("candidates") or []), {}))
        candidate |= {name: value for name, value in first.items() if value is not None and name != "content"}
        for part in map(_wire, (first.get("content") or {}).get("parts") or []):
            plain = {"text", "thought"} >= part.keys() >= {"text"}
            last = parts[-1] if parts and plain and {"text", "thought"} >= parts[-1].keys() else {}
            if last and "text" in last and last.get("thought") == part.get("thought"):
                parts[-1] = {**last, "text": last["text"] + part["text"]}
            else:
                parts.append(part)
    # A text with nothing in it ends most streams; it says something only with a signature.
    spoken = [part for part in parts if part.get("text") != "" or len(part) > 1]
    return {**whole, "candidates": [{**candidate, "content": {"role": "model", "parts": spoken}}]}


def _messages(contents: list[dict[str, Any]]) -> list[ConversationMessage]:
    messages: list[ConversationMessage] = []
    open_calls: dict[str, list[str]] = {}
    for place, content in enumerate(contents):
        role = content.get("role")
        if role is None and "parts" not in content:
            raise ValueError("a content has parts")
        ours = "assistant" if role == "model" else "user"
        prefix = f"call_{place}"
        blocks = [_read(part, f"{prefix}_{index}", open_calls) for index, part in enumerate(content.get("parts") or [])]
        shape = rest(content, "parts", "role") | ({"no_role": True} if role is None else {})
        if role not in ("model", "user", None):
            shape["role"] = role
        meta = {"provider": NAME} if ours == "assistant" else None
        messages.append(keep_shape(build_message(ours, blocks, meta=meta), NAME, shape))
    return messages


def _read(part: dict[str, Any], new_id: str, open_calls: dict[str, list[str]]) -> MessageBlock:
    """`open_calls` has the ids of the calls not yet answered, by the function's name: a response may have only that."""
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
        # The SDK dumps bytes in the letters for addresses, which nobody else reads.
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
    value, meta = unwrapped(call.get("args") or {})
    native = rest(wire, "functionCall")
    if extra := rest(call, "id", "name", "args"):
        native["functionCall"] = extra
    native |= {hint: True for hint, key in (("no_id", "id"), ("no_args", "args")) if key not in call}
    return keep_native(tool_use_block(tool_id=id_, name=name, input=value, meta=meta), NAME, native)


def _read_response(wire: dict[str, Any], new_id: str, open_calls: dict[str, list[str]]) -> MessageBlock:
    answer = wire["functionResponse"]
    name, given = as_text(answer.get("name")), as_text(answer.get("id"))
    waiting = open_calls.get(name, [])
    known = (given in waiting) if given else bool(waiting)
    id_ = given or (waiting[0] if waiting else new_id)
    if known:
        waiting.remove(id_)
    native = rest(wire, "functionResponse")
    if extra := rest(answer, "id", "name", "response", "parts"):
        native["functionResponse"] = extra
    native |= ({} if given else {"no_id": True}) | ({} if known else {"name": name})
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
    """The text for the model, whether it tells of an error, and whether it is the JSON of the whole object."""
    value = response if isinstance(response, dict) else {}
    for key in ("output", "error"):
        if set(value) == {key} and isinstance(value[key], str):
            return value[key], key == "error", False
    return as_json(value), "error" in value, True


def _response(wire: dict[str, Any]) -> ConversationMessage:
    candidates = [_camel(candidate) for candidate in wire.get("candidates") or []]
    candidate = candidates[0] if candidates else {}
    response_id = as_text(wire.get("responseId"))
    content = candidate.get("content") or {}
    blocks = [
        _read(part, f"{response_id or 'call'}_{place}", {}) for place, part in enumerate(content.get("parts") or [])
    ]
    usage = wire.get("usageMetadata")
    native = rest(wire, "candidates", "responseId", "modelVersion", *_OF_THE_CLIENT)
    native |= rest(candidate, "content", "finishReason")
    return assistant_message(
        blocks,
        provider=NAME,
        model=wire.get("modelVersion"),
        provider_message_id=response_id or None,
        stop_reason=candidate.get("finishReason"),
        usage=usage_of(usage) if isinstance(usage, dict) else None,
        native_meta=native | ({"other_candidates": candidates[1:]} if candidates[1:] else {}),
    )


def usage_of(usage: dict[str, Any]) -> dict[str, int]:
    """Gemini counts thinking apart from the answer, and tool prompts apart from the prompt; ours has both in."""
    native = _camel(usage)
    thoughts, prompt, tools = (
        count_of(native, name) for name in ("thoughtsTokenCount", "promptTokenCount", "toolUsePromptTokenCount")
    )
    output = count_of(native, "candidatesTokenCount") + thoughts
    return {
        "input_tokens": prompt + tools,
        "output_tokens": output,
        "cache_read_tokens": count_of(native, "cachedContentTokenCount"),
        "cache_write_tokens": 0,
        "reasoning_tokens": thoughts,
        "total_tokens": count_of(native, "totalTokenCount") or prompt + tools + output,
    }
