"""The programs in examples/, run with the real SDKs and a scripted model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from carrel import FileStorage, MemoryStorage, Session
from examples import agent_loop, attempts, best_of_n, continue_later, grade_repository, web_client
from tests.support.faulty_server import FaultyServer
from tests.support.git_repositories import flat
from tests.support.lazy_module import LazyModule
from tests.support.server_process import ServerProcess

pydantic_ai = LazyModule("pydantic_ai")
function_model = LazyModule("pydantic_ai.models.function")
pydantic_ai_tool = LazyModule("examples.pydantic_ai_tool")

ROOT = Path(__file__).parents[1]


def test_each_example_is_on_the_page() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in (ROOT / "examples").glob("*.*"))
    assert sorted(set(re.findall(r"\(\.\./examples/(\w+\.\w+)\)", page))) == files


# --- a loop of one's own ----------------------------------------------------------------------------------------------


async def test_the_agent_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    await agent_loop.main()
    assert capsys.readouterr().out == "There are four words.\n"
    async with FileStorage(tmp_path / ".carrel") as storage:
        store = storage.get_session_store()
        [meta] = await store.list_sessions()
        kept = await store.load_session(meta["id"])
    assert kept is not None
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"] * 4
    blocks = [message["content"][0] for message in kept["messages"]]
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert ["NameError" in result["model_text"] for result in results] == [False, True, False]
    assert [result["is_error"] for result in results] == [False, True, False]
    assert results[-1]["model_text"] == "4"


def test_the_agent_with_the_sdk_of_anthropic(tmp_path: Path) -> None:
    answers = [
        {"type": "tool_use", "id": "t1", "name": "run_code", "input": {"code": "sum(range(10))"}},
        {"type": "text", "text": "It is 45."},
    ]
    reply: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "stop_reason": "end_turn",
    }
    reply |= {"stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
    bodies = [json.dumps({**reply, "content": [answer]}).encode() for answer in answers]
    with FaultyServer([(200, {"Content-Type": "application/json"}, body) for body in bodies]) as server:
        env = {**os.environ, "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none"}
        program = [sys.executable, str(ROOT / "examples" / "anthropic_agent.py"), "What is the sum?"]
        done = subprocess.run(program, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("It is 45.\n", 0), done.stderr
    first, second = (json.loads(request.body) for request in server.seen)
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert second["messages"][2]["content"][0]["content"] in ("45", [{"type": "text", "text": "45"}])


async def test_best_of_n(capsys: pytest.CaptureFixture[str]) -> None:
    await best_of_n.main()
    assert capsys.readouterr().out.splitlines() == [
        "best score: 1, its notes: ['read the tests', 'applied a patch']",
        "the session itself is unchanged: ['read the tests'], []",
    ]


async def test_grading_an_agent_on_a_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the example's folder is relative
    repository = flat(tmp_path / "halves")
    command = "sed -i 's,// 2,/ 2,' halves.py"
    await grade_repository.main(str(repository.folder), "v1..trunk", command)
    assert capsys.readouterr().out.splitlines() == ["1 samples from v1..trunk", "solved 1 of 1"]


def test_the_client_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ServerProcess(tmp_path / "server").start()
    web_client.main(server.key, server.url)
    server.stop()
    printed = capsys.readouterr().out
    assert printed.startswith("session on demo/calc-1: ready\n")
    assert printed.endswith("exit code 0\nverdict: solved, score 1.0\n")


async def test_the_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    await attempts.main()
    assert capsys.readouterr().out.splitlines() == [
        "attempt 1: exit code 0, not_solved",
        "attempt 2: exit code 0, not_solved",
        "attempt 3: exit code 0, solved",
        "messages now: 2",
    ]


async def test_the_session_that_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        await continue_later.main(str(tmp_path))
    assert capsys.readouterr().out.splitlines() == [
        "step 1, files: steps.txt",
        "continues with 1 messages and the variables steps",
        "step 2, files: steps.txt",
    ]


def test_the_agent_loop_is_a_page_long() -> None:
    assert len((ROOT / "examples" / "agent_loop.py").read_text().splitlines()) <= 60


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


async def test_a_pydantic_ai_agent_writes_code() -> None:
    codes = iter(["x = [1, 2", "x = [1, 2]\nprint('made')", "tools.double(sum(x))"])
    instructions: list[str | None] = []

    def speak(messages: list[Any], info: Any) -> Any:
        instructions.append(info.instructions)
        code = next(codes, None)
        part = pydantic_ai.TextPart("Six.") if code is None else pydantic_ai.ToolCallPart("run_code", {"code": code})
        return pydantic_ai.ModelResponse(parts=[part])

    async with Session(MemoryStorage()) as session:
        session.register_tool(lambda number: number * 2, name="double", description="Twice a number.")
        with pydantic_ai.capture_run_messages() as messages:
            done = await pydantic_ai_tool.coder(function_model.FunctionModel(speak)).run("Double the sum", deps=session)
    assert done.output == "Six."
    assert "Twice a number." in (instructions[0] or "")
    parts = [part for message in messages for part in message.parts]
    returned = [part for part in parts if part.part_kind == "tool-return"]
    assert [part.outcome for part in returned] == ["retried", "success", "success"]
    assert "SyntaxError" in str(returned[0].content)
    assert [part.content for part in returned[1:]] == [
        {"printed": "made\n", "value": "None"},
        {"printed": "", "value": "6"},
    ]


# --- a notebook -------------------------------------------------------------------------------------------------------


def run_cell(client: Any, source: str) -> dict[str, Any]:
    """Run a cell in a kernel; return what it prints and the last value in all its forms."""
    shown: dict[str, Any] = {"printed": ""}

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        assert message["header"]["msg_type"] != "error", content["traceback"]
        shown["printed"] += content.get("text", "")
        shown.update(content.get("data", {}))

    client.execute_interactive(source, timeout=60, output_hook=note)
    return shown


def test_the_notebook_in_a_jupyter_kernel() -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    manager, client = start_new_kernel()
    try:
        shown = [run_cell(client, "".join(cell["source"])) for cell in cells]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    for cell, now in zip(cells, shown, strict=True):
        stored: dict[str, Any] = {"printed": ""}
        for output in cell["outputs"]:
            stored["printed"] += "".join(output.get("text", ()))
            stored |= output.get("data", {})
        assert stored.keys() == now.keys()
        assert stored["printed"] == now["printed"]
    assert any("data:image/png;base64," in now.get("text/html", "") for now in shown)
    assert "<td><pre>6.5</pre></td>" in shown[1]["text/html"]
