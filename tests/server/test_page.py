"""The web page: what it shows to whom, that nothing in a session can act on its reader, and its actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from starlette.applications import Starlette

from carrel import SessionStore
from carrel.conversation.messages import (
    assistant_message,
    build_message,
    text_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.server.web.archive import Archive, Runs
from carrel.server.web.comparison import align_steps, compare_diffs, compare_tests
from carrel.server.web.login import Logins
from carrel.server.web.pages import Pages
from carrel.session import FileStorage
from carrel.storage.memory import MemoryStore
from carrel.tasks import RunFolder, RunInfo, TaskResult
from carrel.wire.answers import FileChangeRecord, WorkspaceDiff
from carrel.wire.verification import VerificationResult
from tests.server.conftest import NewServer
from tests.support.missing_parts import skip_without
from tests.support.server_process import ServerProcess, create_session, logged_in

ATTACK = (
    "\"'><script>document.documentElement.dataset.ran=1</script><img src=x onerror='document.title=1'>"
    "</textarea></title>[a](javascript:alert(1)){{ 7 * 6 }}\x1b]0;x\x07\u202e\x00"
)
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


async def write_sessions(base: Path) -> None:
    async with SessionStore(base / "sessions") as store:
        await store.create_session(ATTACK, session_id="hostile", model=ATTACK)
        for number in range(150):
            call = tool_use_block(tool_id=f"c{number}", name=ATTACK, input={ATTACK: ATTACK})
            result = tool_result_block(tool_use_id=f"c{number}", model_text=ATTACK, is_error=number % 2 == 1)
            await store.append_many(
                "hostile",
                [
                    user_text_message(f"question {number} {ATTACK}"),
                    assistant_message([text_block(ATTACK), call]),
                    build_message("user", [result]),
                ],
            )
        await store.label("hostile", ATTACK, 3)
        await store.fork_session("hostile", 6, title=f"fork {ATTACK}")
        await store.create_session("main", session_id="main", tags=[ATTACK])
        await store.append_message("main", user_text_message("hello"))
    write_states(base / "sessions" / "main")
    trace = base / "sessions" / "traced" / "trace.jsonl"
    trace.parent.mkdir()
    step = {"id": "1", "kind": "run", "name": ATTACK, "started_at": "2026-01-01T10:00:00+00:00", "duration": 0.5}
    call_of_it = {**step, "id": "2", "kind": "call", "parent": "1", "outcome": "ok", "error": ATTACK}
    trace.write_text(f"{json.dumps(step)}\n{json.dumps(call_of_it)}\n")


def write_states(folder: Path) -> None:
    """What would have been recorded of a session whose names, values and files attack the reader."""
    variables = {ATTACK: [ATTACK, 1, ATTACK, "d"], "x": ["int", 28, "1", "e"], "rows": ["list", 80, "[1, 2]", "f"]}
    text = hashlib.sha256(ATTACK.encode()).hexdigest()
    files = {
        ATTACK: ["added", 10, text, ""],
        "kept.py": ["modified", 5, "~1", "~2"],
        "gone.py": ["deleted", 0, "", text],
    }
    lines = [
        {"at": 1.0, "seq": 1, "kind": "run", "step": ATTACK, "variables": {"set": variables}, "files": {"set": files}},
        {"at": 2.0, "seq": 1, "kind": "checkpoint", "point": "c", "label": ATTACK},
        {
            "at": 3.0,
            "seq": 1,
            "kind": "run",
            "step": "s",
            "variables": {"set": {"x": ["int", 28, "2", "g"]}, "gone": ["rows"]},
        },
        {"at": 4.0, "seq": 1, "kind": "command", "step": "t", "files": {"gone": ["kept.py"]}},
    ]
    (folder / "states.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "texts").mkdir()
    (folder / "texts" / text).write_text(f"{ATTACK}\nsecond line\n")


def write_run(runs: Path, name: str, outcomes: dict[str, list[str]]) -> None:
    attempts = max(map(len, outcomes.values()))
    run = RunFolder(runs / name)
    now = datetime.now(UTC)
    run.write_info(RunInfo(dataset="d", agent=ATTACK, attempts=attempts, samples=list(outcomes), started_at=now))
    with run.results_file.open("w") as file:
        for sample, found in outcomes.items():
            for attempt, outcome in enumerate(found, 1):
                verdict: dict[str, Any] = {"outcome": outcome, "is_success": outcome == "solved"}
                tests = {"passes" if outcome == "solved" else "failures": [{"name": "t"}]}
                result = TaskResult(
                    dataset="d",
                    sample_id=sample,
                    attempt=attempt,
                    started_at=now,
                    verdict=VerificationResult(**verdict, **tests),
                    **verdict,
                )
                file.write(result.model_dump_json() + "\n")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    asyncio.run(write_sessions(folder))
    write_run(folder / "runs", "first", {"a": ["solved", "not_solved"], "b": ["not_solved", "not_solved"]})
    write_run(folder / "runs", "second", {"a": ["solved", "solved"], "b": ["not_solved", "not_solved"]})
    return folder


@pytest.fixture
async def page(base: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with logged_in_to(base) as client:
        yield client


@asynccontextmanager
async def logged_in_to(base: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The page of a base folder, logged in."""
    logins = Logins(MemoryStore(), None, may_act=True)
    runs = Runs(base / "runs")
    archive = Archive(FileStorage(base), runs=runs)
    app = Starlette(routes=Pages({"local": archive}, logins, host="127.0.0.1", runs=runs).routes())
    url = "http://127.0.0.1"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url, headers={"Origin": url}) as client:
        entered = await client.post("/enter", data={"key": await logins.new_link()})
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        yield client
    await archive.conversations.close()


