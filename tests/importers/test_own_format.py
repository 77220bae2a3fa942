"""Importing sessions in carrel's own format, written by carrel or by another program."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from carrel.conversation.importers import ImportedSession, detect, read_session_file
from carrel.conversation.messages import user_text_message
from carrel.conversation.replay import visible_after
from carrel.conversation.store import SessionStore
from carrel.errors import SessionTooNew

Reader = Callable[..., list[ImportedSession]]


def only(path: Path) -> ImportedSession:
    [imported] = read_session_file(path)
    return imported


def test_a_folder_and_the_log_in_it_are_the_same_session(samples: Path) -> None:
    folder, log = only(samples / "carrel/today"), only(samples / "carrel/today/messages.jsonl")
    assert folder == log
    assert detect(samples / "carrel/today") == detect(samples / "carrel/today/messages.jsonl") == "carrel"


def test_metadata_is_imported(samples: Path) -> None:
    session = only(samples / "carrel/today")
    assert (session.source_id, session.title, session.cwd) == ("today", "Bottles", "/home/ada/notes")
    assert (session.provider, session.model) == ("anthropic", "claude-sonnet-4-5")
    assert session.created_at == "2026-05-01T08:00:00+00:00"
    assert session.meta["tags"] == ["song"]


def test_attachments_are_put_back(samples: Path) -> None:
    result = only(samples / "carrel/today").messages[2]["content"][0]
    assert result["model_text"].endswith("8999 bottles\n")
    assert "meta" not in result


def test_a_changed_attachment_is_not_imported(samples: Path, tmp_path: Path) -> None:
    source = samples / "carrel/today/messages.jsonl"
    (tmp_path / "messages.jsonl").write_bytes(source.read_bytes())
    output = tmp_path / "tool-output"
    output.mkdir()
    (output / "1d7e88c4434a8bd52f00bc6dba4221ed.txt").write_text("something else")
    session = only(tmp_path)
    assert session.messages[2]["content"][0]["model_text"] == "0 bottles …"
    assert "is missing or was changed" in session.report.problems[0]


def test_a_reference_outside_the_folder_is_not_followed(imported_from: Reader, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("keep out")
    (tmp_path / "s" / "blobs").mkdir(parents=True)
    (tmp_path / "s" / "blobs" / "link").symlink_to(tmp_path / "private.txt")
    for path in ("blobs/../../private.txt", "blobs/link", "tool-output/\x00"):
        block = {
            "type": "tool_result",
            "tool_use_id": "t",
            "model_text": "…",
            "meta": {"spilled": {"model_text": {"path": path}}},
        }
        [session] = imported_from({"role": "user", "content": [block]}, name="s/messages.jsonl")
        assert session.messages[0]["content"][0]["model_text"] == "…"
        assert "keep out" not in str(session)


def test_references_between_entries_survive_a_lost_line(samples: Path) -> None:
    session = only(samples / "carrel/today")
    assert session.report.unreadable == [4]
    assert [entry["role"] for entry in session.messages][4:6] == ["rewind", "compact"]
    assert session.messages[4]["meta"]["at_seq"] == 4
    assert session.messages[5]["meta"]["keep_from_seq"] == 4


def test_unknown_roles_and_blocks_are_kept(samples: Path) -> None:
    session = only(samples / "carrel/today")
    assert session.messages[-1] == {"role": "narrator", "content": [{"type": "hum", "tune": "la"}]}
    assert session.report.unknown == {"no role": 1}


def test_tool_results_of_older_versions_are_upgraded(samples: Path) -> None:
    session = only(samples / "carrel/older")
    assert session.messages[2]["content"][0] == {
        "type": "tool_result",
        "tool_use_id": "c1",
        "model_text": "half past nine",
        "display_text": "half past nine",
        "is_error": False,
    }
    assert session.meta["api_base"] == "https://llm.example/v1"


def test_a_rewind_keeps_its_meaning(samples: Path) -> None:
    session = only(samples / "carrel/older")
    shown = visible_after(list(enumerate(session.messages, 1)))
    assert [message["content"][0]["text"] for _, message in shown] == ["Start over."]


def test_metadata_of_a_bare_log_is_taken_from_its_messages(samples: Path) -> None:
    session = only(samples / "carrel/bare")
    assert (session.source_id, session.title) == ("bare", "My title is missing.")
    assert (session.provider, session.model) == ("gemini", "gemini-2.5-pro")


@pytest.mark.parametrize("damage", [b"", b"[]", b"null", b"{oops", b'{"title": 5}'])
def test_a_session_with_damaged_metadata_is_imported(samples: Path, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "messages.jsonl").write_bytes((samples / "carrel/bare/messages.jsonl").read_bytes())
    (tmp_path / "meta.json").write_bytes(damage)
    session = only(tmp_path)
    assert session.title == "My title is missing."
    assert "damaged" in session.report.problems[0]


async def test_labels_and_pins_are_imported_once(tmp_path: Path) -> None:
    async with SessionStore(tmp_path / "theirs", embedder=False) as theirs, SessionStore(tmp_path / "ours") as ours:
        await theirs.append_message("a", user_text_message("Hello"))
        await theirs.label("a", "begun")
        await theirs.pin("a", 1)
        await theirs.set_tags("a", ["red"])
        await theirs.close()
        await ours.import_file(tmp_path / "theirs")
        before, after = await theirs.read_meta("a"), await ours.read_meta("a")
    for name in ("labels", "pins", "tags"):
        assert after[name] == before[name]


@pytest.mark.parametrize("damage", [None, b"", b"{oops"])
async def test_lost_metadata_is_taken_from_created_jsonl(tmp_path: Path, damage: bytes | None) -> None:
    async with SessionStore(tmp_path / "theirs", embedder=False) as theirs:
        made = await theirs.create_session(
            "Given", session_id="a", provider="openai", model="m", cwd="/work", tone="dry"
        )
        await theirs.append_message("a", user_text_message("Hello"))
        await theirs.create_session(session_id="b", model="n")
        await theirs.append_message("b", user_text_message("First words"))
    for name in "ab":
        meta = tmp_path / "theirs" / name / "meta.json"
        meta.unlink() if damage is None else meta.write_bytes(damage)
    first, second = read_session_file(tmp_path / "theirs")
    assert (first.title, first.provider, first.model, first.cwd) == ("Given", "openai", "m", "/work")
    assert (first.created_at, first.meta["tone"]) == (made["session"]["created_at"], "dry")
    assert (second.title, second.model) == ("First words", "n")
    assert ["created.jsonl" in problem for problem in first.report.problems] == [True] * (damage is not None)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "messages.jsonl").write_text('{"role":"user","content":[]}\n')
    (tmp_path / "meta.json").write_text(json.dumps({"id": "x", "message_format_version": 99}))
    with pytest.raises(SessionTooNew, match="format 99"):
        only(tmp_path)


def test_an_empty_log_is_an_empty_session(tmp_path: Path) -> None:
    (tmp_path / "messages.jsonl").touch()
    assert only(tmp_path).messages == []


def test_lines_may_have_additional_keys(tmp_path: Path) -> None:
    (tmp_path / "messages.jsonl").write_text('{"role":"user","content":"hi","id":7}\n')
    [session] = read_session_file(tmp_path)
    assert (session.kind, session.report.imported) == ("carrel", 1)
