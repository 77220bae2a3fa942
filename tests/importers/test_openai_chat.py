"""Importing files of OpenAI Chat messages, some of them with the file name of a carrel log."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carrel.conversation.importers import ImportedSession, detect, read_session_file
from carrel.conversation.messages import tool_calls_of, tool_results_of
from carrel.conversation.store import SessionStore

Reader = Callable[..., list[ImportedSession]]

VIBE: list[dict[str, Any]] = [
    {"role": "user", "content": "list the files", "injected": False, "message_id": "u1"},
    {
        "role": "assistant",
        "content": "",
        "injected": False,
        "reasoning_content": "I need ls.",
        "reasoning_message_id": "r1",
        "tool_calls": [
            {
                "id": "c1",
                "index": 0,
                "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                "type": "function",
            },
            {"id": "c2", "index": 1, "function": {"name": "bash", "arguments": "{"}, "type": "function"},
        ],
        "message_id": "a1",
    },
    {"role": "tool", "content": "a.txt", "injected": False, "name": "bash", "tool_call_id": "c1"},
    {"role": "tool", "content": "no JSON", "injected": False, "name": "bash", "tool_call_id": "c2"},
    {"role": "assistant", "content": "One file.", "injected": False, "message_id": "a2"},
    {"role": "user", "content": "go on", "injected": True, "message_id": "u2"},
]
FLAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are Grok."},
    {"role": "user", "content": "what is here?", "timestamp": "2026-05-01T08:00:00Z"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "g1", "name": "ls", "arguments": {"path": "."}}]},
    {"role": "tool", "tool_call_id": "g1", "content": "a.txt"},
    {"role": "assistant", "content": "a.txt"},
]


def write(folder: Path, lines: list[dict[str, Any]], meta: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta))
    return folder


async def stored(tmp_path: Path, source: Path) -> dict[str, Any]:
    async with SessionStore(tmp_path / "store", embedder=False) as store:
        [report] = await store.import_file(source)
        assert report.session_id is not None
        assert report.accounted == report.lines
        assert not report.unknown
        data = await store.load_session(report.session_id)
        assert data is not None
        return dict(data)


async def test_a_session_of_mistral_vibe(tmp_path: Path) -> None:
    meta = {
        "session_id": "7d1f",
        "parent_session_id": None,
        "start_time": "2026-05-01T08:00:00+00:00",
        "environment": {"working_directory": "/home/ada/notes"},
        "title": "list the files",
        "total_messages": 6,
    }
    folder = write(tmp_path / "session_20260501_080000_7d1f", VIBE, meta)
    assert detect(folder) == detect(folder / "messages.jsonl") == "openai-chat"
    data = await stored(tmp_path, folder)
    session, messages = data["session"], data["messages"]
    assert (session["title"], session["cwd"]) == ("list the files", "/home/ada/notes")
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert tool_calls_of(messages[1]) == tool_results_of(messages[2]) == ["c1", "c2"]
    assert [block["type"] for block in messages[1]["content"]] == ["thinking", "tool_use", "tool_use"]
    assert messages[1]["content"][1]["input"] == {"command": "ls"}
    assert [block["model_text"] for block in messages[2]["content"]] == ["a.txt", "no JSON"]
    assert messages[4]["meta"]["source"]["injected"]
    assert "message_id" not in str(messages[1]["meta"].get("native", {})), (
        "the program's own keys are not sent to a provider"
    )


async def test_calls_with_the_name_beside_the_id(tmp_path: Path) -> None:
    data = await stored(tmp_path, write(tmp_path / "grok", FLAT))
    assert data["session"]["title"] == "what is here?"
    assert tool_calls_of(data["messages"][2]) == tool_results_of(data["messages"][3]) == ["g1"]
    assert data["messages"][2]["content"][0]["input"] == {"path": "."}


def test_a_call_far_down_in_the_file_decides_the_format(tmp_path: Path) -> None:
    words = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 500
    folder = write(tmp_path / "long", [*words, FLAT[2], FLAT[3]])
    assert detect(folder) == "openai-chat"
    [session] = read_session_file(folder)
    assert [tool_calls_of(entry) for entry in session.messages if tool_calls_of(entry)] == [["g1"]]


def test_a_call_of_unknown_form_is_reported(imported_from: Reader) -> None:
    odd = {"role": "assistant", "content": "x", "tool_calls": [{"tool": "ls"}]}
    [session] = imported_from(*FLAT, odd, name="s/messages.jsonl")
    assert sum(session.report.unknown.values()) == 1
    assert session.report.accounted == session.report.lines == 6


def test_a_carrel_log_with_an_openai_call_stays_a_carrel_log(imported_from: Reader) -> None:
    [session] = imported_from({"role": "user", "content": [], "meta": {"n": 1}}, FLAT[2], name="s/messages.jsonl")
    assert session.kind == "carrel"
    assert session.messages[1] == FLAT[2]
    assert "line 2 has a tool call in OpenAI's format" in session.report.problems[0]


def test_messages_without_any_call_are_a_carrel_log(imported_from: Reader) -> None:
    [session] = imported_from(FLAT[1] | {"content": []}, {"role": "user", "content": "x"}, name="s/messages.jsonl")
    assert session.kind == "carrel"
