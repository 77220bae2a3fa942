"""The library on the command line: tools, workflows, artifacts, deps, run, mcp, as typed, in a base of their own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import DEADLINE, Carrel
from tests.session.conftest import DOUBLE, ECHO
from tests.support.preloaded_python import preloaded_python
from tests.support.wheels import build_wheel

Failing = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / ".carrel"
    for name, text in {"tools/echo.yaml": ECHO, "workflows/double.py": DOUBLE}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def failing(environment: dict[str, str], tmp_path: Path) -> Failing:
    """A command that ends with 1 because the code it ran did: its stderr is the code's."""

    def run(*words: object, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        done = preloaded_python().run(["-m", "carrel", *words], environment | (env or {}), tmp_path, DEADLINE)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "carrel/cli" not in done.stderr
        return done

    return run


def parsed(done: "subprocess.CompletedProcess[str]") -> Any:
    return json.loads(done.stdout)


# --- which base -------------------------------------------------------------------------------------------------------


def test_the_folder_here_is_the_base_else_the_home(carrel: Carrel, base: Path, home: Path, tmp_path: Path) -> None:
    assert "double" in carrel("workflows", "list").stdout
    assert "double" in carrel("workflows", "list", "--base", base).stdout
    base.rename(tmp_path / "elsewhere")
    assert carrel("workflows", "list").stdout.startswith("No workflows")
    assert carrel("workflows", "list", "--json").stdout.strip() == "[]"
    assert "double" in carrel("workflows", "list", "--base", tmp_path / "elsewhere").stdout


def test_carrels_own_folder_is_no_base_of_a_project(carrel: Carrel, home: Path, tmp_path: Path) -> None:
    (tmp_path / ".carrel" / "workflows").mkdir(parents=True)
    (tmp_path / ".carrel" / "workflows" / "old.py").write_text("def run(): pass\n")
    assert "old" in carrel("workflows", "list").stdout
    assert "old" not in carrel("workflows", "list", env={"HOME": str(tmp_path)}).stdout


@pytest.mark.parametrize(
    "words", ["tools list", "workflows list", "artifacts list", "deps list", "run 1", "repl", "mcp"]
)
def test_a_base_that_is_a_file(carrel: Carrel, tmp_path: Path, words: str) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in carrel(*words.split(), "--base", "file", code=2).stderr


# --- tools ------------------------------------------------------------------------------------------------------------


def test_tools(carrel: Carrel, base: Path) -> None:
    assert "echo.say" in carrel("tools", "list").stdout
    listed = parsed(carrel("tools", "list", "--json"))
    assert [tool["name"] for tool in listed] == ["echo"]
    assert [recipe["name"] for recipe in listed[0]["recipes"]] == ["say"]
    [found] = parsed(carrel("tools", "search", "say it", "--limit", 1, "--json"))
    assert found["name"] == "echo"
    assert carrel("tools", "call", "echo.say", "words=hi there").stdout == "hi there\n"
    assert parsed(carrel("tools", "call", "echo.say", "words=hi", "--json")) == "hi\n"
    assert "def say(words" in carrel("tools", "describe").stdout
    assert "def say(words" in parsed(carrel("tools", "describe", "--json"))["text"]
    assert "Say it" in carrel("tools", "describe", "saying things", "--limit", 2000).stdout
    assert "No tool fits 'zyzzyva'" in carrel("tools", "search", "zyzzyva").stdout


def test_a_server_that_does_not_start_is_listed_with_the_reason(carrel: Carrel, base: Path) -> None:
    dead = f"name: dead\ntype: mcp\ncommand: {sys.executable}\nargs: [-c, 'raise SystemExit(3)']\nstartup_timeout: 60\n"
    (base / "tools" / "dead.yaml").write_text(dead)
    [line] = [line for line in carrel("tools", "list").stdout.splitlines() if line.startswith("dead")]
    assert "did not start: it ended" in line


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ecko.say", "words=x"], 2, "echo"),
        (["echo.shout", "words=x"], 2, "say"),
        (["echo.say", "words"], 2, "name=value"),
        (["echo.say", "wrods=x"], 1, "wrods"),
        (["echo.say"], 1, "words"),
        (["fails"], 1, "the reason"),
        (["slow"], 1, "longer than 0.3 s"),
    ],
)
def test_a_call_that_cannot_be_made_or_fails(
    carrel: Carrel, base: Path, words: list[str], code: int, said: str
) -> None:
    (base / "tools" / "fails.yaml").write_text("name: fails\ncommand: sh -c 'echo the reason >&2; exit 3'\n")
    (base / "tools" / "slow.yaml").write_text("name: slow\ncommand: sleep 3600\ntimeout: 0.3\n")
    assert said in carrel("tools", "call", *words, code=code).stderr


