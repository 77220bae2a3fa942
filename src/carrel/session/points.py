"""What a session's variables and files were at a point: an entry number, a checkpoint id, a label, `start` or `now`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from carrel.errors import PointNotFound, SessionNotFound
from carrel.execution.executor import FileEntry
from carrel.execution.results import RecordedVariable
from carrel.session.recording import RecordedFile, states_key, text_key
from carrel.session.storage import StorageBackend, store_of
from carrel.storage.base import Store

START, NOW = "start", "now"
_LONGEST_DIFF = 20_000
"""Lines of a text that is compared line by line."""

Change = Literal["same", "perhaps", "new", "gone", "changed"]
"""`perhaps`: equal as far as it was looked at."""


@dataclass(frozen=True)
class Point:
    """A point of a session."""

    name: str
    seq: int | None = None
    """The last entry of the conversation that belongs to it; None for the end of the log."""
    lines: int | None = None
    """How many recorded lines belong to it; None where that follows from `seq`."""


@dataclass
class RecordedState:
    """What was recorded last before a point."""

    session_id: str
    """Whose records these are: for a point before a fork, those of the session that it comes from."""
    at: float | None = None
    """When it was recorded; None where nothing was."""
    step: str = ""
    """The step of the trace after which it was."""
    variables: dict[str, RecordedVariable] = field(default_factory=dict)
    variables_left_out: int = 0
    changed_by: dict[str, str] = field(default_factory=dict)
    """For each variable, the step that made it what it is."""
    files: dict[str, RecordedFile] = field(default_factory=dict)
    files_left_out: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Apply the next line."""
        self.at, self.step = float(line["at"]), str(line.get("step") or self.step)
        variables, files = line.get("variables"), line.get("files")
        if variables is not None:
            for name, entry in variables.get("set", {}).items():
                self.variables[name] = RecordedVariable(*entry)
                self.changed_by[name] = self.step
            for name in variables.get("gone", ()):
                self.variables.pop(name, None)
            self.variables_left_out = variables.get("left_out", 0)
        if files is not None:
            for path, (kind, size, digest, first) in files.get("set", {}).items():
                self.files[path] = (kind, size, digest, first)
            for path in files.get("gone", ()):
                self.files.pop(path, None)
            self.files_left_out = files.get("left_out", 0)


async def find_point(storage: StorageBackend, session_id: str, text: str) -> Point:
    """Return the point of a session that a text names; PointNotFound."""
    conversations = storage.get_session_store()
    if text == START:
        return Point(text, 0, 0)
    if text in (NOW, ""):
        return Point(NOW)
    if text.isascii() and text.isdigit() and len(text) < 16:
        try:
            last = await conversations.last_seq(session_id)
        except SessionNotFound:
            last = 0
        if int(text) > last:
            raise PointNotFound(f"there is no entry {int(text)}; the last one is {last}")
        return Point(text, int(text))
    lines = await _lines(store_of(storage), session_id)
    for number, line in reversed(list(enumerate(lines, 1))):
        if line.get("kind") == "checkpoint" and text in (line.get("point"), line.get("label")):
            return Point(text, int(line["seq"]), number)
    try:
        labels = await conversations.labels(session_id)
    except SessionNotFound:
        labels = []
    for label in reversed(labels):
        if label["text"] == text:
            return Point(text, int(label["at_seq"]))
    raise PointNotFound(f"{text[:100]!r} is no point: give an entry number, a checkpoint id, a label, start or now")


@dataclass(frozen=True)
class RecordedPoint:
    """A checkpoint, with what was recorded up to it."""

    id: str
    label: str
    seq: int
    """The last entry of the conversation then."""
    at: float
    variables: int
    """How many there were."""
    files: int
    """How many differed from the start."""


async def recorded_checkpoints(store: Store, session_id: str) -> list[RecordedPoint]:
    """Return the checkpoints that were recorded, oldest first."""
    state, found = RecordedState(session_id), []
    for line in await _lines(store, session_id):
        state.add(line)
        if line.get("kind") == "checkpoint" and line.get("point"):
            counts = len(state.variables), len(state.files)
            label = str(line.get("label") or "")
            found.append(RecordedPoint(str(line["point"]), label, int(line["seq"]), float(line["at"]), *counts))
    return found


async def read_state(store: Store, session_id: str, point: Point) -> RecordedState:
    """Return what was recorded of a session up to a point."""
    state = RecordedState(session_id)
    lines = await _lines(store, session_id)
    if point.lines is not None:
        lines = lines[: point.lines]
    elif point.seq is not None:
        parent = lines[0].get("parent") if lines else None
        if parent is not None and point.seq < int(lines[0]["seq"]):
            return await read_state(store, str(parent), point)
        lines = [line for line in lines if int(line["seq"]) <= point.seq]
    for line in lines:
        state.add(line)
    return state