ACTIVE = re.compile(r"<script(?! src=\"/page.js\" defer>)|<img|<svg onload|href=\"javascript:|[\x00\x1b\u202e]")
PAGES = ["/", "/?q=question", "/s/hostile", "/s/hostile?at=3", "/s/hostile/tree", "/s/hostile/trace"]
PAGES += ["/s/hostile/files", "/s/main/tree", "/s/main/variables", "/s/main/variables?from=start&at=c", "/s/main/share"]
PAGES += ["/s/main/files?at=c", "/s/main/files?from=c", "/s/main/files/gone.py", "/s/main/variables?at=nowhere"]
PAGES += ["/s/hostile/outline", "/s/hostile?show=calls", "/s/hostile?show=all", "/s/traced/outline"]
PAGES += ["/?kind=fork", "/?tag=none", "/compare?a=main@start&b=main@c", "/compare?a=main@c&b=hostile@3"]
PAGES += [
    "/s/hostile/verdicts",
    "/s/traced",
    "/s/traced/trace",
    "/tasks",
    "/tasks/first",
    "/tasks/first/a",
    "/tasks/first/none",
    "/tasks/compare?a=first&b=second",
]
PAGES += [
    "/compare?a=hostile&b=traced",
    "/compare?a=hostile@5&b=hostile",
    "/waiting",
    "/s/%3Cscript%3E",
    "/tasks/nope",
    "/?page=x",
]


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_in_a_session_reaches_the_page_as_code(page: httpx.AsyncClient, path: str) -> None:
    answer = await page.get(path)
    assert answer.status_code in (200, 404, 422)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not ACTIVE.search(answer.text)
    data = await page.get(path, headers={"Accept": "application/json"})
    assert data.status_code == answer.status_code
    json.loads(data.content)


async def test_a_long_conversation_is_shown_in_windows_from_its_end(page: httpx.AsyncClient) -> None:
    async def shown(query: str) -> list[int]:
        text = (await page.get(f"/s/hostile{query}")).text
        return [int(number) for number in re.findall(r'id="entry-(\d+)"', text)]

    end = await shown("")
    assert (end[0] >= 252, end[-1] >= 448) == (True, True)
    older = await shown("?before=252")
    assert (older[0], 52 <= older[0] <= 54, older[-1] <= 251) == (older[0], True, True)
    assert 100 in await shown("?at=100")
    newer = await shown("?after=100")
    assert (newer[0], newer[-1] <= 300) == (101, True)
    assert len(await shown("?show=errors")) == 75
    data = (await page.get("/s/hostile", headers={"Accept": "application/json"})).json()
    assert (data["last_seq"], len(data["entries"])) == (451, 200)


