"""Programs as tools: the words they are started with, what comes back, and how they end."""

import asyncio
import contextlib
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError, ToolCallError, ToolNotFoundError, ToolTimeoutError
from carrel.library.tools.cli import command_line
from carrel.library.tools.definition_files import parse_definition
from carrel.library.tools.definitions import CliDefinition
from carrel.library.tools.registry import ToolRegistry
from carrel.processes import LIMIT, OnOutput, ProcessResult
from tests.library.tools.test_definitions import CURL
from tests.support.tools import catalog, program

SHELL = (
    "name: sh\ncommand: [sh, -c]\nschema: {positional: [{name: script, required: true}, {name: words, type: array}]}\n"
)
PYTHON = "name: python\ncommand: [python3, -c]\nschema: {positional: [{name: code, required: true}]}\n"


def words(text: str, arguments: dict[str, Any], recipe: str | None = None) -> list[str]:
    definition = parse_definition(text.encode(), "tools/x.yaml")
    assert isinstance(definition, CliDefinition)
    name = definition.name if recipe is None else f"{definition.name}.{recipe}"
    return command_line(definition, name, definition.recipes[recipe] if recipe else None, arguments)[0]


# --- the words --------------------------------------------------------------------------------------------------------


def test_options() -> None:
    assert words(CURL, {"url": "http://x", "silent": True, "header": ["a", "b"], "max_time": 5}) == [
        *("curl", "-s", "-H", "a", "-H", "b", "--max-time", "5", "http://x")
    ]
    assert words(CURL, {"url": "http://x", "silent": False}) == ["curl", "http://x"]


def test_presets_and_defaults_of_recipes() -> None:
    assert words(CURL, {"url": "u"}, "get") == ["curl", "-s", "u"]
    assert words(CURL, {"url": "u"}, "slow") == ["curl", "-s", "--max-time", "30", "u"]
    assert words(CURL, {"url": "u", "max_time": 5}, "slow") == ["curl", "-s", "--max-time", "5", "u"]


def test_values_that_look_like_options() -> None:
    assert words(CURL, {"url": "u", "header": ["-o/etc/passwd"], "max_time": -1}) == [
        *("curl", "-H-o/etc/passwd", "--max-time=-1", "u")
    ]
    with pytest.raises(ToolCallError, match="url is '-o/etc/passwd', which the program would read as an option"):
        words(CURL, {"url": "-o/etc/passwd"})
    dashed = CURL + "double_dash: true\n"
    assert words(dashed, {"url": "-o"}) == ["curl", "--", "-o"]
    assert words(dashed, {}) == ["curl"]


def test_presets_may_look_like_options() -> None:
    git = (
        "name: git\ncommand: git\nschema: {positional: [{name: verb}, {name: args, type: array}]}\n"
        "recipes:\n  last: {preset: {verb: log, args: [-n1]}, params: {}}\n"
        "  log: {preset: {verb: log}, params: {args: {}}}\n"
    )
    assert words(git, {}, "last") == ["git", "log", "-n1"]
    with pytest.raises(ToolCallError, match="args is '-n1', which the program would read as an option"):
        words(git, {"args": ["-n1"]}, "log")


def test_flags() -> None:
    find = "name: find\ncommand: find\nschema: {options: {name: {flag: -name}, depth: {flag: -maxdepth, type: int}}}\n"
    assert words(find, {"name": "*.py", "depth": 2}) == ["find", "-name", "*.py", "-maxdepth", "2"]
    with pytest.raises(ToolCallError, match="name cannot begin with -"):
        words(find, {"name": "-delete"})


def test_numbers_and_empty_texts() -> None:
    text = (
        "name: a\ncommand: a\nschema: {options: {n: {type: number}, s: {}}, positional: [{name: p, type: boolean}]}\n"
    )
    assert words(text, {"n": 0.5, "s": "", "p": True}) == ["a", "--n", "0.5", "--s", "", "true"]
    assert words(text, {"n": 5.0}) == ["a", "--n", "5"]
    assert words(text, {"n": 10**30}) == ["a", "--n", str(10**30)]


def test_null_characters_are_refused() -> None:
    with pytest.raises(ToolCallError, match="url contains a zero character"):
        words(CURL, {"url": "a\0b"})


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_output_is_the_result_and_no_shell_is_used() -> None:
    tools = catalog("name: echo\ncommand: echo\nschema: {positional: [{name: text}]}\n")
    assert await tools.call("echo", {"text": "$HOME; ls `id` 'ü'"}) == "$HOME; ls `id` 'ü'\n"


