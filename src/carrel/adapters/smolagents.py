"""A carrel session as the executor of smolagents' CodeAgent."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smolagents.local_python_executor import DEFAULT_MAX_LEN_OUTPUT, CodeOutput, InterpreterError, PythonExecutor
from smolagents.utils import truncate_content

from carrel.adapters.sessions import SyncSource
from carrel.session.sync_session import SyncSession

_FINAL = "FinalAnswer"
_CALLS = """
class _ToolCall:
    def __init__(self, name, parameters):
        self.name, self.parameters = name, parameters
    def __call__(self, *args, **kwargs):
        if len(args) > len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, and was called with {len(args)}")
        return getattr(tools, "agent_" + self.name)(**dict(zip(self.parameters, args)), **kwargs)
class FinalAnswer(BaseException):
    pass
class _FinalAnswerCall(_ToolCall):
    def __call__(self, *args, **kwargs):
        super().__call__(*args, **kwargs)
        raise FinalAnswer
"""


class CarrelExecutor(PythonExecutor):
    """Runs an agent's code in one session: `CodeAgent(…, executor=CarrelExecutor(base=".carrel"))`.

    Variables and files stay from step to step. The agent's tools run in this process; what goes to a tool or comes
    from it is data (see `Session.run`). `timeout` is the time limit of a step in seconds."""

    def __init__(
        self,
        session: SyncSession | None = None,
        *,
        base: Path | str | None = None,
        session_id: str | None = None,
        timeout: float | None = 30,
        max_print_outputs_length: int | None = None,
    ) -> None:
        self._source = SyncSource(session, base, session_id)
        self._timeout = timeout
        self._longest = max_print_outputs_length or DEFAULT_MAX_LEN_OUTPUT
        self._tools: dict[str, Callable[..., Any]] = {}
        self._registered: set[str] = set()
        self._answer: Any = None

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Make the tools functions of the code; a later call replaces those of the same name."""
        session = self._source.open()
        lines = [_CALLS]
        for name, tool in tools.items():
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"the tool {name!r} cannot be called in Python code: its name is not an identifier")
            self._tools[name] = tool
            if name not in self._registered:
                # Not under its own name: `tools.search` and `tools.list` are carrel's.
                session.register_tool(
                    self._caller(name), name=f"agent_{name}", description=tool.description, timeout=None
                )
                self._registered.add(name)
            kind = "_FinalAnswerCall" if name == "final_answer" else "_ToolCall"
            lines.append(f"{name} = {kind}({name!r}, {list(tool.inputs)!r})")
        self._run("\n".join(lines))

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Set variables of the code to data."""
        if variables:
            self._source.open().set_variables(**variables)

    def __call__(self, code_action: str) -> CodeOutput:
        result = self._source.open().run(code_action, timeout=self._timeout)
        logs = truncate_content(result.stdout + result.stderr, max_length=self._longest)
        if result.error_type == _FINAL:
            return CodeOutput(output=self._answer, logs=logs, is_final_answer=True)
        if result.error is not None:
            raise InterpreterError(f"{logs}\n{result.error}".lstrip("\n"))
        return CodeOutput(output=result.value, logs=logs, is_final_answer=False)

    def cleanup(self) -> None:
        """Close the session if it was opened here."""
        self._source.close()

    def _run(self, code: str) -> None:
        result = self._source.open().run(code, timeout=self._timeout)
        if result.error is not None:
            raise InterpreterError(result.error)

    def _caller(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            value = self._tools[name](**arguments)
            if name == "final_answer":
                self._answer = value
                return None
            return value

        return call
