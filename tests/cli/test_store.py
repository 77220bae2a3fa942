"""`carrel store` between a folder and another folder or a Redis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Carrel


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name, text in {
        "tools/curl.yaml": "name: curl\ncommand: curl\n",
        "workflows/add.py": "def run(a, b):\n    return a + b\n",
        "artifacts/note.txt": "remember\n",
        "requirements.txt": "pandas>=2\n",
    }.items():
        (tmp_path / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / name).write_text(text)
    return tmp_path / "base"


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The words that name the store."""
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        return [str(tmp_path / "shared")]
    return [request.getfixturevalue("redis_url"), "--prefix", tmp_path.name]


def test_bootstrap_list_and_pull(carrel: Carrel, base: Path, store: list[str], tmp_path: Path) -> None:
    done = carrel("store", "bootstrap", base, *store)
    assert done.stdout.splitlines()[-1] == "4 copied, 0 unchanged, 0 kept."
    assert carrel("store", "diff", base, *store).stdout == "No differences.\n"
    listed = json.loads(carrel("store", "list", *store, "--json").stdout)
    assert [(one["kind"], one["name"], one["bytes"]) for one in listed] == [
        ("tools", "curl.yaml", 25),
        ("workflows", "add.py", 32),
        ("artifacts", "note.txt", 9),
        ("deps", "requirements.txt", 10),
    ]
    assert "workflows  add.py" in carrel("store", "list", *store, "--only", "workflows").stdout
    carrel("store", "pull", *store[:1], tmp_path / "copy", *store[1:])
    assert (tmp_path / "copy" / "workflows" / "add.py").read_text() == (base / "workflows" / "add.py").read_text()


def test_differences_are_shown_and_kept_without_overwrite(carrel: Carrel, base: Path, store: list[str]) -> None:
    carrel("store", "bootstrap", base, *store)
    (base / "workflows" / "add.py").write_text("def run(a, b):\n    return b + a\n")
    (base / "workflows" / "new.py").write_text("def run(): pass\n")
    (base / "artifacts" / "note.txt").unlink()
    shown = carrel("store", "diff", base, *store, "--patch").stdout.splitlines()
    assert shown[0] == "~ workflows/add.py (differs)"
    assert {"-    return a + b", "+    return b + a", "+ workflows/new.py", "- artifacts/note.txt"} <= set(shown)
    data: list[dict[str, Any]] = json.loads(carrel("store", "diff", base, *store, "--json").stdout)
    assert [one["state"] for one in data] == ["changed", "new", "missing"]
    printed = carrel("store", "bootstrap", base, *store).stdout
    assert "kept workflows add.py (it differs; --overwrite replaces it)" in printed
    assert "1 copied, 2 unchanged, 1 kept." in printed
    moved = json.loads(carrel("store", "bootstrap", base, *store, "--overwrite", "--json").stdout)
    assert [one["name"] for one in moved["copied"]] == ["add.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bootstrap", "nowhere", "shared"], "there is no folder nowhere"),
        (["list", "nowhere"], "there is no folder nowhere"),
        (["list", "https://example.com"], "https:// is not a store"),
        (["list", "base", "--only", "recipes"], "no kind 'recipes'"),
        (["pull", "base", "base/requirements.txt"], "is a file"),
        (["pull", "base", "redis://:s3cret@127.0.0.1:1/0"], "bootstrap FOLDER STORE, pull STORE FOLDER"),
        (["bootstrap", "redis://:s3cret@127.0.0.1:1/0", "base"], "bootstrap FOLDER STORE, pull STORE FOLDER"),
        (["diff", "rediss://:s3cret@127.0.0.1:1/0", "base"], "FOLDER is the address of a store"),
        (["list", "redis://:a@s3cret/b@127.0.0.1:1/0"], "percent-encoded"),
    ],
)
def test_wrong_usage(carrel: Carrel, base: Path, words: list[str], message: str) -> None:
    error = carrel("store", *words, code=2).stderr
    assert message in error
    assert "s3cret" not in error
    assert (
        sorted(found.name for found in base.parent.iterdir() if "redis" in found.name or found.name == "nowhere") == []
    )


def test_a_failed_copy_does_not_stop_the_others(carrel: Carrel, base: Path, redis_url: str, tmp_path: Path) -> None:
    words = [redis_url, "--prefix", tmp_path.name]
    carrel("store", "bootstrap", base, *words)
    (tmp_path / "copy" / "tools").mkdir(parents=True)
    (tmp_path / "copy" / "artifacts").write_text("in the way")
    done = carrel("store", "pull", redis_url, tmp_path / "copy", *words[1:], code=1)
    assert "failed artifacts note.txt" in done.stdout
    assert "3 copied, 0 unchanged, 0 kept, 1 failed." in done.stdout
    assert "could not be copied" in done.stderr


def test_a_redis_that_does_not_answer_is_exit_code_3(carrel: Carrel) -> None:
    assert "127.0.0.1:1" in carrel("store", "list", "redis://127.0.0.1:1/0", code=3).stderr