async def test_a_recipe_accepts_only_its_parameters() -> None:
    tools = catalog(CURL)
    for wrong in ({"url": "u", "silent": False}, {"url": "u", "output": "/etc/passwd"}, {"url": "u", "max_time": 1}):
        with pytest.raises(ToolCallError, match=r"curl\.get: it has no parameter"):
            await tools.call("curl.get", wrong)
    with pytest.raises(ToolNotFoundError, match=r"there is no got in curl; did you mean curl\.get"):
        await tools.call("curl.got", {})


async def test_json_output() -> None:
    tools = catalog("name: cat\ncommand: cat\nstdin: text\noutput: json\n")
    assert await tools.call("cat", {"text": '{"a": [1, null, "ü"]}'}) == {"a": [1, None, "ü"]}
    assert await tools.call("cat", {"text": " \n"}) is None
    with pytest.raises(ToolCallError, match="cat did not write valid JSON"):
        await tools.call("cat", {"text": "oops"})
    with pytest.raises(ToolCallError, match="text is missing"):
        await tools.call("cat", {})


async def test_bytes_output() -> None:
    tools = catalog(SHELL + "output: bytes\n")
    assert await tools.call("sh", {"script": r"printf '\377\000a'"}) == b"\xff\x00a"
    text = catalog(SHELL)
    assert await text.call("sh", {"script": r"printf '\377a'"}) == "�a"


async def test_large_standard_input_also_if_it_is_not_read() -> None:
    big = "0123456789" * 200_000
    tools = catalog("name: wc\ncommand: wc -c\nstdin: text\n", "name: none\ncommand: 'true'\nstdin: text\n")
    assert (await tools.call("wc", {"text": big})).strip() == str(len(big))
    assert await tools.call("none", {"text": big}) == ""


async def test_a_failure_has_exit_code_and_stderr() -> None:
    tools = catalog(SHELL)
    with pytest.raises(ToolCallError) as raised:
        await tools.call("sh", {"script": "echo out; echo why >&2; exit 3"})
    assert str(raised.value) == "sh ended with exit code 3: why"
    assert (raised.value.exit_code, raised.value.stderr) == (3, "why")
    with pytest.raises(ToolCallError, match="sh ended with exit code 137"):
        await tools.call("sh", {"script": "kill -9 $$"})


async def test_exit_codes_that_mean_success() -> None:
    tools = catalog("name: grep\ncommand: grep x\nstdin: text\nexit_codes: [0, 1]\n")
    assert await tools.call("grep", {"text": "nothing"}) == ""


async def test_a_missing_program_or_folder_is_named() -> None:
    tools = catalog("name: a\ncommand: no-such-program-here\n", "name: b\ncommand: pwd\ncwd: /no/such/folder\n")
    with pytest.raises(ToolCallError, match="a: there is no program no-such-program-here; install it"):
        await tools.call("a")
    with pytest.raises(ToolCallError, match="b: there is no folder /no/such/folder to run it in"):
        await tools.call("b")


async def test_cwd_and_env(tmp_path: Path) -> None:
    tools = catalog(
        "name: where\ncommand: [sh, -c, 'pwd; echo $KEY $PLAIN']\n"
        f"cwd: {tmp_path}\nenv: {{KEY: '${{TOKEN}}', PLAIN: a}}\n",
        environment={"TOKEN": "hunter2"},
    )
    # The program has the value; its output is redacted.
    assert await tools.call("where") == f"{tmp_path}\n${{TOKEN}} a\n"


async def test_json_is_parsed_before_it_is_redacted() -> None:
    tools = catalog(
        "name: cat\ncommand: cat\nstdin: text\noutput: json\nenv: {P: '${PORT}', K: '${PIN}'}\n",
        environment={"PORT": "5432", "PIN": "12345678"},
    )
    assert await tools.call("cat", {"text": '[5432, 15432, "at 5432"]'}) == [5432, 15432, "at 5432"]
    answer = await tools.call("cat", {"text": r'[12345678, {"12345678": "it is \u0031\u0032345678"}]'})
    assert answer == ["${PIN}", {"${PIN}": "it is ${PIN}"}]
    with pytest.raises(ToolCallError, match=r"did not write valid JSON .*: no \$\{PIN\}"):
        await tools.call("cat", {"text": "no 12345678"})


async def test_a_missing_secret(tmp_path: Path) -> None:
    tools = catalog(f"name: touch\ncommand: touch {tmp_path}/made\nenv: {{KEY: '${{TOKEN}}'}}\n")
    with pytest.raises(ConfigurationError, match="touch, env: the environment variable TOKEN is not set"):
        await tools.call("touch")
    assert list(tmp_path.iterdir()) == []