async def _lines(store: Store, session_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if await store.stamp(states_key(session_id)) is None:
        return found
    async for block in store.read(states_key(session_id), 1):
        for record in block.records:
            try:
                line = orjson.loads(record)
            except ValueError:
                continue  # A damaged line: what it set is known again with the next change.
            if isinstance(line, dict) and "at" in line and "seq" in line:
                found.append(line)
    return found


# --- differences ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VariableChange:
    """A variable at two points; None where there is none."""

    name: str
    kind: Change
    a: RecordedVariable | None
    b: RecordedVariable | None
    changed_by: tuple[str, str] = ("", "")
    """The steps that made it what it is in A and in B."""


def compare_variables(a: RecordedState, b: RecordedState) -> list[VariableChange]:
    """Return the variables of both states by name, those that differ first."""
    found = []
    for name in sorted({*a.variables, *b.variables}):
        steps = a.changed_by.get(name, ""), b.changed_by.get(name, "")
        found.append(_variable_change(name, a.variables.get(name), b.variables.get(name), steps))
    return sorted(found, key=lambda change: change.kind in ("same", "perhaps"))


def _variable_change(
    name: str, a: RecordedVariable | None, b: RecordedVariable | None, steps: tuple[str, str]
) -> VariableChange:
    kind: Change
    if a is None or b is None:
        kind = "new" if a is None else "gone"
    elif (a.type, a.preview, a.digest) != (b.type, b.preview, b.digest):
        kind = "changed"
    else:
        kind = "same" if a.digest and not a.digest.startswith("~") else "perhaps"
    return VariableChange(name, kind, a, b, steps)


@dataclass(frozen=True)
class RecordedChange:
    """How a file differs from one point to another."""

    path: str
    kind: Literal["added", "modified", "deleted"]
    size: int
    """At the second point."""


@dataclass(frozen=True)
class RecordedDiff:
    """How the files differ from one point to another."""

    changes: Sequence[RecordedChange]
    diff: str
    """A unified diff; files whose text was not kept are only named."""


async def compare_files(store: Store, a: RecordedState, b: RecordedState) -> RecordedDiff:
    """Return how the files of two states differ, which may be of different sessions that began alike."""
    changes, parts = [], []
    for path in sorted({*a.files, *b.files}):
        sides = [_side(path, each, other) for each, other in ((a, b), (b, a))]
        if sides[0] == sides[1]:
            continue
        kind: Literal["added", "modified", "deleted"] = "modified"
        if "" in (sides[0][0], sides[1][0]):
            kind = "added" if sides[0][0] == "" else "deleted"
        changes.append(RecordedChange(path, kind, sides[1][1]))
        texts = [await _text(store, state, side[0]) for state, side in zip((a, b), sides, strict=True)]
        parts.append(_unified(path, kind, *texts))
    return RecordedDiff(changes, "".join(parts))


def _side(path: str, state: RecordedState, other: RecordedState) -> tuple[str, int]:
    """Return the digest and size of a file; `""` where there is none, `?` where it is not known."""
    if (entry := state.files.get(path)) is not None:
        return ("", 0) if entry[0] == "deleted" else (entry[2] or f"? {entry[1]}", entry[1])
    # It is as at the start, which is known of the other state.
    known = other.files[path]
    return ("", 0) if known[0] == "added" else (known[3] or "? start", 0)


async def read_text(store: Store, session_id: str, digest: str) -> bytes | None:
    """Return the text of a file by its digest; None where it was not kept."""
    if not digest or digest[0] in "~?":
        return None
    return await store.get(text_key(session_id, digest))


async def read_recorded(store: Store, state: RecordedState, path: str, at: str) -> bytes | list[FileEntry]:
    """Return the content of a file in a state, or the changed files below a folder; FileNotFoundError names `at`."""
    path = path.removeprefix("./").strip("/").removesuffix("/.")
    if (entry := state.files.get(path)) is not None and entry[0] != "deleted":
        data = await read_text(store, state.session_id, entry[2])
        if data is None:
            raise FileNotFoundError(f"the content of {path!r} at {at!r} was not kept: it is no text, or too large")
        return data
    folder = "" if path in ("", ".") else f"{path}/"
    inside = {name: each for name, each in state.files.items() if name.startswith(folder) and each[0] != "deleted"}
    if not inside and folder:
        raise FileNotFoundError(f"{path!r} was not changed up to {at!r}, so it was not recorded")
    found: dict[str, FileEntry] = {}
    for name, each in sorted(inside.items()):
        first, _, rest = name.removeprefix(folder).partition("/")
        found[first] = FileEntry(first, "folder" if rest else "file", 0 if rest else each[1])
    return list(found.values())


async def _text(store: Store, state: RecordedState, digest: str) -> str | None:
    if not digest:
        return ""
    data = await read_text(store, state.session_id, digest)
    return None if data is None else data.decode("utf-8", "replace")


def _unified(path: str, kind: str, before: str | None, after: str | None) -> str:
    head = f"diff --git a/{path} b/{path}\n"
    if before is None or after is None:
        return head + f"The file was {kind}; its text was not kept.\n"
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    if max(map(len, lines)) > _LONGEST_DIFF:
        return head + f"The file was {kind}; it has too many lines to be compared.\n"
    names = "/dev/null" if kind == "added" else f"a/{path}", "/dev/null" if kind == "deleted" else f"b/{path}"
    body = difflib.unified_diff(*lines, *names)
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in body)
