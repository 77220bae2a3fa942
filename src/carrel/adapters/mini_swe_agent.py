"""A carrel session as the environment of mini-swe-agent."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from minisweagent.exceptions import Submitted
from pydantic import BaseModel

from carrel.adapters.sessions import SyncSource
from carrel.session.sync_session import SyncSession

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class CarrelEnvironmentConfig(BaseModel):
    """`cwd`: where commands start (default: the workspace); `timeout`: seconds that a command may take."""

    cwd: str = ""
    env: dict[str, str] = {}
    timeout: float = 30


class CarrelEnvironment:
    """Runs the agent's commands in one session: `DefaultAgent(model, CarrelEnvironment(base=".carrel"), …)`."""

    def __init__(
        self,
        session: SyncSession | None = None,
        *,
        base: Path | str | None = None,
        session_id: str | None = None,
        **settings: Any,
    ) -> None:
        self._source = SyncSource(session, base, session_id)
        self.config = CarrelEnvironmentConfig(**settings)

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run the command of an action; raises Submitted when it prints that the task is complete."""
        command, limit = action.get("command", ""), timeout or self.config.timeout
        try:
            done = self._source.open().execute_command(
                command, cwd=cwd or self.config.cwd or None, env=self.config.env, timeout=limit
            )
        except OSError as problem:
            return _failed("", problem)
        if done.timed_out:
            return _failed(done.output, TimeoutError(f"the command had not ended after {limit:g} seconds"))
        first, _, rest = done.output.lstrip().partition("\n")
        if done.exit_code == 0 and first.strip() == FINISHED:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        return {"output": done.output, "returncode": done.exit_code, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        return {**self.config.model_dump(), **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = {"environment": self.config.model_dump(mode="json"), "environment_type": kind}
        return {"info": {"config": config}}

    def close(self) -> None:
        """Close the session if it was opened here."""
        self._source.close()


def _failed(output: str, problem: Exception) -> dict[str, Any]:
    extra = {"exception_type": type(problem).__name__, "exception": str(problem)}
    info = f"An error occurred while executing the command: {problem}"
    return {"output": output, "returncode": -1, "exception_info": info, "extra": extra}