async def test_a_page_stays_small_whatever_an_entry_contains(tmp_path: Path) -> None:
    image = {"type": "image", "mime_type": "image/png", "data": "A" * 3_000_000}
    result = tool_result_block(tool_use_id="c", model_text="start " + "x" * 5_000_000 + " end", content=[image])
    async with SessionStore(tmp_path / "sessions") as store:
        await store.create_session("large", session_id="large", model="m")
        await store.append_message("large", build_message("user", [result]))
    async with logged_in_to(tmp_path) as page:
        answer = await page.get("/s/large")
        assert len(answer.content) < 100_000
        assert ("start" in answer.text, "4,980,010 characters left out" in answer.text) == (True, True)
        whole = await page.get("/s/large", headers={"Accept": "application/json"})
        assert len(whole.content) > 8_000_000


async def test_lists_trees_traces_and_runs(page: httpx.AsyncClient) -> None:
    rows = (await page.get("/", headers={"Accept": "application/json"})).json()["rows"]
    assert {row["id"] for row in rows} >= {"hostile", "traced"}
    family = (await page.get("/s/hostile/tree", headers={"Accept": "application/json"})).json()["family"]
    assert [(each["depth"], each["kind"], each["seq"]) for each in family][:3] == [
        (0, "session", 0),
        (1, "label", 3),
        (1, "session", 6),
    ]
    assert family[2]["session"]["parent"] == "hostile"
    steps = (await page.get("/s/traced/trace", headers={"Accept": "application/json"})).json()["steps"]
    assert [(step["kind"], step["depth"]) for step in steps] == [("run", 0), ("call", 1)]
    run = (await page.get("/tasks/first")).text
    assert run.count("flaky") == 1
    assert "pass@2" in run
    sample = (await page.get("/tasks/first/a", headers={"Accept": "application/json"})).json()
    assert sample["tests"] == [["t", ["passed", "failed"]]]
    compared = (await page.get("/tasks/compare?a=first&b=second", headers={"Accept": "application/json"})).json()
    assert compared["comparison"]["better"] == ["a"]


async def test_a_large_tree_is_shown_around_its_session(tmp_path: Path) -> None:
    async with SessionStore(tmp_path / "sessions") as store:
        await store.create_session("root", session_id="root")
        await store.append_message("root", user_text_message("one"))
        for number in range(250):
            await store.fork_session("root", new_id=f"fork-{number:03}", load=False)
    async with logged_in_to(tmp_path) as page:
        last = (await page.get("/s/fork-249/tree")).text
        assert ("/s/fork-249/tree" in last, "/s/fork-000/tree" in last) == (True, False)
        assert "?first=1" in last
        assert "/s/fork-000/tree" in (await page.get("/s/fork-249/tree?first=1")).text
        data = (await page.get("/s/root/tree", headers={"Accept": "application/json"})).json()
        assert (data["first"], data["sessions"], len(data["family"])) == (1, 251, 200)
        forked = await page.post("/s/root/do/fork", data={"at": "1"})
        id_ = forked.headers["location"].removeprefix("/s/")
        assert id_ in (await page.get(f"/s/{id_}/tree")).text, "at once, although the list is kept for two seconds"


async def test_two_sessions_are_compared(page: httpx.AsyncClient) -> None:
    family = (await page.get("/s/hostile/tree", headers={"Accept": "application/json"})).json()["family"]
    fork = next(each["session"]["id"] for each in family if each["session"]["parent"] == "hostile")
    text = (await page.get(f"/compare?a=hostile&b={fork}")).text
    assert "6 entries in common" in text
    data = (await page.get(f"/compare?a=hostile@9&b={fork}@6", headers={"Accept": "application/json"})).json()
    assert (data["common"], [pair["kind"] for pair in data["conversation"]]) == (6, ["only_a"] * 3)
    assert (await page.get("/compare?a=hostile@x&b=hostile")).status_code == 404
    assert (await page.get("/compare?a=hostile")).status_code == 404


def test_what_differs_in_two_sessions() -> None:
    say = [(seq, user_text_message(text)) for seq, text in enumerate(("one", "two", "three"), 1)]
    pairs = align_steps(say, [say[0], (2, user_text_message("other")), *say[2:], (4, user_text_message("more"))])
    assert [pair.kind for pair in pairs] == ["same", "differs", "same", "only_b"]

    def changed(path: str, line: str) -> WorkspaceDiff:
        diff = f"diff --git a/{path} b/{path}\n+{line}\n"
        return WorkspaceDiff(diff=diff, changes=[FileChangeRecord(path=path, kind="added", size=len(line))])

    assert [pair.kind for pair in compare_diffs(changed("x", "1"), changed("x", "2"))] == ["differs"]
    assert [pair.kind for pair in compare_diffs(changed("x", "1"), changed("x", "1"))] == ["same"]
    assert [pair.kind for pair in compare_diffs(changed("x", "1"), None)] == ["only_a"]

    def verdict(**tests: list[str]) -> VerificationResult:
        return VerificationResult(**{kind: [{"name": name} for name in names] for kind, names in tests.items()})

    tests = compare_tests(verdict(passes=["a", "b"], failures=["c"]), verdict(passes=["a", "c"], skips=["d"]))
    kinds = {"c": "differs", "b": "only_a", "d": "only_b", "a": "same"}
    assert {pair.name: pair.kind for pair in tests} == kinds
    assert tests[-1].name == "a", "what differs comes first"


