"""Convert messages to OpenAI Chat Completions requests and back. Pure."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from carrel.conversation.formats.turns import (
    TEXT_KINDS,
    ArrangedTurn,
    Converted,
    IdMapper,
    WireBlock,
    arguments_text,
    arrange_turns,
    as_json,
    as_text,
    join_texts,
    keep_native,
    keep_request_form,
    media_of,
    native_block,
    parse_object,
    read_result,
    rest,
    result_blocks,
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

NAME = "openai_chat"
_REASONING = ("reasoning_content", "reasoning")
"""Fields in which other servers with this format put thinking; OpenAI itself never returns it."""
_SENT_BACK = ("audio", "reasoning_details", "thinking_blocks")
"""Fields of a response that its server wants to receive again."""
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_EXTENSIONS = {"text/plain": ".txt", "text/markdown": ".md", "text/csv": ".csv", "text/html": ".html"}
_MESSAGE_HINTS = ("parts", "role", "no_content")


def to_openai_chat(messages: Sequence[ConversationMessage], *, system: str | None = None) -> Converted:
    """Convert messages to `messages`, with the system prompt first."""
    report = Converted({})
    turns = arrange_turns(messages, NAME, _id_mapper(), report)
    head = [{"role": "system", "content": system}] if system else []
    report.payload["messages"] = head + [wire for turn in turns for wire in _to_wire(turn, report)]
    return report


def message_to_chat(message: ConversationMessage) -> list[dict[str, Any]]:
    """Convert a single message: first a `tool` message for each of its results, then the rest of it."""
    report = Converted({})
    return [
        wire
        for turn in arrange_turns([message], NAME, _id_mapper(), report, lone=True)
        for wire in _to_wire(turn, report)
    ]


def _id_mapper() -> IdMapper:
    return IdMapper(ids=40, names=64)


def _to_wire(turn: ArrangedTurn, report: Converted) -> list[dict[str, Any]]:
    match turn.role:
        case "assistant":
            return _assistant(turn, report)
        case "results":
            return _results(turn, report)
    whole = [piece.block["value"] for piece in turn.pieces if _is_message(piece)]
    parts = [part for piece in turn.pieces if not _is_message(piece) for part in _part(piece, report)]
    role = turn.native.get("role", "system") if turn.role == "system" else turn.role
    extra = rest(turn.native, *_MESSAGE_HINTS)
    spoken = [{"role": role, "content": _content(parts, turn), **extra}] if parts else []
    return [*whole, *spoken]


def _is_message(piece: WireBlock) -> bool:
    return piece.kind == "native" and "role" in piece.block["value"]


def _content(parts: list[dict[str, Any]], turn: ArrangedTurn) -> str | list[dict[str, Any]]:
    """A single text as a plain string, unless it came as a list."""
    if len(parts) == 1 and set(parts[0]) == {"type", "text"} and not turn.native.get("parts"):
        return as_text(parts[0]["text"])
    return parts


def _part(piece: WireBlock, report: Converted) -> list[dict[str, Any]]:
    match piece.kind:
        case "text":
            return [{"type": "text", "text": piece.text, **piece.native}]
        case "image":
            return _image(piece, report)
        case "document":
            return _document(piece, report)
        case "native":
            return [dict(piece.block["value"])]
        case _:
            report.drop(piece.at, piece.kind, "a chat completion cannot contain it here")
            return []


def _image(piece: WireBlock, report: Converted) -> list[dict[str, Any]]:
    media = media_of(piece, NAME, report)
    if media is None:
        return []
    if media.name:
        report.drop(piece.at, "name", "OpenAI does not accept names of images")
    detail = meta_of(piece.block).get("detail")
    image = {"url": media.address, **({"detail": detail} if detail else {})}
    return [{"type": "image_url", "image_url": image, **piece.native}]


def _document(piece: WireBlock, report: Converted) -> list[dict[str, Any]]:
    media = media_of(piece, NAME, report)
    if media is None:
        return []
    if media.url:
        report.drop(piece.at, "document", "a chat completion accepts a document's data, not its URL")
        return []
    return [
        {
            "type": "file",
            "file": {"filename": media.name or default_file_name(media.mime_type), "file_data": media.address},
            **piece.native,
        }
    ]


def _results(turn: ArrangedTurn, report: Converted) -> list[dict[str, Any]]:
    """A `tool` message for each result, then one user message with their images and documents."""
    wires: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for piece in turn.pieces:
        if piece.block.get("is_error"):
            report.drop(piece.at, "is_error", "a tool message has no error mark; the model sees only its text")
        texts: list[dict[str, Any]] = []
        media: list[dict[str, Any]] = []
        for part in result_blocks(piece, NAME, report):
            (texts if part.kind == "text" else media).extend(_part(part, report))
        if media:
            report.change(piece.at, "tool_result", "its images and documents follow in a user message")
            moved += [{"type": "text", "text": f"[from the tool result {piece.call_id}]"}, *media]
        listed = isinstance(piece.block.get("content"), list) and bool(texts)
        content = texts if listed else "".join(as_text(text["text"]) for text in texts)
        wires.append({"role": "tool", "tool_call_id": piece.call_id, "content": content, **piece.native})
    return [*wires, {"role": "user", "content": moved}] if moved else wires


def _assistant(turn: ArrangedTurn, report: Converted) -> list[dict[str, Any]]:
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    extra: dict[str, Any] = _strip_response_only_fields(rest(turn.native, *_MESSAGE_HINTS))
    for piece in turn.pieces:
        match piece.kind:
            case "tool_use":
                calls.append(_call(piece))
            case "text" if piece.native.get("refusal") == "field":
                extra["refusal"] = piece.text
            case "text" if piece.native.get("transcript"):
                # The audio replaces its transcript.
                if "audio" not in extra:
                    texts.append({"type": "text", "text": piece.text})
            case "text" if piece.native.get("refusal"):
                texts.append({"type": "refusal", "refusal": piece.text})
            case "text":
                texts.append({"type": "text", "text": piece.text, **piece.native})
                if calls:
                    report.change(piece.at, "text", "moved before the calls of its message")
            case "thinking" if isinstance(piece.native.get("part"), dict):
                texts.append(piece.native["part"])
            case "thinking":
                _reasoning(piece, extra, report)
            case _:
                report.drop(piece.at, piece.kind, "an assistant message cannot contain it here")
    if not texts and not calls and not extra:
        return []
    wire: dict[str, Any] = {"role": "assistant", "content": _content(texts, turn) if texts else None}
    if not texts and turn.native.get("no_content"):
        del wire["content"]
    return [{**wire, **({"tool_calls": calls} if calls else {}), **extra}]


def _strip_response_only_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove annotations and parsed output, which requests cannot have, and reduce audio to its id."""
    echo = {name: value for name, value in fields.items() if name not in ("annotations", "parsed")}
    if isinstance(echo.get("audio"), dict) and "id" in echo["audio"]:
        echo["audio"] = {"id": echo["audio"]["id"]}
    return echo


