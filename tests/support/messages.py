"""Short words for the tests of the conversation: entries as literals."""

from typing import Any

from carrel.conversation.log_entries import build_compact_event
from carrel.conversation.messages import (
    ConversationMessage,
    assistant_message,
    blocks_of,
    build_message,
    flatten_message_text,
    text_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)


def user(text: str) -> ConversationMessage:
    return user_text_message(text)


def assistant(text: str, **meta: Any) -> ConversationMessage:
    return assistant_message([text_block(text)], **meta)


def call(*ids: str) -> ConversationMessage:
    return assistant_message([tool_use_block(tool_id=id_, name="look", input={"path": f"{id_}.txt"}) for id_ in ids])


def result(*ids: str, text: str = "found", is_error: bool = False) -> ConversationMessage:
    return build_message(
        "user", [tool_result_block(tool_use_id=id_, model_text=f"{text} {id_}", is_error=is_error) for id_ in ids]
    )


def compact(summary: str, keep_from_seq: int | None = None) -> ConversationMessage:
    event = build_compact_event(summary, provider="p", model="m", compacted_count=1)
    if keep_from_seq is not None:
        event["meta"]["keep_from_seq"] = keep_from_seq
    return event


def rewind(to: Any = None, *, seq: int | None = None) -> ConversationMessage:
    meta = {"rewind_to": to if to is not None else 0, "created_at": "2026-01-01T00:00:00+00:00"}
    return {"role": "rewind", "meta": meta | ({"to_seq": seq} if seq is not None else {})}


def outline(messages: list[ConversationMessage]) -> list[str]:
    """Each message in a word: its text, `call:a`, `result:a`, `stand-in:a`, `(summary)`, `(ack)`."""
    return [_word(message) for message in messages]


def _word(message: ConversationMessage) -> str:
    words = []
    for block in blocks_of(message):
        kind = block["type"]
        if kind == "tool_use":
            words.append(f"call:{block['id']}")
        elif kind == "tool_result":
            stand_in = "interrupted" in block["model_text"]
            words.append(f"{'stand-in' if stand_in else 'result'}:{block['tool_use_id']}")
        elif block["text"].startswith("[Conversation Summary]\n\n"):
            words.append(f"({block['text'][24:]})")
        else:
            words.append(block["text"])
    if message.get("meta", {}).get("synthetic") and message["role"] == "assistant":
        return "(ack)"
    return " ".join(words) or flatten_message_text(message)