async def test_errors_have_no_secrets(tmp_path: Path) -> None:
    text = SHELL + "env: {KEY: '${TOKEN}'}\ntimeout: 0.3\n"
    tools = catalog(text, environment={"TOKEN": "hunter2"})
    for script in ("echo $KEY >&2; exit 1", "echo $KEY; exit 1", "echo $KEY >&2; sleep 60"):
        with pytest.raises(ToolCallError) as raised:
            await tools.call("sh", {"script": script})
        assert "hunter2" not in f"{raised.value} {raised.value.stderr} {raised.value.args}"
        assert "${TOKEN}" in str(raised.value)


# --- ends -------------------------------------------------------------------------------------------------------------


async def gone(path: Path) -> bool:
    """Whether the process whose number the file has is gone soon."""
    number = int(path.read_text())
    for _ in range(3000):
        if not Path(f"/proc/{number}").exists() or "\nState:\tZ" in Path(f"/proc/{number}/status").read_text():
            return True
        await asyncio.sleep(0.02)
    return False


async def until_there(path: Path) -> None:
    for _ in range(6000):
        if path.exists() and path.read_text().strip():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} is not there")


async def test_a_timeout_ends_all_processes(tmp_path: Path) -> None:
    tools = catalog(SHELL + "timeout: 2\n")
    pid = tmp_path / "pid"
    with pytest.raises(ToolTimeoutError, match=r"sh took longer than 2 s and was ended: working") as raised:
        await tools.call("sh", {"script": f"echo working >&2; sleep 60 & echo $! > {pid}; wait"})
    assert isinstance(raised.value, TimeoutError | ToolCallError)
    assert await gone(pid)


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_a_program_gets_sigterm_before_sigkill(tmp_path: Path, how: str) -> None:
    tools = catalog(SHELL + f"timeout: {2 if how == 'timeout' else 60}\n")
    began, tidied = tmp_path / "began", tmp_path / "tidied"
    script = f"trap 'echo yes > {tidied}; exit' TERM; echo yes > {began}; while :; do sleep 0.01; done"
    call = asyncio.create_task(tools.call("sh", {"script": script}))
    await until_there(began)
    if how == "cancel":
        call.cancel()
    with pytest.raises((ToolTimeoutError, asyncio.CancelledError)):
        await call
    assert tidied.read_text() == "yes\n"


async def test_a_program_that_ignores_sigterm(tmp_path: Path) -> None:
    tools = catalog(SHELL + "timeout: 1.5\n")
    pid = tmp_path / "pid"
    with pytest.raises(ToolTimeoutError):
        await tools.call("sh", {"script": f"trap '' TERM; echo $$ > {pid}; while :; do sleep 0.1; done"})
    assert await gone(pid)


async def test_cancelling_the_caller_ends_the_program(tmp_path: Path) -> None:
    tools = catalog(SHELL)
    pid = tmp_path / "pid"
    call = asyncio.create_task(tools.call("sh", {"script": f"sleep 60 & echo $! > {pid}; wait"}))
    await until_there(pid)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await gone(pid)


async def test_background_processes_are_ended(tmp_path: Path) -> None:
    tools = catalog(SHELL + "timeout: 30\n")
    pid = tmp_path / "pid"
    assert await tools.call("sh", {"script": f"sleep 60 & echo $! > {pid}; echo done"}) == "done\n"
    assert await gone(pid)


async def test_output_of_background_processes_is_not_in_the_result(tmp_path: Path) -> None:
    tools = catalog(SHELL + "timeout: 30\n")
    pid, floods = tmp_path / "pid", tmp_path / "floods"
    flood = f"(echo y; touch {floods}; exec yes) & echo $! > {pid}"
    text = await tools.call("sh", {"script": f"echo first; {flood}; while ! [ -e {floods} ]; do sleep 0.01; done"})
    assert text.startswith("first\ny\n")
    assert await gone(pid)


async def test_output_is_bounded() -> None:
    tools = catalog(PYTHON, PYTHON.replace("name: python", "name: js", 1) + "output: json\n")
    code = f"import sys; sys.stdout.write('a' * {LIMIT} + 'b' * 5000 + 'end')"
    text = await tools.call("python", {"code": code})
    assert len(text) < LIMIT + 100
    assert text.startswith("aaa")
    assert text.endswith("bend")
    assert "[… 5,003 bytes left out …]" in text
    with pytest.raises(ToolCallError, match="so its json is incomplete"):
        await tools.call("js", {"code": code})


async def test_no_descriptors_are_left_open() -> None:
    tools = catalog(SHELL + "timeout: 1\n")
    await tools.call("sh", {"script": "echo warm"})
    gc.collect()  # what earlier tests left for it to close is no part of this count
    before = len(os.listdir("/proc/self/fd"))
    for script in ("echo a", "exit 1", "sleep 60"):
        with contextlib.suppress(ToolCallError):
            await tools.call("sh", {"script": script})
    async with asyncio.timeout(60):
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110 -- there is no event for a closed descriptor
            await asyncio.sleep(0.01)


