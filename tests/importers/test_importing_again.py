"""A file that is imported twice: it is here already, it has grown, or it is another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from carrel import SessionStore, user_text_message


def _line(number: int, text: str) -> str:
    message = {"role": "user" if number % 2 else "assistant", "content": [{"type": "text", "text": text}]}
    parent = f"u{number - 1}" if number > 1 else None
    said: dict[str, Any] = {"type": message["role"], "uuid": f"u{number}", "parentUuid": parent, "sessionId": "s1"}
    return json.dumps(said | {"message": message | {"id": f"m{number}"}}) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "session.jsonl"
    path.write_text(_line(1, "What is a carrel?") + _line(2, "A desk."))
    return path


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "kept", embedder=None)


async def _texts(store: SessionStore, session_id: str) -> list[str]:
    data = await store.load_session(session_id)
    assert data is not None
    return [message["content"][0]["text"] for message in data["messages"]]


async def test_the_same_file_is_stored_once_and_again_when_asked(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    [second] = await store.import_file(file)
    assert (second.session_id, second.already_here) == (None, first.session_id)
    assert len(await store.list_sessions()) == 1
    [third] = await store.import_file(file, again=True)
    assert third.session_id not in (None, first.session_id)
    [fourth] = await store.import_file(file)
    assert fourth.already_here in (first.session_id, third.session_id)
    assert len(await store.list_sessions()) == 2


async def test_what_a_file_has_got_since_is_appended(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    for number, text in ((3, "Whose?"), (4, "Yours."), (5, "Mine?")):
        file.write_text(file.read_text() + _line(number, text))
        async with SessionStore(store.data_dir, embedder=None) as other:
            [report] = await other.import_file(file)
        assert (report.session_id, report.already_here, report.appended) == (first.session_id, first.session_id, 1)
    assert await _texts(store, first.session_id) == ["What is a carrel?", "A desk.", "Whose?", "Yours.", "Mine?"]
    assert len(await store.list_sessions()) == 1
    [report] = await store.import_file(file)
    assert (report.session_id, report.already_here, report.appended) == (None, first.session_id, 0)


async def test_a_session_that_was_changed_here_is_left_alone(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    await store.append_message(first.session_id, user_text_message("said here"))
    [same] = await store.import_file(file)
    assert same.problems == []
    file.write_text(file.read_text() + _line(3, "Whose?"))
    [grown] = await store.import_file(file)
    assert "changed since; nothing was stored" in grown.problems[0]
    assert grown.session_id is None
    assert await _texts(store, first.session_id) == ["What is a carrel?", "A desk.", "said here"]


async def test_a_file_whose_old_part_is_another_is_told(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    file.write_text(_line(1, "What is a desk?") + _line(2, "A table.") + _line(3, "Whose?"))
    [changed] = await store.import_file(file)
    assert changed.already_here == first.session_id
    assert "changed since; nothing was stored" in changed.problems[0]


async def test_two_files_of_one_name_are_two_sessions(tmp_path: Path, store: SessionStore) -> None:
    for folder, text in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        line = json.dumps(user_text_message(text)) + "\n"
        (tmp_path / folder / "export.jsonl").write_text(line)
        [report] = await store.import_file(tmp_path / folder / "export.jsonl")
        assert report.session_id is not None
    [report] = await store.import_file(tmp_path / "a" / "export.jsonl")
    assert report.already_here is not None
    assert len(await store.list_sessions()) == 2


async def test_a_deleted_session_can_be_imported_anew(file: Path, store: SessionStore) -> None:
    [first] = await store.import_file(file)
    assert first.session_id is not None
    await store.delete_session(first.session_id)
    [second] = await store.import_file(file)
    assert second.session_id is not None


async def test_all_samples_are_here_after_one_import(store: SessionStore) -> None:
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
    said = {"type": "assistant", "uuid": f"p{output}", "parentUuid": "u1", "sessionId": "s1", "message": message}
    return json.dumps(said) + "\n"


async def test_a_message_that_was_still_being_written_goes_on_where_it_was(tmp_path: Path, store: SessionStore) -> None:
    file = tmp_path / "session.jsonl"
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a desk"}]}
    answer = {"type": "user", "uuid": "r1", "parentUuid": "p7", "sessionId": "s1", "message": result}
    lines = [_line(1, "What?"), _piece({"type": "text", "text": "I look."}, output=3), _piece(call, output=7)]
    lines += [json.dumps(answer) + "\n", _line(5, "And?").replace('"u4"', '"r1"')]
    ids, appended = set(), []
    for end in range(2, len(lines) + 1):
        file.write_text("".join(lines[:end]))
        [report] = await store.import_file(file)
        assert not report.problems
        ids.add(report.session_id)
        appended.append(report.appended)
    [id_] = ids
    assert appended == [0, 2, 1, 1]
    data = await store.load_session(id_)
    kinds = [(message["role"], block["type"]) for message in data["messages"] for block in message["content"]]
    assert [kind for _, kind in kinds] == ["text", "text", "tool_use", "tool_result", "text"]
    usage = await store.usage(id_)
    assert (usage.total.input_tokens, usage.total.output_tokens) == (10, 7)
    [report] = await store.import_file(file)
    assert (report.already_here, report.appended, report.problems) == (id_, 0, [])


async def test_a_title_with_half_a_character_in_it_keeps_nobody_out(tmp_path: Path, store: SessionStore) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(_line(1, "What is \ud800 this?"))
    [report] = await store.import_file(file)
    assert report.session_id is not None


@pytest.mark.parametrize(
    "pattern", ["codex/2026/03/04/rollout-2026-03-04T10-00-00-*.jsonl", "pi/--home-ada-old--/*.jsonl"]
)
async def test_a_session_imported_after_every_line_is_the_session(
    pattern: str, samples: Path, tmp_path: Path, store: SessionStore
) -> None:
    [sample] = samples.glob(pattern)
    lines = sample.read_bytes().splitlines(keepends=True)
    file = tmp_path / sample.name
    for end in range(2, len(lines) + 1):
        file.write_bytes(b"".join(lines[:end]))
        [report] = await store.import_file(file)
        assert not [problem for problem in report.problems if "nothing was stored" in problem]
    [meta] = await store.list_sessions()
    [again] = await store.import_file(file, again=True)
    assert again.session_id is not None
    seen = [await _seen(store, id_) for id_ in (meta["id"], again.session_id)]
    assert seen[0] == seen[1]


async def _seen(store: SessionStore, session_id: str) -> tuple[list[str], int, int]:
    """What is in view, block by block, and what it cost."""
    data = await store.load_session(session_id)
    assert data is not None
    blocks = sorted(json.dumps(block, sort_keys=True) for message in data["messages"] for block in message["content"])
    total = (await store.usage(session_id)).total
    return blocks, total.input_tokens, total.output_tokens
