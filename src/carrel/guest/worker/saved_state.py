"""Variables in a file, so that a session can continue later: written in a fork of the worker, read in a new worker.

The file has a line of JSON, which lists its entries, and then one pickle for each value. Functions, classes and lambdas
of the session are entries with their source. All pickles share one memo, so two names of one object stay that. The host
passes the file on and never reads it: unpickling runs code of the session.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import sys
import types
from typing import Any

from ..channel import Record

FORMAT = 1
LONGEST = 30
"""Seconds that the fork has to write the file."""
_PROTOCOL = 3
"""Of pickle: it numbers what it remembers, so an entry that cannot be read leaves the next ones readable."""
_DEEPEST = 6
_MAX_REASON = 300

Definitions = dict[str, tuple[str, str]]
"""By name: the file name of the cell, and the statement that defines a function, a class or a lambda."""


# --- saving -----------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Modules by name, and the names that every session has by that name."""

    def __init__(self, file: Any, own: dict[str, Any]) -> None:
        super().__init__(file, _PROTOCOL)
        self._own = {id(value): name for name, value in own.items()}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        return ("own", self._own[id(value)]) if id(value) in self._own else None


class _Nowhere(io.RawIOBase):
    """Takes what is written and drops it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def save_and_exit(names: dict[str, Any], own: dict[str, Any], definitions: Definitions, file: int, report: int) -> None:
    """In a fork of the worker: write the variables to `file` and a report for the host to `report`; never returns."""
    answer: Record
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONGEST)
        answer = _save(names, own, definitions, file)
    except BaseException as problem:  # noqa: BLE001 - reported to the host
        answer = {"error": _reason(problem)}
    with contextlib.suppress(OSError), open(report, "w", encoding="utf-8") as out:
        json.dump(answer, out)
    os._exit(0)


def _save(names: dict[str, Any], own: dict[str, Any], definitions: Definitions, file: int) -> Record:
    missing: dict[str, str] = {}
    entries: list[tuple[str, str | None]] = []
    for name, value in list(names.items()):
        if not isinstance(name, str) or name.startswith("__") or (name in own and own[name] is value):
            continue
        if _is_of_session(value):
            filename, source = definitions.get(name, ("", ""))
            code = getattr(value, "__code__", None)
            if source and (code is None or code.co_filename == filename):
                entries.append((name, source))
            else:
                missing[name] = "its source is not known"
            continue
        try:
            _Pickler(_Nowhere(), own).dump(value)
            entries.append((name, None))
        except BaseException as problem:  # noqa: BLE001 - the object's own code may raise anything
            missing[name] = f"{_path_to_failure(name, value, own)}: {_reason(problem)}"
    chunks = _dump_all(names, own, entries, missing)
    listed = [{"name": name, "source": source, "size": len(chunks.get(name, b""))} for name, source in entries]
    header = {"format": FORMAT, "entries": listed, "missing": missing, "cwd": os.getcwd()}
    with open(file, "wb") as out:
        out.write(json.dumps(header).encode("utf-8") + b"\n")
        for name, _ in entries:
            out.write(chunks.get(name, b""))
    return {"kept": [name for name, _ in entries], "missing": missing}


def _dump_all(
    names: dict[str, Any], own: dict[str, Any], entries: list[tuple[str, str | None]], missing: dict[str, str]
) -> dict[str, bytes]:
    """The pickles, which share a memo; one that fails only together with the others is removed from the entries."""
    while True:
        out = io.BytesIO()
        pickler = _Pickler(out, own)
        chunks: dict[str, bytes] = {}
        for name, source in entries:
            if source is not None:
                continue
            start = out.tell()
            try:
                pickler.dump(names[name])
            except Exception as problem:  # noqa: BLE001 - the object's own code may raise anything
                missing[name] = _reason(problem)
                entries.remove((name, source))
                break
            chunks[name] = out.getvalue()[start:] if start == 0 else out.getbuffer()[start:].tobytes()
        else:
            return chunks


def _is_of_session(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, type)) and value.__module__ == "__main__"


def _path_to_failure(path: str, value: Any, own: dict[str, Any], depth: int = 0) -> str:
    """The innermost part that cannot be pickled, as code names it: `jobs[2].sock`."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r:.50}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    elif isinstance(getattr(value, "__dict__", None), dict):
        parts = [(f"{path}.{name}", item) for name, item in vars(value).items()]
    for inner, item in parts if depth < _DEEPEST else ():
        try:
            _Pickler(_Nowhere(), own).dump(item)
        except BaseException:  # noqa: BLE001 - the object's own code may raise anything
            return _path_to_failure(inner, item, own, depth + 1)
    return path


def _reason(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"[:_MAX_REASON]
    except Exception:  # noqa: BLE001 - the exception's own __str__ may raise anything
        return type(problem).__name__


# --- loading ----------------------------------------------------------------------------------------------------------


class _Pieces:
    """What an unpickler reads: one pickle after the other."""

    def __init__(self) -> None:
        self.piece = io.BytesIO()

    def read(self, size: int) -> bytes:
        return self.piece.read(size)

    def readline(self) -> bytes:
        return self.piece.readline()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pieces: Any, own: dict[str, Any]) -> None:
        super().__init__(pieces)
        self._own = own

    def persistent_load(self, key: Any) -> Any:
        kind, name = key
        if kind == "module":
            __import__(name)
            return sys.modules[name]
        return self._own[name]


class LoadVariables:
    """Takes the place of a `Cell`: it runs as code does, with its time limit, because unpickling runs code."""

    is_async = harmless = False

    def __init__(self, own: dict[str, Any], definitions: Definitions, file: int) -> None:
        self._own, self._definitions, self._file = own, definitions, file

    async def run_async(self, names: dict[str, Any]) -> Record:
        return self.run(names)

    def run(self, names: dict[str, Any]) -> Record:
        with open(self._file, "rb") as file:
            header = json.loads(file.readline())
            if header["format"] != FORMAT:
                raise ValueError(f"variables in the format {header['format']}; this version reads {FORMAT}")
            pieces, missing = _Pieces(), dict(header["missing"])
            unpickler = _Unpickler(pieces, self._own)
            waiting = [(entry, file.read(entry["size"])) for entry in header["entries"]]
        kept: list[str] = []
        progress = True
        while waiting and progress:  # a definition may need a value that comes later, and a value its class
            failed = []
            for entry, data in waiting:
                name = entry["name"]
                try:
                    if entry["source"] is not None:
                        filename = f"<definition of {name}>"
                        exec(compile(entry["source"], filename, "exec", dont_inherit=True), names)
                        self._definitions[name] = filename, entry["source"]
                    else:
                        pieces.piece = io.BytesIO(data)
                        names[name] = unpickler.load()
                    kept.append(name)
                    missing.pop(name, None)
                except Exception as problem:  # noqa: BLE001 - code of the session may raise anything
                    missing[name] = _reason(problem)
                    failed.append((entry, data))
            progress, waiting = len(failed) < len(waiting), failed
        with contextlib.suppress(OSError):
            os.chdir(header["cwd"])
        return {"kept": kept, "missing": missing}
