"""The page at /docs: all of the API, in a real browser, with nothing from outside and nothing that runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from carrel.server.api_page import api_page
from tests.server.serving_process import Serving
from tests.support.missing_parts import skip_without

THE_BROWSERS_OWN = ("google.com", "update.googleapis.com", "optimizationguide-pa.googleapis.com", "gvt1.com")
"""It looks for updates of itself, whatever it is told."""


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def test_it_has_every_route_and_every_shape(server: Serving) -> None:
    root = server.url.removesuffix("/api/v1")
    schema = httpx.get(f"{root}/openapi.json", timeout=60).json()
    answer = httpx.get(f"{root}/docs", timeout=60)
    assert answer.status_code == 200
    for path, methods in schema["paths"].items():
        for method in methods:
            assert re.search(rf">{method.upper()}</b> <code>{re.escape(path)}</code>", answer.text), (method, path)
    for name in ("NewSession", "Interaction", "Job"):
        assert f'<details id="{name}">' in answer.text
    assert "command_timeout" in answer.text
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "<script" not in answer.text
    assert [link for link in re.findall(r'(?:href|src)="([^"#]+)', answer.text) if link != "/openapi.json"] == []


def test_what_a_schema_says_is_only_text() -> None:
    evil = "<script>alert(1)</script>"
    get = {"get": {"description": f"{evil} `{evil}` `ready`", "parameters": [{"name": evil, "in": "query"}]}}
    page = api_page({"info": {"title": evil, "version": "1"}, "paths": {f"/{evil}": get}})
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<code>ready</code>" in page


def test_a_real_browser_shows_it_and_asks_nobody_else(server: Serving, tmp_path: Path) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        skip_without("no Chromium on this machine: `apt install chromium`")
    root = server.url.removesuffix("/api/v1")
    log = tmp_path / "net.json"
    quiet = "headless no-sandbox disable-gpu no-first-run disable-sync disable-background-networking"
    words = [program, *(f"--{option}" for option in quiet.split()), "--disable-component-update"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=2000"]
    picture = tmp_path / "page.png"
    shown = subprocess.run(
        [*words, "--dump-dom", f"--screenshot={picture}", f"{root}/docs"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "/api/v1/sessions/{session_id}/exec" in shown.stdout
    asked = set(re.findall(r'"url":"(https?://[^"]+)"', log.read_text()))
    assert {url for url in asked if "/docs" in url}
    assert [url for url in asked if not url.startswith(root) and not _host(url).endswith(THE_BROWSERS_OWN)] == []
    assert "Refused to apply" not in shown.stderr, "the style is not what the policy lets in"
