"""Requests as the providers document them, which must come back unchanged."""

from typing import Any

from hypothesis import strategies as st

from tests.support.conversations import encoded, ids, objects, urls, words

Wire = dict[str, Any]
CACHED: Wire = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def requests(provider: str) -> st.SearchStrategy[Wire]:
    return {
        "anthropic": anthropic,
        "openai_chat": openai_chat,
        "openai_responses": openai_responses,
        "gemini": gemini,
    }[provider]()


def one(draw: st.DrawFn, *choices: Any) -> Any:
    return draw(st.sampled_from(choices))


def maybe(draw: st.DrawFn, fields: Wire) -> Wire:
    return fields if draw(st.booleans()) else {}


def fresh(draw: st.DrawFn, prefix: str, used: list[str]) -> str:
    used.append(f"{prefix}{draw(ids)}{len(used)}")
    return used[-1]


# --- Anthropic -------------------------------------------------------------------------------------------------------


@st.composite
def anthropic(draw: st.DrawFn) -> Wire:
    messages: list[Wire] = []
    used: list[str] = []
    call_ids: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        results = [_anthropic_result(draw, id_) for id_ in draw(st.permutations(call_ids))]
        blocks = [_anthropic_user_block(draw) for _ in range(draw(st.integers(0 if results else 1, 3)))]
        plain = not results and draw(st.booleans())
        messages.append({"role": "user", "content": draw(words) if plain else results + blocks})
        if one(draw, True, False, False, False):
            system = draw(words)
            messages.append({"role": "system", "content": one(draw, system, [{"type": "text", "text": system}])})
        blocks = [block for _ in range(draw(st.integers(1, 3))) for block in _anthropic_assistant_blocks(draw, used)]
        call_ids = [fresh(draw, "toolu_", used) for _ in range(draw(st.integers(0, 2)))]
        blocks += [
            {"type": "tool_use", "id": id_, "name": draw(ids), "input": draw(objects)}
            | maybe(draw, {"caller": {"type": "direct"}})
            for id_ in call_ids
        ]
        if blocks[-1]["type"] in ("thinking", "redacted_thinking"):
            blocks.append({"type": "text", "text": draw(words)})
        plain = not call_ids and draw(st.booleans())
        messages.append({"role": "assistant", "content": draw(words) if plain else blocks})
    _mark_some(draw, messages)
    system = one(draw, None, draw(words), [{"type": "text", "text": draw(words)}, {"type": "text", "text": "x"}])
    return {"messages": messages, **({"system": system} if system else {})}


def _mark_some(draw: st.DrawFn, messages: list[Wire]) -> None:
    blocks = [b for m in messages if isinstance(m["content"], list) for b in m["content"]]
    for block in [b for b in blocks if b["type"] in ("text", "image", "tool_use", "tool_result")][-4:]:
        block |= maybe(draw, CACHED)


def _anthropic_media(draw: st.DrawFn) -> Wire:
    image = {"type": "base64", "media_type": one(draw, "image/png", "image/webp"), "data": draw(encoded)}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": draw(encoded)}
    return one(
        draw,
        {"type": "image", "source": image},
        {"type": "image", "source": {"type": "url", "url": draw(urls)}},
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
        {"type": "document", "source": pdf, "title": "T", "citations": {"enabled": True}},
        {"type": "document", "source": {"type": "url", "url": draw(urls)}, "context": "c"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": draw(words)}},
    )


def _anthropic_user_block(draw: st.DrawFn) -> Wire:
    text = {"type": "text", "text": draw(words)}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]}
    return one(draw, text, _anthropic_media(draw), found)


def _anthropic_result(draw: st.DrawFn, id_: str) -> Wire:
    text = draw(words)
    content = one(draw, text, "", [{"type": "text", "text": text}], [{"type": "text", "text": text}] * 2, [])
    failed = one(draw, {}, {"is_error": False}, {"is_error": True})
    if not failed.get("is_error") and draw(st.booleans()):
        content = [{"type": "text", "text": text}, _anthropic_media(draw)]
    return {"type": "tool_result", "tool_use_id": id_} | maybe(draw, {"content": content}) | failed


