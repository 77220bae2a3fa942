"""What a session does, as steps of its trace: in which run each happened, and after which message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from carrel.execution.executor import ExecutionResult
from carrel.trace import Kind, Step, Trace, size_of


class Steps:
    """The steps of one session; one run at a time is the one in which its code's calls happen."""

    def __init__(self, trace: Trace, last_said: Callable[[], str | None]) -> None:
        """`last_said`: the id of the conversation's last message."""
        self._trace = trace
        self._last_said = last_said
        self.running: Step | None = None
        self._flows: dict[str, list[Step]] = {}
        """The workflows that have begun and not ended, by name."""

    def step(self, kind: Kind, name: str, parent: Step | None = None) -> AbstractContextManager[Step]:
        """A step that ends with the block."""
        return self._trace.step(kind, name, parent=parent, message=self._last_said())

    @contextmanager
    def run(self, code: str) -> Iterator[Step]:
        """A run of code; what is called meanwhile is a part of it."""
        first = code.strip().partition("\n")[0] if isinstance(code, str) else type(code).__name__
        step = self.running = self._trace.begin("run", first, message=self._last_said())
        try:
            yield step
        except BaseException as raised:
            step.raised(raised)
            raise
        finally:
            self.running = None
            self._end_workflows(step)
            self._trace.end(step)

    def _end_workflows(self, run: Step) -> None:
        """Those that have not reported their end when the run ends: it was killed, timed out or left them behind."""
        for step in (step for steps in self._flows.values() for step in steps):
            if run.error is not None:
                step.failed(run.error_type or "Error", run.error)
            else:
                step.outcome = "cancelled"
            self._trace.end(step)
        self._flows.clear()

    async def install(
        self, kind: Kind, what: str, doing: Awaitable[dict[str, Any]], parent: Step | None = None
    ) -> dict[str, Any]:
        """The report of an install or uninstall."""
        with self.step(kind, what, parent) as step:
            report = await doing
            step.facts |= {name: value for name, value in report.items() if isinstance(value, list) and value}
            if report.get("failed"):
                step.failed("DependencyError", str(report.get("message", "")))
            return report

    def workflow_began(self, name: str) -> None:
        step = self._trace.begin("workflow", name, parent=self.running)
        self._flows.setdefault(name, []).append(step)

    def workflow_ended(self, name: str, error: Any = None) -> None:
        if not self._flows.get(name):
            return
        step = self._flows[name].pop()
        if error:
            step.failed("WorkflowExecutionError", str(error))
        self._trace.end(step)


def note_result(step: Step, result: ExecutionResult) -> None:
    """What came of a run."""
    step.sizes |= {"stdout": len(result.stdout), "stderr": len(result.stderr)}
    if result.state != "kept":
        step.facts |= {"state": result.state}
    if result.error is not None:
        step.failed(result.error_type or "Error", result.error)


def sized(step: Step, arguments: Any, value: Any) -> Any:
    """The value, once it is noted how much went in and came out."""
    step.sizes |= {"arguments": size_of(arguments), "result": size_of(value)}
    return value