def test_a_wrong_definition_is_named_in_a_line(carrel: Carrel, base: Path) -> None:
    (base / "tools" / "wrong.yaml").write_text("name: wrong\nkommand: x\n")
    for words in ("tools list", "tools call echo.say words=x", "run 1"):
        assert "wrong.yaml" in carrel(*words.split(), code=2).stderr


# --- workflows --------------------------------------------------------------------------------------------------------


def test_workflows(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    assert "double" in carrel("workflows", "list").stdout
    assert parsed(carrel("workflows", "list", "--json"))[0]["parameters"][0]["name"] == "number"
    assert carrel("workflows", "show", "double").stdout == DOUBLE
    assert parsed(carrel("workflows", "show", "double", "--json"))["source"] == DOUBLE
    (tmp_path / "seven.py").write_text("def run():\n    return 7\n")
    assert (
        carrel("workflows", "add", "seven", "seven.py", "--description", "Gives seven").stdout == "seven() is kept.\n"
    )
    made = carrel("workflows", "add", "seven", "-", "--json", input="def run():\n    return 8\n", stdin=None)
    assert parsed(made)["name"] == "seven"
    versions = parsed(carrel("workflows", "history", "seven", "--json"))
    assert [version["version"] for version in versions] == [1, 2]
    shown = carrel("workflows", "history", "seven").stdout.splitlines()
    assert [line.split()[2] for line in shown] == ["CHANGE", "added", "edited"]
    assert carrel("workflows", "run", "seven").stdout == "8\n"
    assert carrel("workflows", "run", "double", "number=4", "times=3").stdout == "12\n"
    assert parsed(carrel("workflows", "run", "double", "number=4", "--json"))["value"] == 8
    assert carrel("workflows", "run", "double", 'number="ab"').stdout == "'abab'\n"
    assert [w["name"] for w in parsed(carrel("workflows", "search", "multiply a number", "--limit", 1, "--json"))] == [
        "double"
    ]
    assert "No workflow fits 'zyzzyva'" in carrel("workflows", "search", "zyzzyva").stdout
    (base / "workflows" / "torn.py").write_text("def run(:\n")
    assert "is not valid Python" in carrel("workflows", "list").stdout
    (base / "workflows" / "torn.py").unlink()
    assert carrel("workflows", "remove", "seven").stdout == "seven is removed.\n"
    assert [w["name"] for w in parsed(carrel("workflows", "list", "--json"))] == ["double"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "nobody"], 2, "nobody"),
        (["remove", "nobody"], 2, "nobody"),
        (["history", "nobody"], 2, "nobody"),
        (["add", "w", "nowhere.py"], 2, "nowhere.py"),
        (["add", "no-name", "good.py"], 2, "no-name"),
        (["add", "w", "bad.py"], 1, "line 1"),
        (["add", "w", "norun.py"], 2, "run"),
        (["add", "w", "binary.py"], 2, "UTF-8"),
        (["add", "w"], 2, "--help"),
        (["run", "double", "number"], 2, "name=value"),
    ],
)
def test_workflows_that_are_none(
    carrel: Carrel, base: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    (tmp_path / "good.py").write_text("def run(): pass\n")
    (tmp_path / "bad.py").write_text("def run(:\n")
    (tmp_path / "norun.py").write_text("x = 1\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert said in carrel("workflows", *words, code=code).stderr
    assert [w["name"] for w in parsed(carrel("workflows", "list", "--json"))] == ["double"]


def test_a_workflow_that_fails_shows_its_own_lines(failing: Failing, base: Path) -> None:
    (base / "workflows" / "fails.py").write_text("def run():\n    return {}['key']\n")
    done = failing("workflows", "run", "fails")
    assert "return {}['key']" in done.stderr
    assert "KeyError" in done.stderr
    assert parsed(failing("workflows", "run", "fails", "--json"))["error_type"] == "KeyError"
    (base / "workflows" / "slow.py").write_text("def run():\n    while True: pass\n")
    assert "0.3 s" in failing("workflows", "run", "slow", "--timeout", "0.3").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], "there is no workflow nobody"),
        (["twice"], "text=… is missing; it is twice(text: str)"),
        (["twice", "text=a", "x=1"], "there is no parameter x; it is twice(text: str)"),
        (["broken"], "broken has no function 'run'"),
        (["pdf"], "pdf is a skill to be read"),
    ],
)
def test_a_workflow_that_cannot_be_run_so_is_one_line(carrel: Carrel, base: Path, words: list[str], said: str) -> None:
    (base / "workflows" / "twice.py").write_text("def run(text: str):\n    return text * 2\n")
    (base / "workflows" / "broken.py").write_text("x = 1\n")
    (base / "skills" / "pdf").mkdir(parents=True)
    (base / "skills" / "pdf" / "SKILL.md").write_text("---\nname: pdf\ndescription: d\n---\nhi")
    stderr = carrel("workflows", "run", *words, code=2).stderr
    assert stderr.startswith("error: ")
    assert said in stderr
    assert stderr.count("\n") == 1


