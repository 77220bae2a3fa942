"""Workflows in every store: saved, found, edited by hand, and never run on the host."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import WorkflowExecutionError, WorkflowNotFoundError, WorkflowValidationError
from carrel.library.workflows import WorkflowLibrary
from carrel.storage.files.store import FileStore
from tests.support.stores import Backend

FETCH = '''"""Fetch JSON from a URL."""

async def run(url: str, tries: int = 3) -> dict:
    """
    Args:
        url: Where it is.
    """
    return tools.curl.get(url=url)
'''
ADD = "def run(a, b=2):\n    return a + b\n"


def library(backend: Backend, **settings: Any) -> WorkflowLibrary:
    return WorkflowLibrary(backend.open(), **settings)


async def names(workflows: WorkflowLibrary) -> list[str]:
    return [found["name"] for found in await workflows.list()]


async def test_an_added_workflow_is_listed_with_its_parameters(backend: Backend) -> None:
    workflows = library(backend)
    added = await workflows.add("fetch", FETCH)
    url = {"name": "url", "type": "str", "description": "Where it is.", "required": True, "default": None}
    tries = {"name": "tries", "type": "int", "description": "", "required": False, "default": 3}
    assert added["name"] == "fetch"
    assert added["description"] == "Fetch JSON from a URL."
    assert added["parameters"] == [url, tries]
    assert await workflows.list() == [added]
    assert await library(backend).list() == [added]
    assert "source" not in added
    assert ((await library(backend).get("fetch")) or {})["source"] == FETCH
    assert await workflows.get("other") is None


@pytest.mark.parametrize("source", [ADD, ADD.rstrip(), "\n" + ADD + "\n\n", FETCH])
@pytest.mark.parametrize("description", ["Adds two", 'He said "add"', "two\nlines", "ünïcode: and # signs"])
async def test_a_description_does_not_change_the_source(backend: Backend, source: str, description: str) -> None:
    await library(backend).add("sum_up", source, description)
    again = await library(backend).get("sum_up")
    assert again is not None
    assert (again["description"], again["source"]) == (description, source)
    assert (await library(backend).list())[0]["description"] == description


async def test_adding_again_replaces(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("x", ADD, "first")
    await workflows.add("x", "def run(): return 2")
    found = await workflows.get("x")
    assert found is not None
    assert (found["description"], found["parameters"]) == ("", [])
    assert await names(workflows) == ["x"]


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("a-b", ADD, ValueError),
        ("../x", ADD, ValueError),
        ("", ADD, ValueError),
        ("class", ADD, ValueError),
        ("list", ADD, ValueError),
        (7, ADD, ValueError),
        ("x", "y = 1", ValueError),
        ("x", "def run(:", SyntaxError),
        ("x", "return 1\ndef run(): pass", SyntaxError),
        ("x", 5, ValueError),
        ("x", "def run(): return '\ud800'", ValueError),
    ],
)
async def test_an_invalid_workflow_is_not_saved(
    backend: Backend, name: Any, source: Any, error: type[Exception]
) -> None:
    workflows = library(backend)
    with pytest.raises(error):
        await workflows.add(name, source)
    assert await workflows.list() == []
    assert await backend.open().list("workflows") == []


async def test_remove_returns_whether_there_was_one(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("x", ADD)
    assert await workflows.remove("x") is True
    assert await workflows.remove("x") is False
    assert await workflows.list() == []
    assert await workflows.get("x") is None


async def test_changes_of_another_session_are_seen_at_once(backend: Backend) -> None:
    one, other = library(backend), library(backend)
    assert await other.list() == []
    await one.add("x", ADD)
    assert await names(other) == ["x"]
    await one.add("x", "def run(z): pass", "changed")
    assert [p["name"] for p in (await other.list())[0]["parameters"]] == ["z"]
    assert (await other.begin("x"))["source"] == "def run(z): pass"
    await one.remove("x")
    assert await other.list() == []
    with pytest.raises(WorkflowNotFoundError):
        await other.begin("x")


async def test_reading_a_workflow_runs_nothing_of_it(backend: Backend, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    source = f"import os\nos.system('touch {mark}')\nopen({str(mark)!r}, 'w')\n@print\ndef run(a=1/0): pass\n1/0\n"
    workflows = library(backend)
    await workflows.add("bomb", source)
    await workflows.list()
    await workflows.search("bomb")
    await workflows.get("bomb")
    await workflows.begin("bomb")
    await workflows.history("bomb")
    assert not mark.exists()


async def test_a_broken_file_does_not_affect_others(backend: Backend) -> None:
    store = backend.open()
    await store.put("workflows/good.py", ADD.encode())
    await store.put("workflows/broken.py", b"def run(:")
    await store.put("workflows/empty.py", b"")
    await store.put("workflows/bytes.py", b"\xff\xfe\x00")
    await store.put("workflows/not-a-name.py", ADD.encode())
    await store.put("workflows/_helper.py", ADD.encode())
    await store.put("workflows/notes.txt", b"hello")
    workflows = library(backend)
    listed = {found["name"]: found.get("error") for found in await workflows.list()}
    assert listed.pop("good") is None
    assert set(listed) == {"broken", "empty", "bytes", "not-a-name"}
    assert "line 1" in (listed["broken"] or "")
    assert "no function 'run'" in (listed["empty"] or "")
    for name in ("broken", "empty", "bytes"):
        with pytest.raises(WorkflowValidationError, match=name):
            await workflows.begin(name)
    assert (await workflows.begin("good"))["source"] == ADD


async def test_skills_are_workflows(backend: Backend) -> None:
    store = backend.open()
    await store.put("skills/old.py", ADD.encode())
    await store.put("skills/both.py", b"def run(): return 'skills'")
    await store.put("workflows/both.py", b"def run(): return 'workflows'")
    workflows = library(backend)
    assert await names(workflows) == ["both", "old"]
    assert "workflows" in (await workflows.begin("both"))["source"]
    await workflows.add("old", "def run(): return 'new'")
    assert await store.get("skills/old.py") == b"def run(): return 'new'"
    assert await workflows.remove("both")
    assert await names(workflows) == ["old"]


# --- history and use -------------------------------------------------------------------------------------------------


async def test_the_history_has_every_version(backend: Backend) -> None:
    ticks = iter(range(1, 1000))
    workflows = library(backend, now=lambda: datetime(2026, 1, 1, 0, 0, next(ticks) % 60, tzinfo=UTC))
    await workflows.add("x", ADD, "one")
    await workflows.add("x", ADD, "one")
    await workflows.add("x", FETCH, "two")
    await workflows.remove("x")
    await workflows.add("x", ADD)
    versions = await workflows.history("x")
    assert [(v["version"], v["change"], v["description"], v["source"]) for v in versions] == [
        (1, "added", "one", ADD),
        (2, "edited", "two", FETCH),
        (3, "removed", "", ""),
        (4, "added", "", ADD),
    ]
    assert [v["at"] for v in versions] == sorted(v["at"] for v in versions)
    assert await library(backend).history("x") == versions
    with pytest.raises(WorkflowNotFoundError):
        await workflows.history("missing")


async def test_an_edit_by_hand_is_a_version_once_it_is_read_or_called(backend: Backend) -> None:
    store, workflows = backend.open(), library(backend)
    readers: list[Callable[[], Awaitable[object]]] = [
        lambda: workflows.get("x"),
        lambda: workflows.begin("x"),
        lambda: workflows.history("x"),
    ]
    for number, read in enumerate(readers):
        await store.put("workflows/x.py", f"def run(): return {number}".encode())
        await read()
    assert [v["source"] for v in await library(backend).history("x")] == [f"def run(): return {n}" for n in range(3)]


async def test_a_version_by_hand_is_recorded_before_it_is_replaced_or_removed(backend: Backend) -> None:
    store = backend.open()
    await store.put("workflows/x.py", b"def run(): return 'by hand'")
    await library(backend).add("x", ADD)
    await store.put("workflows/x.py", b"def run(): return 'again'")
    await library(backend).remove("x")
    found = [v["source"] for v in await library(backend).history("x")]
    assert found == ["def run(): return 'by hand'", ADD, "def run(): return 'again'", ""]


async def test_a_damaged_line_of_the_history_is_skipped(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("x", ADD)
    await backend.open().append("library/workflows/history.jsonl", [b'{"name":"x",damaged', b"\xff"])
    await workflows.add("x", FETCH)
    assert [v["source"] for v in await library(backend).history("x")] == [ADD, FETCH]


@pytest.mark.promise("between processes")
async def test_several_processes_edit_one_workflow(backend: Backend) -> None:
    program = """
