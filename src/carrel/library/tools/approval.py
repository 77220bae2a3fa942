"""Asking somebody before a tool is called: what is asked, and what may be answered."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from carrel.errors import ToolRefusedError
from carrel.library.tools.tool import Tool
from carrel.processes import run_in_thread


@dataclass(frozen=True)
class ApprovalRequest:
    """A call that waits for a yes or a no."""

    tool: str
    """As code calls it: `curl.get`."""
    arguments: dict[str, Any]
    """Checked already, by their names; a copy, so that changing it changes nothing."""
    description: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Approve:
    """Yes; with other arguments when some are given."""

    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Refuse:
    """No, and why: the code that called sees the reason."""

    reason: str = ""


Decision = bool | str | Mapping[str, Any] | Approve | Refuse | None
"""True: yes. A mapping: yes, with these arguments instead. A text: no, and why. False or None: no."""

Approver = Callable[[ApprovalRequest], Decision | Awaitable[Decision]]
"""Whoever is asked. An `async def` runs on the loop; a plain function in a thread of its own, so that it may block."""


@dataclass(frozen=True)
class Approval:
    """The questions of one session go to one approver, or to nobody."""

    approver: Approver | None = None

    def wanted(self, tool: Tool) -> bool:
        return tool.approval == "ask"

    async def of(self, tool: Tool, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """The arguments to call with; `ToolRefusedError` when the answer is no, or nobody can be asked."""
        if self.approver is None:
            raise ToolRefusedError(
                f"{tool.name} may only be called when somebody approves, and nobody is there to ask; "
                "give the Session an approve= function"
            )
        request = ApprovalRequest(tool.name, dict(arguments), tool.description, tool.tags)
        try:
            answer = await asked(self.approver, request)
        except Exception as problem:
            told = f"{type(problem).__name__}: {problem}"
            raise ToolRefusedError(f"{tool.name} was not called: the approve function failed: {told}") from problem
        return _meant(tool, arguments, answer)


async def asked(approver: Approver, request: ApprovalRequest) -> Decision:
    """What the approver says, of whichever kind it is."""
    if inspect.iscoroutinefunction(approver) or inspect.iscoroutinefunction(getattr(approver, "__call__", None)):  # noqa: B004
        answer = approver(request)
    else:
        answer = await run_in_thread(lambda: approver(request))
    return await answer if inspect.isawaitable(answer) else answer


def _meant(tool: Tool, arguments: Mapping[str, Any], answer: Decision) -> Mapping[str, Any]:
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
                f"the call of {tool.name} was refused: the approve function answered with a {type(answer).__name__}; "
                "True, False, a reason, other arguments, Approve or Refuse were expected"
            )
