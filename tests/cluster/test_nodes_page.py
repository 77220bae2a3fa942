"""The page of nodes, of gateway and nodes, as HTML and as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api

from carrel.version import __version__
from tests.support.cluster import CarrelProcess, ClusterProcesses, nodes_of, wait_for
from tests.support.missing_parts import skip_without
from tests.support.server_process import create_session

JSON = {"Accept": "application/json"}


@pytest.fixture(params=["gateway", "node"])
def server(request: pytest.FixtureRequest, cluster: ClusterProcesses) -> CarrelProcess:
    return cluster.gateways[0] if request.param == "gateway" else cluster.nodes["n1"]


@pytest.fixture
def page(server: CarrelProcess, cluster: ClusterProcesses) -> Iterator[httpx.Client]:
    url = server.url.removesuffix("/api/v1")
    with httpx.Client(base_url=url, headers={"Origin": url}, timeout=60, trust_env=False) as page:
        assert page.get("/nodes").status_code == 303
        assert page.get("/nodes", headers=JSON).status_code == 401
        assert page.post("/enter", data={"key": cluster.key}).status_code == 303
        yield page


def _sees_two(client: httpx.Client) -> bool:
    return len(nodes_of(client)) == 2


def test_each_node_is_a_row(page: httpx.Client, cluster: ClusterProcesses) -> None:
    for process in cluster.nodes.values():  # Each looks at the others only now and then.
        with cluster.client(process) as client:
            wait_for(partial(_sees_two, client))
    text = page.get("/nodes").text
    found = page.get("/nodes", headers=JSON).json()["nodes"]
    assert [(node["name"], node["state"], node["version"]) for node in found] == [
        ("n1", "ready", __version__),
        ("n2", "ready", __version__),
    ]
    for node in found:
        assert f'<td class="main">{node["name"]}</td>' in text
        assert node["url"] in text
        assert 0 <= node["renewed_seconds_ago"] < 60
    assert "2 nodes, " in text


def test_a_share_link_shows_no_nodes(page: httpx.Client, cluster: ClusterProcesses) -> None:
    with cluster.client() as client:
        session_id = create_session(client)
        link = page.post(f"/s/{session_id}/do/share", data={"days": "1"}, headers=JSON).json()["link"]
        page.post("/leave")
        assert page.post("/enter", data={"key": link.partition("#")[2]}).status_code == 303
        assert page.get(f"/s/{session_id}").status_code == 200
        assert page.get("/nodes").status_code == 403
        client.delete(f"/sessions/{session_id}")


@pytest.mark.real
def test_it_is_accessible_and_fits(cluster: ClusterProcesses) -> None:
    program = shutil.which("chromium")
    if program is None:
        skip_without("no Chromium on this machine: `apt install chromium`")
    url = cluster.gateways[0].url.removesuffix("/api/v1")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in (320, 1280):
                _check(browser, url, cluster.key, scheme, width)
        browser.close()


def _check(browser: Any, url: str, key: str, scheme: str, width: int) -> None:
    # The policy of the page refuses the script of axe.
    size = {"width": width, "height": 900}
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport=size)
    page = context.new_page()
    page.goto(f"{url}/enter?next=/nodes")
    page.locator("input[name=key]").fill(key)
    page.locator("main form button").click()
    page.wait_for_url(f"{url}/nodes")
    assert page.locator("tbody tr").count() == 2
    found = Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    context.close()
