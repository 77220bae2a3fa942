"""The calls for sessions; each names its session."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from carrel.client._async.remote_session import AsyncRemoteSession, AsyncSessionList
from carrel.client._async.resources import AsyncResource, AsyncVerify
from carrel.client._async.transport import AsyncTransport, ServerEvent
from carrel.client.errors import check_ran
from carrel.client.transport import (
    HOLD,
    FilePath,
    Progress,
    Request,
    RequestOptions,
    WaitOptions,
    async_sleep,
    check_names,
    check_seconds,
    command_body,
    file_url,
    is_folder,
    make_request,
    parse_as,
    parse_json,
    path_text,
    pause,
    session_path,
    url_part,
)
from carrel.errors import ServerUnreachable
from carrel.wire.answers import (
    CheckpointList,
    CheckpointRecord,
    ClosedSession,
    FileEntryRecord,
    FolderListing,
    Interaction,
    MessageCount,
    OutputPiece,
    ReplaceResult,
    RewoundSession,
    RunResult,
    SessionEvent,
    TracePage,
    TraceRecord,
    VariableList,
    VariableRecord,
    WorkspaceDiff,
)

MAX_LOST_CONNECTIONS = 5
"""Times that a stream of events is requested again without an event in between."""
EVENT_STREAM = {"Accept": "text/event-stream"}


class AsyncSessions(AsyncResource):
    """`client.sessions`: each call names its session; what `create` returns has the same calls without that."""

    def __init__(self, transport: AsyncTransport) -> None:
        super().__init__(transport)
        self.verify = AsyncVerify(transport)

    # --- life

    async def create(
        self,
        *,
        dataset: str | None = None,
        sample_id: str | None = None,
        ttl_minutes: int | None = None,
        version: int | None = None,
        files: Mapping[str, str] | None = None,
        network: bool | None = None,
        session_id: str | None = None,
        durable: bool | None = None,
        wait_for_ready: bool = True,
        on_progress: Callable[[AsyncRemoteSession], object] | None = None,
        **options: Unpack[WaitOptions],
    ) -> AsyncRemoteSession:
        """Create a session of a sample, or an empty one, and return it when it is ready.

        If it could not be created, its status is "error" and `error` says why. `version` is the sample's, the latest by
        default; `files` are texts by path, which replace files of the sample; `network` is for a session without a
        sample, if the server allows it; `session_id` is the id of the new session, chosen by the server by default; a
        `durable` one can be paused and resumed."""
        body = {
            "dataset": dataset,
            "sample_id": sample_id,
            "ttl_minutes": ttl_minutes,
            "version": version,
            "files": None if files is None else dict(files),
            "network": network,
            "session_id": session_id,
            "durable": durable,
        }
        hold = HOLD if wait_for_ready else 0.0
        action = f"create a session of {dataset}/{sample_id}" if sample_id else "create a session"
        request = make_request(self.create, options, "POST", "/sessions", action, body=body, hold=hold)
        return await self._until_ready(request, wait_for_ready, on_progress)

    async def pause(self, session_id: str, **options: Unpack[RequestOptions]) -> AsyncRemoteSession:
        """Save and close a durable session; `resume` continues it."""
        path, action = f"{session_path(session_id)}/pause", f"pause session {session_id}"
        request = make_request(self.pause, options, "POST", path, action)
        return self._session(await self._json(request), request)

    async def resume(self, session_id: str, **options: Unpack[WaitOptions]) -> AsyncRemoteSession:
        """Open a paused session again, with its conversation, files and variables, and return it when it is ready."""
        path, action = f"{session_path(session_id)}/resume", f"resume session {session_id}"
        request = make_request(self.resume, options, "POST", path, action, hold=HOLD)
        return await self._until_ready(request, True, None)

    async def fork(
        self, session_id: str, *, ttl_minutes: int | None = None, **options: Unpack[WaitOptions]
    ) -> AsyncRemoteSession:
        """Fork a session: another one with the same conversation, variables and files."""
        path, action = f"{session_path(session_id)}/fork", f"fork session {session_id}"
        request = make_request(self.fork, options, "POST", path, action, body={"ttl_minutes": ttl_minutes}, hold=HOLD)
        return await self._until_ready(request, True, None)

    async def _until_ready(
        self, request: Request, wait: bool, on_progress: Callable[[AsyncRemoteSession], object] | None
    ) -> AsyncRemoteSession:
        session = self._session(await self._json(request), request)

        async def look(hold: float, of: Request) -> AsyncRemoteSession:
            path, action = session_path(session.session_id), f"get session {session.session_id}"
            following = replace(of, hold=hold).following(path, action)
            return self._session(await self._json(following), following)

        # A server that knows only the public API answers with three fields.
        complete = session if session.requested_at else await look(HOLD if wait else 0.0, request)
        if not wait:
            return complete
        return await self._transport.wait(
            complete, lambda session: session.status != "creating", look, request, on_progress
        )

    def _session(self, data: Any, request: Request) -> AsyncRemoteSession:
        session = parse_as(AsyncRemoteSession, data, request)
        session._sessions = self
        return session

    async def retrieve(self, session_id: str, **options: Unpack[RequestOptions]) -> AsyncRemoteSession:
        """Return a session as it is now."""
        path, action = session_path(session_id), f"get session {session_id}"
        request = make_request(self.retrieve, options, "GET", path, action, hold=0.0)
        return self._session(await self._json(request), request)

    async def list(
        self,
        *,
        status: str | None = None,
        page: int | None = None,
        page_size: int | None = None,
        cursor: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncSessionList:
        """Return a page of the user's sessions, newest first, also those that have ended.

        `cursor` is the `next_cursor` of the page before."""
        query = {"status": status, "page": page, "page_size": page_size, "cursor": cursor}
        request = make_request(self.list, options, "GET", "/sessions", "list sessions", query=query)
        found = parse_as(AsyncSessionList, await self._json(request), request)
        for session in found.sessions:
            session._sessions = self
        return found

    async def extend(
        self, session_id: str, *, ttl_minutes: int, **options: Unpack[RequestOptions]
    ) -> AsyncRemoteSession:
        """Keep a session for so many minutes from now."""
        path, action = session_path(session_id), f"extend session {session_id}"
        request = make_request(self.extend, options, "PATCH", path, action, body={"ttl_minutes": ttl_minutes})
        return self._session(await self._json(request), request)

    async def close(self, session_id: str, **options: Unpack[RequestOptions]) -> ClosedSession:
        """Close a session; none of its processes and files remain on the server."""
        path, action = session_path(session_id), f"close session {session_id}"
        request = make_request(self.close, options, "DELETE", path, action)
        return parse_as(ClosedSession, await self._json(request), request)

    # --- checkpoints

    async def checkpoint(
        self, session_id: str, *, label: str = "", **options: Unpack[RequestOptions]
    ) -> CheckpointRecord:
        """Make a checkpoint of the conversation, the variables and the files."""
        path, action = f"{session_path(session_id)}/checkpoints", f"make a checkpoint of session {session_id}"
        request = make_request(self.checkpoint, options, "POST", path, action, body={"label": label})
        return parse_as(CheckpointRecord, await self._json(request), request)

    async def checkpoints(self, session_id: str, **options: Unpack[RequestOptions]) -> builtins.list[CheckpointRecord]:
        """Return the checkpoints of a session, oldest first."""
        path, action = f"{session_path(session_id)}/checkpoints", f"list the checkpoints of session {session_id}"
        request = make_request(self.checkpoints, options, "GET", path, action)
        return parse_as(CheckpointList, await self._json(request), request).checkpoints

    async def drop_checkpoint(
        self, session_id: str, *, point: CheckpointRecord | str, **options: Unpack[RequestOptions]
    ) -> None:
        """Remove a checkpoint."""
        point_id = point.id if isinstance(point, CheckpointRecord) else point
        path = f"{session_path(session_id)}/checkpoints/{url_part('point', point_id)}"
        await self._json(make_request(self.drop_checkpoint, options, "DELETE", path, f"drop checkpoint {point_id}"))

    async def rewind(
        self, session_id: str, *, to: CheckpointRecord | str | int, **options: Unpack[RequestOptions]
    ) -> CheckpointRecord:
        """Return to a checkpoint, given as itself, its id, its label or its number of messages."""
        path, action = f"{session_path(session_id)}/rewind", f"rewind session {session_id}"
        body = {"to": to.id if isinstance(to, CheckpointRecord) else to}
        request = make_request(self.rewind, options, "POST", path, action, body=body)
        return parse_as(RewoundSession, await self._json(request), request).checkpoint

    # --- commands

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
        **options: Unpack[WaitOptions],
    ) -> Interaction:
        """Run a command. If the connection is lost, its result is requested again; it is not started again.

        `background` starts it and returns: with `pid`, and `output`, the session's file that it writes to. Raises
        CommandNotRun if it could not be run at all."""
        body = command_body(command, command_timeout, stdin, cwd, env)
        path, action = f"{session_path(session_id)}/exec", f"run a command in session {session_id}"
        hold = HOLD if wait_for_completion else 0.0
        request = make_request(
            self.execute_command, options, "POST", path, action, body=body | {"background": background}, hold=hold
        )
        if on_output is None:
            data = await self._json(request)
        else:
            data = await self._report_output(replace(request, json=body), on_output)
        interaction_id = data.get("interaction_id", "") if isinstance(data, dict) else ""

        async def look(hold: float, of: Request) -> Interaction:
            return await self._interaction(session_id, interaction_id, replace(of, hold=hold))

        complete = isinstance(data, dict) and data.get("created_at") is not None
        state = parse_as(Interaction, data, request) if complete else await look(hold, request)
        if wait_for_completion:
            state = await self._transport.wait(state, lambda state: state.is_finished, look, request, None)
        return check_ran(state)

    async def _report_output(self, request: Request, on_output: Callable[[OutputPiece], object]) -> dict[str, Any]:
        """Call `on_output` with the output of a command; return the newest state of its interaction."""
        newest: dict[str, Any] = {}
        try:
            async with aclosing(self._command_events(request)) as events:
                async for kind, data, _ in events:
                    if kind == "output":
                        on_output(parse_as(OutputPiece, data, request))
                    else:
                        newest = data
        except ServerUnreachable:
            if not newest:
                raise
        return newest

    async def stream_command(
        self,
        session_id: str,
        *,
        command: str,
        command_timeout: float | None = None,
        stdin: str | None = None,
        cwd: FilePath | None = None,
        env: Mapping[str, str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[OutputPiece | Interaction]:
        """Iterate over the output of a command, its interaction last. Leaving early does not stop the command."""
        body = command_body(command, command_timeout, stdin, cwd, env)
        path, action = f"{session_path(session_id)}/exec", f"run a command in session {session_id}"
        request = make_request(self.stream_command, options, "POST", path, action, body=body)
        async with aclosing(self._command_events(request)) as events:
            async for kind, data, _ in events:
                if kind == "output":
                    yield parse_as(OutputPiece, data, request)
                elif kind == "done":
                    yield check_ran(parse_as(Interaction, data, request))
                    return
        raise ServerUnreachable(f"{action}: the stream ended before the command did")

    async def _command_events(self, request: Request) -> AsyncGenerator[ServerEvent]:
        headers = {**request.headers, **EVENT_STREAM}
        request = replace(request, query={**request.query, "stream": 1}, headers=headers, repeatable=False, hold=None)
        async with aclosing(self._transport.events(request)) as events:
            async for event in events:
                if event.kind in ("begun", "output", "done"):
                    yield event

    async def get_interaction(
        self, session_id: str, interaction_id: str, **options: Unpack[RequestOptions]
    ) -> Interaction:
        """Return a command as it is now."""
        request = make_request(self.get_interaction, options, "GET", "", "", hold=0.0)
        return await self._interaction(session_id, interaction_id, request)

    async def _interaction(self, session_id: str, interaction_id: str, like: Request) -> Interaction:
        path = f"{session_path(session_id)}/interactions/{url_part('interaction_id', interaction_id)}"
        request = like.following(path, f"get command {interaction_id} of session {session_id}")
        return parse_as(Interaction, await self._json(request), request)

    async def cancel_command(
        self, session_id: str, interaction_id: str, **options: Unpack[RequestOptions]
    ) -> Interaction:
        """Stop a running command and all its child processes; one that has ended stays as it is."""
        path = f"{session_path(session_id)}/interactions/{url_part('interaction_id', interaction_id)}"
        action = f"stop command {interaction_id} of session {session_id}"
        request = make_request(self.cancel_command, options, "DELETE", path, action)
        return parse_as(Interaction, await self._json(request), request)

    # --- code

    async def run(
        self, session_id: str, *, code: str, code_timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> RunResult:
        """Run Python code; its variables persist. Cancelling the call stops the code."""
        check_names(self.run, options)
        async with aclosing(self.stream(session_id, code=code, code_timeout=code_timeout, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, RunResult):
                    return piece
        raise ServerUnreachable(f"run code in session {session_id}: the stream ended before the code did")

    async def stream(
        self, session_id: str, *, code: str, code_timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[OutputPiece | RunResult]:
        """Iterate over the output of code, its result last. Leaving early stops the code."""
        check_seconds("code_timeout", code_timeout)
        path, action = f"{session_path(session_id)}/run", f"run code in session {session_id}"
        body = {"code": code, "timeout": code_timeout}
        request = make_request(
            self.stream, options, "POST", path, action, body=body, headers=EVENT_STREAM, repeatable=False
        )
        async with aclosing(self._transport.events(request)) as events:
            async for kind, data, _ in events:
                if kind == "output":
                    yield parse_as(OutputPiece, data, request)
                elif kind == "result":
                    yield parse_as(RunResult, data, request)

    async def interrupt(self, session_id: str, **options: Unpack[RequestOptions]) -> bool:
        """Stop the running code as Ctrl-C does; return whether code was running."""
        path, action = f"{session_path(session_id)}/interrupt", f"interrupt session {session_id}"
        return bool((await self._json(make_request(self.interrupt, options, "POST", path, action))).get("interrupted"))

    async def variables(self, session_id: str, **options: Unpack[RequestOptions]) -> builtins.list[VariableRecord]:
        """Return the variables of the interpreter, by name."""
        path, action = f"{session_path(session_id)}/variables", f"list the variables of session {session_id}"
        request = make_request(self.variables, options, "GET", path, action)
        return parse_as(VariableList, await self._json(request), request).variables

    # --- files

    async def read_file(self, session_id: str, path: FilePath, **options: Unpack[RequestOptions]) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError, IsADirectoryError, PermissionError as `open` does."""
        action = f"read {path} in session {session_id}"
        request = make_request(self.read_file, options, "GET", file_url(session_id, path), action)
        answer = await self._transport.send(request)
        if is_folder(answer):
            raise IsADirectoryError(f"{path} is a folder, not a file")
        return answer.content

    async def download_file(
        self,
        session_id: str,
        path: FilePath,
        to: str | Path,
        *,
        on_progress: Progress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Path:
        """Download a file of any size into a file here, which appears only when it is complete."""
        action = f"read {path} in session {session_id}"
        request = make_request(self.download_file, options, "GET", file_url(session_id, path), action)
        return await self._transport.download(request, Path(to), on_progress)

    async def write_file(
        self, session_id: str, path: FilePath, data: bytes | str | Path, **options: Unpack[RequestOptions]
    ) -> None:
        """Write text, bytes, or a file of this machine given as a Path; missing folders are created."""
        if not isinstance(data, str | bytes | bytearray | memoryview | Path):
            raise TypeError(f"data is a text (str), bytes, or the Path of a file here, not {type(data).__name__}")
        content = data.encode() if isinstance(data, str) else data if isinstance(data, Path) else bytes(data)
        request = make_request(
            self.write_file,
            options,
            "PUT",
            file_url(session_id, path),
            f"write {path} in session {session_id}",
            content=content,
            headers={"Content-Type": "application/octet-stream"},
        )
        await self._transport.send(request)

    async def list_files(
        self, session_id: str, path: FilePath = ".", **options: Unpack[RequestOptions]
    ) -> builtins.list[FileEntryRecord]:
        """Return the entries of a folder, by name."""
        action = f"list {path} in session {session_id}"
        request = make_request(self.list_files, options, "GET", file_url(session_id, path), action)
        answer = await self._transport.send(request)
        if not is_folder(answer):
            raise NotADirectoryError(f"{path} is a file, not a folder")
        return parse_as(FolderListing, parse_json(answer.content, request), request).entries

    async def str_replace(
        self,
        session_id: str,
        *,
        file_path: FilePath,
        str_to_replace: str,
        str_to_insert: str,
        **options: Unpack[RequestOptions],
    ) -> ReplaceResult:
        """Replace a text that occurs in the file exactly once."""
        body = {"file_path": path_text(file_path), "str_to_replace": str_to_replace, "str_to_insert": str_to_insert}
        path, action = f"{session_path(session_id)}/str_replace", f"replace a text in {file_path} of {session_id}"
        request = make_request(self.str_replace, options, "POST", path, action, body=body)
        return parse_as(ReplaceResult, await self._json(request), request)

    async def diff(self, session_id: str, **options: Unpack[RequestOptions]) -> WorkspaceDiff:
        """Return what changed since the start of the session."""
        path, action = f"{session_path(session_id)}/diff", f"compare session {session_id}"
        request = make_request(self.diff, options, "GET", path, action)
        return parse_as(WorkspaceDiff, await self._json(request), request)

    # --- conversation, events and trace

    async def conversation(
        self,
        session_id: str,
        *,
        before: int | None = None,
        limit: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, Any]:
        """Return `session` and `messages`, as a SessionStore does; with `limit`, the last messages `before` a number.

        `first` is the number of the first message returned, and `has_more` says whether there are earlier ones."""
        path, action = f"{session_path(session_id)}/conversation", f"read the conversation of session {session_id}"
        query = {"before": before, "limit": limit}
        return dict(await self._json(make_request(self.conversation, options, "GET", path, action, query=query)))

    async def add_messages(
        self, session_id: str, messages: builtins.list[dict[str, Any]], **options: Unpack[RequestOptions]
    ) -> int:
        """Append all of these messages or none; return how many messages there are now."""
        path, action = f"{session_path(session_id)}/conversation", f"add messages to session {session_id}"
        request = make_request(self.add_messages, options, "POST", path, action, body={"messages": messages})
        return parse_as(MessageCount, await self._json(request), request).count

    async def events(
        self, session_id: str, *, from_seq: int = 1, follow: bool = True, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[SessionEvent]:
        """Iterate over what happened in a session and goes on to happen until it is closed.

        A lost connection is opened again where it broke. With `follow=False`, the iterator ends with what happened so
        far."""
        path, action = f"{session_path(session_id)}/events", f"follow session {session_id}"
        query = {"follow": None if follow else 0}
        request = make_request(self.events, options, "GET", path, action, query=query, headers=EVENT_STREAM)
        lost = 0
        while True:
            following = replace(request, query={**request.query, "from_seq": from_seq})
            try:
                async with aclosing(self._transport.events(following)) as events:
                    async for kind, data, seq in events:
                        from_seq, lost = (from_seq if seq is None else seq) + 1, 0
                        yield parse_as(SessionEvent, {"seq": from_seq - 1, "kind": kind, "data": data}, following)
                return
            except ServerUnreachable:
                lost += 1
                if lost > MAX_LOST_CONNECTIONS:
                    raise
                await async_sleep(pause(lost))

    async def trace(
        self, session_id: str, *, after: int = 0, **options: Unpack[RequestOptions]
    ) -> builtins.list[TraceRecord]:
        """Return the runs, calls, commands, checkpoints and verdicts of a session, after a line's number."""
        path, action = f"{session_path(session_id)}/trace", f"read the trace of session {session_id}"
        request = make_request(self.trace, options, "GET", path, action)
        found: list[TraceRecord] = []
        has_more = True
        while has_more:
            page_request = replace(request, query={**request.query, "after": after})
            page = parse_as(TracePage, await self._json(page_request), page_request)
            found += page.lines
            has_more = page.has_more and bool(page.lines)
            after = page.lines[-1].seq if page.lines else after
        return found
