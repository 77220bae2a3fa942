"""Importing Codex rollouts, current and older ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from carrel.conversation.formats.openai_responses import to_openai_responses
from carrel.conversation.importers import ImportedSession, detect, read_session_file
from carrel.conversation.messages import flatten_message_text, tool_calls_of, tool_results_of
from carrel.conversation.replay import visible_after

CURRENT = "codex/2026/03/04/rollout-2026-03-04T10-00-00-0199f3a1-7b1c-7c52-9d0e-5c1d9b0f2a77.jsonl"
AGENT = "codex/2026/03/04/rollout-2026-03-04T10-05-00-0199f3a2-0000-7c52-9d0e-000000000001.jsonl"
FLAT = "codex/2025/08/12/rollout-2025-08-12T08-00-00-c3c4b301-27c8-4c70-b6e4-46b99fdf0236.jsonl"
Reader = Callable[..., list[ImportedSession]]


def only(path: Path) -> ImportedSession:
    [imported] = read_session_file(path)
    return imported


def shown(imported: ImportedSession) -> list[str]:
    visible = visible_after(list(enumerate(imported.messages, 1)))
    return [f"{message['role']}: {flatten_message_text(message)}" for _, message in visible]


def line(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00.000Z", "type": kind, "payload": payload}


def test_session_metadata(samples: Path) -> None:
    session = only(samples / CURRENT)
    assert (session.kind, session.source_id) == ("codex", "0199f3a1-7b1c-7c52-9d0e-5c1d9b0f2a77")
    assert (session.title, session.cwd) == ("Caption typo", "/home/ada/notes")
    assert (session.provider, session.model) == ("openai", "gpt-5.2-codex")
    assert session.created_at == "2026-03-04T10:00:00+00:00"
    assert session.parent is None


def test_consecutive_outputs_become_one_message(samples: Path) -> None:
    answer = only(samples / CURRENT).messages[3]
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][2]["input"] == {"cmd": "grep -rn teh .", "workdir": "/home/ada/notes"}
    assert answer["meta"]["source"]["also"] == ["msg_1", "fc_1", "fc_2"]


def test_repeated_usage_is_counted_once(samples: Path) -> None:
    session = only(samples / CURRENT)
    usages = [entry["meta"]["usage"] for entry in session.messages if entry["meta"].get("usage")]
    assert sum(usage["input_tokens"] for usage in usages) == 1200 + 1500 + 1700 + 1800 + 1850
    assert usages[0] == {
        "input_tokens": 1200,
        "output_tokens": 90,
        "cache_read_tokens": 400,
        "cache_write_tokens": 0,
        "reasoning_tokens": 40,
        "total_tokens": 1290,
    }
    assert session.report.ignored["event_msg/token_count"] == 1


def test_every_kind_of_tool_call_has_its_result(samples: Path) -> None:
    messages = only(samples / CURRENT).messages
    calls = [call for message in messages for call in tool_calls_of(message)]
    assert calls == ["call_1", "call_2", "call_3", "call_4"]
    assert [id_ for message in messages for id_ in tool_results_of(message)] == calls
    assert tool_results_of(messages[4]) == ["call_1", "call_2"]
    assert messages[4]["content"][1]["content"][0]["type"] == "image"
    assert messages[5]["content"][0]["input"]["input"].startswith("*** Begin Patch")
    assert messages[8]["content"][0]["is_error"] is True
    assert messages[8]["content"][0]["model_text"] == "fatal: not a git repository"


def test_a_rollback_hides_the_turn_and_leaves_it_in_the_log(samples: Path) -> None:
    session = only(samples / CURRENT)
    assert "user: Now rename the file to bay.md." in [
        f"{entry['role']}: {flatten_message_text(entry)}" for entry in session.messages
    ]
    before_compaction = visible_after(list(enumerate(session.messages, 1)), 17)
    words = [flatten_message_text(message) for _, message in before_compaction]
    assert "Now rename the file to bay.md." not in words
    assert words[-3:] == ["Fixed: the harbour.", "Leave the name. Are there other typos?", "None."]
    assert session.messages[14]["meta"]["to_seq"] == session.messages[14]["meta"]["rewind_to"] == 12


def test_a_rollback_of_too_many_turns_goes_back_to_the_start(imported_from: Reader) -> None:
    [session] = imported_from(
        line("response_item", type="message", role="user", content=[{"type": "input_text", "text": "one"}]),
        line("event_msg", type="thread_rolled_back", num_turns=9),
        line("event_msg", type="thread_rolled_back", num_turns=1),
        line("response_item", type="message", role="user", content=[{"type": "input_text", "text": "two"}]),
    )
    assert shown(session) == ["user: two"]
    assert session.report.ignored["event_msg/thread_rolled_back"] == 1


def test_a_compaction_replaces_all_earlier_messages(samples: Path) -> None:
    summary = "The caption of the picture was corrected; there are no other typos."
    first, _, *after = shown(only(samples / CURRENT))
    assert first.startswith(f"user: [Conversation Summary]\n\n{summary}")
    assert "stayed in view" in first
    assert first.endswith("The caption was corrected.")
    assert after == ["user: Good. Bye.", "user: [from /root to /root/helper]\n\nhi"]


def test_kept_messages_are_shown_beside_an_encrypted_summary(samples: Path) -> None:
    text = shown(only(samples / AGENT))[0]
    assert "encrypted" in text
    assert text.endswith("List the notes.")


def test_an_agent_has_its_parent_and_its_own_header(samples: Path) -> None:
    agent = only(samples / AGENT)
    assert agent.source_id == "0199f3a2-0000-7c52-9d0e-000000000001"
    assert agent.parent == "0199f3a1-7b1c-7c52-9d0e-5c1d9b0f2a77"
    assert agent.cwd == "/home/ada/notes"


def test_text_of_the_program_is_marked_or_ignored(samples: Path) -> None:
    session = only(samples / CURRENT)
    injected = [entry for entry in session.messages if entry["meta"]["source"].get("injected")]
    assert [flatten_message_text(entry)[:12] for entry in injected] == ["# AGENTS.md ", "<environment", "[from /root "]
    assert session.report.ignored["message/developer"] == 1


def test_unknown_kinds_of_item_and_event_are_reported(samples: Path) -> None:
    assert only(samples / CURRENT).report.unknown == {
        "response_item/telepathy": 1,
        "event_msg/confetti": 1,
    }


def test_events_that_repeat_a_message_are_ignored(samples: Path) -> None:
    session = only(samples / CURRENT)
    all_texts = [flatten_message_text(entry) for entry in session.messages]
    assert sum("Fixed: the harbour." in text for text in all_texts) == 1
    assert session.report.ignored["event_msg/agent_message"] == 2


def test_a_file_with_only_events_is_read_from_them(imported_from: Reader) -> None:
    [session] = imported_from(
        line("session_meta", id="x", cwd="/c"),
        line("event_msg", type="user_message", message="hi"),
        line("event_msg", type="agent_message", message="hello"),
    )
    assert shown(session) == ["user: hi", "assistant: hello"]
    assert session.report.imported == 2


def test_the_older_flat_form(samples: Path) -> None:
    assert detect(samples / FLAT) == "codex"
    session = only(samples / FLAT)
    assert (session.source_id, session.cwd) == ("c3c4b301-27c8-4c70-b6e4-46b99fdf0236", "/home/ada/flat")
    assert session.created_at == "2025-08-12T08:00:00+00:00"
    assert session.title == "How many files are here?"
    assert [entry["role"] for entry in session.messages] == ["user", "user", "assistant", "user", "assistant"]
    assert session.report.ignored == {"session_meta": 1, "state": 2}


def test_an_imported_rollout_can_continue_with_its_provider(samples: Path) -> None:
    messages = [message for _, message in visible_after(list(enumerate(only(samples / CURRENT).messages, 1)), 17)]
    items = to_openai_responses(messages).payload["input"]
    assert {"type": "reasoning", "id": "rs_1"}.items() <= next(i for i in items if i["type"] == "reasoning").items()
    assert [item["call_id"] for item in items if item["type"].endswith("_call") and "call_id" in item][:3] == [
        "call_1",
        "call_2",
        "call_3",
    ]


BASE = "0199f3a1-7b1c-7c52-9d0e-5c1d9b0f2a77"
FORK = "0199f3a9-0000-7c52-9d0e-00000000000f"
TURN = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}}


def message_line(role: str, text: str, ordinal: int) -> dict[str, Any]:
    part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
    return line("response_item", type="message", role=role, content=[part], **TURN) | {"ordinal": ordinal}


def fork_header(end: int, id_: str = FORK) -> dict[str, Any]:
    base = {"thread_id": BASE, "end_ordinal_exclusive": end}
    return line("session_meta", id=id_, history_mode="paginated", history_base=base) | {"ordinal": end}


def write_base(folder: Path) -> None:
    lines = [
        line("session_meta", id=BASE) | {"ordinal": 0},
        message_line("user", "one", 1),
        message_line("assistant", "1", 2),
    ]
    lines += [message_line("user", "two", 3), message_line("assistant", "2", 4)]
    folder.mkdir(parents=True)
    file = folder / f"rollout-2026-01-01T00-00-00-{BASE}.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, lines)))


def test_a_fork_includes_the_rollout_that_it_continues(tmp_path: Path, imported_from: Reader) -> None:
    write_base(tmp_path / "sessions/2026/01/01")
    own = fork_header(3), message_line("user", "three", 4)
    [session] = imported_from(*own, name=f"sessions/2026/02/02/rollout-2026-02-02T00-00-00-{FORK}.jsonl")
    assert shown(session) == ["user: one", "assistant: 1", "user: three"]
    assert (session.source_id, session.parent, session.forked_at) == (FORK, None, 2)
    assert (session.report.lines, session.report.accounted, session.report.problems) == (2, 2, [])


def test_a_rolled_back_thread_is_a_branch_of_itself(tmp_path: Path, imported_from: Reader) -> None:
    write_base(tmp_path / "sessions/2026/01/01")
    own = fork_header(3, BASE), message_line("assistant", "or 1.0", 4)
    [session] = imported_from(*own, name=f"sessions/2026/01/01/rollout-2026-01-01T00-09-00-{FORK}.jsonl")
    assert shown(session) == ["user: one", "assistant: 1", "assistant: or 1.0"]
    assert (session.source_id, session.parent, session.forked_at) == (FORK, BASE, 2)


def test_a_missing_base_rollout_is_a_problem(imported_from: Reader) -> None:
    [session] = imported_from(fork_header(3), message_line("user", "three", 4))
    assert shown(session) == ["user: three"]
    assert f"the rollout {BASE} that this one continues was not found" in session.report.problems[0]


def test_codex_s_own_fields_are_not_sent_to_the_provider(imported_from: Reader) -> None:
    call = line("response_item", type="function_call", call_id="c", name="run", arguments="{}", **TURN)
    output = line("response_item", type="function_call_output", call_id="c", output="ok", **TURN)
    [session] = imported_from(
        line("session_meta", id="x", model_provider="openai"), message_line("user", "go", 1), call, output
    )
    assert "passthrough" not in str(to_openai_responses(session.messages).payload)


def test_messages_between_agents_are_imported_unless_encrypted(imported_from: Reader) -> None:
    letter = {"type": "agent_message", "author": "/root", "recipient": "/root/a"}
    [session] = imported_from(
        line("response_item", **letter, content=[{"type": "input_text", "text": "look"}]),
        line("response_item", **letter, content=[{"type": "encrypted_content", "encrypted_content": "x"}]),
    )
    assert shown(session) == ["user: [from /root to /root/a]\n\nlook"]
    assert session.report.ignored == {"message between agents": 1}
