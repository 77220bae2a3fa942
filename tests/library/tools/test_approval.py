"""Approval of calls: the request, the possible answers, and that other calls do not wait."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ToolCallError, ToolRefusedError
from carrel.library.tools.approval import ApprovalRequest, Approve, Refuse
from carrel.library.tools.registry import ToolRegistry
from tests.support.tools import catalog

ECHO = """\
name: echo
description: Say it
command: echo
tags: [talk]
approval: ask
schema: {positional: [{name: text, required: true}]}
recipes: {hello: {preset: {text: hello}, approval: never}}
"""


def asking(answer: Any) -> ToolRegistry:
    return catalog(ECHO, approve=lambda request: answer)


@pytest.mark.parametrize("answer", [True, Approve()])
async def test_approved(answer: Any) -> None:
    assert await asking(answer).call("echo", {"text": "a"}) == "a\n"


@pytest.mark.parametrize("answer", [{"text": "b"}, Approve({"text": "b"})])
async def test_approval_with_other_arguments(answer: Any) -> None:
    assert await asking(answer).call("echo", {"text": "a"}) == "b\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (False, "the call of echo was refused"),
        (None, "the call of echo was refused"),
        (Refuse(), "the call of echo was refused"),
        ("", "the call of echo was refused"),
        ("too loud", "the call of echo was refused: too loud"),
        (Refuse("too loud"), "the call of echo was refused: too loud"),
        (1, "the approve function returned a int"),
        (["text"], "the approve function returned a list"),
    ],
)
async def test_refused(answer: Any, expected: str) -> None:
    with pytest.raises(ToolRefusedError) as raised:
        await asking(answer).call("echo", {"text": "a"})
    assert expected in str(raised.value)
    assert isinstance(raised.value, ToolCallError)
    assert isinstance(raised.value, PermissionError)


async def test_without_an_approver_calls_are_refused() -> None:
    with pytest.raises(ToolRefusedError, match="pass an approve= function to the Session"):
        await catalog(ECHO).call("echo", {"text": "a"})


async def test_the_request() -> None:
    requests: list[ApprovalRequest] = []

    async def approve(request: ApprovalRequest) -> bool:
        requests.append(request)
        request.arguments["text"] = "changed behind the back"
        return True

    tools = catalog(ECHO, approve=approve)
    assert await tools.handle("tools.echo", ["a"], {}) == "a\n"
    [request] = requests
    assert (request.tool, request.description, request.tags) == ("echo", "Say it", ("talk",))
    assert request.id
    assert request.created_at.tzinfo is not None


async def test_tools_without_approval() -> None:
    assert await catalog(ECHO).call("echo.hello") == "hello\n"


async def test_arguments_are_validated_before_and_after_approval() -> None:
    requests: list[Mapping[str, Any]] = []

    def approve(request: ApprovalRequest) -> Any:
        requests.append(request.arguments)
        return {"txet": "b"}

    tools = catalog(ECHO, approve=approve)
    with pytest.raises(ToolCallError, match="it has no parameter txt"):
        await tools.call("echo", {"txt": "a"})
    assert requests == []
    with pytest.raises(ToolCallError, match="it has no parameter txet"):
        await tools.call("echo", {"text": "a"})
    assert requests == [{"text": "a"}]


async def test_an_approver_that_fails_refuses(tmp_path: Path) -> None:
    def approve(request: ApprovalRequest) -> bool:
        raise RuntimeError("lost the keyboard")

    tools = catalog(f"name: touch\ncommand: touch {tmp_path}/made\napproval: ask\n", approve=approve)
    with pytest.raises(ToolRefusedError, match="the approve function failed: RuntimeError: lost the keyboard"):
        await tools.call("touch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("manner", ["blocking", "async"])
async def test_other_calls_run_while_one_waits_for_approval(manner: str) -> None:
    was_called, approved, heard = asyncio.Event(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def blocking(request: ApprovalRequest) -> bool:
        loop.call_soon_threadsafe(was_called.set)
        return approved.wait(60)

    async def waiting(request: ApprovalRequest) -> bool:
        was_called.set()
        return await heard.wait()

    tools = catalog(ECHO, approve=blocking if manner == "blocking" else waiting)
    waits = asyncio.create_task(tools.call("echo", {"text": "late"}))
    await was_called.wait()
    assert await asyncio.gather(*(tools.call("echo.hello") for _ in range(3))) == ["hello\n"] * 3
    assert not waits.done()
    approved.set()
    heard.set()
    assert await waits == "late\n"


async def test_the_timeout_does_not_include_approval() -> None:
    async def slowly(request: ApprovalRequest) -> bool:
        await asyncio.sleep(1.7)
        return True

    tools = catalog(ECHO + "timeout: 1.5\n", approve=slowly)
    assert await tools.call("echo", {"text": "a"}) == "a\n"
