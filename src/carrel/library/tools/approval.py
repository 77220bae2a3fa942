"""Approval of calls: tools with `approval: ask` are called only if an approver agrees."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from carrel.errors import ToolRefusedError
from carrel.library.tools.tool import Tool
from carrel.processes import run_in_thread


@dataclass(frozen=True)
class ApprovalRequest:
    """A call that waits for approval."""

    tool: str
    """As code calls it: `curl.get`."""
    arguments: dict[str, Any]
    """Validated, by name; a copy, so changing it has no effect."""
    description: str = ""
    tags: tuple[str, ...] = ()
    session_id: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class Approve:
    """Approve the call, with other arguments if some are given."""

    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Refuse:
    """Refuse the call; the calling code gets the reason."""

    reason: str = ""


Decision = bool | str | Mapping[str, Any] | Approve | Refuse | None
"""True approves; a mapping approves with these arguments instead; a text refuses with this reason; False and None
refuse."""

Approver = Callable[[ApprovalRequest], Decision | Awaitable[Decision]]
"""Decides about a call. A plain function runs in a thread of its own, so it may block."""


@dataclass(frozen=True)
class Approval:
    """Asks the approver of a session, if it has one."""

    approver: Approver | None = None
    session_id: str = ""

    async def request(self, tool: Tool, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Return the arguments to call with; `ToolRefusedError` when the call is refused or there is no approver."""
        if self.approver is None:
            raise ToolRefusedError(
                f"{tool.name} may be called only with approval, and this session has no approver; "
                "pass an approve= function to the Session"
            )
        request = ApprovalRequest(tool.name, dict(arguments), tool.description, tool.tags, self.session_id)
        try:
            answer = await ask_approver(self.approver, request)
        except Exception as error:
            raise ToolRefusedError(
                f"{tool.name} was not called: the approve function failed: {type(error).__name__}: {error}"
            ) from error
        return _interpret(tool, arguments, answer)


async def ask_approver(approver: Approver, request: ApprovalRequest) -> Decision:
    """Call an approver, which may be synchronous or asynchronous."""
    if inspect.iscoroutinefunction(approver) or inspect.iscoroutinefunction(getattr(approver, "__call__", None)):  # noqa: B004
        answer = approver(request)
    else:
        answer = await run_in_thread(lambda: approver(request))
    return await answer if inspect.isawaitable(answer) else answer


def _interpret(tool: Tool, arguments: Mapping[str, Any], answer: Decision) -> Mapping[str, Any]:
    match answer:
        case True:
            return arguments
        case Approve(arguments=None):
            return arguments
        case Approve(arguments=other):
            return dict(other or {})
        case Mapping():
            return dict(answer)
        case Refuse(reason=reason) | str(reason) if reason:
            raise ToolRefusedError(f"the call of {tool.name} was refused: {reason}")
        case None | False | Refuse() | "":
            raise ToolRefusedError(f"the call of {tool.name} was refused")
        case _:
            raise ToolRefusedError(
                f"the call of {tool.name} was refused: the approve function returned a {type(answer).__name__}; "
                "return True, False, a reason, other arguments, Approve or Refuse"
            )
