"""Convert messages to OpenAI Responses requests and back. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from carrel.conversation.formats.openai_chat import default_file_name, media_block, read_arguments
from carrel.conversation.formats.turns import (
    ArrangedTurn,
    Converted,
    IdMapper,
    WireBlock,
    arguments_text,
    arrange_turns,
    as_text,
    keep_native,
    keep_request_form,
    media_of,
    native_block,
    native_of,
    read_result,
    rest,
    result_blocks,
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
"""Fields of the request that a response repeats; they may be long."""
_HOSTED_TOOLS = ("computer_call", "local_shell_call", "shell_call", "apply_patch_call")
_UNTOUCHED = frozenset({"arguments", "attributes", "input", "tools"})
"""Fields with data of the model or the user, which is not changed."""
_NULLABLE = frozenset({"code", "keys", "outputs", "param", "result"})
"""Required fields of items that may be null."""
_REQUIRED = {"code_interpreter_call": ("code", "outputs"), "image_generation_call": ("result",)}
_HINTS = ("role", "plain", "untyped", "bare")


def to_openai_responses(messages: Sequence[ConversationMessage], *, system: str | None = None) -> Converted:
    """Convert messages to `input`, and `instructions` if there are any."""
    report = Converted({})
    turns = arrange_turns(messages, NAME, IdMapper(ids=64, names=64), report)
    if system:
        report.payload["instructions"] = system
    elif turns and _is_instructions(turns[0]):
        report.payload["instructions"] = turns.pop(0).pieces[0].text
    _settle_hosted_tools(turns, report)
    stored = _stored_reasoning(messages)
    items = [
        _strip_response_only_fields(stored.get(as_text(item.get("id")), item))
        for turn in _runs(turns)
        for item in _items(turn, report)
    ]
    bare = len(turns) == len(items) == 1 and turns[0].native.get("bare")
    report.payload["input"] = items[0]["content"] if bare else items
    return report


def _settle_hosted_tools(turns: list[ArrangedTurn], report: Converted) -> None:
    """Drop calls without an output and outputs without a call; list unanswered calls at the end.

    These are calls of tools that OpenAI defines and the caller runs."""
    pieces = [piece for turn in turns for piece in turn.pieces]
    called, answered = ({_hosted_id(piece, suffix) for piece in pieces} - {""} for suffix in ("", "_output"))
    for turn in turns:
        for piece in list(turn.pieces):
            call, answer = _hosted_id(piece, ""), _hosted_id(piece, "_output")
            if call and call not in answered and turn is turns[-1]:
                report.unanswered.append(call)
            elif (call and call not in answered) or (answer and answer not in called):
                report.drop(piece.at, "native", "a call without its output, or an output without its call, is refused")
                turn.pieces.remove(piece)


def _hosted_id(piece: WireBlock, suffix: str) -> str:
    """The id that such a call shares with its output; empty for anything else."""
    value = piece.block["value"] if piece.kind == "native" else {}
    if as_text(value.get("type")) not in [f"{kind}{suffix}" for kind in _HOSTED_TOOLS]:
        return ""
    return as_text(value.get("call_id") or value.get("id"))


def _strip_response_only_fields(item: dict[str, Any]) -> dict[str, Any]:
    """Remove what OpenAI refuses when a response's item is sent back: its creator, nulls, parsed output."""
    needed = dict.fromkeys(_REQUIRED.get(str(item.get("type")), ()))
    return needed | {
        wire_name(name): value if name in _UNTOUCHED else _without_nulls(value)
        for name, value in item.items()
        if name not in ("created_by", "parsed", "parsed_arguments") and (value is not None or name in _NULLABLE)
    }


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return _strip_response_only_fields(value)
        case list():
            return [_without_nulls(inner) for inner in value]
    return value


def _runs(turns: list[ArrangedTurn]) -> list[ArrangedTurn]:
    """Join consecutive assistant turns: reasoning may be in the message before that of its item."""
    runs: list[ArrangedTurn] = []
    for turn in turns:
        if runs and runs[-1].role == turn.role == "assistant":
            runs[-1].pieces += turn.pieces
        else:
            runs.append(turn)
    return runs


def _is_instructions(turn: ArrangedTurn) -> bool:
    """Whether a turn is one plain text; a system message that came as an item is sent as an item."""
    return turn.role == "system" and len(turn.pieces) == 1 and not turn.pieces[0].native and not turn.native


def _stored_reasoning(messages: Sequence[ConversationMessage]) -> dict[str, dict[str, Any]]:
    """Reasoning items by id, from logs of other programs that store them whole in the meta of the message."""
    kept = (native_of(message).get("output_items") for message in messages if isinstance(message, dict))
    items = (item for some in kept if isinstance(some, list) for item in some if isinstance(item, dict))
    return {
        as_text(item["id"]): rest(item, "status")
        for item in items
        if item.get("type") == "reasoning" and item.get("id")
    }


def _items(turn: ArrangedTurn, report: Converted) -> list[dict[str, Any]]:
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


def _is_item(piece: WireBlock) -> bool:
    """Whether a native block is an item of its own and not a part of a message."""
    return piece.kind == "native" and not as_text(piece.block["value"].get("type")).startswith("input_")


