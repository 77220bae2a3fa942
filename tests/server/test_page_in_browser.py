"""The web page in a real browser: accessibility, narrow screens, no script, the policy, and what happens live."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api

from carrel import SessionStore, user_text_message
from carrel.conversation.messages import assistant_message, build_message, tool_result_block, tool_use_block
from tests.server.test_page import write_run, write_sessions
from tests.support.missing_parts import skip_without

pytestmark = pytest.mark.real
PAGES = ["/enter", "/", "/?q=question", "/s/hostile?at=5", "/s/hostile/tree", "/s/hostile/files", "/s/hostile/verdicts"]
PAGES += ["/s/traced/trace", "/compare?a=hostile@20&b=traced", "/s/hostile/rewind?to=440", "/s/none", "/waiting"]
PAGES += ["/s/main/variables", "/s/main/variables?from=start&at=c", "/s/main/files?from=start&at=c"]
PAGES += ["/s/main/share", "/compare?a=main@start&b=main", "/s/main/tree", "/?kind=fork"]
PAGES += ["/s/hostile/outline", "/s/hostile/outline?from=300", "/s/hostile?show=calls,thinking", "/s/main?show=errors"]
PAGES += ["/tasks", "/tasks/first", "/tasks/first/a", "/tasks/compare?a=first&b=second"]


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread: the browser's driver has an event loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    run_apart(write_sessions(folder))
    write_run(folder / "runs", "first", {"a": ["solved", "not_solved"], "b": ["not_solved", "flaky"]})
    write_run(folder / "runs", "second", {"a": ["solved", "solved"], "b": ["not_solved", "partly"]})
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        skip_without("no Chromium on this machine: `apt install chromium`")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def login(base: Path, browser: Any) -> Iterator[tuple[str, Any]]:
    """The address of `carrel web`, and the cookie of a browser that has opened its link."""
    command = [sys.executable, "-m", "carrel", "web", "--json", "--base", str(base)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url, _, token = json.loads(serving.stdout.readline())["url"].partition("/enter#")
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/enter")
        page.goto(f"{url}/enter#{token}")
        page.wait_for_url(f"{url}/")
        yield url, context.storage_state()
        context.close()
        serving.terminate()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_every_page_is_accessible_and_fits(browser: Any, login: tuple[str, Any], scheme: str, width: int) -> None:
    axe = Axe()
    url, state = login
    size = {"width": width, "height": 900}
    # The policy refuses the script of axe; all other tests have it in force.
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport=size, storage_state=state)
    page = context.new_page()
    for path in PAGES:
        page.goto(url + path)
        found = axe.run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], path
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), path
    context.close()


def test_nothing_runs_or_is_fetched_from_elsewhere(browser: Any, login: tuple[str, Any]) -> None:
    url, state = login
    context = browser.new_context(storage_state=state)
    page = context.new_page()
    seen: list[str] = []
    page.on("console", lambda message: seen.append(message.text))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else seen.append(request.url))
    for path in PAGES[1:]:
        page.goto(url + path)
        assert page.evaluate("document.documentElement.dataset.ran") is None
        seen = [text for text in seen if "404" not in text]
        assert seen == [], path
    context.close()


def test_reading_needs_no_script(browser: Any, login: tuple[str, Any]) -> None:
    url, state = login
    context = browser.new_context(storage_state=state, java_script_enabled=False)
    page = context.new_page()
    for path in PAGES:
        page.goto(url + path)
        assert page.locator("h1").inner_text(), path
        assert page.locator("main :is(a, form, p, td)").count(), path
    page.goto(f"{url}/s/hostile")
    assert page.locator("article").count() > 100
    page.get_by_role("link", name="Older entries").click()
    assert page.locator("#entry-100").count() == 1
    context.close()


def append(base: Path, *messages: Any) -> None:
    """Append messages to the hostile conversation, as another process."""

    async def work() -> None:
        async with SessionStore(base / "sessions") as store:
            await store.append_many("hostile", list(messages))

    run_apart(work())


def top_of(page: Any, entry: int) -> float:
    return float(page.evaluate("id => document.getElementById(id).getBoundingClientRect().top", f"entry-{entry}"))


def test_new_entries_appear_and_do_not_move_the_page(browser: Any, login: tuple[str, Any], base: Path) -> None:
    url, state = login
    context = browser.new_context(storage_state=state)
    problems: list[str] = []
    context.on("console", lambda message: problems.append(message.text))
    pages = [context.new_page() for _ in range(8)]
    for page in pages:
        page.goto(f"{url}/s/hostile")
    page = pages[-1]
    page.bring_to_front()
    assert page.evaluate("scrollY") > 1000, "it opens at its end"
    page.evaluate("scrollTo({ top: 5000, behavior: 'instant' })")
    last = int(page.get_attribute(".conversation", "data-last"))
    # Whatever stands in the middle of the window, below the height that is measured for the first time here.
    entry = int(
        page.evaluate("document.elementsFromPoint(400, 300).map(e => e.closest('article')).find(e => e).id.slice(6)")
    )
    before = top_of(page, entry)
    call = tool_use_block(tool_id="new", name="run_code", input={"code": "1"})
    append(base, *[user_text_message(f"more {number}") for number in range(500)], assistant_message([call]))
    page.wait_for_selector(f"#entry-{last + 501}", state="attached", timeout=120_000)
    assert page.inner_text(".live a") == "501 new entries"
    assert abs(top_of(page, entry) - before) < 1
    page.locator(".live a").click()
    assert page.evaluate("location.hash") == f"#entry-{last + 1}"
    assert page.locator(".live a").is_hidden()
    # At its end, the page follows; and a call that was open has its result.
    page.evaluate("document.querySelector('.conversation').scrollIntoView({ behavior: 'instant', block: 'end' })")
    append(
        base,
        build_message("user", [tool_result_block(tool_use_id="new", model_text="one")]),
        user_text_message("and now"),
    )
    page.wait_for_selector(f"#entry-{last + 503}", timeout=60_000)
    assert page.locator(".live a").is_hidden()
    assert page.locator(f"#entry-{last + 501} .call.ok").count() == 1
    # Older ones are put before, in place.
    oldest = page.locator(".conversation article").first.get_attribute("id")
    page.evaluate("scrollTo({ top: 300, behavior: 'instant' })")
    page.get_by_role("link", name="Older entries").focus()
    place = top_of(page, int(oldest[6:]))
    page.keyboard.press("Enter")
    page.wait_for_function("id => document.querySelector('.conversation article').id !== id", arg=oldest)
    assert abs(top_of(page, int(oldest[6:])) - place) < 1
    assert page.url == f"{url}/s/hostile#entry-{last + 1}"
    ids = page.evaluate("[...document.querySelectorAll('.conversation > [id]')].map(e => Number(e.id.slice(6)))")
    assert ids == sorted(set(ids))
    assert problems == []
    context.close()


def test_an_outline_leads_to_an_entry_and_kinds_are_shown_alone(browser: Any, login: tuple[str, Any]) -> None:
    url, state = login
    context = browser.new_context(storage_state=state, viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(f"{url}/s/hostile?at=5")
    page.locator(".outline").get_by_role("link", name="question 20").click()
    assert page.locator("article:target").get_attribute("id") == "entry-61"
    page.get_by_role("link", name="errors").click()
    page.wait_for_url("**/s/hostile?show=errors")
    assert page.locator("article").count() == page.locator(".call.error").count() > 50
    page.get_by_role("link", name="Outline").click()
    page.get_by_role("link", name="failed").first.click()
    page.wait_for_url("**/s/hostile?at=5#entry-5")
    context.close()


def test_keys_are_listed_and_can_be_switched_off(browser: Any, login: tuple[str, Any]) -> None:
    url, state = login
    context = browser.new_context(bypass_csp=True, storage_state=state)
    page = context.new_page()
    page.goto(f"{url}/s/hostile?at=5")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    assert Axe().run(page).response["violations"] == []
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    # A key that comes before the frame in which the browser takes the focus from the closed dialog.
    page.evaluate(
        """() => {
            const dialog = document.querySelector("dialog");
            dialog.showModal();
            dialog.close();
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "]", bubbles: true }));
        }"""
    )
    page.locator(".chosen").wait_for()
    first = page.locator(".chosen").get_attribute("id")
    page.keyboard.press("]")
    assert page.locator(".chosen").get_attribute("id") not in (None, first)
    page.keyboard.press("e")
    assert page.locator(".chosen.error").count() == 1
    page.keyboard.press("?")
    page.get_by_label("Keys are on").uncheck()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("g")
    page.keyboard.press("t")
    assert page.url.endswith("/s/hostile?at=5")
    context.close()