def _anthropic_assistant_blocks(draw: st.DrawFn, used: list[str]) -> list[Wire]:
    id_ = fresh(draw, "srvtoolu_", used)
    found = {"type": "web_search_result", "title": "t", "url": "u", "encrypted_content": "x"}
    search = [
        {"type": "server_tool_use", "id": id_, "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": id_, "content": [found]},
    ]
    cited = {
        "type": "char_location",
        "cited_text": "x",
        "document_index": 0,
        "document_title": "T",
        "start_char_index": 0,
        "end_char_index": 1,
    }
    blocks: list[Wire] = one(
        draw,
        [{"type": "thinking", "thinking": one(draw, "", draw(words)), "signature": draw(encoded)}],
        [{"type": "redacted_thinking", "data": draw(encoded)}],
        [{"type": "text", "text": draw(words)}],
        [{"type": "text", "text": draw(words), "citations": [cited]}],
        search,
    )
    return blocks


# --- OpenAI Chat Completions -----------------------------------------------------------------------------------------


@st.composite
def openai_chat(draw: st.DrawFn) -> Wire:
    messages: list[Wire] = []
    used: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            role = one(draw, "system", "developer")
            messages.append({"role": role, "content": _chat_text(draw)} | maybe(draw, {"name": "boss"}))
        if draw(st.booleans()):
            parts = [_chat_part(draw) for _ in range(draw(st.integers(1, 3)))]
            content = one(draw, draw(words), "", parts)
            messages.append({"role": "user", "content": content} | maybe(draw, {"name": "ann"}))
        messages += _chat_assistant(draw, used)
    return {"messages": messages}


def _chat_text(draw: st.DrawFn) -> Any:
    text = {"type": "text", "text": draw(words)}
    return one(draw, draw(words), [text], [text, text], [text | {"prompt_cache_breakpoint": {"mode": "explicit"}}])