async def test_actions_on_a_base_folder(page: httpx.AsyncClient) -> None:
    labelled = await page.post("/s/hostile/do/label", data={"text": "see here", "at": "4"})
    assert labelled.status_code == 303
    assert "see here" in (await page.get("/s/hostile/tree")).text
    forked = await page.post("/s/hostile/do/fork", data={"at": "3"})
    assert (await page.get(forked.headers["location"])).status_code == 200
    fork = forked.headers["location"]
    assert (await page.get(f"{fork}/rewind?to=2")).text.count("<li>") == 1
    assert (await page.post(f"{fork}/do/rewind", data={"to": "2"})).status_code == 303
    assert "Rewound to right after entry 2" in (await page.get(fork)).text
    assert (await page.post(f"{fork}/do/rewind", data={"to": "x"})).status_code == 409
    assert (await page.post("/s/hostile/do/close")).status_code == 409, "no server runs here"
    assert (await page.post("/s/hostile/do/fly")).status_code == 404


async def test_requests_that_are_refused(page: httpx.AsyncClient, base: Path) -> None:
    for headers in ({"Host": "evil.example"}, {"Host": "evil.example:80"}):
        assert (await page.get("/", headers=headers)).status_code == 403
    for headers in ({"Origin": "http://evil.example"}, {"Origin": ""}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await page.post("/s/hostile/do/fork", headers=headers)).status_code == 403
    await page.post("/leave")
    for wanted, back in (("/s/hostile?at=3", "/s/hostile?at=3"), ("//evil.example", "/")):
        redirect = await page.get(wanted) if wanted == back else await page.get("/enter", params={"next": wanted})
        if wanted == back:
            assert httpx.URL(redirect.headers["location"]).params["next"] == back
        else:
            assert "evil" not in redirect.text
    assert (await page.get("/s/hostile", headers={"Accept": "application/json"})).status_code == 401
    codes = [(await page.post("/enter", data={"key": "guess"})).status_code for _ in range(30)]
    assert (codes[0], codes[-1]) == (401, 429)


async def test_a_link_logs_in_once() -> None:
    logins = Logins(MemoryStore(), None, may_act=True)
    token = await logins.new_link()
    assert await logins.enter("wrong", "a") is None
    cookie = await logins.enter(token, "a")
    assert cookie is not None
    assert await logins.enter(token, "a") is None
    assert await logins.enter(cookie, "a") is None, "a cookie is not a link"


async def test_links_and_logins_expire() -> None:
    now = [1000.0]
    store = MemoryStore()
    logins = Logins(store, None, may_act=True, clock=lambda: now[0])
    late, in_time = await logins.new_link(), await logins.new_link()
    assert await logins.enter(in_time, "a") is not None
    now[0] += 301
    assert await logins.enter(late, "a") is None
    now[0] += 13 * 3600
    assert await logins.enter(await logins.new_link(), "a") is not None
    assert len(await store.list("server/logins")) == 1, "what has expired is removed"


# --- the page of a server -------------------------------------------------------------------------------------------


