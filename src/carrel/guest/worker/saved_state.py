"""Variables in a file, so that a session can continue later: written in a fork of the worker, read in a new worker.

The file has one pickle for each value, then a line of JSON, which lists its entries, and the length of that line.
Functions, classes and lambdas of the session are entries with their source. All pickles share one memo, so two names of
one object stay that. The host passes the file on and never reads it: unpickling runs code of the session.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import signal
import sys
import types
from typing import Any

from ..channel import Record

FORMAT = 2
LONGEST = 30
"""Seconds that the fork has to write the file."""
_PROTOCOL = 3
"""Of pickle: it numbers what it remembers, so an entry that cannot be read leaves the next ones readable."""
_DEEPEST = 6
_MAX_REASON = 300
_LENGTH = 8
"""Bytes at the end of the file, with the length of the list before them."""
_OWN_OF_ENVIRONMENT = ("PWD", "OLDPWD", "SHLVL", "_")

Definitions = dict[str, tuple[str, str]]
"""By name: the file name of the cell, and the statement that defines a function, a class or a lambda."""


class KeptNames:
    """What of a session is saved and loaded."""

    def __init__(self, names: dict[str, Any], own: dict[str, Any], environment: dict[str, str]) -> None:
        self.names, self.own = names, own
        """The variables, and those that every session has."""
        self.definitions: Definitions = {}
        self.environment = environment
        """The environment variables with which it began."""


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


def save_and_exit(session: KeptNames, random_state: Any, file: int, report: int) -> None:
    """In a fork of the worker: write the variables to `file` and a report for the host to `report`; never returns.

    `random_state` is that of the worker: a fork has another one."""
    answer: Record
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONGEST)
        answer = _save(session, random_state, file)
    except BaseException as problem:  # noqa: BLE001 - reported to the host
        answer = {"error": _reason(problem)}
    with contextlib.suppress(OSError), open(report, "w", encoding="utf-8") as out:
        json.dump(answer, out)
    os._exit(0)


class SaveVariables:
    """Takes the place of a `Cell`: it saves in the worker itself, where no fork can be made."""

    is_async = False
    harmless = True

    def __init__(self, session: KeptNames, file: int) -> None:
        self._session, self._file = session, file

    def run(self, names: dict[str, Any]) -> Record:
        return _save(self._session, random.getstate(), self._file)


def _save(session: KeptNames, random_state: Any, file: int) -> Record:
    names, own = session.names, session.own
    missing: dict[str, str] = {}
    entries: list[tuple[str, str | None]] = []
    for name, value in list(names.items()):
        if not isinstance(name, str) or name.startswith("__") or (name in own and own[name] is value):
            continue
        source = _source_of(name, value, session.definitions)
        if source is not None:
            if source:
                entries.append((name, source))
            else:
                missing[name] = "its source is not known"
            continue
        try:
            _Pickler(_Nowhere(), own).dump(value)
            entries.append((name, None))
        except BaseException as problem:  # noqa: BLE001 - the object's own code may raise anything
            missing[name] = f"{_path_to_failure(name, value, own)}: {_reason(problem)}"
    with open(file, "wb") as out:
        state = _process_state(random_state, own)
        out.write(state)
        sizes = _dump_all(session, entries, missing, out, len(state))
        listed = [{"name": name, "source": source, "size": sizes.get(name, 0)} for name, source in entries]
        changed = {name: os.environ.get(name) for name in _changed_environment(session.environment)}
        header = {
            "format": FORMAT,
            "entries": listed,
            "missing": missing,
            "cwd": os.getcwd(),
            "environment": changed,
            "state": len(state),
            "python": sys.version_info[:3],
        }
        line = json.dumps(header).encode("utf-8")
        out.write(line + len(line).to_bytes(_LENGTH, "big"))
    return {"kept": [name for name, _ in entries], "missing": missing}


def _source_of(name: str, value: Any, definitions: Definitions) -> str | None:
    """The source of what is defined by source; empty where that is not known, None for all other values."""
    filename, source = definitions.get(name, ("", ""))
    if isinstance(value, (types.FunctionType, type)):
        if value.__module__ != "__main__":
            return None
        code = getattr(value, "__code__", None)
        return source if source and (code is None or code.co_filename == filename) else ""
    # What a decorator made of a function, such as a cache.
    wrapped = getattr(value, "__wrapped__", None)
    code = getattr(wrapped, "__code__", None)
    return source if source and code is not None and code.co_filename == filename else None


def _changed_environment(before: dict[str, str]) -> list[str]:
    names = {*os.environ, *before} - set(_OWN_OF_ENVIRONMENT)
    return [name for name in sorted(names) if os.environ.get(name) != before.get(name)]


def _process_state(random_state: Any, own: dict[str, Any]) -> bytes:
    """The states of random number generators that belong to no variable."""
    state: dict[str, Any] = {"random": random_state}
    numpy_random = sys.modules.get("numpy.random")
    out = io.BytesIO()
    try:
        if numpy_random is not None:
            state["numpy"] = numpy_random.get_state()
        _Pickler(out, own).dump(state)
    except Exception:  # noqa: BLE001 - a module of that name may be the session's own
        return pickle.dumps({"random": random_state}, _PROTOCOL)
    return out.getvalue()


def _dump_all(
    session: KeptNames, entries: list[tuple[str, str | None]], missing: dict[str, str], out: Any, start: int
) -> dict[str, int]:
    """Write the pickles, which share a memo, and return their sizes. One that fails only together with the others is
    removed from the entries, and all are written again: the next ones may refer to what was in it."""
    while True:
        out.seek(start)
        out.truncate()
        pickler = _Pickler(out, session.own)
        sizes: dict[str, int] = {}
        for name, source in entries:
            if source is not None:
                continue
            begin = out.tell()
            try:
                pickler.dump(session.names[name])
            except OSError:
                raise  # the disk is full
            except Exception as problem:  # noqa: BLE001 - the object's own code may raise anything
                missing[name] = _reason(problem)
                entries.remove((name, source))
                break
            sizes[name] = out.tell() - begin
        else:
            return sizes


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

    def __init__(self, session: KeptNames, file: int) -> None:
        self._session, self._file = session, file

    def run(self, names: dict[str, Any]) -> Record:
        session = self._session
        with open(self._file, "rb") as file:
            header = _read_header(file)
            state = file.read(header["state"])
            waiting = [(entry, file.read(entry["size"])) for entry in header["entries"]]
        for name, value in header["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        pieces, missing = _Pieces(), dict(header["missing"])
        unpickler = _Unpickler(pieces, session.own)
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
                        session.definitions[name] = filename, entry["source"]
                    else:
                        pieces.piece = io.BytesIO(data)
                        names[name] = unpickler.load()
                    kept.append(name)
                    missing.pop(name, None)
                except Exception as problem:  # noqa: BLE001 - code of the session may raise anything
                    missing[name] = _reason(problem)
                    failed.append((entry, data))
            progress, waiting = len(failed) < len(waiting), failed
        before = tuple(header["python"])
        if before[:2] != sys.version_info[:2]:
            for entry, _ in waiting:
                missing[entry["name"]] += f" (it was saved by Python {before[0]}.{before[1]})"
        _restore_process_state(state, session.own)
        with contextlib.suppress(OSError):
            os.chdir(header["cwd"])
        return {"kept": kept, "missing": missing}


def _read_header(file: Any) -> Record:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LENGTH))
    length = int.from_bytes(file.read(_LENGTH), "big")
    if not 0 < length <= end - _LENGTH:
        raise ValueError("the file of the saved variables is damaged")
    file.seek(end - _LENGTH - length)
    header: Record = json.loads(file.read(length))
    if header["format"] != FORMAT:
        raise ValueError(f"the saved variables have format {header['format']}, and this version reads {FORMAT}")
    file.seek(0)
    return header


def _restore_process_state(state: bytes, own: dict[str, Any]) -> None:
    pieces = _Pieces()
    pieces.piece = io.BytesIO(state)
    with contextlib.suppress(Exception):
        found = _Unpickler(pieces, own).load()
        random.setstate(found["random"])
        if "numpy" in found:
            __import__("numpy.random")
            sys.modules["numpy.random"].set_state(found["numpy"])