def _chat_part(draw: st.DrawFn) -> Wire:
    data, name = draw(encoded), one(draw, "document.pdf", "a.pdf")
    return one(
        draw,
        {"type": "text", "text": draw(words)},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"} | maybe(draw, {"detail": "low"})},
        {"type": "image_url", "image_url": {"url": draw(urls)}},
        {"type": "file", "file": {"filename": name, "file_data": f"data:application/pdf;base64,{data}"}},
        {"type": "file", "file": {"file_id": "file_1"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    )


def _chat_assistant(draw: st.DrawFn, used: list[str]) -> list[Wire]:
    call_ids = [fresh(draw, "call_", used) for _ in range(draw(st.integers(0, 2)))]
    refused = {"type": "refusal", "refusal": draw(words)}
    content: Wire = {"content": one(draw, _chat_text(draw), [{"type": "text", "text": draw(words)}, refused])}
    if call_ids:
        content = one(draw, content, {"content": None}, {})
    message = {"role": "assistant", **content} | one(draw, {}, {"refusal": None}, {"refusal": draw(words)})
    if call_ids:
        message["tool_calls"] = [_chat_call(draw, id_) for id_ in call_ids]
    message |= maybe(draw, {"name": "bot"}) | maybe(draw, {"audio": {"id": "audio_1"}})
    answers = [
        {"role": "tool", "tool_call_id": id_, "content": one(draw, "", _chat_text(draw))}
        for id_ in draw(st.permutations(call_ids))
    ]
    return [message, *answers]


def _chat_call(draw: st.DrawFn, id_: str) -> Wire:
    arguments = one(draw, '{"a":1}', '{ "a": 1.0 }', "", "{bad", "[1]", "null", '{"a":1,"a":2}', '{"n": 1e999}')
    function = {"name": draw(ids), "arguments": arguments}
    custom = {"name": draw(ids), "input": draw(words)}
    return one(
        draw, {"id": id_, "type": "function", "function": function}, {"id": id_, "type": "custom", "custom": custom}
    )


# --- OpenAI Responses ------------------------------------------------------------------------------------------------


@st.composite
def openai_responses(draw: st.DrawFn) -> Wire:
    head = maybe(draw, {"instructions": draw(words)})
    if one(draw, True, False, False, False):
        return {"input": draw(words), **head}
    items: list[Wire] = []
    used: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        items += [_responses_input(draw) for _ in range(draw(st.integers(0, 2)))]
        items += _responses_output(draw, used)
    return {"input": items, **head}


def _responses_input(draw: st.DrawFn) -> Wire:
    parts = [_responses_part(draw) for _ in range(draw(st.integers(1, 3)))]
    text = draw(words)
    easy = maybe(draw, {"type": "message"})
    return one(
        draw,
        {"type": "message", "role": "user", "content": parts} | maybe(draw, {"status": "completed"}),
        {"role": "user", "content": parts},
        {"role": "user", "content": text} | easy,
        {"role": "system", "content": text} | easy,
        {"role": "developer", "content": [{"type": "input_text", "text": text}]} | easy,
    )


def _responses_part(draw: st.DrawFn) -> Wire:
    data, name = draw(encoded), one(draw, "document.pdf", "a.pdf")
    image: Wire = {"type": "input_image", "detail": one(draw, "auto", "high")}
    return one(
        draw,
        {"type": "input_text", "text": draw(words)},
        {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}},
        image | {"image_url": f"data:image/png;base64,{data}"},
        image | {"image_url": draw(urls)},
        image | {"file_id": "file_1"},
        {"type": "input_file", "filename": name, "file_data": f"data:application/pdf;base64,{data}"},
        {"type": "input_file", "file_url": draw(urls)},
        {"type": "input_file", "file_id": "file_1"},
    )


def _responses_output(draw: st.DrawFn, used: list[str]) -> list[Wire]:
    items: list[Wire] = []
    calls: list[Wire] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            items.append(_reasoning(draw, used))
        item = _responses_item(draw, used)
        items.append(item)
        if "call_id" in item:
            calls.append(item)
    outputs = [_responses_result(draw, call) for call in draw(st.permutations(calls))]
    return items + outputs


def _reasoning(draw: st.DrawFn, used: list[str]) -> Wire:
    part = {"type": "summary_text", "text": draw(words)}
    thought = {"content": [{"type": "reasoning_text", "text": draw(words)}]}
    item = {"type": "reasoning", "id": fresh(draw, "rs_", used), "summary": one(draw, [], [part], [part, part])}
    return item | maybe(draw, {"encrypted_content": draw(encoded)}) | maybe(draw, thought)


def _responses_item(draw: st.DrawFn, used: list[str]) -> Wire:
    source = {"type": "url_citation", "start_index": 0, "end_index": 1, "title": "t", "url": "u"}
    text = {"type": "output_text", "text": draw(words), "annotations": one(draw, [], [source])}
    refusal = {"type": "refusal", "refusal": draw(words)}
    blocks = {
        "type": "message",
        "role": "assistant",
        "id": fresh(draw, "msg_", used),
        "status": "completed",
        "content": one(draw, [text], [text, text], [text, refusal]),
    } | maybe(draw, {"phase": "final_answer"})
    short = (
        {"role": "assistant", "content": draw(words)}
        | maybe(draw, {"type": "message"})
        | maybe(draw, {"phase": "commentary"})
    )
    call = {
        "type": "function_call",
        "call_id": fresh(draw, "call_", used),
        "name": draw(ids),
        "arguments": one(draw, "{}", "", "{bad", '{"a": 1}'),
    } | maybe(draw, {"id": fresh(draw, "fc_", used), "status": "completed"})
    custom = {
        "type": "custom_tool_call",
        "call_id": fresh(draw, "call_", used),
        "name": draw(ids),
        "input": draw(words),
    } | maybe(draw, {"id": "ctc_1"})
    action = {"type": "search", "query": "x"}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": action}
    return one(draw, blocks, short, call, custom, search)


def _responses_result(draw: st.DrawFn, call: Wire) -> Wire:
    custom = call["type"] == "custom_tool_call"
    image = {"type": "input_image", "image_url": draw(urls)} | ({"detail": "auto"} if custom else {})
    text = {"type": "input_text", "text": draw(words)}
    kind = "custom_tool_call_output" if custom else "function_call_output"
    output = one(draw, "", draw(words), [text], [text, image], [image], [])
    return {"type": kind, "call_id": call["call_id"], "output": output}


# --- Gemini ----------------------------------------------------------------------------------------------------------


@st.composite
def gemini(draw: st.DrawFn) -> Wire:
    contents: list[Wire] = []
    used: list[str] = []
    calls: list[Wire] = []
    for _ in range(draw(st.integers(1, 3))):
        parts = [_gemini_result(draw, call) for call in calls]
        parts += [_gemini_part(draw) for _ in range(draw(st.integers(0 if parts else 1, 3)))]
        contents.append({"parts": parts} | one(draw, {"role": "user"}, {"role": "user"}, {}))
        blocks = [_gemini_model_part(draw) for _ in range(draw(st.integers(1, 3)))]
        calls = _gemini_calls(draw, used)
        signature = {"thoughtSignature": draw(encoded)}
        blocks += [{"functionCall": call} | maybe(draw, signature) for call in calls]
        contents.append({"role": "model", "parts": blocks})
    texts = [{"text": draw(words)} for _ in range(draw(st.integers(0, 2)))]
    system = {"systemInstruction": {"parts": texts} | maybe(draw, {"role": "user"})} if texts else {}
    return {"contents": contents, **system}


def _gemini_calls(draw: st.DrawFn, used: list[str]) -> list[Wire]:
    named = draw(st.booleans())
    return [
        {"name": one(draw, "read", "write")}
        | ({"id": fresh(draw, "fc_", used)} if named else {})
        | maybe(draw, {"args": draw(objects)})
        for _ in range(draw(st.integers(0, 3)))
    ]


def _gemini_result(draw: st.DrawFn, call: Wire) -> Wire:
    text = draw(words)
    response = one(draw, {"output": text}, {"error": text}, {"result": text, "n": 1}, {}, {"output": {"a": 1}})
    image = {"inlineData": {"mimeType": "image/png", "data": draw(encoded)}}
    answer = {"name": call["name"], "response": response} | ({"id": call["id"]} if "id" in call else {})
    return {"functionResponse": answer | maybe(draw, {"parts": [image]})}


def _gemini_part(draw: st.DrawFn) -> Wire:
    data = draw(encoded)
    return one(
        draw,
        {"text": draw(words)},
        {"inlineData": {"mimeType": "image/png", "data": data}},
        {"inlineData": {"mimeType": "application/pdf", "data": data, "displayName": "a.pdf"}},
        {"inlineData": {"mimeType": "audio/wav", "data": data}},
        {"fileData": {"mimeType": "image/png", "fileUri": draw(urls)}},
        {"fileData": {"mimeType": "video/mp4", "fileUri": draw(urls)}, "videoMetadata": {"fps": 1.0}},
    )


def _gemini_model_part(draw: st.DrawFn) -> Wire:
    signature = {"thoughtSignature": draw(encoded)}
    return one(
        draw,
        {"text": draw(words)},
        {"text": draw(words)} | signature,
        {"text": ""} | signature,
        {"text": draw(words), "thought": True},
        {"text": draw(words), "thought": True} | signature,
        {"executableCode": {"language": "PYTHON", "code": "1"}},
        {"inlineData": {"mimeType": "image/png", "data": draw(encoded)}} | maybe(draw, signature),
    )