def test_a_user_sees_and_changes_their_own_sessions(server: ServerProcess, client: httpx.Client) -> None:
    session = create_session(client, dataset="demo", sample_id="calc-1")
    client.post(f"/sessions/{session}/conversation", json={"messages": [{"role": "user", "content": "my question"}]})
    client.post(f"/sessions/{session}/exec", json={"command": "echo x > new"}, headers={"Prefer": "wait=30"})
    other, agent = server.add_key("other"), server.add_key("local", "--scope", "agent")
    with logged_in(server, server.key) as page:
        assert "demo / calc-1" in page.get("/").text
        assert "my question" in page.get(f"/s/{session}").text
        assert "+x" in page.get(f"/s/{session}/files").text
        assert page.get("/api/v1/sessions").status_code == 401, "the cookie opens pages only"
        assert page.post(f"/s/{session}/do/verify").headers["location"] == f"/s/{session}/verdicts"
        job = json.loads(page.get(f"/s/{session}/verdicts", headers={"Accept": "application/json"}).text)["verdicts"][0]
        client.get(f"/sessions/{session}/verify/{job['job_id']}", headers={"Prefer": "wait=55"})
        assert "not_solved" in page.get(f"/s/{session}/verdicts").text
        assert page.get(f"/s/{session}/numbers").json() == {"last_seq": 1, "state": "ready"}
        page.post(f"/s/{session}/do/checkpoint", data={"text": "here"})
        client.post(f"/sessions/{session}/conversation", json={"messages": [{"role": "user", "content": "too much"}]})
        back = f"/s/{session}/rewind?to="
        point = re.search(rf'href="{re.escape(back)}(\w+)"', page.get(f"/s/{session}/tree").text)
        assert point is not None
        assert "too much" in page.get(back + point[1]).text, "what would be undone"
        assert page.get(back + "nowhere").status_code == 404
        assert page.post(f"/s/{session}/do/rewind", data={"to": point[1]}).status_code == 303
        messages = client.get(f"/sessions/{session}/conversation").json()["messages"]
        assert [message["content"] for message in messages] == ["my question"]
        assert "before the rewind" in page.get(f"/s/{session}/tree").text
        assert page.post(f"/s/{session}/do/close").status_code == 303
        assert client.get(f"/sessions/{session}").json()["status"] == "closed"
        assert "+x" in page.get(f"/s/{session}/files").text, "a closed session keeps its diff"
        assert page.get("/tasks").status_code == 404
    with logged_in(server, other) as page:
        assert "calc-1" not in page.get("/").text
        assert "question" not in page.get("/?q=question").text.partition("<table>")[2]
        for path in ("", "/tree", "/trace", "/variables", "/files", "/verdicts", "/export.html", "/numbers"):
            assert page.get(f"/s/{session}{path}").status_code == 404
        server.keys("revoke", "other")
        assert page.get("/", headers={"Accept": "application/json"}).status_code in (200, 401)
    with logged_in(server, agent) as page:
        for path in ("", "/outline", "/tree", "/trace", "/variables", "/files", "/verdicts"):
            for accept in ("text/html", "application/json"):
                found = page.get(f"/s/{session}{path}", headers={"Accept": accept}).text
                assert not re.search("test_(?!suite)", found), f"an agent sees no tests, also at {path} as {accept}"
        assert page.post(f"/s/{session}/do/fork").status_code == 403


def test_a_session_is_shared_for_a_while(server: ServerProcess, client: httpx.Client) -> None:
    session, other = create_session(client), create_session(client)
    secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    say = {"messages": [{"role": "user", "content": f"the key is {secret}"}]}
    client.post(f"/sessions/{session}/conversation", json=say)
    client.post(f"/sessions/{session}/run", json={"code": f"key = {secret!r}\nopen('a', 'w').write(key)"})
    client.post(f"/sessions/{session}/checkpoints", json={"label": "c"})
    with logged_in(server, server.key) as page:
        assert page.post(f"/s/{session}/do/share", data={"days": "365"}).status_code == 422
        data = page.post(f"/s/{session}/do/share", data={"days": "1"}, headers={"Accept": "application/json"}).json()
        assert "until" in page.get(f"/s/{session}/share").text
        with logged_in(server, data["link"].partition("#")[2]) as guest:
            for path in ("", "/variables", "/files?at=c", "/files/a", "/trace", "/tree"):
                shown = guest.get(f"/s/{session}{path}")
                assert shown.status_code == 200
                assert secret not in shown.text, path
                twin = guest.get(f"/s/{session}{path}", headers={"Accept": "application/json"})
                assert secret not in twin.text, path
            assert "[redacted" in guest.get(f"/s/{session}").text
            assert guest.get(f"/s/{session}/files/a?download=1").headers["content-disposition"].startswith("attachment")
            assert secret not in guest.get(f"/s/{session}/files/a?download=1").text
            assert guest.get(f"/s/{other}").status_code == 404
            assert session in guest.get("/").text
            assert other not in guest.get("/").text
            for path in ("export.html", "share"):
                assert guest.get(f"/s/{session}/{path}").status_code == 403
            assert guest.post(f"/s/{session}/do/fork").status_code == 403
            page.post(f"/s/{session}/do/unshare")
            assert guest.get(f"/s/{session}", headers={"Accept": "application/json"}).status_code == 401
        assert "until" not in page.get(f"/s/{session}/share").text.partition("<main")[2]