def test_too_few_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.library.tools.few_descriptors"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["['[Errno 24] Too many open files', 'it ran']", "nothing left over"], (
        done.stderr
    )
    assert done.stderr == ""


# --- while it comes ---------------------------------------------------------------------------------------------------


async def test_output_is_streamed_as_it_comes(tmp_path: Path) -> None:
    tools = catalog(SHELL)
    go = tmp_path / "go"
    output: list[str] = []
    first = asyncio.Event()

    def say(piece: str) -> None:
        output.append(piece)
        first.set()

    script = f"printf 'half ü'; while [ ! -e {go} ]; do sleep 0.01; done; echo ' rest'"
    call = asyncio.create_task(tools.call("sh", {"script": script}, say))
    await first.wait()
    assert not call.done()
    go.touch()
    assert await call == "half ü rest\n"
    assert "".join(output) == "half ü rest\n"


async def test_concurrent_calls(tmp_path: Path) -> None:
    """Each waits for all the others, so that they can only end when they run at once."""
    tools = catalog(SHELL + "timeout: 60\n")
    script = f"touch {tmp_path}/$0; while [ $(ls {tmp_path} | wc -l) -lt 8 ]; do sleep 0.02; done; echo $0"
    calls = [tools.call("sh", {"script": script, "words": [str(n)]}) for n in range(8)]
    assert await asyncio.gather(*calls) == [f"{n}\n" for n in range(8)]


async def test_too_many_calls_wait() -> None:
    tools = catalog("name: yes\ncommand: echo y\n")
    assert await asyncio.gather(*(tools.call("yes") for _ in range(150))) == ["y\n"] * 150


# --- inside -----------------------------------------------------------------------------------------------------------


async def test_programs_in_the_sandbox(tmp_path: Path) -> None:
    calls: list[Any] = []

    async def inside(
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
    ) -> ProcessResult:
        calls.append((list(argv), stdin, dict(env or {}), cwd, timeout))
        return ProcessResult(exit_code=0, stdout=b"from inside\n", stderr="")

    text = "name: ls\ncommand: ls\nruns: sandbox\ncwd: src\nstdin: text\nenv: {A: b}\ntimeout: 7\n"
    tools = ToolRegistry([program(text, sandbox=inside)])
    assert await tools.call("ls", {"text": "x"}) == "from inside\n"
    assert calls == [(["ls"], b"x", {"A": "b"}, "src", 7)]
    with pytest.raises(ConfigurationError, match="runs: sandbox needs a sandbox"):
        await catalog(text).call("ls", {"text": "x"})


async def test_a_real_program(tmp_path: Path) -> None:
    assert shutil.which("git") is not None
    tools = catalog(
        f"name: git\ncommand: git --no-pager\ncwd: {tmp_path}\n"
        "schema: {options: {oneline: {type: boolean}, max-count: {type: integer}}, positional: [{name: verb}]}\n"
        "recipes: {status: {preset: {verb: status}}, init: {preset: {verb: init}}}\n",
    )
    await tools.call("git.init")
    assert (tmp_path / ".git").is_dir()
    assert "No commits yet" in await tools.call("git.status")
    with pytest.raises(ToolCallError, match="would read as an option"):
        await tools.call("git", {"verb": "--exec-path=/tmp"})
    with pytest.raises(ToolCallError, match=r"git ended with exit code 1: .* is not a git command"):
        await tools.call("git", {"verb": "no-such-verb"})


async def test_environment_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_ONLY", "not for tools")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    plain = catalog("name: show\ncommand: env")
    environment = await plain.call("show")
    assert "PATH=" in environment
    assert "HOST_ONLY" not in environment
    assert "proxy" not in environment
    named = catalog(
        'name: show\ncommand: env\nenv: {https_proxy: "${https_proxy}", MORE: x}', environment=dict(os.environ)
    )
    assert {"https_proxy=${https_proxy}", "MORE=x"} <= set((await named.call("show")).splitlines())
    assert "HOST_ONLY" not in await named.call("show")


async def test_curl_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    (text,) = re.findall(r"```yaml\n(name: curl .*?)```", page, re.DOTALL)
    definition = parse_definition(text.encode(), "tools/curl.yaml")
    assert isinstance(definition, CliDefinition)
    words, _ = command_line(definition, "curl", None, {"url": "file:///etc/passwd"})
    assert words == ["curl", "--proto", "=http,https", "file:///etc/passwd"]
    with pytest.raises(ToolCallError, match="header"):
        await catalog(text).call("curl", {"url": "http://127.0.0.1:9/", "header": ["@/etc/passwd"]})
