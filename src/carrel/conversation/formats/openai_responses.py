"""Pure: our messages as an OpenAI Responses request, and back."""

from collections.abc import Iterable, Sequence
from typing import Any

from carrel.conversation.formats.arguments import arguments_text, read_arguments
from carrel.conversation.formats.echoes import item_echo
from carrel.conversation.formats.hosted import settle_hosted
from carrel.conversation.formats.media import media_block, media_of
from carrel.conversation.formats.turns import (
    Converted,
    Piece,
    Spelling,
    Turn,
    arrange,
    as_text,
    count_of,
    inside,
    joined,
    keep_native,
    keep_shape,
    native_block,
    native_of,
    rest,
)
from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    build_message,
    meta_of,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
)

NAME = "openai_responses"
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ENDINGS = ("response.completed", "response.incomplete", "response.failed")
_TEXT_HINTS = ("item", "continues", "plain", "refusal", "no_annotations", "item_id")
_OF_THE_REQUEST = (
    *(
        "access_programs",
        "background",
        "image",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "prompt",
        "store",
    ),
    *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "user"),
    *("safety_identifier", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"),
)
"""What a response repeats of its request, which may be long."""
_HINTS = ("role", "plain", "untyped", "bare")


def to_openai_responses(messages: Sequence[ConversationMessage], *, system: str | None = None) -> Converted:
    """`input`, and `instructions` when there are any."""
    report = Converted({})
    turns = arrange(messages, NAME, Spelling(ids=64, names=64), report)
    if system:
        report.payload["instructions"] = system
    elif turns and _is_instructions(turns[0]):
        report.payload["instructions"] = turns.pop(0).pieces[0].text
    settle_hosted(turns, report)
    stored = _stored_reasoning(messages)
    items = [
        item_echo(stored.get(as_text(item.get("id")), item)) for turn in _runs(turns) for item in _items(turn, report)
    ]
    bare = len(turns) == len(items) == 1 and turns[0].native.get("bare")
    report.payload["input"] = items[0]["content"] if bare else items
    return report


def _runs(turns: list[Turn]) -> list[Turn]:
    """What the assistant says in a row is one run of items: reasoning may stand in a message before its item's."""
    runs: list[Turn] = []
    for turn in turns:
        if runs and runs[-1].role == turn.role == "assistant":
            runs[-1].pieces += turn.pieces
        else:
            runs.append(turn)
    return runs


def _is_instructions(turn: Turn) -> bool:
    """One plain text before anything else; a system message that came as an item stays one."""
    return turn.role == "system" and len(turn.pieces) == 1 and not turn.pieces[0].native and not turn.native


def _stored_reasoning(messages: Sequence[ConversationMessage]) -> dict[str, dict[str, Any]]:
    """Reasoning items by id, where another writer of the log kept them whole beside the message."""
    kept = (native_of(message).get("output_items") for message in messages if isinstance(message, dict))
    items = (item for some in kept if isinstance(some, list) for item in some if isinstance(item, dict))
    return {
        as_text(item["id"]): rest(item, "status")
        for item in items
        if item.get("type") == "reasoning" and item.get("id")
    }


def _items(turn: Turn, report: Converted) -> list[dict[str, Any]]:
    match turn.role:
        case "assistant":
            return _assistant(turn, report)
        case "results":
            return [_result(piece, report) for piece in turn.pieces]
    items = [dict(piece.block["value"]) for piece in turn.pieces if _is_item(piece)]
    parts = [part for piece in turn.pieces if not _is_item(piece) for part in _part(piece, report)]
    if not parts:
        return items
    wire: dict[str, Any] = {"type": "message", "role": turn.native.get("role", turn.role)}
    if turn.native.get("untyped"):
        del wire["type"]
    plain = turn.native.get("plain") and len(parts) == 1 and set(parts[0]) == {"type", "text"}
    return [*items, {**wire, "content": parts[0]["text"] if plain else parts, **rest(turn.native, *_HINTS)}]


def _is_item(piece: Piece) -> bool:
    """Whether something only OpenAI understands is an item of its own, not a part of a message."""
    return piece.kind == "native" and not as_text(piece.block["value"].get("type")).startswith("input_")


