"""`carrel tools`, `workflows`, `artifacts`, `deps`, `run` and `mcp` on a base folder."""

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
def base(home: Path) -> Path:
    for name, text in {"tools/echo.yaml": ECHO, "workflows/double.py": DOUBLE}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return home


@pytest.fixture
def failing(environment: dict[str, str], tmp_path: Path) -> Failing:
    """Run a command whose code fails: exit code 1, and the error of the code on stderr."""

    def run(*words: object, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        done = preloaded_python().run(["-m", "carrel", *words], environment | (env or {}), tmp_path, DEADLINE)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "carrel/cli" not in done.stderr
        return done

    return run


def parsed(done: "subprocess.CompletedProcess[str]") -> Any:
    return json.loads(done.stdout)


# --- which base -------------------------------------------------------------------------------------------------------


def test_the_base_is_the_option_else_carrel_home_else_the_folder_here_else_that_of_the_user(
    carrel: Carrel, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("option", "home", ".carrel", "user/.carrel")}
    for name, folder in folders.items():
        (folder / "workflows").mkdir(parents=True)
        (folder / "workflows" / f"{'user' if 'user' in name else name.strip('.')}.py").write_text("def run(): pass\n")

    def found(*words: str, home: str = "") -> str:
        env = {"CARREL_HOME": home, "HOME": str(tmp_path / "user")}
        return str(parsed(carrel("workflows", "list", "--json", *words, env=env))[0]["name"])

    assert found("--base", "option", home=str(folders["home"])) == "option"
    assert found(home=str(folders["home"])) == "home"
    assert found() == "carrel"
    folders[".carrel"].rename(tmp_path / "elsewhere")
    assert found() == "user"


def test_a_missing_base_is_refused_by_commands_that_read_and_created_by_others(carrel: Carrel, tmp_path: Path) -> None:
    for words in ("tools list", "workflows search x", "artifacts list", "deps list", "sessions list"):
        assert "there is no folder new" in carrel(*words.split(), "--base", "new", code=2).stderr
    assert not (tmp_path / "new").exists()
    (tmp_path / "note.txt").write_text("remember\n")
    carrel("artifacts", "save", "n", "note.txt", "--base", "new")
    assert (tmp_path / "new" / "artifacts" / "n").exists()


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
    assert "No tool matches 'zyzzyva'" in carrel("tools", "search", "zyzzyva").stdout


def test_a_server_that_does_not_start_is_listed_with_the_reason(carrel: Carrel, base: Path) -> None:
    dead = f"name: dead\ntype: mcp\ncommand: {sys.executable}\nargs: [-c, 'raise SystemExit(3)']\nstartup_timeout: 60\n"
    (base / "tools" / "dead.yaml").write_text(dead)
    [line] = [line for line in carrel("tools", "list").stdout.splitlines() if line.startswith("dead")]
    assert "did not start: it ended" in line


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["ecko.say", "words=x"], 2, "echo"),
        (["echo.shout", "words=x"], 2, "say"),
        (["echo.say", "words"], 2, "NAME=VALUE"),
        (["echo.say", "wrods=x"], 1, "wrods"),
        (["echo.say"], 1, "words"),
        (["fails"], 1, "the reason"),
        (["slow"], 1, "longer than 0.3 s"),
    ],
)
def test_errors_of_tool_calls(carrel: Carrel, base: Path, words: list[str], code: int, message: str) -> None:
    (base / "tools" / "fails.yaml").write_text("name: fails\ncommand: sh -c 'echo the reason >&2; exit 3'\n")
    (base / "tools" / "slow.yaml").write_text("name: slow\ncommand: sleep 3600\ntimeout: 0.3\n")
    assert message in carrel("tools", "call", *words, code=code).stderr


def test_an_invalid_definition_is_skipped_with_a_note(carrel: Carrel, base: Path) -> None:
    (base / "tools" / "wrong.yaml").write_text("name: wrong\nkommand: x\n")
    for words, printed in (("tools list", "echo.say"), ("tools call echo.say words=x", "x\n"), ("run 1+1", "2\n")):
        done = carrel(*words.split())
        assert printed in done.stdout
        assert done.stderr.startswith("note: ")
        assert "wrong.yaml" in done.stderr


# --- workflows --------------------------------------------------------------------------------------------------------


