"""Commands and code in a session on a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Unpack

from carrel.client.answers import COULD_NOT_RUN, Interaction, OutputPiece, RunResult
from carrel.client.arguments import must_be_seconds
from carrel.client.asking import WAIT, Asking, Extra, FilePath, Waiting, given, part, path_text, session_path, typed
from carrel.client.line import Asked
from carrel.errors import CommandNotRun, ServerUnreachable

SEES = {"Accept": "text/event-stream"}


class Work(Asking):
    """What is done in a session."""

    async def execute_command(
        self,
        session_id: str,
        *,
        command: str,
        command_timeout: float | None = None,
        stdin: str | None = None,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        background: bool = False,
        wait_for_completion: bool = True,
        on_output: Callable[[OutputPiece], object] | None = None,
        **more: Unpack[Waiting],
    ) -> Interaction:
        """Run a command. When the connection is lost, it is found again, not started again.

        `background` begins it and returns: `pid`, and `output`, the session's file that it writes to. Raises
        CommandNotRun when it could not be run at all."""
        body = _command(command, command_timeout, stdin, cwd, env)
        path, words = f"{session_path(session_id)}/exec", _running(session_id)
        held = WAIT if wait_for_completion else 0
        asked = self._asked("POST", path, words, more, body=body | {"background": background}, held=held)
        if on_output is not None:
            begun = await self._heard(session_id, body, more, on_output)
        else:
            begun = await self._data(asked)
        interaction_id = begun.get("interaction_id", "") if isinstance(begun, dict) else ""

        async def look(held: float, more: Extra) -> Interaction:
            return await self._interaction(session_id, interaction_id, held, more)

        whole = isinstance(begun, dict) and begun.get("created_at") is not None
        state = typed(Interaction, begun, asked) if whole else await look(held, more)
        if wait_for_completion:
            state = await self._until_finished(state, lambda it: it.is_finished, look, asked, more, None)
        return _ran(state)

    async def _heard(
        self, session_id: str, body: Mapping[str, Any], more: Waiting, tell: Callable[[OutputPiece], object]
    ) -> dict[str, Any]:
        """The interaction as it was last told of, with what it wrote told meanwhile."""
        last: dict[str, Any] = {}
        try:
            async with aclosing(self._command_events(session_id, body, more)) as events:
                async for kind, data, asked in events:
                    if kind == "output":
                        tell(typed(OutputPiece, data, asked))
                    else:
                        last = data
        except ServerUnreachable:
            if not last:
                raise
        return last

    async def stream_command(
        self,
        session_id: str,
        *,
        command: str,
        command_timeout: float | None = None,
        stdin: str | None = None,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        **more: Unpack[Extra],
    ) -> AsyncGenerator[OutputPiece | Interaction, None]:
        """What a command writes as it comes, the finished interaction last. Leaving early leaves it running."""
        body = _command(command, command_timeout, stdin, cwd, env)
        async with aclosing(self._command_events(session_id, body, more)) as events:
            async for kind, data, asked in events:
                if kind == "output":
                    yield typed(OutputPiece, data, asked)
                elif kind == "done":
                    yield _ran(typed(Interaction, data, asked))
                    return
        raise ServerUnreachable(f"{_running(session_id)}: the stream ended before the command did")

    async def _command_events(
        self, session_id: str, body: Mapping[str, Any], more: Extra | Waiting
    ) -> AsyncGenerator[tuple[str, Any, Asked], None]:
        """`begun`, `output` and `done`, each with what it was asked for."""
        path, words = f"{session_path(session_id)}/exec", _running(session_id)
        query = {"stream": 1}
        asked = self._asked("POST", path, words, more, query=query, body=body, headers=SEES, repeatable=False)
        async with aclosing(self._stream(asked)) as events:
            async for kind, data, _ in events:
                if kind in ("begun", "output", "done"):
                    yield kind, data, asked

    async def get_interaction(self, session_id: str, interaction_id: str, **more: Unpack[Extra]) -> Interaction:
        return await self._interaction(session_id, interaction_id, 0, more)

    async def _interaction(self, session_id: str, interaction_id: str, held: float, more: Extra) -> Interaction:
        path = f"{session_path(session_id)}/interactions/{part('interaction_id', interaction_id)}"
        words = f"look at command {interaction_id} of session {session_id}"
        return await self._typed(Interaction, self._asked("GET", path, words, more, held=held))

    async def run(
        self, session_id: str, *, code: str, code_timeout: float | None = None, **more: Unpack[Extra]
    ) -> RunResult:
        """Run Python code; variables stay for the next run. Giving up on it stops the code."""
        async with aclosing(self.stream(session_id, code=code, code_timeout=code_timeout, **more)) as pieces:
            async for piece in pieces:
                if isinstance(piece, RunResult):
                    return piece
        raise ServerUnreachable(f"run code in session {session_id}: the stream ended before the code did")

    async def stream(
        self, session_id: str, *, code: str, code_timeout: float | None = None, **more: Unpack[Extra]
    ) -> AsyncGenerator[OutputPiece | RunResult, None]:
        """What the code writes as it comes, the result last. Leaving early stops the code."""
        path, words = f"{session_path(session_id)}/run", f"run code in session {session_id}"
        must_be_seconds("code_timeout", code_timeout)
        body = {"code": code, "timeout": code_timeout}
        asked = self._asked("POST", path, words, more, body=body, headers=SEES, repeatable=False)
        async with aclosing(self._stream(asked)) as events:
            async for kind, data, _ in events:
                if kind == "output":
                    yield typed(OutputPiece, data, asked)
                elif kind == "result":
                    yield typed(RunResult, data, asked)

    async def interrupt(self, session_id: str, **more: Unpack[Extra]) -> bool:
        """Stop the running code as Ctrl-C does; True when some was running."""
        asked = self._asked("POST", f"{session_path(session_id)}/interrupt", f"interrupt session {session_id}", more)
        return bool((await self._data(asked)).get("interrupted"))


def _running(session_id: str) -> str:
    return f"run a command in session {session_id}"


def _command(
    command: str, timeout: float | None, stdin: str | None, cwd: FilePath | None, env: Mapping[str, str] | None
) -> dict[str, Any]:
    must_be_seconds("command_timeout", timeout)
    folder = None if cwd is None else path_text(cwd, "cwd")
    return given({"command": command, "command_timeout": timeout, "stdin": stdin, "cwd": folder, "env": env})


def _ran(interaction: Interaction) -> Interaction:
    if interaction.exit_code == COULD_NOT_RUN:
        why = interaction.message or "the server does not say why"
        raise CommandNotRun(f"{_running(interaction.session_id)}: it could not be run at all: {why}")
    return interaction