def _part(piece: Piece, report: Converted, *, in_result: bool = False) -> list[dict[str, Any]]:
    match piece.kind:
        case "text":
            return [{"type": "input_text", "text": piece.text, **piece.native}]
        case "native":
            return [dict(piece.block["value"])]
        case "image" | "document":
            media = media_of(piece, NAME, report)
            if media is None:
                return []
        case _:
            report.drop(piece.at, piece.kind, "this place of a Responses request cannot have it")
            return []
    detail = meta_of(piece.block).get("detail")
    if piece.kind == "image":
        if media.name:
            report.drop(piece.at, "name", "an image has no name at OpenAI")
        # An image must say its detail, but for that of a function's result.
        hint = {"detail": detail or "auto"} if detail or not in_result else {}
        return [{"type": "input_image", "image_url": media.address, **hint, **piece.native}]
    where = {"file_url": media.url} if media.url else {"file_data": media.address}
    name = {"filename": media.file_name} if media.name or not media.url else {}
    return [{"type": "input_file", **name, **where, **piece.native}]


def _result(piece: Piece, report: Converted) -> dict[str, Any]:
    if piece.block.get("is_error"):
        report.drop(piece.at, "is_error", "an output has no such mark; its text is all the model sees")
    asked = piece.call.native if piece.call is not None else {}
    custom = asked.get("type") == "custom_tool_call"
    parts = [part for inner in inside(piece, NAME, report) for part in _part(inner, report, in_result=not custom)]
    listed = isinstance(piece.block.get("content"), list)
    caller = asked.get("caller")
    # The result of a call that a program of OpenAI's made goes back to that program.
    to = {"caller": caller} if isinstance(caller, dict) and caller.get("type") == "program" else {}
    return {
        "type": _OUTPUTS[custom],
        "call_id": piece.call_id,
        "output": parts if listed else "".join(as_text(part["text"]) for part in parts),
        **to,
        **piece.native,
    }


def _assistant(turn: Turn, report: Converted) -> list[dict[str, Any]]:
    """The items in their order; reasoning only before the item it led to, and ids only beside their reasoning."""
    items: list[dict[str, Any]] = []
    lost_reasoning = False
    spoken = ("text", "tool_use", "native")
    last_word = max((place for place, piece in enumerate(turn.pieces) if piece.kind in spoken), default=-1)
    for place, piece in enumerate(turn.pieces):
        if piece.kind != "thinking":
            _say(piece, items, report, with_id=not lost_reasoning)
        elif place > last_word:
            report.drop(piece.at, "thinking", "nothing follows it, and OpenAI refuses reasoning without its item")
        elif (item := _reasoning(piece, report)) is not None:
            items.append(item)
        else:
            lost_reasoning = True
    return items


def _reasoning(piece: Piece, report: Converted) -> dict[str, Any] | None:
    native = dict(piece.native)
    # Other writers of the log keep the id under this name.
    id_ = native.pop("item_id", None) or native.get("id")
    if not id_:
        report.drop(piece.at, "thinking", "it has no id of a reasoning item")
        return None
    summary = [{"type": "summary_text", "text": piece.text}] if piece.text else []
    return {"type": "reasoning", "summary": summary, **native, "id": id_}


def _say(piece: Piece, items: list[dict[str, Any]], report: Converted, *, with_id: bool) -> None:
    match piece.kind:
        case "text":
            _say_text(piece, items, with_id=with_id)
        case "tool_use":
            items.append(_call(piece, with_id=with_id))
        case "native":
            items.append(dict(piece.block["value"]))
        case _:
            report.drop(piece.at, piece.kind, "an assistant's item cannot have it")


def _say_text(piece: Piece, items: list[dict[str, Any]], *, with_id: bool) -> None:
    """A part of an output message, or a short message of its own where no such message was."""
    native = piece.native
    part = {"type": "output_text", "text": piece.text, "annotations": [], **rest(native, *_TEXT_HINTS)}
    if native.get("no_annotations"):
        del part["annotations"]
    if native.get("refusal"):
        part = {"type": "refusal", "refusal": piece.text}
    if native.get("continues") and items and isinstance(items[-1].get("content"), list):
        items[-1]["content"].append(part)
        return
    item = native.get("item")
    head: dict[str, Any] = {"type": "message", "role": "assistant"}
    listed = isinstance(item, dict) and not native.get("plain") and with_id
    if isinstance(item, dict):
        head |= item if with_id else rest(item, "id", "status")
    items.append({key: value for key, value in head.items() if (key, value) != ("type", None)})
    items[-1]["content"] = [part] if listed else piece.text


