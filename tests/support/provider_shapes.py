"""What the providers accept: the types of their SDKs, and rules that types cannot express."""

import json
import re
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from tests.support.lazy_module import LazyModule
from tests.support.strict_types import strict

anthropic: Any = LazyModule("anthropic.types")
google: Any = LazyModule("google.genai.types")
chat: Any = LazyModule("openai.types.chat")
responses: Any = LazyModule("openai.types.responses")


@cache
def _anthropic_messages() -> TypeAdapter[Any]:
    return TypeAdapter(list[anthropic.MessageParam])


def check_request(payload: dict[str, Any], provider: str) -> None:
    """Fails unless the SDK's types take the payload and know every field of it, and the provider's rules hold."""
    {
        "anthropic": _check_anthropic,
        "openai_chat": _check_chat,
        "openai_responses": _check_responses,
        "gemini": _check_gemini,
    }[provider](json.loads(json.dumps(payload)))


def check_response(payload: dict[str, Any], provider: str) -> Any:
    """The SDK's own object for a response; fails unless it can read the payload."""
    return {
        "anthropic": lambda value: anthropic.Message.model_validate(value),
        "openai_chat": lambda value: chat.ChatCompletion.model_validate(value),
        "openai_responses": lambda value: responses.Response.model_validate(value),
        "gemini": lambda value: google.GenerateContentResponse.model_validate_json(json.dumps(value)),
    }[provider](payload)


def _check_anthropic(payload: dict[str, Any]) -> None:
    assert set(payload) <= {"messages", "system"}
    messages = payload["messages"]
    _anthropic_messages().validate_python(messages)
    for message in messages:
        assert set(message) == {"role", "content"}
        strict(str | list[anthropic.ContentBlockParam]).validate_python(message["content"])
    if "system" in payload:
        strict(str | list[anthropic.TextBlockParam]).validate_python(payload["system"])
    spoken = [message for message in messages if message["role"] != "system"]
    assert [message["role"] for message in spoken] == ["user", "assistant"] * (len(spoken) // 2) + ["user"] * (
        len(spoken) % 2
    )
    open_calls: list[str] = []
    seen: set[str] = set()
    marks = 0
    for message in messages:
        assert message["content"], "a message with nothing in it"
        blocks = message["content"] if isinstance(message["content"], list) else []
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        assert all(text.strip() for text in texts)
        if message["role"] == "user":
            head = blocks[: len(open_calls)]
            assert [block["type"] for block in head] == ["tool_result"] * len(open_calls)
            assert sorted(block["tool_use_id"] for block in head) == sorted(open_calls)
            assert all(block["type"] != "tool_result" for block in blocks[len(open_calls) :])
            for block in head:
                inner = block.get("content") if isinstance(block.get("content"), list) else []
                assert not block.get("is_error") or all(part["type"] == "text" for part in inner)
        if message["role"] == "assistant" and blocks:
            assert blocks[-1]["type"] not in ("thinking", "redacted_thinking")
        if message["role"] != "system":
            open_calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        assert not seen & set(open_calls)
        seen |= set(open_calls)
        assert all(re.fullmatch(r"[a-zA-Z0-9_-]+", id_) for id_ in open_calls)
        marks += sum("cache_control" in block for block in blocks)
    assert marks <= 4
    if messages and messages[-1]["role"] == "assistant":
        content = messages[-1]["content"]
        last = content if isinstance(content, str) else content[-1].get("text", "")
        assert last == last.rstrip()


def _check_chat(payload: dict[str, Any]) -> None:
    assert set(payload) == {"messages"}
    messages = payload["messages"]
    strict(list[chat.ChatCompletionMessageParam]).validate_python(messages)
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] in open_calls
            open_calls.remove(message["tool_call_id"])
            continue
        assert not open_calls, "a call without its tool message right after it"
        open_calls = [call["id"] for call in message.get("tool_calls") or []]
        assert all(0 < len(id_) <= 40 for id_ in open_calls)
        for call in message.get("tool_calls") or []:
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call.get("function", call.get("custom"))["name"])


def _check_responses(payload: dict[str, Any]) -> None:
    assert set(payload) <= {"input", "instructions"}
    assert isinstance(payload.get("instructions", ""), str)
    strict(str | list[responses.ResponseInputItemParam]).validate_python(payload["input"])
    items = payload["input"] if isinstance(payload["input"], list) else []
    calls: list[str] = []
    for place, item in enumerate(items):
        kind = item.get("type")
        if kind == "reasoning":
            after = items[place + 1] if place + 1 < len(items) else {}
            assert after.get("role") == "assistant" or after.get("type", "").endswith(("_call", "reasoning"))
            assert not after.get("type", "").endswith("_output")
        elif kind in ("function_call", "custom_tool_call"):
            assert 0 < len(item["call_id"]) <= 64
            calls.append(item["call_id"])
        elif kind in ("function_call_output", "custom_tool_call_output"):
            calls.remove(item["call_id"])


def _check_gemini(payload: dict[str, Any]) -> None:
    assert set(payload) <= {"contents", "systemInstruction"}
    contents = payload["contents"]
    for content in [*contents, *([payload["systemInstruction"]] if "systemInstruction" in payload else [])]:
        google.Content.model_validate_json(json.dumps(content))
    roles = [content.get("role", "user") for content in contents]
    assert roles == ["user", "model"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
    waiting: list[str] = []
    for content in contents:
        assert content["parts"]
        answers = [part["functionResponse"]["name"] for part in content["parts"] if "functionResponse" in part]
        if content.get("role", "user") == "user":
            assert sorted(answers) == sorted(waiting)
        waiting = [part["functionCall"]["name"] for part in content["parts"] if "functionCall" in part]
