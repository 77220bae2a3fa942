"""Conversations for the tests: well-formed ones, and wild ones with anything a log may contain."""

import base64
from typing import Any

from hypothesis import strategies as st

from carrel.conversation.messages import (
    ConversationMessage,
    MessageBlock,
    assistant_message,
    build_message,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
)

MAKERS = ("anthropic", "openai_chat", "openai_responses", "gemini")

ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=12)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda t: t == t.strip())
encoded = st.binary(min_size=1, max_size=9).map(lambda data: base64.b64encode(data).decode())
urls = ids.map(lambda name: f"https://example.org/{name}")
leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    leaves | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(words, json_values, max_size=3)


@st.composite
def images(draw: st.DrawFn) -> MessageBlock:
    kind = draw(st.sampled_from(["image/png", "image/jpeg", "image/webp"]))
    return {"type": "image", "data": draw(encoded), "mime_type": kind}


@st.composite
def documents(draw: st.DrawFn) -> MessageBlock:
    name = draw(st.none() | ids)
    block = {"type": "document", "data": draw(encoded), "mime_type": "application/pdf"}
    return {**block, "name": f"{name}.pdf"} if name else block


@st.composite
def thoughts(draw: st.DrawFn, maker: str) -> MessageBlock:
    """Thinking as each provider signs it; a chat completion signs nothing."""
    signature = draw(encoded)
    native: dict[str, Any] = {
        "anthropic": {"signature": signature},
        "openai_responses": {"id": f"rs_{signature}", "encrypted_content": signature},
        "gemini": {"thoughtSignature": signature},
        "openai_chat": {},
    }[maker]
    return thinking_block(draw(words), meta={"provider": maker, "native": native} if native else {"provider": maker})


@st.composite
def calls(draw: st.DrawFn, id_: str) -> MessageBlock:
    meta = draw(st.none() | st.just({"raw_arguments": "{no json"}))
    value = {} if meta else draw(objects)
    return tool_use_block(tool_id=id_, name=draw(ids), input=value, meta=meta)


@st.composite
def results(draw: st.DrawFn, id_: str, *, media: bool) -> MessageBlock:
    text, failed = draw(words), draw(st.booleans())
    content = None
    if media and not failed and draw(st.booleans()):
        content = [text_block(text), *draw(st.lists(images(), min_size=1, max_size=2))]
    return tool_result_block(tool_use_id=id_, model_text=text, is_error=failed, content=content)


@st.composite
def orderly(draw: st.DrawFn, *, media_in_results: bool = True) -> list[ConversationMessage]:
    """A conversation that breaks no rule: user and assistant by turns, every call answered at once."""
    messages = [build_message("system", [text_block(draw(words))])] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        blocks = draw(st.lists(words.map(text_block) | images() | documents(), min_size=1, max_size=3))
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += blocks
        else:
            messages.append(build_message("user", blocks))
        maker = draw(st.sampled_from(MAKERS))
        blocks = [draw(thoughts(maker))] if draw(st.booleans()) else []
        blocks += draw(st.lists(words.map(text_block), min_size=1, max_size=2))
        call_ids = [f"{draw(ids)}_{number + place}" for place in range(draw(st.integers(0, 2)))]
        number += len(call_ids)
        blocks += [draw(calls(id_)) for id_ in call_ids]
        messages.append(assistant_message(blocks, provider=maker, model="m"))
        if call_ids:
            answers = [draw(results(id_, media=media_in_results)) for id_ in draw(st.permutations(call_ids))]
            messages.append(build_message("user", answers))
    return messages


class _Marks:
    """Makes words that occur only once, so that each can be searched for."""

    def __init__(self) -> None:
        self.number = 0

    def new(self) -> str:
        self.number += 1
        return f"mark{self.number:04}x"


_WILD_IDS = ["a", "a", "b", "call.1|x", "ü" * 3, "x" * 90, "", None]