def test_workflows(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    assert "double" in carrel("workflows", "list").stdout
    assert parsed(carrel("workflows", "list", "--json"))[0]["parameters"][0]["name"] == "number"
    assert carrel("workflows", "show", "double").stdout == DOUBLE
    assert parsed(carrel("workflows", "show", "double", "--json"))["source"] == DOUBLE
    (tmp_path / "seven.py").write_text("def run():\n    return 7\n")
    assert carrel("workflows", "add", "seven", "seven.py", "--description", "Gives seven").stdout == "Saved seven().\n"
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
    assert "No workflow matches 'zyzzyva'" in carrel("workflows", "search", "zyzzyva").stdout
    (base / "workflows" / "torn.py").write_text("def run(:\n")
    assert "is not valid Python" in carrel("workflows", "list").stdout
    (base / "workflows" / "torn.py").unlink()
    assert carrel("workflows", "remove", "seven").stdout == "Removed seven.\n"
    assert [w["name"] for w in parsed(carrel("workflows", "list", "--json"))] == ["double"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["show", "missing"], 2, "missing"),
        (["remove", "missing"], 2, "missing"),
        (["history", "missing"], 2, "missing"),
        (["add", "w", "nowhere.py"], 2, "nowhere.py"),
        (["add", "no-name", "good.py"], 2, "no-name"),
        (["add", "w", "bad.py"], 1, "line 1"),
        (["add", "w", "norun.py"], 2, "run"),
        (["add", "w", "binary.py"], 2, "UTF-8"),
        (["add", "w"], 2, "--help"),
        (["run", "double", "number"], 2, "NAME=VALUE"),
    ],
)
def test_errors_of_workflows(
    carrel: Carrel, base: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "good.py").write_text("def run(): pass\n")
    (tmp_path / "bad.py").write_text("def run(:\n")
    (tmp_path / "norun.py").write_text("x = 1\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert message in carrel("workflows", *words, code=code).stderr
    assert [w["name"] for w in parsed(carrel("workflows", "list", "--json"))] == ["double"]


def test_a_failing_workflow_shows_its_own_lines(failing: Failing, base: Path) -> None:
    (base / "workflows" / "fails.py").write_text("def run():\n    return {}['key']\n")
    done = failing("workflows", "run", "fails")
    assert "return {}['key']" in done.stderr
    assert "KeyError" in done.stderr
    assert parsed(failing("workflows", "run", "fails", "--json"))["error_type"] == "KeyError"
    (base / "workflows" / "slow.py").write_text("def run():\n    while True: pass\n")
    assert "0.3 s" in failing("workflows", "run", "slow", "--timeout", "0.3").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "there is no workflow missing"),
        (["twice"], "text=… is missing; usage: twice(text: str)"),
        (["twice", "text=a", "x=1"], "there is no parameter x; usage: twice(text: str)"),
        (["broken"], "broken has no function 'run'"),
        (["pdf"], "pdf is a skill of instructions"),
    ],
)
def test_a_workflow_that_cannot_be_run(carrel: Carrel, base: Path, words: list[str], message: str) -> None:
    (base / "workflows" / "twice.py").write_text("def run(text: str):\n    return text * 2\n")
    (base / "workflows" / "broken.py").write_text("x = 1\n")
    (base / "skills" / "pdf").mkdir(parents=True)
    (base / "skills" / "pdf" / "SKILL.md").write_text("---\nname: pdf\ndescription: d\n---\nhi")
    stderr = carrel("workflows", "run", *words, code=2).stderr
    assert stderr.startswith("error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_text_parameter_gets_text_that_looks_like_json(carrel: Carrel, base: Path) -> None:
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
    carrel("artifacts", "load", "raw.bin", "--output", "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(range(256))
    assert carrel("run", "artifacts.save('d.json', {'a': [1, None]})['name']").stdout == "'d.json'\n"
    assert parsed(carrel("artifacts", "load", "d.json")) == {"a": [1, None]}
    carrel("artifacts", "delete", "raw.bin")
    carrel("artifacts", "delete", "raw.bin")
    assert "raw.bin" not in carrel("artifacts", "list").stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["load", "missing"], 2, "missing"),
        (["save", "x", "nowhere"], 2, "nowhere"),
        (["save", "../x", "note.txt"], 2, ".."),
        (["load", "n", "-o", "no/such/folder"], 3, "no/such/folder"),
    ],
)
def test_errors_of_artifacts(
    carrel: Carrel, base: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "note.txt").write_text("remember\n")
    carrel("artifacts", "save", "n", "note.txt")
    assert message in carrel("artifacts", *words, code=code).stderr


