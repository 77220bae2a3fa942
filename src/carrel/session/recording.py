"""Recording of what a session's variables and files were: one line for each change, in `states.jsonl`.

A line has `at` (seconds), `seq` (the conversation's last entry), `kind` (run, command, checkpoint, fork, rewind,
verify, pause, reset), the `step` of the trace, and what has changed since the line before: `variables` and `files`,
each with `set` and `gone`. Texts of files are objects beside it, by the digest of their content."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import orjson

from carrel.errors import CarrelError, SessionNotFound
from carrel.execution.commands_and_files import CommandsAndFiles
from carrel.execution.file_changes import Seen
from carrel.execution.results import RecordedVariable, VariableReport
from carrel.execution.worker_executor import WorkerExecutor
from carrel.guest.worker.recording import NO_FILES
from carrel.session.storage import StorageBackend, store_of
from carrel.storage.memory import MemoryStore
from carrel.text import escape_surrogates
from carrel.tracing import LogWriter, Step

logger = logging.getLogger(__name__)

Recorded = Literal["variables", "files"]
RECORDED: tuple[Recorded, ...] = ("variables", "files")
MAX_TEXT = 64 * 1024
"""Bytes of a file whose text is kept."""
_MAX_HASHED = 1024 * 1024
"""Bytes of a file whose content is compared."""
_MAX_FILES = 1000
"""Changed files that are recorded."""
_MAX_TEXTS = 16 * 1024 * 1024
"""Bytes of texts that one process keeps of a session."""
_DELAY = 0.05
"""Seconds after a run or a command, after which the files are looked at."""
_RARELY = 20
"""So many times longer than the last look took, the next one waits: it is for large workspaces."""
_LONGEST = 5.0

RecordedFile = tuple[str, int, str, str]
"""Kind of the change, size, and the digests of the content now and at the start; empty where it was not read."""


def states_key(session_id: str) -> str:
    return f"sessions/{session_id}/states.jsonl"


def text_key(session_id: str, digest: str) -> str:
    return f"sessions/{session_id}/texts/{digest}"


class Recording:
    """Writes the states of one session. Nothing waits for it but checkpoints, verdicts and the end."""

    def __init__(
        self,
        session_id: str,
        storage: StorageBackend,
        executor: object,
        what: Collection[Recorded],
        redact: Callable[[str], str],
    ) -> None:
        """What is in memory only is not recorded: it ends with the process."""
        self._id, self._storage = session_id, storage
        self._store = store_of(storage)
        kept = not isinstance(self._store, MemoryStore)
        self._worker = executor if kept and "variables" in what and isinstance(executor, WorkerExecutor) else None
        self._files = executor if kept and "files" in what and isinstance(executor, CommandsAndFiles) else None
        self._tool_secrets = redact
        self._variables: dict[str, RecordedVariable] = {}
        self._shown: dict[str, list[Any]] = {}
        """The variables as they were written, without secrets."""
        self._is_current = True
        """Whether `_variables` are those after the last run."""
        self._entries: dict[str, RecordedFile] = {}
        self._read: dict[str, tuple[Seen, RecordedFile]] = {}
        """What was read of a file, and how it looked then."""
        self._texts: set[str] = set()
        """The digests of kept texts."""
        self._text_bytes = 0
        self._fingerprint = NO_FILES
        self._activity = 0
        self._is_dirty = False
        """Whether files may have changed since they were looked at."""
        self._points: dict[str, dict[str, RecordedVariable]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()
        """Set when files are to be looked at without the usual delay."""
        self._cause: tuple[str, Step | None] = ("run", None)
        self._lock = asyncio.Lock()
        self._pause = _DELAY
        self._log = LogWriter(self._store, states_key(session_id), self._encode)
        self._parent: Recording | None = None
        """The session whose fork this one is, until the texts of its files are copied."""

    # --- runs and commands ------------------------------------------------------------------------------------------

    def begin_run(self, step: Step) -> None:
        """Note that a run begins; the worker reports the variables when it has ended."""
        self._is_current = False
        if self._worker is not None:
            self._worker.on_variables = partial(self._take, step)

    def mark_changed(self) -> None:
        """Note that variables were changed without a run."""
        self._is_current = False

    def end_run(self, step: Step, *, is_lost: bool) -> None:
        """Note that a run has ended; with `is_lost`, the variables are gone."""
        if self._worker is None:
            self._look_later("run", step)
        elif is_lost:
            self._set_variables({}, "run", step)
            self._look_later("run", step)

    def end_command(self, step: Step) -> None:
        self._look_later("command", step)

    def _take(self, step: Step, report: VariableReport) -> None:
        self._is_current = True
        self._set_variables(report.variables, "run", step, report.left_out)
        if self._note_files(report):
            self._look_later("run", step)

    def _note_files(self, report: VariableReport) -> bool:
        """Return whether the files may be others than at the last report."""
        is_other = report.files == "" or report.files != self._fingerprint
        self._fingerprint = report.files
        self._is_dirty = self._is_dirty or is_other
        return is_other

    def _set_variables(
        self, variables: Mapping[str, RecordedVariable], kind: str, step: Step | None, left_out: int = 0
    ) -> None:
        line = self._line(kind, step)
        if change := self._variable_change(variables):
            line["variables"] = change | ({"left_out": left_out} if left_out else {})
        self._log.add(line)

    def _variable_change(self, variables: Mapping[str, RecordedVariable]) -> dict[str, Any]:
        before, self._variables = self._variables, dict(variables)
        changed = {
            name: [new.type, new.size, self._redact(new.preview), new.digest]
            for name, new in variables.items()
            if before.get(name) != new
        }
        gone = [name for name in before if name not in variables]
        self._shown = {name: changed.get(name) or self._shown[name] for name in variables}
        return ({"set": changed} if changed else {}) | ({"gone": gone} if gone else {})

    def _redact(self, text: str) -> str:
        """Replace the secrets of the tools, and what is replaced in the conversation."""
        text = self._tool_secrets(text)
        # A program with a conversation has loaded this module; loading it takes too long for the others.
        if "carrel.conversation.store" in sys.modules:
            text = self._storage.get_session_store().redacted_text(text)
        return text

    # --- moments ----------------------------------------------------------------------------------------------------

    async def note(self, kind: str, step: Step | None = None, **fields: Any) -> None:
        """Write a line of a moment with the variables and files as they are now. The caller holds back runs."""
        if self._worker is None and self._files is None:
            return
        line = self._line(kind, step) | fields
        try:
            async with asyncio.timeout(_LONGEST):
                async with self._lock:
                    if kind in ("rewind", "reset"):
                        self._go_back(line)
                    elif not self._is_current:
                        await self._ask(line)
                    if kind == "checkpoint":
                        self._points[fields["point"]] = self._variables
                    if self._files is not None and (
                        kind == "rewind" or self._is_dirty or self._activity != self._files.activity
                    ):
                        line |= await self._changed_files(self._files)
        except (CarrelError, OSError, ValueError, TimeoutError) as problem:
            logger.warning("the files of session %s were not recorded: %s", self._id, problem or "it took too long")
        self._log.add(line)

    async def _ask(self, line: dict[str, Any]) -> None:
        """The report after the last run was dropped, because another request came."""
        if self._worker is not None:
            report = await self._worker.report_variables()
            self._is_current = True
            self._note_files(report)
            if change := self._variable_change(report.variables):
                line["variables"] = change

    def _go_back(self, line: dict[str, Any]) -> None:
        """Set the variables to those of a checkpoint, or to none after a reset."""
        known = self._points.get(str(line["point"])) if "point" in line else {}
        self._is_current = known is not None
        if known is not None and (change := self._variable_change(known)):
            line["variables"] = change

    def begin_as_fork(self, parent: Recording, parent_id: str) -> None:
        """Begin with what is known of the session that this one is a fork of."""
        self._is_current = parent._is_current
        line = self._line("fork", None) | {"parent": parent_id}
        self._variables, self._shown = parent._variables, parent._shown
        if self._shown:
            line["variables"] = {"set": self._shown}
        self._entries, self._read = dict(parent._entries), dict(parent._read)
        self._activity, self._fingerprint = 0, parent._fingerprint
        if self._entries and self._files is not None:
            line["files"] = {"set": self._entries}
        self._parent = parent
        self._log.add(line)

    # --- files ------------------------------------------------------------------------------------------------------

    def _look_later(self, kind: str, step: Step | None) -> None:
        self._cause, self._is_dirty = (kind, step), True
        if self._files is not None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._is_urgent.wait()
        self._is_urgent.clear()
        await self._look_now()

    async def _look_now(self) -> None:
        assert self._files is not None
        try:
            began = time.perf_counter()
            async with asyncio.timeout(_LONGEST), self._lock:
                line = self._line(*self._cause) | await self._changed_files(self._files)
            self._pause = max(_DELAY, _RARELY * (time.perf_counter() - began))
        except (CarrelError, OSError, ValueError, TimeoutError) as problem:
            self._pause, self._is_dirty = _LONGEST, True
            logger.info("the files of session %s were not recorded: %s", self._id, problem or "it took too long")
            return
        if "files" in line:
            self._log.add(line)

    async def _changed_files(self, executor: CommandsAndFiles) -> dict[str, Any]:
        """Return how the changed files differ from those recorded last, as a part of a line."""
        self._activity, self._is_dirty = executor.activity, False
        changes, tree = await executor.changes_and_tree()
        now: dict[str, RecordedFile] = {}
        for change in changes[:_MAX_FILES]:
            seen, known = tree.get(change.path), self._read.get(change.path)
            if seen is not None and known is not None and known[0] == seen:
                now[change.path] = known[1]
                continue
            content = None
            if seen is not None and seen.kind == "file" and seen.size <= _MAX_HASHED:
                content = await executor.read_file(change.path)
            digest = await self._keep(content) if seen is not None else ""
            first = await self._original(executor, change.path) if change.kind != "added" else ""
            entry = now[change.path] = (change.kind, change.size, digest, first)
            if seen is not None:
                self._read[change.path] = (seen, entry)
        before, self._entries = self._entries, now
        changed = {path: entry for path, entry in now.items() if before.get(path) != entry}
        gone = [path for path in before if path not in now]
        left_out = {"left_out": len(changes) - _MAX_FILES} if len(changes) > _MAX_FILES else {}
        parts = ({"set": changed} if changed else {}) | ({"gone": gone} if gone else {})
        return {"files": parts | left_out} if parts else {}

    async def _original(self, executor: CommandsAndFiles, path: str) -> str:
        if path in self._read:
            return self._read[path][1][3]
        content = await asyncio.to_thread(executor.original, path)
        return "" if content is None else await self._keep(content)

    async def _keep(self, content: bytes | None) -> str:
        """Return the digest of a content, and keep it if it is a small text. `~` stands before one that is not kept."""
        if content is None:
            return ""
        try:
            text = content.decode("utf-8") if len(content) <= MAX_TEXT and b"\0" not in content else None
        except UnicodeDecodeError:
            text = None
        digest = hashlib.sha256(content).hexdigest()
        if text is None:
            return f"~{digest}"
        if digest not in self._texts:
            self._text_bytes += len(content)
            if self._text_bytes > _MAX_TEXTS:
                return f"~{digest}"
            self._texts.add(digest)
            await self._store.put(text_key(self._id, digest), self._redact(text).encode("utf-8"))
        return digest

    # --- writing ----------------------------------------------------------------------------------------------------

    def _line(self, kind: str, step: Step | None) -> dict[str, Any]:
        line: dict[str, Any] = {"at": time.time(), "kind": kind}
        if step is not None:
            line["step"] = step.id
            if step.outcome is not None:
                line["at"] = step.started_at + step.duration
        return line

    async def _encode(self, lines: list[dict[str, Any]]) -> list[bytes]:
        if self._parent is not None:
            parent, self._parent = self._parent, None
            await self._copy_texts(lines[0], parent)
        seq = await self._last_seq()
        return [_encode({"seq": seq, **line}) for line in lines]

    async def _last_seq(self) -> int:
        """Return the number of the conversation's last entry, by which a state is found later."""
        if "carrel.conversation.store" in sys.modules:
            with suppress(SessionNotFound):
                return await self._storage.get_session_store().last_seq(self._id)
        return 0

    async def _copy_texts(self, line: dict[str, Any], parent: Recording) -> None:
        """Copy the texts of files, so that a fork outlives the session that it comes from."""
        entries: Mapping[str, RecordedFile] = line.get("files", {}).get("set", {})
        for digest in {digest for entry in entries.values() for digest in entry[2:] if digest and digest[0] != "~"}:
            data = await parent._store.get(text_key(parent._id, digest))
            if data is not None:
                await self._store.put(text_key(self._id, digest), data)

    async def flush(self, *, is_busy: bool) -> None:
        """Look at the files now if that is due, unless code runs, and write what has been noted so far."""
        if not is_busy:
            await self._look_if_due()
        await self._log.flush()

    async def close(self, *, is_busy: bool, is_paused: bool = False) -> None:
        """Look at the files once more if that is due, unless code still runs, and write everything."""
        if is_paused and not is_busy:
            await self.note("pause")
        if is_busy and self._looking is not None:
            self._looking.cancel()
        await self.flush(is_busy=is_busy)

    async def _look_if_due(self) -> None:
        if self._looking is not None and not self._looking.done():
            self._is_urgent.set()
            await asyncio.wait({self._looking})


def _encode(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line)
    except TypeError:  # A name that is not valid Unicode.
        return orjson.dumps(escape_surrogates(line))
