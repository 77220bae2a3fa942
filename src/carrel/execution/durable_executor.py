"""The base of executors that can keep files and variables in a folder, for a session that continues."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from carrel.errors import ConfigurationError, StateNotSaved
from carrel.execution.connection import SpawnFailed, StateFile, WorkerConnection
from carrel.execution.durable import LONGEST_SAVE, DiskWatch, StateFolder, read_report, variables_of_report
from carrel.execution.executor import ExecutionResult, SavedVariables
from carrel.execution.results import RunTimer, Turn, WorkerDied, finished
from carrel.execution.worker_executor import WorkerExecutor
from carrel.processes import BoundedOutput


class DurableExecutor(WorkerExecutor):
    """Saves the variables in a state folder and loads them; subclasses open the folder when they start."""

    resumed: SavedVariables | None = None
    """The variables that were loaded at the start; None where there were none."""
    _state_path: Path | None = None
    _loads_at_start = True
    _state: StateFolder | None = None
    _disk_watch: DiskWatch | None = None

    def _close_state(self) -> None:
        if self._state is not None:
            state, self._state = self._state, None
            state.close()
        if self._disk_watch is not None:
            self._disk_watch.close()

    def keep_state(self, folder: Path) -> None:
        """Use this state folder; before the start. The variables are loaded by `load`, not by the start."""
        self._state_path, self._loads_at_start = folder, False

    async def save(self, *, may_block: bool = True) -> SavedVariables:
        """Save the variables in the state folder, for a session that continues this one.

        Returns the names that were saved, and why others were not. After StateNotSaved the variables that were saved
        before are unchanged. The files of the workspace are in the state folder at any moment.

        The worker's fork writes them, and code goes on. Where threads forbid a fork, the worker writes them itself if
        it `may_block`."""
        async with Turn(self._turn) as turn:
            connection = await self._started() if self._state_path is not None else None
            state = self._state
            if connection is None or state is None:
                raise ConfigurationError("this session has no state_folder to save variables in")
            if connection.why_no_code:
                return SavedVariables()
            try:
                file, path = state.new_file()
            except OSError as problem:
                raise StateNotSaved(f"the variables were not saved: {problem}") from None
            report, theirs = os.pipe2(os.O_CLOEXEC)
            try:
                answer = connection.request({"op": "save"}, (file, theirs))
                reply = await turn.finish(self._end_of_request(connection, answer), lambda: None)
            except BaseException:
                os.close(report)
                os.close(file)
                path.unlink()
                raise
            finally:
                os.close(theirs)
        try:
            if "refused" in reply:
                os.close(report)
                saved = await self._save_in_worker(file, str(reply["refused"]), may_block)
                if lost := connection.transport.state_problem:
                    raise StateNotSaved(f"the variables were not saved: {lost}")
            else:
                saved = await read_report(report)
            await asyncio.to_thread(state.keep, path)
        except BaseException as problem:
            path.unlink(missing_ok=True)
            if isinstance(problem, OSError):
                raise StateNotSaved(f"the variables were not saved: {problem}") from None
            raise
        finally:
            os.close(file)
        return saved

    async def _save_in_worker(self, file: int, refused: str, may_block: bool) -> SavedVariables:
        if not may_block:
            raise StateNotSaved(f"the variables were not saved: {refused}; save() and pause() can save them")
        state, nothing = StateFile("save", file), BoundedOutput(1)
        result = await self._run("", LONGEST_SAVE, nothing, nothing, variables=True, state=state)
        if not result.is_ok:
            raise StateNotSaved(f"the variables were not saved: {(result.error or '').strip().splitlines()[-1]}")
        try:
            return variables_of_report(result.value)
        except ValueError as problem:
            raise StateNotSaved(f"the variables were not saved: {problem}") from None

    async def load(self) -> SavedVariables | None:
        """Load the variables that were saved, and return which; None where none were. Whatever they do, code can run
        afterwards."""
        async with self._turn:
            connection = await self._started()
            self.resumed = await self._load(connection)
            if self._connection is not connection or not connection.worker_alive:
                await self._started()
        return self.resumed

    async def _load(self, connection: WorkerConnection[Any]) -> SavedVariables | None:
        """Load the saved variables into a new worker; whatever they do, the session starts."""
        state = self._state
        if state is None or not state.variables.exists() or connection.why_no_code:
            return None
        if state.no_load_reason:
            return SavedVariables(missing={"*": state.no_load_reason})
        file = os.open(state.variables, os.O_RDONLY | os.O_CLOEXEC)
        timer = RunTimer(connection, self.config.grace)
        output = BoundedOutput(10_000)
        try:
            answer = connection.run(StateFile("load", file), output.add, output.add, self, timer)
            timer.start(self.config.startup_timeout)
            result = finished(await answer)
            return (
                variables_of_report(result.value) if result.is_ok else SavedVariables(missing={"*": str(result.error)})
            )
        except (WorkerDied, ValueError) as problem:
            if isinstance(problem, ValueError):
                connection.kill("it sent a report that cannot be read")
            ending = await connection.exit_status()
            if (await connection.recover()).state == "gone":
                raise SpawnFailed("load the variables", None, ending.text) from None
            return SavedVariables(missing={"*": f"loading them failed: {ending.text}"})
        finally:
            timer.cancel()
            connection.end_run()
            os.close(file)

    async def _after_death(self, connection: WorkerConnection[Any], problem: Exception) -> ExecutionResult:
        result = await super()._after_death(connection, problem)
        if result.state == "lost" and self._connection is not None and self._connection.worker_alive:
            loaded = await self._load(self._connection)
            if loaded is not None and "*" not in loaded.missing:
                result.state = "restored"
                result.state_reason += "; the variables are those of the last save"
        return result
