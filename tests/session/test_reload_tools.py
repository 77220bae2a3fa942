"""`session.reload_tools()`: changed tool files are used from then on."""

from pathlib import Path

import pytest

from carrel import ApprovalRequest, ConfigurationError, Session

ECHO = "name: echo\ncommand: echo -n {text}\napproval: {approval}\n"


async def test_changed_files_are_used_after_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "tools" / "echo.yaml"
    file.parent.mkdir()
    file.write_text(ECHO.format(text="one", approval="never"))
    async with Session.inprocess(tmp_path) as session:
        assert (await session.run("tools.echo()")).value == "one"
        file.write_text(ECHO.format(text="two", approval="never"))
        assert (await session.run("tools.echo()")).value == "one"
        await session.reload_tools()
        assert (await session.run("tools.echo()")).value == "two"
        file.write_text("name: echo\n")
        with pytest.raises(ConfigurationError, match="command: is missing"):
            await session.reload_tools()
        assert await session.call_tool("echo") == "two"


async def test_an_approval_request_names_the_session(tmp_path: Path) -> None:
    requests: list[ApprovalRequest] = []

    def approve(request: ApprovalRequest) -> bool:
        requests.append(request)
        return True

    file = tmp_path / "tools" / "echo.yaml"
    file.parent.mkdir()
    file.write_text(ECHO.format(text="one", approval="ask"))
    async with Session.inprocess(tmp_path, approve=approve) as session:
        for _ in range(2):
            assert (await session.run("tools.echo()")).value == "one"
        assert [request.session_id for request in requests] == [session.id] * 2
    assert len({request.id for request in requests}) == 2
