"""CarrelWorkspace against pydantic-ai's own conformance suite, and under an agent."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.frameworks import first_line_before_kill, require

require("pydantic_ai")

from pydantic_ai import Agent, ModelResponse, RunContext, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import WorkspaceOutputLimitError, WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from carrel import ConfigurationError, MemoryStorage, Session, SubprocessConfig, SubprocessExecutor
from carrel.adapters.pydantic_ai import CarrelWorkspace

pytestmark = pytest.mark.real


class TestWorkspaceBackend(WorkspaceBackendSuite):
    pytestmark = pytest.mark.real  # The suite's own mark is for the plugin of anyio; here pytest-asyncio runs it.

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[CarrelWorkspace]:
        async with CarrelWorkspace(base=tmp_path / "base") as workspace:
            yield workspace

    @pytest.fixture
    async def fresh_backend(self, tmp_path: Path) -> AsyncIterator[Callable[[], CarrelWorkspace]]:
        opened: list[CarrelWorkspace] = []

        def fresh() -> CarrelWorkspace:
            opened.append(CarrelWorkspace(base=tmp_path / "base"))
            return opened[-1]

        yield fresh
        for workspace in opened:
            await workspace.close()

    @pytest.fixture
    def attach_backend(self, tmp_path: Path) -> Callable[[WorkspaceRef], CarrelWorkspace]:
        return lambda ref: CarrelWorkspace(base=tmp_path / "base", ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[CarrelWorkspace], Awaitable[None]]:
        return CarrelWorkspace.delete


# --- under an agent ---------------------------------------------------------------------------------------------------


async def test_an_agent_works_in_a_session_that_the_program_watches() -> None:
    commands = iter(["echo one > a.txt", "false"])

    def speak(messages: list[Any], info: Any) -> ModelResponse:
        command = next(commands, None)
        return ModelResponse([TextPart("Done.") if command is None else ToolCallPart("shell", {"command": command})])

    agent = Agent(FunctionModel(speak), deps_type=type(None))

    @agent.tool
    async def shell(context: RunContext[None], command: str) -> int:
        return (await context.workspace.run(command, shell=True)).exit_code

    async with Session(MemoryStorage()) as session:
        workspace = CarrelWorkspace(session)
        done = await agent.run("Work.", workspace=workspace)
        parts = [part for message in done.all_messages() for part in message.parts]
        assert [part.content for part in parts if part.part_kind == "tool-return"] == [0, 1]
        assert [change.path for change in await session.changed_files()] == ["a.txt"]
        await workspace.close()
        assert (await session.run("open('a.txt').read()")).value == "one\n", "a session that is handed in stays open"
    with pytest.raises(WorkspaceUnavailableError):
        await workspace.run("true", shell=True)


async def test_a_workspace_is_continued_after_its_process_was_killed(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from carrel.adapters.pydantic_ai import CarrelWorkspace

        async def main():
            workspace = CarrelWorkspace(base=sys.argv[1])
            await workspace.run("echo kept > a.txt; mkdir b; echo more > b/c", shell=True)
            print(workspace.ref.id, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    ref = WorkspaceRef(provider="carrel", id=first_line_before_kill(program, tmp_path))
    async with CarrelWorkspace(base=tmp_path, ref=ref) as workspace:
        assert (await workspace.run("cat a.txt b/c", shell=True)).stdout == "kept\nmore\n"
        assert workspace.ref == ref
    async with CarrelWorkspace(base=tmp_path, ref=ref) as again:
        await again.delete()
    with pytest.raises(WorkspaceUnavailableError):
        await CarrelWorkspace(base=tmp_path, ref=ref).working_dir()


async def test_what_cannot_be_a_workspace(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="either a session"):
        CarrelWorkspace()
    with pytest.raises(ConfigurationError, match="'local'"):
        CarrelWorkspace(base=tmp_path, ref=WorkspaceRef(provider="local", id="x"))
    with pytest.raises(WorkspaceUnavailableError, match="no session"):
        await CarrelWorkspace(base=tmp_path, ref=WorkspaceRef(provider="carrel", id="gone")).working_dir()


async def test_too_much_output_is_an_error() -> None:
    executor = SubprocessExecutor(SubprocessConfig(output_limit=1000))
    async with Session(MemoryStorage(), executor) as session:
        with pytest.raises(WorkspaceOutputLimitError, match="1000 bytes") as caught:
            await CarrelWorkspace(session).run("seq 1000", shell=True)
    assert caught.value.stdout.startswith("1\n2\n")
