"""Programs for the original session format still work: its three plain files and its functions."""

import base64
import inspect
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import carrel
from carrel import SessionStore, build_compact_event, build_rewind_event
from carrel.conversation.messages import (
    build_message,
    document_block,
    flatten_message_text,
    image_block,
    text_block,
    tool_result_block,
    user_text_message,
)
from carrel.errors import RewindRefused, SessionIdRefused
from carrel.storage.memory import MemoryStore
from tests.support.messages import call, user

LARGE = base64.b64encode(bytes(range(256)) * 1200).decode()


def read_plainly(folder: Path) -> list[dict[str, Any]]:
    """The messages as a program reads them that knows only `messages.jsonl`."""
    return [json.loads(line) for line in (folder / "messages.jsonl").read_text(encoding="utf-8").splitlines()]


async def test_large_images_and_documents_reach_a_plain_reader(tmp_path: Path) -> None:
    blocks = [
        text_block("look"),
        image_block(LARGE, mime_type="image/png", name="a.png"),
        document_block(LARGE, mime_type="application/pdf"),
    ]
    inner = [image_block(LARGE, mime_type="image/jpeg")]
    messages = [
        user_text_message("hello"),
        build_message("user", blocks),
        call("c"),
        build_message("user", [tool_result_block(tool_use_id="c", model_text="seen", content=inner)]),
    ]
    async with SessionStore(tmp_path) as store:
        for message in messages:
            await store.append_message("s", message, provider="p", model="m", cwd="/tmp", api_base=None)
        loaded = await store.load_session("s")
        assert loaded is not None
        assert loaded["messages"] == messages
        assert read_plainly(store.session_dir("s")) == messages
        assert not (store.session_dir("s") / "blobs").exists()


async def test_a_long_output_is_in_a_file_that_the_line_names(tmp_path: Path) -> None:
    output = "line of output\n" * 5000
    async with SessionStore(tmp_path) as store:
        await store.append_message("s", call("c"))
        await store.append_message("s", build_message("user", [tool_result_block(tool_use_id="c", model_text=output)]))
        text = read_plainly(store.session_dir("s"))[1]["content"][0]["model_text"]
        [file] = (store.session_dir("s") / "tool-output").iterdir()
        assert f"tool-output/{file.name}" in text
        assert file.read_text() == output


async def test_the_output_folder_is_made_with_the_session(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        await store.create_session(session_id="created")
        await store.append_message("appended", user("hi"))
        await store.fork_session("appended", new_id="forked")
        for id_ in ("created", "appended", "forked"):
            folder = store.session_dir(id_) / "tool-output"
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            (folder / "bash-1.log").write_text("of another program")
            await store.delete_session(id_)
            assert not store.session_dir(id_).exists()


async def test_a_session_is_made_where_an_output_folder_is_left_over(tmp_path: Path) -> None:
    (tmp_path / "s" / "tool-output").mkdir(parents=True)
    async with SessionStore(tmp_path) as store:
        assert (await store.create_session(session_id="s"))["session"]["id"] == "s"


@pytest.mark.parametrize("backend", ["files", "memory"])
async def test_nothing_happens_to_an_unknown_session(tmp_path: Path, backend: str) -> None:
    store = SessionStore(tmp_path / "sessions") if backend == "files" else SessionStore(store=MemoryStore())
    async with store:
        assert await store.append_rewind("unknown", 0) == 0
        assert await store.append_rewind("unknown", to_seq=3) == 0
        await store.clear_session("unknown")
        assert await store.list_sessions() == []
        with pytest.raises(SessionIdRefused):
            await store.clear_session("../other")
        await store.append_message("known", user("hi"))
        with pytest.raises(RewindRefused):
            await store.append_rewind("known", 7)
    assert not (tmp_path / "sessions" / "unknown").exists()


async def test_an_empty_session_id_makes_a_new_one(tmp_path: Path) -> None:
    async with SessionStore(tmp_path) as store:
        first, second = [await store.create_session("a", session_id="") for _ in range(2)]
        assert len(first["session"]["id"]) == 32
        assert first["session"]["id"] != second["session"]["id"]


async def test_an_attached_file_is_no_title(tmp_path: Path) -> None:
    attached = text_block('<file name="notes.txt">\nsecret plans\n</file>', meta={"attachment": True})
    message = build_message("user", [attached, text_block("What is\nin this file? " + "x" * 90)])
    assert flatten_message_text(message).startswith("What is")
    async with SessionStore(tmp_path) as store:
        await store.append_message("a", message)
        await store.append_message("b", build_message("user", [attached]))
        titles = {meta["id"]: meta["title"] for meta in await store.list_sessions()}
        assert titles == {"a": "What is in this file? " + "x" * 26, "b": "New chat"}
        await store.append_message("b", user("And this?"))
        assert (await store.read_meta("b"))["title"] == "And this?"


async def test_a_pinned_attachment_stays_word_for_word(tmp_path: Path) -> None:
    attached = text_block("the attached text", meta={"attachment": True})

    async def summarize(messages: list[Any]) -> str:
        return "summary"

    async with SessionStore(tmp_path) as store:
        seq = await store.append_message("a", build_message("user", [attached, text_block("read it")]))
        await store.pin("a", seq)
        event = await store.compact("a", summarize, keep_tokens=0)
    assert "the attached text" in event["content"][0]["text"]


def test_events_are_built_as_in_the_original() -> None:
    event = build_compact_event(summary_text="short", provider="p", model="m", compacted_count=3, usage={"a": 1})
    meta = {"provider": "p", "model": "m", "compacted_count": 3, "usage": {"a": 1}}
    assert event == {"role": "compact", "content": [{"type": "text", "text": "short"}], "meta": meta}
    names = list(inspect.signature(build_compact_event).parameters)
    assert names == ["summary_text", "provider", "model", "compacted_count", "usage"]
    assert build_rewind_event(2)["meta"]["rewind_to"] == 2


def test_the_constants_of_the_format_are_exported() -> None:
    assert carrel.MESSAGE_FORMAT_VERSION == 5
    assert carrel.DEFAULT_SESSION_PROVIDER == "anthropic"
    assert carrel.DEFAULT_SESSION_TITLE == "New chat"