def _reasoning(piece: WireBlock, extra: dict[str, Any], report: Converted) -> None:
    where = piece.native.get("reasoning_field")
    if where in _REASONING:
        extra[where] = as_text(extra.get(where)) + piece.text
    else:
        report.drop(piece.at, "thinking", "a chat completion cannot contain thinking")


def _call(piece: WireBlock) -> dict[str, Any]:
    # Clients that join the chunks of a stream number the calls.
    extra, text = rest(piece.native, "index"), arguments_text(piece)
    value = piece.block.get("input")
    if extra.get("type") == "custom" and isinstance(value, dict) and isinstance(value.get("input"), str):
        return {"id": piece.call_id, **extra, "custom": {"name": piece.name, "input": value["input"]}}
    function = {"name": piece.name, "arguments": text}
    return {"id": piece.call_id, **extra, "type": "function", "function": function}


def from_openai_chat(payload: Any) -> list[ConversationMessage]:
    """Read messages from a chat completion, a request, a list of messages, or one message."""
    if isinstance(payload, list):
        return _messages(payload)
    if "choices" in payload:
        return [_response(payload)]
    return _messages(payload.get("messages", [payload]))


def _messages(wires: Iterable[dict[str, Any]]) -> list[ConversationMessage]:
    messages: list[ConversationMessage] = []
    results: list[MessageBlock] | None = None
    for wire in wires:
        if wire.get("role") == "tool":
            if results is None:
                results = []
                messages.append(build_message("user", results))
            results.append(_read_result(wire))
        else:
            results = None
            messages.append(_message(wire))
    return messages


def _message(wire: dict[str, Any]) -> ConversationMessage:
    role = as_text(wire.get("role"))
    if role == "assistant":
        extra = rest(wire, "role", "content", "tool_calls", *_REASONING)
        if isinstance(extra.get("refusal"), str):
            del extra["refusal"]
        message = build_message("assistant", _assistant_blocks(wire), meta={"provider": NAME})
        return keep_request_form(message, NAME, extra | _shape(wire))
    if role not in ("user", "system", "developer"):
        return build_message("user", [native_block(NAME, wire)])
    shape = rest(wire, "role", "content") | _shape(wire) | ({"role": role} if role == "developer" else {})
    ours = "user" if role == "user" else "system"
    return keep_request_form(build_message(ours, _parts(wire.get("content"))), NAME, shape)


def _shape(wire: dict[str, Any]) -> dict[str, Any]:
    content = wire.get("content")
    if isinstance(content, list) and len(content) == 1 and set(content[0]) == {"type", "text"}:
        return {"parts": True}
    return {"no_content": True} if "content" not in wire else {}


