"""Importing pi sessions, versions 1 to 3."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from carrel.conversation.formats import to_provider
from carrel.conversation.importers import ImportedSession, read_session_file
from carrel.conversation.messages import flatten_message_text, tool_results_of
from carrel.conversation.replay import visible_after

TREE = "pi/--home-ada-notes--/2026-01-01T09-00-00-000Z_e99116ac-a6da-48fc-ad8b-2feca1c51550.jsonl"
FLAT = "pi/--home-ada-old--/2025-11-01T09-00-00-000Z_0f9d1c11-2b5e-4a6b-9d7e-0d5f3f2a1b00.jsonl"
Reader = Callable[..., list[ImportedSession]]

HEADER = {"type": "session", "version": 3, "id": "p", "timestamp": "2026-01-01T00:00:00Z", "cwd": "/c"}


def only(path: Path) -> ImportedSession:
    [imported] = read_session_file(path)
    return imported


def texts(imported: ImportedSession) -> list[str]:
    return [f"{entry['role']}: {flatten_message_text(entry, include_thinking=False)}" for entry in imported.messages]


def user_line(id_: str, parent: str | None, text: str) -> dict[str, Any]:
    return {"type": "message", "id": id_, "parentId": parent, "message": {"role": "user", "content": text}}


def test_the_conversation_is_the_branch_of_the_last_line(samples: Path) -> None:
    session = only(samples / TREE)
    assert texts(session) == [
        "user: What does this picture show?",
        "assistant: Let me measure.",
        "user: ",
        "assistant: One pixel.",
        "user: [Summary of a branch that this conversation came back from]\n\nThe pixel was painted blue.",
        "user: $ ls\nx.png",
        "user: The user likes short answers.",
        "user: An extension says hello.",
        "user: And now?",
        "rewind: ",
        "compact: A picture of one pixel was looked at.",
        "assistant: Still one pixel.",
    ]
    assert session.report.left_out == 2


def test_session_metadata(samples: Path) -> None:
    session = only(samples / TREE)
    assert (session.kind, session.source_id) == ("pi", "e99116ac-a6da-48fc-ad8b-2feca1c51550")
    assert (session.title, session.cwd) == ("One pixel", "/home/ada/notes")
    assert (session.provider, session.model) == ("anthropic", "claude-sonnet-4-5")
    assert session.parent == "aaaaaaaa-1111-4222-8333-bbbbbbbbbbbb"
    assert session.created_at == "2026-01-01T09:00:00+00:00"


def test_an_answer_keeps_its_usage_signature_and_calls(samples: Path) -> None:
    answer = only(samples / TREE).messages[1]
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0]["meta"] == {"signature": "EpikSigned"}
    assert answer["meta"]["usage"] == {
        "input_tokens": 810,
        "output_tokens": 50,
        "cache_read_tokens": 0,
        "cache_write_tokens": 800,
        "total_tokens": 860,
    }
    assert answer["meta"]["stop_reason"] == "toolUse"
    assert answer["meta"]["created_at"] == "2026-01-01T09:00:04+00:00"


def test_consecutive_results_become_one_message(samples: Path) -> None:
    results = only(samples / TREE).messages[2]
    assert tool_results_of(results) == ["toolu_p1", "toolu_p2"]
    assert results["content"][1]["is_error"] is True
    assert [part["type"] for part in results["content"][1]["content"]] == ["text", "image"]


def test_a_compaction_keeps_the_same_messages_visible(samples: Path) -> None:
    session = only(samples / TREE)
    assert session.messages[10]["meta"]["keep_from_seq"] == 8
    assert [seq for seq, _ in visible_after(list(enumerate(session.messages, 1)))] == [0, 0, 8, 9, 12]


def test_a_label_is_imported_unless_it_was_removed(samples: Path) -> None:
    session = only(samples / TREE)
    meta = session.messages[9]["meta"]
    assert (meta["aside"], meta["text"], meta["at_seq"]) == ("label", "the question", 9)
    assert session.report.ignored["label"] == 2


def test_a_command_hidden_from_the_model_is_ignored(samples: Path) -> None:
    session = only(samples / TREE)
    assert session.report.ignored["bashExecution"] == 1
    assert not any("SECRET" in text for text in texts(session))


def test_other_branches_are_optionally_imported(samples: Path) -> None:
    main, branch = read_session_file(samples / TREE, all_branches=True)
    assert (branch.parent, branch.forked_at, branch.title) == (main.source_id, 4, "Paint it blue.")
    assert branch.messages[:4] == main.messages[:4]
    assert texts(branch)[4:] == ["user: Paint it blue.", "assistant: Painted."]


def test_version_1_is_a_list_of_entries(samples: Path) -> None:
    session = only(samples / FLAT)
    assert texts(session) == [
        "user: One?",
        "assistant: Two.",
        "user: Three?",
        "user: A hook was here.",
        "compact: Counting.",
        "assistant: Four.",
    ]
    # Its compaction names the first entry it keeps by number, here a change of model.
    assert session.messages[4]["meta"]["keep_from_seq"] == 3
    assert (session.provider, session.model) == ("openai", "gpt-5-mini")


def test_a_newer_version_is_read_with_a_warning(imported_from: Reader) -> None:
    [session] = imported_from({**HEADER, "version": 9}, user_line("a", None, "hi"))
    assert texts(session) == ["user: hi"]
    assert "version 9" in session.report.problems[0]


def test_an_unreadable_line_does_not_lose_the_lines_before_it(imported_from: Reader) -> None:
    [session] = imported_from(HEADER, user_line("a", None, "one"), "{oops", user_line("c", "b", "three"))
    assert texts(session) == ["user: one", "user: three"]
    assert session.report.unreadable == [3]


def test_a_cycle_of_parents_does_not_hang(imported_from: Reader) -> None:
    [session] = imported_from(
        HEADER, user_line("a", "b", "one"), user_line("b", "a", "two"), user_line("c", "c", "three")
    )
    assert texts(session)[-1] == "user: three"


def assistant_line(api: str, provider: str, *content: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "api": api, "provider": provider, "model": "m", "content": list(content)}
    return {"type": "message", "id": "a", "parentId": "q", "message": message}


def result_line(id_: str) -> dict[str, Any]:
    message = {"role": "toolResult", "toolCallId": id_, "content": [{"type": "text", "text": "ok"}]}
    return {"type": "message", "id": "r", "parentId": "a", "message": message}


def test_openai_reasoning_converts_back_with_its_item_ids(imported_from: Reader) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    thought = {"type": "thinking", "thinking": "hm", "thinkingSignature": orjson.dumps(item).decode()}
    call = {"type": "toolCall", "id": "call_1|fc_1", "name": "run", "arguments": {}}
    answer = assistant_line("openai-responses", "openai", thought, call)
    [session] = imported_from(HEADER, user_line("q", None, "go"), answer, result_line("call_1|fc_1"))
    sent = to_provider(session.messages, "openai_responses").payload["input"]
    asks = {"type": "function_call", "call_id": "call_1", "name": "run", "arguments": "{}", "id": "fc_1"}
    assert sent[1:] == [item, asks, {"type": "function_call_output", "call_id": "call_1", "output": "ok"}]


def test_anthropic_redacted_thinking_converts_back(imported_from: Reader) -> None:
    thought = {"type": "thinking", "thinking": "[redacted]", "thinkingSignature": "sealed", "redacted": True}
    answer = assistant_line("anthropic-messages", "anthropic", thought, {"type": "text", "text": "yes"})
    [session] = imported_from(HEADER, user_line("q", None, "go"), answer)
    sent = to_provider(session.messages, "anthropic").payload["messages"][1]["content"]
    assert sent[0] == {"type": "redacted_thinking", "data": "sealed"}


def test_gemini_signatures_stay_on_their_parts(imported_from: Reader) -> None:
    call = {"type": "toolCall", "id": "c", "name": "run", "arguments": {}, "thoughtSignature": "c2ln"}
    text = {"type": "text", "text": "yes", "textSignature": "dGV4dA=="}
    answer = assistant_line("google-generative-ai", "google-vertex", text, call)
    [session] = imported_from(HEADER, user_line("q", None, "go"), answer, result_line("c"))
    parts = to_provider(session.messages, "gemini").payload["contents"][1]["parts"]
    assert [part["thoughtSignature"] for part in parts] == ["dGV4dA==", "c2ln"]


def test_reasoning_of_other_servers_converts_back_to_its_field(imported_from: Reader) -> None:
    thought = {"type": "thinking", "thinking": "hm", "thinkingSignature": "reasoning_content"}
    answer = assistant_line("openai-completions", "kimi", thought, {"type": "text", "text": "yes"})
    [session] = imported_from(HEADER, user_line("q", None, "go"), answer)
    assert to_provider(session.messages, "openai_chat").payload["messages"][1]["reasoning_content"] == "hm"
