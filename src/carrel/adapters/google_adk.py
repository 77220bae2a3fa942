"""Google ADK's sessions in a carrel storage, and a carrel session as its code executor."""

from __future__ import annotations

import base64
import binascii
import hashlib
import time
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import orjson
from google.adk.agents.invocation_context import InvocationContext
from google.adk.code_executors import BaseCodeExecutor
from google.adk.code_executors.code_execution_utils import CodeExecutionInput, CodeExecutionResult, File
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session, State
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from pydantic import PrivateAttr

from carrel.adapters.sessions import SyncSource, check_source, key_part
from carrel.errors import KeyMissing
from carrel.execution.executor import ExecutionResult
from carrel.session.storage import StorageBackend
from carrel.session.sync_session import SyncSession
from carrel.storage.base import MISSING

ROOT = "google_adk"


class CarrelSessionService(BaseSessionService):
    """ADK's sessions in any storage of carrel: `Runner(…, session_service=CarrelSessionService(storage))`.

    A session is a log below `google_adk/APP/USER/sessions/`: how it began, then its events. The state that sessions
    share, of a user and of an app, is in objects beside it. Several processes may use one storage."""

    def __init__(self, storage: StorageBackend) -> None:
        self._store = storage.store

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        session_id = (session_id or "").strip() or str(uuid4())
        app, user, own = _scopes(state or {})
        first = {"app_name": app_name, "user_id": user_id, "id": session_id, "state": own, "time": time.time()}
        data = orjson.dumps(first)
        if not await self._store.append(_log(app_name, user_id, session_id), [data], after=0):
            raise AlreadyExistsError(f"the session {session_id} of the user {user_id} exists already; use another id")
        await self._update(app_name, user_id, app, user)
        return await self._with_shared_state(_session(orjson.loads(data), []))

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        session = await self._read(_log(app_name, user_id, session_id.strip()))
        if session is None:
            return None
        if config is not None and config.num_recent_events is not None:
            session.events = session.events[-config.num_recent_events :] if config.num_recent_events else []
        if config is not None and config.after_timestamp is not None:
            late = [number for number, one in enumerate(session.events) if one.timestamp < config.after_timestamp]
            session.events = session.events[late[-1] + 1 :] if late else session.events
        return await self._with_shared_state(session)

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """Return the sessions without their events, the least recently used first; reads all of them."""
        root = f"{ROOT}/{key_part(app_name)}"
        users = await self._store.folders(root) if user_id is None else [key_part(user_id)]
        found = []
        for user in users:
            for name in await self._store.folders(f"{root}/{user}/sessions"):
                session = await self._read(f"{root}/{user}/sessions/{name}/events")
                if session is not None:
                    session.events = []
                    found.append(await self._with_shared_state(session))
        return ListSessionsResponse(sessions=sorted(found, key=lambda one: (one.last_update_time, one.user_id, one.id)))

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        await self._store.delete(_log(app_name, user_id, session_id.strip()).removesuffix("/events"))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        return await self._state(_user_state(app_name, user_id))

    async def append_event(self, session: Session, event: Event) -> Event:
        """Append an event; one that is there already (the same id and content) is not appended again."""
        if event.partial:
            return event
        key = _log(session.app_name, session.user_id, session.id)
        known = b'"id":' + orjson.dumps(event.id)
        is_there = False
        async for block in self._store.read(key):
            is_there = True
            for record in block.records[1 if block.first_seq == 1 else 0 :]:
                if known in record and Event.model_validate_json(record) == event:
                    return event
        if not is_there:
            raise SessionNotFoundError(f"the session {session.id} of the user {session.user_id} does not exist")
        await super().append_event(session, event)  # takes what is temporary out of the event
        session.last_update_time = event.timestamp
        app, user, _ = _scopes(event.actions.state_delta if event.actions else {})
        await self._update(session.app_name, session.user_id, app, user)
        try:
            await self._store.append(key, [event.model_dump_json(exclude_none=True).encode()], create=False)
        except KeyMissing:
            raise SessionNotFoundError(f"the session {session.id} was deleted meanwhile") from None
        return event

    async def _read(self, key: str) -> Session | None:
        records = [record async for block in self._store.read(key) for record in block.records]
        if not records:
            return None
        return _session(orjson.loads(records[0]), [Event.model_validate_json(record) for record in records[1:]])

    async def _state(self, key: str) -> dict[str, Any]:
        data = await self._store.get(key)
        state: dict[str, Any] = {} if data is None else orjson.loads(data)
        return state

    async def _with_shared_state(self, session: Session) -> Session:
        app = await self._state(_app_state(session.app_name))
        user = await self._state(_user_state(session.app_name, session.user_id))
        session.state |= {State.APP_PREFIX + name: value for name, value in app.items()}
        session.state |= {State.USER_PREFIX + name: value for name, value in user.items()}
        return session

    async def _update(self, app_name: str, user_id: str, app: dict[str, Any], user: dict[str, Any]) -> None:
        """Change the shared state; a change of another process at the same time is not lost."""
        for key, changes in ((_app_state(app_name), app), (_user_state(app_name, user_id), user)):
            while changes:
                stamp = await self._store.stamp(key)
                data = orjson.dumps(await self._state(key) | changes)
                if await self._store.put(key, data, expect=MISSING if stamp is None else stamp) is not None:
                    break