import asyncio, json, sys
from carrel.library.workflows import WorkflowLibrary
from tests.support.stores import open_store
async def main():
    store = open_store(json.loads(sys.argv[1]))
    workflows = WorkflowLibrary(store)
    for turn in range(6):
        label = f"{sys.argv[2]} {turn}"
        await workflows.add("shared", f"def run():\\n    return {label!r}\\n" + f"# {label}\\n" * 300, label)
        await workflows.begin("shared")
        await workflows.close()
    await store.close()
asyncio.run(main())
"""
    others = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, json.dumps(backend.address), str(n), cwd=Path(__file__).parents[2]
        )
        for n in range(3)
    ]
    async with asyncio.timeout(100):
        assert [await other.wait() for other in others] == [0, 0, 0]
    found = await library(backend).get("shared")
    assert found is not None
    assert found["source"].count(f"# {found['description']}\n") == 300
    assert found["usage"]["calls"] == 18
    versions = await library(backend).history("shared")
    assert sorted(v["description"] for v in versions) == sorted(f"{n} {turn}" for n in range(3) for turn in range(6))
    assert versions[-1]["source"] == found["source"]


async def test_calls_are_counted(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("x", ADD)
    for error in (None, "ValueError: no", None):
        await workflows.begin("x")
        workflows.ended("x", seconds=0.5, error=error)
    await workflows.close()
    usage = ((await library(backend).get("x")) or {})["usage"]
    assert (usage["calls"], usage["failures"], usage["seconds"]) == (3, 1, 1.5)
    assert usage["last_error"]["message"] == "ValueError: no"
    assert usage["last_used"] >= usage["last_error"]["at"]


async def test_counts_of_several_sessions_add_up(backend: Backend) -> None:
    await library(backend).add("x", ADD)

    async def call(error: str | None) -> None:
        workflows = library(backend)
        await workflows.begin("x")
        workflows.ended("x", error=error)
        await workflows.close()

    await asyncio.gather(*(call("E" if n % 2 else None) for n in range(10)))
    usage = ((await library(backend).get("x")) or {})["usage"]
    assert (usage["calls"], usage["failures"]) == (10, 5)


async def test_concurrent_additions_leave_one_complete_workflow(backend: Backend) -> None:
    sources = [f"def run():\n    return {n}\n" + f"# {n}\n" * 500 for n in range(8)]
    await asyncio.gather(*(library(backend).add("x", source, f"n{n}") for n, source in enumerate(sources)))
    found = await library(backend).get("x")
    assert found is not None
    assert found["source"] in sources
    assert found["description"] == f"n{sources.index(found['source'])}"
    versions = await library(backend).history("x")
    assert sorted(v["source"] for v in versions) == sorted(sources)
    assert versions[-1]["source"] == found["source"]
    assert len({v["version"] for v in versions}) == len(sources)


# --- finding and calling ---------------------------------------------------------------------------------------------


async def test_readers_record_no_version_twice(backend: Backend) -> None:
    writer = library(backend)
    await writer.add("w", "def run(): return 0")
    over = asyncio.Event()

    async def read() -> None:
        reader = library(backend)
        while not over.is_set():
            await reader.get("w")
            await asyncio.sleep(0)

    readers = [asyncio.create_task(read()) for _ in range(4)]
    for number in range(1, 41):
        await writer.add("w", f"def run(): return {number}")
    over.set()
    await asyncio.gather(*readers)
    kept = [version["source"] for version in await writer.history("w")]
    assert kept == [f"def run(): return {number}" for number in range(41)]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1, "long", None, [1]])
async def test_counts_with_invalid_arguments_of_code(backend: Backend, seconds: Any) -> None:
    workflows = library(backend)
    await workflows.add("w", ADD)
    await workflows.begin("w")
    await workflows.handle("workflows.ended", ["w"], {"seconds": seconds, "error": "half \ud83d pair"})
    await workflows.handle("workflows.ended", ["no_such"], {"seconds": 1.0})
    await workflows.handle("workflows.ended", ["\ud83d" * 5000], {})
    await workflows.close()
    used = ((await library(backend).get("w")) or {})["usage"]
    assert (used["calls"], used["failures"], used["last_error"]["message"]) == (1, 1, "half ? pair")
    assert 0 <= used["seconds"] < math.inf
    assert list(json.loads(await backend.open().get("library/workflows/usage.json") or b"")) == ["w"]


@pytest.mark.parametrize(
    "damaged",
    [b"{", b"[1]", b'{"w": 5}', b'{"w": {"calls": "x", "seconds": null, "failures": 1e300, "last_error": 7}}'],
)
async def test_damaged_counts_start_again(backend: Backend, damaged: bytes) -> None:
    workflows = library(backend)
    await workflows.add("w", ADD)
    await backend.open().put("library/workflows/usage.json", damaged)
    assert ((await workflows.get("w")) or {})["usage"]["calls"] == 0
    await workflows.begin("w")
    await workflows.close()
    assert ((await library(backend).get("w")) or {})["usage"]["calls"] == 1


async def test_large_sources_are_refused_and_listings_are_bounded(backend: Backend) -> None:
    workflows = library(backend)
    for source, description in ((ADD + "#" * 300_000, ""), (ADD, "d" * 5000)):
        with pytest.raises(WorkflowValidationError, match="at most"):
            await workflows.add("w", source, description)
    await backend.open().put("workflows/by_hand.py", b"x = 1\n" * 11_000 + ADD.encode())
    ones = "1," * 16_000
    await workflows.add("w", f"def run(a=[{ones}], b: '{'t' * 9000}' = 2, c=0x{'f' * 20_000}): pass", "Many ones")
    (by_hand, shown) = await workflows.list()
    assert "longer than" in by_hand["error"]
    assert [parameter["default"] for parameter in shown["parameters"]] == ["…", 2, "…"]
    assert len(shown["parameters"][1]["type"]) <= 2000
    assert [found["name"] for found in await workflows.search("many ones " * 100_000)][:1] == ["w"]
    with pytest.raises(WorkflowNotFoundError) as unknown:
        await workflows.begin("a" * 3_000_000)
    assert len(str(unknown.value)) < 1000


async def test_search_compares_name_description_and_parameters(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("fetch", FETCH)
    await workflows.add("total", ADD, "Adds two numbers up")
    await workflows.add("resize", "def run(picture_path): pass", "Make an image smaller")
    assert (await workflows.search("numbers"))[0]["name"] == "total"
    assert (await workflows.search("fetch"))[0]["name"] == "fetch"
    assert (await workflows.search("picture_path"))[0]["name"] == "resize"
    assert len(await workflows.search("make an image smaller", limit=1)) == 1
    await workflows.remove("total")
    assert "total" not in [found["name"] for found in await workflows.search("numbers")]


async def test_a_call_gets_the_source_only_if_it_does_not_know_it(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("x", ADD)
    first = await workflows.begin("x")
    assert first["source"] == ADD
    assert "source" not in await workflows.begin("x", known=first["digest"])
    await workflows.add("x", FETCH)
    assert (await workflows.begin("x", known=first["digest"]))["source"] == FETCH


async def test_a_wrong_name_is_an_error_with_a_similar_one(backend: Backend) -> None:
    workflows = library(backend)
    await workflows.add("fetch_json", ADD)
    with pytest.raises(WorkflowNotFoundError, match="did you mean fetch_json"):
        await workflows.begin("fetch_jsn")


async def test_calls_of_code(backend: Backend) -> None:
    call = library(backend).handle
    assert (await call("workflows.create", ["x", ADD], {"description": "d"}))["name"] == "x"
    assert [w["name"] for w in await call("skills.list", [], {})] == ["x"]
    assert (await call("workflows.search", ["x"], {"limit": 1}))[0]["description"] == "d"
    assert (await call("workflows.get", ["x"], {}))["source"] == ADD
    assert len(await call("workflows.history", ["x"], {})) == 1
    assert await call("workflows.delete", ["x"], {}) is True
    with pytest.raises(WorkflowNotFoundError):
        await call("workflows.close", [], {})
    with pytest.raises(ValueError, match="must be a str"):
        await call("workflows.get", [None], {})


# --- skills with a folder --------------------------------------------------------------------------------------------

SKILL = """---
name: pdf-forms
description: Fill forms: use when a PDF has fields.
license: MIT
---

