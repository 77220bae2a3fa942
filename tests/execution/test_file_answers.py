"""What a session's Python answers about files is looked at before it is believed: code may have taken its place."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from carrel.errors import WorkerLost
from carrel.execution import requests
from carrel.execution.host_line import Record


class Lying:
    """Answers every request with the same."""

    def __init__(self, **answer: Any) -> None:
        self.answer, self.asked = answer, 0

    async def __call__(self, record: Record) -> Record:
        self.asked += 1
        return self.answer


ENTRY = {"name": "a", "kind": "file", "size": 1, "modified": 1.5, "changed": 2, "mode": 0o644}


async def test_a_proper_listing_is_taken() -> None:
    listed = await requests.list_files(Lying(entries=[ENTRY, {"name": "b", "size": 0}]), ".")
    assert [entry.name for entry in listed] == ["a", "b"]
    assert list(await requests.seen_inside(Lying(entries=[ENTRY]))) == ["a"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"name": name} for name in ("../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0b", 5, ["a"], None)),
        *({"size": size} for size in ("x", 1.5, float("inf"), None, True)),
        {"modified": "now"},
        {"mode": "rw"},
        {"changed": []},
    ],
)
async def test_an_entry_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkerLost, match="as it should"):
        await requests.list_files(Lying(entries=[{**ENTRY, **wrong}]), ".")
    with pytest.raises(WorkerLost, match="as it should"):
        await requests.seen_inside(Lying(entries=[{**ENTRY, **wrong}]))


@pytest.mark.parametrize("count", [1, 100_000])
async def test_folders_in_folders_come_to_an_end(count: int) -> None:
    folders = [{"name": f"d{number}", "kind": "folder", "size": 0} for number in range(count)]
    with pytest.raises(WorkerLost, match="too deep"):
        await requests.seen_inside(Lying(entries=folders))


async def test_a_file_without_end_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LARGEST_FILE", 1 << 20)
    piece = base64.b64encode(bytes(300_000)).decode()
    lying = Lying(data=piece, size=1, end=False)
    with pytest.raises(ValueError, match="more than"):
        await requests.read_file(lying, "f")
    assert lying.asked == 4