class CarrelCodeExecutor(BaseCodeExecutor):
    """Runs an agent's code in a sandbox: `LlmAgent(…, code_executor=CarrelCodeExecutor(base=".carrel"))`.

    With `base` alone, each ADK session has a carrel session of its own; a `session` or a `session_id` is used for all.
    Variables and files stay from call to call."""

    stateful: bool = True
    timeout_seconds: int | None = 300

    _session: SyncSession | None = PrivateAttr()
    _base: Path | str | None = PrivateAttr()
    _id: str | None = PrivateAttr()
    _sources: dict[str, SyncSource] = PrivateAttr(default_factory=dict)

    def __init__(
        self,
        session: SyncSession | None = None,
        *,
        base: Path | str | None = None,
        session_id: str | None = None,
        **settings: Any,
    ) -> None:
        check_source(session, base, session_id)
        super().__init__(**settings)
        self._session, self._base, self._id = session, base, session_id

    def execute_code(
        self, invocation_context: InvocationContext, code_execution_input: CodeExecutionInput
    ) -> CodeExecutionResult:
        session = self._source(invocation_context).open()
        for file in code_execution_input.input_files:
            session.write_file(PurePosixPath(file.name).name, _content(file.content))
        result = session.run(code_execution_input.code, timeout=self.timeout_seconds)
        exit_code = _exit_code(result)
        # ADK takes text on stderr for a failure; warnings of code that ended well are left out.
        return CodeExecutionResult(
            stdout=result.stdout,
            stderr=f"{result.stderr}{result.error}" if exit_code else "",
            output_files=_images(result),
            exit_code=exit_code,
        )

    def close(self) -> None:
        """Close the sessions that were opened here."""
        for source in self._sources.values():
            source.close()

    def _source(self, context: InvocationContext) -> SyncSource:
        if self._session is not None or self._id is not None:
            session_id = self._id or ""
        else:
            names = "\0".join((context.session.app_name, context.session.user_id, context.session.id))
            session_id = f"adk-{hashlib.sha256(names.encode()).hexdigest()[:24]}"
        return self._sources.setdefault(session_id, SyncSource(self._session, self._base, session_id or None))


def _session(first: dict[str, Any], events: list[Event]) -> Session:
    state = first["state"]
    for event in events:
        state |= _scopes(event.actions.state_delta if event.actions else {})[2]
    changed = events[-1].timestamp if events else first["time"]
    names = {name: first[name] for name in ("app_name", "user_id", "id")}
    return Session(**names, state=state, events=events, last_update_time=changed)


def _scopes(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the state of the app, of the user and of the session; what is temporary is kept nowhere."""
    app, user, own = {}, {}, {}
    for name, value in state.items():
        if name.startswith(State.APP_PREFIX):
            app[name.removeprefix(State.APP_PREFIX)] = value
        elif name.startswith(State.USER_PREFIX):
            user[name.removeprefix(State.USER_PREFIX)] = value
        elif not name.startswith(State.TEMP_PREFIX):
            own[name] = value
    return app, user, own


def _app_state(app_name: str) -> str:
    return f"{ROOT}/{key_part(app_name)}/state"


def _user_state(app_name: str, user_id: str) -> str:
    return f"{ROOT}/{key_part(app_name)}/{key_part(user_id)}/state"


def _log(app_name: str, user_id: str, session_id: str) -> str:
    return f"{ROOT}/{key_part(app_name)}/{key_part(user_id)}/sessions/{key_part(session_id)}/events"


def _exit_code(result: ExecutionResult) -> int:
    """Return what a program of this code would have exited with: `sys.exit(0)` is no failure."""
    if result.error is None:
        return 0
    status = result.error.rpartition("SystemExit:")[2].strip() if result.error_type == "SystemExit" else "1"
    return 0 if status in ("", "None", "0") else int(status) if status.isdigit() else 1


def _content(content: str | bytes) -> bytes:
    """Return the bytes of an input file, which ADK passes on in base64."""
    data = content.encode() if isinstance(content, str) else content
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        return data


def _images(result: ExecutionResult) -> list[File]:
    found = [bundle["image/png"] for bundle in result.display if "image/png" in bundle]
    return [File(f"image-{number}.png", _content(image), "image/png") for number, image in enumerate(found, 1)]
