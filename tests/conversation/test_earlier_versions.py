"""Sessions of earlier versions are read and continued; `earlier_versions/README.md` has the commit of each."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from carrel.conversation.messages import blocks_of, flatten_message_text
from carrel.conversation.session_state import COUNTS
from carrel.conversation.store import SessionStore
from tests.support.messages import user

WRITTEN = Path(__file__).parent / "earlier_versions"
COMMITS = sorted(folder.name for folder in WRITTEN.iterdir() if folder.is_dir())
PICTURE = bytes(range(256)) * 260


@pytest.fixture(params=COMMITS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN / request.param, tmp_path / "sessions"))


async def shown(store: SessionStore, session_id: str) -> list[str]:
    data = await store.load_session(session_id)
    assert data is not None
    assert "problems" not in data
    return [flatten_message_text(message) for message in data["messages"]]


def test_each_version_is_named_with_its_commit() -> None:
    text = (WRITTEN / "README.md").read_text()
    assert COMMITS
    assert all(f"| {commit} |" in text for commit in COMMITS)


async def test_a_session_of_an_earlier_version_is_read_and_continued(folder: Path) -> None:
    async with SessionStore(folder, embedder=False) as store:
        summary, _, last = await shown(store, "talk")
        assert (summary, last) == ("[Conversation Summary]\n\nFiles were listed.", "Go on")
        meta = await store.read_meta("talk", counts=True)
        assert (meta["title"], meta["cwd"], meta["message_count"], meta["total_tokens"]) == (
            "List the files",
            "/work",
            3,
            42,
        )
        assert (meta.get("tags"), [label["text"] for label in meta.get("labels", [])]) == (
            ["kept"],
            ["before the summary"],
        )
        assert await store.append_message("talk", user("one more")) == 12
        assert (await shown(store, "talk"))[-1] == "one more"
        assert await shown(store, "branch") == ["List the files", "Elsewhere"]
        branch = await store.read_meta("branch", counts=True)
        assert (branch.get("parent_session_id"), branch.get("forked_at_seq"), branch["message_count"]) == ("talk", 1, 2)
        assert {listed["id"] for listed in await store.list_sessions()} == {"talk", "branch"}


async def test_what_an_earlier_version_put_into_files_comes_back(folder: Path) -> None:
    async with SessionStore(folder, embedder=False) as store:
        await store.append_rewind("talk", to_seq=6)
        data = await store.load_session("talk")
        assert data is not None
        [result] = blocks_of(data["messages"][2])
        assert result.get("model_text", "").splitlines() == [f"file-{number}.txt" for number in range(4000)]
        _, image = blocks_of(data["messages"][4])
        assert (image["type"], image.get("name"), base64.b64decode(image.get("data", ""))) == (
            "image",
            "chart.png",
            PICTURE,
        )


async def test_lost_metadata_of_an_earlier_version_is_made_again(folder: Path) -> None:
    kept = json.loads((folder / "talk" / "meta.json").read_bytes())
    (folder / "talk" / "meta.json").unlink()
    async with SessionStore(folder, embedder=False) as store:
        made: dict[str, Any] = {**await store.read_meta("talk")}
    lost = {"cwd", "created_at", "updated_at"} if not (folder / "talk" / "created.jsonl").exists() else {"updated_at"}
    ignored = {*COUNTS, *lost}
    assert {name: made[name] for name in made.keys() - ignored} == {name: kept[name] for name in kept.keys() - ignored}


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        (1, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]),
        (
            2,
            [
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "ls", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x.py"}]},
            ],
        ),
        (4, [{"role": "assistant", "content": [{"type": "text", "text": "hi"}], "meta": {"native": {"x": 1}}}]),
    ],
)
async def test_lines_of_the_first_versions_come_back_as_they_are(
    tmp_path: Path, version: int, lines: list[dict[str, Any]]
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    meta = {"id": "s", "title": "Old", "model": "m", "cwd": "/", "message_format_version": version}
    (tmp_path / "s" / "meta.json").write_text(json.dumps(meta))
    async with SessionStore(tmp_path, embedder=False) as store:
        data = await store.load_session("s")
        assert data is not None
        assert data["messages"] == lines
        assert data["session"]["title"] == "Old"
        assert await store.append_message("s", user("more")) == len(lines) + 1
