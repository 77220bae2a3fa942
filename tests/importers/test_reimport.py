"""Importing a file again: unchanged, grown, or changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from carrel import SessionStore, user_text_message


def _line(number: int, text: str) -> str:
    message = {"role": "user" if number % 2 else "assistant", "content": [{"type": "text", "text": text}]}
    parent = f"u{number - 1}" if number > 1 else None
    line: dict[str, Any] = {"type": message["role"], "uuid": f"u{number}", "parentUuid": parent, "sessionId": "s1"}
    return json.dumps(line | {"message": message | {"id": f"m{number}"}}) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "session.jsonl"
    path.write_text(_line(1, "What is a carrel?") + _line(2, "A desk."))
    return path


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "kept", embedder=False)


async def _texts(store: SessionStore, session_id: str) -> list[str]:
    data = await store.load_session(session_id)
    assert data is not None
    return [message["content"][0]["text"] for message in data["messages"]]


async def test_the_same_file_is_stored_once_unless_again(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    [second] = await store.import_file(file)
    assert (second.session_id, second.already_here) == (None, first.session_id)
    assert len(await store.list_sessions()) == 1
    [third] = await store.import_file(file, again=True)
    assert third.session_id not in (None, first.session_id)
    [fourth] = await store.import_file(file)
    assert fourth.already_here in (first.session_id, third.session_id)
    assert len(await store.list_sessions()) == 2


async def test_new_messages_of_a_grown_file_are_appended(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    for number, text in ((3, "And mine?"), (4, "Yours."), (5, "Mine?")):
        file.write_text(file.read_text() + _line(number, text))
        async with SessionStore(store.data_dir, embedder=False) as other:
            [report] = await other.import_file(file)
        assert (report.session_id, report.already_here, report.appended) == (first.session_id, first.session_id, 1)
    assert await _texts(store, first.session_id) == ["What is a carrel?", "A desk.", "And mine?", "Yours.", "Mine?"]
    assert len(await store.list_sessions()) == 1
    [report] = await store.import_file(file)
    assert (report.session_id, report.already_here, report.appended) == (None, first.session_id, 0)


async def test_a_session_that_was_changed_here_is_left_alone(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    await store.append_message(first.session_id, user_text_message("written here"))
    [same] = await store.import_file(file)
    assert same.problems == []
    file.write_text(file.read_text() + _line(3, "And mine?"))
    [grown] = await store.import_file(file)
    assert "was changed here since it was imported; nothing was stored" in grown.problems[0]
    assert grown.session_id is None
    assert await _texts(store, first.session_id) == ["What is a carrel?", "A desk.", "written here"]


async def test_a_file_with_a_changed_old_part_is_reported(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    file.write_text(_line(1, "What is a desk?") + _line(2, "A table.") + _line(3, "And mine?"))
    [changed] = await store.import_file(file)
    assert changed.already_here == first.session_id
    assert "the source has changed since it was imported" in changed.problems[0]


async def test_a_session_with_extra_lines_of_an_earlier_version_is_left_alone(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    await store.append_message(first.session_id, user_text_message("the rest of a message"))
    await store.close()
    path = store.meta_path(first.session_id)
    meta = json.loads(path.read_text())
    meta["imported_from"] |= {"seq": 3, "places": [2]}
    path.write_text(json.dumps(meta))
    file.write_text(file.read_text() + _line(3, "And mine?"))
    async with SessionStore(store.data_dir, embedder=False) as other:
        [grown] = await other.import_file(file)
    assert (grown.session_id, grown.appended, len(grown.problems)) == (None, 0, 1)


async def test_two_files_with_the_same_name_are_two_sessions(tmp_path: Path, store: SessionStore) -> None:
    for folder, text in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        line = json.dumps(user_text_message(text)) + "\n"
        (tmp_path / folder / "export.jsonl").write_text(line)
        [report] = await store.import_file(tmp_path / folder / "export.jsonl")
        assert report.session_id is not None
    [report] = await store.import_file(tmp_path / "a" / "export.jsonl")
    assert report.already_here is not None
    assert len(await store.list_sessions()) == 2


async def test_a_deleted_session_can_be_imported_again(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    await store.delete_session(first.session_id)
    [second] = await store.import_file(file)
    assert second.session_id is not None


async def test_a_second_import_of_all_samples_stores_nothing(store: SessionStore) -> None:
    folder = Path(__file__).parent / "samples"
    before = [report for report in await store.import_file(folder, all_branches=True) if report.session_id]
    count = len(await store.list_sessions())
    after = await store.import_file(folder, all_branches=True)
    assert len([report for report in after if report.already_here]) == len(before)
    assert [report for report in after if report.session_id] == []
    assert len(await store.list_sessions()) == count


def _piece(*blocks: dict[str, Any], output: int) -> str:
    usage = {"input_tokens": 10, "output_tokens": output}
    message = {"role": "assistant", "id": "m2", "model": "c", "content": list(blocks), "usage": usage}
    line = {"type": "assistant", "uuid": f"p{output}", "parentUuid": "u1", "sessionId": "s1", "message": message}
    return json.dumps(line) + "\n"


async def test_a_last_message_that_has_grown_is_reported_as_changed(tmp_path: Path, store: SessionStore) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(_line(1, "What?") + _piece({"type": "text", "text": "I look."}, output=3))
    [first] = await store.import_file(file)
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    file.write_text(file.read_text() + _piece(call, output=7))
    [changed] = await store.import_file(file)
    assert (changed.session_id, changed.already_here, changed.appended) == (None, first.session_id, 0)
    assert "the source has changed since it was imported" in changed.problems[0]
    [again] = await store.import_file(file, again=True)
    assert again.session_id is not None
    usage = await store.usage(again.session_id)
    assert (usage.total.input_tokens, usage.total.output_tokens) == (10, 7)


async def test_a_title_with_a_lone_surrogate_is_stored(tmp_path: Path, store: SessionStore) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(_line(1, "What is \ud800 this?"))
    [report] = await store.import_file(file)
    assert report.session_id is not None


async def test_a_branch_that_has_grown_keeps_its_references(tmp_path: Path, store: SessionStore) -> None:
    parent, fork = "ffffffff-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
    copied = {"forkedFrom": {"sessionId": parent, "messageUuid": "u1"}}
    (tmp_path / "from").mkdir()
    for name, lines in ((parent, [_line(1, "one")]), (fork, [_line(1, "one"), _line(2, "two")])):
        first = json.dumps({**json.loads(lines[0]), **(copied if name == fork else {})}) + "\n"
        (tmp_path / "from" / f"{name}.jsonl").write_text(first + "".join(lines[1:]))
    _, branch = await store.import_file(tmp_path / "from")
    assert branch.session_id is not None
    with (tmp_path / "from" / f"{fork}.jsonl").open("a") as file:
        file.write(_compaction(keep="u2") + _line(4, "three").replace('"u3"', '"s1"'))
    _, grown = await store.import_file(tmp_path / "from")
    assert (grown.problems, grown.appended) == ([], 2)
    assert (await _texts(store, branch.session_id))[-2:] == ["two", "three"]


def _compaction(keep: str) -> str:
    boundary: dict[str, Any] = {
        "type": "system",
        "subtype": "compact_boundary",
        "uuid": "b1",
        "parentUuid": None,
        "sessionId": "s1",
    }
    boundary |= {"logicalParentUuid": keep, "compactMetadata": {"preservedSegment": {"headUuid": keep}}}
    summary = json.loads(_line(2, "Summary.").replace("assistant", "user"))
    summary |= {"uuid": "s1", "parentUuid": "b1", "isCompactSummary": True}
    return json.dumps(boundary) + "\n" + json.dumps(summary) + "\n"