def _call(piece: Piece, *, with_id: bool) -> dict[str, Any]:
    native = dict(piece.native)
    id_ = native.pop("item_id", None)
    if id_:
        native.setdefault("id", id_)
    if not with_id:
        native.pop("id", None)
    value = piece.block.get("input")
    if native.pop("type", None) == "custom_tool_call" and isinstance(value, dict):
        called = {"call_id": piece.call_id, "name": piece.name, "input": as_text(value.get("input"))}
        return {"type": "custom_tool_call", **called, **native}
    called = {"call_id": piece.call_id, "name": piece.name, "arguments": arguments_text(piece)}
    return {"type": "function_call", **called, **native}


def from_openai_responses(payload: Any) -> list[ConversationMessage]:
    """A response, a compacted one, a request, a list of items, or one item."""
    if isinstance(payload, list):
        return _messages(payload)
    if "output" in payload and payload.get("object") == "response":
        return [_response(payload)]
    if as_text(payload.get("type")).startswith("response."):
        # The last event of a stream has the whole response in it.
        if not isinstance(payload.get("response"), dict) or payload["type"] not in _ENDINGS:
            raise ValueError("a piece of a stream; its last event has the whole response")
        return [_response(payload["response"])]
    if payload.get("object") == "response.compaction":
        return _messages(payload["output"])
    if "input" not in payload:
        return _messages([payload])
    instructions, given = payload.get("instructions"), payload["input"]
    head = [build_message("system", [text_block(instructions)])] if isinstance(instructions, str) else []
    if isinstance(given, str):
        return [*head, keep_shape(build_message("user", [text_block(given)]), NAME, {"plain": True, "bare": True})]
    return [*head, *_messages(given)]


def _messages(items: Iterable[dict[str, Any]]) -> list[ConversationMessage]:
    messages: list[ConversationMessage] = []
    side = ""
    for item in items:
        kind, role = as_text(item.get("type") or "message"), as_text(item.get("role"))
        if not role and "type" not in item:
            raise ValueError("an item has a type or a role")
        if kind == "message" and role in ("user", "system", "developer"):
            messages.append(_input_message(item, role))
            side = ""
            continue
        now = "user" if kind.endswith("_output") else "assistant"
        if side != now:
            meta = {"provider": NAME} if now == "assistant" else None
            messages.append(build_message(now, [], meta=meta))
            side = now
        messages[-1]["content"] += _read_item(item, kind)
    return messages


def _input_message(item: dict[str, Any], role: str) -> ConversationMessage:
    content = item.get("content")
    shape = rest(item, "type", "role", "content")
    if isinstance(content, str):
        shape["plain"] = True
    if "type" not in item:
        shape["untyped"] = True
    if role != "user":
        shape["role"] = role
    return keep_shape(build_message("user" if role == "user" else "system", _parts(content)), NAME, shape)


def _parts(content: Any) -> list[MessageBlock]:
    if isinstance(content, str):
        return [text_block(content)]
    return [_read_part(part) for part in content or []]


def _read_part(part: dict[str, Any]) -> MessageBlock:
    match part.get("type"):
        case "input_text":
            return keep_native(text_block(as_text(part.get("text"))), NAME, rest(part, "type", "text"))
        case "input_image" if part.get("image_url"):
            block = media_block("image", as_text(part["image_url"]))
            if part.get("detail"):
                block["meta"] = {"detail": part["detail"]}
            return keep_native(block, NAME, rest(part, "type", "image_url", "detail"))
        case "input_file" if part.get("file_data") and part.get("filename"):
            block = media_block("document", as_text(part["file_data"]), as_text(part["filename"]))
            if "data" in block:
                return keep_native(block, NAME, rest(part, "type", "file_data", "filename"))
        case "input_file" if part.get("file_url"):
            block = {"type": "document", "url": part["file_url"]}
            known = ["type", "file_url"]
            if part.get("filename"):
                block["name"] = part["filename"]
                known.append("filename")
            return keep_native(block, NAME, rest(part, *known))
    return native_block(NAME, part)


