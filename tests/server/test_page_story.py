"""The web page as a person uses it, in a real browser: look, compare, answer, go back, and keep a copy."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright import sync_api

from tests.server.conftest import NewServer
from tests.server.test_approvals import ECHO, Call, pending
from tests.support.missing_parts import skip_without
from tests.support.server_process import ServerProcess, create_session

pytestmark = pytest.mark.real
SAMPLES = Path(__file__).parent.parent / "importers" / "samples"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        skip_without("no Chromium on this machine: `apt install chromium`")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def carrel(*words: object) -> str:
    command = [sys.executable, "-m", "carrel", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def press(page: Any, *keys: str) -> None:
    page.wait_for_load_state()  # The script runs at the end.
    for key in keys:
        page.keyboard.press(key)


def test_sessions_of_other_agents_and_a_task_with_two_attempts(browser: Any, tmp_path: Path) -> None:
    base = tmp_path / "base"
    for agent in ("claude-code", "codex", "pi"):
        carrel("sessions", "import", SAMPLES / agent, "--base", base)
    carrel("task", "run", "demo", "calc-1", "--attempts", 2, "--agent", "sed -i s/if/while/ calc.py", "--base", base)
    command = [sys.executable, "-m", "carrel", "web", "--json", "--base", str(base)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving, contextlib.ExitStack() as stack:
        stack.callback(serving.terminate)
        assert serving.stdout is not None
        link = json.loads(serving.stdout.readline())["url"]
        url = link.partition("/enter#")[0]
        page = browser.new_page(accept_downloads=True)
        page.goto(link)
        page.wait_for_url(f"{url}/")
        # The list: three agents' sessions; `j` goes through them, `Enter` opens one.
        assert page.locator("tbody tr").count() >= 5
        press(page, "j", "Enter")
        page.wait_for_url("**/s/**")
        press(page, "g")
        page.wait_for_url(f"{url}/")
        # The run: two attempts, each with its verdict, and what was run in it.
        page.get_by_role("link", name="Task runs").click()
        page.locator("tbody a").first.click()
        assert page.locator("tbody td").count() == 2
        page.locator("tbody td a").first.click()
        assert "verify" in page.inner_text("table")
        press(page, "f")
        page.wait_for_url("**/files")
        assert "calc.py" in page.inner_text("main")
        # Fork one of the imported conversations, with the keyboard alone.
        page.goto(f"{url}/")
        imported = page.locator("tbody tr:has(td[data-label=Messages]:not(:empty)) a").first
        imported.click()
        original = page.locator("[data-session]").get_attribute("data-session")
        page.get_by_role("button", name="Fork").focus()
        press(page, "Enter")
        page.wait_for_function("id => !location.pathname.endsWith(id)", arg=original)
        press(page, "t")
        page.wait_for_url("**/tree")
        assert page.locator("tr.here").count() == 1
        # Label an entry, and rewind to it: the page in between says what would be set aside.
        press(page, "o")
        page.wait_for_selector(".conversation")
        page.get_by_label("Label for an entry").fill("good so far")
        page.get_by_label("Entry", exact=True).fill("1")
        press(page, "Enter")
        page.wait_for_selector("text=good so far")
        press(page, "t")
        page.get_by_role("link", name="Rewind to here").click()
        assert "would set aside" in page.inner_text("main")
        page.get_by_role("button", name="Rewind").click()
        page.wait_for_selector("text=Rewound to right after entry 1")
        # Compare the fork with what it came from: `x` marks, `c` compares.
        press(page, "x")
        page.goto(f"{url}/s/{original}")
        press(page, "c")
        page.wait_for_url("**/compare?**")
        assert "in common" in page.inner_text("main")
        # Keep a copy, which needs nothing else.
        page.goto(f"{url}/s/{original}")
        with page.expect_download() as download:
            page.get_by_role("link", name="Save as one file").click()
        assert "<article" in Path(download.value.path()).read_text()
        page.close()


@pytest.fixture
def server(new_server: NewServer, tmp_path: Path) -> ServerProcess:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "echo.yaml").write_text(ECHO)
    return new_server("--tools", tmp_path / "tools")


def test_an_approval_a_rewind_and_a_restart(browser: Any, server: ServerProcess) -> None:
    url = server.url.removesuffix("/api/v1")
    page = browser.new_page()
    page.goto(f"{url}/")
    page.get_by_label("API key").fill(server.key)
    press(page, "Enter")
    page.wait_for_url(f"{url}/")
    with server.client() as client:
        session = create_session(client)
        say(client, session, "begin")
        client.post(f"/sessions/{session}/run", json={"code": "x = 1"})
        # An approval, with changed arguments.
        call = Call(server, session)
        pending(client)
        page.goto(f"{url}/")
        page.get_by_role("link", name="1 call waits").click()
        page.get_by_text("Change the arguments").click()
        page.get_by_label("Arguments, as JSON").fill('{"text": "changed"}')
        page.get_by_role("button", name="Approve").click()
        page.wait_for_selector("text=approved")
        assert "changed" in str(call.wait()["value"])
        # A checkpoint, and what a rewind to it would undo in all three.
        page.goto(f"{url}/s/{session}/tree")
        page.get_by_label("Label").fill("before")
        with page.expect_navigation():
            press(page, "Enter")
        page.goto(f"{url}/s/{session}/tree")
        say(client, session, "too much")
        client.post(f"/sessions/{session}/run", json={"code": "x = 2; open('new.txt', 'w').write('n')"})
        page.get_by_role("link", name="Rewind to here").click()
        undone = page.inner_text("main")
        assert "1 message" in undone
        assert "too much" in undone
        assert "new.txt" in undone
        page.get_by_role("button", name="Rewind").click()
        page.wait_for_url(f"{url}/s/{session}")
        page.goto(f"{url}/s/{session}/variables")
        assert page.locator("tr", has_text="x").last.inner_text().split()[-2] == "1"
        # An open page continues after the server was killed and started again.
        page.goto(f"{url}/s/{session}")
        server.kill()
        server.start()
    with server.client() as client:
        say(client, session, "after the restart")
        page.wait_for_selector("article >> text=after the restart", timeout=60_000)
    page.close()


def say(client: httpx.Client, session: str, text: str) -> None:
    answer = client.post(f"/sessions/{session}/conversation", json={"messages": [{"role": "user", "content": text}]})
    assert answer.status_code == 200, answer.text