# PDF forms

Read `forms.md` first.
"""


async def test_a_skill_is_read_and_its_scripts_are_called(backend: Backend) -> None:
    store = backend.open()
    await store.put("skills/pdf-forms/SKILL.md", SKILL.encode())
    await store.put("skills/pdf-forms/forms.md", b"about forms")
    await store.put("skills/pdf-forms/scripts/fill.py", b'"""Fill it."""\ndef run(path): return path')
    await store.put("skills/pdf-forms/scripts/shell.py", b"import sys\nprint(sys.argv)\n")
    await store.put("skills/no-skill/tool.py", ADD.encode())
    workflows = library(backend)
    listed = {found["name"]: found for found in await workflows.list()}
    assert set(listed) == {"pdf-forms", "pdf_forms.fill"}
    assert listed["pdf-forms"]["kind"] == "instructions"
    assert listed["pdf-forms"]["description"] == "Fill forms: use when a PDF has fields."
    found = await workflows.get("pdf-forms")
    assert found is not None
    assert found["source"].startswith("# PDF forms")
    assert found["files"] == ["forms.md", "scripts/fill.py", "scripts/shell.py"]
    assert found["front_matter"]["license"] == "MIT"
    assert await workflows.read("pdf_forms", "forms.md") == "about forms"
    assert (await workflows.begin("pdf_forms.fill"))["source"].endswith("return path")
    with pytest.raises(WorkflowExecutionError, match="cannot be called"):
        await workflows.begin("pdf_forms")
    assert (await workflows.search("PDF fields"))[0]["name"] == "pdf-forms"
    for path in ("../../secret", "missing", "/etc/passwd"):
        with pytest.raises((WorkflowNotFoundError, ValueError)):
            await workflows.read("pdf-forms", path)
    assert await workflows.remove("pdf-forms")
    assert await workflows.list() == []


async def test_a_workflow_in_a_folder_without_skill_file_is_not_listed(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    store = backend.open()
    await store.put("workflows/sub/x.py", ADD.encode())
    await store.put("workflows/sub/data.py", b"DATA = 1\n")
    await store.put("skills/pdf-forms/SKILL.md", SKILL.encode())
    await store.put("skills/pdf-forms/fill.py", ADD.encode())
    workflows = library(backend)
    for _ in range(2):
        assert [one["name"] for one in await workflows.list()] == ["pdf-forms", "pdf_forms.fill"]
        await workflows.add("other", ADD)
        await workflows.remove("other")
    messages = [record.getMessage() for record in caplog.records if "not a workflow" in record.getMessage()]
    assert messages == ["workflows/sub/x.py is not a workflow: its folder has no SKILL.md; move it to workflows/x.py"]


async def test_only_the_host_removes_a_skill_and_its_folder_is_kept(backend: Backend) -> None:
    store = backend.open()
    workflows = library(backend)
    for _ in range(2):
        await store.put("skills/pdf-forms/SKILL.md", SKILL.encode())
        await store.put("skills/pdf-forms/assets/form.bin", b"\xff\x00" * 5)
        with pytest.raises(WorkflowValidationError, match="pdf-forms is a skill with a folder of files"):
            await workflows.handle("workflows.delete", ["pdf_forms"], {})
        assert await store.get("skills/pdf-forms/SKILL.md") == SKILL.encode()
        assert await workflows.remove("pdf-forms")
        assert await store.list("skills") == []
        assert await workflows.list() == []
    history = await workflows.history("pdf-forms")
    assert [version["change"] for version in history] == ["added", "removed"] * 2
    assert history[0]["source"] == SKILL
    assert history[1]["files"] != history[3]["files"]
    for removed in (history[1], history[3]):
        assert await store.get(f"{removed['files']}/SKILL.md") == SKILL.encode()
        assert await store.get(f"{removed['files']}/assets/form.bin") == b"\xff\x00" * 5


async def test_code_deletes_a_workflow_and_a_skill_of_its_name_stays(backend: Backend) -> None:
    store = backend.open()
    await store.put("skills/pdf/SKILL.md", b"---\nname: pdf\ndescription: d\n---\nhi")
    await store.put("skills/pdf.py", ADD.encode())
    workflows = library(backend)
    await workflows.add("pdf", ADD)
    await store.put("workflows/pdf.py", ADD.encode())
    assert await workflows.handle("workflows.delete", ["pdf"], {}) is True
    assert await store.list("skills") == ["skills/pdf/SKILL.md"]
    assert await store.list("workflows") == []


async def test_unusual_skill_files(backend: Backend) -> None:
    store = backend.open()
    await store.put("skills/a/SKILL.md", b"no front matter\nat all")
    await store.put("skills/b/SKILL.md", b"---\n- a\n- list\n---\n")
    await store.put("skills/c/SKILL.md", b"\xff\xfe")
    await store.put("skills/d/SKILL.md", b"---\ndescription: >\n  folded\n  text\n---\nbody")
    listed = {found["name"]: found for found in await library(backend).list()}
    assert listed["a"]["description"] == "no front matter"
    assert "error" in listed["b"]
    assert "error" in listed["c"]
    assert listed["d"]["description"] == "folded text"


# --- many ------------------------------------------------------------------------------------------------------------


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)


@pytest.mark.parametrize(
    ("front", "why"),
    [
        (f"{LAUGHS}description: *a11\n", "alias"),
        (f"description: d\n{LAUGHS}", "alias"),
        ("m: &m {a: *m}\ndescription: d\n", "alias"),
        (f"description: {'x' * 100_000}\n", "longer than"),
        (f"deep: {'[' * 10_000}\ndescription: d\n", "too deeply"),
        (f"name: a: b\ndescription: {' ' * 7000}x{' ' * 7000}y\n", ""),
        (f"number: {'9' * 5000}\n", "digits"),
    ],
    ids=["laughs", "laughs elsewhere", "itself", "long", "deep", "spaces", "digits"],
)
async def test_a_hostile_skill_file_does_not_affect_others(backend: Backend, front: str, why: str) -> None:
    store = backend.open()
    await store.put("skills/pdf/SKILL.md", f"---\nname: pdf\n{front}---\nhi".encode())
    await store.put("workflows/add.py", ADD.encode())
    workflows = library(backend)
    shown = {found["name"]: found for found in await workflows.list()}
    assert "error" not in shown["add"]
    if why:
        assert why in shown["pdf"]["error"]
        with pytest.raises(WorkflowValidationError, match=why):
            await workflows.get("pdf")


async def test_only_files_in_the_folder_of_a_skill_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "base" / "skills" / "pdf"
    folder.mkdir(parents=True)
    (tmp_path / "private").write_text("def run(): return 'secret'")
    (folder / "SKILL.md").write_text("---\nname: pdf\ndescription: d\n---\nhi")
    (folder / "own.txt").write_text("mine")
    (folder / "notes.txt").symlink_to(tmp_path / "private")
    (tmp_path / "base" / "workflows").mkdir()
    (tmp_path / "base" / "workflows" / "linked.py").symlink_to(tmp_path / "private")
    workflows = WorkflowLibrary(FileStore(tmp_path / "base"))
    assert await names(workflows) == ["pdf"]
    assert ((await workflows.get("pdf")) or {})["files"] == ["own.txt"]
    assert await workflows.read("pdf", "own.txt") == "mine"
    for path in ("notes.txt", "../x", "../pdf/own.txt", "/etc/passwd", "a" * 3_000_000, ""):
        with pytest.raises(WorkflowNotFoundError, match="the skill pdf has no file") as refused:
            await workflows.read("pdf", path)
        assert str(tmp_path) not in str(refused.value)
        assert len(str(refused.value)) < 1000
    with pytest.raises(WorkflowNotFoundError):
        await workflows.begin("linked")


async def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "x.py").write_text(ADD)
    (tmp_path / "library").write_text("a file where notes would go")
    workflows = WorkflowLibrary(FileStore(tmp_path))
    assert await names(workflows) == ["x"]
    assert (await workflows.begin("x"))["source"] == ADD
    await workflows.close()


async def test_an_edit_in_place_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "workflows" / "x.py"
    path.parent.mkdir()
    path.write_text("def run(a): pass")
    workflows = WorkflowLibrary(FileStore(tmp_path))
    assert [p["name"] for p in (await workflows.list())[0]["parameters"]] == ["a"]
    path.write_text("def run(b): pass")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))  # the kernel's clock ticks in steps
    assert [p["name"] for p in (await workflows.list())[0]["parameters"]] == ["b"]
    await workflows.close()


@pytest.mark.parametrize("description", ["Other", "Says so itself."])
async def test_a_last_comment_that_looks_like_a_description_stays_in_the_source(
    backend: Backend, description: str
) -> None:
    source = 'def run():\n    """Says so itself."""\n    return 1\n# description: keep me\n'
    await library(backend).add("g", source, description)
    found = await library(backend).get("g")
    assert found is not None
    assert (found["source"], found["description"]) == (source, description)
    # Adding again what was read changes nothing.
    await library(backend).add("g", found["source"], found["description"])
    assert await library(backend).get("g") == found