@st.composite
def wild(draw: st.DrawFn) -> list[ConversationMessage]:
    """Anything a log may contain; every block with content has a mark of its own."""
    marks = _Marks()
    messages: list[Any] = []
    for _ in range(draw(st.integers(0, 7))):
        role = draw(st.sampled_from(["user", "user", "assistant", "assistant", "system", "compact", "tool", None]))
        maker = draw(st.sampled_from([*MAKERS, "google", "openai", "other", None]))
        content: Any = [_wild_block(draw, marks, maker) for _ in range(draw(st.integers(0, 4)))]
        content = draw(st.sampled_from([content] * 6 + [marks.new(), None, 7]))
        message: dict[str, Any] = {"role": role, "content": content}
        if maker:
            message["meta"] = {"provider": maker}
        messages.append(draw(st.sampled_from([message] * 12 + ["no message"])))
    return messages


def _wild_block(draw: st.DrawFn, marks: _Marks, maker: str | None) -> Any:
    mark = marks.new()
    data = base64.b64encode(mark.encode() + b"..").decode()
    id_ = draw(st.sampled_from(_WILD_IDS))
    given = draw(st.sampled_from([{"q": mark}, {"q": mark}, mark, [mark], None]))
    signed = {"signature": "s", "id": "rs_1", "thoughtSignature": "c2ln"}
    own = {"anthropic": "signature", "openai_responses": "id", "openai": "id", "gemini": "thoughtSignature"}
    native = {key: value for key, value in signed.items() if key == own.get(maker or "")}
    inner = draw(
        st.sampled_from(
            [
                None,
                [],
                "text",
                [{"type": "text", "text": mark}, {"type": "image", "data": data, "mime_type": "image/png"}],
                [{"type": "image", "url": f"https://example.org/{mark}"}, "junk"],
            ]
        )
    )
    block: Any = draw(
        st.sampled_from(
            [
                {"type": "text", "text": mark},
                {"type": "text", "text": f" {mark}\n "},
                {"type": "text", "text": " \n"},
                {"type": "thinking", "text": mark, "meta": {"native": native}},
                {"type": "thinking", "text": mark},
                {"type": "image", "data": data, "mime_type": "image/png", "name": "n"},
                {"type": "image", "data": data, "mime_type": "image/tiff"},
                {"type": "image", "url": f"https://example.org/{mark}"},
                {"type": "image", "name": mark},
                {"type": "document", "data": data, "mime_type": "application/pdf"},
                {"type": "document", "data": data, "mime_type": "text/markdown", "name": "n.md"},
                {"type": "document", "data": data, "mime_type": "application/zip"},
                {"type": "tool_use", "id": id_, "name": f"{mark}.do", "input": given},
                {"type": "tool_use", "id": id_, "name": mark, "input": {}, "meta": {"raw_arguments": "{bad"}},
                {"type": "tool_use", "id": id_, "name": mark},
                {"type": "tool_result", "tool_use_id": id_, "model_text": mark, "is_error": True, "content": inner},
                {"type": "tool_result", "tool_use_id": id_, "model_text": mark, "content": inner},
                {"type": "tool_result", "tool_use_id": id_, "content": inner},
                {"type": "native", "provider": "someone", "value": {"mark": mark}},
                {"type": "weird", "text": mark},
                {"type": None},
                "no block",
                None,
            ]
        )
    )
    if isinstance(block, dict) and draw(st.booleans()):
        block = {**block, "meta": {**(block.get("meta") or {}), "cache_control": {"type": "ephemeral"}}}
    return block


def mark_of(block: Any) -> str | None:
    """The mark by which the text or data of a block is found in a payload."""
    if not isinstance(block, dict):
        return None
    for value in (block.get("text"), block.get("model_text"), block.get("data"), block.get("url"), block.get("name")):
        if isinstance(value, str) and value.strip() and value not in ("n", "n.md"):
            return value.strip().removesuffix(".do")
    return None
