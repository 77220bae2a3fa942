"""CarrelSandbox against LangChain's standard tests of sandboxes, and under an agent."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.frameworks import require

require("deepagents")
require("langchain_tests")

from deepagents import create_deep_agent
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import SandboxIntegrationTests

from carrel import MemoryStorage, Session, SyncSession
from carrel.adapters.deepagents import CarrelSandbox

pytestmark = pytest.mark.real

RELATIVE = "the suite expects paths relative to the searched folder; deepagents' BaseSandbox.glob returns absolute ones"
EXCEPTIONS = {
    "test_glob": RELATIVE,
    "test_glob_basic_pattern": RELATIVE,
    "test_glob_hidden_files_explicitly": RELATIVE,
    "test_glob_with_character_class": RELATIVE,
    "test_glob_with_question_mark": RELATIVE,
    "test_glob_with_directories": "the suite expects folders too; deepagents' BaseSandbox.glob returns files only",
    "test_write_existing_file_fails": "deepagents' BaseSandbox.write replaces a file that exists",
}
"""Tests in langchain_tests/integration_tests/sandboxes.py that no sandbox on this deepagents passes."""


class TestSandbox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CarrelSandbox]:
        with CarrelSandbox(base=tmp_path_factory.mktemp("base")) as sandbox:
            yield sandbox

    @pytest.fixture(autouse=True)
    def expect_exceptions(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in EXCEPTIONS:
            request.applymarker(pytest.mark.xfail(reason=EXCEPTIONS[request.node.originalname], strict=True))


class PlainSandbox(BaseSandbox):
    """A sandbox without any isolation: a subprocess and this machine's files."""

    id = "plain"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        return ExecuteResponse(done.stdout + done.stderr, done.returncode)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        for path, data in files:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        return [FileUploadResponse(path) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path, Path(path).read_bytes()) for path in paths]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_fails_with_a_plain_subprocess_too(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(TestSandbox(), name)(PlainSandbox(), str(tmp_path))


# --- under an agent ---------------------------------------------------------------------------------------------------


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, *args: Any, **named: Any) -> Any:
        return self


def call(number: int, name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{number}", "type": "tool_call"}])


async def test_an_agent_works_in_the_sandbox() -> None:
    model = ScriptedModel(
        messages=iter(
            [
                call(1, "write_file", file_path="/workspace/a.txt", content="one two\n"),
                call(2, "execute", command="wc -w < a.txt"),
                AIMessage("Two words."),
            ]
        )
    )
    with SyncSession(MemoryStorage()) as session:
        agent = create_deep_agent(model=model, backend=CarrelSandbox(session))
        done = await agent.ainvoke({"messages": [{"role": "user", "content": "Write and count."}]})
        assert done["messages"][-1].content == "Two words."
        assert done["messages"][-2].content.startswith("2")
        assert [change.path for change in session.changed_files()] == ["a.txt"]


def test_a_command_that_takes_too_long(tmp_path: Path) -> None:
    with CarrelSandbox(base=tmp_path, session_id="a", timeout=0.5) as sandbox:
        assert sandbox.id == "a"
        done = sandbox.execute("echo begun; sleep 30")
        assert (done.exit_code, "begun" in done.output, "0.5 seconds" in done.output) == (124, True, True)
        assert sandbox.execute("sleep 1; echo ended", timeout=0).output == "ended\n"


def test_threads_that_use_it_first_share_one_session(tmp_path: Path) -> None:
    with CarrelSandbox(base=tmp_path) as sandbox, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: sandbox.execute(f"touch {number}"), range(8)))
        assert sandbox.execute("ls").output.split() == [str(number) for number in range(8)]


async def test_a_session_of_an_event_loop_is_refused() -> None:
    async with Session(MemoryStorage()) as session:
        with pytest.raises(TypeError, match="SyncSession"):
            CarrelSandbox(session)  # type: ignore[arg-type]
