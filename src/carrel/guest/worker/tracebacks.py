"""Tracebacks of the user's code: their own lines with the source, without frames of this program and of libraries."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from traceback import StackSummary, TracebackException

_HERE = os.path.dirname(os.path.abspath(__file__))
_MAX_LENGTH = 40_000
_PATHS = sysconfig.get_paths()
_FOLDERS = (_HERE, *(_PATHS[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")))
_HIDDEN = ["<frozen ", *(path + os.sep for path in (*_FOLDERS, *map(os.path.realpath, _FOLDERS)))]
"""How the file names of hidden frames begin."""
_COMPILED = (".pyx", ".pxi", ".pxd")
"""Sources of compiled packages: their frames name files that do not exist here."""
_CELL = re.compile(r"(<cell \d+) of \d+>")
"""A cell's file name where several sessions share a process; the session's number is left out."""

_NOT_AWAITABLE = re.compile(r"can't be (used in 'await' expression|awaited)|a coroutine or an awaitable is required")
_HOST_CALL = re.compile(r"\b(tools|workflows|skills|artifacts|deps)\.")
_NO_AWAIT = (
    "A plain call waits by itself and returns its value: leave out `await`, or write `await NAME.call_async(…)`."
)
_NOT_PYTHON = (
    ("```", "Code is plain Python: leave out the ``` around it."),
    ("!", "There is no `!` here: deps.add('NAME') installs a package, subprocess.run(…) runs a command."),
    ("%", "There are no % commands here, only Python: deps.add('NAME') installs a package."),
    ("?", "There is no `?` here: help(NAME) describes a name."),
)
"""How lines begin in chats and notebooks that are not Python, and what to write instead."""
_NO_DEBUGGER = "A debugger cannot ask for input here: print what you want to see."


def hide_folder(folder: str) -> None:
    """Leave out the frames of files in this folder of packages from now on."""
    for path in (folder, os.path.realpath(folder)):
        if path + os.sep not in _HIDDEN:
            _HIDDEN.append(path + os.sep)


def format_exception(error: BaseException, also_hidden: tuple[str, ...] = ()) -> str:
    """The traceback as Python prints it, without hidden frames and those of files that begin with `also_hidden`."""
    try:
        trace = TracebackException(type(error), error, error.__traceback__, limit=-2000)
        _strip(trace, set(), (*_HIDDEN, *also_hidden))
        hint = _hint(error, trace)
        text = "".join(trace.format()).rstrip("\n") + (f"\n{hint}" if hint else "")
    except Exception as second:  # noqa: BLE001 - the exception's own __str__ may raise anything
        text = f"{type(error).__name__} (formatting it raised {type(second).__name__})"
    if len(text) > _MAX_LENGTH:
        cut = len(text) - _MAX_LENGTH
        text = f"{text[: _MAX_LENGTH // 2]}\n… {cut} characters left out …\n{text[-_MAX_LENGTH // 2 :]}"
    return text


def _hint(error: BaseException, trace: TracebackException) -> str:
    """What to write instead, where the code was written for a chat, a notebook or an asynchronous interface."""
    if isinstance(error, SyntaxError):
        line = (error.text or "").strip()
        return next((hint for mark, hint in _NOT_PYTHON if line.startswith(mark)), "")
    if type(error) is ModuleNotFoundError and error.name and "." not in error.name:
        return f"deps.add({error.name!r}) installs the package of this name; some modules are in one with another name."
    if type_name(error) == "BdbQuit":
        return _NO_DEBUGGER
    if type(error) is TypeError and _NOT_AWAITABLE.search(str(error)) and trace.stack:
        return _NO_AWAIT if _HOST_CALL.search(trace.stack[-1].line or "") else ""
    return ""


def worker_traceback(error: BaseException) -> str:
    """The traceback of an exception in the worker itself; its files are named without their folder on the host."""
    trace = TracebackException(type(error), error, error.__traceback__)
    for frame in trace.stack:
        if frame.filename.startswith(_HERE):
            frame.filename = os.path.relpath(frame.filename, os.path.dirname(_HERE))
    return "".join(trace.format(chain=False)).rstrip("\n")


def thread_excepthook(args: threading.ExceptHookArgs) -> None:
    """What Python prints when a thread ends by an exception, in the same form."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit) and sys.stderr is not None:
        name = args.thread.name if args.thread is not None else "unknown"
        sys.stderr.write(f"Exception in thread {name}:\n{format_exception(args.exc_value)}\n")


def is_plain_interrupt(error: BaseException | None) -> bool:
    """Whether formatting this KeyboardInterrupt runs no code but Python's own, and so comes to an end."""
    if type(error) is not KeyboardInterrupt:
        return False
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if type(error).__module__ not in ("builtins", "asyncio.exceptions"):
            return False
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return True


def format_late_exception(error: BaseException) -> str:
    """An exception raised while an outcome was formatted; of an interrupt that follows another, the first."""
    first = error
    while is_plain_interrupt(first) and isinstance(first.__context__, KeyboardInterrupt):
        first = first.__context__
    return format_exception(first) if first is not error else f"{type_name(error)}: while the result was made"


def type_name(error: BaseException) -> str:
    """The name of an exception's class."""
    name = type(error).__name__
    return name if isinstance(name, str) else "Exception"


def _strip(trace: TracebackException, seen: set[int], hidden: tuple[str, ...]) -> None:
    if id(trace) in seen:
        return
    seen.add(id(trace))
    shown = [
        frame for frame in trace.stack if not frame.filename.startswith(hidden) and not _is_compiled(frame.filename)
    ]
    for frame in shown:
        frame.filename = _CELL.sub(r"\1>", frame.filename)
    if isinstance(getattr(trace, "filename", None), str):
        trace.filename = _CELL.sub(r"\1>", trace.filename)  # of a SyntaxError
    trace.stack = StackSummary.from_list(shown)
    for inner in (trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())):
        if inner is not None:
            _strip(inner, seen, hidden)


def _is_compiled(filename: str) -> bool:
    return filename.endswith(_COMPILED) and not os.path.isabs(filename)
