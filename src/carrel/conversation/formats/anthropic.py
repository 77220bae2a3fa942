"""Convert messages to Anthropic Messages requests and back. Pure."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from carrel.conversation.formats.turns import (
    IMAGES,
    OPENING,
    ArrangedTurn,
    Converted,
    IdMapper,
    WireBlock,
    WireTurn,
    arguments_object,
    arrange_turns,
    as_text,
    keep_native,
    keep_request_form,
    media_of,
    merge_turns,
    native_block,
    read_result,
    remove_opening,
    rest,
    result_blocks,
    start_with_user,
    unwrap_arguments,
    wire_name,
)
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    build_message,
    meta_of,
    text_block,
    thinking_block,
    tool_use_block,
)
from carrel.conversation.usage import token_counts

NAME = "anthropic"
BREAKPOINTS = 4
"""The largest number of `cache_control` marks in a request."""
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_THINKING = ("thinking", "redacted_thinking")


Places = dict[int, tuple[int, int | None]]
"""The position in the conversation of each block of the payload, by the `id()` of the block."""


def to_anthropic(messages: Sequence[ConversationMessage], *, system: str | None = None) -> Converted:
    """Convert messages to `messages`, and `system` if there are instructions."""
    report = Converted({})
    turns = arrange_turns(messages, NAME, IdMapper(ids=64, names=128, bad_in_id=r"[^a-zA-Z0-9_-]"), report)
    instructions = [turn for place, turn in enumerate(turns) if turn.role == "system" and not _stays(turns, place)]
    for turn in instructions:
        if not turn.leading:
            report.change((turn.index, None), "system", "moved to the system prompt, before everything else")
    places: Places = {}
    wire_turns = [_to_wire(turn, places, report) for turn in turns if turn not in instructions]
    whole = merge_turns(_drop_unpaired_server_blocks(merge_turns(wire_turns), places, report))
    wire = start_with_user(_trim_ends(whole, places, report), {"type": "text", "text": OPENING}, report)
    heads = [_to_wire(turn, places, report) for turn in instructions]
    head = [{"type": "text", "text": system}] if system else []
    head += [block for each in heads for block in each.content]
    _limit_breakpoints(head, [block for turn in wire for block in turn.content], places, report)
    plain = (not heads and bool(head)) or (len(head) == len(heads) == 1 and bool(heads[0].native.get("plain")))
    if head:
        report.payload["system"] = _content(WireTurn("system", head, {"plain": plain}))
    report.payload["messages"] = [{"role": turn.role, "content": _content(turn)} for turn in wire]
    return report


def _stays(turns: list[ArrangedTurn], place: int) -> bool:
    """Whether a system message came from the middle of an Anthropic request and may be sent there again."""
    before = turns[place - 1].role if place else None
    after = turns[place + 1].role if place + 1 < len(turns) else "assistant"
    return bool(turns[place].native.get("in_place")) and before in ("user", "results") and after == "assistant"


def _content(turn: WireTurn) -> str | list[dict[str, Any]]:
    """A single text as a plain string if it came as one."""
    if turn.native.get("plain") and len(turn.content) == 1 and set(turn.content[0]) == {"type", "text"}:
        return as_text(turn.content[0]["text"])
    return turn.content


def _to_wire(turn: ArrangedTurn, places: Places, report: Converted) -> WireTurn:
    role = "user" if turn.role == "results" else turn.role
    content: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for piece in turn.pieces:
        if piece.kind == "tool_result":
            content.append(_tool_result(piece, moved, report))
            places[id(content[-1])] = piece.at
        elif role == "assistant" and piece.kind in ("image", "document"):
            report.drop(piece.at, piece.kind, "an assistant message cannot contain it at Anthropic")
        elif (block := _block(piece, report)) is not None:
            content.append(block)
            places[id(block)] = piece.at
    return WireTurn(role, content + moved, turn.native, turn.index)


def _block(piece: WireBlock, report: Converted) -> dict[str, Any] | None:
    match piece.kind:
        case "text":
            if not piece.text.strip():
                report.drop(piece.at, "text", "Anthropic refuses an empty text")
                return None
            return _strip_response_only_fields(_marked(piece, {"type": "text", "text": piece.text}))
        case "thinking":
            return _thinking(piece, report)
        case "tool_use":
            value = arguments_object(piece, report)
            call = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": value}
            return _strip_response_only_fields(_marked(piece, call))
        case "image" | "document":
            return _media(piece, report)
        case _:
            return _strip_response_only_fields(piece.block["value"])


def _marked(piece: WireBlock, block: dict[str, Any]) -> dict[str, Any]:
    hint = meta_of(piece.block).get("cache_control")
    return {**block, **piece.native, **({"cache_control": dict(hint)} if isinstance(hint, dict) else {})}


def _strip_response_only_fields(block: dict[str, Any]) -> dict[str, Any]:
    """Remove what Anthropic refuses when a response is sent back: a citation's file, a null caller, parsed output.

    A citation needs a title, which may be null."""
    echo = {wire_name(name): value for name, value in block.items() if name != "parsed_output"}
    if echo.get("caller", echo) is None:
        del echo["caller"]
    for name in ("content", "citations"):
        if isinstance(echo.get(name), list):
            echo[name] = [_strip_response_only_fields(part) if isinstance(part, dict) else part for part in echo[name]]
    if "cited_text" in echo:
        echo.pop("file_id", None)
        echo.setdefault("title" if str(echo.get("type")).endswith("search_result_location") else "document_title", None)
    return echo


def _thinking(piece: WireBlock, report: Converted) -> dict[str, Any] | None:
    # Other programs that write this log format store the whole block, or only the signature, one level higher.
    whole = piece.native.get("anthropic_block")
    if isinstance(whole, dict) and whole.get("type") in _THINKING:
        return dict(whole)
    signature = piece.native.get("signature") or meta_of(piece.block).get("signature")
    if not signature:
        report.drop(piece.at, "thinking", "it has no signature, and Anthropic accepts only signed thinking")
        return None
    return {"type": "thinking", "thinking": piece.text, **piece.native, "signature": signature}


def _media(piece: WireBlock, report: Converted) -> dict[str, Any] | None:
    media = media_of(piece, NAME, report)
    if media is None:
        return None
    source: dict[str, Any] = {"type": "base64", "media_type": media.mime_type, "data": media.data}
    if media.url:
        source = {"type": "url", "url": media.url}
    elif piece.kind == "document" and media.is_text:
        text = _decoded(media.data)
        if text is None:
            report.drop(piece.at, "document", "its data is not base64 of UTF-8 text")
            return None
        source = {"type": "text", "media_type": "text/plain", "data": text}
        if media.mime_type != "text/plain":
            report.change(piece.at, "document", f"{media.mime_type} is sent as text/plain")
    elif piece.kind == "document" and media.mime_type != "application/pdf":
        report.drop(piece.at, "document", f"Anthropic does not accept documents of type {media.mime_type}")
        return None
    if media.name and piece.kind == "image":
        report.drop(piece.at, "name", "an image has no name at Anthropic")
    title = {"title": media.name} if media.name and piece.kind == "document" else {}
    return _marked(piece, {"type": piece.kind, "source": source, **title})


def _decoded(data: str) -> str | None:
    try:
        return base64.b64decode(data, validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return None


def _tool_result(piece: WireBlock, moved: list[dict[str, Any]], report: Converted) -> dict[str, Any]:
    failed = bool(piece.block.get("is_error"))
    parts: list[dict[str, Any]] = []
    for part in result_blocks(piece, NAME, report):
        if part.kind not in ("text", "image", "document", "native"):
            report.drop(part.at, part.kind, "a tool result cannot contain it at Anthropic")
            continue
        block = _block(part, report)
        if block is not None and failed and block["type"] != "text":
            report.change(part.at, part.kind, "moved after the results: a failed result may contain only text")
            moved.append(block)
        elif block is not None:
            parts.append(block)
    listed = isinstance(piece.block.get("content"), list)
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": piece.call_id}
    if listed or not piece.native.get("no_content"):
        result["content"] = parts if listed else "\n".join(as_text(part.get("text")) for part in parts)
    if failed:
        result["is_error"] = True
    block = _marked(piece, result)
    block.pop("no_content", None)
    return block


def _drop_unpaired_server_blocks(wire: list[WireTurn], places: Places, report: Converted) -> list[WireTurn]:
    """Drop calls of Anthropic's own tools without a result, and results without a call; both would be refused.

    A call at the end is kept: its result may come when the turn continues or after our tool results."""
    blocks = [block for turn in wire for block in turn.content]
    call_ids = {block.get("id") for block in blocks if block.get("type") in _SERVER_CALLS}
    answered = {block.get("tool_use_id") for block in blocks if _is_server_result(block)}
    for place, turn in enumerate(wire):
        after = wire[place + 1 :]
        waits = not after or (len(after) == 1 and after[0].content[0].get("type") == "tool_result")
        for block in list(turn.content):
            lone_call = block.get("type") in _SERVER_CALLS and block.get("id") not in answered and not waits
            if lone_call or (_is_server_result(block) and block.get("tool_use_id") not in call_ids):
                at = places.get(id(block), (-1, None))
                report.drop(at, "native", "a call without its result, or a result without its call, is refused")
                turn.content.remove(block)
    return wire


def _is_server_result(block: dict[str, Any]) -> bool:
    return as_text(block.get("type")).endswith("_tool_result")


def _trim_ends(wire: list[WireTurn], places: Places, report: Converted) -> list[WireTurn]:
    """Drop thinking at the end of an assistant message, and white space at the end of the conversation."""
    for turn in wire:
        while turn.role == "assistant" and turn.content and turn.content[-1].get("type") in _THINKING:
            at = places[id(turn.content.pop())]
            report.drop(at, "thinking", "Anthropic refuses a message that ends with thinking")
    kept = merge_turns(wire)
    if kept and kept[-1].role == "assistant" and kept[-1].content[-1].get("type") == "text":
        last = kept[-1].content[-1]
        trimmed = as_text(last["text"]).rstrip()
        if trimmed != last["text"]:
            report.change(places[id(last)], "text", "white space at the end is removed")
            last["text"] = trimmed
    return kept


def _limit_breakpoints(
    head: list[dict[str, Any]], blocks: list[dict[str, Any]], places: Places, report: Converted
) -> None:
    """Keep the marks of the system prompt, which other conversations share, and the last ones of the messages."""
    inner = [part for block in blocks for part in [*_inner(block), block]]
    marked = [block for block in [*head, *reversed(inner)] if isinstance(block.get("cache_control"), dict)]
    for block in marked[BREAKPOINTS:]:
        del block["cache_control"]
        at = places.get(id(block), (-1, None))
        report.drop(at, "cache_control", f"a request can have at most {BREAKPOINTS}")


def _inner(block: dict[str, Any]) -> list[dict[str, Any]]:
    content = block.get("content")
    return content if isinstance(content, list) and block.get("type") == "tool_result" else []


def from_anthropic(payload: Any) -> list[ConversationMessage]:
    """Read messages from a response, a request, a list of messages, or one message."""
    if isinstance(payload, list):
        return remove_opening([_message(message) for message in payload])
    if "messages" not in payload:
        return [_response(payload) if payload.get("type") == "message" else _message(payload)]
    system = payload.get("system")
    head = [_message({"role": "system", "content": system}, in_place=False)] if system else []
    return remove_opening(head + [_message(message) for message in payload["messages"]])


def _message(wire: dict[str, Any], *, in_place: bool = True) -> ConversationMessage:
    role, content = as_text(wire.get("role")), wire.get("content")
    shape: dict[str, Any] = {"plain": True} if isinstance(content, str) else {}
    if role == "system" and in_place:
        shape["in_place"] = True
    meta = {"provider": NAME} if role == "assistant" else None
    return keep_request_form(build_message(role, _blocks(content), meta=meta), NAME, shape)


def _response(wire: dict[str, Any]) -> ConversationMessage:
    return assistant_message(
        _blocks(wire.get("content")),
        provider=NAME,
        model=wire.get("model"),
        provider_message_id=wire.get("id"),
        stop_reason=wire.get("stop_reason"),
        usage=token_counts(wire.get("usage")),
        native_meta=rest(wire, "content", "role", "type", "id", "model", "stop_reason"),
    )


def _blocks(content: Any) -> list[MessageBlock]:
    if isinstance(content, str):
        return [text_block(content)]
    return [_read(block) for block in content or []]


def _read(wire: dict[str, Any]) -> MessageBlock:
    match wire.get("type"):
        case "text":
            return _kept(text_block(as_text(wire.get("text"))), wire, "text")
        case "thinking":
            return _kept(thinking_block(as_text(wire.get("thinking"))), wire, "thinking")
        case "redacted_thinking":
            return keep_native(thinking_block(""), NAME, {"anthropic_block": wire})
        case "tool_use":
            value, meta = unwrap_arguments(wire.get("input"))
            call = tool_use_block(tool_id=as_text(wire["id"]), name=as_text(wire["name"]), input=value, meta=meta)
            return _kept(call, wire, "id", "name", "input")
        case "tool_result":
            return _read_result(wire)
        case "image" | "document" if (block := _read_media(wire)) is not None:
            return _kept(block, wire, "source", *(("title",) if block.get("name") else ()))
        case _:
            return native_block(NAME, wire)


def _kept(block: MessageBlock, wire: dict[str, Any], *known: str) -> MessageBlock:
    hint = wire.get("cache_control")
    if isinstance(hint, dict):
        block["meta"] = {**meta_of(block), "cache_control": hint}
        known = (*known, "cache_control")
    return keep_native(block, NAME, rest(wire, "type", *known))


def _read_media(wire: dict[str, Any]) -> MessageBlock | None:
    source = wire.get("source")
    if not isinstance(source, dict):
        return None
    name = {"name": wire["title"]} if wire.get("title") and wire["type"] == "document" else {}
    kinds = IMAGES[NAME] if wire["type"] == "image" else ("application/pdf",)
    match source.get("type"):
        case "base64" if source.get("data") and source.get("media_type") in kinds:
            return {"type": wire["type"], "data": source["data"], "mime_type": source["media_type"], **name}
        case "url" if source.get("url"):
            return {"type": wire["type"], "url": source["url"], **name}
        case "text" if source.get("data"):
            data = base64.b64encode(as_text(source["data"]).encode("utf-8", "surrogatepass")).decode("ascii")
            return {"type": wire["type"], "data": data, "mime_type": "text/plain", **name}
        case _:
            return None


def _read_result(wire: dict[str, Any]) -> MessageBlock:
    content = wire.get("content")
    block = read_result(wire["tool_use_id"], content, _blocks, is_error=wire.get("is_error") is True)
    known = ("tool_use_id", "content", *(("is_error",) if wire.get("is_error") is True else ()))
    if content is None:
        return _kept(block, {**rest(wire, "content"), "no_content": True}, *known)
    return _kept(block, wire, *known)