async def test_a_share_expires() -> None:
    now = [1000.0]
    logins = Logins(MemoryStore(), None, may_act=True, clock=lambda: now[0])
    token = await logins.share("ada", "s1", 1)
    assert await logins.enter(token, "a") is not None
    assert await logins.enter(token, "b") is not None, "unlike a login link, it is not for once"
    assert await logins.enter("s2." + token.partition(".")[2], "a") is None
    assert await logins.enter("../x." + token.partition(".")[2], "a") is None
    assert len(await logins.shares("ada", "s1")) == 1
    assert await logins.shares("bob", "s1") == []
    await logins.end_shares("bob", "s1")
    now[0] += 86_401
    assert await logins.enter(token, "a") is None
    assert await logins.shares("ada", "s1") == []


async def test_filters_and_points_of_a_base_folder(page: httpx.AsyncClient) -> None:
    async def data(path: str) -> Any:
        return (await page.get(path, headers={"Accept": "application/json"})).json()

    listed = await data("/")
    assert listed["counts"]["kind"]["fork"] >= 1
    assert {row["parent"] for row in (await data("/?kind=fork"))["rows"]} == {"hostile"}
    assert [row["id"] for row in (await data(f"/?{urlencode({'tag': ATTACK})}"))["rows"]] == ["main"]
    assert (await data("/?tag=none"))["rows"] == []
    found = await data("/s/main/variables?from=c&at=now")
    assert {each["name"]: each["kind"] for each in found["variables"]} == {
        ATTACK: "same",
        "x": "changed",
        "rows": "gone",
    }
    files = await data("/s/main/files?from=start&at=c")
    assert sorted(change["kind"] for change in files["diff"]["changes"]) == ["added", "deleted", "modified"]
    assert "second line" in (await data(f"/s/main/files/{quote(ATTACK, safe='')}"))["text"]
    download = await page.get(f"/s/main/files/{quote(ATTACK, safe='')}?download=1")
    assert download.headers["content-type"] == "application/octet-stream"
    assert download.headers["content-security-policy"].startswith("sandbox")
    compared = await data("/compare?a=main@c&b=main")
    assert [(pair["name"], pair["kind"]) for pair in compared["variables"]][:2] == [
        ("rows", "only_a"),
        ("x", "differs"),
    ]
    assert [pair["kind"] for pair in compared["files"]] == ["differs", "same", "same"]
    tree = (await data("/s/main/tree"))["family"]
    assert [(node["kind"], node["point"], node["variables"], node["files"]) for node in tree] == [
        ("session", "", 0, 0),
        ("checkpoint", "c", 3, 3),
    ]
    undone = await data("/s/main/rewind?to=1")
    assert undone["undone"] == []


def test_what_the_page_may_do(new_server: NewServer) -> None:
    server = new_server("--page", "read")
    with server.client() as client:
        session = create_session(client)
    with logged_in(server, server.key) as page:
        assert page.post(f"/s/{session}/do/close").status_code == 403
        assert "/do/close" not in page.get(f"/s/{session}").text
    server.stop()
    server.options[:] = ["--page", "off"]
    server.start()
    assert httpx.get(server.url.removesuffix("/api/v1"), timeout=60).status_code == 404


def test_in_a_browser(base: Path, tmp_path: Path) -> None:
    """The link logs in, the page opens at its end, and nothing of a hostile session runs or breaks the policy."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        skip_without("no Chromium on this machine: `apt install chromium`")
    command = [sys.executable, "-m", "carrel", "web", "--json", "--base", str(base)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            link = json.loads(serving.stdout.readline())["url"].replace("/enter#", "/enter?next=/s/hostile#")
            options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--timeout=15000"]
            shown = subprocess.run(
                [program, *options, "--enable-logging=stderr", "--dump-dom", link],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
        finally:
            serving.terminate()
    assert "question 149" in shown.stdout, shown.stdout[:2000] + shown.stderr[-2000:]
    assert "data-ran" not in shown.stdout
    assert "Content Security Policy" not in shown.stderr
    assert "CONSOLE" not in shown.stderr