def test_a_text_stays_a_text_where_one_is_wanted(carrel: Carrel, base: Path) -> None:
    for text in ("5", "true", "[1]", '{"a": 1}', "null"):
        assert carrel("tools", "call", "echo.say", f"words={text}").stdout == f"{text}\n"
    (base / "workflows" / "twice.py").write_text("def run(text: str, n: int = 2):\n    return text * n\n")
    assert carrel("workflows", "run", "twice", "text=5", "n=3").stdout == "'555'\n"


# --- artifacts --------------------------------------------------------------------------------------------------------


def test_artifacts(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    assert parsed(carrel("artifacts", "list", "--json")) == []
    (tmp_path / "note.txt").write_text("remember\n")
    (tmp_path / "raw").write_bytes(bytes(range(256)))
    carrel("artifacts", "save", "notes/first.txt", "note.txt", "--description", "A note")
    made = parsed(carrel("artifacts", "save", "raw.bin", "raw", "--json"))
    assert made["name"] == "raw.bin"
    listed = parsed(carrel("artifacts", "list", "--json"))
    assert {artifact["name"] for artifact in listed} == {"notes/first.txt", "raw.bin"}
    assert "A note" in carrel("artifacts", "list").stdout
    assert carrel("artifacts", "load", "notes/first.txt").stdout == "remember\n"
    assert parsed(carrel("artifacts", "load", "notes/first.txt", "--json")) == {"$": "bytes", "of": "cmVtZW1iZXIK"}
    carrel("artifacts", "load", "raw.bin", "--out", "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(range(256))
    assert carrel("run", "artifacts.save('d.json', {'a': [1, None]})['name']").stdout == "'d.json'\n"
    assert parsed(carrel("artifacts", "load", "d.json")) == {"a": [1, None]}
    carrel("artifacts", "delete", "raw.bin")
    carrel("artifacts", "delete", "raw.bin")
    assert "raw.bin" not in carrel("artifacts", "list").stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["load", "nobody"], 2, "nobody"),
        (["save", "x", "nowhere"], 2, "nowhere"),
        (["save", "../x", "note.txt"], 2, ".."),
        (["load", "n", "--out", "no/such/folder"], 3, "no/such/folder"),
    ],
)
def test_artifacts_that_are_none(
    carrel: Carrel, base: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    (tmp_path / "note.txt").write_text("remember\n")
    carrel("artifacts", "save", "n", "note.txt")
    assert said in carrel("artifacts", *words, code=code).stderr


def test_bytes_are_not_thrown_at_a_terminal(at_terminal: Any, carrel: Carrel, base: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\x1b[2J\xff\x00")
    carrel("artifacts", "save", "raw.bin", "raw")
    terminal = at_terminal("artifacts", "load", "raw.bin")
    assert terminal.end() == 2
    assert "--out FILE" in terminal.shown
    (tmp_path / "note").write_text("caf\u00e9 \x1b[2J\n")
    carrel("artifacts", "save", "note.txt", "note")
    terminal = at_terminal("artifacts", "load", "note.txt")
    assert terminal.end() == 0
    assert "café ␛[2J" in terminal.shown


def test_a_file_with_an_odd_name_costs_nobody_else(carrel: Carrel, base: Path) -> None:
    for folder in ("tools", "workflows", "artifacts"):
        (base / folder).mkdir(exist_ok=True)
        (base / folder / "two\nlines.py").write_text("def run(): pass\n")
    done = carrel("workflows", "list")
    assert "double" in done.stdout
    assert "is ignored" in done.stderr
    assert carrel("run", "workflows.double(21)", "--sandbox", "off").stdout == "42\n"


def test_code_runs_for_a_user_whose_own_folder_cannot_be_written(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    read_only = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"; exec "$@"'
    through = ["env", "-u", "UV_CACHE_DIR", "unshare", "-rm", "sh", "-c", read_only, tmp_path / "mine"]
    given = {"HOME": str(tmp_path / "mine"), "XDG_CACHE_HOME": ""}
    assert carrel("run", "workflows.double(21)", through=through, env=given).stdout == "42\n"


def test_what_may_not_be_written_is_the_machines_fault(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("x")
    carrel("artifacts", "save", "n", "note.txt")
    through = ["unshare", "-rm", "sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"; exec "$@"', base]
    assert "n was not deleted: " in carrel("artifacts", "delete", "n", code=3, through=through).stderr
    assert "m was not saved: " in carrel("artifacts", "save", "m", "note.txt", code=3, through=through).stderr


# --- packages ---------------------------------------------------------------------------------------------------------


def test_deps(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    for name in ("small-thing", "other-thing"):
        build_wheel(tmp_path / "wheels", name, "1.0")
    offline = {"UV_FIND_LINKS": str(tmp_path / "wheels"), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}
    assert parsed(carrel("deps", "list", "--json")) == []
    assert "small-thing" in carrel("deps", "add", "small-thing", "other-thing>=1", env=offline).stdout
    assert carrel("deps", "list").stdout.split() == ["small-thing", "other-thing>=1"]
    assert carrel("run", "import small_thing\nsmall_thing.VERSION").stdout == "'1.0'\n"
    again = parsed(carrel("deps", "add", "small-thing", "--json", env=offline))
    assert again["already_present"] == ["small-thing"]
    removed = parsed(carrel("deps", "remove", "small-thing", "--json"))
    assert removed["removed"] == ["small-thing"]
    assert parsed(carrel("deps", "sync", "--json", env=offline))["failed"] == []
    assert parsed(carrel("deps", "list", "--json")) == ["other-thing>=1"]


def test_deps_that_are_none(carrel: Carrel, failing: Failing, base: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    offline = {"UV_FIND_LINKS": str(tmp_path / "wheels"), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}
    assert "https://example.com" in carrel("deps", "add", "https://example.com/x.whl", code=2).stderr
    said = carrel("deps", "add", "a-package-that-is-nowhere", code=1, env=offline).stderr
    assert "a-package-that-is-nowhere" in said
    assert parsed(carrel("deps", "list", "--json")) == []
    assert parsed(failing("deps", "add", "a-package-that-is-nowhere", "--json", env=offline))["message"]
    missing = carrel("deps", "remove", "never-there", code=2)
    assert "not found" in missing.stdout
    assert "never-there: no such package here" in missing.stderr


# --- code, and the front for agents -----------------------------------------------------------------------------------


def test_code_finds_the_library(carrel: Carrel, base: Path) -> None:
    code = "print(tools.echo.say(words='hi'), end='')\nworkflows.double(4)"
    assert carrel("run", code).stdout == "hi\n8\n"
    result = parsed(carrel("run", code, "--json"))
    assert (result["stdout"], result["value"], result["is_ok"], result["error"]) == ("hi\n", 8, True, None)


def test_the_front_ends_with_its_client(carrel: Carrel, base: Path) -> None:
    assert carrel("mcp").stdout == ""


@pytest.mark.parametrize("address", ["x", "99999", "²", "host:port", "-1", "http://127.0.0.1:80"])
def test_an_address_that_is_none(carrel: Carrel, base: Path, address: str) -> None:
    assert "is no address" in carrel("mcp", f"--http={address}", code=2).stderr


def test_nothing_in_the_library_acts_on_the_terminal(at_terminal: Any, carrel: Carrel, base: Path) -> None:
    attack = "\x1b[2J\x9b31m\x07"
    (base / "tools" / "odd.yaml").write_text(
        json.dumps({"name": "odd", "command": "echo " + attack, "description": attack})
    )
    (base / "workflows" / "odd.py").write_text(f'def run():\n    """{attack}"""\n    print({attack!r})\n')
    for words in ("tools list", "tools call odd", "tools describe", "workflows list", "workflows run odd"):
        terminal = at_terminal(*words.split())
        assert terminal.end() == 0
        assert "\x1b[2J" not in terminal.shown, words
        assert "\x9b" not in terminal.shown, words
        assert "\x07" not in terminal.shown, words
