"""`carrel deps`: what could not be installed, and why."""

import json
from pathlib import Path

from tests.cli.conftest import Carrel

OFFLINE = {"UV_NO_INDEX": "1"}


def test_what_the_installer_said_is_printed(carrel: Carrel, tmp_path: Path) -> None:
    done = carrel("deps", "add", "no-such-thing", "--base", tmp_path / "base", code=1, env=OFFLINE)
    assert "failed: no-such-thing" in done.stdout
    assert "uv pip install failed" in done.stderr
    words = ("deps", "add", "no-such-thing", "nor-this-one", "--json")
    both = json.loads(carrel(*words, "--base", tmp_path / "base", code=1, env=OFFLINE).stdout)
    assert both["failed"] == ["no-such-thing", "nor-this-one"]
    assert both["message"].count("uv pip install failed") == 2