def test_bytes_are_not_written_to_a_terminal(at_terminal: Any, carrel: Carrel, base: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\x1b[2J\xff\x00")
    carrel("artifacts", "save", "raw.bin", "raw")
    terminal = at_terminal("artifacts", "load", "raw.bin")
    assert terminal.end() == 2
    assert "--output FILE" in terminal.shown
    (tmp_path / "note").write_text("caf\u00e9 \x1b[2J\n")
    carrel("artifacts", "save", "note.txt", "note")
    terminal = at_terminal("artifacts", "load", "note.txt")
    assert terminal.end() == 0
    assert "café ␛[2J" in terminal.shown


def test_a_file_with_an_odd_name_is_ignored(carrel: Carrel, base: Path) -> None:
    for folder in ("tools", "workflows", "artifacts"):
        (base / folder).mkdir(exist_ok=True)
        (base / folder / "two\nlines.py").write_text("def run(): pass\n")
    done = carrel("workflows", "list")
    assert "double" in done.stdout
    assert "is ignored" in done.stderr
    assert carrel("run", "workflows.double(21)", "--sandbox", "off").stdout == "42\n"


def test_code_runs_with_a_read_only_home(carrel: Carrel, base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    read_only = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"; exec "$@"'
    through = ["env", "-u", "UV_CACHE_DIR", "unshare", "-rm", "sh", "-c", read_only, tmp_path / "mine"]
    given = {"HOME": str(tmp_path / "mine"), "XDG_CACHE_HOME": ""}
    assert carrel("run", "workflows.double(21)", through=through, env=given).stdout == "42\n"


def test_a_read_only_base_is_exit_code_3(carrel: Carrel, base: Path, tmp_path: Path) -> None:
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


def test_a_failed_installation_shows_the_message_of_the_installer(carrel: Carrel, base: Path) -> None:
    offline = {"UV_NO_INDEX": "1"}
    done = carrel("deps", "add", "no-such-thing", code=1, env=offline)
    assert "failed: no-such-thing" in done.stdout
    assert "uv pip install failed" in done.stderr
    both = parsed(carrel("deps", "add", "no-such-thing", "nor-this-one", "--json", code=1, env=offline))
    assert both["failed"] == ["no-such-thing", "nor-this-one"]
    assert both["message"].count("uv pip install failed") == 2


def test_errors_of_deps(carrel: Carrel, failing: Failing, base: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    offline = {"UV_FIND_LINKS": str(tmp_path / "wheels"), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}
    assert "https://example.com" in carrel("deps", "add", "https://example.com/x.whl", code=2).stderr
    message = carrel("deps", "add", "a-package-that-is-nowhere", code=1, env=offline).stderr
    assert "a-package-that-is-nowhere" in message
    assert parsed(carrel("deps", "list", "--json")) == []
    assert parsed(failing("deps", "add", "a-package-that-is-nowhere", "--json", env=offline))["message"]
    missing = carrel("deps", "remove", "never-there", code=2)
    assert "not found" in missing.stdout
    assert "not installed: never-there" in missing.stderr


# --- code and MCP ---------------------------------------------------------------------------------------------------


def test_code_uses_tools_and_workflows(carrel: Carrel, base: Path) -> None:
    code = "print(tools.echo.say(words='hi'), end='')\nworkflows.double(4)"
    assert carrel("run", code).stdout == "hi\n8\n"
    result = parsed(carrel("run", code, "--json"))
    assert (result["stdout"], result["value"], result["is_ok"], result["error"]) == ("hi\n", 8, True, None)


def test_the_mcp_server_ends_with_its_client(carrel: Carrel, base: Path) -> None:
    assert carrel("mcp").stdout == ""


@pytest.mark.parametrize("address", ["x", "99999", "²", "host:port", "-1", "http://127.0.0.1:80"])
def test_an_invalid_address(carrel: Carrel, base: Path, address: str) -> None:
    assert "is not an address" in carrel("mcp", f"--http={address}", code=2).stderr


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