def _response(wire: dict[str, Any]) -> ConversationMessage:
    choices = wire["choices"]
    choice = choices[0] if choices else {}
    if "delta" in choice and "message" not in choice:
        raise ValueError("this is one chunk of a stream; join the chunks first")
    message = choice.get("message") or {}
    native = rest(wire, "id", "object", "model", "choices") | rest(choice, "index", "finish_reason", "message")
    # Other fields of the message, such as annotations.
    native |= rest(message, "role", "content", "tool_calls", "refusal", *_REASONING)
    if sent_back := {name: message[name] for name in _SENT_BACK if message.get(name)}:
        native["message"] = _strip_response_only_fields(sent_back)
    return assistant_message(
        _assistant_blocks(message),
        provider=NAME,
        model=wire.get("model"),
        provider_message_id=wire.get("id"),
        stop_reason=choice.get("finish_reason"),
        usage=token_counts(wire.get("usage")),
        native_meta=native | ({"other_choices": choices[1:]} if choices[1:] else {}),
    )


def _assistant_blocks(wire: dict[str, Any]) -> list[MessageBlock]:
    blocks: list[MessageBlock] = []
    for where in _REASONING:
        if isinstance(wire.get(where), str):
            blocks.append(keep_native(thinking_block(wire[where]), NAME, {"reasoning_field": where}))
    blocks += _parts(wire.get("content"))
    audio = wire.get("audio")
    if isinstance(audio, dict) and isinstance(audio.get("transcript"), str) and not wire.get("content"):
        blocks.append(keep_native(text_block(audio["transcript"]), NAME, {"transcript": True}))
    if isinstance(wire.get("refusal"), str):
        blocks.append(keep_native(text_block(wire["refusal"]), NAME, {"refusal": "field"}))
    return blocks + [_read_call(call) for call in wire.get("tool_calls") or []]


def _parts(content: Any) -> list[MessageBlock]:
    if isinstance(content, str):
        return [text_block(content)]
    return [_read(part) for part in content or []]


def _read(part: dict[str, Any]) -> MessageBlock:
    match part.get("type"):
        case "text":
            return keep_native(text_block(as_text(part.get("text"))), NAME, rest(part, "type", "text"))
        case "thinking":
            # From Mistral, which wants it back at the same position.
            thought = part.get("thinking")
            text = join_texts(thought) if isinstance(thought, list) else as_text(thought)
            return keep_native(thinking_block(text), NAME, {"part": part})
        case "refusal":
            return keep_native(text_block(as_text(part.get("refusal"))), NAME, {"refusal": "part"})
        case "image_url" if set(part["image_url"]) <= {"url", "detail"}:
            block = media_block("image", as_text(part["image_url"]["url"]))
            if part["image_url"].get("detail"):
                block["meta"] = {"detail": part["image_url"]["detail"]}
            return keep_native(block, NAME, rest(part, "type", "image_url"))
        case "file" if set(part["file"]) == {"filename", "file_data"}:
            block = media_block("document", as_text(part["file"]["file_data"]), as_text(part["file"]["filename"]))
            if "data" in block:
                return keep_native(block, NAME, rest(part, "type", "file"))
    return native_block(NAME, part)


def default_file_name(mime_type: str) -> str:
    """The file name that is sent for a document without a name."""
    return f"document{_EXTENSIONS.get(mime_type, '.txt' if TEXT_KINDS.match(mime_type) else '.pdf')}"


def media_block(kind: str, address: str, name: str | None = None) -> MessageBlock:
    """An image or document block from a data URL or another URL; a default file name is not kept as its name."""
    match = _DATA_URL.fullmatch(address)
    where = {"data": match[2], "mime_type": match[1]} if match and match[2] else {"url": address}
    made_up = match is not None and name == default_file_name(match[1])
    return {"type": kind, **where, **({"name": name} if name and not made_up else {})}


def read_arguments(raw: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool call's input from its JSON text, and meta that keeps the text if serializing the input would change it."""
    value = parse_object(raw)
    return value or {}, {} if value is not None and as_json(value) == raw else {"raw_arguments": raw}


def _read_call(call: dict[str, Any]) -> MessageBlock:
    if call.get("type") == "custom":
        name, native = call["custom"]["name"], rest(call, "id", "custom")
        value: dict[str, Any] = {"input": call["custom"]["input"]}
        meta: dict[str, Any] = {}
    else:
        name = call["function"]["name"]
        value, meta = read_arguments(as_text(call["function"].get("arguments")))
        native = rest(call, "id", "type", "function")
    return keep_native(tool_use_block(tool_id=as_text(call["id"]), name=name, input=value, meta=meta), NAME, native)


def _read_result(wire: dict[str, Any]) -> MessageBlock:
    block = read_result(wire["tool_call_id"], wire.get("content"), _parts)
    return keep_native(block, NAME, rest(wire, "role", "content", "tool_call_id"))