def _read_item(item: dict[str, Any], kind: str) -> list[MessageBlock]:
    match kind:
        case "message":
            return _read_message(item)
        case "reasoning":
            return [_read_reasoning(item)]
        case "function_call":
            value, meta = read_arguments(as_text(item.get("arguments")))
            call = tool_use_block(tool_id=as_text(item["call_id"]), name=item["name"], input=value, meta=meta)
            return [keep_native(call, NAME, rest(item, "type", "call_id", "name", "arguments"))]
        case "custom_tool_call":
            call = tool_use_block(
                tool_id=as_text(item["call_id"]), name=item["name"], input={"input": item.get("input")}
            )
            return [keep_native(call, NAME, rest(item, "call_id", "name", "input"))]
        case "function_call_output" | "custom_tool_call_output" if item.get("call_id"):
            return [_read_result(item)]
        case _:
            return [native_block(NAME, item)]


def _read_message(item: dict[str, Any]) -> list[MessageBlock]:
    """What the assistant said: an output message, or the short form that a request may have."""
    content = item.get("content")
    head = rest(item, "type", "role", "content") | ({} if "type" in item else {"type": None})
    if isinstance(content, str):
        return [keep_native(text_block(content), NAME, {"item": head, "plain": True} if head else {})]
    parts = content or []
    if not parts or any(part.get("type") not in ("output_text", "refusal") for part in parts):
        return [native_block(NAME, item)]
    return [_read_output(part, {"continues": True} if place else {"item": head}) for place, part in enumerate(parts)]


def _read_output(part: dict[str, Any], native: dict[str, Any]) -> MessageBlock:
    if part["type"] == "refusal":
        return keep_native(text_block(as_text(part.get("refusal"))), NAME, {**native, "refusal": "part"})
    if "annotations" not in part:
        native["no_annotations"] = True
    known = ("type", "text", *(("annotations",) if part.get("annotations") == [] else ()))
    return keep_native(text_block(as_text(part.get("text"))), NAME, native | rest(part, *known))


def _read_reasoning(item: dict[str, Any]) -> MessageBlock:
    summary = item.get("summary") or []
    text = "\n\n".join(as_text(part.get("text")) for part in summary or item.get("content") or [])
    native = rest(item, "type")
    if summary == ([{"type": "summary_text", "text": text}] if text else []) and "summary" in native:
        del native["summary"]
    return keep_native(thinking_block(text), NAME, native)


def _read_result(item: dict[str, Any]) -> MessageBlock:
    output = item.get("output")
    inner = _parts(output) if isinstance(output, list) else None
    block = tool_result_block(
        tool_use_id=as_text(item["call_id"]),
        model_text=joined(inner) if inner is not None else as_text(output),
        content=inner,
    )
    return keep_native(block, NAME, rest(item, "type", "call_id", "output"))


def _response(wire: dict[str, Any]) -> ConversationMessage:
    usage = wire.get("usage")
    own = rest(wire, "id", "model", "object", "output", "output_text", "status", *_OF_THE_REQUEST)
    items = wire.get("output") or []
    # A call that OpenAI has answered itself is no call of ours.
    done = {item.get("call_id") for item in items if item.get("type") in _OUTPUTS}
    blocks = [
        block
        for item in items
        for block in (
            [native_block(NAME, item)]
            if "call_id" in item and item["call_id"] in done
            else _read_item(item, as_text(item.get("type") or "message"))
        )
    ]
    return assistant_message(
        blocks,
        provider=NAME,
        model=wire.get("model"),
        provider_message_id=wire.get("id"),
        stop_reason=wire.get("status"),
        usage=usage_of(usage) if isinstance(usage, dict) else None,
        native_meta={name: value for name, value in own.items() if value not in (None, {})},
    )


def usage_of(usage: dict[str, Any]) -> dict[str, int]:
    given, output = (count_of(usage, f"{what}_tokens") for what in ("input", "output"))
    details = usage.get("input_tokens_details")
    return {
        "input_tokens": given,
        "output_tokens": output,
        "cache_read_tokens": count_of(details, "cached_tokens"),
        "cache_write_tokens": count_of(details, "cache_write_tokens"),
        "reasoning_tokens": count_of(usage.get("output_tokens_details"), "reasoning_tokens"),
        "total_tokens": count_of(usage, "total_tokens") or given + output,
    }