def _part(piece: WireBlock, report: Converted, *, in_result: bool = False) -> list[dict[str, Any]]:
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
            report.drop(piece.at, piece.kind, "a Responses request cannot contain it here")
            return []
    detail = meta_of(piece.block).get("detail")
    if piece.kind == "image":
        if media.name:
            report.drop(piece.at, "name", "OpenAI does not accept names of images")
        # The detail of an image is required, except in the output of a function.
        hint = {"detail": detail or "auto"} if detail or not in_result else {}
        return [{"type": "input_image", "image_url": media.address, **hint, **piece.native}]
    where = {"file_url": media.url} if media.url else {"file_data": media.address}
    name = {"filename": media.name or default_file_name(media.mime_type)} if media.name or not media.url else {}
    return [{"type": "input_file", **name, **where, **piece.native}]


def _result(piece: WireBlock, report: Converted) -> dict[str, Any]:
    if piece.block.get("is_error"):
        report.drop(piece.at, "is_error", "an output has no error mark; the model sees only its text")
    call = piece.call.native if piece.call is not None else {}
    custom = call.get("type") == "custom_tool_call"
    parts = [
        part for inner in result_blocks(piece, NAME, report) for part in _part(inner, report, in_result=not custom)
    ]
    listed = isinstance(piece.block.get("content"), list)
    caller = call.get("caller")
    # The output of a call made by a program at OpenAI goes back to that program.
    to = {"caller": caller} if isinstance(caller, dict) and caller.get("type") == "program" else {}
    return {
        "type": _OUTPUTS[custom],
        "call_id": piece.call_id,
        "output": parts if listed else "".join(as_text(part["text"]) for part in parts),
        **to,
        **piece.native,
    }


def _assistant(turn: ArrangedTurn, report: Converted) -> list[dict[str, Any]]:
    """The items in order; reasoning only with the item that it led to, and ids only with their reasoning."""
    items: list[dict[str, Any]] = []
    lost_reasoning = False
    spoken = ("text", "tool_use", "native")
    last_word = max((place for place, piece in enumerate(turn.pieces) if piece.kind in spoken), default=-1)
    for place, piece in enumerate(turn.pieces):
        if piece.kind != "thinking":
            _add_item(piece, items, report, with_id=not lost_reasoning)
        elif place > last_word:
            report.drop(piece.at, "thinking", "OpenAI refuses reasoning without the item that follows it")
        elif (item := _reasoning(piece, report)) is not None:
            items.append(item)
        else:
            lost_reasoning = True
    return items


def _reasoning(piece: WireBlock, report: Converted) -> dict[str, Any] | None:
    native = dict(piece.native)
    # Other programs that write this log format store the id under this name.
    id_ = native.pop("item_id", None) or native.get("id")
    if not id_:
        report.drop(piece.at, "thinking", "it does not have the id of a reasoning item")
        return None
    summary = [{"type": "summary_text", "text": piece.text}] if piece.text else []
    return {"type": "reasoning", "summary": summary, **native, "id": id_}


def _add_item(piece: WireBlock, items: list[dict[str, Any]], report: Converted, *, with_id: bool) -> None:
    match piece.kind:
        case "text":
            _add_text(piece, items, with_id=with_id)
        case "tool_use":
            items.append(_call(piece, with_id=with_id))
        case "native":
            items.append(dict(piece.block["value"]))
        case _:
            report.drop(piece.at, piece.kind, "an assistant's item cannot contain it")


def _add_text(piece: WireBlock, items: list[dict[str, Any]], *, with_id: bool) -> None:
    """Add a part of an output message, or a short message if the text did not come from one."""
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


def _call(piece: WireBlock, *, with_id: bool) -> dict[str, Any]:
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
    """Read messages from a response, a compacted response, a request, a list of items, or one item."""
    if isinstance(payload, list):
        return _messages(payload)
    if "output" in payload and payload.get("object") == "response":
        return [_response(payload)]
    if as_text(payload.get("type")).startswith("response."):
        # The last event of a stream contains the whole response.
        if not isinstance(payload.get("response"), dict) or payload["type"] not in _ENDINGS:
            raise ValueError("this is one event of a stream; its last event contains the whole response")
        return [_response(payload["response"])]
    if payload.get("object") == "response.compaction":
        return _messages(payload["output"])
    if "input" not in payload:
        return _messages([payload])
    instructions, content = payload.get("instructions"), payload["input"]
    head = [build_message("system", [text_block(instructions)])] if isinstance(instructions, str) else []
    if isinstance(content, str):
        return [
            *head,
            keep_request_form(build_message("user", [text_block(content)]), NAME, {"plain": True, "bare": True}),
        ]
    return [*head, *_messages(content)]


def _messages(items: Iterable[dict[str, Any]]) -> list[ConversationMessage]:
    messages: list[ConversationMessage] = []
    side = ""
    for item in items:
        kind, role = as_text(item.get("type") or "message"), as_text(item.get("role"))
        if not role and "type" not in item:
            raise ValueError("an item needs a `type` or a `role`")
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
    return keep_request_form(build_message("user" if role == "user" else "system", _parts(content)), NAME, shape)


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
    """Read an assistant message: an output message, or the short form that requests may use."""
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
    block = read_result(item["call_id"], item.get("output"), _parts)
    return keep_native(block, NAME, rest(item, "type", "call_id", "output"))


def _response(wire: dict[str, Any]) -> ConversationMessage:
    own = rest(wire, "id", "model", "object", "output", "output_text", "status", *_OF_THE_REQUEST)
    items = wire.get("output") or []
    # A call that OpenAI answered itself is not for the caller to answer.
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
        usage=token_counts(wire.get("usage")),
        native_meta={name: value for name, value in own.items() if value not in (None, {})},
    )
